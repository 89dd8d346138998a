"""The second half of a combine: bring a record's sums back and add them over nodes, at the owner.

With p(x) the sum of a token's rows on node x, from `reduce`, and s the owner's node:

    y = round(p(s) + p(s - 1) + p(s - 2) + ... + bias) added in this order, in fp32

In wave k node x returns to node x + k, so the order is that of the waves. It ignores who proxies:
all paths agree bit for bit.

Letters: T tokens, H hidden, G GPUs a node, d the node that returns.
"""

import torch
import triton.language as tl
from triton.language import core  # noqa: F401  (see lang.jit)

from .lang import helper, i64, iota, jit, tile_sum
from .nvshmem import libraries, quiet
from .reduce import DTYPES, load_f32, round_ref, rounded
from .shape import Shape, pow2
from .wire import (
    RETURNED,
    ROWS_READ,
    TAKEN,
    chunks_of,
    grant,
    is_last,
    mark,
    records_in_round,
    share,
    tell_node,
    wait_chunks,
    wait_node,
)

TOKENS_AT_ONCE = tl.constexpr(1024)  # of a peer's records, where a program looks for its own


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
        wait_chunks(bases_ptr, state_ptr, me, arrived_off, value, d, 0, chunks_of(n, S), S)
    if i64(step) > 1:
        wait_node(bases_ptr, state_ptr, me, taken_off, value - 1, TAKEN, S)
    if S.REMOTE:
        quiet()  # a reduce beside the next put writes the buffer that this round was put from
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
    rows_read_off,
    wave,
    num_peers,
    first,
    step,
    S: tl.constexpr,
    H: tl.constexpr,
    WIRE: tl.constexpr,
    RECORD_WORDS: tl.constexpr,
    ROUND_RECORDS: tl.constexpr,
    PEERS: tl.constexpr,
    TELL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """At the owner: add the sums that the round's peers returned to this rank's proxies to acc.

    With PEERS there are several: a program adds all sums of its part of the tokens, peer by peer.
    Last of a phase, it says that this PE has read all that it reads of the node.
    """
    me: int = i64(me)
    node: int = me // S.G
    value: int = mark(state_ptr, i64(step), S)
    ok: int = wait_node(bases_ptr, state_ptr, me, returned_off, value, RETURNED, S)
    first: int = i64(first)
    tokens: int = i64(0)  # up to the last that has a sum: padding behind it is no work
    if PEERS:
        for peer in range(0, i64(num_peers)):
            d: int = (node + S.N - i64(wave) - peer) % S.N
            n: int = i64(tl.load(own_records_ptr + d)) * ok
            last = tl.load(record_token_ptr + d * S.T + n - 1, mask=n > 0, other=-1)
            tokens: int = tl.maximum(tokens, i64(last) + 1)
    for peer in range(0, i64(num_peers)):
        d: int = (node + S.N - i64(wave) - peer) % S.N
        n: int = i64(tl.load(own_records_ptr + d)) * ok
        begin: int = share(n, i64(tl.program_id(0)))
        end: int = share(n, i64(tl.program_id(0)) + 1)
        if PEERS:
            first_t: int = share(tokens, i64(tl.program_id(0)))
            end_t: int = share(tokens, i64(tl.program_id(0)) + 1)
            # The program's records: how many are of tokens before its first one, before its end.
            before_first = iota(TOKENS_AT_ONCE) * 0
            before_end = iota(TOKENS_AT_ONCE) * 0
            for j in range(0, n, TOKENS_AT_ONCE):
                offs_j = j + iota(TOKENS_AT_ONCE)
                token = tl.load(record_token_ptr + d * S.T + offs_j, mask=offs_j < n, other=0)
                before_first += ((offs_j < n) & (token < first_t)).to(tl.int64)
                before_end += ((offs_j < n) & (token < end_t)).to(tl.int64)
            begin: int = i64(tile_sum(before_first, 0))
            end: int = i64(tile_sum(before_end, 0))
            tl.debug_barrier()  # all threads have stored the sums of the peer before
        # From 0: of a loop that begins at a sum triton 3.9 forgets that rows start at 16 bytes.
        for i in range(0, end - begin, BLOCK_M):
            offs_i = begin + i + iota(BLOCK_M)
            mask_i = offs_i < end
            record = d * S.T + offs_i
            place = tl.load(slot_ptr + record, mask=mask_i, other=-1).to(tl.int64) - first
            mask_i = (place >= 0) & (place < ROUND_RECORDS)
            t = tl.load(record_token_ptr + record, mask=mask_i, other=0).to(tl.int64)
            pe = node * S.G + tl.load(proxy_ptr + record, mask=mask_i, other=0).to(tl.int64)
            src = tl.load(bases_ptr + pe, mask=mask_i, other=0) + recv_off
            src += (peer * ROUND_RECORDS + place) * (RECORD_WORDS * 4)
            for h in range(0, H, BLOCK_H):
                offs_h = h + iota(BLOCK_H)
                mask = mask_i[:, None] & (offs_h < H)[None, :]
                acc_ptrs = acc_ptr + (t * H)[:, None] + offs_h[None, :]
                total = tl.load(acc_ptrs, mask=mask, other=0.0)
                total += load_f32(src[:, None], offs_h[None, :], mask, WIRE)
                tl.store(acc_ptrs, total, mask=mask)
    if TELL:
        if is_last(state_ptr) > 0:
            tell_node(bases_ptr, state_ptr, me, rows_read_off, mark(state_ptr, 1, S), S)


@helper
def _load_bias(bias_ptr, stride_t, stride_h, t, offs_h, mask, DTYPE: tl.constexpr):
    """Load tokens `t` of a (T, H) tensor as float32; bfloat16 from int16 bits."""
    ptrs = bias_ptr + (t * stride_t)[:, None] + (offs_h * stride_h)[None, :]
    if DTYPE == tl.bfloat16:
        bits = tl.load(ptrs, mask=mask, other=0).to(tl.int32)
        return (bits << 16).to(tl.float32, bitcast=True)
    else:
        return tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)


@jit
def _final_kernel(
    y_ptr,
    acc_ptr,
    bias_ptr,
    stride_bias_t,
    stride_bias_h,
    bias2_ptr,
    stride_bias2_t,
    stride_bias2_h,
    bases_ptr,
    state_ptr,
    me,
    rows_read_off,
    num_tokens,
    S: tl.constexpr,
    H: tl.constexpr,
    DTYPE: tl.constexpr,
    BIAS: tl.constexpr,
    BIAS2: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Add the biases to acc and round it to y once the whole node has read this PE's rows."""
    value: int = mark(state_ptr, 1, S)
    ok: int = wait_node(bases_ptr, state_ptr, i64(me), rows_read_off, value, ROWS_READ, S)
    n: int = i64(num_tokens) * ok
    end: int = share(n, i64(tl.program_id(0)) + 1)
    for i in range(share(n, i64(tl.program_id(0))), end, BLOCK_M):
        t = i + iota(BLOCK_M)
        for h in range(0, H, BLOCK_H):
            offs_h = h + iota(BLOCK_H)
            mask = (t < end)[:, None] & (offs_h < H)[None, :]
            offs = (t * H)[:, None] + offs_h[None, :]
            total = tl.load(acc_ptr + offs, mask=mask, other=0.0)
            if BIAS is not None:
                total += _load_bias(
                    *(bias_ptr, i64(stride_bias_t), i64(stride_bias_h), t, offs_h, mask, BIAS)
                )
            if BIAS2 is not None:
                total += _load_bias(
                    *(bias2_ptr, i64(stride_bias2_t), i64(stride_bias2_h), t, offs_h, mask, BIAS2)
                )
            tl.store(y_ptr + offs, rounded(total, DTYPE), mask=mask)


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
    rows_read_off: int,
    wave: int,
    num_peers: int,
    first: int,
    round_records: int,
    record_words: int,
    step: int,
    tell: bool,
    wire_dtype: torch.dtype,
    shape: Shape,
    programs: int,
    block_m: int,
    block_h: int,
    warps: int = 4,
) -> None:
    """At the owner: add to acc what nodes (own - wave - i) mod N, i < num_peers, returned in turn.

    Args:
        acc: (T, H) float32, updated.
        record_token: (N, S.T) int32, from the dispatch's `count`: each node's ascend.
        proxy, slot: (N, S.T) int32, from the dispatch's `match`.
        recv_off: byte offset of the receive buffers of the round, one a peer.
        returned_off, rows_read_off: byte offsets of the words returned[local GPU], rows_read[...].
        tell: say last that this PE has read the node's rows and sums: the phase's last `take`.
    """
    hidden = acc.shape[1]
    _take_kernel[(programs,)](
        *(acc, bases, state, num_records, record_token, proxy, slot),
        *(me, recv_off, returned_off, rows_read_off),
        *(wave, num_peers, first, step),
        S=shape,
        H=hidden,
        WIRE=DTYPES[wire_dtype],
        RECORD_WORDS=record_words,
        ROUND_RECORDS=round_records,
        PEERS=num_peers > 1,
        TELL=tell,
        BLOCK_M=block_m,
        BLOCK_H=min(block_h, pow2(hidden)),
        num_warps=warps,
    )


def final(
    y: torch.Tensor,
    acc: torch.Tensor,
    bias: tuple[torch.Tensor, ...],
    bases: torch.Tensor,
    state: torch.Tensor,
    *,
    me: int,
    rows_read_off: int,
    shape: Shape,
    programs: int,
    block_m: int,
    block_h: int,
    warps: int = 4,
) -> None:
    """Wait until the node has read this PE's rows; add the biases and round acc to y.

    Args:
        y: out, (T, H) contiguous; acc: (T, H) float32.
        bias: none, one or two (T, H), float32, bfloat16 or float16, any strides; added in turn.
    """
    given = [*bias, acc, acc][:2]  # acc where there is none, which is not read then
    dtypes = [*(DTYPES[each.dtype] for each in bias), None, None]
    strided = [(_bits(each), *each.stride()) for each in given]
    _final_kernel[(programs,)](
        *(_bits(y), acc, *strided[0], *strided[1], bases, state, me, rows_read_off, len(y)),
        S=shape,
        H=y.shape[1],
        DTYPE=DTYPES[y.dtype],
        BIAS=dtypes[0],
        BIAS2=dtypes[1],
        BLOCK_M=block_m,
        BLOCK_H=min(block_h, pow2(y.shape[1])),
        num_warps=warps,
    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as kernels load and store it: bfloat16 as int16."""
    return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor


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
        recv: per local GPU, (peers, round_records, H) in the dtype on the wire: what came.
    """
    num_peers, round_records, _ = recv[0].shape
    for peer in range(num_peers):
        d = (me // shape.G - wave - peer) % shape.N
        for i in range(int(num_records[d])):
            place = int(slot[d, i]) - first
            if 0 <= place < round_records:
                acc[int(record_token[d, i])] += recv[int(proxy[d, i])][peer, place].float()


def final_ref(y: torch.Tensor, acc: torch.Tensor, bias: tuple[torch.Tensor, ...] = ()) -> None:
    """Do what `final` does."""
    total = acc
    for each in bias:
        total = total + each.float()
    y[:] = round_ref(total, y.dtype)
