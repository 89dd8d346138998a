"""Check that a schedule moves exactly what a demand asks for, and bound how soon that can end."""

from __future__ import annotations

import numpy as np

from railwave.sched.demand import Demand, check_demand
from railwave.sched.parts import bound_by_rail, owned_by_rail
from railwave.sched.schedule import COLUMNS, Schedule, sum_by


def audit(schedule: Schedule, demand: Demand) -> None:
    """Raise unless the transfers rebuild the demand exactly.

    Checked: nodes, rails and windows in range; no empty transfer and none within a node; only
    eligible rails, the same at both ends; in waves, one sender a receiver; the bytes of every pair
    of nodes; and, where the schedule names a rail rule, the bytes on every rail: even to within a
    unit; or what the GPUs of an eligible rail have, and of what the others have an even part. Not
    checked: what NVLink moves.

    Args:
        schedule: what a scheduler made.
        demand: what it was made for.

    Raises:
        ValueError: the first thing that is wrong.

    Source: eq. (9) for the bytes of ineligible rails.

    Example:
        >>> from railwave.sched import SCHEDULERS
        >>> from railwave.topology import Topology
        >>> demand = Demand.of([[0, 8], [0, 0]], Topology(2, 1, 1))
        >>> audit(SCHEDULERS["native"](demand), demand)
        >>> audit(SCHEDULERS["native"](demand), Demand.of([[0, 9], [0, 0]], demand.topo))
        Traceback (most recent call last):
        ValueError: schedule must move 9 bytes of the pair (0, 1), got 8
    """
    check_demand(demand)
    if not isinstance(schedule, Schedule):
        raise TypeError(f"schedule must be a railwave Schedule, got {type(schedule).__name__}")
    topo = demand.topo
    if schedule.topo != topo:
        raise ValueError(f"schedule must be for {topo}, got {schedule.topo}")
    N, R = topo.nodes, topo.rails_per_node
    for name, end in zip(COLUMNS, (N, N, R, R, None, schedule.num_windows), strict=True):
        column, start = getattr(schedule, name), int(end is None)
        wrong = (column < start) if end is None else (column < 0) | (column >= end)
        if wrong.any():
            limit = "at least 1" if end is None else f"in [0, {end})"
            raise ValueError(f"{name} must be {limit}, got {int(column[wrong][0])}")
    if (schedule.source == schedule.destination).any():
        raise ValueError("destination must differ from source in every transfer")
    eligible = topo.eligible_rails.numpy()
    for name in ("source_rail", "destination_rail"):
        allowed = eligible[schedule.source, schedule.destination, getattr(schedule, name)]
        if not allowed.all():
            where = int(np.flatnonzero(~allowed)[0])
            pair = (int(schedule.source[where]), int(schedule.destination[where]))
            rail = int(getattr(schedule, name)[where])
            raise ValueError(f"{name} must be eligible for the pair {pair}, got {rail}")
    apart = schedule.source_rail != schedule.destination_rail
    if apart.any():
        where = int(np.flatnonzero(apart)[0])
        rails = int(schedule.source_rail[where]), int(schedule.destination_rail[where])
        raise ValueError(f"source_rail and destination_rail must be the same rail, got {rails}")
    if schedule.granted:
        _audit_waves(schedule)
    pair = schedule.source * N + schedule.destination
    sent = sum_by(pair * R + schedule.source_rail, schedule.transfer_bytes, N * N * R)
    sent = sent.reshape(N, N, R)
    wanted = demand.between_nodes
    for s, d in np.argwhere(sent.sum(axis=2) != wanted)[:1].tolist():
        raise ValueError(
            f"schedule must move {wanted[s, d]} bytes of the pair {(s, d)}, got {sent[s, d].sum()}"
        )
    if schedule.rail_rule == "even":
        _audit_even(schedule.unit_bytes, sent, demand)
    elif schedule.rail_rule is not None:
        _audit_rails(schedule.rail_rule, sent, demand)


def _audit_waves(schedule: Schedule) -> None:
    """Refuse a window in which a node sends to two, or receives from two."""
    N = schedule.topo.nodes
    # All rails of a pair count as one.
    pairs = np.unique((schedule.window * N + schedule.source) * N + schedule.destination)
    window, pair = np.divmod(pairs, N * N)
    for name, node in (("send to", pair // N), ("receive from", pair % N)):
        count = np.bincount(window * N + node)
        for where in np.flatnonzero(count > 1)[:1].tolist():
            raise ValueError(
                f"in a wave a node must {name} one other, got {count[where]} for node {where % N} "
                f"in window {where // N}"
            )


def _audit_even(unit_bytes: int, sent: np.ndarray, demand: Demand) -> None:
    eligible = demand.topo.eligible_rails.numpy()
    most = np.where(eligible, sent, 0).max(axis=2)
    least = np.where(eligible, sent, sent.max(initial=0)).min(axis=2)
    wrong = (most - least > unit_bytes) & (demand.between_nodes > 0)
    for s, d in np.argwhere(wrong)[:1].tolist():
        raise ValueError(
            f"schedule must send a pair evenly over its rails, to within {unit_bytes} bytes; pair "
            f"{(s, d)} sends {sent[s, d].tolist()}"
        )


def _audit_rails(rail_rule: str, sent: np.ndarray, demand: Demand) -> None:
    eligible = demand.topo.eligible_rails.numpy()
    held = owned_by_rail(demand) if rail_rule == "source" else bound_by_rail(demand)
    extra = np.where(eligible, sent - held, 0)
    spread = extra.max(axis=2) - np.where(eligible, extra, extra.max()).min(axis=2)
    # A rail with less than it has would leave more than 1 to another, totals being equal.
    wrong = (spread > 1) & (demand.between_nodes > 0)
    for s, d in np.argwhere(wrong)[:1].tolist():
        raise ValueError(
            f"schedule must leave bytes on the rail of their {rail_rule} GPU where it is "
            f"eligible: pair {(s, d)} has {held[s, d].tolist()} by rail and sends "
            f"{sent[s, d].tolist()}"
        )


def bound_s(demand: Demand, rail_bytes_s: float) -> float:
    """Return T*, the seconds below which no schedule can end, whatever it redistributes.

    A node must send its row and receive its column of the demand by the NICs that it has: those
    that are eligible with at least one peer. T* is the longest such time of any node.

    Args:
        demand: what must be moved.
        rail_bytes_s: bytes per second of one NIC, in each direction.

    Raises:
        ValueError: a rate that is not positive.

    Source: theorem 1 of FAST; theorems 2 and 3 of RailS.

    Example:
        Node 0 receives 10 bytes by two NICs of 1 byte a second; no node sends more than 6.

        >>> from railwave.topology import Topology
        >>> owned = np.zeros((3, 2, 3), int); owned[1, 0, 0], owned[2, 0, 0] = 4, 6
        >>> bound = np.zeros((3, 3, 2), int); bound[1, 0, 0], bound[2, 0, 1] = 4, 6
        >>> bound_s(Demand(owned, bound, Topology(3, 2, 2)), 1.0)
        5.0
    """
    check_demand(demand)
    if not rail_bytes_s > 0:
        raise ValueError(f"rail_bytes_s must be positive, got {rail_bytes_s}")
    between, nodes = demand.between_nodes, demand.topo.nodes
    away = ~np.eye(nodes, dtype=bool)
    usable = (demand.topo.eligible_rails.numpy() & away[:, :, None]).any(axis=1).sum(axis=1)
    busiest = np.maximum(between.sum(axis=0), between.sum(axis=1))
    return float((busiest / np.maximum(usable, 1)).max() / rail_bytes_s)
