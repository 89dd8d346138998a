"""What the NICs' own counters say was sent meanwhile, beside what railwave's kernels counted."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from railwave.discovery import SYSFS, Node, discover, visible_rails
from railwave.stats import Put, Stats

if TYPE_CHECKING:
    import pandas

WORD_BYTES = 4  # of port_xmit_data and port_rcv_data: the unit of the InfiniBand specification


@dataclass(frozen=True)
class PortBytes:
    """What one port of this node sent and received, and what railwave put on its rail."""

    port: str  # such as mlx5_0:1
    rail: int  # -1 for a port that no GPU uses
    sent_bytes: int | None  # all traffic of the port; None where its counter went back
    received_bytes: int | None
    put_bytes: int | None  # by the stats given; None where they say nothing of the rail


_NAMES = tuple(field.name for field in fields(PortBytes))


class PortCounters:
    """Read the counters of this node's NIC ports before and after a `with`.

    They count all traffic of a port, headers too; let nothing else run meanwhile. A process for
    each node is enough. Wait for the GPU before the end of the `with`, as a call may still be on
    the wire.

    Args:
        sysfs: where sysfs is mounted.
        settle_s: seconds to wait before the second reading: drivers bring counters up to date every
            second or so.

    Raises:
        ValueError: there is no such folder.

    Example:
        >>> with PortCounters() as ports:
        ...     pass  # dispatches and combines
        >>> sum(row.put_bytes or 0 for row in ports.rows())
        0
    """

    def __init__(self, sysfs: str | os.PathLike = SYSFS, *, settle_s: float = 0.0) -> None:
        self._root, self._settle_s = Path(sysfs), settle_s
        self.node: Node = discover(sysfs)
        self._before: dict[str, tuple[int, int]] = {}
        self._after: dict[str, tuple[int, int]] = {}

    def __enter__(self) -> PortCounters:
        self._before, self._after = self._read(), {}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        time.sleep(self._settle_s)
        self._after = self._read()

    def rows(
        self, stats: Stats | Sequence[Stats] = (), *, source: int | None = None
    ) -> list[PortBytes]:
        """Return a row for each port that has counters.

        Args:
            stats: of handles that were dispatched and combined meanwhile, of all GPUs of this node:
                what they put stands beside what the port of their rail sent.
            source: this node's number among the nodes of the stats; may be left out where they are
                of one node, this one.

        Raises:
            TypeError: stats are none.
            ValueError: source is left out, and stats are of several nodes; or of none of them.
        """
        several = [stats] if isinstance(stats, Stats) else list(stats)
        if not all(isinstance(one, Stats) for one in several):
            kinds = ", ".join(sorted({type(one).__name__ for one in several}))
            raise TypeError(f"stats must be of handles (handle.stats()), got {kinds}")
        nodes = sorted({row.source for one in several for row in one.rows})
        if source is None and len(nodes) > 1:
            raise ValueError(
                f"source must be given, this node's number, since stats are of the nodes {nodes}"
            )
        if source is not None and nodes and source not in nodes:
            text = f"source must be one of the nodes of the stats, {nodes}, got {source!r}"
            raise ValueError(text)
        put: dict[int, int] = {}
        for row in Stats.total(several).rows:
            if source in (None, row.source):
                rail = self._rail_of(row)
                put[rail] = put.get(rail, 0) + row.put_bytes
        rows = []
        for index, port in enumerate(self.node.ports):
            if port.label in self._after and port.label in self._before:
                pairs = zip(self._after[port.label], self._before[port.label], strict=True)
                sent, received = (_grown(after, before) for after, before in pairs)
                rail = self.node.used.index(index) if index in self.node.used else -1
                rows.append(PortBytes(port.label, rail, sent, received, put.get(rail)))
        return rows

    def _rail_of(self, row: Put) -> int:
        """Return the rail of this node, by whose GPU it is: a job may number fewer rails."""
        visible = visible_rails(self.node, os.environ.get("CUDA_VISIBLE_DEVICES"))
        return visible[row.gpu] if row.gpu < len(visible) else row.rail

    def to_dict(self, stats: Stats | Sequence[Stats] = (), **options: Any) -> dict[str, list[Any]]:
        """Return the rows as columns; the arguments as of `rows`."""
        rows = self.rows(stats, **options)
        return {
            field.name: [getattr(row, field.name) for row in rows] for field in fields(PortBytes)
        }

    def to_pandas(self, stats: Stats | Sequence[Stats] = (), **options: Any) -> pandas.DataFrame:
        """Return the rows as a DataFrame; the arguments as of `rows`.

        Raises:
            ModuleNotFoundError: pandas is not installed.
        """
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
                    _number((folder / name).read_text(encoding="ascii")) * WORD_BYTES
                    for name in ("port_xmit_data", "port_rcv_data")
                )
            except (OSError, ValueError):
                continue
            found[port.label] = (sent, received)
        return found


def _number(text: str) -> int:
    if not re.fullmatch("[0-9]{1,20}", text.strip()):
        raise ValueError(f"no counter: {text[:20]!r}")
    return int(text)


def _grown(after: int, before: int) -> int | None:
    """Return by how much a counter grew; None if it wrapped or was reset."""
    return after - before if after >= before else None
