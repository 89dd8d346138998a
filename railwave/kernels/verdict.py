"""Whether a dispatch may go on: the ranks' calls agree, and every rank has room for its rows.

All ranks see all statuses in notify. Whether rows fit, only a node knows of its own ranks; where
`max_recv_rows` bounds them, each says the most rows of one of its ranks to all:

    verdict[node] = epoch * 2**32 + rows

along the own rail, so that a PE hears of every node by one word. If a call is wrong, or rows do not
fit, the phase fails on every rank before a row is stored.

Letters: N nodes, G GPUs a node, W = N * G ranks.
"""

import torch
import triton.language as tl
from triton.language import core  # noqa: F401  (see lang.jit)

from .lang import helper, i64, iota, jit, tile_max, tile_min
from .notify import area
from .nvshmem import libraries, settle, signal_pe
from .shape import Shape, pow2
from .wire import (
    CALL,
    EPOCH,
    NOTIFY,
    OVERFLOW,
    VERDICT,
    alive,
    fail,
    heap_i32,
    heap_i64,
    heaps_i64,
    is_mapped,
    mark,
    own_address,
    signal,
    start_counting,
    wait_all,
)


@helper
def compare_calls(messages_ptr, state_ptr, me, ok, S: tl.constexpr, W_P: tl.constexpr):
    """Fail the phase if the status of any rank is wrong or not this one's."""
    w = iota(W_P)
    mask = w < S.N * S.G * ok
    status = tl.load(messages_ptr + w * S.NOTIFY_WORDS, mask=mask, other=0).to(tl.int64)
    own: int = i64(tl.load(messages_ptr + me * S.NOTIFY_WORDS))
    differs = mask & ((status != own) | (status < 0))
    who: int = i64(tile_min(tl.where(differs, w, S.N * S.G), 0))
    if who < S.N * S.G:
        # Of two ranks that differ, the one that says that it is wrong.
        wrong: int = i64(tile_min(tl.where(mask & (status < 0), w, S.N * S.G), 0))
        if wrong < S.N * S.G:
            who: int = wrong
        seen: int = i64(tile_max(tl.where(w == who, status, -(2**31)), 0))
        fail(state_ptr, CALL, who, seen, own)


@helper
def tell_verdict(bases_ptr, state_ptr, me, verdict_off, rows, S: tl.constexpr):
    """Say the most rows of this node's ranks to the own rail of every node."""
    node: int = me // S.G
    value: int = i64(tl.load(state_ptr + EPOCH)) * 2**32 + rows
    n = iota(S.N_P)
    pe = n * S.G + me % S.G
    mask = n < S.N * alive(state_ptr)
    if S.REMOTE:
        num_nodes: int = S.N * alive(state_ptr)
        for d in range(0, num_nodes):
            if is_mapped(bases_ptr, d * S.G + me % S.G) == 0:
                word: int = own_address(bases_ptr, me, verdict_off + node * 8)
                signal_pe(word, value, d * S.G + me % S.G)
        mask &= tl.load(bases_ptr + pe, mask=mask, other=0) != 0
    signal(heaps_i64(bases_ptr, pe, verdict_off + node * 8, mask), value, mask)


@jit
def _verdict_kernel(bases_ptr, state_ptr, me, verdict_off, S: tl.constexpr):
    """Wait for every node's verdict; fail the phase if rows do not fit. One program.

    Example: MAX_ROWS 5; nodes 0 and 1 say 4 and 7: no rank goes on, the record names node 1 and 7.
    """
    n = iota(S.N_P)
    mask = n < S.N
    me: int = i64(me)
    ptrs = heap_i64(bases_ptr, me, i64(verdict_off)) + n
    epoch: int = i64(tl.load(state_ptr + EPOCH)) * 2**32
    writers = n * S.G + me % S.G
    ok: int = wait_all(ptrs, epoch, mask, writers, VERDICT, state_ptr)
    if S.REMOTE:
        settle(own_address(bases_ptr, me, i64(verdict_off)))
    rows = (tl.load(ptrs, mask=mask, other=0) - epoch) * ok
    most: int = i64(tile_max(tl.where(mask, rows, 0), 0))
    if most > S.MAX_ROWS:
        who: int = i64(tile_min(tl.where(mask & (rows == most), writers, S.N * S.G), 0))
        fail(state_ptr, OVERFLOW, who, most, S.MAX_ROWS)


@jit
def _heard_kernel(
    bases_ptr,
    state_ptr,
    put_words_ptr,
    me,
    notify_off,
    word_off,
    record_words,
    S: tl.constexpr,
    W_P: tl.constexpr,
):
    """Wait until every rank's message is here; compare what they say of their calls. One program.

    Where the phase puts records of so many words, it starts the counters.

    Example: of ranks 0 to 3 rank 2 says -1 (wrong), the others 7: no rank goes on, the record names
    rank 2 and -1.
    """
    me: int = i64(me)
    w = iota(W_P)
    word_ptrs = heap_i64(bases_ptr, me, i64(word_off)) + w
    ok: int = wait_all(word_ptrs, mark(state_ptr, 0, S), w < S.N * S.G, w, NOTIFY, state_ptr)
    messages_ptr = heap_i32(bases_ptr, me, area(state_ptr, i64(notify_off), S))
    compare_calls(messages_ptr, state_ptr, me, ok, S, W_P)
    if i64(record_words) > 0:
        start_counting(put_words_ptr, record_words, S)
        start_counting(put_words_ptr + (S.N + 1), 0, S)


def heard(
    bases: torch.Tensor,
    state: torch.Tensor,
    put_words: torch.Tensor | None = None,
    *,
    me: int,
    notify_off: int,
    word_off: int,
    record_words: int = 0,
    shape: Shape,
) -> None:
    """Wait for every rank's message; fail the phase if the ranks' calls differ.

    Args: as `notify`, and
        put_words, record_words: as `match`; None and 0 where it does not start the counters.
    """
    W_P = pow2(shape.N * shape.G)
    counters = state if put_words is None else put_words
    args = (bases, state, counters, me, notify_off, word_off, record_words)
    _heard_kernel[(1,)](*args, S=shape, W_P=W_P)


def verdict(
    bases: torch.Tensor, state: torch.Tensor, *, me: int, verdict_off: int, shape: Shape
) -> None:
    """Wait until every node has said whether its ranks have room; fail the phase if one has not.

    Args:
        bases: (W,) int64, address of every PE's heap.
        state: (STATE_WORDS,) int64 of this PE.
        me: this PE.
        verdict_off: byte offset of the words verdict[node], which `quota` tells.
    """
    _verdict_kernel[(1,)](bases, state, me, verdict_off, S=shape, **libraries(shape))


def compare_calls_ref(statuses: list[int], *, me: int) -> tuple[int, int] | None:
    """Return (rank, its status) that PE `me` names, or None if the calls agree.

    Example:
        >>> compare_calls_ref([7, 8, -1], me=0), compare_calls_ref([7, 7], me=0)
        ((2, -1), None)
    """
    wrong = [rank for rank, status in enumerate(statuses) if status < 0]
    differ = [rank for rank, status in enumerate(statuses) if status != statuses[me]]
    named = (wrong or differ)[:1]
    return (named[0], statuses[named[0]]) if named else None


def verdict_ref(rows: list[int], *, max_rows: int) -> tuple[int, int] | None:
    """Return (node, its rows) that `verdict` names, from each node's most rows; None if all fit.

    Example:
        >>> verdict_ref([4, 7, 6], max_rows=5)
        (1, 7)
    """
    most = max(rows)
    return (rows.index(most), most) if most > max_rows else None
