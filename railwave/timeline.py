"""What a trace holds, as Chrome trace events and as a summary. See `railwave.tracing`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# A kernel that a phase starts with, and the phase; what follows belongs to it.
FIRST = {
    "count": "dispatch",
    "notify": "dispatch again, or refused",
    "gather": "combine",
    "copy_in": "combine",
}
# Tracks of a PE: what overlaps in time has tracks of its own, since a track shows what is nested.
_PHASES, _GRANTS, _STAGES, _WAITS = 1, 2, 100, 200
_MOST_PAIRS = 10  # lines of a summary about who waited for whom
_HEADING = "microseconds, summed over PEs"  # of a summary
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


@dataclass(frozen=True)
class Summary:
    """Where the time of a trace went, in microseconds, summed over PEs; `print` shows a table.

    Of a trace of several worlds the keys of ranks begin with the world: (world, rank).
    """

    stages: dict[str, float]  # by kernel, what it waited in it included
    waits: dict[str, float]  # by word, the longest first
    waited_for: dict[Any, float]  # by the rank that came last
    waits_between: dict[tuple[int, ...], float]  # by (the rank that waited, the one that came last)

    @classmethod
    def of(cls, spans: Sequence[Span]) -> Summary:
        """Sum up.

        Example:
            >>> print(Summary.of([Span("stage", "put", 0, 0, 3000),
            ...                   Span("wait", "grant", 0, 500, 2500, {"for rank": 3}),
            ...                   Span("wait", "grant", 1, 500, 1500, {"for rank": 3})]))
            microseconds, summed over PEs
            stage                     us
            put                        3
            waited for word           us
            grant                      3
            waited for rank           us
            3                          3
            rank waited for           us
            0 for 3                    2
            1 for 3                    1
        """
        several = len({span.world for span in spans}) > 1
        stages: dict[Any, float] = {}
        waits: dict[Any, float] = {}
        waited_for: dict[Any, float] = {}
        waits_between: dict[Any, float] = {}
        for span in spans:
            if span.kind == "stage":
                stages[span.name] = stages.get(span.name, 0.0) + span.us
            elif span.kind == "wait":
                rank = span.details["for rank"]
                world = (span.world,) if several else ()
                pair, last = (*world, span.pe, rank), (*world, rank) if several else rank
                waits[span.name] = waits.get(span.name, 0.0) + span.us
                waited_for[last] = waited_for.get(last, 0.0) + span.us
                waits_between[pair] = waits_between.get(pair, 0.0) + span.us
        tables = (stages, waits, waited_for, waits_between)
        return cls(*(dict(sorted(of.items(), key=lambda item: -item[1])) for of in tables))

    def __str__(self) -> str:
        ranks = {_of_world(rank): us for rank, us in self.waited_for.items()}
        pairs = {
            _of_world((*world, f"{rank} for {last}")): us
            for (*world, rank, last), us in self.waits_between.items()
        }
        tables = {"stage": self.stages, "waited for word": self.waits, "waited for rank": ranks}
        if len({pair[:-1] for pair in self.waits_between}) > 1:  # else all are of the one rank
            tables["rank waited for"] = _longest(pairs)
        wide = max(20, 1 + max((len(name) for of in tables.values() for name in of), default=0))
        lines = [_HEADING] if self.stages or self.waits else []
        for head, of in tables.items():
            if of:
                lines.append(f"{head:<{wide}}{'us':>8}")
                lines += [f"{name:<{wide}}{us:>8.0f}" for name, us in of.items()]
        return "\n".join(lines)


def _of_world(rank: Any) -> str:
    """Say a rank, or two, and the world before it where there are several.

    Example:
        >>> _of_world(3), _of_world((1, 3))
        ('3', 'world 1: 3')
    """
    *world, own = rank if isinstance(rank, tuple) else (rank,)
    return f"world {world[0]}: {own}" if world else str(own)


def _longest(of: dict[str, float]) -> dict[str, float]:
    """Keep the first few of what is sorted, and the sum of the rest."""
    rows = list(of.items())
    rest = rows[_MOST_PAIRS:]
    more = [(f"{len(rest)} more", sum(us for _, us in rest))] if rest else []
    return dict(rows[:_MOST_PAIRS] + more)


SAME_TIME = 0.9  # of a wait: what came after that part of it came with the last


def late_rank(ended_ns: Mapping[int, int], began_ns: int, gpus: int, pe: int) -> int:
    """Say who was late, of the ranks whose words were waited for: when each one's came.

    The last, but for words of another node that a node-mate forwards: if its own came about then,
    it was late itself, and held the other up.

    Args:
        gpus: of a node, where words are forwarded by the PE with the sender's local index; 0 where
            they are not.
        pe: that waited.

    Example: of 2 nodes of 2, PE 0 hears of rank 3 by way of rank 1
        >>> late_rank({1: 1990, 3: 2000}, 0, 2, 0), late_rank({1: 100, 3: 2000}, 0, 2, 0)
        (1, 3)
    """
    last = max(ended_ns, key=ended_ns.__getitem__)
    if not gpus:
        return last
    forwarder = pe - pe % gpus + last % gpus
    about_then = began_ns + SAME_TIME * (ended_ns[last] - began_ns)
    return forwarder if ended_ns.get(forwarder, began_ns) > about_then else last


def union(waits: Iterable[Span], gpus: int = 0) -> list[Span]:
    """Put waits of one PE for the same word that overlap together: programs of one launch.

    Args:
        gpus: of a node; for whom a `notify` was waited, see `late_rank`.

    Example:
        >>> three = [Span("wait", "packed", 0, 0, 5, {"for rank": 1}),
        ...          Span("wait", "packed", 0, 2, 9, {"for rank": 2}),
        ...          Span("wait", "packed", 0, 12, 13, {"for rank": 1})]
        >>> [(span.began_ns, span.ended_ns, span.details) for span in union(three)]
        [(0, 9, {'for rank': 2}), (12, 13, {'for rank': 1})]
    """
    groups: dict[str, list[list[Span]]] = {}
    for span in sorted(waits, key=lambda span: span.began_ns):
        found = groups.setdefault(span.name, [])
        if found and span.began_ns <= max(before.ended_ns for before in found[-1]):
            found[-1].append(span)
        else:
            found.append([span])
    return [_together(group, gpus) for found in groups.values() for group in found]


def _together(group: list[Span], gpus: int) -> Span:
    """Return one span in the place of several that overlap."""
    first, ended_ns = group[0], {}
    for span in sorted(group, key=lambda span: span.ended_ns):
        ended_ns[span.details["for rank"]] = span.ended_ns
    forwarded = gpus if first.name == "notify" else 0
    late = late_rank(ended_ns, first.began_ns, forwarded, first.pe)
    whole = (first.kind, first.name, first.pe, first.began_ns, max(ended_ns.values()))
    return Span(*whole, {"for rank": late}, first.world)


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
