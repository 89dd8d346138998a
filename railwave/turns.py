"""On which stream a call runs, and after what: calls of one object never run side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch


class Turns:
    """The streams of one communicator's calls; on a CPU there are none."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.last: torch.cuda.Stream | None = None  # of the last call
        self._captured: torch.cuda.Stream | None = None  # of the last one that was captured
        self.running: dict[str, object] = {}  # the call that runs, if there is one

    def check(self, stream: Any) -> None:
        """Check a caller's `stream`.

        Raises:
            TypeError, ValueError: it is none, or not of this device.
        """
        if stream is None:
            return
        if self._device.type == "cpu":
            raise ValueError(f"stream must be None on a CPU, got {stream!r}")
        if not isinstance(stream, torch.cuda.Stream):
            raise TypeError(f"stream must be a torch.cuda.Stream, got {type(stream).__name__}")
        if stream.device != self._device:
            raise ValueError(f"stream must be of {self._device}, got one of {stream.device}")

    @contextmanager
    def take(self, stream: Any, used: Iterable[Any]) -> Iterator[bool]:
        """Run a call on a stream, after the call before it; say whether a graph is captured.

        Args:
            stream: None for the current one, as where `check` refuses it.
            used: what the call reads: kept in memory until it has run.
        """
        if self._device.type == "cpu":
            yield False
            return
        caller = torch.cuda.current_stream(self._device)
        given = isinstance(stream, torch.cuda.Stream) and stream.device == self._device
        here = stream if given else caller
        if here != caller:
            here.wait_stream(caller)
        with torch.cuda.stream(here):
            capturing = torch.cuda.is_current_stream_capturing()
            before = self._captured if capturing else self.last
            if before is not None and before != here and (not capturing or _captures(before)):
                here.wait_stream(before)
            if capturing:
                self._captured = here
            else:
                self.last = here
                if here != caller:
                    record(used, here)
            yield capturing


def one_at_a_time(call: Callable[..., Any]) -> Callable[..., Any]:
    """Let one thread at a time into some methods of an object with `Turns`.

    Raises:
        RuntimeError: one of them is running; this call has done nothing.
    """

    @wraps(call)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        mine, running = object(), self._turns.running
        # Not a lock: an interrupt between taking it and this `try` would leave it locked. And no
        # function is called at the end: only calls and loops let an interrupt in.
        try:
            if running.setdefault("call", mine) is not mine:
                raise RuntimeError(
                    "another thread, or a call around this one, is in a dispatch, combine, reset "
                    "or close of this communicator, which takes one at a time"
                )
            return call(self, *args, **kwargs)
        finally:
            if "call" in running and running["call"] is mine:
                del running["call"]

    return run


def record(used: Iterable[Any], stream: torch.cuda.Stream) -> None:
    """Keep the memory of tensors until what a stream holds by now has run."""
    for tensor in used:
        if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
            tensor.record_stream(stream)


def keep_until_used(tensors: Iterable[Any], made_on: torch.cuda.Stream | None) -> None:
    """Keep tensors of one stream in memory until the current one has used them.

    Args:
        made_on: whose memory they are; None on a CPU.
    """
    if made_on is None or torch.cuda.is_current_stream_capturing():
        return
    here = torch.cuda.current_stream(made_on.device)
    if here != made_on:
        record(tensors, here)


def _captures(stream: torch.cuda.Stream) -> bool:
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()
