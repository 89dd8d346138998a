"""How ranks meet beside the kernels: words that the host writes and polls.

| word | rank -> all; its value | read by |
|---|---|---|
| given_up | the first mark of the phase that I gave up | whoever waits in that phase |
| said | the number of the call of which my text is in your heap | all, when calls differ |
| reset | (steps of resets begun) * RESET + an epoch and its lag | all, in `reset` and in a phase |

As all words, each slot has one writer and only grows. Nothing here uses torch.distributed.
"""

from __future__ import annotations

import time
from typing import NoReturn

import torch

from railwave.config import TEXT_WORDS
from railwave.errors import PeerTimeoutError
from railwave.exchange import Exchange, Late, Wait
from railwave.tracing import waited

GRACE_S = 1.0  # how long a rank that gave up waits to hear who else did
RESET = 1 << 44  # above any (epoch * LAGS + lag)
LAGS = 1 << 8  # above any number of phases that one rank is behind another


class Meeting:
    """This rank's side of every meeting; `exchange` is its PE."""

    def __init__(self, exchange: Exchange, deadline_s: float) -> None:
        self.exchange, self.deadline_s = exchange, deadline_s
        self._reset_steps = 0  # ended so far, two a reset
        self._epoch, self._finished = 0, 0  # of the reset that is going on

    def rehearse(self) -> None:
        """Do once what a time-out does, so that on a GPU its kernels are loaded by then."""
        self.exchange.heap.publish("given_up", [0])
        self.late([Wait("said", slice(None), 1)])
        self._gone()

    def wait(self, waits: list[Wait], *, heed: bool = True) -> bool:
        """Wait for words without burning a core; return False at the deadline.

        Args:
            heed: return False also once another rank has given this phase up.
        """
        until, pause_s = time.monotonic() + self.deadline_s, 20e-6
        began_ns, missing_ns = time.monotonic_ns(), {}  # by word and rank: when last seen missing
        came = True
        while late := self.late(waits):
            missing_ns |= dict.fromkeys((one[:2] for one in late), time.monotonic_ns())
            if time.monotonic() > until or (heed and self._gone()):
                came = False
                break
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, 2e-3)
        if missing_ns:
            waited(self.exchange, missing_ns, began_ns)
        return came

    def late(self, waits: list[Wait]) -> list[Late]:
        """List the words that have not come."""
        return self.exchange.late(waits)

    def _words(self, name: str) -> torch.Tensor:
        return self.exchange.heap.region(self.exchange.pe, name, torch.int64)

    def _gone(self, number: int | None = None) -> list[int]:
        """List the ranks that have given this phase up, or reset without having finished it."""
        number = self.exchange.epoch if number is None else number
        given_up = self._words("given_up") >= number * self.exchange.config.shape.MAX_STEPS
        words = self._words("reset")
        told = words % RESET
        unfinished = told // LAGS - told % LAGS < number
        resets = (words >= (self._reset_steps + 1) * RESET) & unfinished
        return (given_up | resets).nonzero().flatten().tolist()

    def say_given_up(self, number: int | None = None) -> None:
        """Tell all that this rank has given the phase up; `number`: it may not have begun here."""
        mark = self.exchange.mark(0)
        if number is not None:
            mark = max(mark, number * self.exchange.config.shape.MAX_STEPS)
        self.exchange.heap.publish("given_up", [mark])

    def give_up(
        self, verb: str, late: list[Late], waited_s: float, *, call: int | None = None
    ) -> NoReturn:
        """Say that this rank is here, hear who else is, and raise.

        Args:
            call: the number of the phase, if it is not the last one that was launched.
        """
        pe = self.exchange
        steps = pe.config.shape.MAX_STEPS
        number, path = (pe.epoch, f", path {pe.path}") if call is None else (call, "")
        gone = self._gone(number)
        self.say_given_up()
        time.sleep(GRACE_S)
        # A rank that has notified of the next phase has come to the end of this one.
        beyond = self._words("notify") >= (number + 1) * steps
        here = {*self._gone(number), *beyond.nonzero().flatten().tolist()}
        missing = sorted({*range(pe.config.topo.num_ranks)} - here)
        before = f"Ranks {gone} had given up before. " if gone else ""
        raise PeerTimeoutError(
            f"{verb} (call {number}{path}): rank {pe.pe} (node {pe.node}, rail {pe.rail}) waited "
            f"{waited_s:.1f} s for {'; '.join(self._name(w, number) for w in late[:4])}. "
            f"{before}Missing ranks: {missing or 'none, they were late'}. Call reset() on all "
            "ranks before going on; a longer wait is deadline_s or RAILWAVE_DEADLINE_S",
            call_number=number,
            missing=tuple(missing),
        )

    def _name(self, late: Late, number: int) -> str:
        """Say which word of which rank, and for a word of a round in which wave and round."""
        word, writer, mark = late
        pe, config = self.exchange, self.exchange.config
        text = f"{word} of rank {writer}"
        of_round = word in ("packed", "grant", "arrived", "returned", "taken")
        if not of_round or number != pe.epoch:  # of an earlier phase, whose path nobody kept
            return text
        rounds = config.rounds(pe.path)
        if pe.path == "granted" and word == "packed" and pe.beside:
            rounds = config.packs(rounds[0])  # a step a wave
        this = rounds[mark % config.shape.MAX_STEPS - 1]
        wave = f"wave {this.wave}"
        if this.num_peers > 1:  # all waves at once: a word between two nodes is of one of them
            away = writer // config.shape.G - pe.node
            away = away if word == "grant" else -away
            wave = f"wave {away % config.shape.N}" if away else "all waves"
        return f"{text}, {wave}, round {this.first // this.records}"

    def exchange_texts(self, verb: str, text: str) -> list[str]:
        """Return every rank's text, in the order of ranks, cut to what a slot of the heap holds.

        Raises:
            PeerTimeoutError: a rank does not say its own.
        """
        pe, num_bytes, began_s = self.exchange, TEXT_WORDS * 8, time.monotonic()
        # A slot may be written again: its reader reads before it notifies of another phase, and
        # its writer has then waited for that.
        cut = text.encode(errors="replace")[:num_bytes].decode(errors="ignore").encode()
        pe.heap.publish("texts", memoryview(cut.ljust(num_bytes, b"\0")).cast("q").tolist())
        pe.heap.publish("said", [pe.epoch])
        waits = [Wait("said", slice(None), pe.epoch)]
        if not self.wait(waits):
            self.give_up(verb, self.late(waits), time.monotonic() - began_s)
        slots = pe.heap.region(pe.pe, "texts", torch.uint8).view(-1, num_bytes).tolist()
        return [bytes(slot).rstrip(b"\0").decode() for slot in slots]

    def reset(self, *, finished: int) -> tuple[int, int]:
        """Meet all ranks twice.

        Args:
            finished: the number of the last phase that this rank finished.

        Returns:
            (largest epoch of any rank, number of the last phase that all ranks finished).

        Raises:
            PeerTimeoutError: a rank does not come; to be called again.
        """
        if self._reset_steps % 2 == 0:
            words = self._reset_step("to start it", self.exchange.epoch, finished)
            told = [divmod(word % RESET, LAGS) for word in words]
            self._epoch = max(epoch for epoch, _ in told)
            self._finished = min(epoch - lag for epoch, lag in told)
        # So that nobody starts another before all have read; with what they read.
        self._reset_step("to end it", self._epoch, self._finished)
        return self._epoch, self._finished

    def _reset_step(self, what: str, epoch: int, finished: int) -> list[int]:
        """Meet all ranks at the next step of a reset; return their words."""
        mark = (self._reset_steps + 1) * RESET
        lag = min(epoch - finished, LAGS - 1)
        self.exchange.heap.publish("reset", [mark + epoch * LAGS + lag])
        waits = [Wait("reset", slice(None), mark)]
        if not self.wait(waits, heed=False):
            missing = tuple(writer for _, writer, _ in self.late(waits))
            raise PeerTimeoutError(
                f"reset (after call {self.exchange.epoch}): rank {self.exchange.pe} waited "
                f"{self.deadline_s} s for ranks {list(missing)} {what}. Call it again when they "
                "are back; a longer wait is deadline_s or RAILWAVE_DEADLINE_S",
                call_number=self.exchange.epoch,
                missing=missing,
            )
        self._reset_steps += 1
        return self._words("reset").tolist()
