"""What the NICs' own counters say was sent meanwhile, beside what railwave's kernels counted."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from railwave.discovery import SYSFS, Node, discover
from railwave.stats import Stats

if TYPE_CHECKING:
    import pandas

WORD_BYTES = 4  # of port_xmit_data and port_rcv_data: the unit of the InfiniBand specification


@dataclass(frozen=True)
class PortBytes:
    """What one port of this node sent and received, and what railwave put on its rail."""

    port: str  # such as mlx5_0:1
    rail: int  # -1 for a port that no GPU uses
    sent_bytes: int  # all traffic of the port, headers and others' included
    received_bytes: int
    put_bytes: int | None  # by the stats given; None without


_NAMES = tuple(field.name for field in fields(PortBytes))


class PortCounters:
    """Read the counters of this node's NIC ports before and after a `with`.

    They count all traffic of a port; let nothing else run meanwhile. A process for each node is
    enough. Some drivers bring counters up to date every second or so: leave some time before the
    end of the `with`.

    Args:
        sysfs: where sysfs is mounted.

    Raises:
        ValueError: there is no such folder.

    Example:
        >>> with PortCounters() as ports:
        ...     pass  # dispatches and combines
        >>> sum(row.put_bytes or 0 for row in ports.rows())
        0
    """

    def __init__(self, sysfs: str | os.PathLike = SYSFS) -> None:
        self._root = Path(sysfs)
        self.node: Node = discover(sysfs)
        self._before: dict[str, tuple[int, int]] = {}
        self._after: dict[str, tuple[int, int]] = {}

    def __enter__(self) -> PortCounters:
        self._before = self._read()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._after = self._read()

    def rows(
        self, stats: Stats | Sequence[Stats] = (), *, source: int | None = None
    ) -> list[PortBytes]:
        """Return a row for each port that has counters.

        Args:
            stats: of handles that were dispatched and combined meanwhile, of all GPUs of this node:
                what they put stands beside what the port of their rail sent.
            source: this node's number among the nodes of the stats; None: all are of this node.
        """
        several = [stats] if isinstance(stats, Stats) else list(stats)
        put: dict[int, int] = {}
        for row in Stats.total(several).rows:
            if source in (None, row.source):
                put[row.rail] = put.get(row.rail, 0) + row.put_bytes
        rows = []
        for index, port in enumerate(self.node.ports):
            if port.label in self._after and port.label in self._before:
                pairs = zip(self._after[port.label], self._before[port.label], strict=True)
                sent, received = (after - before for after, before in pairs)
                rail = self.node.used.index(index) if index in self.node.used else -1
                counted = put.get(rail, 0) if several and rail >= 0 else None
                rows.append(PortBytes(port.label, rail, sent, received, counted))
        return rows

    def to_dict(self, stats: Stats | Sequence[Stats] = (), **options: Any) -> dict[str, list[Any]]:
        """Return the rows as columns; the arguments as of `rows`."""
        rows = self.rows(stats, **options)
        return {
            field.name: [getattr(row, field.name) for row in rows] for field in fields(PortBytes)
        }

    def to_pandas(self, stats: Stats | Sequence[Stats] = (), **options: Any) -> pandas.DataFrame:
        """Return the rows as a DataFrame; the arguments as of `rows`."""
        import pandas

        rows = [asdict(row) for row in self.rows(stats, **options)]
        return pandas.DataFrame(rows, columns=[*_NAMES])

    def _read(self) -> dict[str, tuple[int, int]]:
        """Return bytes sent and received so far, of ports that count them."""
        found = {}
        for port in self.node.ports:
            folder = self._root / "class/infiniband" / port.name / f"ports/{port.port}/counters"
            try:
                sent, received = (
                    int((folder / name).read_text(encoding="utf-8")) * WORD_BYTES
                    for name in ("port_xmit_data", "port_rcv_data")
                )
            except (OSError, ValueError):
                continue
            found[port.label] = (sent, received)
        return found
