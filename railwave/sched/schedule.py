"""What a scheduler hands over: transfers between NICs, window by window, as data.

Letters: n transfers, W windows, N nodes, R rails.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from railwave.topology import Topology

ORDERS = ("barrier", "stepwise", "free", "pipelined", "chunkwise")
MOST_OUTSTANDING = 2
COLUMNS = ("source", "destination", "source_rail", "destination_rail", "transfer_bytes", "window")


@dataclass(frozen=True, eq=False)
class Redistribution:
    """Count what NVLink moves from rail to rail within each node, window by window.

    A `Demand` has the margins over source and destination GPUs only, so these are the fewest bytes
    that turn one distribution over rails into the other. That is exact before sending
    (Algorithm 1 moves no more); after receiving, it is a lower bound.
    """

    moved_bytes: np.ndarray  # (W, N) int64, bytes that change rail within the node
    # (W, N) int64, bytes that leave or enter a GPU, whichever is more, at the busiest rail; the
    # GPUs of one rail divide its bytes evenly.
    port_bytes: np.ndarray


@dataclass(frozen=True, eq=False)
class Schedule:
    """Hold the transfers of one phase between NICs and how their windows follow one another.

    Args:
        name: the scheduler.
        topo: the cluster.
        source, destination: (n,) int64 nodes.
        source_rail, destination_rail: (n,) int64, the NIC at each end.
        transfer_bytes: (n,) int64, at least 1.
        window: (n,) int64 in [0, W).
        before: what source nodes redistribute before each window, (W, N) tables.
        after: what destination nodes redistribute after each window.
        order: "barrier", a window (with its redistribution) begins when the one before it has
            ended everywhere; "pipelined", the same for transfers, and redistribution runs beside
            the transfers of the windows next to it; "free", a NIC sends in its next window as soon
            as it has sent and its peer has received in theirs; "stepwise", once its whole node has
            sent, and both ends have sent and received, as rounds of railwave's dispatch follow one
            another; "chunkwise", one window in which receivers grant senders chunk by chunk, as in
            `docs/granted.md`.
        paced: senders keep to a rate of bytes / (bytes of the window's busiest NIC), so that no
            receiver is oversubscribed; if not, they share NICs max-min fairly.
        granted: windows are waves, one sender a receiver; receivers let each after the first begin
            by a grant.
        outstanding: grants that a receiver may have out, 1 or 2, where the order is "chunkwise".
        rail_rule: "source" or "destination", the GPU whose rail is taken; "even", every pair evenly
            over its rails; None for any rail.
        unit_bytes: what is never divided, where rail_rule is "even".
        plan_us: how long one process took to plan for all nodes, in microseconds.

    Raises:
        TypeError, ValueError: a column or table of another dtype or shape, or an unknown order.

    Example:
        One transfer of 8 bytes from node 0 to node 1 on rail 0.

        >>> zero, one = np.array([0]), np.array([1])
        >>> still = Redistribution(np.zeros((1, 2), int), np.zeros((1, 2), int))
        >>> schedule = Schedule(
        ...     "mine", Topology(2, 1, 1), zero, one, zero, zero, np.array([8]), zero, still, still)
        >>> schedule.num_windows, schedule.sent_bytes.tolist(), schedule.received_bytes.tolist()
        (1, [[8], [0]], [[0], [8]])
    """

    name: str
    topo: Topology
    source: np.ndarray
    destination: np.ndarray
    source_rail: np.ndarray
    destination_rail: np.ndarray
    transfer_bytes: np.ndarray
    window: np.ndarray
    before: Redistribution
    after: Redistribution
    order: str = "barrier"
    paced: bool = False
    granted: bool = False
    outstanding: int = 1
    rail_rule: str | None = None
    unit_bytes: int = 1
    plan_us: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.topo, Topology):
            raise TypeError(f"topo must be a railwave.Topology, got {type(self.topo).__name__}")
        if self.order not in ORDERS:
            raise ValueError(f"order must be one of {ORDERS}, got {self.order!r}")
        if self.outstanding not in range(1, MOST_OUTSTANDING + 1):
            raise ValueError(
                f"outstanding must be in [1, {MOST_OUTSTANDING}], got {self.outstanding!r}"
            )
        if self.order == "chunkwise" and self.num_windows != 1:
            raise ValueError(
                f"order 'chunkwise' must have one window, got {self.num_windows} windows"
            )
        for name in COLUMNS:
            _check_int64(getattr(self, name), name, (len(self.source),))
        tables = (self.num_windows, self.topo.nodes)
        for side in ("before", "after"):
            moves = getattr(self, side)
            _check_int64(moves.moved_bytes, f"{side}.moved_bytes", tables)
            _check_int64(moves.port_bytes, f"{side}.port_bytes", tables)

    @property
    def num_windows(self) -> int:
        """Count the windows, W, those without transfers included."""
        return len(self.before.moved_bytes)

    @property
    def sent_bytes(self) -> np.ndarray:
        """(N, R) int64, bytes that leave by each NIC."""
        return self._by_nic(self.source, self.source_rail)

    @property
    def received_bytes(self) -> np.ndarray:
        """(N, R) int64, bytes that arrive at each NIC."""
        return self._by_nic(self.destination, self.destination_rail)

    def _by_nic(self, node: np.ndarray, rail: np.ndarray) -> np.ndarray:
        shape = (self.topo.nodes, self.topo.rails_per_node)
        nic = node * shape[1] + rail
        return sum_by(nic, self.transfer_bytes, shape[0] * shape[1]).reshape(shape)


def sum_by(index: np.ndarray, values: np.ndarray, size: int) -> np.ndarray:
    """Return (size,) int64, the sum of the values at each index: exact up to 2**53.

    Example:
        >>> sum_by(np.array([2, 0, 2]), np.array([5, 6, 7]), 3).tolist()
        [6, 0, 12]
    """
    return np.bincount(index, weights=values, minlength=size).astype(np.int64)


def _check_int64(table: np.ndarray, name: str, shape: tuple[int, ...]) -> None:
    if not isinstance(table, np.ndarray) or table.dtype != np.int64:
        kind = getattr(table, "dtype", type(table).__name__)
        raise TypeError(f"{name} must be int64 of shape {shape}, got {kind}")
    if table.shape != shape:
        raise ValueError(f"{name} must be int64 of shape {shape}, got shape {table.shape}")
