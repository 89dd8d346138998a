"""The first half of a combine: sum the rows of each token within a node.

`copy_in` makes the experts' results readable to the node; `own` sums the rows of the owner's own
node, p(s), and `reduce` those that another node returns, p(x), which it rounds once to the dtype on
the wire. Sums are in fp32, by ascending local rank, and start from +0. Rounding is to nearest even,
by integer operations for bfloat16 (Triton's interpreter truncates the cast).

Letters: T tokens, H hidden, G GPUs a node, d a slice's destination, s its source, g local GPU.
"""

import torch
import triton.language as tl
from triton.language import core  # noqa: F401  (see lang.jit)

from .lang import ROWS_AT_ONCE, clamp, helper, i64, iota, jit, tile_max
from .notify import message_tiles, send_counts
from .nvshmem import libraries, quiet
from .shape import Shape, pow2, row_align
from .wire import (
    EPOCH,
    NOTIFIES,
    ROWS_IN,
    alive,
    grant_first,
    is_last,
    mark,
    records_in_round,
    share,
    start_counting,
    tell_node,
    wait_node,
)

DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@helper
def load_f32(address, offs, mask, DTYPE: tl.constexpr, ALIGN: tl.constexpr = 16):
    """Load elements `offs` after int64 addresses, multiples of ALIGN bytes, as float32, exactly."""
    if DTYPE == tl.bfloat16:
        ptrs = tl.multiple_of(address.to(tl.pointer_type(tl.int16)), [ALIGN, ALIGN]) + offs
        bits = tl.load(ptrs, mask=mask, other=0).to(tl.int32)
        return (bits << 16).to(tl.float32, bitcast=True)
    else:
        ptrs = tl.multiple_of(address.to(tl.pointer_type(DTYPE)), [ALIGN, ALIGN]) + offs
        return tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)


@helper
def rounded(value, DTYPE: tl.constexpr):
    """Round float32 to DTYPE, to nearest even; bfloat16 as int16 bits.

    bfloat16 is the upper half of a float32: add 0x7FFF, and 1 more where the kept part is odd.
    """
    if DTYPE == tl.bfloat16:
        bits = value.to(tl.int32, bitcast=True).to(tl.int64)
        half = (bits + ((bits >> 16) & 1) + 0x7FFF) >> 16
        return tl.where(value == value, half, 0x7FC0).to(tl.int16)  # any NaN becomes this one
    else:
        return value.to(DTYPE)


@helper
def store_rounded(address, offs, value, mask, DTYPE: tl.constexpr):
    """Store float32, rounded to DTYPE, as elements `offs` after addresses as `load_f32` takes."""
    BITS: tl.constexpr = tl.int16 if DTYPE == tl.bfloat16 else DTYPE
    ptrs = tl.multiple_of(address.to(tl.pointer_type(BITS)), [16, 16]) + offs
    tl.store(ptrs, rounded(value, DTYPE), mask=mask)


@helper
def _entry(rows_ptr, record, mask_i, e, ENTRIES: tl.constexpr):
    """Load entry e of each record: int64, -1 for none."""
    return tl.load(rows_ptr + record * ENTRIES + e, mask=mask_i, other=-1).to(tl.int64)


@helper
def _row(
    bases_ptr,
    entry,
    offs_h,
    node,
    rows_off,
    row_bytes,
    H: tl.constexpr,
    DTYPE: tl.constexpr,
    S: tl.constexpr,
):
    """Load the rows that entries name, 0 where one is negative: float32 (len(entry), BLOCK_H)."""
    there = entry >= 0
    pe = node * S.G + tl.where(there, entry % S.G, 0)
    start = tl.load(bases_ptr + pe, mask=there, other=0) + rows_off
    address = (start + entry // S.G * row_bytes)[:, None]
    mask = there[:, None] & (offs_h < H)[None, :]
    return load_f32(address, offs_h[None, :], mask, DTYPE)


@helper
def sum_rows(
    bases_ptr,
    rows_ptr,
    record,
    mask_i,
    offs_h,
    node,
    rows_off,
    row_bytes,
    H: tl.constexpr,
    DTYPE: tl.constexpr,
    ENTRIES: tl.constexpr,
    S: tl.constexpr,
):
    """Add the rows of each record, by ascending GPU: float32 (len(record), BLOCK_H).

    rows_ptr: (records, ENTRIES) int32, entries with final slots, then -1.
    """
    total = (record * 0).to(tl.float32)[:, None] + (offs_h * 0).to(tl.float32)[None, :]
    for first in tl.static_range(0, ENTRIES, ROWS_AT_ONCE):
        entry = _entry(rows_ptr, record, mask_i, first, ENTRIES)
        if i64(tile_max(entry, 0)) >= 0:  # else there are none after it
            total += _row(bases_ptr, entry, offs_h, node, rows_off, row_bytes, H, DTYPE, S)
            for e in tl.static_range(first + 1, first + ROWS_AT_ONCE):
                if e < ENTRIES:
                    entry = _entry(rows_ptr, record, mask_i, e, ENTRIES)
                    total += _row(bases_ptr, entry, offs_h, node, rows_off, row_bytes, H, DTYPE, S)
    return total


@jit
def _copy_in_kernel(
    bases_ptr,
    state_ptr,
    words_ptr,
    stride_words_i,
    received_ptr,
    recv_load_ptr,
    rail_mates_ptr,
    counts_ptr,
    expert_start_ptr,
    put_words_ptr,
    me,
    rows_off,
    rows_in_off,
    grant_off,
    notify_off,
    word_off,
    outbox_off,
    grant_waves,
    most_rows,
    status,
    sum_words,
    S: tl.constexpr,
    X_WORDS: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    NOTIFY: tl.constexpr,
    ROW_ALIGN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_W: tl.constexpr,
    WORDS_P: tl.constexpr,
    PEERS_P: tl.constexpr,
    EXPERTS_P: tl.constexpr,
):
    """Copy this PE's expert outputs into its rows region. The phase's first kernel.

    The last program lets the node read the rows and grants the first waves; with NOTIFY it tells
    all ranks the status of this one's call.
    """
    me: int = i64(me)
    if i64(tl.program_id(0)) == 0:
        tl.store(state_ptr + EPOCH, tl.load(state_ptr + EPOCH) + 1)
        start_counting(put_words_ptr, sum_words, S)
        if NOTIFY:
            tl.store(state_ptr + NOTIFIES, tl.load(state_ptr + NOTIFIES) + 1)
            tl.store(counts_ptr, status)
    dst = tl.load(bases_ptr + me) + rows_off
    dst_ptr = dst.to(tl.pointer_type(tl.int32))
    n: int = clamp(i64(tl.load(received_ptr)), 0, i64(most_rows))
    stride: int = i64(stride_words_i)
    end: int = share(n, i64(tl.program_id(0)) + 1)
    for i in range(share(n, i64(tl.program_id(0))), end, BLOCK_M):
        offs_i = i + iota(BLOCK_M)
        src_rows = words_ptr + (offs_i * stride)[:, None]
        src_rows = tl.multiple_of(src_rows, [ROW_ALIGN, ROW_ALIGN])
        dst_rows = tl.multiple_of(dst_ptr + (offs_i * ROW_WORDS)[:, None], [16, 16])
        for w in range(0, X_WORDS, BLOCK_W):
            offs_w = w + iota(BLOCK_W)
            mask = (offs_i < end)[:, None] & (offs_w < X_WORDS)[None, :]
            words = tl.load(src_rows + offs_w[None, :], mask=mask, other=0)
            tl.store(dst_rows + offs_w[None, :], words, mask=mask)
    if is_last(state_ptr) > 0:
        value: int = mark(state_ptr, 1, S)
        if S.REMOTE:
            quiet()  # `reduce` writes what the phase before was put from
        tell_node(bases_ptr, state_ptr, me, rows_in_off, value, S)
        grant_first(
            *(bases_ptr, state_ptr, me, recv_load_ptr, rail_mates_ptr),
            *(grant_off, i64(grant_waves), value, S),
        )
        if NOTIFY:
            send_counts(
                *(bases_ptr, state_ptr, counts_ptr, expert_start_ptr),
                *(me, i64(notify_off), i64(word_off), i64(outbox_off)),
                *(S, WORDS_P, PEERS_P, EXPERTS_P),
            )


@jit
def _own_kernel(
    acc_ptr,
    bases_ptr,
    state_ptr,
    own_rows_ptr,
    me,
    rows_off,
    rows_in_off,
    rows_read_off,
    num_tokens,
    S: tl.constexpr,
    H: tl.constexpr,
    DTYPE: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    ENTRIES: tl.constexpr,
    TELL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Set acc to each token's sum over the own node, p(s), not rounded: 0 without rows here."""
    me: int = i64(me)
    node: int = me // S.G
    ok: int = wait_node(bases_ptr, state_ptr, me, rows_in_off, mark(state_ptr, 1, S), ROWS_IN, S)
    n: int = i64(num_tokens) * ok
    end: int = share(n, i64(tl.program_id(0)) + 1)
    for i in range(share(n, i64(tl.program_id(0))), end, BLOCK_M):
        t = i + iota(BLOCK_M)
        mask_t = t < end
        for h in range(0, H, BLOCK_H):
            offs_h = h + iota(BLOCK_H)
            total = sum_rows(
                *(bases_ptr, own_rows_ptr, t, mask_t, offs_h),
                *(node, rows_off, ROW_BYTES, H, DTYPE, ENTRIES, S),
            )
            mask = mask_t[:, None] & (offs_h < H)[None, :]
            tl.store(acc_ptr + (t * H)[:, None] + offs_h[None, :], total, mask=mask)
    if TELL:
        if is_last(state_ptr) > 0:
            tell_node(bases_ptr, state_ptr, me, rows_read_off, mark(state_ptr, 1, S), S)


@jit
def _reduce_kernel(
    bases_ptr,
    state_ptr,
    in_rows_ptr,
    in_load_ptr,
    me,
    rows_off,
    send_off,
    rows_in_off,
    packed_off,
    wave,
    first,
    wait,
    tell_step,
    S: tl.constexpr,
    H: tl.constexpr,
    DTYPE: tl.constexpr,
    WIRE: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    ENTRIES: tl.constexpr,
    RECORD_WORDS: tl.constexpr,
    ROUND_RECORDS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Write p(this node), rounded to WIRE, of each record to return in the round.

    wait: no launch before this one has waited for the node's rows. tell_step: the last program says
    packed(tell_step), for `granted`, which runs beside.

    Example: bfloat16 rows 1.0 and 2**-9 of a record on GPUs 0 and 1: 1.001953125 rounds to 1.0.
    """
    me: int = i64(me)
    node: int = me // S.G
    local: int = me % S.G
    peer: int = i64(tl.program_id(1))
    s: int = (node + i64(wave) + peer) % S.N
    first: int = i64(first)
    n: int = records_in_round(in_load_ptr, s * S.G + local, first, ROUND_RECORDS)
    n: int = n * alive(state_ptr)
    if i64(wait) > 0:
        value: int = mark(state_ptr, 1, S)
        n: int = n * wait_node(bases_ptr, state_ptr, me, rows_in_off, value, ROWS_IN, S)
    dst = tl.load(bases_ptr + me) + send_off
    dst += peer * (ROUND_RECORDS * RECORD_WORDS * 4)
    rows_ptr = in_rows_ptr + (s * S.PROXY_RECORDS + first) * ENTRIES
    end: int = share(n, i64(tl.program_id(0)) + 1)
    for i in range(share(n, i64(tl.program_id(0))), end, BLOCK_M):
        record = i + iota(BLOCK_M)
        mask_i = record < end
        for h in range(0, H, BLOCK_H):
            offs_h = h + iota(BLOCK_H)
            total = sum_rows(
                *(bases_ptr, rows_ptr, record, mask_i, offs_h),
                *(node, rows_off, ROW_BYTES, H, DTYPE, ENTRIES, S),
            )
            mask = mask_i[:, None] & (offs_h < H)[None, :]
            address = (dst + record * (RECORD_WORDS * 4))[:, None]
            store_rounded(address, offs_h[None, :], total, mask, WIRE)
    if i64(tell_step) > 0:
        if is_last(state_ptr) > 0:
            value: int = mark(state_ptr, i64(tell_step), S)
            tell_node(bases_ptr, state_ptr, me, packed_off, value, S)


def copy_in(
    bases: torch.Tensor,
    state: torch.Tensor,
    words: torch.Tensor,
    received: torch.Tensor,
    recv_load: torch.Tensor,
    rail_mates: torch.Tensor,
    counts: torch.Tensor,
    expert_start: torch.Tensor,
    put_words: torch.Tensor,
    *,
    me: int,
    rows_off: int,
    rows_in_off: int,
    grant_off: int,
    notify_off: int,
    word_off: int,
    outbox_off: int,
    row_words: int,
    most_rows: int,
    grant_waves: int,
    status: int | None,
    sum_words: int,
    shape: Shape,
    programs: int,
    block_m: int,
    block_w: int,
    warps: int = 4,
) -> None:
    """Advance the epoch; copy expert outputs into this PE's rows region; let the node read them.

    Args:
        bases: (W,) int64, address of every PE's heap.
        state: (STATE_WORDS,) int64 of this PE.
        words: (rows, X_WORDS) int32, the outputs as words, rows at any stride.
        received: (1, ...) int32, from the dispatch's `quota`: rows that hold something.
        recv_load: (N, G) int32, records that each PE of each node will put to this node.
        rail_mates: (RAIL_GPUS,) int32, local GPUs of this PE's rail, -1 for none.
        counts, expert_start, notify_off, word_off, outbox_off: as `notify`.
        put_words: out, (N + 1,) int64: zeros for what will be put, then sum_words, the 32-bit words
            from one sum to the next on the wire.
        rows_off: byte offset of the rows region; row_words: words from one row to the next.
        rows_in_off, grant_off: byte offsets of the words rows_in[local GPU], grant[rank].
        most_rows: copy no more; 0 where the outputs lie in the region already.
        grant_waves: grant the first round of waves 1 to this number.
        status: tell all ranks this of the call; None: they need not hear of it.
        programs, block_m, block_w: programs, rows a tile, words of each in it.
    """
    _copy_in_kernel[(programs,)](
        *(bases, state, words, words.stride(0), received, recv_load, rail_mates),
        *(counts, expert_start, put_words, me, rows_off, rows_in_off, grant_off),
        *(notify_off, word_off, outbox_off, grant_waves, most_rows, status or 0, sum_words),
        S=shape,
        X_WORDS=words.shape[1],
        ROW_WORDS=row_words,
        NOTIFY=status is not None,
        ROW_ALIGN=row_align(words),
        BLOCK_M=block_m,
        BLOCK_W=min(block_w, pow2(words.shape[1])),
        num_warps=warps,
        **message_tiles(shape),
        **libraries(shape),
    )


def own(
    acc: torch.Tensor,
    bases: torch.Tensor,
    state: torch.Tensor,
    own_rows: torch.Tensor,
    *,
    me: int,
    rows_off: int,
    row_bytes: int,
    rows_in_off: int,
    rows_read_off: int,
    tell: bool,
    dtype: torch.dtype,
    shape: Shape,
    programs: int,
    block_m: int,
    block_h: int,
    warps: int = 4,
) -> None:
    """Wait for the node's rows; set acc to each token's sum over its own node.

    Args:
        acc: out, (T, H) float32.
        own_rows: (S.T, ENTRIES) int32, from `local`.
        rows_off, row_bytes: byte offset of the rows regions, bytes from one row to the next.
        rows_in_off, rows_read_off: byte offsets of the words rows_in[local GPU], rows_read[...].
        tell: say last that this PE has read the node's rows, since no `take` follows.
        dtype: of the rows.
    """
    hidden = acc.shape[1]
    _own_kernel[(programs,)](
        *(acc, bases, state, own_rows),
        *(me, rows_off, rows_in_off, rows_read_off, acc.shape[0]),
        S=shape,
        H=hidden,
        DTYPE=DTYPES[dtype],
        ROW_BYTES=row_bytes,
        ENTRIES=own_rows.shape[-1],
        TELL=tell,
        BLOCK_M=block_m,
        BLOCK_H=min(block_h, pow2(hidden)),
        num_warps=warps,
    )


def reduce(
    bases: torch.Tensor,
    state: torch.Tensor,
    in_rows: torch.Tensor,
    in_load: torch.Tensor,
    *,
    me: int,
    rows_off: int,
    row_bytes: int,
    send_off: int,
    wave: int,
    num_peers: int,
    first: int,
    round_records: int,
    record_words: int,
    hidden: int,
    dtype: torch.dtype,
    wire_dtype: torch.dtype,
    shape: Shape,
    programs: int,
    block_m: int,
    block_h: int,
    rows_in_off: int = 0,
    wait: bool = False,
    packed_off: int = 0,
    tell_step: int = 0,
    warps: int = 4,
) -> None:
    """Sum the rows of the records to return in a round; round them to the dtype on the wire.

    Args:
        in_rows: (N, PROXY_RECORDS, ENTRIES) int32 and in_load: (N, G) int32, from the dispatch.
        send_off: byte offset of the round's send buffer, record_words words a record.
        wave, num_peers, first, round_records: the round, as in `pack`.
        rows_in_off, wait: wait for the words rows_in[local GPU] of the node first.
        packed_off, tell_step: say packed(tell_step) at the end; 0: nobody waits for it.
    """
    _reduce_kernel[(programs, num_peers)](
        *(bases, state, in_rows, in_load, me, rows_off, send_off),
        *(rows_in_off, packed_off, wave, first, int(wait), tell_step),
        S=shape,
        H=hidden,
        DTYPE=DTYPES[dtype],
        WIRE=DTYPES[wire_dtype],
        ROW_BYTES=row_bytes,
        ENTRIES=in_rows.shape[-1],
        RECORD_WORDS=record_words,
        ROUND_RECORDS=round_records,
        BLOCK_M=block_m,
        BLOCK_H=min(block_h, pow2(hidden)),
        num_warps=warps,
    )


def copy_in_ref(rows: torch.Tensor, words: torch.Tensor) -> None:
    """Do what `copy_in` does: rows is this PE's region, (slots, row_words) int32."""
    rows[: words.shape[0], : words.shape[1]] = words


def _sum_rows_ref(rows: list[torch.Tensor], entries: torch.Tensor) -> torch.Tensor:
    """Add the rows that entries name, one after the other, from +0."""
    total = torch.zeros(rows[0].shape[1])
    for entry in entries.tolist():
        if entry >= 0:
            row, g = divmod(entry, len(rows))
            total = total + rows[g][row].float()
    return total


def own_ref(acc: torch.Tensor, rows: list[torch.Tensor], own_rows: torch.Tensor) -> None:
    """Do what `own` does: rows is, per local GPU, (slots, H) in the dtype of the rows."""
    for t in range(len(acc)):
        acc[t] = _sum_rows_ref(rows, own_rows[t])


def reduce_ref(
    send: torch.Tensor,
    rows: list[torch.Tensor],
    in_rows: torch.Tensor,
    in_load: torch.Tensor,
    *,
    me: int,
    wave: int,
    first: int,
    shape: Shape,
) -> None:
    """Do what `reduce` does, record by record.

    Args: as `reduce`, and
        send: out, (peers, round_records, H) in the dtype on the wire: this PE's send buffers.
        rows: per local GPU, (slots, H) in the dtype of the rows.
    """
    node, local = divmod(me, shape.G)
    for peer, records in enumerate(send):
        s = (node + wave + peer) % shape.N
        num_records = min(max(int(in_load[s, local]) - first, 0), len(records))
        for i in range(num_records):
            records[i] = round_ref(_sum_rows_ref(rows, in_rows[s, first + i]), send.dtype)


def round_ref(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round float32 to nearest even; a bfloat16 NaN is always 0x7FC0."""
    rounded = x.to(dtype)
    if dtype == torch.bfloat16:
        rounded.view(torch.int16)[x.isnan()] = 0x7FC0
    return rounded
