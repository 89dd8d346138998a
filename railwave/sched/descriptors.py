"""Describe the traffic of one phase by three numbers, eq. 4, 5 and 7.

Demand and loads may be in records or bytes, of any real dtype. Shape letters: N nodes, G GPUs a
node, R rails, W sending windows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from railwave._check import check_index, check_positive_int


def payload_per_gpu(demand: Any, gpus_per_node: int) -> float:
    """Return B, the mean remote payload of a GPU, in the unit of `demand`: bytes in the paper.

    Args:
        demand: (N, N) non-negative, from node (row) to node (column). The diagonal is not read.
        gpus_per_node: G.

    Source: eq. (4).

    Example:
        2 nodes of 2 GPUs send 12 bytes in all; the 99 stay within node 0.

        >>> payload_per_gpu([[99, 8], [4, 0]], gpus_per_node=2)
        3.0
    """
    remote = _remote(demand)
    return float(remote.sum()) / (len(remote) * check_positive_int(gpus_per_node, "gpus_per_node"))


def source_rail_skew(loads: Any) -> float:
    """Return rho_g, the load of the busiest rail of any node over the mean of all rails.

    1.0 when all rails carry the same, and when nothing is sent.

    Args:
        loads: (N, R) non-negative, remote payload leaving by each rail of each node.

    Source: eq. (5).

    Example:
        The mean is 2 and the busiest rail carries 6.

        >>> source_rail_skew([[6, 0], [1, 1]])
        3.0
    """
    loads = _real_table(loads, "loads")
    total = float(loads.sum())
    return float(loads.max()) * loads.numel() / total if total else 1.0


def receiver_concentration(demand: Any, windows: Sequence[Iterable[tuple[int, int]]]) -> float:
    """Return kappa, the busiest receiver of a window over the mean of all N nodes, at its worst.

    The mean is over the N nodes, receiving or not. 1.0 when nothing is sent; a window without
    traffic is left out, having no mean to compare with.

    Args:
        demand: (N, N) non-negative, from node (row) to node (column). The diagonal is not read.
        windows: W collections of (source, destination) pairs that send at the same time. A pair
            counts once however often a window names it.

    Source: eq. (6) and (7).

    Example:
        Both senders at once: node 0 receives 8 and the mean is 8 / 2 nodes.

        >>> receiver_concentration([[0, 0], [8, 0]], [{(0, 1), (1, 0)}])
        2.0

        With every node sending 5 in a wave, every receiver gets 5.

        >>> receiver_concentration([[0, 5], [5, 0]], [{(0, 1), (1, 0)}])
        1.0
    """
    remote = _remote(demand)
    num_nodes = len(remote)
    worst = 1.0
    for number, window in enumerate(windows):
        received = torch.zeros(num_nodes, dtype=torch.float64, device="cpu")
        for source, destination in set(window):
            check_index(source, num_nodes, f"windows[{number}]: source")
            check_index(destination, num_nodes, f"windows[{number}]: destination")
            if source == destination:
                raise ValueError(
                    f"windows[{number}] must pair different nodes, got {(source, destination)}"
                )
            received[destination] += remote[source, destination]
        total = float(received.sum())
        if total:
            worst = max(worst, float(received.max()) * num_nodes / total)
    return worst


def _remote(demand: Any) -> torch.Tensor:
    """Return (N, N) float64 demand with its diagonal zeroed."""
    table = _real_table(demand, "demand")
    if table.shape[0] != table.shape[1]:
        raise ValueError(f"demand must be of shape (N, N), got {tuple(table.shape)}")
    return table.fill_diagonal_(0)


def _real_table(value: Any, name: str) -> torch.Tensor:
    """Return a new float64 CPU copy of a finite, non-negative, non-empty table."""
    try:
        table = torch.as_tensor(value, device="cpu").detach().to(torch.float64, copy=True)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name} must be a table of real numbers: {error}") from None
    if table.ndim != 2 or not table.numel():
        raise ValueError(f"{name} must have 2 non-empty dimensions, got {tuple(table.shape)}")
    if not bool((torch.isfinite(table) & (table >= 0)).all()):
        raise ValueError(f"{name} must be finite and not negative, got {table.tolist()}")
    return table
