"""Count one rank's records and rows, and number them.

From `topk_idx` and the expert map to the numbers that every later stage stands on. With
hit[t, w] = 1 if token t has an expert on rank w:

    row_index[t, w]  = sum of hit[t', w] over t' < t          (-1 where hit is 0)
    record i of node d is the token t that holds the i-th 1 of max over w in d of hit[t, w]

Scans, and sums of integers: the same numbers on every run. This is a dispatch's first kernel: it
advances the epoch. Its last program tells the other ranks.

Letters: T tokens, K top-k, E experts, N nodes, G GPUs a node, W = N * G ranks.
"""

import torch
import triton.language as tl
from triton.language import core  # noqa: F401  (see lang.jit)

from .lang import cdiv, clamp, cumsum, helper, i64, iota, jit, tile_max, tile_sum
from .notify import message_tiles, send_counts
from .nvshmem import libraries
from .shape import Shape, pow2
from .wire import BAD_IDS, EPOCH, NOTIFIES, is_last

EXPERTS_A_THREAD = 16  # more would not stay in registers
WRONG_IDS = tl.constexpr(-2)  # the status of a rank whose topk_idx names experts that are not there


@helper
def _load_experts(
    topk_idx_ptr,
    stride_t,
    stride_k,
    t,
    num_tokens,
    K: tl.constexpr,
    K_P: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
):
    """Load the experts of tokens `t`: (len(t), K_P) int32, -1 for none, -2 for what no int32 is."""
    k = iota(K_P)
    if CONTIGUOUS:  # then the compiler knows the strides, and loads 16 bytes at a time
        ptrs = topk_idx_ptr + (t * K)[:, None] + k[None, :]
    else:
        ptrs = topk_idx_ptr + (t * stride_t)[:, None] + (k * stride_k)[None, :]
    mask = (t < num_tokens)[:, None] & (k < K)[None, :]
    given = tl.load(ptrs, mask=mask, other=-1)
    e = given.to(tl.int32)
    return tl.where(e.to(tl.int64) == given, e, -2)


@helper
def _look_up(table_ptr, e, EACH: tl.constexpr, EXPERTS: tl.constexpr):
    """Return the table's entry of each expert: e // EACH, if that is known to be it (not 0)."""
    there = (e >= 0) & (e < EXPERTS)
    if EACH > 0:
        return tl.where(there, e // EACH, -1)
    else:
        return tl.load(table_ptr + e, mask=there, other=-1)


@helper
def _on_node(expert_rank_ptr, e, node, S: tl.constexpr):
    """Return the local GPU of each expert as seen from a node: outside [0, G) if not on it."""
    return (_look_up(expert_rank_ptr, e, S.RANK_SIZE, S.E) - node * S.G).to(tl.int32)


@helper
def _hits(at, first, S: tl.constexpr, GPUS: tl.constexpr, K: tl.constexpr):
    """Return hit[g, t] of GPUs first + g, at most 8, from the GPU `at` of each token's experts.

    A field of an integer counts a token's experts on each GPU: 4 bits hold up to 15, 8 up to 255.

    Example: a token with experts on GPUs 2, 0 and 2 has the fields 1, 0, 2.
    """
    BITS: tl.constexpr = 4 if K < 16 else 8
    there = (at >= first) & (at < first + GPUS) & (at < S.G)
    field = tl.where(there, at - first, 0) * BITS
    one = there.to(tl.int32 if K < 16 else tl.int64)
    fields = tile_sum(one << field.to(one.dtype), 1)
    shifts = (iota(GPUS) * BITS).to(one.dtype)
    # Tokens along the axis that lies in a warp: the scan over them has few steps across warps.
    return (((fields[None, :] >> shifts[:, None]) & (2**BITS - 1)) > 0).to(tl.int32)


@helper
def _any(at, hit, S: tl.constexpr):
    """Return 1 for a token with an expert on any of a node's GPUs: int32."""
    if hit.shape[0] >= S.G:
        return tile_max(hit, 0)
    else:
        return tile_max(((at >= 0) & (at < S.G)).to(tl.int32), 1)


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
    bases_ptr,
    state_ptr,
    expert_start_ptr,
    me,
    notify_off,
    word_off,
    outbox_off,
    status,
    num_tokens,
    part_steps,
    S: tl.constexpr,
    K: tl.constexpr,
    K_P: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    SLOTS_T: tl.constexpr,
    GPUS: tl.constexpr,
    GPU_BLOCKS: tl.constexpr,
    TELL: tl.constexpr,
    WORDS_P: tl.constexpr,
    PEERS_P: tl.constexpr,
    EXPERTS_P: tl.constexpr,
):
    """Number the records of a node and the rows of GPUS of its GPUs, for a part of the tokens.

    A program first counts the tokens before its part, for itself: nobody waits. The programs above
    those add SLOTS_T tokens each to the experts' slots, and see whether the ids are right.

    Example: 2 nodes x 1 GPU, 2 experts, topk_idx [[0], [1], [0]]: records of node 0 are tokens
    0 and 2, of node 1 token 1; row_index [[0, -1], [-1, 0], [1, -1]].
    """
    pid: int = i64(tl.program_id(0))
    num_tokens: int = i64(num_tokens)
    part_steps: int = i64(part_steps)
    stride_t: int = i64(stride_t)
    stride_k: int = i64(stride_k)
    if pid == 0:
        tl.store(state_ptr + EPOCH, tl.load(state_ptr + EPOCH) + 1)
        tl.store(state_ptr + NOTIFIES, tl.load(state_ptr + NOTIFIES) + 1)
        tl.store(counts_ptr, status)
    NODE_PROGRAMS: tl.constexpr = S.N * GPU_BLOCKS * PARTS
    if pid < NODE_PROGRAMS:
        start: int = pid % PARTS * part_steps
        steps: int = cdiv(num_tokens, BLOCK_T)
        node: int = pid // PARTS // GPU_BLOCKS
        first: int = pid // PARTS % GPU_BLOCKS * GPUS
        g = first + iota(GPUS)
        num_rows = (g * 0).to(tl.int32)
        num_records: int = i64(0)
        for step in range(0, clamp(start, 0, steps)):
            t = step * BLOCK_T + iota(BLOCK_T)
            e = _load_experts(
                *(topk_idx_ptr, stride_t, stride_k, t, num_tokens, K, K_P, CONTIGUOUS)
            )
            at = _on_node(expert_rank_ptr, e, node, S)
            hit = _hits(at, first, S, GPUS, K)
            num_rows += tile_sum(hit, 1)
            num_records: int = num_records + i64(tile_sum(_any(at, hit, S), 0))
        for step in range(start, clamp(start + part_steps, 0, steps)):
            t = step * BLOCK_T + iota(BLOCK_T)
            e = _load_experts(
                *(topk_idx_ptr, stride_t, stride_k, t, num_tokens, K, K_P, CONTIGUOUS)
            )
            at = _on_node(expert_rank_ptr, e, node, S)
            hit = _hits(at, first, S, GPUS, K)
            index = num_rows[:, None] + cumsum(hit, 1) - hit
            row_ptrs = row_index_ptr + (t * (S.N * S.G) + node * S.G)[:, None] + g[None, :]
            mask = (t < num_tokens)[:, None] & (g < S.G)[None, :]
            tl.store(row_ptrs, tl.trans(tl.where(hit > 0, index, -1)), mask=mask)
            num_rows += tile_sum(hit, 1)

            sent = _any(at, hit, S)
            token_ptrs = record_token_ptr + node * S.T + num_records + cumsum(sent, 0) - 1
            tl.store(token_ptrs, t, mask=sent > 0)
            num_records: int = num_records + i64(tile_sum(sent, 0))
        if pid % PARTS == PARTS - 1:
            tl.store(counts_ptr + 1 + node, num_records)
            tl.store(counts_ptr + 1 + S.N + node * S.G + g, num_rows, mask=g < S.G)
    else:
        t = (pid - NODE_PROGRAMS) * SLOTS_T + iota(SLOTS_T)
        e = _load_experts(topk_idx_ptr, stride_t, stride_k, t, num_tokens, K, K_P, CONTIGUOUS)
        at = _look_up(expert_pos_ptr, e, 1 if S.RANK_SIZE > 0 else 0, S.E)
        slots_ptr = counts_ptr + 1 + S.N + S.N * S.G
        tl.atomic_add(slots_ptr + at, 1, mask=at >= 0, sem="relaxed")
        if i64(tile_max(tile_max(((e < -1) | (e >= S.E)).to(tl.int32), 1), 0)) > 0:
            tl.store(state_ptr + BAD_IDS, i64(1))
    if TELL:
        if is_last(state_ptr) > 0:
            if i64(tl.atomic_xchg(state_ptr + BAD_IDS, i64(0), sem="relaxed")) > 0:
                tl.store(counts_ptr, WRONG_IDS)
            tl.debug_barrier()
            send_counts(
                *(bases_ptr, state_ptr, counts_ptr, expert_start_ptr),
                *(i64(me), i64(notify_off), i64(word_off), i64(outbox_off)),
                *(S, WORDS_P, PEERS_P, EXPERTS_P),
            )


def count(
    topk_idx: torch.Tensor,
    expert_rank: torch.Tensor,
    expert_pos: torch.Tensor,
    counts: torch.Tensor,
    record_token: torch.Tensor,
    row_index: torch.Tensor,
    bases: torch.Tensor,
    state: torch.Tensor,
    expert_start: torch.Tensor,
    *,
    status: int,
    me: int,
    notify_off: int,
    word_off: int,
    outbox_off: int,
    tell: bool = True,
    shape: Shape,
    block_t: int,
    parts: int,
) -> None:
    """Advance the epoch; number the records and rows of one rank; tell the other ranks.

    Args:
        topk_idx: (T, K) int32 or int64, any strides; -1 selects nothing. If an id is not in
            [-1, E), all ranks are told that this call is wrong, and it counts nowhere.
        expert_rank: (E,) int32, rank of each expert.
        expert_pos: (E,) int32, position of each expert when sorted by (rank, id).
        counts: out, (1 + N + W + E,) int32: status, records per node, rows per rank, slots per
            expert position, which must be zero before (telling leaves them so).
        record_token: out, (N, S.T) int32: token of each record, per destination node, ascending.
        row_index: out, (S.T, W) int32: index of the token's row in its stream, -1 for none.
        bases: (W,) int64, address of every PE's heap.
        state: (STATE_WORDS,) int64 of this PE; its epoch and notify number advance.
        expert_start, me, notify_off, word_off, outbox_off: as `notify`.
        status: what this rank says of its call (`Call.status`); negative for a wrong one.
        tell: send the counts as `notify` does; else they are only counted.
        block_t: tokens a step, a power of two (fewer where K is large); results depend on none of
            these.
        parts: programs a node, each for a part of the tokens.
    """
    S = shape
    k = topk_idx.shape[1]
    warps = min(max(block_t // 64, 4), 16)
    block_t = min(block_t, max(2, EXPERTS_A_THREAD * 32 * warps // pow2(k)))
    part_steps = -(-topk_idx.shape[0] // (parts * block_t))
    gpus = min(S.G_P, 8)
    gpu_blocks = -(-S.G // gpus)
    slots_t = min(block_t, 256)
    grid = (S.N * gpu_blocks * parts + -(-topk_idx.shape[0] // slots_t),)
    _count_kernel[grid](
        *(counts, record_token, row_index),
        *(topk_idx, topk_idx.stride(0), topk_idx.stride(1)),
        *(expert_rank, expert_pos, bases, state, expert_start),
        *(me, notify_off, word_off, outbox_off, status, topk_idx.shape[0], part_steps),
        S=S,
        K=k,
        K_P=pow2(k),
        CONTIGUOUS=topk_idx.is_contiguous(),
        PARTS=parts,
        BLOCK_T=block_t,
        SLOTS_T=slots_t,
        GPUS=gpus,
        GPU_BLOCKS=gpu_blocks,
        TELL=tell,
        num_warps=warps,
        **message_tiles(S),
        **libraries(S),
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
