"""Run the phases of one rank to their ends, and know which came there.

On a CPU the host waits between stages; on a GPU kernels wait, and with static shapes the host only
launches them: what went wrong is found by `check`, or at the next call.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from railwave import tracing
from railwave.agreement import raise_differ
from railwave.errors import PeerError, ReceiveOverflowError
from railwave.exchange import CallsDiffer, Exchange, Failure, Stages, refuse
from railwave.heap import NvshmemHeap, ShmHeap
from railwave.meeting import Meeting
from railwave.watch import AFTER, Watch, raise_failure


class Phases:
    """The phases of one rank: dispatches and combines, in the order in which all ranks call them.

    Args:
        exchange: this rank's PE.
        heap: its memory, which names a trace.
        deadline_s: how long another rank may take, in seconds.
    """

    def __init__(self, exchange: Exchange, heap: ShmHeap | NvshmemHeap, deadline_s: float) -> None:
        self.meeting, self.watch = Meeting(exchange, deadline_s), Watch(exchange)
        self._exchange, self._heap = exchange, heap
        self._on_gpu = exchange.device.type == "cuda"
        self._broken = False
        self._finished = 0  # the number of the last phase that came to its end

    def refuse(self, verb: str, wrong: Exception, decided_there: bool = False) -> Any:
        """Take part in a phase that this rank called wrongly: raise `wrong`, all others theirs."""
        stages = refuse(self._exchange)
        return self.run(stages, verb, str(wrong), wrong, decided_there=decided_there)

    def run(
        self,
        stages: Stages,
        verb: str,
        said: str,
        wrong: Exception | None = None,
        *,
        decided_there: bool = False,
    ) -> Any:
        """Run a phase's stages; raise what any rank has to say of it, on every rank.

        Args:
            said: of this rank's call, for the others' errors.
            wrong: what is wrong with it.
            decided_there: the device finds what is wrong, and the host does not wait to hear it.
        """
        if self.watch.pending and not (decided_there and not wrong):
            self.check()  # what failed before is not this call's
        try:
            with self._exchange.config.on_device(), tracing.world(self._heap):
                if decided_there and not wrong:
                    return self._launch_stages(stages)
                return self._run_stages(stages, verb, said, wrong, decided_there)
        finally:
            self._exchange.put_words = None  # the handle's: nothing of a call is kept here

    def _launch_stages(self, stages: Stages) -> Any:
        """Launch a phase whose end nobody waits for."""
        epoch, capturing = self._exchange.epoch, torch.cuda.is_current_stream_capturing()
        self._broken = True  # until the end is reached
        try:
            while True:
                next(stages)
        except StopIteration as stop:
            result = stop.value
        if capturing:
            self._exchange.epoch = epoch  # the device has not run it
        self.watch.launched(captured=capturing)
        self._broken = False
        return result

    def _run_stages(
        self, stages: Stages, verb: str, said: str, wrong: Exception | None, decided_there: bool
    ) -> Any:
        meeting, number = self.meeting, self._exchange.epoch + 1
        self._broken = True  # until the end is reached
        try:
            while True:
                waits, began_s = next(stages), time.monotonic()
                # On a CPU the kernels wait again for words that are there; on a GPU they wait.
                if not self._on_gpu and not meeting.wait(waits()):
                    meeting.give_up(verb, meeting.late(waits()), time.monotonic() - began_s)
        except StopIteration as stop:
            result = stop.value
        except CallsDiffer as differ:
            if decided_there and wrong:
                raise wrong from None  # the others hear of it when they look, and then need a reset
            if self._on_gpu and not wrong and differ.failure.static_there:
                raise PeerError(
                    f"nothing moved in {verb}: rank {differ.failure.pe} called it with static "
                    f"shapes, this rank without; {AFTER}"
                ) from None
            self.watch.handled()
            texts = meeting.exchange_texts(verb, f"{'wrong' if wrong else 'right'}: {said}")
            self._end()
            raise_differ(verb, wrong, texts)
        except ReceiveOverflowError:
            self.watch.handled()
            self._end()
            raise
        except BaseException:
            meeting.say_given_up(number)
            raise
        failure = self._exchange.failure()
        if failure:
            late = [(failure.word, failure.pe, failure.expected)]
            meeting.give_up(verb, late, meeting.deadline_s)
        self._end()
        return result

    def _end(self) -> None:
        self._broken, self._finished = False, self._exchange.epoch
        self.watch.went_well()

    def repeat(self, repeat: Callable[..., Any], kind: Any, *args: Any) -> Any:
        """Repeat a call as it was launched before; None where it must be an ordinary one."""
        if kind is None:
            return None
        try:
            again = repeat(kind, *args)
        except BaseException:
            self._broken = True  # some kernels are launched, perhaps
            raise
        if again is not None:
            self.watch.launched(captured=False)
        return again

    def check(self) -> None:
        """Wait for the GPU; raise what went wrong in phases with static shapes."""
        self._check_not_broken()
        with self._exchange.config.on_device():
            failure = self._look(usable=True)
            if failure:
                self._broken = True
                raise_failure(failure, self._exchange, self.meeting)

    def _look(self, *, usable: bool) -> Failure | None:
        """Wait for the GPU; return what went wrong, and know what calls are finished.

        Args:
            usable: no call was cut short on the host, so that without a failure all are finished.
        """
        failure = self.watch.look()
        if failure:
            self._finished = failure.epoch - 1
        elif self._on_gpu and usable:
            self._finished = self._exchange.epoch
        return failure

    def reset(self) -> int:
        """Make phases possible after one that failed; return the last that all ranks ended."""
        usable, self._broken = not self._broken, True  # its epoch is told: no phase in between
        with self._exchange.config.on_device():
            self._look(usable=usable)  # kernels of an interrupted call run to their end
            epoch, finished = self.meeting.reset(finished=self._finished)
            self._exchange.start_at(epoch + 1)
            self.watch.start_again()
        self._broken, self._finished = False, finished
        return finished

    def check_usable(self) -> None:
        """Raise what keeps a phase from being run."""
        self._check_not_broken()
        if self.watch.alarmed:
            if self._on_gpu and torch.cuda.is_current_stream_capturing():
                raise RuntimeError("a call before this one failed: check() before a graph")
            self.check()

    def _check_not_broken(self) -> None:
        if self._broken:
            raise RuntimeError(
                "a call of this communicator did not come to its end (it timed out, was "
                "interrupted, or raised what was shown then): call reset() on all ranks first"
            )
