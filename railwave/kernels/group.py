"""Rows by expert: one for each (token, expert) of this rank, and their sum a token again.

Rows arrive one a token. `place` gives each of its experts here a row of its own, in the group of
that expert, by ascending (source rank, token); `spread` copies payload there. With c_e the rows of
expert e and a the alignment, its group starts at

    o_e = sum over f < e of a * ceil(c_f / a)

`gather` is the way back: by ascending k, in fp32, from +0, rounded once,

    row = round(sum over k of weight_k * out_k)

Letters: K top-k, E experts of this rank, k a slot of a row's top-k.
"""

import torch
import triton.language as tl
from triton.language import core  # noqa: F401  (see lang.jit)

from .lang import cdiv, clamp, column, cumsum, helper, i64, iota, jit, tile_max, tile_sum
from .reduce import DTYPES, load_f32, round_ref, store_rounded
from .shape import Format, Shape, pow2, row_align
from .unpack import local_experts
from .wire import DELIVERED, alive, heap_i32, mark, share, wait_node


@helper
def _members(local, K: tl.constexpr, EXPERTS_P: tl.constexpr):
    """Say which experts a row has here: (rows, EXPERTS_P) int64 of 0 and 1."""
    e = iota(EXPERTS_P)[None, :]
    found = (column(local, 0)[:, None] == e).to(tl.int64)
    for k in range(1, K):
        found = tl.maximum(found, (column(local, k)[:, None] == e).to(tl.int64))
    return found


@jit
def _tally_kernel(
    tally_ptr,
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
    BLOCK_M: tl.constexpr,
    EXPERTS_P: tl.constexpr,
):
    """Count each expert's rows among those of a program, once the node has delivered.

    Example: rows with experts [1, 0], [1, -1] and [2, 2] count 1, 2, 1: a repeat counts once.
    """
    me: int = i64(me)
    value: int = mark(state_ptr, 1, S)
    ok: int = wait_node(bases_ptr, state_ptr, me, delivered_off, value, DELIVERED, S)
    n: int = clamp(i64(tl.load(received_ptr)), 0, i64(most_rows)) * ok
    src_ptr = heap_i32(bases_ptr, me, rows_off)
    e = iota(EXPERTS_P)
    count = e * 0
    program: int = i64(tl.program_id(0))
    end: int = share(n, program + 1)
    for i in range(share(n, program), end, BLOCK_M):
        offs_i = i + iota(BLOCK_M)
        src_ptrs = src_ptr + offs_i * F.META
        local = local_experts(
            *(src_ptrs, offs_i < end, expert_rank_ptr, expert_pos_ptr, expert_start_ptr, me, F)
        )
        count += tile_sum(_members(local, F.K, EXPERTS_P), 0)
    tl.store(tally_ptr + program * S.RANK_EXPERTS + e, count, mask=e < S.RANK_EXPERTS)


@jit
def _place_kernel(
    places_ptr,
    topk_idx_ptr,
    weights_ptr,
    counts_ptr,
    offsets_ptr,
    tally_ptr,
    bases_ptr,
    state_ptr,
    received_ptr,
    expert_rank_ptr,
    expert_pos_ptr,
    expert_start_ptr,
    me,
    rows_off,
    most_rows,
    alignment,
    S: tl.constexpr,
    F: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_P: tl.constexpr,
    EXPERTS_P: tl.constexpr,
):
    """Number the rows of a program within each expert's group, behind the programs before it.

    Example: alignment 2; rows with experts [1, 0] and [1, -1] take places [2, 0] and [3, -1].
    """
    me: int = i64(me)
    program: int = i64(tl.program_id(0))
    num_programs: int = i64(tl.num_programs(0))
    e = iota(EXPERTS_P)
    mask_e = e < S.RANK_EXPERTS
    total = e * 0
    before = e * 0
    for q in range(0, num_programs, BLOCK_P):
        offs_q = q + iota(BLOCK_P)
        ptrs = tally_ptr + (offs_q * S.RANK_EXPERTS)[:, None] + e[None, :]
        tally = tl.load(ptrs, mask=(offs_q < num_programs)[:, None] & mask_e[None, :], other=0)
        tally = tally.to(tl.int64)
        total += tile_sum(tally, 0)
        before += tile_sum(tl.where((offs_q < program)[:, None], tally, 0), 0)
    aligned = cdiv(total, alignment) * alignment
    ends = cumsum(aligned, 0)
    if program == 0:
        tl.store(counts_ptr + 1 + e, total, mask=mask_e)
        tl.store(counts_ptr, tile_sum(aligned, 0))
        tl.store(offsets_ptr + 1 + e, ends, mask=mask_e)
        tl.store(offsets_ptr, 0)
    base = ends - aligned + before

    n: int = clamp(i64(tl.load(received_ptr)), 0, i64(most_rows)) * alive(state_ptr)
    src_ptr = heap_i32(bases_ptr, me, rows_off)
    end: int = share(n, program + 1)
    for i in range(share(n, program), end, BLOCK_M):
        offs_i = i + iota(BLOCK_M)
        mask_i = offs_i < end
        src_ptrs = src_ptr + offs_i * F.META
        local = local_experts(
            *(src_ptrs, mask_i, expert_rank_ptr, expert_pos_ptr, expert_start_ptr, me, F)
        )
        members = _members(local, F.K, EXPERTS_P)
        place = base[None, :] + cumsum(members, 0) - members
        seen = members * 0
        weight = seen.to(tl.float32)
        for k in range(F.K):
            here = (column(local, k)[:, None] == e[None, :]).to(tl.int64)
            to = tile_sum(here * place, 1)
            again = tile_sum(here * seen, 1)
            to = tl.where(tile_sum(here, 1) > 0, tl.where(again > 0, -2 - to, to), -1)
            tl.store(places_ptr + offs_i * F.K + k, to, mask=mask_i)
            bits = tl.load(src_ptrs + F.WEIGHTS + k, mask=mask_i, other=0)
            bits = tl.where(here > 0, bits[:, None], 0)
            weight += bits.to(tl.float32, bitcast=True)
            seen = tl.maximum(seen, here)
        mask = (members > 0) & mask_i[:, None]
        tl.store(topk_idx_ptr + place, place * 0 + e[None, :], mask=mask)
        tl.store(weights_ptr + place, weight, mask=mask)
        base += tile_sum(members, 0)


@jit
def _spread_kernel(
    words_ptr,
    bases_ptr,
    state_ptr,
    received_ptr,
    places_ptr,
    counts_ptr,
    offsets_ptr,
    me,
    rows_off,
    delivered_off,
    most_rows,
    alignment,
    S: tl.constexpr,
    F: tl.constexpr,
    K: tl.constexpr,
    ZERO: tl.constexpr,
    OUT_ALIGN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Copy this PE's rows to their places, read once each; with ZERO, clear those of no token.

    Example: places [2, 0] and [3, -1], alignment 2: out is row 0, zeros, row 0, row 1.
    """
    me: int = i64(me)
    value: int = mark(state_ptr, 1, S)
    ok: int = wait_node(bases_ptr, state_ptr, me, delivered_off, value, DELIVERED, S)
    n: int = clamp(i64(tl.load(received_ptr)), 0, i64(most_rows)) * ok
    src_ptr = heap_i32(bases_ptr, me, rows_off)
    end: int = share(n, i64(tl.program_id(0)) + 1)
    for i in range(share(n, i64(tl.program_id(0))), end, BLOCK_M):
        offs_i = i + iota(BLOCK_M)
        mask_i = offs_i < end
        src_rows = tl.multiple_of((src_ptr + offs_i * F.META)[:, None], [16, 16])
        for w in range(0, F.X_WORDS, BLOCK_W):
            offs_w = w + iota(BLOCK_W)
            mask_w = (offs_w < F.X_WORDS)[None, :]
            words = tl.load(src_rows + offs_w[None, :], mask=mask_i[:, None] & mask_w, other=0)
            for k in range(K):
                to = tl.load(places_ptr + offs_i * K + k, mask=mask_i, other=-1).to(tl.int64)
                if i64(tile_max(to, 0)) >= 0:
                    rows = words_ptr + (to * F.X_WORDS)[:, None]
                    rows = tl.multiple_of(rows, [OUT_ALIGN, OUT_ALIGN])
                    tl.store(rows + offs_w[None, :], words, mask=(to >= 0)[:, None] & mask_w)
    if ZERO:
        gap: int = i64(alignment) - 1  # a group has no more rows without a token
        pads: int = S.RANK_EXPERTS * gap * ok
        last: int = share(pads, i64(tl.program_id(0)) + 1)
        for i in range(share(pads, i64(tl.program_id(0))), last, BLOCK_M):
            offs_i = i + iota(BLOCK_M)
            mask_i = offs_i < last
            e = offs_i // gap
            row = tl.load(offsets_ptr + e, mask=mask_i, other=0).to(tl.int64)
            row += tl.load(counts_ptr + 1 + e, mask=mask_i, other=0).to(tl.int64) + offs_i % gap
            mask_i = row < tl.load(offsets_ptr + 1 + e, mask=mask_i, other=0).to(tl.int64)
            rows = words_ptr + (row * F.X_WORDS)[:, None]
            rows = tl.multiple_of(rows, [OUT_ALIGN, OUT_ALIGN])
            for w in range(0, F.X_WORDS, BLOCK_W):
                offs_w = w + iota(BLOCK_W)
                mask = mask_i[:, None] & (offs_w < F.X_WORDS)[None, :]
                tl.store(rows + offs_w[None, :], 0, mask=mask)


@jit
def _gather_kernel(
    bases_ptr,
    state_ptr,
    words_ptr,
    weights_ptr,
    places_ptr,
    received_ptr,
    me,
    rows_off,
    row_bytes,
    most_rows,
    H: tl.constexpr,
    K: tl.constexpr,
    DTYPE: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    PLACED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    ROW_ALIGN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Sum the results of each row's experts, in fp32, into this PE's rows region.

    Example: places [2, 0] and weights 0.5 at 2, 0.25 at 0: row = 0.5 * out[2] + 0.25 * out[0].
    """
    dst = tl.load(bases_ptr + i64(me)) + rows_off
    src = words_ptr.to(tl.int64)
    stride: int = i64(row_bytes)
    n: int = clamp(i64(tl.load(received_ptr)), 0, i64(most_rows)) * alive(state_ptr)
    end: int = share(n, i64(tl.program_id(0)) + 1)
    for i in range(share(n, i64(tl.program_id(0))), end, BLOCK_M):
        offs_i = i + iota(BLOCK_M)
        mask_i = offs_i < end
        for h in range(0, H, BLOCK_H):
            offs_h = h + iota(BLOCK_H)
            total = (offs_i * 0).to(tl.float32)[:, None] + (offs_h * 0).to(tl.float32)[None, :]
            for k in range(K):
                if PLACED:
                    row = tl.load(places_ptr + offs_i * K + k, mask=mask_i, other=-1).to(tl.int64)
                else:
                    row = tl.where(mask_i, offs_i, -1)
                if i64(tile_max(row, 0)) >= 0:
                    there = row >= 0
                    mask = there[:, None] & (offs_h < H)[None, :]
                    address = (src + row * stride)[:, None]
                    value = load_f32(address, offs_h[None, :], mask, DTYPE, ROW_ALIGN)
                    if WEIGHTED:
                        value *= tl.load(weights_ptr + row, mask=there, other=0.0)[:, None]
                    total += value
            mask = mask_i[:, None] & (offs_h < H)[None, :]
            store_rounded((dst + offs_i * ROW_BYTES)[:, None], offs_h[None, :], total, mask, DTYPE)


def place(
    places: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    counts: torch.Tensor,
    offsets: torch.Tensor,
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
    alignment: int,
    shape: Shape,
    fmt: Format,
    programs: int,
    block_m: int,
    warps: int = 4,
) -> None:
    """Wait until the node has delivered, then give each expert of this PE's rows a row of its own.

    Args:
        places: out, (rows, K) int32: where the row goes for each slot of its top-k; -1 for experts
            elsewhere, -2 - place for a slot that repeats an expert of the row.
        topk_idx: out, int32 or int64: the local expert of each place. It and topk_weights have a
            place for all that may come; those that no token takes are left as they are.
        topk_weights: out, float32: the weight of each place; of repeats, their sum.
        counts: out, (1 + RANK_EXPERTS,) int32: places with those left free between groups, then the
            places taken of each local expert.
        offsets: out, (1 + RANK_EXPERTS,) int32: where each expert's group starts; where all end.
        bases, state: addresses of all heaps, state of this PE.
        received: (1 + RANK_EXPERTS,) int32, from `quota`: rows that came, ...
        expert_rank, expert_pos, expert_start: the expert map, as in `count`.
        me: this PE.
        rows_off, delivered_off: byte offsets of the rows and of the words delivered[local GPU].
        alignment: every group starts at a multiple of it.
        programs, block_m: programs, rows a tile.
    """
    S = shape
    tally = torch.empty(programs, S.RANK_EXPERTS, dtype=torch.int32, device=places.device)
    experts = (received, expert_rank, expert_pos, expert_start)
    experts_p = pow2(S.RANK_EXPERTS)
    block_m = max(2, min(block_m, 4096 // experts_p))
    tile = {"BLOCK_M": block_m, "EXPERTS_P": experts_p, "num_warps": warps}
    _tally_kernel[(programs,)](
        *(tally, bases, state, *experts, me, rows_off, delivered_off, len(places)),
        S=S,
        F=fmt,
        **tile,
    )
    _place_kernel[(programs,)](
        *(places, topk_idx, topk_weights, counts, offsets, tally, bases, state, *experts),
        *(me, rows_off, len(places), alignment),
        S=S,
        F=fmt,
        BLOCK_P=max(2, min(pow2(programs), 4096 // experts_p)),
        **tile,
    )


def spread(
    words: torch.Tensor,
    bases: torch.Tensor,
    state: torch.Tensor,
    received: torch.Tensor,
    places: torch.Tensor,
    counts: torch.Tensor,
    offsets: torch.Tensor,
    *,
    me: int,
    rows_off: int,
    delivered_off: int,
    alignment: int,
    zero_padding: bool,
    shape: Shape,
    fmt: Format,
    programs: int,
    block_m: int,
    block_w: int,
    warps: int = 4,
) -> None:
    """Wait until the node has delivered, then copy this PE's rows to their places.

    Args:
        words: out, (places, X_WORDS) int32; places that no token takes are left as they are.
        places, counts, offsets: from `place`, of this dispatch or of the one that it repeats.
        zero_padding: write 0 where no token is within the groups.

        The others as `place`; block_w: words of a row in a tile.
    """
    _spread_kernel[(programs,)](
        *(words, bases, state, received, places, counts, offsets),
        *(me, rows_off, delivered_off, len(places), alignment),
        S=shape,
        F=fmt,
        K=places.shape[1],
        ZERO=zero_padding and alignment > 1,
        OUT_ALIGN=16 if fmt.X_WORDS % 4 == 0 else 4,
        BLOCK_M=block_m,
        BLOCK_W=min(block_w, pow2(fmt.X_WORDS)),
        num_warps=warps,
    )


def gather(
    bases: torch.Tensor,
    state: torch.Tensor,
    words: torch.Tensor,
    weights: torch.Tensor | None,
    places: torch.Tensor | None,
    received: torch.Tensor,
    *,
    me: int,
    rows_off: int,
    row_words: int,
    most_rows: int,
    hidden: int,
    dtype: torch.dtype,
    programs: int,
    block_m: int,
    block_h: int,
    warps: int = 4,
) -> None:
    """Write into this PE's rows region the sum of each row's results, weighted.

    Nothing once a phase has failed, whose tables hold anything.

    Args:
        bases, state: addresses of all heaps, state of this PE.
        words: (places, words) int32, the experts' results as words, rows at any stride.
        weights: (places,) float32 to multiply them by; None for 1.
        places: (rows, K) int32, from `place`; None for a result a row, in its place.
        received: (1, ...) int32, rows that hold something, of most_rows at most.
        me: this PE.
        rows_off: byte offset of the rows region; row_words: words from one row to the next.
        hidden, dtype: of the results.
        programs, block_m, block_h: programs, rows a tile, elements of each in it.
    """
    _gather_kernel[(programs,)](
        *(bases, state, words, received if weights is None else weights),
        *(received if places is None else places, received),
        *(me, rows_off, words.stride(0) * 4, most_rows),
        H=hidden,
        K=1 if places is None else places.shape[1],
        DTYPE=DTYPES[dtype],
        ROW_BYTES=row_words * 4,
        PLACED=places is not None,
        WEIGHTED=weights is not None,
        ROW_ALIGN=row_align(words),
        BLOCK_M=block_m,
        BLOCK_H=min(block_h, pow2(hidden)),
        num_warps=warps,
    )


def place_ref(
    places: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    counts: torch.Tensor,
    offsets: torch.Tensor,
    rows: torch.Tensor,
    expert_rank: torch.Tensor,
    expert_pos: torch.Tensor,
    expert_start: torch.Tensor,
    *,
    me: int,
    alignment: int,
    shape: Shape,
    fmt: Format,
) -> None:
    """Do what `place` does, from rows (slots, META) int32 of this PE."""
    start, num_places, at = int(expert_start[me]), 0, 0
    offsets[0] = 0
    for e in range(shape.RANK_EXPERTS):
        for i, row in enumerate(rows):
            ids, bits = row[fmt.IDS :][: fmt.K], row[fmt.WEIGHTS :][: fmt.K]
            first = None
            for k, (expert, weight) in enumerate(zip(ids, bits.view(torch.float32), strict=True)):
                local = int(expert_pos[expert]) - start if expert >= 0 else -1
                if expert < 0 or int(expert_rank[expert]) != me:
                    places[i, k] = -1
                elif local == e and first is None:
                    first = at + num_places
                    places[i, k], topk_idx[first], topk_weights[first] = first, e, 0.0 + weight
                    num_places += 1
                elif local == e:
                    places[i, k] = -2 - first
                    topk_weights[first] += weight
        counts[1 + e] = num_places
        at += -(-num_places // alignment) * alignment
        offsets[1 + e], num_places = at, 0
    counts[0] = at


def spread_ref(
    words: torch.Tensor,
    rows: torch.Tensor,
    places: torch.Tensor,
    counts: torch.Tensor,
    offsets: torch.Tensor,
    *,
    zero_padding: bool,
    fmt: Format,
) -> None:
    """Do what `spread` does, from rows (slots, META) int32 of this PE."""
    for row, to in zip(rows, places.tolist(), strict=False):
        for place_ in to:
            if place_ >= 0:
                words[place_] = row[: fmt.X_WORDS]
    for e, count in enumerate(counts[1:].tolist()):
        if zero_padding:
            words[int(offsets[e]) + count : int(offsets[e + 1])] = 0


def gather_ref(
    rows: torch.Tensor,
    out: torch.Tensor,
    weights: torch.Tensor | None,
    places: torch.Tensor | None,
) -> None:
    """Do what `gather` does, into rows (slots, H) of the dtype of out."""
    for i in range(len(rows)):
        total = torch.zeros(out.shape[1], dtype=torch.float32)
        for place_ in [i] if places is None else places[i].tolist():
            if place_ >= 0:
                weight = 1.0 if weights is None else weights[place_]
                total += out[place_].float() * weight
        rows[i] = round_ref(total, out.dtype)
