"""Count one rank's records and rows, and number them.

From `topk_idx` and the expert map to the numbers that every later stage stands on. With
hit[t, w] = 1 if token t has an expert on rank w:

    row_index[t, w]  = sum of hit[t', w] over t' < t          (-1 where hit is 0)
    record i of node d is the token t that holds the i-th 1 of max over w in d of hit[t, w]

Scans only, no atomics: the same numbers on every run. This is a dispatch's first kernel: it
advances the epoch.

Letters: T tokens, K top-k, E experts, N nodes, G GPUs a node, W = N * G ranks.
"""

import torch
import triton.language as tl
from triton.language import core  # noqa: F401  (see lang.jit)

from .lang import cumsum, helper, i64, iota, jit, tile_max, tile_sum
from .shape import Shape, pow2
from .wire import EPOCH, NOTIFIES


@helper
def _load_experts(table_ptr, topk_idx_ptr, stride_t, t, mask_t):
    """Look one expert of each of tokens `t` up in a table: (len(t),) int32, -1 for none."""
    e = tl.load(topk_idx_ptr + t * stride_t, mask=mask_t, other=-1)
    return tl.load(table_ptr + e, mask=e >= 0, other=-1)


@jit
def _count_kernel(
    counts_ptr,
    record_token_ptr,
    row_index_ptr,
    topk_idx_ptr,
    stride_t,
    stride_k,
    expert_rank_ptr,
    expert_pos_ptr,
    state_ptr,
    status,
    num_tokens,
    S: tl.constexpr,
    K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_E: tl.constexpr,
    NODE_BLOCKS: tl.constexpr,
):
    """Programs below NODE_BLOCKS number records and rows of BLOCK_N nodes, the rest count experts.

    Example: 2 nodes x 1 GPU, 2 experts, topk_idx [[0], [1], [0]]: records of node 0 are tokens
    0 and 2, of node 1 token 1; row_index [[0, -1], [-1, 0], [1, -1]].
    """
    pid: int = i64(tl.program_id(0))
    num_tokens: int = i64(num_tokens)
    stride_t: int = i64(stride_t)
    stride_k: int = i64(stride_k)
    if pid == 0:
        tl.store(state_ptr + EPOCH, tl.load(state_ptr + EPOCH) + 1)
        tl.store(state_ptr + NOTIFIES, tl.load(state_ptr + NOTIFIES) + 1)
        tl.store(counts_ptr, status)
    if pid < NODE_BLOCKS:
        n = pid * BLOCK_N + iota(BLOCK_N)
        w = iota(BLOCK_N * S.G_P)
        node = pid * BLOCK_N + w // S.G_P
        valid = (node < S.N) & (w % S.G_P < S.G)
        rank = tl.where(valid, node * S.G + w % S.G_P, -2)
        num_rows = (w * 0).to(tl.int32)
        num_records = (n * 0).to(tl.int32)
        for t0 in range(0, num_tokens, BLOCK_T):
            t = t0 + iota(BLOCK_T)
            mask_t = t < num_tokens
            on = _load_experts(expert_rank_ptr, topk_idx_ptr, stride_t, t, mask_t)
            hit = on[:, None] == rank[None, :]
            for k in tl.static_range(1, K):
                ids_ptr = topk_idx_ptr + k * stride_k
                on = _load_experts(expert_rank_ptr, ids_ptr, stride_t, t, mask_t)
                hit = hit | (on[:, None] == rank[None, :])
            hit = hit.to(tl.int32)
            index = num_rows[None, :] + cumsum(hit, 0) - hit
            row_ptrs = row_index_ptr + (t * (S.N * S.G))[:, None] + rank[None, :]
            tl.store(row_ptrs, tl.where(hit > 0, index, -1), mask=mask_t[:, None] & valid[None, :])
            num_rows += tile_sum(hit, 0)

            sent = tile_max(tl.reshape(hit, [BLOCK_T, BLOCK_N, S.G_P]), 2)
            index = num_records[None, :] + cumsum(sent, 0) - sent
            token_ptrs = record_token_ptr + (n * S.T)[None, :] + index
            tl.store(token_ptrs, t[:, None] + n[None, :] * 0, mask=sent > 0)
            num_records += tile_sum(sent, 0)
        tl.store(counts_ptr + 1 + n, num_records, mask=n < S.N)
        tl.store(counts_ptr + 1 + S.N + rank, num_rows, mask=valid)
    else:
        e = (pid - NODE_BLOCKS) * BLOCK_E + iota(BLOCK_E)
        num_slots = (e * 0).to(tl.int32)
        for t0 in range(0, num_tokens, BLOCK_T):
            t = t0 + iota(BLOCK_T)
            slots = (t[:, None] * 0 + e[None, :] * 0).to(tl.int32)
            for k in tl.static_range(K):
                ids_ptr = topk_idx_ptr + k * stride_k
                pos = _load_experts(expert_pos_ptr, ids_ptr, stride_t, t, t < num_tokens)
                slots += (pos[:, None] == e[None, :]).to(tl.int32)
            num_slots += tile_sum(slots, 0)
        tl.store(counts_ptr + 1 + S.N + S.N * S.G + e, num_slots, mask=e < S.E)


def count(
    topk_idx: torch.Tensor,
    expert_rank: torch.Tensor,
    expert_pos: torch.Tensor,
    counts: torch.Tensor,
    record_token: torch.Tensor,
    row_index: torch.Tensor,
    state: torch.Tensor,
    *,
    status: int,
    shape: Shape,
    block_t: int,
    block_n: int,
    block_e: int,
) -> None:
    """Advance the epoch; number the records and rows of one rank.

    Args:
        topk_idx: (T, K) int32 or int64, any strides; -1 selects nothing.
        expert_rank: (E,) int32, rank of each expert.
        expert_pos: (E,) int32, position of each expert when sorted by (rank, id).
        counts: out, (1 + N + W + E,) int32: status, records per node, rows per rank, slots per
            expert position.
        record_token: out, (N, S.T) int32: token of each record, per destination node.
        row_index: out, (S.T, W) int32: index of the token's row in its stream, -1 for none.
        state: (STATE_WORDS,) int64 of this PE; its epoch and notify number advance.
        status: what this rank says of its call (`Call.status`); negative for a wrong one.
        block_t: tokens per step, a power of two; results do not depend on it.
        block_n, block_e: nodes, experts per program, powers of two; results do not depend on them.
    """
    S = shape
    k = topk_idx.shape[1]
    node_blocks = -(-S.N // block_n)
    block_e = min(block_e, pow2(S.E))
    grid = (node_blocks + -(-S.E // block_e),)
    _count_kernel[grid](
        *(counts, record_token, row_index),
        *(topk_idx, topk_idx.stride(0), topk_idx.stride(1)),
        *(expert_rank, expert_pos, state, status, topk_idx.shape[0]),
        S=S,
        K=k,
        BLOCK_T=block_t,
        BLOCK_N=block_n,
        BLOCK_E=block_e,
        NODE_BLOCKS=node_blocks,
        num_warps=min(max(block_t // 32, 4), 32),
    )


def count_ref(
    topk_idx: torch.Tensor, expert_rank: torch.Tensor, expert_pos: torch.Tensor, *, shape: Shape
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Do what `count` does, token by token; return counts (status 0) and the two maps."""
    S = shape
    counts = torch.zeros(1 + S.N + S.N * S.G + S.E, dtype=torch.int32)
    records, rows, slots = counts[1:].split([S.N, S.N * S.G, S.E])
    record_token = torch.full((S.N, S.T), -1, dtype=torch.int32)
    row_index = torch.full((S.T, S.N * S.G), -1, dtype=torch.int32)
    for t, experts in enumerate(topk_idx.tolist()):
        chosen = [e for e in experts if e >= 0]
        for e in chosen:
            slots[expert_pos[e]] += 1
        ranks = sorted({int(expert_rank[e]) for e in chosen})
        for w in ranks:
            row_index[t, w] = rows[w]
            rows[w] += 1
        for d in sorted({w // S.G for w in ranks}):
            record_token[d, records[d]] = t
            records[d] += 1
    return counts, {"record_token": record_token, "row_index": row_index}
