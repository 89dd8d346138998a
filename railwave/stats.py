"""What a dispatch and its combine put on the rails: as planned, and as the wire kernels counted.

Letters: N nodes, G GPUs a node, R rails.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

import torch

from railwave.config import WAVES

if TYPE_CHECKING:
    import pandas

PHASES = ("dispatch", "combine")


@dataclass(frozen=True)
class Put:
    """What one PE put to one node in one phase."""

    phase: str  # dispatch or combine
    source: int  # the node that put
    gpu: int  # of that node, which put
    rail: int  # of that GPU
    destination: int  # the node that it went to
    wave: int  # in which; 1 where all nodes are put to at once
    planned_records: int  # records of a dispatch, sums of a combine
    planned_bytes: int
    put_bytes: int  # as the kernels counted while they moved them


@dataclass(frozen=True)
class Stats:
    """Rows of `Put`: of one handle, or of several.

    Example:
        >>> stats = Stats((Put("dispatch", 0, 0, 0, 1, 1, 2, 64, 64),
        ...                Put("dispatch", 0, 1, 1, 1, 1, 6, 192, 192)))
        >>> stats.rail_share(), stats.rail_share(planned=True)
        ({0: 0.25, 1: 0.75}, {0: 0.25, 1: 0.75})
        >>> stats.rail_bytes().tolist()
        [[64, 192], [0, 0]]
        >>> stats.to_dict()["put_bytes"]
        [64, 192]
    """

    rows: tuple[Put, ...]

    @classmethod
    def total(cls, several: Iterable[Stats]) -> Stats:
        """Put the rows of several handles together: of all ranks, or of several layers.

        Raises:
            TypeError: they are no `Stats`.
        """
        several = [several] if isinstance(several, Stats) else list(several)
        if not all(isinstance(stats, Stats) for stats in several):
            kinds = ", ".join(sorted({type(one).__name__ for one in several}))
            raise TypeError(f"several must be Stats, got {kinds}")
        return cls(tuple(row for stats in several for row in stats.rows))

    def rail_share(
        self, source: int | None = None, *, phase: str = "dispatch", planned: bool = False
    ) -> dict[int, float]:
        """Return each rail's part of the bytes put; of rails that these rows name.

        Args:
            source: of this node alone; None for all.
            phase: dispatch or combine.
            planned: of the bytes planned instead.

        Raises:
            ValueError: phase is neither, or no row is of that source.
        """
        sources = {row.source for row in self.rows}
        if source is not None and source not in sources:
            raise ValueError(f"source must be one of the nodes {sorted(sources)}, got {source!r}")
        _check_phase(phase)
        by_rail: dict[int, int] = {}
        for row in self.rows:
            if row.phase == phase and source in (None, row.source):
                put = row.planned_bytes if planned else row.put_bytes
                by_rail[row.rail] = by_rail.get(row.rail, 0) + put
        total = sum(by_rail.values())
        return {rail: put / total if total else 0.0 for rail, put in sorted(by_rail.items())}

    def rail_bytes(self, *, phase: str = "dispatch", planned: bool = False) -> torch.Tensor:
        """Return (N, R) int64: bytes that each node put on each rail, as `plot_rail_shares` takes.

        N and R are of the nodes and rails that these rows name: of a single rank's, other rails
        are zeros or left out.

        Args:
            phase: dispatch or combine.
            planned: the bytes planned instead.

        Raises:
            ValueError: phase is neither.
        """
        _check_phase(phase)
        num_nodes = max((max(row.source, row.destination) + 1 for row in self.rows), default=0)
        num_rails = max((row.rail + 1 for row in self.rows), default=0)
        table = torch.zeros(num_nodes, num_rails, dtype=torch.int64, device="cpu")
        for row in self.rows:
            if row.phase == phase:
                table[row.source, row.rail] += row.planned_bytes if planned else row.put_bytes
        return table

    def to_dict(self) -> dict[str, list[Any]]:
        """Return the rows as columns."""
        return {field.name: [getattr(row, field.name) for row in self.rows] for field in _FIELDS}

    def to_pandas(self) -> pandas.DataFrame:
        """Return the rows as a DataFrame.

        Raises:
            ModuleNotFoundError: pandas is not installed.
        """
        import pandas

        return pandas.DataFrame([asdict(row) for row in self.rows], columns=[*_NAMES])


def _check_phase(phase: str) -> None:
    if phase not in PHASES:
        raise ValueError(f"phase must be dispatch or combine, got {phase!r}")


_FIELDS = fields(Put)
_NAMES = tuple(field.name for field in _FIELDS)


def stats_of(handle: Any) -> Stats:
    """Read what a handle's dispatch put, and its latest combine if there was one.

    Waits for the device.
    """
    exchange = handle.exchange
    node, local = exchange.node, exchange.local
    records = (handle.out_load[:, local].tolist(), handle.in_load[:, local].tolist())
    words = handle.put_words.tolist()

    def rows() -> Iterator[Put]:
        for phase, planned, counted in zip(PHASES, records, words, strict=True):
            *put_words, record_words = counted
            if not record_words:  # no combine so far
                continue
            for d, num_records in enumerate(planned):
                if d != node:
                    wave = (d - node) % len(planned) if handle.path in WAVES else 1
                    at = (node, local, exchange.rail, d, wave)
                    yield Put(
                        *(phase, *at, num_records, num_records * record_words * 4),
                        put_bytes=put_words[d] * 4,
                    )

    return Stats(tuple(rows()))
