"""The execution paths of the paper as schedulers, and pacing by rate.

Letters: N nodes, R rails, P pairs with bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from railwave.sched.build import now_us, schedule_pairs
from railwave.sched.demand import Demand, check_demand
from railwave.sched.parts import balanced_parts, rule_parts, window_of_pairs
from railwave.sched.schedule import Schedule

WAVE_ORDERS = ("barrier", "stepwise", "free")
Windows = Sequence[Iterable[tuple[int, int]]] | None


def native(demand: Demand, *, windows: Windows = None, rail_rule: str = "source") -> Schedule:
    """Send the submitted windows in turn; the rail is that of a GPU.

    All pairs of a window start together and share NICs fairly.

    Args:
        demand: what must be moved.
        windows: collections of (source, destination) pairs; None for one window of all.
        rail_rule: "source", the rail of the GPU that owns the bytes (DeepEP); "destination", of
            the GPU with the local index of the one they are bound for (NCCL's PXN).

    Raises:
        TypeError, ValueError: a bad window or rule.

    Source: section 3.2 and A.6; bytes on ineligible rails by eq. (9).

    Example:
        GPU 0 of node 0 has 7 bytes for GPU 1 of node 1.

        >>> from railwave.topology import Topology
        >>> demand = Demand.of(np.array([[0, 0, 0, 7]] + [[0] * 4] * 3), Topology(2, 2, 2))
        >>> native(demand).sent_bytes.tolist()
        [[7, 0], [0, 0]]
        >>> native(demand, rail_rule="destination").sent_bytes.tolist()
        [[0, 7], [0, 0]]
    """
    check_demand(demand)
    start_us = now_us()
    window_of, num_windows = window_of_pairs(windows, demand)
    parts = rule_parts(demand, rail_rule)
    how = {"name": "native", "rail_rule": rail_rule}
    return schedule_pairs(demand, parts, window_of, num_windows, start_us, **how)


def rail(demand: Demand, *, windows: Windows = None, record_bytes: int = 1) -> Schedule:
    """Send the submitted windows in turn, every pair divided evenly among its eligible rails.

    Args:
        demand: what must be moved.
        windows: collections of (source, destination) pairs; None for one window of all.
        record_bytes: the unit that is never divided.

    Raises:
        TypeError, ValueError: a bad window, or bytes that are no multiple of `record_bytes`.

    Source: eq. (9).

    Example:
        7 bytes over two rails: the remainder goes to rail (0 + 1) mod 2, so 4 of the 7 that GPU 0
        owns leave rail 0.

        >>> from railwave.topology import Topology
        >>> demand = Demand.of(np.array([[0, 0, 0, 7]] + [[0] * 4] * 3), Topology(2, 2, 2))
        >>> balanced = rail(demand)
        >>> balanced.sent_bytes.tolist(), balanced.before.moved_bytes.tolist()
        ([[3, 4], [0, 0]], [[4, 0]])
    """
    check_demand(demand)
    start_us = now_us()
    window_of, num_windows = window_of_pairs(windows, demand)
    parts = balanced_parts(demand, record_bytes)
    how = {"name": "rail", "rail_rule": "even", "unit_bytes": record_bytes}
    return schedule_pairs(demand, parts, window_of, num_windows, start_us, **how)


def permutation(demand: Demand, *, windows: Windows = None, order: str = "barrier") -> Schedule:
    """Send in cyclic waves, by the rail of the source GPU.

    Args:
        demand: what must be moved.
        windows: not read: waves take the place of the windows.
        order: how waves follow one another: "barrier", "stepwise" or "free", as of `Schedule`.

    Raises:
        ValueError: another order.

    Source: eq. (10).

    Example:
        Node 0 sends to node 1 in wave 1 and to node 2 in wave 2 (windows 0 and 1).

        >>> from railwave.topology import Topology
        >>> demand = Demand.of([[0, 5, 6], [0, 0, 0], [0, 0, 0]], Topology(3, 1, 1))
        >>> waves = permutation(demand)
        >>> waves.destination.tolist(), waves.window.tolist()
        ([1, 2], [0, 1])
    """
    check_demand(demand)
    start_us = now_us()
    how = {"name": "permutation", "rail_rule": "source"} | _waves(order)
    parts = rule_parts(demand, "source")
    return schedule_pairs(demand, parts, *_wave_of_pairs(demand), start_us, **how)


def joint(
    demand: Demand, *, windows: Windows = None, record_bytes: int = 1, order: str = "barrier"
) -> Schedule:
    """Send in cyclic waves, every pair divided evenly among its eligible rails.

    Args:
        demand: what must be moved.
        windows: not read: waves take the place of the windows.
        record_bytes: the unit that is never divided.
        order: as of `permutation`.

    Raises:
        TypeError, ValueError: bytes that are no multiple of `record_bytes`; another order.

    Source: eq. (9) and (10).

    Example:
        >>> from railwave.topology import Topology
        >>> demand = Demand.of(np.array([[0, 0, 0, 7]] + [[0] * 4] * 3), Topology(2, 2, 2))
        >>> joint(demand).transfer_bytes.tolist()
        [3, 4]
    """
    check_demand(demand)
    start_us = now_us()
    how = {"name": "joint", "rail_rule": "even", "unit_bytes": record_bytes} | _waves(order)
    parts = balanced_parts(demand, record_bytes)
    return schedule_pairs(demand, parts, *_wave_of_pairs(demand), start_us, **how)


def rate(demand: Demand, *, windows: Windows = None) -> Schedule:
    """Pace every sender so that all transfers end together and no receiver sees incast.

    With L the bytes of the busiest NIC, sending or receiving, a transfer of D bytes runs at line
    rate * D / L. It needs the whole demand at every sender. The rail is the source GPU's.

    Args:
        demand: what must be moved.
        windows: not read: all pairs run at once.

    Source: Cohen et al. 2026, as section 2.4 of the paper tells it.

    Example:
        Nodes 1 and 2 send 4 and 6 to node 0, whose NIC is the busiest.

        >>> from railwave.topology import Topology
        >>> demand = Demand.of([[0, 0, 0], [4, 0, 0], [6, 0, 0]], Topology(3, 1, 1))
        >>> paced = rate(demand)
        >>> paced.paced, int(paced.received_bytes.max())
        (True, 10)
    """
    check_demand(demand)
    start_us = now_us()
    how = {"name": "rate", "rail_rule": "source", "paced": True}
    parts = rule_parts(demand, "source")
    return schedule_pairs(demand, parts, *window_of_pairs(None, demand), start_us, **how)


def _waves(order: str) -> dict[str, Any]:
    if not isinstance(order, str) or order not in WAVE_ORDERS:
        raise ValueError(f"order must be one of {WAVE_ORDERS}, got {order!r}")
    return {"order": order, "granted": True}


def _wave_of_pairs(demand: Demand) -> tuple[np.ndarray, int]:
    """Return (N, N) int64, the wave of each pair counted from 0, and the number of waves."""
    node = np.arange(demand.topo.nodes)
    return (node[None, :] - node[:, None]) % len(node) - 1, max(1, len(node) - 1)
