"""Bring results back: sum rows within a node, return one record, sum over nodes at the owner.

With p(x) the sum, in fp32 and by ascending local rank, of a token's rows on node x, rounded once to
the dtype on the wire (not for the owner's own node), and s the owner's node:

    y = round(p(s) + p(s - 1) + p(s - 2) + ...)        added in this order, in fp32

In wave k node x returns to node x + k, so the order is that of the waves. It ignores who proxies:
all paths agree bit for bit. Sums start from +0. Rounding is to nearest even, by integer
operations for bfloat16 (Triton's interpreter truncates the cast).

Letters: T tokens, H hidden, G GPUs a node, d a slice's destination, s its source, g local GPU.
"""

import torch
import triton.language as tl
from triton.language import core  # noqa: F401  (see lang.jit)

from .lang import cdiv, helper, i64, iota, jit, tile_max
from .nvshmem import libraries
from .shape import Shape, pow2, row_align
from .wire import (
    EPOCH,
    NOTIFIES,
    RETURNED,
    ROWS_IN,
    ROWS_READ,
    TAKEN,
    alive,
    grant,
    mark,
    records_in_round,
    tell_node,
    wait_chunks,
    wait_node,
)

DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@helper
def load_f32(address, offs, mask, DTYPE: tl.constexpr):
    """Load elements `offs` after int64 addresses, of 16 bytes' alignment, as float32, exactly."""
    if DTYPE == tl.bfloat16:
        ptrs = tl.multiple_of(address.to(tl.pointer_type(tl.int16)), [16, 16]) + offs
        bits = tl.load(ptrs, mask=mask, other=0).to(tl.int32)
        return (bits << 16).to(tl.float32, bitcast=True)
    else:
        ptrs = tl.multiple_of(address.to(tl.pointer_type(DTYPE)), [16, 16]) + offs
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

    rows_ptr: (records, ENTRIES) int32, entries with final slots.
    """
    total = (record * 0).to(tl.float32)[:, None] + (offs_h * 0).to(tl.float32)[None, :]
    for e in tl.static_range(ENTRIES):
        entry = tl.load(rows_ptr + record * ENTRIES + e, mask=mask_i, other=-1).to(tl.int64)
        if i64(tile_max(entry, 0)) >= 0:
            there = entry >= 0
            pe = node * S.G + tl.where(there, entry % S.G, 0)
            start = tl.load(bases_ptr + pe, mask=there, other=0) + rows_off
            address = (start + entry // S.G * row_bytes)[:, None]
            mask = there[:, None] & (offs_h < H)[None, :]
            total += load_f32(address, offs_h[None, :], mask, DTYPE)
    return total


@jit
def _copy_in_kernel(
    bases_ptr,
    state_ptr,
    words_ptr,
    stride_words_i,
    me,
    rows_off,
    num_rows,
    S: tl.constexpr,
    X_WORDS: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    NOTIFIED: tl.constexpr,
    ROW_ALIGN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Copy this PE's expert outputs into its rows region. The phase's first kernel."""
    if i64(tl.program_id(0)) == 0:
        tl.store(state_ptr + EPOCH, tl.load(state_ptr + EPOCH) + 1)
        if NOTIFIED:
            tl.store(state_ptr + NOTIFIES, tl.load(state_ptr + NOTIFIES) + 1)
    dst = tl.load(bases_ptr + i64(me)) + rows_off
    dst_ptr = dst.to(tl.pointer_type(tl.int32))
    n: int = i64(num_rows)
    stride: int = i64(stride_words_i)
    for i in range(i64(tl.program_id(0)) * BLOCK_M, n, i64(tl.num_programs(0)) * BLOCK_M):
        offs_i = i + iota(BLOCK_M)
        src_rows = words_ptr + (offs_i * stride)[:, None]
        src_rows = tl.multiple_of(src_rows, [ROW_ALIGN, ROW_ALIGN])
        dst_rows = tl.multiple_of(dst_ptr + (offs_i * ROW_WORDS)[:, None], [16, 16])
        for w in range(0, X_WORDS, BLOCK_W):
            offs_w = w + iota(BLOCK_W)
            mask = (offs_i < n)[:, None] & (offs_w < X_WORDS)[None, :]
            words = tl.load(src_rows + offs_w[None, :], mask=mask, other=0)
            tl.store(dst_rows + offs_w[None, :], words, mask=mask)


@jit
def _own_kernel(
    acc_ptr,
    bases_ptr,
    state_ptr,
    own_records_ptr,
    record_token_ptr,
    own_rows_ptr,
    me,
    rows_off,
    rows_in_off,
    S: tl.constexpr,
    H: tl.constexpr,
    DTYPE: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    ENTRIES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Set acc to the sum over the own node, p(s), not rounded, for tokens with rows here."""
    me: int = i64(me)
    node: int = me // S.G
    ok: int = wait_node(bases_ptr, state_ptr, me, rows_in_off, mark(state_ptr, 1, S), ROWS_IN, S)
    n: int = i64(tl.load(own_records_ptr + node)) * ok
    for i in range(i64(tl.program_id(0)) * BLOCK_M, n, i64(tl.num_programs(0)) * BLOCK_M):
        record = i + iota(BLOCK_M)
        mask_i = record < n
        t = tl.load(record_token_ptr + node * S.T + record, mask=mask_i, other=0).to(tl.int64)
        for h in range(0, H, BLOCK_H):
            offs_h = h + iota(BLOCK_H)
            total = sum_rows(
                *(bases_ptr, own_rows_ptr, record, mask_i, offs_h),
                *(node, rows_off, ROW_BYTES, H, DTYPE, ENTRIES, S),
            )
            mask = mask_i[:, None] & (offs_h < H)[None, :]
            tl.store(acc_ptr + (t * H)[:, None] + offs_h[None, :], total, mask=mask)


@jit
def _reduce_kernel(
    bases_ptr,
    state_ptr,
    in_rows_ptr,
    in_load_ptr,
    me,
    rows_off,
    send_off,
    wave,
    first,
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
    dst = tl.load(bases_ptr + me) + send_off
    dst += peer * (ROUND_RECORDS * RECORD_WORDS * 4)
    rows_ptr = in_rows_ptr + (s * S.PROXY_RECORDS + first) * ENTRIES
    for i in range(i64(tl.program_id(0)) * BLOCK_M, n, i64(tl.num_programs(0)) * BLOCK_M):
        record = i + iota(BLOCK_M)
        mask_i = record < n
        for h in range(0, H, BLOCK_H):
            offs_h = h + iota(BLOCK_H)
            total = sum_rows(
                *(bases_ptr, rows_ptr, record, mask_i, offs_h),
                *(node, rows_off, ROW_BYTES, H, DTYPE, ENTRIES, S),
            )
            mask = mask_i[:, None] & (offs_h < H)[None, :]
            address = (dst + record * (RECORD_WORDS * 4))[:, None]
            store_rounded(address, offs_h[None, :], total, mask, WIRE)


@jit
def _give_back_kernel(
    bases_ptr,
    state_ptr,
    recv_load_ptr,
    rail_mates_ptr,
    me,
    arrived_off,
    grant_off,
    taken_off,
    returned_off,
    wave,
    num_peers,
    first,
    step,
    next_wave,
    next_first,
    S: tl.constexpr,
    ROUND_RECORDS: tl.constexpr,
):
    """At the proxy: when all of the round has arrived, grant the next and tell the owners."""
    me: int = i64(me)
    node: int = me // S.G
    local: int = me % S.G
    first: int = i64(first)
    value: int = mark(state_ptr, i64(step), S)
    for i in range(0, i64(num_peers)):
        d: int = (node + S.N - i64(wave) - i) % S.N
        n: int = records_in_round(recv_load_ptr, d * S.G + local, first, ROUND_RECORDS)
        wait_chunks(bases_ptr, state_ptr, me, arrived_off, value, d, 0, cdiv(n, S.CHUNK), S)
    if i64(step) > 1:
        wait_node(bases_ptr, state_ptr, me, taken_off, value - 1, TAKEN, S)
    if i64(next_wave) > 0:
        grant(
            *(bases_ptr, state_ptr, me, recv_load_ptr, rail_mates_ptr, grant_off),
            *(i64(next_wave), i64(next_first), value + 1, S),
        )
    tell_node(bases_ptr, state_ptr, me, returned_off, value, S)


@jit
def _take_kernel(
    acc_ptr,
    bases_ptr,
    state_ptr,
    own_records_ptr,
    record_token_ptr,
    proxy_ptr,
    slot_ptr,
    me,
    recv_off,
    returned_off,
    wave,
    first,
    step,
    S: tl.constexpr,
    H: tl.constexpr,
    WIRE: tl.constexpr,
    RECORD_WORDS: tl.constexpr,
    ROUND_RECORDS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """At the owner: add the sums that node d returned to this rank's proxies to acc."""
    me: int = i64(me)
    node: int = me // S.G
    value: int = mark(state_ptr, i64(step), S)
    ok: int = wait_node(bases_ptr, state_ptr, me, returned_off, value, RETURNED, S)
    d: int = (node + S.N - i64(wave)) % S.N
    first: int = i64(first)
    n: int = i64(tl.load(own_records_ptr + d)) * ok
    for i in range(i64(tl.program_id(0)) * BLOCK_M, n, i64(tl.num_programs(0)) * BLOCK_M):
        offs_i = i + iota(BLOCK_M)
        mask_i = offs_i < n
        record = d * S.T + offs_i
        place = tl.load(slot_ptr + record, mask=mask_i, other=-1).to(tl.int64) - first
        mask_i = (place >= 0) & (place < ROUND_RECORDS)
        t = tl.load(record_token_ptr + record, mask=mask_i, other=0).to(tl.int64)
        pe = node * S.G + tl.load(proxy_ptr + record, mask=mask_i, other=0).to(tl.int64)
        src = tl.load(bases_ptr + pe, mask=mask_i, other=0) + recv_off
        src += place * (RECORD_WORDS * 4)
        for h in range(0, H, BLOCK_H):
            offs_h = h + iota(BLOCK_H)
            mask = mask_i[:, None] & (offs_h < H)[None, :]
            acc_ptrs = acc_ptr + (t * H)[:, None] + offs_h[None, :]
            total = tl.load(acc_ptrs, mask=mask, other=0.0)
            total += load_f32(src[:, None], offs_h[None, :], mask, WIRE)
            tl.store(acc_ptrs, total, mask=mask)


@jit
def _final_kernel(
    y_ptr,
    acc_ptr,
    bases_ptr,
    state_ptr,
    me,
    rows_read_off,
    num_elements,
    S: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Round acc to y once the whole node has read this PE's rows."""
    value: int = mark(state_ptr, 1, S)
    ok: int = wait_node(bases_ptr, state_ptr, i64(me), rows_read_off, value, ROWS_READ, S)
    n: int = i64(num_elements) * ok
    for i in range(i64(tl.program_id(0)) * BLOCK, n, i64(tl.num_programs(0)) * BLOCK):
        offs = i + iota(BLOCK)
        total = tl.load(acc_ptr + offs, mask=offs < n, other=0.0)
        tl.store(y_ptr + offs, rounded(total, DTYPE), mask=offs < n)


def copy_in(
    bases: torch.Tensor,
    state: torch.Tensor,
    words: torch.Tensor,
    *,
    me: int,
    rows_off: int,
    row_words: int,
    notified: bool,
    shape: Shape,
    programs: int,
    block_m: int,
    block_w: int,
) -> None:
    """Advance the epoch; copy expert outputs into this PE's rows region.

    Args:
        bases: (W,) int64, address of every PE's heap.
        state: (STATE_WORDS,) int64 of this PE.
        words: (rows, X_WORDS) int32, the outputs as words, rows at any stride.
        rows_off: byte offset of the rows region; row_words: words from one row to the next.
        notified: a notify goes with this phase, so its number advances too.
        programs, block_m, block_w: programs, rows a tile, words of each in it.
    """
    _copy_in_kernel[(programs,)](
        *(bases, state, words, words.stride(0), me, rows_off, words.shape[0]),
        S=shape,
        X_WORDS=words.shape[1],
        ROW_WORDS=row_words,
        NOTIFIED=notified,
        ROW_ALIGN=row_align(words),
        BLOCK_M=block_m,
        BLOCK_W=min(block_w, pow2(words.shape[1])),
    )


def own(
    acc: torch.Tensor,
    bases: torch.Tensor,
    state: torch.Tensor,
    num_records: torch.Tensor,
    record_token: torch.Tensor,
    own_rows: torch.Tensor,
    *,
    me: int,
    rows_off: int,
    row_bytes: int,
    rows_in_off: int,
    dtype: torch.dtype,
    shape: Shape,
    programs: int,
    block_m: int,
    block_h: int,
) -> None:
    """Wait for the node's rows; set acc to each token's sum over its own node.

    Args:
        acc: out, (T, H) float32, zero before.
        num_records: (N,) int32, records of this rank to each node.
        record_token: (N, S.T) int32, from `count`; own_rows: (S.T, ENTRIES) int32, from `local`.
        rows_off, row_bytes: byte offset of the rows regions, bytes from one row to the next.
        rows_in_off: byte offset of the words rows_in[local GPU].
        dtype: of the rows.
    """
    hidden = acc.shape[1]
    _own_kernel[(programs,)](
        *(acc, bases, state, num_records, record_token, own_rows),
        *(me, rows_off, rows_in_off),
        S=shape,
        H=hidden,
        DTYPE=DTYPES[dtype],
        ROW_BYTES=row_bytes,
        ENTRIES=own_rows.shape[-1],
        BLOCK_M=block_m,
        BLOCK_H=min(block_h, pow2(hidden)),
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
) -> None:
    """Sum the rows of the records to return in a round; round them to the dtype on the wire.

    Args:
        in_rows: (N, PROXY_RECORDS, ENTRIES) int32 and in_load: (N, G) int32, from the dispatch.
        send_off: byte offset of the round's send buffer, record_words words a record.
        wave, num_peers, first, round_records: the round, as in `pack`.
    """
    _reduce_kernel[(programs, num_peers)](
        *(bases, state, in_rows, in_load, me, rows_off, send_off, wave, first),
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
    )


def give_back(
    bases: torch.Tensor,
    state: torch.Tensor,
    recv_load: torch.Tensor,
    rail_mates: torch.Tensor,
    *,
    me: int,
    arrived_off: int,
    grant_off: int,
    taken_off: int,
    returned_off: int,
    wave: int,
    num_peers: int,
    first: int,
    round_records: int,
    step: int,
    next_round: tuple[int, int] | None,
    shape: Shape,
) -> None:
    """At the proxy: wait for a round, grant the next one, tell the owners that sums are here.

    Args: as `unpack`; waits for taken(step - 1) too, from the second round on.
    """
    next_wave, next_first = next_round or (0, 0)
    _give_back_kernel[(1,)](
        *(bases, state, recv_load, rail_mates),
        *(me, arrived_off, grant_off, taken_off, returned_off),
        *(wave, num_peers, first, step, next_wave, next_first),
        S=shape,
        ROUND_RECORDS=round_records,
        **libraries(shape),
    )


def take(
    acc: torch.Tensor,
    bases: torch.Tensor,
    state: torch.Tensor,
    num_records: torch.Tensor,
    record_token: torch.Tensor,
    proxy: torch.Tensor,
    slot: torch.Tensor,
    *,
    me: int,
    recv_off: int,
    returned_off: int,
    wave: int,
    first: int,
    round_records: int,
    record_words: int,
    step: int,
    wire_dtype: torch.dtype,
    shape: Shape,
    programs: int,
    block_m: int,
    block_h: int,
) -> None:
    """At the owner: add to acc what node (own - wave) mod N returned in a round.

    Args:
        acc: (T, H) float32, updated.
        proxy, slot: (N, S.T) int32, from the dispatch's `match`.
        recv_off: byte offset of that node's receive buffer for the round.
    """
    hidden = acc.shape[1]
    _take_kernel[(programs,)](
        *(acc, bases, state, num_records, record_token, proxy, slot),
        *(me, recv_off, returned_off, wave, first, step),
        S=shape,
        H=hidden,
        WIRE=DTYPES[wire_dtype],
        RECORD_WORDS=record_words,
        ROUND_RECORDS=round_records,
        BLOCK_M=block_m,
        BLOCK_H=min(block_h, pow2(hidden)),
    )


def final(
    y: torch.Tensor,
    acc: torch.Tensor,
    bases: torch.Tensor,
    state: torch.Tensor,
    *,
    me: int,
    rows_read_off: int,
    shape: Shape,
    programs: int,
    block: int,
) -> None:
    """Wait until the node has read this PE's rows; round acc to y.

    Args:
        y: out, (T, H) contiguous; acc: (T, H) float32.
    """
    bits = y.view(torch.int16) if y.dtype == torch.bfloat16 else y
    _final_kernel[(programs,)](
        *(bits, acc, bases, state, me, rows_read_off, y.numel()),
        S=shape,
        DTYPE=DTYPES[y.dtype],
        BLOCK=min(block, pow2(shape.T * y.shape[1])),
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


def own_ref(
    acc: torch.Tensor,
    rows: list[torch.Tensor],
    num_records: torch.Tensor,
    record_token: torch.Tensor,
    own_rows: torch.Tensor,
    *,
    me: int,
    shape: Shape,
) -> None:
    """Do what `own` does: rows is, per local GPU, (slots, H) in the dtype of the rows."""
    node = me // shape.G
    for i in range(int(num_records[node])):
        acc[int(record_token[node, i])] = _sum_rows_ref(rows, own_rows[i])


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


def take_ref(
    acc: torch.Tensor,
    recv: list[torch.Tensor],
    num_records: torch.Tensor,
    record_token: torch.Tensor,
    proxy: torch.Tensor,
    slot: torch.Tensor,
    *,
    me: int,
    wave: int,
    first: int,
    shape: Shape,
) -> None:
    """Do what `take` does, record by record.

    Args: as `take`, and
        recv: per local GPU, (round_records, H) in the dtype on the wire: what came from that node.
    """
    d = (me // shape.G - wave) % shape.N
    for i in range(int(num_records[d])):
        place = int(slot[d, i]) - first
        if 0 <= place < len(recv[0]):
            acc[int(record_token[d, i])] += recv[int(proxy[d, i])][place].float()


def round_ref(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round float32 to nearest even; a bfloat16 NaN is always 0x7FC0."""
    rounded = x.to(dtype)
    if dtype == torch.bfloat16:
        rounded.view(torch.int16)[x.isnan()] = 0x7FC0
    return rounded


def final_ref(y: torch.Tensor, acc: torch.Tensor) -> None:
    """Do what `final` does."""
    y[:] = round_ref(acc, y.dtype)
