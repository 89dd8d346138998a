"""One process per rank: this process runs one PE's stages, over shared memory.

Letters: N nodes, G GPUs a node, W = N * G ranks, E experts, K top-k, T tokens, H hidden.
"""

from __future__ import annotations

import dataclasses
import os
import time
import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from railwave._version import __version__
from railwave.arguments import check_call, check_handle, check_out, plain
from railwave.config import PATHS, TEXT_WORDS, Config
from railwave.errors import PeerError, PeerTimeoutError
from railwave.exchange import CallsDiffer, Exchange, Stages, Wait, combine, dispatch
from railwave.handle import Call, Handle, Received
from railwave.heap import ShmHeap
from railwave.kernels.shape import make_format
from railwave.topology import Topology

DEADLINE_S = 300.0
GRACE_S = 1.0  # how long a rank that gave up waits to hear who else did
BAD_CALL = -1
_RESET_STEP = 1 << 40  # above any epoch; a reset word is (step of the reset) * this + epoch


class Communicator:
    """Dispatch and combine of this rank, together with the other ranks of a group.

    Every method but `close` is collective: all ranks call it, in the same order. The arguments are
    those of `LocalWorld`, and

    Args:
        group: a torch.distributed group of topo.num_ranks ranks; None for the default one. Ranks
            are numbered as in the group.
        deadline_s: how long to wait for another rank, in seconds. Default: the environment's
            RAILWAVE_DEADLINE_S, or 300.

    Raises:
        TypeError, ValueError: an argument breaks a rule, or differs from another rank's; on all
            ranks.
        MemoryError, RuntimeError: shared memory cannot be had; on all ranks.
    """

    def __init__(
        self,
        topo: Topology,
        *,
        num_experts: int,
        top_k: int,
        hidden: int,
        max_tokens_per_rank: int,
        dtype: torch.dtype = torch.bfloat16,
        expert_to_rank: Any = None,
        staging_records: int | None = None,
        paths: Sequence[str] = PATHS,
        group: dist.ProcessGroup | None = None,
        deadline_s: float | None = None,
    ) -> None:
        self.deadline_s = _checked_deadline(deadline_s)
        self._group, self._failed, self._closed = group, False, False
        self._reset_steps = 0  # done so far, two a reset
        self.rank, ranks = _checked_rank(group, topo)
        self.config = Config(
            topo=topo,
            num_experts=num_experts,
            top_k=top_k,
            hidden=hidden,
            max_tokens_per_rank=max_tokens_per_rank,
            dtype=dtype,
            expert_to_rank=expert_to_rank,
            staging_records=staging_records,
            paths=paths,
        )
        self._check_same_config()
        device = torch.device("cpu")
        with torch.inference_mode(False):  # else these tensors could not be used outside it
            self._heap = ShmHeap(self.rank, ranks, self.config.layout, gather=self._gather)
            self._exchange = Exchange(
                self.config, self._heap, self.rank, device=device, deadline_s=self.deadline_s
            )
        self._exchange.alone = True

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _gather(self, value: Any) -> list[Any]:
        values = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(values, value, group=self._group)
        return values

    def _check_same_config(self) -> None:
        config = self.config
        own = {
            "version": __version__,
            "topo": repr(config.topo),
            **{
                name: repr(getattr(config, name))
                for name in ("num_experts", "top_k", "hidden", "max_tokens_per_rank", "dtype")
            },
            "expert_to_rank": repr(config.expert_to_rank),
            "staging_records": repr(config.staging_records),
            "paths": repr(config.paths),
            "deadline_s": repr(self.deadline_s),
        }
        for rank, other in enumerate(self._gather(own)):
            for name, value in own.items():
                if other[name] != value:
                    raise ValueError(
                        f"{name} must be the same on all ranks, got {value} at rank {self.rank} "
                        f"and {other[name]} at rank {rank}"
                    )

    def dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        *,
        path: str = "joint",
    ) -> Received:
        """Send this rank's tokens to the ranks of their experts; see `LocalWorld.dispatch`.

        Raises:
            TypeError, ValueError: an argument breaks a rule. Nothing has moved, and every other
                rank raises `PeerError`; the next call works.
            PeerTimeoutError: another rank did not come in time; `reset` before going on.
        """
        wrong: Exception | None = None
        try:
            call = check_call(self.config, x, topk_idx, topk_weights, path)
        except (TypeError, ValueError) as error:
            wrong, call = error, self._empty_call()
        said = wrong or (
            f"path {call.path}, x {tuple(call.x.shape)} {call.x.dtype}, topk_idx "
            f"{tuple(call.topk_idx.shape)} {call.topk_idx.dtype}"
        )
        return self._run(dispatch(self._exchange, call), call.path, "dispatch", wrong, str(said))

    def _empty_call(self) -> Call:
        none = torch.empty(0, 1)
        fmt = make_format(4, 1, self.config.topo.gpus_per_node)
        return Call(none, none.to(torch.int64), none, "joint", fmt, BAD_CALL)

    def _empty_handle(self) -> Handle:
        topo, fields = self.config.topo, [field.name for field in dataclasses.fields(Handle)]
        load = torch.zeros(topo.nodes, topo.gpus_per_node, dtype=torch.int32)
        known = {"path": "joint", "num_tokens": 0, "num_rows": 0, "out_load": load, "in_load": load}
        known |= {"exchange": self._exchange, "epoch": BAD_CALL}
        return Handle(**{**dict.fromkeys(fields, torch.empty(0)), **known})  # type: ignore[arg-type]

    def combine(self, out: torch.Tensor, handle: Handle) -> torch.Tensor:
        """Sum this rank's tokens' rows; see `LocalWorld.combine`.

        Raises: as `dispatch`, and nothing of a wrong call is returned on any rank.
        """
        wrong: Exception | None = None
        try:
            check_handle(handle, self._exchange, name="handle", received="received")
            check_out(self.config, out, handle, name="out")
        except (TypeError, ValueError) as error:
            wrong, out, handle = error, torch.zeros(0, 1), self._empty_handle()
        agreed = f"{handle.epoch} {handle.path} {out.dtype} {out.shape[1]}"
        status = BAD_CALL if wrong else zlib.crc32(agreed.encode()) & 0x7FFFFFFF
        said = str(wrong or f"dispatch {handle.epoch}, out {tuple(out.shape)} {out.dtype}")
        stages = combine(self._exchange, plain(out), handle, status=status)
        return self._run(stages, handle.path, "combine", wrong, said)

    def _run(self, stages: Stages, path: str, verb: str, wrong: Exception | None, said: str) -> Any:
        """Run a phase's stages; raise what any rank has to say of it, on every rank."""
        self._check_usable()
        pe = self._exchange
        try:
            while True:
                waits, began_s = next(stages)(), time.monotonic()
                if not self._nap(waits, heed=True):
                    self._give_up(waits, path, verb, time.monotonic() - began_s)
        except StopIteration as stop:
            result = stop.value
        except CallsDiffer:
            self._raise_wrong(verb, path, wrong, said)
        if pe.failure():
            self._give_up([], path, verb, self.deadline_s)
        return result

    def _nap(self, waits: list[Wait], *, heed: bool = False) -> bool:
        """Wait for words without burning a core; return False at the deadline.

        The kernels wait for the same words again: their waits end at once, and order memory.

        Args:
            heed: return False also once another rank has given this phase up.
        """
        until, pause_s = time.monotonic() + self.deadline_s, 20e-6
        while self._late(waits):
            if time.monotonic() > until or (heed and self._present()):
                return False
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, 2e-3)
        return True

    def _present(self) -> list[int]:
        """List the ranks that have given this phase up."""
        present = self._heap.region(self.rank, "present", torch.int64)
        return (present >= self._exchange.mark(0)).nonzero().flatten().tolist()

    def _late(self, waits: list[Wait]) -> list[tuple[str, int]]:
        """List (word, index) of the words that have not come."""
        late = []
        for wait in waits:
            words = self._heap.region(self.rank, wait.word, torch.int64)
            behind = torch.zeros(len(words), dtype=torch.bool)
            behind[wait.index] = words[wait.index] < wait.mark
            late += [(wait.word, int(i)) for i in behind.nonzero()]
        return late

    def _give_up(self, waits: list[Wait], path: str, verb: str, waited_s: float) -> None:
        """Say that this rank is here, hear who else is, and raise."""
        self._failed = True
        pe = self._exchange
        gone = self._present()
        self._heap.publish("present", torch.tensor([pe.mark(0)]))
        late = self._late(waits)
        time.sleep(GRACE_S)
        missing = sorted({*range(self.config.topo.num_ranks)} - {*self._present()})
        where = [self._name(word, index, waits, path) for word, index in late[:4]]
        before = f"Ranks {gone} had given up before. " if gone else ""
        raise PeerTimeoutError(
            f"{verb} (call {pe.epoch}, path {path}): rank {self.rank} (node {pe.node}, rail "
            f"{pe.rail}) waited {waited_s:.1f} s for {'; '.join(where) or pe.failure()}. {before}"
            f"Missing ranks: {missing or 'none, they were late'}. Call reset() on all ranks "
            "before going on; a longer wait is deadline_s or RAILWAVE_DEADLINE_S",
            call_number=pe.epoch,
            missing=tuple(missing),
        )

    def _name(self, word: str, index: int, waits: list[Wait], path: str) -> str:
        """Say which word of which rank, in which wave and round."""
        S, pe = self.config.shape, self._exchange
        mark = next(wait.mark for wait in waits if wait.word == word)
        if word in ("notify", "grant", "said"):
            writer = index
        elif word == "arrived":
            writer = index // S.CHUNKS * S.G + pe.local
        else:
            writer = pe.node * S.G + index
        rounds = {this.step: this for this in self.config.rounds(path)}
        this = rounds.get(mark % S.MAX_STEPS)
        place = f", wave {this.wave}, round {this.first // this.records}" if this else ""
        return f"{word} of rank {writer}{place}"

    def _raise_wrong(self, verb: str, path: str, wrong: Exception | None, said: str) -> None:
        texts = self._exchange_texts(verb, path, "!" * bool(wrong) + said)
        if wrong:
            raise wrong from None
        bad = {rank: text[1:] for rank, text in enumerate(texts) if text.startswith("!")}
        if bad:
            raise PeerError(f"nothing moved in {verb}: rank(s) called it wrongly: {bad}") from None
        raise PeerError(
            f"nothing moved in {verb}: calls must agree on all ranks, got {dict(enumerate(texts))}"
        ) from None

    def _exchange_texts(self, verb: str, path: str, text: str) -> list[str]:
        """Return every rank's text, in the order of ranks, cut to what a slot of the heap holds."""
        heap, num_bytes = self._heap, TEXT_WORDS * 8
        cut = text.encode()[:num_bytes].decode(errors="ignore").encode()
        heap.publish(
            "texts", torch.frombuffer(bytearray(cut.ljust(num_bytes, b"\0")), dtype=torch.int64)
        )
        # The slots may be written again only after this rank's next notify: nobody reads too late.
        heap.publish("said", torch.tensor([self._exchange.epoch]))
        waits = [Wait("said", slice(None), self._exchange.epoch)]
        if not self._nap(waits):
            self._give_up(waits, path, verb, self.deadline_s)
        slots = heap.region(self.rank, "texts", torch.uint8).view(-1, num_bytes)
        return [bytes(slot.tolist()).rstrip(b"\0").decode() for slot in slots]

    def reset(self) -> None:
        """Make the object usable after a `PeerTimeoutError`. All ranks call it.

        Raises:
            PeerTimeoutError: a rank did not come in time; call it again when it is back.
        """
        self._check_open()
        pe, wire = self._exchange, self._exchange.kernels.wire
        if self._reset_steps % 2 == 0:
            words = self._reset_step("to start it", pe.epoch)
            # Beyond any epoch in flight, and the same everywhere: also for notify's number, which
            # grows by one a phase at most.
            pe.epoch = max(word % _RESET_STEP for word in words) + 1
        # So that nobody starts another before all have read; with the epoch that they read.
        self._reset_step("to end it", pe.epoch - 1)
        pe.state[wire.EPOCH.value] = pe.epoch
        pe.state[wire.NOTIFIES.value] = pe.epoch
        pe.state[wire.FAILED.value] = 0
        self._failed = False

    def _reset_step(self, what: str, epoch: int) -> list[int]:
        """Meet all ranks at the next step of a reset; return their words, which hold epochs."""
        mark = (self._reset_steps + 1) * _RESET_STEP
        self._heap.publish("reset", torch.tensor([mark + epoch]))
        waits = [Wait("reset", slice(None), mark)]
        if not self._nap(waits):
            missing = tuple(index for _, index in self._late(waits))
            raise PeerTimeoutError(
                f"reset (after call {self._exchange.epoch}): rank {self.rank} waited "
                f"{self.deadline_s} s for ranks {list(missing)} {what}. Call it again when they "
                "are back; a longer wait is deadline_s or RAILWAVE_DEADLINE_S",
                call_number=self._exchange.epoch,
                missing=missing,
            )
        self._reset_steps += 1
        return self._heap.region(self.rank, "reset", torch.int64).tolist()

    def close(self) -> None:
        """Give the shared memory back. Not collective; nothing works afterwards."""
        if not self._closed:
            self._closed = True
            self._heap.close()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("this communicator is closed")

    def _check_usable(self) -> None:
        self._check_open()
        if self._failed:
            raise RuntimeError("this communicator has timed out: call reset() on all ranks first")


def _checked_deadline(deadline_s: float | None) -> float:
    name, value = "deadline_s", deadline_s
    if deadline_s is None:
        name, value = "RAILWAVE_DEADLINE_S", os.environ.get("RAILWAVE_DEADLINE_S", DEADLINE_S)
    try:
        seconds = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a number of seconds, got {value!r}") from None
    if not 0 < seconds < 1e9:
        raise ValueError(f"{name} must be a positive number of seconds, got {value!r}")
    return seconds


def _checked_rank(group: dist.ProcessGroup | None, topo: Topology) -> tuple[int, int]:
    if not isinstance(topo, Topology):
        raise TypeError(f"topo must be a railwave.Topology, got {type(topo).__name__}")
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "torch.distributed must be initialised first, for example by "
            'torch.distributed.init_process_group("gloo") under torchrun'
        )
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise ValueError("group must contain this rank")
    if ranks != topo.num_ranks:
        raise ValueError(f"group must have topo.num_ranks = {topo.num_ranks} ranks, got {ranks}")
    return rank, ranks
