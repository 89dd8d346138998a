"""Write records where they leave from, and rows of the own node where they stay.

`pack` writes each record of one round straight into the send staging of its proxy, over NVLink if
that is another GPU; `local` writes rows for GPUs of the own node into their final slots, so that
they never touch a rail. Both write the layout of `shape.Format`:

    [payload | expert ids | weights | source rank, entries]

Letters: T tokens, K top-k, G GPUs a node, d destination node, g local GPU.
"""

from dataclasses import dataclass

import torch
import triton.language as tl
from triton.language import core  # noqa: F401  (see lang.jit)

from .lang import column, cumsum, helper, i64, iota, jit, tile_max, tile_sum
from .shape import Format, Shape, pow2, row_align
from .wire import PACKED, alive, is_last, mark, share, tell_node, wait_node


@dataclass(frozen=True)
class Tokens:
    """One rank's input to a dispatch."""

    words: torch.Tensor  # (T, X_WORDS) int32, x as words, rows at any stride
    topk_idx: torch.Tensor  # (T, K) int32 or int64, any strides
    topk_weights: torch.Tensor  # (T, K) float32, any strides

    def kernel_args(self) -> tuple:
        """Return the tensors, each followed by its strides."""
        return (
            *(self.words, self.words.stride(0)),
            *(self.topk_idx, *self.topk_idx.stride()),
            *(self.topk_weights, *self.topk_weights.stride()),
        )


@helper
def _store_rows(
    dst,
    t,
    mask_t,
    words_ptr,
    stride_words_t,
    topk_idx_ptr,
    stride_idx_t,
    stride_idx_k,
    weights_ptr,
    stride_weights_t,
    stride_weights_k,
    F: tl.constexpr,
    ROW_ALIGN: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Write payload, ids and weights of tokens `t`; the payload's pad is zero, others stay.

    dst: (len(t), copies) addresses of each token's rows, 0 for none. The token is read once.
    """
    if F.K > 0:
        k = iota(F.K_P)
        mask_k = (k < F.K)[None, :]
        mask = mask_t[:, None] & mask_k
        src_ptrs = topk_idx_ptr + (t * stride_idx_t)[:, None] + (k * stride_idx_k)[None, :]
        ids = tl.load(src_ptrs, mask=mask, other=-1).to(tl.int32)
        src_ptrs = weights_ptr + (t * stride_weights_t)[:, None] + (k * stride_weights_k)[None, :]
        weights = tl.load(src_ptrs, mask=mask, other=0.0).to(tl.int32, bitcast=True)
    src_rows = words_ptr + (t * stride_words_t)[:, None]
    src_rows = tl.multiple_of(src_rows, [ROW_ALIGN, ROW_ALIGN])
    for w in range(0, F.IDS, BLOCK_W):
        offs_w = w + iota(BLOCK_W)
        mask_x = mask_t[:, None] & (offs_w < F.X_WORDS)[None, :]
        words = tl.load(src_rows + offs_w[None, :], mask=mask_x, other=0)
        mask_w = (offs_w < F.IDS)[None, :]
        for j in range(dst.shape[1]):
            to = column(dst, j)
            if i64(tile_max(to, 0)) > 0:
                there = (to > 0)[:, None]
                ptrs = tl.multiple_of(to.to(tl.pointer_type(tl.int32))[:, None], [16, 16])
                tl.store(ptrs + offs_w[None, :], words, mask=there & mask_w)
                if (F.K > 0) and (w == 0):
                    tl.store(ptrs + F.IDS + k[None, :], ids, mask=there & mask_k)
                    tl.store(ptrs + F.WEIGHTS + k[None, :], weights, mask=there & mask_k)


@helper
def _load_rows(row_index_ptr, t, mask_i, d, S: tl.constexpr):
    """Load the row of tokens `t` at each GPU of node d: (len(t), G_P) int64, -1 for none."""
    g = iota(S.G_P)
    mask = mask_i[:, None] & (g < S.G)[None, :]
    ptrs = (row_index_ptr + t * (S.N * S.G) + d * S.G)[:, None] + g[None, :]
    return tl.load(ptrs, mask=mask, other=-1).to(tl.int64)


@helper
def _store_entries(dst_ptrs, rows, mask_i, F: tl.constexpr, S: tl.constexpr):
    """Write the rows that exist, by ascending GPU, as entries row * G + GPU; then -1.

    Example: G = 4, rows [-1, 5, -1, 0] become entries 21, 3, -1, ...
    """
    g = iota(S.G_P)
    there = (rows >= 0).to(tl.int64)
    place = cumsum(there, 1) - there
    tl.store(dst_ptrs[:, None] + place, rows * S.G + g[None, :], mask=rows >= 0)
    e = iota(F.ENTRIES_P)
    rest = (e[None, :] >= tile_sum(there, 1)[:, None]) & (e < F.ENTRIES)[None, :]
    tl.store(dst_ptrs[:, None] + e[None, :], -1, mask=rest & mask_i[:, None])


@jit
def _pack_kernel(
    bases_ptr,
    state_ptr,
    num_records_ptr,
    record_token_ptr,
    proxy_ptr,
    slot_ptr,
    row_index_ptr,
    words_ptr,
    stride_words_t,
    topk_idx_ptr,
    stride_idx_t,
    stride_idx_k,
    weights_ptr,
    stride_weights_t,
    stride_weights_k,
    me,
    send_off,
    packed_off,
    wave,
    first,
    wait_step,
    tell_step,
    S: tl.constexpr,
    F: tl.constexpr,
    ROUND_RECORDS: tl.constexpr,
    ROW_ALIGN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Write this owner's records for node d whose slots lie in the round to their proxies.

    Round i overwrites what the proxies put in round i - 2, which has ended once each of them has
    said packed(i - 1): wait_step, if this launch does not follow a put that waited for it.
    tell_step: the last program says packed(tell_step).

    Example: ROUND_RECORDS 2, first 2: of slots 0, 1, 2, 3 of a proxy the last two go to its
    places 0 and 1.
    """
    me: int = i64(me)
    node: int = me // S.G
    peer: int = i64(tl.program_id(1))
    d: int = (node + i64(wave) + peer) % S.N
    first: int = i64(first)
    n: int = i64(tl.load(num_records_ptr + d)) * alive(state_ptr)
    if i64(wait_step) > 0:
        value: int = mark(state_ptr, i64(wait_step), S)
        n: int = n * wait_node(bases_ptr, state_ptr, me, packed_off, value, PACKED, S)

    buffer_off: int = send_off + peer * (ROUND_RECORDS * F.RECORD_WORDS * 4)
    end: int = share(n, i64(tl.program_id(0)) + 1)
    for i in range(share(n, i64(tl.program_id(0))), end, BLOCK_M):
        offs_i = i + iota(BLOCK_M)
        mask_i = offs_i < end
        record = d * S.T + offs_i
        place = tl.load(slot_ptr + record, mask=mask_i, other=-1).to(tl.int64) - first
        t = tl.load(record_token_ptr + record, mask=mask_i, other=0).to(tl.int64)
        pe = node * S.G + tl.load(proxy_ptr + record, mask=mask_i, other=0).to(tl.int64)
        mask_i = (place >= 0) & (place < ROUND_RECORDS)
        dst = tl.load(bases_ptr + pe, mask=mask_i, other=0) + buffer_off
        dst = tl.where(mask_i, dst + place * (F.RECORD_WORDS * 4), 0)
        _store_rows(
            *(dst[:, None], t, mask_i, words_ptr, stride_words_t),
            *(topk_idx_ptr, stride_idx_t, stride_idx_k),
            *(weights_ptr, stride_weights_t, stride_weights_k, F, ROW_ALIGN, BLOCK_W),
        )
        if F.K > 0:
            meta_ptrs = dst.to(tl.pointer_type(tl.int32)) + F.META
            tl.store(meta_ptrs, me + t * 0, mask=mask_i)
            rows = _load_rows(row_index_ptr, t, mask_i, d, S)
            _store_entries(meta_ptrs + 1, rows, mask_i, F, S)
    if i64(tell_step) > 0:
        if is_last(state_ptr) > 0:
            value: int = mark(state_ptr, i64(tell_step), S)
            tell_node(bases_ptr, state_ptr, me, packed_off, value, S)


@jit
def _local_kernel(
    own_rows_ptr,
    bases_ptr,
    state_ptr,
    row_index_ptr,
    row_start_ptr,
    words_ptr,
    stride_words_t,
    topk_idx_ptr,
    stride_idx_t,
    stride_idx_k,
    weights_ptr,
    stride_weights_t,
    stride_weights_k,
    me,
    rows_off,
    delivered_off,
    num_tokens,
    S: tl.constexpr,
    F: tl.constexpr,
    TELL: tl.constexpr,
    ROW_ALIGN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Write the rows that this rank's tokens have on its own node; keep where they went.

    Where nothing is put, the last program says that all is delivered.
    """
    me: int = i64(me)
    node: int = me // S.G
    n: int = i64(num_tokens) * alive(state_ptr)
    g = iota(S.G_P)
    starts = tl.load(row_start_ptr + me * S.G + g, mask=g < S.G, other=0).to(tl.int64)
    bases = tl.load(bases_ptr + node * S.G + g, mask=g < S.G, other=0) + rows_off
    end: int = share(n, i64(tl.program_id(0)) + 1)
    for i in range(share(n, i64(tl.program_id(0))), end, BLOCK_M):
        t = i + iota(BLOCK_M)
        mask_t = t < end
        if F.K > 0:
            rows = _load_rows(row_index_ptr, t, mask_t, node, S)
            rows = tl.where(rows >= 0, rows + starts[None, :], -1)
            dst = tl.where(rows >= 0, bases[None, :] + rows * (F.META * 4), 0)
            _store_entries(own_rows_ptr + t * F.ENTRIES, rows, mask_t, F, S)
        else:
            e = iota(F.ENTRIES_P)
            mask = mask_t[:, None] & (e < F.ENTRIES)[None, :]
            ptrs = own_rows_ptr + (t * F.ENTRIES)[:, None] + e[None, :]
            entry = tl.load(ptrs, mask=mask, other=-1).to(tl.int64)
            pe = node * S.G + tl.where(entry >= 0, entry % S.G, 0)
            dst = tl.load(bases_ptr + pe, mask=entry >= 0, other=0) + rows_off
            dst = tl.where(entry >= 0, dst + entry // S.G * (F.META * 4), 0)
        _store_rows(
            *(dst, t, mask_t, words_ptr, stride_words_t),
            *(topk_idx_ptr, stride_idx_t, stride_idx_k),
            *(weights_ptr, stride_weights_t, stride_weights_k, F, ROW_ALIGN, BLOCK_W),
        )
    if TELL:
        if is_last(state_ptr) > 0:
            tell_node(bases_ptr, state_ptr, me, delivered_off, mark(state_ptr, 1, S), S)


def pack(
    bases: torch.Tensor,
    state: torch.Tensor,
    num_records: torch.Tensor,
    record_token: torch.Tensor,
    proxy: torch.Tensor,
    slot: torch.Tensor,
    row_index: torch.Tensor,
    tokens: Tokens,
    *,
    me: int,
    send_off: int,
    packed_off: int,
    wave: int,
    num_peers: int,
    first: int,
    round_records: int,
    wait_step: int = 0,
    tell_step: int = 0,
    shape: Shape,
    fmt: Format,
    programs: int,
    block_m: int,
    block_w: int,
    warps: int = 4,
) -> None:
    """Write one round's records into their proxies' send staging.

    Args:
        bases, state: addresses of all heaps, state of this PE.
        num_records: (N,) int32, records of this rank to each node, from `quota`.
        record_token, row_index: from `count`; proxy, slot: from `match`. row_index is not read
            where records are payload alone.
        tokens: the rank's input.
        me: this PE.
        send_off: byte offset of the round's send buffer; one buffer of round_records a peer.
        packed_off: byte offset of the words packed[local GPU].
        wave, num_peers: the peers are nodes (own + wave + i) mod N for i < num_peers.
        first, round_records: slots [first, first + round_records) are this round's.
        wait_step: wait for packed(wait_step) of the node first; 0: nothing to wait for.
        tell_step: say packed(tell_step) at the end; 0: `unpack` of the round before says it.
        programs, block_m, block_w: programs a peer, records a tile, words of each in it.
        warps: of a program.
    """
    _pack_kernel[(programs, num_peers)](
        *(bases, state, num_records, record_token, proxy, slot, row_index, *tokens.kernel_args()),
        *(me, send_off, packed_off, wave, first, wait_step, tell_step),
        S=shape,
        F=fmt,
        ROUND_RECORDS=round_records,
        ROW_ALIGN=row_align(tokens.words),
        BLOCK_M=block_m,
        BLOCK_W=min(block_w, pow2(fmt.IDS)),
        num_warps=warps,
    )


def local(
    own_rows: torch.Tensor,
    bases: torch.Tensor,
    state: torch.Tensor,
    row_index: torch.Tensor,
    row_start: torch.Tensor,
    tokens: Tokens,
    *,
    me: int,
    rows_off: int,
    delivered_off: int,
    tell: bool,
    shape: Shape,
    fmt: Format,
    programs: int,
    block_m: int,
    block_w: int,
    warps: int = 4,
) -> None:
    """Write the rows of the own node into their final slots.

    Args: as `pack`, and
        own_rows: out, (S.T, ENTRIES) int32: entries, with final slots, of each token's rows on the
            own node. Where rows are payload alone it is read instead, and row_index, row_start not.
        row_start: (W, G) int32, from `quota`.
        rows_off: byte offset of the region of rows.
        delivered_off: byte offset of the words delivered[local GPU].
        tell: say last that all is delivered, since no round follows.
    """
    _local_kernel[(programs,)](
        *(own_rows, bases, state, row_index, row_start, *tokens.kernel_args()),
        *(me, rows_off, delivered_off, tokens.words.shape[0]),
        S=shape,
        F=fmt,
        TELL=tell,
        ROW_ALIGN=row_align(tokens.words),
        BLOCK_M=block_m,
        BLOCK_W=min(block_w, pow2(fmt.IDS)),
        num_warps=warps,
    )


def _store_row_ref(row: torch.Tensor, tokens: Tokens, t: int, fmt: Format) -> None:
    row[: fmt.IDS] = 0
    row[: fmt.X_WORDS] = tokens.words[t]
    if fmt.K:
        row[fmt.IDS : fmt.IDS + fmt.K] = tokens.topk_idx[t]
        row[fmt.WEIGHTS : fmt.WEIGHTS + fmt.K] = tokens.topk_weights[t].view(torch.int32)


def _entries_ref(rows: torch.Tensor, shape: Shape, fmt: Format) -> torch.Tensor:
    there = [row * shape.G + g for g, row in enumerate(rows.tolist()) if row >= 0]
    return torch.tensor(there + [-1] * (fmt.ENTRIES - len(there)), dtype=torch.int32)


def pack_ref(
    send: list[torch.Tensor],
    num_records: torch.Tensor,
    record_token: torch.Tensor,
    proxy: torch.Tensor,
    slot: torch.Tensor,
    row_index: torch.Tensor,
    tokens: Tokens,
    *,
    me: int,
    wave: int,
    first: int,
    shape: Shape,
    fmt: Format,
) -> None:
    """Do what `pack` does, record by record.

    Args: as `pack`, and
        send: out, per local GPU, (peers, round_records, RECORD_WORDS) int32: the round's send
            buffers of the node.
    """
    S, node = shape, me // shape.G
    num_peers, round_records, _ = send[0].shape
    for peer in range(num_peers):
        d = (node + wave + peer) % S.N
        for i in range(int(num_records[d])):
            place = int(slot[d, i]) - first
            if 0 <= place < round_records:
                record, t = send[int(proxy[d, i])][peer, place], int(record_token[d, i])
                _store_row_ref(record, tokens, t, fmt)
                if fmt.K:
                    rows = row_index[t, d * S.G : (d + 1) * S.G]
                    record[fmt.META] = me
                    record[fmt.META + 1 :][: fmt.ENTRIES] = _entries_ref(rows, S, fmt)


def local_ref(
    own_rows: torch.Tensor,
    rows: list[torch.Tensor],
    row_index: torch.Tensor,
    row_start: torch.Tensor,
    tokens: Tokens,
    *,
    me: int,
    shape: Shape,
    fmt: Format,
) -> None:
    """Do what `local` does, row by row.

    Args: as `local`, and rows: out, per local GPU, (slots, META) int32: the node's rows regions.
    """
    S, node = shape, me // shape.G
    for t in range(len(tokens.words)):
        if fmt.K:
            index = row_index[t, node * S.G : (node + 1) * S.G]
            final = torch.where(index >= 0, index + row_start[me], -1)
            own_rows[t] = _entries_ref(final, S, fmt)
        for entry in own_rows[t].tolist():
            if entry >= 0:
                _store_row_ref(rows[entry % S.G][entry // S.G], tokens, t, fmt)
