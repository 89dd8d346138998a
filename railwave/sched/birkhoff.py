"""Cut a demand into one-to-one stages, as FAST does it: Birkhoff's decomposition.

Letters: N nodes, R rails, S stages, P rows (what a pair sends in one stage).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from railwave.sched.build import Rows, now_us, redistribute
from railwave.sched.demand import Demand, check_demand
from railwave.sched.parts import bound_by_rail, even_parts, owned_by_rail
from railwave.sched.schedule import Redistribution, Schedule


@dataclass(frozen=True, eq=False)
class Stages:
    """Hold one-to-one stages; a stage may move less than its weight, where it was padded."""

    destination: np.ndarray  # (S, N) int64, the node that each node sends to
    moved: np.ndarray  # (S, N) int64, bytes that it sends there
    weight: np.ndarray  # (S,) int64, bytes of a whole pair in this stage


def birkhoff(matrix: np.ndarray) -> Stages:
    """Decompose a matrix into permutations whose weights add up to its largest row or column sum.

    Pad to equal sums, then repeat: a perfect matching on the positive entries, its smallest entry
    as weight, subtract. A pair moves its own bytes before its padding. Each stage repairs the
    matching of the one before it.

    Args:
        matrix: (N, N) int64, not negative.

    Returns:
        At most N * N - 2 * N + 2 stages.

    Source: FAST (Lei et al. 2026), Birkhoff's theorem.

    Example:
        All sums are 3: the cycle 0 -> 1 -> 2 with 2 each, then the cycle 0 -> 2 -> 1 with 1.

        >>> stages = birkhoff(np.array([[0, 2, 1], [1, 0, 2], [2, 1, 0]]))
        >>> stages.weight.tolist(), stages.destination.tolist()
        ([2, 1], [[1, 2, 0], [2, 0, 1]])

        Node 1 has 2 where node 0 has 3: it is padded by 1, and moves its own 2 only.

        >>> birkhoff(np.array([[0, 3], [2, 0]])).moved.tolist()
        [[3, 2]]
    """
    nodes = len(matrix)
    own, padded = matrix.astype(np.int64), _padded(matrix)
    row_to_column, column_to_row = np.full(nodes, -1), np.full(nodes, -1)
    row = np.arange(nodes)
    destination, moved, weight = [], [], []
    while padded.any():
        for unmatched in np.flatnonzero(row_to_column < 0):
            _augment(padded > 0, unmatched, row_to_column, column_to_row)
        amount = padded[row, row_to_column].min()
        padded[row, row_to_column] -= amount
        real = np.minimum(own[row, row_to_column], amount)
        own[row, row_to_column] -= real
        destination.append(row_to_column.copy())
        moved.append(real)
        weight.append(amount)
        ended = padded[row, row_to_column] == 0
        column_to_row[row_to_column[ended]] = -1
        row_to_column[ended] = -1
    shape = (len(weight), nodes)
    return Stages(
        np.array(destination, dtype=np.int64).reshape(shape),
        np.array(moved, dtype=np.int64).reshape(shape),
        np.array(weight, dtype=np.int64),
    )


def fast(demand: Demand, *, windows: Any = None) -> Schedule:
    """Balance every tile over its rails, then send it in one-to-one stages of equal sums.

    All tiles (what one node has for another) are balanced before the first stage; what a stage
    delivers is redistributed beside the next stage. A stage divides each pair's bytes by eq. (9),
    the remainder beginning at (s + d + stage). Stages without bytes are left out.

    Args:
        demand: what must be moved.
        windows: not read: stages take the place of the windows.

    Source: FAST (Lei et al. 2026), the paper's baseline (section 4.1).

    Example:
        One stage moves 3 bytes one way and 2 the other, over 2 rails; the remainder of 3 goes to
        rail (0 + 1 + 0) mod 2.

        >>> from railwave.topology import Topology
        >>> matrix = np.zeros((4, 4), int); matrix[0, 2], matrix[2, 0] = 3, 2
        >>> staged = fast(Demand.of(matrix, Topology(2, 2, 2)))
        >>> staged.window.tolist(), staged.transfer_bytes.tolist()
        ([0, 0, 0, 0], [1, 2, 1, 1])
    """
    check_demand(demand)
    start_us = now_us()
    topo = demand.topo
    stages = birkhoff(demand.between_nodes)
    moves = stages.moved[stages.moved.any(axis=1)]
    num_windows = max(1, len(moves))
    window, source = np.nonzero(moves)
    destination = stages.destination[stages.moved.any(axis=1)][window, source]
    eligible = topo.eligible_rails.numpy()[source, destination]
    amount = moves[window, source]
    parts = even_parts(amount, eligible, source + destination + window)
    rows = Rows(source, destination, window, parts)
    enter = window * topo.nodes + destination
    after = redistribute(topo, parts, _bound_parts(rows, amount, demand), enter, num_windows)
    return Schedule(
        name="fast",
        topo=topo,
        **rows.transfers(),
        before=_balance_tiles(rows, demand, num_windows),
        after=after,
        order="pipelined",
        plan_us=now_us() - start_us,
    )


def _padded(matrix: np.ndarray) -> np.ndarray:
    """Return a copy with equal row and column sums: the rest of each row, from the left."""
    padded = matrix.astype(np.int64)
    size = max(int(matrix.sum(axis=0).max()), int(matrix.sum(axis=1).max()))
    row_rest, column_rest = size - matrix.sum(axis=1), size - matrix.sum(axis=0)
    row = column = 0
    while row < len(matrix) and column < len(matrix):
        amount = min(row_rest[row], column_rest[column])
        padded[row, column] += amount
        row_rest[row] -= amount
        column_rest[column] -= amount
        if row_rest[row] == 0:
            row += 1
        else:
            column += 1
    return padded


def _augment(
    positive: np.ndarray, start: int, row_to_column: np.ndarray, column_to_row: np.ndarray
) -> None:
    """Match row `start` by the shortest alternating path; the matching is changed in place."""
    unseen = np.ones(len(positive), dtype=bool)
    reached_from = np.full(len(positive), -1)  # column -> the row from which it was reached
    rows = [int(start)]
    for row in rows:
        reached = np.flatnonzero(positive[row] & unseen)
        unseen[reached] = False
        reached_from[reached] = row
        free = reached[column_to_row[reached] < 0]
        if len(free):
            column = int(free[0])
            while True:
                row = int(reached_from[column])
                next_column = int(row_to_column[row])
                row_to_column[row], column_to_row[column] = column, row
                if row == start:
                    return
                column = next_column
        rows.extend(column_to_row[reached].tolist())
    raise AssertionError("a matrix of equal row and column sums has a perfect matching")


def _bound_parts(rows: Rows, amount: np.ndarray, demand: Demand) -> np.ndarray:
    """Return (P, R) int64, the rails that a row's bytes are bound for: its pair's shares.

    By largest remainder, since stages do not say which of a pair's bytes they move.
    """
    bound = bound_by_rail(demand)[rows.source, rows.destination]
    exact = bound * (amount / bound.sum(axis=1))[:, None]
    parts = np.floor(exact).astype(np.int64)
    missing = amount - parts.sum(axis=1)
    place = np.argsort(np.argsort(parts - exact, axis=1, kind="stable"), axis=1, kind="stable")
    return parts + (place < missing[:, None])


def _balance_tiles(rows: Rows, demand: Demand, num_windows: int) -> Redistribution:
    """Return what balancing all tiles moves before the first stage, in window 0."""
    N = demand.topo.nodes
    sent = np.zeros((N, N, demand.topo.rails_per_node), dtype=np.int64)
    np.add.at(sent, (rows.source, rows.destination), rows.parts)
    source, destination = np.nonzero(demand.between_nodes)
    have = owned_by_rail(demand)[source, destination]
    return redistribute(demand.topo, have, sent[source, destination], source, num_windows)
