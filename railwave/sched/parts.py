"""Divide the bytes of node pairs among rails, for all pairs of a cluster at once.

Letters: N nodes, G GPUs a node, R rails, P rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from railwave._check import check_index, check_positive_int
from railwave.sched.demand import MOST_BYTES, Demand
from railwave.topology import Topology


def even_parts(amount: np.ndarray, eligible: np.ndarray, turn: np.ndarray) -> np.ndarray:
    """Divide amounts among eligible rails, equal to within one unit: `quota_ref` for many pairs.

    Args:
        amount: (...) int64, not negative: bytes or records.
        eligible: (..., R) bool, at least one rail where the amount is not 0.
        turn: (...) int64; the remainder goes to the eligible rails number (turn + j) mod m, one
            unit each. railwave takes turn = s + d.

    Returns:
        (..., R) int64, 0 on rails that are not eligible.

    Source: eq. (9).

    Example:
        5 over two rails: 2 each, and the remainder of 1 to rail 1 mod 2; the same over the rails
        0 and 2, the eligible rails number 0 and 1.

        >>> even_parts(np.array([5, 5]), np.array([[1, 1, 0], [1, 0, 1]], bool), np.array([1, 2]))
        array([[2, 3, 0],
               [3, 0, 2]])
    """
    num_eligible = np.maximum(eligible.sum(axis=-1), 1)
    share, remainder = np.divmod(amount, num_eligible)
    place = np.cumsum(eligible, axis=-1) - 1 - (turn % num_eligible)[..., None]
    place += (place < 0) * num_eligible[..., None]  # now in [0, m) on eligible rails
    return (share[..., None] + (place < remainder[..., None])) * eligible


def pair_turn(nodes: int) -> np.ndarray:
    """Return (N, N) int64: s + d, where the remainder of pair (s, d) begins.

    Example:
        >>> pair_turn(2).tolist()
        [[0, 1], [1, 2]]
    """
    return np.add.outer(np.arange(nodes), np.arange(nodes))


def owned_by_rail(demand: Demand) -> np.ndarray:
    """Return (N, N, R) int64, bytes of each node pair by the rail of the GPU that owns them.

    Example:
        GPUs 0 and 1 of node 0 own 1 and 2 bytes for node 1; they share rail 0.

        >>> matrix = np.zeros((6, 6), int); matrix[0, 3], matrix[1, 5] = 1, 2
        >>> demand = Demand.of(matrix, Topology(2, 3, 2))
        >>> owned_by_rail(demand)[0, 1].tolist(), bound_by_rail(demand)[0, 1].tolist()
        ([3, 0], [1, 2])
    """
    return _by_rail(demand.owned.transpose(0, 2, 1), demand.topo)


def bound_by_rail(demand: Demand) -> np.ndarray:
    """Return (N, N, R) int64, bytes of each node pair by the rail of the GPU they are bound for.

    Example:
        >>> demand = Demand.of([[0, 0, 0, 4]] + [[0] * 4] * 3, Topology(2, 2, 2))
        >>> bound_by_rail(demand)[0, 1].tolist()
        [0, 4]
    """
    return _by_rail(demand.bound, demand.topo)


def balanced_parts(demand: Demand, record_bytes: int) -> np.ndarray:
    """Divide every pair's records among its eligible rails.

    Args:
        demand: every pair's bytes are a multiple of `record_bytes`.
        record_bytes: the unit that is never divided; 1 to divide bytes.

    Returns:
        (N, N, R) int64 bytes.

    Raises:
        ValueError: bytes that are no multiple.

    Source: eq. (9).

    Example:
        3 records of 10 bytes from node 0 to node 1; the remainder goes to rail (0 + 1) mod 2.

        >>> topo = Topology(2, 2, 2)
        >>> owned = np.zeros((2, 2, 2), int); owned[0, 0, 1] = 30
        >>> bound = np.zeros((2, 2, 2), int); bound[0, 1, 0] = 30
        >>> balanced_parts(Demand(owned, bound, topo), 10)[0, 1].tolist()
        [10, 20]
    """
    unit = check_positive_int(record_bytes, "record_bytes", below=MOST_BYTES)
    records, rest = np.divmod(demand.between_nodes, unit)
    if rest.any():
        pair = tuple(np.argwhere(rest)[0].tolist())
        raise ValueError(
            f"record_bytes must divide the bytes of every pair, got {unit} for "
            f"{int(demand.between_nodes[pair])} bytes of the pair {pair}"
        )
    topo = demand.topo
    return even_parts(records, topo.eligible_rails.numpy(), pair_turn(topo.nodes)) * unit


def rule_parts(demand: Demand, rail_rule: str) -> np.ndarray:
    """Leave bytes on the rail of a GPU; divide only those of ineligible rails, byte by byte.

    Args:
        demand: what must be moved.
        rail_rule: "source", the GPU that owns the bytes; "destination", the one they go to.

    Returns:
        (N, N, R) int64 bytes.

    Raises:
        ValueError: an unknown rule.

    Source: `native_quota_ref`, for all pairs.

    Example:
        7 bytes from GPU 0 of node 0 to GPU 1 of node 1.

        >>> topo = Topology(2, 2, 2)
        >>> owned = np.zeros((2, 2, 2), int); owned[0, 0, 1] = 7
        >>> bound = np.zeros((2, 2, 2), int); bound[0, 1, 1] = 7
        >>> demand = Demand(owned, bound, topo)
        >>> rule_parts(demand, "source")[0, 1].tolist()
        [7, 0]
        >>> rule_parts(demand, "destination")[0, 1].tolist()
        [0, 7]
    """
    rules = {"source": owned_by_rail, "destination": bound_by_rail}
    if rail_rule not in rules:
        raise ValueError(f"rail_rule must be 'source' or 'destination', got {rail_rule!r}")
    held = rules[rail_rule](demand)
    eligible = demand.topo.eligible_rails.numpy()
    if eligible.all():
        return held
    stranded = (held * ~eligible).sum(axis=2)
    return held * eligible + even_parts(stranded, eligible, pair_turn(demand.topo.nodes))


def window_of_pairs(
    windows: Sequence[Iterable[tuple[int, int]]] | None, demand: Demand
) -> tuple[np.ndarray, int]:
    """Say in which window each pair sends.

    Args:
        windows: collections of (source, destination) pairs, in the order in which they are
            submitted. None: one window of all pairs.
        demand: what must be moved.

    Returns:
        ((N, N) int64, -1 for a pair of no window; the number of windows, at least 1).

    Raises:
        TypeError, ValueError: a node out of range, a pair of a node with itself, a pair in two
            windows, or a pair with bytes in none.

    Example:
        >>> demand = Demand.of([[0, 5, 5], [5, 0, 0], [0, 0, 0]], Topology(3, 1, 1))
        >>> window_of_pairs([{(0, 1), (1, 0)}, {(0, 2)}], demand)[0].tolist()
        [[-1, 0, 1], [0, -1, -1], [-1, -1, -1]]
    """
    nodes = demand.topo.nodes
    if windows is None:
        return np.zeros((nodes, nodes), dtype=np.int64), 1
    window_of = np.full((nodes, nodes), -1, dtype=np.int64)
    for number, window in enumerate(windows := _checked_windows(windows)):
        for source, destination in window:
            check_index(source, nodes, f"windows[{number}]: source")
            check_index(destination, nodes, f"windows[{number}]: destination")
            pair = (source, destination)
            if source == destination:
                raise ValueError(f"windows[{number}] must pair different nodes, got {pair}")
            if window_of[pair] >= 0:
                raise ValueError(
                    f"windows must have each pair once, got {pair} in windows {window_of[pair]} "
                    f"and {number}"
                )
            window_of[pair] = number
    for pair in np.argwhere((window_of < 0) & (demand.between_nodes > 0))[:1].tolist():
        raise ValueError(f"windows must have every pair with bytes, got none with {tuple(pair)}")
    return window_of, max(1, len(windows))


def _checked_windows(windows: Any) -> list[set[tuple[Any, Any]]]:
    try:
        return [{(source, destination) for source, destination in window} for window in windows]
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"windows must be collections of (source, destination) pairs, got {windows!r:.80}: "
            f"{error}"
        ) from None


def _by_rail(by_gpu: np.ndarray, topo: Topology) -> np.ndarray:
    """Return (N, N, R) int64 sums of an (N, N, G) table over the GPUs of each rail."""
    table = np.zeros((*by_gpu.shape[:2], topo.rails_per_node), dtype=np.int64)
    for gpu, rail in enumerate(topo.rail_of_gpu):
        table[:, :, rail] += by_gpu[:, :, gpu]
    return table
