"""Take records in at the ingress PE, and rows out at the expert PE.

`unpack` waits for each chunk of a round and stores its records' rows at their final slots in the
rows regions of the node; `finish` waits until all are stored and copies a PE's rows out.

    final slot at GPU g = row_start[source rank, g] + row of the record's entry for g

Letters: G GPUs a node, s source node, g local GPU, K top-k.
"""

import torch
import triton.language as tl
from triton.language import core  # noqa: F401  (see lang.jit)

from .lang import clamp, column, helper, i64, iota, jit, tile_max
from .nvshmem import libraries, quiet
from .shape import Format, Shape, pow2
from .wire import (
    DELIVERED,
    alive,
    chunks_of,
    grant,
    heap_i32,
    is_last,
    mark,
    records_in_round,
    share,
    tell_node,
    wait_chunks,
    wait_node,
)

ID_TILE = 1024  # expert ids that are looked up at once where no payload is copied with them


@jit
def _unpack_kernel(
    in_rows_ptr,
    bases_ptr,
    state_ptr,
    recv_load_ptr,
    rail_mates_ptr,
    row_start_ptr,
    me,
    recv_off,
    rows_off,
    arrived_off,
    grant_off,
    packed_off,
    delivered_off,
    wave,
    first,
    step,
    next_wave,
    next_first,
    S: tl.constexpr,
    F: tl.constexpr,
    ROUND_RECORDS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Store the rows of the records that arrived; the first program grants the next round.

    After the last round the last program says that all is delivered.

    Example: G = 2; a record of rank 3 with entries [8, -1] (row 4 of GPU 0) and row_start[3] =
    [10, 7] becomes row 14 of GPU 0.
    """
    me: int = i64(me)
    node: int = me // S.G
    local: int = me % S.G
    peer: int = i64(tl.program_id(1))
    s: int = (node + S.N - i64(wave) - peer) % S.N
    first: int = i64(first)
    value: int = mark(state_ptr, i64(step), S)
    n: int = records_in_round(recv_load_ptr, s * S.G + local, first, ROUND_RECORDS)
    num_chunks: int = chunks_of(n, S)
    if i64(tl.program_id(0)) == 0:
        if i64(next_wave) > 0:
            if S.REMOTE:
                quiet()  # "packed" says also that the put before has left its buffer
            tell_node(bases_ptr, state_ptr, me, packed_off, value + 1, S)
        wait_chunks(bases_ptr, state_ptr, me, arrived_off, value, s, 0, num_chunks, S)
        if i64(next_wave) > 0:
            grant(
                *(bases_ptr, state_ptr, me, recv_load_ptr, rail_mates_ptr, grant_off),
                *(i64(next_wave), i64(next_first), value + 1, S),
            )

    buffer_off: int = recv_off + peer * (ROUND_RECORDS * F.RECORD_WORDS * 4)
    src_ptr = heap_i32(bases_ptr, me, buffer_off)
    e = iota(F.ENTRIES_P)
    for c in range(i64(tl.program_id(0)), num_chunks, i64(tl.num_programs(0))):
        if i64(tl.program_id(0)) > 0:
            wait_chunks(bases_ptr, state_ptr, me, arrived_off, value, s, c, 1, S)
        end: int = n * (c + 1) // num_chunks * alive(state_ptr)
        for i in range(n * c // num_chunks, end, BLOCK_M):
            record = i + iota(BLOCK_M)
            mask_i = record < end
            src_ptrs = src_ptr + record * F.RECORD_WORDS
            mask = mask_i[:, None] & (e < F.ENTRIES)[None, :]
            in_record = s * S.PROXY_RECORDS + first + record
            in_ptrs = in_rows_ptr + (in_record * F.ENTRIES)[:, None] + e[None, :]
            entry_ptrs = in_ptrs
            if F.K > 0:
                entry_ptrs = src_ptrs[:, None] + (F.META + 1) + e[None, :]
            entry = tl.load(entry_ptrs, mask=mask, other=-1).to(tl.int64)
            there = entry >= 0
            g = tl.where(there, entry % S.G, 0)
            final = entry // S.G
            if F.K > 0:
                rank = tl.load(src_ptrs + F.META, mask=mask_i, other=0).to(tl.int64)
                start_ptrs = row_start_ptr + (rank * S.G)[:, None] + g
                final += tl.load(start_ptrs, mask=there, other=0).to(tl.int64)
                tl.store(in_ptrs, tl.where(there, final * S.G + g, -1), mask=mask)
            dst = tl.load(bases_ptr + node * S.G + g, mask=there, other=0) + rows_off
            dst = tl.where(there, dst + final * (F.META * 4), 0)
            src_rows = tl.multiple_of(src_ptrs[:, None], [16, 16])
            for w in range(0, F.META, BLOCK_W):
                offs_w = w + iota(BLOCK_W)
                mask_w = (offs_w < F.META)[None, :]
                words = tl.load(src_rows + offs_w[None, :], mask=mask_i[:, None] & mask_w, other=0)
                for j in range(F.ENTRIES):
                    to = column(dst, j)
                    if i64(tile_max(to, 0)) > 0:
                        rows = tl.multiple_of(to.to(tl.pointer_type(tl.int32))[:, None], [16, 16])
                        tl.store(rows + offs_w[None, :], words, mask=(to > 0)[:, None] & mask_w)
    if i64(next_wave) == 0:
        if is_last(state_ptr) > 0:
            tell_node(bases_ptr, state_ptr, me, delivered_off, mark(state_ptr, 1, S), S)


@helper
def local_experts(
    src_ptrs, mask_i, expert_rank_ptr, expert_pos_ptr, expert_start_ptr, me, F: tl.constexpr
):
    """Load the experts of rows as their numbers on rank `me`: (rows, K_P) int64, -1 elsewhere."""
    k = iota(F.K_P)[None, :]
    mask = mask_i[:, None] & (k < F.K)
    ids = tl.load(src_ptrs[:, None] + F.IDS + k, mask=mask, other=-1).to(tl.int64)
    rank = tl.load(expert_rank_ptr + ids, mask=ids >= 0, other=-1).to(tl.int64)
    pos = tl.load(expert_pos_ptr + ids, mask=ids >= 0, other=-1).to(tl.int64)
    return tl.where(rank == me, pos - i64(tl.load(expert_start_ptr + me)), -1)


@jit
def _finish_kernel(
    words_ptr,
    topk_idx_ptr,
    weights_ptr,
    counts_ptr,
    bases_ptr,
    state_ptr,
    received_ptr,
    expert_rank_ptr,
    expert_pos_ptr,
    expert_start_ptr,
    me,
    rows_off,
    delivered_off,
    most_rows,
    S: tl.constexpr,
    F: tl.constexpr,
    COPY: tl.constexpr,
    COUNTS_P: tl.constexpr,
    OUT_ALIGN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Copy this PE's rows out; expert ids become local ones, -1 (weight 0) for other ranks'.

    Rows that did not come have ids -1 and weights 0, too; their payload stays as it is.
    """
    me: int = i64(me)
    ok: int = wait_node(
        bases_ptr, state_ptr, me, delivered_off, mark(state_ptr, 1, S), DELIVERED, S
    )
    n: int = clamp(i64(tl.load(received_ptr)), 0, i64(most_rows)) * ok
    if i64(tl.program_id(0)) == 0:
        c = iota(COUNTS_P)
        mask_c = c < 1 + S.RANK_EXPERTS
        counts = tl.load(received_ptr + c, mask=mask_c, other=0)
        tl.store(counts_ptr + c, counts, mask=mask_c)
    src_ptr = heap_i32(bases_ptr, me, rows_off)
    end: int = share(n, i64(tl.program_id(0)) + 1)
    for i in range(share(n, i64(tl.program_id(0))), end, BLOCK_M):
        offs_i = i + iota(BLOCK_M)
        mask_i = offs_i < end
        src_ptrs = src_ptr + offs_i * F.META
        if COPY:
            dst_ptrs = words_ptr + offs_i * F.X_WORDS
            src_rows = tl.multiple_of(src_ptrs[:, None], [16, 16])
            dst_rows = tl.multiple_of(dst_ptrs[:, None], [OUT_ALIGN, OUT_ALIGN])
            for w in range(0, F.X_WORDS, BLOCK_W):
                offs_w = w + iota(BLOCK_W)
                mask_x = mask_i[:, None] & (offs_w < F.X_WORDS)[None, :]
                words = tl.load(src_rows + offs_w[None, :], mask=mask_x, other=0)
                tl.store(dst_rows + offs_w[None, :], words, mask=mask_x)
        if F.K > 0:
            k = iota(F.K_P)
            mask = mask_i[:, None] & (k < F.K)[None, :]
            offs = (offs_i * F.K)[:, None] + k[None, :]
            local = local_experts(
                *(src_ptrs, mask_i, expert_rank_ptr, expert_pos_ptr, expert_start_ptr, me, F)
            )
            tl.store(topk_idx_ptr + offs, local, mask=mask)
            bits = tl.load(src_ptrs[:, None] + F.WEIGHTS + k[None, :], mask=mask, other=0)
            weights = tl.where(local >= 0, bits, 0).to(tl.float32, bitcast=True)
            tl.store(weights_ptr + offs, weights, mask=mask)
    if F.K > 0:
        rest: int = (i64(most_rows) - n) * F.K
        last: int = n * F.K + share(rest, i64(tl.program_id(0)) + 1)
        for i in range(n * F.K + share(rest, i64(tl.program_id(0))), last, BLOCK_W):
            at = i + iota(BLOCK_W)
            tl.store(topk_idx_ptr + at, -1, mask=at < last)
            tl.store(weights_ptr + at, 0.0, mask=at < last)


def unpack(
    in_rows: torch.Tensor,
    bases: torch.Tensor,
    state: torch.Tensor,
    recv_load: torch.Tensor,
    rail_mates: torch.Tensor,
    row_start: torch.Tensor,
    *,
    me: int,
    recv_off: int,
    rows_off: int,
    arrived_off: int,
    grant_off: int,
    packed_off: int,
    delivered_off: int,
    wave: int,
    num_peers: int,
    first: int,
    round_records: int,
    step: int,
    next_round: tuple[int, int] | None,
    shape: Shape,
    fmt: Format,
    programs: int,
    block_m: int,
    block_w: int,
    warps: int = 4,
) -> None:
    """Store the rows of one round's records at their final slots.

    Args:
        in_rows: out, (N, PROXY_RECORDS, ENTRIES) int32: entries, with final slots, of the record
            that came from node s in slot i. Where records are payload alone it is read instead, and
            row_start not.
        bases, state: addresses of all heaps, state of this PE.
        recv_load: (N, G) int32, records that each PE of each node puts to this node.
        rail_mates: (RAIL_GPUS,) int32, local GPUs of this PE's rail, -1 for none.
        row_start: (W, G) int32, from `quota`.
        me: this PE.
        recv_off: byte offset of the round's receive buffer; one of round_records a peer.
        rows_off, arrived_off, grant_off, packed_off, delivered_off: byte offsets of the rows and of
            the words.
        wave, num_peers: the peers are nodes (own - wave - i) mod N for i < num_peers.
        first, round_records, step: as `pack`.
        next_round: (wave, first slot) of the round to grant, None after the last.
        programs, block_m, block_w: programs a peer, records a tile, words of each in it.
        warps: of a program.
    """
    assert next_round is None or num_peers == 1, "a grant vouches for the whole round"
    next_wave, next_first = next_round or (0, 0)
    _unpack_kernel[(programs, num_peers)](
        *(in_rows, bases, state, recv_load, rail_mates, row_start),
        *(me, recv_off, rows_off, arrived_off, grant_off, packed_off, delivered_off),
        *(wave, first, step, next_wave, next_first),
        S=shape,
        F=fmt,
        ROUND_RECORDS=round_records,
        BLOCK_M=block_m,
        BLOCK_W=min(block_w, pow2(fmt.META)),
        num_warps=warps,
        **libraries(shape),
    )


def finish(
    words: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    counts: torch.Tensor,
    bases: torch.Tensor,
    state: torch.Tensor,
    received: torch.Tensor,
    expert_rank: torch.Tensor,
    expert_pos: torch.Tensor,
    expert_start: torch.Tensor,
    *,
    me: int,
    rows_off: int,
    delivered_off: int,
    copy: bool = True,
    shape: Shape,
    fmt: Format,
    programs: int,
    block_m: int,
    block_w: int,
    warps: int = 4,
) -> None:
    """Wait until the node has delivered, then copy this PE's rows into tensors of the caller's.

    Args:
        words: out, (rows, X_WORDS) int32; rows beyond those received are left as they are.
        topk_idx: out, (rows, K) int32 or int64: local expert ids, -1 for experts elsewhere and in
            rows beyond.
        topk_weights: out, (rows, K) float32, 0 where topk_idx is -1.
        counts: out, (1 + RANK_EXPERTS,) int32, a copy of `received`.
        received: (1 + RANK_EXPERTS,) int32, from `quota`: rows, then slots of each expert here.
        expert_rank, expert_pos, expert_start: the expert map, as in `count`.
        me: this PE.
        rows_off, delivered_off: byte offsets of the rows and of the words delivered[local GPU].
        copy: False leaves the payload where it is, and `words` unused.
        programs, block_m, block_w: programs, rows a tile, words of each in it.
    """
    _finish_kernel[(programs,)](
        *(words, topk_idx, topk_weights, counts, bases, state, received),
        *(expert_rank, expert_pos, expert_start, me, rows_off, delivered_off, topk_idx.shape[0]),
        S=shape,
        F=fmt,
        COPY=copy,
        COUNTS_P=pow2(1 + shape.RANK_EXPERTS),
        OUT_ALIGN=16 if fmt.X_WORDS % 4 == 0 else 4,
        BLOCK_M=block_m if copy else max(block_m, ID_TILE // fmt.K_P),
        BLOCK_W=min(block_w, pow2(fmt.X_WORDS)),
        num_warps=warps,
    )


def unpack_ref(
    in_rows: torch.Tensor,
    rows: list[torch.Tensor],
    recv: torch.Tensor,
    recv_load: torch.Tensor,
    row_start: torch.Tensor,
    *,
    me: int,
    wave: int,
    first: int,
    shape: Shape,
    fmt: Format,
) -> None:
    """Do what `unpack` does, record by record.

    Args: as `unpack`, and
        rows: out, per local GPU, (slots, META) int32: the node's rows regions.
        recv: (peers, round_records, RECORD_WORDS) int32, this PE's receive buffers of the round.
    """
    S = shape
    node, local = divmod(me, S.G)
    for peer, records in enumerate(recv):
        s = (node - wave - peer) % S.N
        num_records = min(max(int(recv_load[s, local]) - first, 0), len(records))
        for i, record in enumerate(records[:num_records]):
            if fmt.K:
                rank, *entries = record[fmt.META :][: 1 + fmt.ENTRIES].tolist()
                starts = row_start[rank].tolist()
                final = [
                    entry + starts[entry % S.G] * S.G if entry >= 0 else -1 for entry in entries
                ]
                in_rows[s, first + i] = torch.tensor(final)
            for entry in in_rows[s, first + i].tolist():
                if entry >= 0:
                    rows[entry % S.G][entry // S.G] = record[: fmt.META]


def finish_ref(
    words: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    rows: torch.Tensor,
    expert_rank: torch.Tensor,
    expert_pos: torch.Tensor,
    expert_start: torch.Tensor,
    *,
    me: int,
    fmt: Format,
) -> None:
    """Do what `finish` does, from rows (slots, META) int32 of this PE that came."""
    topk_idx[len(rows) :], topk_weights[len(rows) :] = -1, 0.0
    for i, row in enumerate(rows[: len(words)]):
        words[i] = row[: fmt.X_WORDS]
        if not fmt.K:
            continue
        ids = row[fmt.IDS : fmt.IDS + fmt.K].tolist()
        weights = row[fmt.WEIGHTS : fmt.WEIGHTS + fmt.K].view(torch.float32)
        for k, e in enumerate(ids):
            here = e >= 0 and int(expert_rank[e]) == me
            topk_idx[i, k] = expert_pos[e] - expert_start[me] if here else -1
            topk_weights[i, k] = weights[k] if here else 0.0
