"""A timeline of dispatches and combines: stages, waits and grants of every PE, for Perfetto.

    with railwave.trace("out.json") as trace:
        ...
    print(trace.summary())

A stage is a launch: its time is the host's on a CPU, where kernels are interpreted, and that
between two CUDA events on a GPU. What a kernel waits for, and the grants that it gives, it notes
itself, by the clock of its device (`kernels.wire.note`); on a CPU the host waits, and notes that. A
replayed CUDA graph has notes, but no stages: the host launches none.

Times are of the host's monotonic clock on a CPU and of the GPU's global timer on a GPU, so files of
ranks that share a host, or a GPU, fit together (`merge_traces`).
"""

from __future__ import annotations

import itertools
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist

from railwave import kernels, timeline, trace_files
from railwave._files import check_writable
from railwave.timeline import Span, Summary

_ONE_A_ROUND = ("pack", "reduce")  # kernels that are told no step: rounds in order, one a launch
_CLOCK_OF = {"cpu": "the host's monotonic clock", "cuda": "the GPUs' timer"}
_CLOCK_TRIES = 5
_CLOCK_CYCLES = 200_000  # of a GPU that is kept busy while its clock is queued to be read

_running: Trace | None = None
_exchanges: WeakSet[Any] = WeakSet()
# The heap whose stages this thread runs: it tells PEs of several worlds apart.
_world_now: ContextVar[Any] = ContextVar("world_now", default=None)


class Trace:
    """What happened while a trace was taken; whole once its `with` has ended."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.lost = 0  # notes that there was no room for
        self._timed: list[tuple[str, dict[str, Any], int, torch.device, Any, Any]] = []
        self._clocks: dict[torch.device, tuple[Any, int]] = {}  # an event, and its time
        self._notes: dict[Any, torch.Tensor] = {}
        self._worlds: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # number of each heap
        self._numbers = itertools.count()
        self._clocks_used: set[str] = set()
        self._whole = False
        self._rounds: dict[tuple[int, int], int] = {}  # packed in a phase so far, by world and PE

    def summary(self) -> Summary:
        """Say where the time went, and who waited for whom."""
        return Summary.of(self._all("summary"))

    def events(self) -> list[dict[str, Any]]:
        """Return Chrome trace events: see `railwave.timeline.events`."""
        return timeline.events(self._all("events"))

    def write(self, file: str | os.PathLike) -> None:
        """Write the events as a JSON file that Perfetto and chrome://tracing open."""
        spans = self._all("write")
        about: dict[str, Any] = {"lost_notes": self.lost, "base_ns": timeline.first_ns(spans)}
        about |= {**trace_files.clock_origin(), "clock": " and ".join(sorted(self._clocks_used))}
        trace_files.write(file, timeline.events(spans), about)

    def _all(self, asked: str) -> list[Span]:
        if not self._whole:
            raise RuntimeError(f"{asked} must be called after the trace's with: it still records")
        return self.spans

    def join(self, exchange: Any) -> None:
        """Let the kernels of a PE note what they wait for."""
        wire, device = exchange.kernels.wire, exchange.device
        notes = torch.zeros(1 + 4 * wire.MAX_NOTES.value, dtype=torch.int64, device=device)
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.synchronize()  # a kernel that runs must not see the address change
                if device not in self._clocks:
                    self._clocks[device] = _read_clock(wire, device)
        self._notes[exchange] = notes
        exchange.state[wire.NOTES.value] = notes.data_ptr()

    def leave_all(self) -> None:
        """Wait for the devices; read what events and notes say, and let go of the PEs."""
        try:
            for device in self._clocks:
                torch.cuda.synchronize(device)
        finally:  # in any case nothing writes to the notes any more
            for exchange in self._notes:
                exchange.state[exchange.kernels.wire.NOTES.value] = 0
        for kernel, scalars, world, device, *marks in self._timed:
            zero, zero_ns = self._clocks[device]
            times = [zero_ns + round(zero.elapsed_time(mark) * 1e6) for mark in marks]
            self._clocks_used.add(_CLOCK_OF["cuda"])
            self._add_stage(kernel, scalars, world, *times)
        for exchange, notes in self._notes.items():
            self._read_notes(exchange, notes.tolist())
        self._timed, self._clocks, self._notes = [], {}, {}
        self._whole = True

    @contextmanager
    def around(self, interpret: bool, kernel: str, scalars: dict[str, Any]) -> Iterator[None]:
        """Time a launch."""
        world = self._world_of(_world_now.get())
        if interpret:
            began_ns = time.monotonic_ns()
            yield
            self._clocks_used.add(_CLOCK_OF["cpu"])
            self._add_stage(kernel, scalars, world, began_ns, time.monotonic_ns())
            return
        device = torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_current_stream_capturing() or device not in self._clocks:
            yield
            return
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        yield
        ended.record()
        self._timed.append((kernel, scalars, world, device, began, ended))

    def wait(self, exchange: Any, missing_ns: dict[tuple[str, int], int], began_ns: int) -> None:
        """Add what the host of a PE has waited for until now.

        Args:
            missing_ns: by word and rank, when it was seen to be missing last.
        """
        if exchange.device.type == "cpu":  # a GPU's clock is another, and its kernels wait
            world, ended_ns = self._world_of(exchange.heap), time.monotonic_ns()
            word, _ = max(missing_ns, key=missing_ns.__getitem__)
            of_word = {rank: ns for (name, rank), ns in missing_ns.items() if name == word}
            gpus = exchange.config.topo.gpus_per_node if word == "notify" else 0
            details = {"for rank": timeline.late_rank(of_word, began_ns, gpus, exchange.pe)}
            self._clocks_used.add(_CLOCK_OF["cpu"])
            self.spans.append(Span("wait", word, exchange.pe, began_ns, ended_ns, details, world))

    def _world_of(self, heap: Any) -> int:
        if heap is not None and heap not in self._worlds:
            self._worlds[heap] = next(self._numbers)  # another one in each thread
        return 0 if heap is None else self._worlds[heap]

    def _add_stage(
        self, kernel: str, scalars: dict[str, Any], world: int, began_ns: int, ended_ns: int
    ) -> None:
        if "me" not in scalars:
            return
        name, pe = kernel.removeprefix("_").removesuffix("_kernel"), int(scalars["me"])
        details: dict[str, Any] = {key: scalars[key] for key in ("wave", "step") if key in scalars}
        if name in timeline.FIRST:
            self._rounds[world, pe] = 0
        elif name in _ONE_A_ROUND:
            details["step"] = self._rounds[world, pe] = self._rounds.get((world, pe), 0) + 1
        self.spans.append(Span("stage", name, pe, began_ns, ended_ns, details, world))

    def _read_notes(self, exchange: Any, found: list[int]) -> None:
        wire, world = exchange.kernels.wire, self._world_of(exchange.heap)
        count, *records = found
        most, waits = wire.MAX_NOTES.value, []
        if count:
            self._clocks_used.add(_CLOCK_OF[exchange.device.type])
        self.lost += max(0, count - most)
        for i in range(min(count, most)):
            what, who, began_ns, ended_ns = records[4 * i : 4 * i + 4]
            at = (exchange.pe, began_ns, ended_ns)
            if what == wire.GAVE.value:
                self.spans.append(Span("grant", "grant", *at, {"to node": who}, world))
            else:
                waits.append(Span("wait", wire.WORDS[what], *at, {"for rank": who}, world))
        self.spans += timeline.union(waits, exchange.config.topo.gpus_per_node)


@contextmanager
def trace(file: str | os.PathLike | None = None) -> Iterator[Trace]:
    """Record what all communicators and worlds of this process do meanwhile, and write a file.

    One trace at a time. What it costs: on a GPU two events a launch, and a few stores a wait;
    without a trace a kernel that has waited, or grants, looks at one word.

    Args:
        file: where to write; None: nowhere. Of several ranks (torch.distributed) each writes a file
            of its own, `out.rank3.json` for out.json.

    Yields:
        The `Trace`: `spans`, `events`, `summary`, `write`, once the `with` has ended; not before.

    Raises:
        RuntimeError: a trace is being taken already.
        OSError: the file cannot be written: before anything is recorded, where that can be told. An
            error inside comes first, and has a note of it.

    Example:
        >>> from railwave import LocalWorld, Topology
        >>> sizes = dict(num_experts=2, top_k=1, hidden=8, max_tokens_per_rank=1)
        >>> world = LocalWorld(Topology(2, 1, 1), **sizes)
        >>> xs, ids = [torch.ones(1, 8).bfloat16()] * 2, [torch.ones(1, 1).long()] * 2
        >>> with trace() as taken:
        ...     received = world.dispatch(xs, ids, [torch.ones(1, 1)] * 2)
        >>> [span.name for span in taken.spans if span.kind == "stage" and span.pe == 0][:4]
        ['count', 'forward', 'quota', 'match']
    """
    global _running
    if _running is not None:
        raise RuntimeError("a trace is being taken already: end it first")
    out = None if file is None else _of_rank(Path(file))
    if out is not None:
        check_writable(os.fspath(out), "file")
    taken = _running = Trace()
    try:
        for exchange in list(_exchanges):
            taken.join(exchange)
        kernels.trace_launches(taken.around)
        yield taken
    except BaseException as error:  # which comes first, whatever else fails
        try:
            _end(taken, out)
        except Exception as other:
            what = f"written to {out}" if taken._whole else "ended"
            text = f"the trace could not be {what}: {type(other).__name__}: {other}"
            # As add_note does, which Python 3.10 lacks.
            error.__notes__ = [*getattr(error, "__notes__", ()), text]
        raise
    _end(taken, out)


def _end(taken: Trace, out: Path | None) -> None:
    """Let nothing more be recorded; read what was, and write it."""
    global _running
    _running = None
    kernels.trace_launches(None)
    taken.leave_all()
    if out is not None:
        taken.write(out)


def join(exchange: Any) -> None:
    """Know a new PE of this process: its kernels take part in traces."""
    _exchanges.add(exchange)
    running = _running
    if running is not None:
        running.join(exchange)


@contextmanager
def world(heap: Any) -> Iterator[None]:
    """Say whose stages are launched: PEs of several worlds have the same numbers."""
    before = _world_now.set(heap)
    try:
        yield
    finally:
        _world_now.reset(before)


@contextmanager
def paused() -> Iterator[None]:
    """Leave launches out that move nothing."""
    running = _running
    kernels.trace_launches(None)
    try:
        yield
    finally:
        if running is not None and running is _running:
            kernels.trace_launches(running.around)


def taking() -> bool:
    """Say whether a trace is being taken."""
    return _running is not None


def waited(exchange: Any, missing_ns: dict[tuple[str, int], int], began_ns: int) -> None:
    """Note that the host of a PE waited until now, if a trace is taken; arguments: `Trace.wait`."""
    running = _running
    if running is not None:
        running.wait(exchange, missing_ns, began_ns)


def _read_clock(wire: Any, device: torch.device) -> tuple[Any, int]:
    """Return an event of the current device and its time by the device's timer.

    The timer is read between two events, with work queued before them so that they follow one
    another at once; of several tries the one counts whose events are nearest.
    """
    stamp, best = torch.zeros(1, dtype=torch.int64, device=device), None
    for _ in range(_CLOCK_TRIES):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(_CLOCK_CYCLES)
        before.record()
        wire.stamp(stamp)
        after.record()
        torch.cuda.synchronize(device)
        width_ns = before.elapsed_time(after) * 1e6
        if best is None or width_ns < best[0]:
            best = (width_ns, before, stamp.item() - round(width_ns / 2))
    assert best is not None
    return best[1], best[2]


def _of_rank(file: Path) -> Path:
    """Return the file of this rank, if there are several."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return file
    stem = re.sub(r"\.json$", "", file.name)
    return file.with_name(f"{stem}.rank{dist.get_rank()}.json")
