"""Dispatch and combine in plain torch, in one process: what every path must reproduce bit for bit.

For tests and for the demo's verification; nothing here is used to move data. `combine_ref` models
the order of additions and the roundings; `combine_exact` and `combine_error_bound` say how far from
the exact sum that may be.

Letters: N nodes, G GPUs a node, W = N * G ranks, E experts, K top-k, T tokens, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from railwave.topology import Topology


@dataclass(frozen=True, eq=False)
class DenseReceived:
    """What one rank receives: a row per (token, rank), ordered by (source rank, token)."""

    x: torch.Tensor  # (rows, H), dtype as dispatched
    topk_idx: torch.Tensor  # (rows, K), dtype as dispatched; local expert ids, -1 elsewhere
    topk_weights: torch.Tensor  # (rows, K) float32; 0 where topk_idx is -1
    num_tokens_per_expert: torch.Tensor  # (local experts,) int32; a repeated id counts each time
    source: torch.Tensor  # (rows, 2) int64: source rank and its token


def dispatch_ref(
    topo: Topology,
    xs: Sequence[torch.Tensor],
    topk_idxs: Sequence[torch.Tensor],
    topk_weights: Sequence[torch.Tensor],
    *,
    expert_to_rank: Sequence[int] | torch.Tensor,
) -> list[DenseReceived]:
    """Send every token to the ranks of its experts.

    Args:
        topo: the cluster.
        xs: per rank, (T, H) tokens.
        topk_idxs: per rank, (T, K) int32 or int64 expert ids; -1 selects nothing.
        topk_weights: per rank, (T, K) floating point.
        expert_to_rank: (E,) ints in [0, W), the rank of each expert.

    Returns:
        Per rank, a `DenseReceived`. A rank's local experts are its experts by ascending id.

    Example:
        >>> received = dispatch_ref(
        ...     Topology(2, 1, 1),
        ...     [torch.tensor([[5.0], [6.0]]), torch.tensor([[7.0]])],
        ...     [torch.tensor([[0, 2], [2, -1]]), torch.tensor([[2, 2]])],
        ...     [torch.ones(2, 2), torch.ones(1, 2)],
        ...     expert_to_rank=[0, 1, 1],
        ... )
        >>> received[1].x[:, 0].tolist(), received[1].topk_idx.tolist()
        ([5.0, 6.0, 7.0], [[-1, 1], [1, -1], [1, 1]])
        >>> received[1].num_tokens_per_expert.tolist(), received[1].source.tolist()
        ([0, 4], [[0, 0], [0, 1], [1, 0]])
    """
    x, topk_idx = torch.cat(list(xs)), torch.cat(list(topk_idxs))
    weights = torch.cat([w.float() for w in topk_weights])
    source = torch.cat([_sources(rank, len(x)) for rank, x in enumerate(xs)])
    expert_rank = torch.as_tensor(expert_to_rank, dtype=torch.int64)
    expert = topk_idx.long().clamp(min=0)
    on_rank = torch.where(topk_idx >= 0, expert_rank[expert], -1)

    received = []
    for rank in range(topo.num_ranks):
        experts = (expert_rank == rank).nonzero()[:, 0]
        local_expert = torch.full_like(expert_rank, -1)
        local_expert[experts] = torch.arange(len(experts))
        here = on_rank == rank
        keep = here.any(dim=1)
        slots = local_expert[expert[here]]
        received.append(
            DenseReceived(
                x=x[keep],
                topk_idx=torch.where(here, local_expert[expert], -1)[keep].to(
                    topk_idxs[rank].dtype
                ),
                topk_weights=torch.where(here, weights, 0.0)[keep],
                num_tokens_per_expert=torch.bincount(slots, minlength=len(experts)).int(),
                source=source[keep],
            )
        )
    return received


@dataclass(frozen=True, eq=False)
class DenseGrouped:
    """The rows of one rank, one for each (token, local expert), grouped by expert."""

    x: torch.Tensor  # (rows, H); 0 where a row is of no token
    topk_idx: torch.Tensor  # (rows,) local expert, -1 for none
    topk_weights: torch.Tensor  # (rows,) float32, 0 for none; summed where a token repeats an id
    rows_per_expert: list[int]
    offsets: list[int]  # where each group starts, and where the last one ends
    places: list[list[int]]  # of each row of the `DenseReceived`: its rows here, by ascending k


def group_ref(received: DenseReceived, alignment: int) -> DenseGrouped:
    """Give each (row, expert) a row of its own, each expert's from a multiple of `alignment` on.

    Example:
        >>> rows = DenseReceived(
        ...     x=torch.tensor([[5.0], [6.0]]),
        ...     topk_idx=torch.tensor([[1, 0], [1, -1]]),
        ...     topk_weights=torch.tensor([[0.25, 0.5], [1.0, 0.0]]),
        ...     num_tokens_per_expert=torch.tensor([1, 2]),
        ...     source=torch.tensor([[0, 0], [0, 1]]),
        ... )
        >>> grouped = group_ref(rows, alignment=2)
        >>> grouped.x[:, 0].tolist(), grouped.topk_idx.tolist(), grouped.offsets
        ([5.0, 0.0, 5.0, 6.0], [0, -1, 1, 1], [0, 2, 4])
        >>> grouped.places
        [[2, 0], [3]]
    """
    ids = received.topk_idx.tolist()
    offsets, rows_per_expert, place = [0], [], {}
    for e in range(len(received.num_tokens_per_expert)):
        rows = [i for i, of_row in enumerate(ids) if e in of_row]
        place |= {(i, e): offsets[-1] + n for n, i in enumerate(rows)}
        rows_per_expert.append(len(rows))
        offsets.append(offsets[-1] + -(-len(rows) // alignment) * alignment)
    x = received.x.new_zeros(offsets[-1], received.x.shape[1])
    topk_idx = torch.full((offsets[-1],), -1, dtype=received.topk_idx.dtype)
    weights = torch.zeros(offsets[-1])
    for (i, e), row in place.items():
        x[row], topk_idx[row] = received.x[i], e
        for k, expert in enumerate(ids[i]):
            if expert == e:
                weights[row] += received.topk_weights[i, k]
    places = [[place[i, e] for e in dict.fromkeys(of) if e >= 0] for i, of in enumerate(ids)]
    return DenseGrouped(x, topk_idx, weights, rows_per_expert, offsets, places)


def gather_ref(
    out: torch.Tensor, weights: torch.Tensor | None, places: list[list[int]]
) -> torch.Tensor:
    """Sum the results for each row's experts, in fp32 from +0 in this order, rounded once.

    Args:
        out: (grouped rows, H); weights: (grouped rows,) float32 to multiply them by, or None.
        places: as of `DenseGrouped`.
    """
    sums = torch.zeros(len(places), out.shape[1])
    for i, rows in enumerate(places):
        for row in rows:
            value = out[row].float()
            sums[i] += value if weights is None else value * weights[row]
    return sums.to(out.dtype)


def combine_ref(
    topo: Topology,
    outs: Sequence[torch.Tensor],
    received: Sequence[DenseReceived],
    num_tokens: Sequence[int],
    *,
    wire_dtype: torch.dtype | None = None,
    bias: Sequence[Sequence[torch.Tensor]] | None = None,
) -> list[torch.Tensor]:
    """Sum every token's rows at its owner, in the order and with the roundings of `combine`.

    With p(x) the fp32 sum, from +0 and by ascending local rank, of a token's rows on node x,
    rounded once to the wire dtype except on the owner's node s:

        y = round(p(s) + p(s - 1) + p(s - 2) + ...)        added in this order, in fp32

    Args:
        topo: the cluster.
        outs: per rank, (rows, H) results for the rows of `received`.
        received: per rank, from `dispatch_ref`.
        num_tokens: per rank, T.
        wire_dtype: between nodes. Default: that of `outs`.
        bias: per rank, what is added in turn before the last rounding.

    Returns:
        Per rank, (T, H) of the dtype of `outs`; +0 for a token without a row.

    Example:
        Two nodes return 1 and 2**-8 for the one token of rank 0: bfloat16 rounds the tie to even.

        >>> topo = Topology(2, 1, 1)
        >>> xs = [torch.zeros(1, 1), torch.zeros(0, 1)]
        >>> topk_idxs = [torch.tensor([[0, 1]]), torch.zeros(0, 2, dtype=torch.int64)]
        >>> weights = [torch.ones(1, 2), torch.ones(0, 2)]
        >>> received = dispatch_ref(topo, xs, topk_idxs, weights, expert_to_rank=[0, 1])
        >>> outs = [torch.tensor([[1.0]]).bfloat16(), torch.tensor([[2.0**-8]]).bfloat16()]
        >>> combine_ref(topo, outs, received, num_tokens=[1, 0])[0].item()
        1.0
    """
    dtype = outs[0].dtype
    wire_dtype = wire_dtype or dtype
    sums = _node_sums(topo, [out.float() for out in outs], received, num_tokens)
    wire_sums = [total.to(wire_dtype).float() for total in sums]
    ys, start = [], 0
    for rank, tokens in enumerate(num_tokens):
        node, mine = topo.node_of(rank), slice(start, start + tokens)
        y = sums[node][mine].clone()
        for wave in range(1, topo.nodes):
            y += wire_sums[(node - wave) % topo.nodes][mine]
        for each in bias[rank] if bias else ():
            y += each.float()
        ys.append(y.to(dtype))
        start += tokens
    return ys


def combine_exact(
    topo: Topology,
    outs: Sequence[torch.Tensor],
    received: Sequence[DenseReceived],
    num_tokens: Sequence[int],
) -> list[torch.Tensor]:
    """Sum every token's rows in float64: per rank (T, H)."""
    sums = _node_sums(topo, [out.double() for out in outs], received, num_tokens)
    return list(sum(sums).split(list(num_tokens)))


def combine_error_bound(
    outs: Sequence[torch.Tensor],
    received: Sequence[DenseReceived],
    num_tokens: Sequence[int],
    dtype: torch.dtype,
    topo: Topology,
) -> list[torch.Tensor]:
    """Bound |combine - combine_exact|, element by element, where nothing overflows.

    Rounding a float32 z to a dtype gives z * (1 + a) + b with |a| <= u, its unit roundoff (2**-8
    for bfloat16, 2**-11 for float16, 0 for float32 itself), and |b| <= v, half its least subnormal.
    An fp32 addition multiplies by 1 + e, |e| <= 2**-24; it is exact where the sum is subnormal. A
    row passes at most G - 1 additions on its node (the first, to +0, is exact), one rounding for
    the wire, N - 1 additions at the owner and the final rounding:

        |y - exact| <= ((1 + 2**-24)**(N + G - 2) * (1 + u)**2 - 1) * (sum over rows of |row|)
                       + (N - 1) * v * (1 + 2**-24)**(N - 1) * (1 + u) + v

    To first order (2u + (N + G - 2) * 2**-24) times the sum: two roundings and the fp32 additions.
    One node has no wire, so one u. (W + 8) * 2**-53 of the sum is added for the float64 arithmetic
    here and in `combine_exact`.

    Args:
        outs, received, num_tokens: as in `combine_ref`.
        dtype: of `outs`, on the wire and of the result.
        topo: the cluster.

    Returns:
        Per rank, (T, H) float64.
    """
    N, G = topo.nodes, topo.gpus_per_node
    u, v = {
        torch.float32: (0.0, 0.0),
        torch.bfloat16: (2.0**-8, 2.0**-134),
        torch.float16: (2.0**-11, 2.0**-25),
    }[dtype]
    e, wire = 2.0**-24, (1 + u if N > 1 else 1.0)
    relative = (1 + e) ** (N + G - 2) * wire * (1 + u) - 1 + (N * G + 8) * 2.0**-53
    absolute = (N - 1) * v * (1 + e) ** (N - 1) * (1 + u) + v
    sizes = combine_exact(topo, [out.double().abs() for out in outs], received, num_tokens)
    return [relative * size + absolute for size in sizes]


def _sources(rank: int, tokens: int) -> torch.Tensor:
    """Return (T, 2) int64: the rank and each of its tokens."""
    return torch.stack([torch.full((tokens,), rank), torch.arange(tokens)], dim=1)


def _node_sums(
    topo: Topology,
    outs: Sequence[torch.Tensor],
    received: Sequence[DenseReceived],
    num_tokens: Sequence[int],
) -> list[torch.Tensor]:
    """Add the rows of every token on each node, ascending ranks: N of (all tokens, H)."""
    first_token = torch.tensor([0, *num_tokens]).cumsum(0)
    sums = []
    for node in range(topo.nodes):
        total = outs[0].new_zeros(int(first_token[-1]), outs[0].shape[1])
        for local in range(topo.gpus_per_node):
            rank = topo.rank_of(node, local)
            source_rank, token = received[rank].source.unbind(dim=1)
            # A token has at most one row per rank, so no index is repeated.
            total[first_token[source_rank] + token] += outs[rank]
        sums.append(total)
    return sums
