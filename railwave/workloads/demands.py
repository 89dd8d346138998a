"""From routing, or from expert counts, to the demand of a phase.

Letters: N nodes, G GPUs a node, W = N * G ranks, E experts, T tokens of a rank, K top-k.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

from railwave._check import check_index, check_positive_int
from railwave.sched import Demand
from railwave.topology import Topology
from railwave.workloads.records import RECORD_BYTES, check_records, in_bytes
from railwave.workloads.trace import read_counts, read_iteration

COUNTED = ("record", "row")


def demand_from_routing(
    topk_idx: Sequence[Any],
    topo: Topology,
    *,
    num_experts: int,
    per: str = "record",
    expert_to_rank: Any = None,
    record_bytes: int = RECORD_BYTES,
) -> Demand:
    """Count what routing sends between nodes.

    Every unit counted is record_bytes, owned by the GPU that has the token. The units are:

    - per="record": one for each (token, destination node), however many of the token's experts are
      there, as railwave and DeepEP send it. All of it is bound for the GPU of the first of those
      experts in the order of the columns; the others get their row over NVLink, which is not in a
      Demand.
    - per="row": one for each (token, destination rank), however many of the token's experts are
      there, bound for that rank: what crosses when nothing is shared within a node.

    Args:
        topk_idx: W tables (T, K) of integers, experts in [0, E) or -1 for none; entry r belongs to
            rank r, and T may differ. An expert that a token repeats counts once.
        topo: the cluster.
        num_experts: E.
        per: "record" or "row".
        expert_to_rank: (E,) ranks. Default: e * W // E.
        record_bytes: bytes of a unit.

    Returns:
        Demand; what stays within a node is not in it.

    Raises:
        TypeError, ValueError: a wrong type, shape or range; too many bytes for int64.

    Example:
        2 x 2 GPUs, an expert each. Token [2, 3] of rank 0 is one record for node 1, bound for the
        GPU of expert 2, and two rows; token [0, 3] is one of either, expert 0 being at home.

        >>> topo = Topology(2, 2, 2)
        >>> topk_idx = [[[2, 3], [0, 3]], [[0, 1]], [[3, 2]], [[2, 3]]]
        >>> count = dict(num_experts=4, record_bytes=1)
        >>> demand = demand_from_routing(topk_idx, topo, **count)
        >>> demand.owned[0, :, 1].tolist(), demand.bound[0, 1].tolist()
        ([2, 0], [1, 1])
        >>> demand = demand_from_routing(topk_idx, topo, per="row", **count)
        >>> demand.owned[0, :, 1].tolist(), demand.bound[0, 1].tolist()
        ([3, 0], [1, 2])
    """
    if per not in COUNTED:
        raise ValueError(f"per must be one of {list(COUNTED)}, got {per!r}")
    if len(topk_idx) != topo.num_ranks:
        raise ValueError(
            f"topk_idx must have a table for each of the {topo.num_ranks} ranks, "
            f"got {len(topk_idx)}"
        )
    W = topo.num_ranks
    to_rank = _expert_to_rank(expert_to_rank, num_experts, W)
    # By owner and by the rank they are bound for.
    units = torch.zeros(W, W, dtype=torch.int64, device="cpu")
    for source, table in enumerate(topk_idx):
        experts = _checked_experts(table, len(to_rank), f"topk_idx[{source}]")
        rank = torch.where(experts < 0, -1, to_rank[experts])
        # -1 // G is -1: none stays none.
        place = rank if per == "row" else rank // topo.gpus_per_node
        for column in range(place.shape[1]):
            met = (place[:, :column] == place[:, column : column + 1]).any(dim=1)
            counted = rank[:, column][~met & (place[:, column] >= 0)]
            units[source] += torch.bincount(counted, minlength=W)
    return Demand.of(in_bytes(units, record_bytes), topo)


def demand_from_counts(
    counts: Any,
    topo: Topology,
    *,
    expert_to_rank: Any = None,
    record_bytes: int = RECORD_BYTES,
) -> Demand:
    """Turn expert counts of each source rank into a demand, every (token, expert) on its own.

    Counts do not say which experts a token has together, so nothing is shared: a token with two
    experts on a node counts twice. To share, draw tokens with `tokens_from_counts` and use
    `demand_from_routing`.

    Args:
        counts: (W, E) integers >= 0, tokens that each rank sends to each expert.
        topo: the cluster.
        expert_to_rank: (E,) ranks. Default: e * W // E.
        record_bytes: bytes of one (token, expert).

    Returns:
        Demand; what stays within a node is not in it.

    Raises:
        TypeError, ValueError: a wrong type, shape or range; too many bytes for int64.

    Example:
        2 x 1 GPUs, experts 0 and 1 on rank 0: rank 1 sends it 5 + 1, rank 0 sends 7.

        >>> demand = demand_from_counts([[9, 9, 0, 7], [5, 1, 9, 9]], Topology(2, 1, 1),
        ...                             record_bytes=1)
        >>> demand.between_nodes.tolist()
        [[0, 7], [6, 0]]
    """
    W = topo.num_ranks
    table = check_records(counts, None, "counts", ndim=2)
    if table.shape[0] != W or not table.shape[1]:
        raise ValueError(f"counts must be of shape ({W}, experts), got {tuple(table.shape)}")
    to_rank = _expert_to_rank(expert_to_rank, table.shape[1], W)
    units = torch.zeros(W, W, dtype=torch.int64, device="cpu").index_add_(1, to_rank, table)
    return Demand.of(in_bytes(units, record_bytes), topo)


def trace_demand(
    folder: str | os.PathLike,
    iteration: int,
    layer: int,
    topo: Topology,
    *,
    micro_batch: int = 0,
    record_bytes: int = RECORD_BYTES,
) -> Demand:
    """Read the demand of one layer and micro-batch of a trace: its counts, as they stand.

    Args:
        folder, iteration, layer, micro_batch: as `read_counts`.
        topo: a cluster with as many ranks as the trace, 16 in SmartMoE's. Expert e is on rank
            e * W // E.
        record_bytes: bytes of one (token, expert).

    Raises:
        FileNotFoundError, TypeError, ValueError: as `read_counts` and `demand_from_counts`.

    Example: rank 0 with the line `0:[[3.0, 1.0]]` and rank 1 with `0:[[2.0, 4.0]]` give, on 2 x 1
        GPUs, 1 record from node 0 to node 1 and 2 back.
    """
    counts = read_counts(folder, iteration, layer, micro_batch=micro_batch)
    return _demand_of_trace(counts, topo, folder, record_bytes)


def trace_demands(
    folder: str | os.PathLike, iteration: int, topo: Topology, *, record_bytes: int = RECORD_BYTES
) -> dict[tuple[int, int], Demand]:
    """Read what `trace_demand` returns for every (layer, micro-batch) of an iteration, ascending.

    Each file is read once.

    Args:
        folder, iteration, topo, record_bytes: as `trace_demand`.

    Raises:
        FileNotFoundError, TypeError, ValueError: as `read_iteration` and `trace_demand`.

    Example: the trace of `trace_demand`'s example gives a dict with the one key (0, 0).
    """
    return {
        place: _demand_of_trace(counts, topo, folder, record_bytes)
        for place, counts in read_iteration(folder, iteration).items()
    }


def _demand_of_trace(
    counts: torch.Tensor, topo: Topology, folder: str | os.PathLike, record_bytes: int
) -> Demand:
    if len(counts) != topo.num_ranks:
        raise ValueError(
            f"topo must have the {len(counts)} ranks of the trace in {folder}, got {topo.num_ranks}"
        )
    return demand_from_counts(counts, topo, record_bytes=record_bytes)


def _expert_to_rank(given: Any, num_experts: int, num_ranks: int) -> torch.Tensor:
    """Return the (E,) rank of each expert."""
    num_experts = check_positive_int(num_experts, "num_experts")
    if given is None:
        return torch.arange(num_experts, device="cpu") * num_ranks // num_experts
    ranks = list(given.tolist() if isinstance(given, torch.Tensor) else given)
    if len(ranks) != num_experts:
        raise ValueError(
            f"expert_to_rank must have one rank per expert ({num_experts}), got {len(ranks)}"
        )
    checked = [check_index(r, num_ranks, f"expert_to_rank[{e}]") for e, r in enumerate(ranks)]
    return torch.tensor(checked, dtype=torch.int64, device="cpu")


def _checked_experts(table: Any, num_experts: int, name: str) -> torch.Tensor:
    """Return a (T, K) int64 table of experts in [-1, E)."""
    experts = torch.as_tensor(table, device="cpu")
    if experts.numel() == 0 and experts.ndim == 1:
        return torch.zeros(0, 1, dtype=torch.int64, device="cpu")
    if experts.is_floating_point() or experts.is_complex() or experts.dtype == torch.bool:
        raise TypeError(f"{name} must be integers of shape (tokens, top_k), got {experts.dtype}")
    if experts.ndim != 2:
        raise ValueError(
            f"{name} must be integers of shape (tokens, top_k), got {tuple(experts.shape)}"
        )
    experts = experts.detach().to(device="cpu", dtype=torch.int64)
    if experts.numel() and not (int(experts.min()) >= -1 and int(experts.max()) < num_experts):
        raise ValueError(
            f"{name} must be in [-1, {num_experts}), got {int(experts.min())} to "
            f"{int(experts.max())}"
        )
    return experts
