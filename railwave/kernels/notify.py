"""Tell every rank what this one will send: the only exchange that planning needs.

A message about node d is int32 (1 + N + G + NODE_EXPERTS,):

    [status | records to every node | rows to each rank of d | slots of each expert of d]

It goes along the own rail to the PE of every node with the same local index, and from there to
that node's other PEs (`forward`): N + G - 2 messages leave a PE over rails and NVLink instead of
N * G - 1 over rails. The last program of `count` or `copy_in` sends them (`send_counts`). There are
two areas, used in turn, so that a fast rank's next message never meets a slow reader.

Letters: N nodes, G GPUs a node, W = N * G ranks, s source node, d destination node.
"""

import torch
import triton.language as tl
from triton.language import core  # noqa: F401  (see lang.jit)

from .lang import cdiv, helper, i64, iota, jit
from .nvshmem import libraries, put_signal, quiet, settle
from .shape import Shape, pow2
from .wire import (
    EPOCH,
    NOTIFIES,
    NOTIFY,
    alive,
    heap_i32,
    heap_i64,
    is_mapped,
    mark,
    own_address,
    send,
    signal,
    wait_all,
)


@helper
def area(state_ptr, notify_off, S: tl.constexpr):
    """Return the byte offset of the notify area in use: (W, NOTIFY_WORDS) int32."""
    parity: int = i64(tl.load(state_ptr + NOTIFIES)) % 2
    return notify_off + parity * (S.N * S.G * S.NOTIFY_WORDS * 4)


@helper
def send_counts(
    bases_ptr,
    state_ptr,
    counts_ptr,
    expert_start_ptr,
    me,
    notify_off,
    word_off,
    outbox_off,
    S: tl.constexpr,
    WORDS_P: tl.constexpr,
    PEERS_P: tl.constexpr,
    EXPERTS_P: tl.constexpr,
):
    """Send each node its message: peer i < N is (i, own local index), the others are node-mates.

    One program, after all have counted; the experts' slots are zero again afterwards.
    """
    node: int = me // S.G
    local: int = me % S.G
    i = iota(PEERS_P)
    d = tl.where(i < S.N, i, node)
    pe = tl.where(i < S.N, i * S.G + local, node * S.G + i - S.N)
    mask_i = (i < S.N) | ((i < S.N + S.G) & (i - S.N != local))
    mask_i &= alive(state_ptr) > 0

    # counts is [status | records (N) | rows (W) | slots (E)]; a message takes parts of it.
    c = iota(WORDS_P)
    first_expert = tl.load(expert_start_ptr + d * S.G, mask=mask_i, other=0).to(tl.int64)
    end_expert = tl.load(expert_start_ptr + (d + 1) * S.G, mask=mask_i, other=0).to(tl.int64)
    expert = first_expert[:, None] + (c - (1 + S.N + S.G))[None, :]
    rows = (d * S.G)[:, None] + c[None, :]
    is_expert = (c >= 1 + S.N + S.G)[None, :]
    src = tl.where(c < 1 + S.N, c, 0)[None, :] + tl.where((c >= 1 + S.N)[None, :], rows, 0)
    src = tl.where(is_expert, 1 + S.N + S.N * S.G + expert, src)
    mask = mask_i[:, None] & (c < S.NOTIFY_WORDS)[None, :]
    known = mask & ((c < 1 + S.N + S.G)[None, :] | (expert < end_expert[:, None]))
    words = tl.load(counts_ptr + src, mask=known, other=0)
    tl.debug_barrier()
    slots = iota(EXPERTS_P)  # `count` adds to them
    tl.store(counts_ptr + 1 + S.N + S.N * S.G + slots, 0, mask=slots < S.E)
    row_off: int = area(state_ptr, notify_off, S) + me * (S.NOTIFY_WORDS * 4)
    value: int = mark(state_ptr, 0, S)
    if S.REMOTE:
        quiet()  # the outbox, and all send buffers, may be written again
        outbox_ptr = heap_i32(bases_ptr, me, outbox_off)
        row_ptrs = outbox_ptr + (i * S.NOTIFY_WORDS)[:, None] + c[None, :]
        tl.store(row_ptrs, words, mask=mask & (i < S.N)[:, None])
        mask_i &= tl.load(bases_ptr + pe, mask=mask_i, other=0) != 0
        mask &= mask_i[:, None]
        num_nodes: int = S.N * alive(state_ptr)
        for n in range(0, num_nodes):
            if is_mapped(bases_ptr, n * S.G + local) == 0:
                put_signal(
                    own_address(bases_ptr, me, row_off),
                    own_address(bases_ptr, me, outbox_off + n * (S.NOTIFY_WORDS * 4)),
                    *(i64(S.NOTIFY_WORDS * 4), own_address(bases_ptr, me, word_off + me * 8)),
                    *(value, n * S.G + local),
                )
    send(bases_ptr, pe, row_off, words, mask, word_off + me * 8, value, mask_i)


@jit
def _notify_kernel(
    bases_ptr,
    state_ptr,
    counts_ptr,
    expert_start_ptr,
    me,
    notify_off,
    word_off,
    outbox_off,
    status,
    S: tl.constexpr,
    WORDS_P: tl.constexpr,
    PEERS_P: tl.constexpr,
    EXPERTS_P: tl.constexpr,
):
    """Advance the epoch; send the status and what else `counts` holds. One program."""
    tl.store(state_ptr + EPOCH, tl.load(state_ptr + EPOCH) + 1)
    tl.store(state_ptr + NOTIFIES, tl.load(state_ptr + NOTIFIES) + 1)
    tl.store(counts_ptr, status)
    tl.debug_barrier()
    send_counts(
        *(bases_ptr, state_ptr, counts_ptr, expert_start_ptr),
        *(i64(me), i64(notify_off), i64(word_off), i64(outbox_off)),
        *(S, WORDS_P, PEERS_P, EXPERTS_P),
    )


@jit
def _forward_kernel(
    bases_ptr,
    state_ptr,
    me,
    notify_off,
    word_off,
    S: tl.constexpr,
    WORDS_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Pass the messages that came along this rail on to the node's other PEs, BLOCK_N a step."""
    me: int = i64(me)
    node: int = me // S.G
    local: int = me % S.G
    value: int = mark(state_ptr, 0, S)
    c = iota(WORDS_P)
    g = iota(S.G_P)
    for i in range(i64(tl.program_id(0)), cdiv(S.N, BLOCK_N), i64(tl.num_programs(0))):
        s = i * BLOCK_N + iota(BLOCK_N)
        mask_s = (s < S.N) & (s != node)
        src = s * S.G + local
        word_ptrs = heap_i64(bases_ptr, me, word_off) + src
        ok: int = wait_all(word_ptrs, value, mask_s, src, NOTIFY, state_ptr)
        if S.REMOTE:
            settle(own_address(bases_ptr, me, word_off))

        mask_g = (g < S.G * ok) & (g != local)
        mask = mask_s[:, None] & (c < S.NOTIFY_WORDS)[None, :]
        row_off = area(state_ptr, notify_off, S) + src * (S.NOTIFY_WORDS * 4)
        src_ptrs = heap_i32(bases_ptr, me, row_off)[:, None] + c[None, :]
        words = tl.load(src_ptrs, mask=mask, other=0)
        bases = tl.load(bases_ptr + node * S.G + g, mask=mask_g, other=0)
        address = bases[None, :] + row_off[:, None]
        mask_sg = mask_s[:, None] & mask_g[None, :]
        ptrs = address.to(tl.pointer_type(tl.int32))[:, :, None] + c[None, None, :]
        tl.store(ptrs, words[:, None, :], mask=mask_sg[:, :, None] & mask[:, None, :])
        told = bases[None, :] + (word_off + src * 8)[:, None]
        signal(told.to(tl.pointer_type(tl.int64)), value, mask_sg)


def notify(
    bases: torch.Tensor,
    state: torch.Tensor,
    counts: torch.Tensor,
    expert_start: torch.Tensor,
    *,
    me: int,
    notify_off: int,
    word_off: int,
    outbox_off: int,
    status: int,
    shape: Shape,
) -> None:
    """Begin a phase that counts nothing: tell the PE of the rail at every node, and node-mates.

    It repeats an earlier dispatch, or this rank called it wrongly: of a message only the status
    matters.

    Args:
        bases: (W,) int64, address of every PE's heap.
        state: (STATE_WORDS,) int64 of this PE.
        counts: (1 + N + W + E,) int32, from `count`.
        expert_start: (W + 1,) int32, first expert position of each rank.
        me: this PE.
        notify_off: byte offset of the two notify areas, (2, W, NOTIFY_WORDS) int32.
        word_off: byte offset of the words notify[rank], (W,) int64.
        outbox_off: byte offset of the messages that NVSHMEM puts, (N, NOTIFY_WORDS) int32.
        status: what this rank says of its call; negative for a wrong one.
    """
    _notify_kernel[(1,)](
        *(bases, state, counts, expert_start, me, notify_off, word_off, outbox_off, status),
        S=shape,
        **message_tiles(shape),
        **libraries(shape),
    )


def message_tiles(shape: Shape) -> dict[str, int]:
    """Return the tile sizes that `send_counts` takes."""
    return {
        "WORDS_P": pow2(shape.NOTIFY_WORDS),
        "PEERS_P": pow2(shape.N + shape.G),
        "EXPERTS_P": pow2(shape.E),
    }


def forward(
    bases: torch.Tensor,
    state: torch.Tensor,
    *,
    me: int,
    notify_off: int,
    word_off: int,
    shape: Shape,
    programs: int,
    block_n: int,
) -> None:
    """Wait for the messages along this rail and pass them on within the node.

    Args: as `notify`; programs: at most; block_n: messages a step, a power of two.
    """
    _forward_kernel[(min(-(-shape.N // block_n), programs),)](
        *(bases, state, me, notify_off, word_off),
        S=shape,
        WORDS_P=pow2(shape.NOTIFY_WORDS),
        BLOCK_N=block_n,
        **libraries(shape),
    )


def notify_ref(
    counts: list[torch.Tensor], expert_start: torch.Tensor, *, node: int, shape: Shape
) -> torch.Tensor:
    """Return the (W, NOTIFY_WORDS) int32 area that every PE of `node` must end up with."""
    S = shape
    first, end = int(expert_start[node * S.G]), int(expert_start[(node + 1) * S.G])
    area = torch.zeros(S.N * S.G, S.NOTIFY_WORDS, dtype=torch.int32)
    for rank, own in enumerate(counts):
        rows = own[1 + S.N :][node * S.G : (node + 1) * S.G]
        slots = own[1 + S.N + S.N * S.G :][first:end]
        message = torch.cat([own[: 1 + S.N], rows, slots])
        area[rank, : len(message)] = message
    return area
