"""Divide every slice of a node among its eligible rails, eq. 9: the readable reference.

Shape letters: N nodes, R rails.
"""

from __future__ import annotations

from typing import Any

import torch

from railwave._check import check_counts, check_index


def quota_ref(counts: Any, eligible: Any, node: int) -> torch.Tensor:
    """Give each eligible rail an equal part of each slice, to within one record.

    The remainder goes to the eligible rails (ascending, m of them) number (s + d + j) mod m, one
    record each, so that one receiver does not get every source's remainder on the same rail.

    Args:
        counts: (R, N) integer, records of node s to each node, by their owner's rail.
        eligible: (N, R) bool, rails that may carry payload to each node.
        node: s, in [0, N).

    Returns:
        (R, N) int64 quotas. Column s is zero: nothing of the node's own crosses a rail.

    Raises:
        TypeError, ValueError: a wrong type or shape, or a slice without an eligible rail.

    Source: eq. (9).

    Example:
        Node 0 sends 5 records to node 1. The first part is 2 each; the remainder of 1 goes to
        rail (0 + 1 + 0) mod 2 = 1.

        >>> quota_ref([[0, 5], [0, 0]], [[True, True], [True, True]], node=0).tolist()
        [[0, 2], [0, 3]]
    """
    counts, eligible, node = _checked(counts, eligible, node)
    num_rails, num_nodes = counts.shape
    quotas = torch.zeros(num_rails, num_nodes, dtype=torch.int64, device="cpu")
    for peer in _peers(node, num_nodes):
        quotas[:, peer] = _even_parts(int(counts[:, peer].sum()), eligible[peer], node, peer)
    return quotas


def native_quota_ref(counts: Any, eligible: Any, node: int) -> torch.Tensor:
    """Leave records on eligible rails where they are; divide only the others by eq. 9.

    Args:
        counts: (R, N) integer, records of node s to each node, by their owner's rail.
        eligible: (N, R) bool, rails that may carry payload to each node.
        node: s, in [0, N).

    Returns:
        (R, N) int64 quotas, zero on ineligible rails and in column s.

    Raises:
        TypeError, ValueError: a wrong type or shape, or a slice without an eligible rail.

    Source: eq. (9), for the records on ineligible rails.

    Example:
        Rail 2 may not carry to node 1; of its 3 records rail 1 takes the remainder too.

        >>> rails = [[True, True, True], [True, True, False]]
        >>> native_quota_ref([[0, 7], [0, 1], [0, 3]], rails, node=0).tolist()
        [[0, 8], [0, 3], [0, 0]]
    """
    counts, eligible, node = _checked(counts, eligible, node)
    num_rails, num_nodes = counts.shape
    quotas = torch.zeros(num_rails, num_nodes, dtype=torch.int64, device="cpu")
    for peer in _peers(node, num_nodes):
        stay = counts[:, peer] * eligible[peer]
        num_stranded = int((counts[:, peer] - stay).sum())
        quotas[:, peer] = stay + _even_parts(num_stranded, eligible[peer], node, peer)
    return quotas


def _even_parts(num_records: int, eligible: torch.Tensor, node: int, peer: int) -> torch.Tensor:
    """Return (R,) int64: `num_records` of the slice (node, peer) over its eligible rails."""
    parts = torch.zeros(len(eligible), dtype=torch.int64, device="cpu")
    rails = [rail for rail, allowed in enumerate(eligible.tolist()) if allowed]
    if not rails and num_records:
        raise ValueError(
            f"eligible must allow a rail from node {node} to node {peer}, got none for "
            f"{num_records} record(s)"
        )
    if rails:
        share, remainder = divmod(num_records, len(rails))
        for rail in rails:
            parts[rail] = share
        for j in range(remainder):
            parts[rails[(node + peer + j) % len(rails)]] += 1
    return parts


def _peers(node: int, num_nodes: int) -> list[int]:
    return [peer for peer in range(num_nodes) if peer != node]


def _checked(counts: Any, eligible: Any, node: int) -> tuple:
    counts = check_counts(counts, None, "counts")
    num_rails, num_nodes = counts.shape
    allowed = torch.as_tensor(eligible, device="cpu")
    if allowed.dtype != torch.bool:
        raise TypeError(f"eligible must be bool, got {allowed.dtype}")
    if tuple(allowed.shape) != (num_nodes, num_rails):
        raise ValueError(
            f"eligible must be bool of shape {(num_nodes, num_rails)}, got shape "
            f"{tuple(allowed.shape)}"
        )
    return counts, allowed, check_index(node, num_nodes, "node")
