"""What a trace holds, as Chrome trace events and as a summary. See `railwave.tracing`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from railwave._files import write_file

# A kernel that a phase starts with, and the phase; what follows belongs to it.
FIRST = {
    "count": "dispatch",
    "notify": "dispatch again, or refused",
    "gather": "combine",
    "copy_in": "combine",
}
# Tracks of a PE: what overlaps in time has tracks of its own, since a track shows what is nested.
_PHASES, _GRANTS, _STAGES, _WAITS = 1, 2, 100, 200
_PES = 10_000  # more than there are in a world: the next world's come after


@dataclass(frozen=True)
class Span:
    """Something that a PE did or waited for, from one time to another in whole nanoseconds."""

    kind: str  # stage, wait, or grant (whose two times are one)
    name: str  # of the kernel, or the word that was waited for
    pe: int
    began_ns: int
    ended_ns: int
    details: dict[str, Any] = field(default_factory=dict)  # wave and step; whom it was waited for
    world: int = 0  # of several communicators and worlds in the process, in the order of their use

    @property
    def us(self) -> float:
        """Return how long it took, in microseconds."""
        return (self.ended_ns - self.began_ns) / 1e3


def events(spans: Sequence[Span]) -> list[dict[str, Any]]:
    """Return Chrome trace events, sorted by time, which begins with the first span.

    Source: the Trace Event Format of Chrome's tracing: complete events ("X"), instants ("i") and
    names of processes and threads ("M"); times in microseconds.
    """
    spans = sorted([*spans, *_phases(spans)], key=lambda s: (s.began_ns, -s.ended_ns))
    tracks = _tracks(spans)
    base_ns = first_ns(spans)
    names: list[dict[str, Any]] = []
    for world, pe in sorted({(span.world, span.pe) for span in spans}):
        meta = {"ph": "M", "ts": 0, "pid": world * _PES + pe}
        name = f"PE {pe}" if not world else f"world {world}, PE {pe}"
        names.append({**meta, "name": "process_name", "tid": 0, "args": {"name": name}})
        of_pe = {t for s, t in zip(spans, tracks, strict=True) if (s.world, s.pe) == (world, pe)}
        for track in sorted(of_pe):
            thread = {"name": "thread_name", "tid": track, "args": {"name": _name_of(track)}}
            names.append({**meta, **thread})
    return names + [_event(*pair, base_ns) for pair in zip(spans, tracks, strict=True)]


def first_ns(spans: Iterable[Span]) -> int:
    """Return when the first span began; 0 without any."""
    return min((span.began_ns for span in spans), default=0)


def write(file: str | os.PathLike, found: list[dict[str, Any]], about: dict[str, Any]) -> None:
    """Write events as a JSON file; `about`: what merging needs."""
    held = {"traceEvents": found, "displayTimeUnit": "ns", "otherData": about}
    write_file(os.fspath(file), json.dumps(held).encode())


def merge_traces(files: Iterable[str | os.PathLike], out: str | os.PathLike) -> None:
    """Put the traces of several ranks of one machine into one file.

    Args:
        files: each of another rank.
        out: the file to write.

    Raises:
        OSError: a file is not there.
        TypeError: files is one file's name.
        ValueError: there is no file, one holds no trace, or two hold the same PE.
    """
    if isinstance(files, (str, os.PathLike)):
        raise TypeError(f"files must be several files, got {os.fspath(files)!r}")
    held = {os.fspath(file): _read(file) for file in files}
    if not held:
        raise ValueError("files must be one at least, got none")
    bases = {file: trace["otherData"]["base_ns"] for file, trace in held.items()}
    base_ns = min(bases.values(), default=0)
    found: list[dict[str, Any]] = []
    owner: dict[int, str] = {}
    for file, trace in held.items():
        for event in trace["traceEvents"]:
            if owner.setdefault(event["pid"], file) != file:
                raise ValueError(
                    f"files must hold different PEs, got PE {event['pid']} in {file} and "
                    f"{owner[event['pid']]}"
                )
            shift_us = 0 if event["ph"] == "M" else (bases[file] - base_ns) / 1e3
            found.append({**event, "ts": round(event["ts"] + shift_us, 3)})
    found.sort(key=lambda event: (event["ph"] != "M", event["ts"], -event.get("dur", 0)))
    lost = sum(trace["otherData"]["lost_notes"] for trace in held.values())
    write(out, found, {"lost_notes": lost, "base_ns": base_ns})


def _read(file: str | os.PathLike) -> dict[str, Any]:
    try:
        held = json.loads(Path(file).read_text(encoding="utf-8"))
        about, found = held["otherData"], held["traceEvents"]
        whole = isinstance(about["base_ns"], int) and isinstance(about["lost_notes"], int)
        if not whole or not all({"pid", "ph", "ts"} <= event.keys() for event in found):
            raise ValueError("events or what they are about")
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        text = f"files must be traces of railwave's, got {os.fspath(file)}: {error!r}"
        raise ValueError(text) from None
    return held


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
        stages: dict[Any, float] = {}
        waits: dict[Any, float] = {}
        waited_for: dict[Any, float] = {}
        for span in spans:
            if span.kind == "stage":
                stages[span.name] = stages.get(span.name, 0.0) + span.us
            elif span.kind == "wait":
                waits[span.name] = waits.get(span.name, 0.0) + span.us
                rank = span.details["for rank"]
                waited_for[rank] = waited_for.get(rank, 0.0) + span.us
        tables = (stages, waits, waited_for)
        return cls(*(dict(sorted(of.items(), key=lambda item: -item[1])) for of in tables))

    def __str__(self) -> str:
        lines = []
        for head, of in (
            ("stage", self.stages),
            ("waited for word", self.waits),
            ("waited for rank", self.waited_for),
        ):
            if not of:
                continue
            lines.append(f"{head:<20}{'us':>8}")
            lines += [f"{name!s:<20}{us:>8.0f}" for name, us in of.items()]
        return "\n".join(lines)


def union(waits: Iterable[Span]) -> list[Span]:
    """Put waits of one PE for the same word that overlap together: programs of one launch.

    Example:
        >>> three = [Span("wait", "packed", 0, 0, 5, {"for rank": 1}),
        ...          Span("wait", "packed", 0, 2, 9, {"for rank": 2}),
        ...          Span("wait", "packed", 0, 12, 13, {"for rank": 1})]
        >>> [(span.began_ns, span.ended_ns, span.details) for span in union(three)]
        [(0, 9, {'for rank': 2}), (12, 13, {'for rank': 1})]
    """
    found: dict[str, Span] = {}
    done: list[Span] = []
    for span in sorted(waits, key=lambda span: span.began_ns):
        before = found.get(span.name)
        if before and span.began_ns <= before.ended_ns:
            later = max(before, span, key=lambda each: each.ended_ns)
            whole = (later.kind, later.name, later.pe, before.began_ns, later.ended_ns)
            found[span.name] = Span(*whole, later.details, later.world)
        else:
            done += [before] if before else []
            found[span.name] = span
    return [*done, *found.values()]


def _phases(spans: Sequence[Span]) -> list[Span]:
    """Find each PE's phases: from a first kernel to the last stage before the next one."""
    phases = []
    for world, pe in {(span.world, span.pe) for span in spans}:
        own = [s for s in spans if (s.world, s.pe, s.kind) == (world, pe, "stage")]
        groups: list[list[Span]] = []
        for stage in sorted(own, key=lambda span: span.began_ns):
            goes_on = groups and [s.name for s in groups[-1]] == ["gather"]  # copy_in after it
            if not groups or (stage.name in FIRST and not goes_on):
                groups.append([])
            groups[-1].append(stage)
        for group in groups:
            name = FIRST.get(group[0].name, "phase")
            ended_ns = max(stage.ended_ns for stage in group)
            phases.append(Span("phase", name, pe, group[0].began_ns, ended_ns, world=world))
    return phases


def _tracks(spans: Sequence[Span]) -> list[int]:
    """Give every span, sorted by time, a track of its PE on which nothing overlaps it."""
    first = {"phase": _PHASES, "grant": _GRANTS, "stage": _STAGES, "wait": _WAITS}
    ends: dict[tuple[int, int, int], int] = {}
    tracks = []
    for span in spans:
        track = first[span.kind]
        if span.kind in ("stage", "wait"):
            while ends.get((span.world, span.pe, track), span.began_ns) > span.began_ns:
                track += 1
        ends[span.world, span.pe, track] = span.ended_ns
        tracks.append(track)
    return tracks


def _name_of(track: int) -> str:
    if track < _STAGES:
        return "phases" if track == _PHASES else "grants"
    name, first = ("stages", _STAGES) if track < _WAITS else ("waits", _WAITS)
    return f"{name} beside {track - first}" if track > first else name


def _event(span: Span, track: int, base_ns: int) -> dict[str, Any]:
    event = {"name": span.name, "cat": span.kind, "ts": (span.began_ns - base_ns) / 1e3}
    event |= {"pid": span.world * _PES + span.pe, "tid": track, "args": span.details}
    if span.kind == "grant":
        return {**event, "ph": "i", "s": "t"}
    return {**event, "ph": "X", "dur": span.us}
