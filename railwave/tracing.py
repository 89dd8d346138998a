"""A timeline of dispatches and combines: stages, waits and grants of every PE, for Perfetto.

    with railwave.trace("out.json") as trace:
        ...
    print(trace.summary())

A stage is a launch: its time is the host's on a CPU, where kernels are interpreted, and that
between two CUDA events on a GPU. What a kernel waits for, and the grants that it gives, it notes
itself, by the clock of its device (`kernels.wire.note`); on a CPU the host waits, and notes that. A
replayed CUDA graph has notes, but no stages: the host launches none.

Times are of one clock a machine, monotonic on a CPU and the GPU's global timer, so the files of the
ranks of one machine fit together (`merge_traces`).
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist

from railwave import kernels

# A kernel that a phase starts with, and the phase; what follows belongs to it.
_FIRST = {
    "count": "dispatch",
    "notify": "dispatch again",
    "gather": "combine",
    "copy_in": "combine",
}
# Tracks of a PE: what overlaps in time has tracks of its own, since a track shows what is nested.
_PHASES, _GRANTS, _STAGES, _WAITS = 1, 2, 10, 30

_running: Trace | None = None
_exchanges: WeakSet[Any] = WeakSet()


@dataclass(frozen=True)
class Span:
    """Something that a PE did or waited for, from one time to another in nanoseconds."""

    kind: str  # stage, wait, or grant (whose two times are one)
    name: str  # of the kernel, or the word that was waited for
    pe: int
    began_ns: float
    ended_ns: float
    details: dict[str, Any] = field(default_factory=dict)  # wave and step; whom it was waited for


class Trace:
    """What happened while a trace was taken; whole once its `with` has ended."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.lost = 0  # notes that there was no room for
        self._timed: list[tuple[str, dict[str, Any], Any, Any]] = []
        self._clock: tuple[Any, torch.Tensor] | None = None  # an event, and the device's time then
        self._notes: dict[Any, torch.Tensor] = {}

    def summary(self) -> Summary:
        """Say where the time went, and which peers were waited for."""
        return Summary.of(self.spans)

    def events(self) -> list[dict[str, Any]]:
        """Return Chrome trace events, of which Perfetto makes a picture, sorted by time.

        Source: the Trace Event Format of Chrome's tracing: complete events ("X"), instants ("i")
        and names of processes and threads ("M"); times in microseconds.
        """
        spans = sorted([*self.spans, *_phases(self.spans)], key=_outer_first)
        tracks = _tracks(spans)
        names: list[dict[str, Any]] = []
        for pe in sorted({span.pe for span in spans}):
            meta = {"ph": "M", "ts": 0, "pid": pe}
            names.append({**meta, "name": "process_name", "tid": 0, "args": {"name": f"PE {pe}"}})
            for track in sorted({t for s, t in zip(spans, tracks, strict=True) if s.pe == pe}):
                thread = {"name": "thread_name", "tid": track, "args": {"name": _name_of(track)}}
                names.append({**meta, **thread})
        return names + [_event(*pair) for pair in zip(spans, tracks, strict=True)]

    def write(self, file: str | os.PathLike) -> None:
        """Write the events as a JSON file that Perfetto and chrome://tracing open."""
        _write(file, self.events(), {"lost_notes": self.lost})

    # What is called while the trace is taken.

    @contextmanager
    def _around(self, interpret: bool, kernel: str, scalars: dict[str, Any]) -> Iterator[None]:
        """Time a launch."""
        if not interpret and torch.cuda.is_current_stream_capturing():
            yield
        elif interpret:
            began_ns = time.monotonic_ns()
            yield
            self._add_stage(kernel, scalars, began_ns, time.monotonic_ns())
        else:
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            yield
            ended.record()
            self._timed.append((kernel, scalars, began, ended))

    def _add_stage(self, kernel: str, scalars: dict[str, Any], began: float, ended: float) -> None:
        if "me" not in scalars:
            return
        details = {name: scalars[name] for name in ("wave", "step", "first") if name in scalars}
        name = kernel.removeprefix("_").removesuffix("_kernel")
        self.spans.append(Span("stage", name, int(scalars["me"]), began, ended, details))

    def _join(self, exchange: Any) -> None:
        """Let the kernels of a PE note what they wait for."""
        wire = exchange.kernels.wire
        size = 1 + 4 * wire.MAX_NOTES.value
        notes = torch.zeros(size, dtype=torch.int64, device=exchange.device)
        self._notes[exchange] = notes
        exchange.state[wire.NOTES.value] = notes.data_ptr()
        if exchange.device.type == "cuda" and self._clock is None:
            stamp = torch.zeros(1, dtype=torch.int64, device=exchange.device)
            wire.stamp(stamp)  # loaded by now
            torch.cuda.synchronize(exchange.device)
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            wire.stamp(stamp)
            self._clock = (event, stamp)

    def _end(self) -> None:
        """Wait for the devices; read what events and notes say."""
        if self._clock:
            torch.cuda.synchronize(self._clock[1].device)
            zero, stamp = self._clock
            zero_ns = stamp.item()
            for kernel, scalars, *marks in self._timed:
                times = [zero_ns + zero.elapsed_time(mark) * 1e6 for mark in marks]
                self._add_stage(kernel, scalars, *times)
        for exchange, notes in self._notes.items():
            wire = exchange.kernels.wire
            exchange.state[wire.NOTES.value] = 0
            count, *records = notes.tolist()
            self.lost += max(0, count - wire.MAX_NOTES.value)
            for i in range(min(count, wire.MAX_NOTES.value)):
                what, who, began, ended = records[4 * i : 4 * i + 4]
                if what == wire.GRANTED.value:
                    span = Span("grant", "grant", exchange.pe, began, ended, {"to node": who})
                else:
                    details = {"for rank": who}
                    span = Span("wait", wire.WORDS[what], exchange.pe, began, ended, details)
                self.spans.append(span)


@contextmanager
def trace(file: str | os.PathLike | None = None) -> Iterator[Trace]:
    """Record what all communicators and worlds of this process do meanwhile, and write a file.

    One trace at a time. What it costs: on a GPU two events a launch, and a few stores a wait;
    without a trace a kernel that has waited, or grants, looks at one word.

    Args:
        file: where to write; None: nowhere. Of several ranks (torch.distributed) each writes a file
            of its own, `out.rank3.json` for out.json.

    Yields:
        The `Trace`: `spans`, `events`, `summary`, once the `with` has ended.

    Raises:
        RuntimeError: a trace is being taken already.

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
    taken = Trace()
    for exchange in list(_exchanges):
        taken._join(exchange)
    _running = taken
    kernels.trace_launches(taken._around)
    try:
        yield taken
    finally:
        _running = None
        kernels.trace_launches(None)
        taken._end()
        if file is not None:
            taken.write(_of_rank(Path(file)))


def merge_traces(files: Iterable[str | os.PathLike], out: str | os.PathLike) -> None:
    """Put the traces of several ranks of one machine into one file.

    Raises:
        OSError, ValueError: a file is not there, or holds no trace.
    """
    events: list[dict[str, Any]] = []
    lost = 0
    for file in files:
        try:
            held = json.loads(Path(file).read_text(encoding="utf-8"))
            events += held["traceEvents"]
            lost += held["otherData"]["lost_notes"]
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            text = f"{os.fspath(file)} must be a trace of railwave's: {error!r}"
            raise ValueError(text) from None
    events.sort(key=lambda event: (event["ph"] != "M", event["ts"], -event.get("dur", 0)))
    _write(out, events, {"lost_notes": lost})


def join(exchange: Any) -> None:
    """Know a new PE of this process: its kernels take part in traces."""
    _exchanges.add(exchange)
    if _running is not None:
        _running._join(exchange)


def waited(pe: int, word: str, began_ns: int, *, writer: int | None = None) -> None:
    """Note that the host waited for a word until now, if a trace is taken."""
    if _running is not None:
        details = {} if writer is None else {"for rank": writer}
        span = Span("wait", word, pe, began_ns, time.monotonic_ns(), details)
        _running.spans.append(span)


@dataclass(frozen=True)
class Summary:
    """Where the time of a trace went, in microseconds, summed over PEs; `print` shows a table."""

    stages: dict[str, float]  # by kernel, what it waited in it included
    waits: dict[str, float]  # by word, the longest first
    waited_for: dict[int, float]  # by the rank that came last

    @classmethod
    def of(cls, spans: Sequence[Span]) -> Summary:
        """Sum up.

        Example:
            >>> print(Summary.of([Span("stage", "put", 0, 0, 3000),
            ...                   Span("wait", "grant", 0, 500, 2500, {"for rank": 3})]))
            stage                     us
            put                        3
            waited for word           us
            grant                      2
            waited for rank           us
            3                          2
        """
        found: tuple[dict[Any, float], ...] = ({}, {}, {})
        for span in spans:
            us = (span.ended_ns - span.began_ns) / 1e3
            if span.kind == "stage":
                found[0][span.name] = found[0].get(span.name, 0.0) + us
            elif span.kind == "wait":
                found[1][span.name] = found[1].get(span.name, 0.0) + us
                if "for rank" in span.details:
                    rank = span.details["for rank"]
                    found[2][rank] = found[2].get(rank, 0.0) + us
        longest = [dict(sorted(of.items(), key=lambda item: -item[1])) for of in found]
        return cls(*longest)

    def __str__(self) -> str:
        lines = []
        for head, of in (
            ("stage", self.stages),
            ("waited for word", self.waits),
            ("waited for rank", self.waited_for),
        ):
            lines.append(f"{head:<20}{'us':>8}")
            lines += [f"{name!s:<20}{us:>8.0f}" for name, us in of.items()]
        return "\n".join(lines)


def _phases(spans: Sequence[Span]) -> list[Span]:
    """Find each PE's phases: from a first kernel to the last stage before the next one."""
    phases = []
    for pe in {span.pe for span in spans}:
        stages = sorted(
            (span for span in spans if span.pe == pe and span.kind == "stage"),
            key=lambda span: span.began_ns,
        )
        groups: list[list[Span]] = []
        for stage in stages:
            first = stage.name in _FIRST
            if first and groups and [s.name for s in groups[-1]] == ["gather"]:
                first = False  # copy_in after it
            if first or not groups:
                groups.append([])
            groups[-1].append(stage)
        for group in groups:
            name = _FIRST.get(group[0].name, "phase")
            ended_ns = max(stage.ended_ns for stage in group)
            phases.append(Span("phase", name, pe, group[0].began_ns, ended_ns))
    return phases


def _tracks(spans: Sequence[Span]) -> list[int]:
    """Give every span, sorted by time, a track of its PE on which nothing overlaps it."""
    first = {"phase": _PHASES, "grant": _GRANTS, "stage": _STAGES, "wait": _WAITS}
    ends: dict[tuple[int, int], float] = {}
    tracks = []
    for span in spans:
        track = first[span.kind]
        while span.kind in ("stage", "wait") and ends.get((span.pe, track), 0.0) > span.began_ns:
            track += 1
        ends[span.pe, track] = span.ended_ns
        tracks.append(track)
    return tracks


def _name_of(track: int) -> str:
    if track < _STAGES:
        return "phases" if track == _PHASES else "grants"
    name, first = ("stages", _STAGES) if track < _WAITS else ("waits", _WAITS)
    return f"{name} beside {track - first}" if track > first else name


def _outer_first(span: Span) -> tuple[float, float]:
    return (span.began_ns, -span.ended_ns)


def _event(span: Span, track: int) -> dict[str, Any]:
    event = {"name": span.name, "cat": span.kind, "ts": span.began_ns / 1e3, "pid": span.pe}
    event |= {"tid": track, "args": span.details}
    if span.kind == "grant":
        return {**event, "ph": "i", "s": "t"}
    return {**event, "ph": "X", "dur": (span.ended_ns - span.began_ns) / 1e3}


def _write(file: str | os.PathLike, events: list[dict[str, Any]], about: dict[str, Any]) -> None:
    held = {"traceEvents": events, "displayTimeUnit": "ns", "otherData": about}
    Path(file).write_text(json.dumps(held), encoding="utf-8")


def _of_rank(file: Path) -> Path:
    """Return the file of this rank, if there are several."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return file
    stem = re.sub(r"\.json$", "", file.name)
    return file.with_name(f"{stem}.rank{dist.get_rank()}.json")
