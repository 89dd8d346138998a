"""What goes wrong in calls that the host does not wait for: seen later, raised on every rank."""

from __future__ import annotations

import torch

from railwave.errors import PeerError
from railwave.exchange import Exchange
from railwave.exchange.pe import Failure
from railwave.handle import Handle
from railwave.meeting import Meeting

AFTER = "call reset() on all ranks before going on"


class Watch:
    """This rank's calls with static shapes: whether they went well.

    Args:
        exchange: its PE, whose kernels set a flag of the host's when a phase fails.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._on_gpu = exchange.device.type == "cuda"
        self._pending = False  # calls, or graphs of calls, that nobody has looked at
        self._captured = False  # so that a graph may have run phases that the host has not seen
        self._seen = 0  # phases launched before the last look that found nothing wrong
        self._failed: list[range] = []  # of phases by `serial`: their handles may hold junk
        self._flag = torch.zeros(1, dtype=torch.int64, device="cpu", pin_memory=self._on_gpu)
        self._raised = self._flag.numpy()
        if self._on_gpu:
            place = exchange.kernels.wire.HOST_FLAG.value
            exchange.state[place] = self._flag.data_ptr()

    @property
    def alarmed(self) -> bool:
        """Whether a phase has failed since the last look."""
        return bool(self._raised[0])

    @property
    def pending(self) -> bool:
        """Whether there may be something to look at."""
        return self._pending or self._captured

    def launched(self, *, captured: bool) -> None:
        """Note a call that nobody waits for."""
        self._pending = True
        self._captured |= captured

    def look(self) -> Failure | None:
        """Wait for the device; return why the first phase failed that did, since the last look."""
        if not self._on_gpu:
            return None
        pe = self._exchange
        torch.cuda.synchronize(pe.device)
        state = pe.state.tolist()
        pe.epoch = state[pe.kernels.wire.EPOCH.value]  # graphs run phases without the host
        failure = pe.failure()
        if failure is None:
            self._pending, self._seen = False, pe.serial
            self._flag.zero_()
        else:
            self._failed.append(range(self._seen + 1, pe.serial + 1))
        return failure

    def went_well(self) -> None:
        """Note that all phases so far did, as the host has heard."""
        self._seen = self._exchange.serial

    def start_again(self) -> None:
        """Forget what went wrong: after a reset."""
        self._pending, self._seen = False, self._exchange.serial
        self._flag.zero_()

    def handled(self) -> None:
        """Take back the flag of a phase whose failure all ranks were told."""
        self._flag.zero_()

    def check_handle(self, handle: Handle) -> None:
        """Refuse the handle of a dispatch that may have failed.

        Raises:
            ValueError: it is one.
        """
        if any(handle.serial in phases for phases in self._failed):
            raise ValueError(
                f"handle must be of a dispatch that went well; call {handle.epoch} was not seen to"
            )


def raise_failure(failure: Failure, exchange: Exchange, meeting: Meeting) -> None:
    """Raise what a look has found.

    Raises:
        PeerError, ReceiveOverflowError, PeerTimeoutError: always.
    """
    if failure.word == "overflow":
        raise exchange.overflow(failure, after=AFTER)
    if failure.word == "call":
        wrong = _wrong_call(failure.pe, failure.seen)
        raise PeerError(f"nothing moved in call {failure.epoch}: {wrong}; {AFTER}")
    late = [(failure.word, failure.pe, failure.expected)]
    meeting.give_up("a call with static shapes", late, meeting.deadline_s, call=failure.epoch)


def _wrong_call(rank: int, status: int) -> str:
    """Say what the status of a rank's call says."""
    if status == -1:
        return f"rank {rank} called it wrongly"
    if status < 0:
        return f"topk_idx of rank {rank} holds ids that are neither an expert's nor -1"
    what = "path, tokens, top-k, handle, gradients or static_shapes"
    return f"the call of rank {rank} differs in {what}"
