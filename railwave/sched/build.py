"""From the parts of node pairs to a `Schedule`.

Letters: N nodes, R rails, W windows, P rows (what a pair sends in one window).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from railwave.sched.demand import Demand
from railwave.sched.parts import bound_by_rail, owned_by_rail
from railwave.sched.schedule import Redistribution, Schedule, sum_by
from railwave.topology import Topology


@dataclass(frozen=True, eq=False)
class Rows:
    """Hold what pairs send in one window each, by rail: from here to a `Schedule` is one step."""

    source: np.ndarray  # (P,) int64 nodes
    destination: np.ndarray  # (P,) int64 nodes
    window: np.ndarray  # (P,) int64
    parts: np.ndarray  # (P, R) int64 bytes

    def transfers(self) -> dict[str, np.ndarray]:
        """Return the columns of a `Schedule`, one transfer for each entry that is not 0."""
        row, rail = np.nonzero(self.parts)
        return {
            "source": self.source[row],
            "destination": self.destination[row],
            "source_rail": rail,
            "destination_rail": rail,
            "transfer_bytes": self.parts[row, rail],
            "window": self.window[row],
        }


def redistribute(
    topo: Topology, have: np.ndarray, want: np.ndarray, group: np.ndarray, num_windows: int
) -> Redistribution:
    """Count what must change rail for rows that have some bytes on each rail and want others.

    Args:
        topo: the cluster.
        have, want: (P, R) int64 bytes, with the same sums over rails.
        group: (P,) int64, window * N + the node in which the row moves.
        num_windows: W.

    Source: |surplus| of Alg. 1, per rail.

    Example:
        Node 0 has 6 bytes on rail 0 and wants 3 on each: 3 leave rail 0, whose two GPUs move 2 at
        most, and 3 enter rail 1, which has one GPU.

        >>> topo = Topology(2, 3, 2, rail_of_gpu=[0, 0, 1])
        >>> moves = redistribute(topo, np.array([[6, 0]]), np.array([[3, 3]]), np.array([0]), 1)
        >>> moves.moved_bytes.tolist(), moves.port_bytes.tolist()
        ([[3, 0]], [[3, 0]])
    """
    size = num_windows * topo.nodes
    moved, port = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.int64)
    for rail, gpus in enumerate(topo.gpus_of_rail):
        surplus = have[:, rail] - want[:, rail]
        if not surplus.any():
            continue
        leaving = sum_by(group, np.maximum(surplus, 0), size)
        entering = sum_by(group, np.maximum(-surplus, 0), size)
        moved += leaving
        port = np.maximum(port, -(-np.maximum(leaving, entering) // len(gpus)))
    shape = (num_windows, topo.nodes)
    return Redistribution(moved.reshape(shape), port.reshape(shape))


def schedule_pairs(
    demand: Demand,
    parts: np.ndarray,
    window_of: np.ndarray,
    num_windows: int,
    start_us: float,
    **how: Any,
) -> Schedule:
    """Make a schedule in which every pair sends in one window.

    Args:
        demand: what must be moved.
        parts: (N, N, R) int64 bytes, by pair and rail.
        window_of: (N, N) int64.
        num_windows: W.
        start_us: `now_us()` when planning began.
        how: further fields of `Schedule`.

    Example:
        Node 0 sends all its 4 bytes by rail 1, though GPU 0 owns them.

        >>> demand = Demand.of([[0, 0, 0, 4]] + [[0] * 4] * 3, Topology(2, 2, 2))
        >>> parts = np.zeros((2, 2, 2), dtype=int); parts[0, 1, 1] = 4
        >>> mine = schedule_pairs(demand, parts, np.zeros((2, 2), int), 1, now_us(), name="mine")
        >>> mine.source_rail.tolist(), mine.before.moved_bytes.tolist()
        ([1], [[4, 0]])
    """
    topo = demand.topo
    source, destination = np.nonzero(demand.between_nodes)
    window = window_of[source, destination]
    rows = Rows(source, destination, window, parts[source, destination])
    owned = owned_by_rail(demand)[source, destination]
    bound = bound_by_rail(demand)[source, destination]
    leave, enter = window * topo.nodes + source, window * topo.nodes + destination
    return Schedule(
        topo=topo,
        **rows.transfers(),
        before=redistribute(topo, owned, rows.parts, leave, num_windows),
        after=redistribute(topo, rows.parts, bound, enter, num_windows),
        plan_us=now_us() - start_us,
        **how,
    )


def now_us() -> float:
    """Return a clock in microseconds, for `plan_us`."""
    return time.perf_counter_ns() / 1000
