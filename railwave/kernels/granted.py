"""Put records as receivers grant them, chunk by chunk: the protocol of `docs/granted.md`.

One program of a PE takes both parts in turn and waits for nothing: it reads what others say,
answers, moves at most one part of a chunk, and looks again. Its words are of its own stage, as no
other stage's may be: it never waits for one particular word, and there is the proof that it ends.

Words, above `epoch << 32`, the first at the sender, the others at the receiver:

    granted   chunks of the pair granted so far
    landed    2k: k chunks have been put; 2k - 1: of the k-th, all but its last part
    back      1: what comes from the sender is packed, and it is open; 2k: k grants were handed
              back, and it is closed; 2k + 1: and it is open again

A part is a run of the chunks of `wire.put`, each under an arrived word of its own, which alone says
that its bytes are there. Of the GPUs of a rail the first is its node's receiver, for all of them,
so that the grants out bound the nodes with payload in flight to the rail.

Letters: N nodes, G GPUs a node; s source node, d destination node.
"""

import torch
import triton.language as tl
from triton.language import core  # noqa: F401  (see lang.jit)

from .lang import cdiv, clamp, clock_ns, helper, i64, iota, jit, relax, tile_max, tile_min, tile_sum
from .nvshmem import libraries, quiet, signal_pe
from .port import reserve, slot_ns, wait_until
from .shape import Shape, pow2
from .wire import (
    CLOCK_NS,
    DEADLINE_NS,
    EPOCH,
    GAVE,
    GRANTED,
    LANDED,
    PACKED,
    alive,
    chunks_of,
    fail,
    heap_i64,
    is_mapped,
    mark,
    note,
    own_address,
    put_chunks,
    put_ref,
    read,
    say_arrived,
    signal,
)

OUTSTANDING = tl.constexpr(2)  # grants that a receiver may have out on a rail
CHUNKS_A_SLICE = tl.constexpr(32)  # at most
WARPS = 8  # of a program; it has 128 registers a thread, and so no more than another of 4 warps
AT_ONCE = tl.constexpr(64)  # of `put`'s chunks: words that are set together

# What a PE knows, int64 (ROWS, LANES). A receiver has a lane for each sending PE of its rail:
CHUNKS_IN = tl.constexpr(0)  # chunks that come from there
GIVEN = tl.constexpr(1)  # chunks granted
LANDED_READ = tl.constexpr(2)
BACK_READ = tl.constexpr(3)  # 0: it has not packed what comes from it
ASIDE = tl.constexpr(4)  # 1: said nothing for too long, and is not waited for
HEARD_NS = tl.constexpr(5)  # when it said something, or was granted something
# A sender has a lane for each node:
CHUNKS_OUT = tl.constexpr(6)  # chunks that go there
RUN = tl.constexpr(7)  # of `put`'s chunks in one of these
PART = tl.constexpr(8)  # of `put`'s chunks in a part
GRANTED_READ = tl.constexpr(9)
BACK_SAID = tl.constexpr(10)
BEGUN = tl.constexpr(11)  # chunks begun
# And one of each of these:
TURN = tl.constexpr(12)  # the node that is granted first, of equals
SERVING = tl.constexpr(13)  # the node whose chunk is put, or -1
AT = tl.constexpr(14)  # the next of `put`'s chunks in it
NEAR = tl.constexpr(15)  # 1: all but its last part has been put
HELD = tl.constexpr(16)  # the node whose grant waits for its end, or -1
NEWS_NS = tl.constexpr(17)  # when anything was read or done
DONE = tl.constexpr(18)  # 1: all is put, and all that was to come has landed
NEWS = tl.constexpr(19)  # 1: something was read or done in the last step
MOST_OUT = tl.constexpr(20)  # the most grants out at once
PASSES_NS = tl.constexpr(21)  # when the chunk will have passed the emulated NICs
NEXT_NS = tl.constexpr(22)  # when that of HELD will, if it is queued behind it; 0: it is not
ROWS = tl.constexpr(23)
NOBODY = tl.constexpr(1 << 30)


def lanes(shape: Shape) -> int:
    """Return the lanes of a PE's table."""
    return shape.N_P * shape.RAIL_GPUS_P


@helper
def _row(table_ptr, row, S: tl.constexpr):
    """Return where a row of the table starts: its one value, where it has one."""
    return table_ptr + row * (S.N_P * S.RAIL_GPUS_P)


@helper
def _of(values, where):
    """Return the value of the one lane that `where` names."""
    return i64(tile_sum(tl.where(where, values, 0), 0))


@helper
def _said(bases_ptr, me, word_off, pe, mask, base, last):
    """Return what PEs have said here so far in this phase, with an acquire.

    last: as read last. Who has come to the end of this phase may be in the next one, and say there
    what is not for now; what it said last here is then not told any more, but all has landed.
    """
    seen = read(heap_i64(bases_ptr, me, word_off) + pe, mask) - base
    return tl.where(mask & (seen >= 0) & (seen < 4294967296), seen, last)


@helper
def _say(bases_ptr, me, pe, word_off, value, S: tl.constexpr):
    """Set this PE's word at `pe`, after all that it stored before."""
    if is_mapped(bases_ptr, pe) > 0:
        signal(heap_i64(bases_ptr, pe, word_off + me * 8), value, None)
    elif S.REMOTE:
        signal_pe(own_address(bases_ptr, me, word_off + me * 8), value, pe)


@helper
def _put_chunks(n, S: tl.constexpr):
    """Return the chunks of `put` of n records: `wire.chunks_of` for many n at once."""
    return tl.minimum(cdiv(n, S.CHUNK), S.CHUNKS)


@helper
def _pieces(n, words, S: tl.constexpr, RECORD_WORDS: tl.constexpr):
    """Return how many of `put`'s chunks of n records hold at least so many words, or are all.

    Example: 9 records of 16 words are 4 chunks with CHUNK 2, CHUNKS 4: of 70 words, 2.
    """
    chunks = _put_chunks(n, S)
    return tl.minimum(cdiv(words * chunks, tl.maximum(n, 1) * RECORD_WORDS), chunks)


@helper
def _run(n, least_words, S: tl.constexpr, RECORD_WORDS: tl.constexpr):
    """Return of how many of `put`'s chunks a granted one of n records is made."""
    chunks = _put_chunks(n, S)
    least = _pieces(n, least_words, S, RECORD_WORDS)
    return tl.maximum(tl.maximum(cdiv(chunks, CHUNKS_A_SLICE), least), 1)


@helper
def _begin(
    table_ptr,
    send_load_ptr,
    recv_load_ptr,
    rail_mates_ptr,
    me,
    now,
    least_words,
    part_words,
    S: tl.constexpr,
    RECORD_WORDS: tl.constexpr,
):
    """Fill the table as it is before anything is said."""
    node: int = me // S.G
    local: int = me % S.G
    q = iota(S.N_P * S.RAIL_GPUS_P)
    zero = q * 0
    for row in range(1, ROWS):
        tl.store(_row(table_ptr, row, S) + q, zero)
    tl.debug_barrier()
    s = q // S.RAIL_GPUS_P
    j = q % S.RAIL_GPUS_P
    g = tl.load(rail_mates_ptr + j, mask=j < S.RAIL_GPUS, other=-1).to(tl.int64)
    receives: int = i64(i64(tl.load(rail_mates_ptr)) == local)
    mask = (g >= 0) & (s < S.N) & (s != node)
    n = tl.load(recv_load_ptr + s * S.G + g, mask=mask, other=0).to(tl.int64) * receives
    run = _run(n, least_words, S, RECORD_WORDS)
    chunks = cdiv(_put_chunks(n, S), run)
    tl.store(_row(table_ptr, CHUNKS_IN, S) + q, chunks)
    d = iota(S.N_P)
    mask = (d < S.N) & (d != node)
    n = tl.load(send_load_ptr + d * S.G + local, mask=mask, other=0).to(tl.int64)
    run = _run(n, least_words, S, RECORD_WORDS)
    chunks = cdiv(_put_chunks(n, S), run)
    tl.store(_row(table_ptr, CHUNKS_OUT, S) + d, chunks)
    tl.store(_row(table_ptr, RUN, S) + d, run)
    part = tl.maximum(_pieces(n, part_words, S, RECORD_WORDS), 1)
    tl.store(_row(table_ptr, PART, S) + d, part)
    tl.debug_barrier()
    tl.store(_row(table_ptr, TURN, S), i64((node + S.N - 1) % S.N))
    tl.store(_row(table_ptr, SERVING, S), i64(-1))
    tl.store(_row(table_ptr, HELD, S), i64(-1))
    tl.store(_row(table_ptr, NEWS_NS, S), i64(now))
    tl.debug_barrier()


@helper
def _receive(
    table_ptr,
    bases_ptr,
    state_ptr,
    rail_mates_ptr,
    me,
    granted_off,
    landed_off,
    back_off,
    base,
    now,
    patience_ns,
    S: tl.constexpr,
):
    """Read what senders say and grant one of them a chunk; return 1 if anything happened.

    Of the open senders that one with the most chunks left; of equals the next in turn, which goes
    down from node d - 1, the sender of wave 1.
    """
    q = iota(S.N_P * S.RAIL_GPUS_P)
    s = q // S.RAIL_GPUS_P
    j = q % S.RAIL_GPUS_P
    chunks = tl.load(_row(table_ptr, CHUNKS_IN, S) + q)
    owes = chunks > 0
    pe = s * S.G + tl.load(rail_mates_ptr + j, mask=owes, other=0).to(tl.int64)
    landed_read = tl.load(_row(table_ptr, LANDED_READ, S) + q)
    back_read = tl.load(_row(table_ptr, BACK_READ, S) + q)
    landed = _said(bases_ptr, me, landed_off, pe, owes, base, landed_read)
    back = _said(bases_ptr, me, back_off, pe, owes, base, back_read)
    owes = landed < 2 * chunks
    given = tl.load(_row(table_ptr, GIVEN, S) + q)
    heard = (landed > landed_read) | (back > back_read)
    heard_ns = tl.where(heard, now, tl.load(_row(table_ptr, HEARD_NS, S) + q))
    handed_back = back // 2
    out = tl.where(owes, given - landed // 2 - handed_back, 0)
    late = (out > 0) & (now - heard_ns > patience_ns)
    aside = tl.where(heard, 0, tl.where(late, 1, tl.load(_row(table_ptr, ASIDE, S) + q)))
    num_out: int = i64(tile_sum(tl.where(aside > 0, 0, out), 0))
    num_near: int = i64(tile_sum(tl.where(aside > 0, 0, landed % 2), 0))
    left = tl.where(owes, chunks - given + handed_back, 0)
    turn: int = i64(tl.load(_row(table_ptr, TURN, S)))
    place = (turn - s + S.N) % S.N * S.RAIL_GPUS_P + j
    can = (left > 0) & (back % 2 == 1) & (aside == 0)  # closed until what comes is packed
    rank = tl.where(can, left * (S.N_P * S.RAIL_GPUS_P) - place, 0)
    best: int = i64(tile_max(rank, 0))
    # One at a time; one more when all that is out comes to its end.
    room: int = i64(num_out == 0) + i64(num_out < OUTSTANDING) * i64(num_near >= num_out)
    if (best > 0) & (room > 0):
        chosen = rank == best
        given = given + chosen.to(tl.int64)
        heard_ns = tl.where(chosen, now, heard_ns)
        node: int = _of(s, chosen)
        _say(bases_ptr, me, _of(pe, chosen), granted_off, base + _of(given, chosen), S)
        tl.store(_row(table_ptr, TURN, S), (node + S.N - 1) % S.N)
        note(state_ptr, GAVE, node, now, now)
        most: int = i64(tile_sum(out, 0)) + 1
        if most > i64(tl.load(_row(table_ptr, MOST_OUT, S))):
            tl.store(_row(table_ptr, MOST_OUT, S), most)
    else:
        best: int = best * 0
    tl.debug_barrier()  # all threads have read these rows
    tl.store(_row(table_ptr, GIVEN, S) + q, given)
    tl.store(_row(table_ptr, LANDED_READ, S) + q, landed)
    tl.store(_row(table_ptr, BACK_READ, S) + q, back)
    tl.store(_row(table_ptr, ASIDE, S) + q, aside.to(tl.int64))
    tl.store(_row(table_ptr, HEARD_NS, S) + q, heard_ns)
    tl.debug_barrier()
    return i64(best + i64(tile_sum(heard.to(tl.int64), 0)) > 0)


@helper
def _ready(bases_ptr, state_ptr, me, packed_off, packs, S: tl.constexpr):
    """Return the waves whose records the node has packed: all once the last of `packs` is told."""
    ready: int = i64(S.N)
    if packs > 0:
        g = iota(S.G_P)
        mask = g < S.G
        steps = read(heap_i64(bases_ptr, me, packed_off) + g, mask)
        steps = tl.where(mask, steps - mark(state_ptr, 0, S), packs)
        told: int = i64(tile_min(steps, 0))
        if told < packs:
            ready: int = clamp(told, 0, packs)
    return ready


@helper
def _answer(bases_ptr, me, leader, back_off, base, before, after, S: tl.constexpr):
    """Tell receivers, the PEs with local index `leader`, what has changed of back."""
    d = iota(S.N_P)
    if i64(tile_max(after - before, 0)) > 0:
        for node in range(0, S.N):
            value: int = _of(after, d == node)
            if value > _of(before, d == node):
                _say(bases_ptr, me, node * S.G + leader, back_off, base + value, S)


@helper
def _edge(table_ptr, to, chunk, n, S: tl.constexpr):
    """Return at which of `put`'s chunks of n records the granted chunk for node `to` begins."""
    return clamp(chunk * i64(tl.load(_row(table_ptr, RUN, S) + to)), 0, chunks_of(n, S))


@helper
def _queue(
    table_ptr,
    bases_ptr,
    state_ptr,
    send_load_ptr,
    me,
    to,
    chunk,
    port_off,
    S: tl.constexpr,
    RECORD_WORDS: tl.constexpr,
):
    """Take slots of both emulated NICs for a granted chunk; return when it will have passed."""
    n: int = i64(tl.load(send_load_ptr + to * S.G + me % S.G))
    chunks: int = chunks_of(n, S)
    at: int = _edge(table_ptr, to, chunk, n, S)
    end: int = _edge(table_ptr, to, chunk + 1, n, S)
    num_bytes: int = (n * end // chunks - n * at // chunks) * (RECORD_WORDS * 4)
    return reserve(bases_ptr, state_ptr, port_off, me, to * S.G + me % S.G, num_bytes, S)


@helper
def _land(
    table_ptr,
    bases_ptr,
    me,
    leader,
    to,
    chunk,
    n,
    arrived_off,
    landed_off,
    base,
    value,
    S: tl.constexpr,
):
    """Say that a granted chunk has landed; through emulated NICs first that it has arrived."""
    if S.EMULATED:
        word_off: int = arrived_off + me // S.G * S.CHUNKS * 8
        words_ptr = heap_i64(bases_ptr, to * S.G + me % S.G, word_off)
        at: int = _edge(table_ptr, to, chunk, n, S)
        end: int = _edge(table_ptr, to, chunk + 1, n, S)
        say_arrived(words_ptr, at, end, value, AT_ONCE)
    _say(bases_ptr, me, to * S.G + leader, landed_off, base + 2 * chunk + 2, S)


@helper
def _send(
    table_ptr,
    bases_ptr,
    state_ptr,
    put_words_ptr,
    send_load_ptr,
    me,
    leader,
    ready,
    now,
    waits,
    part_words,
    port_off,
    send_off,
    recv_off,
    arrived_off,
    granted_off,
    landed_off,
    back_off,
    base,
    value,
    S: tl.constexpr,
    RECORD_WORDS: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Read grants, answer them, and put a part of a chunk; return 1 if anything happened.

    Idle, a sender takes a grant; with its chunk near its end it holds one; it hands back all
    others, and is closed to who gave them until it can take a grant. It opens to the nodes of the
    first `ready` waves, what is for them having been packed. A chunk passes emulated NICs in a slot
    of each port, both of which a held one is given ahead of time; `waits`: for the end of the later
    one, here.
    """
    node: int = me // S.G
    d = iota(S.N_P)
    wave = (d - node + S.N) % S.N
    taken = tl.load(_row(table_ptr, GRANTED_READ, S) + d)
    begun = tl.load(_row(table_ptr, BEGUN, S) + d)
    # Not of who has all that is for it.
    chunks_out = tl.load(_row(table_ptr, CHUNKS_OUT, S) + d)
    sends = ((chunks_out > 0) & (wave <= ready)).to(tl.int64)  # 1: it may open to that node
    packed = (begun < chunks_out) & (wave <= ready)
    grants = _said(bases_ptr, me, granted_off, d * S.G + leader, packed, base, taken)
    before = tl.load(_row(table_ptr, BACK_SAID, S) + d)
    new = tl.where(packed, grants - taken, 0)
    news: int = i64(tile_max(new, 0) > 0)
    serving: int = i64(tl.load(_row(table_ptr, SERVING, S)))
    held: int = i64(tl.load(_row(table_ptr, HELD, S)))
    near: int = i64(tl.load(_row(table_ptr, NEAR, S)))
    at: int = i64(tl.load(_row(table_ptr, AT, S)))
    ended_now: int = i64(0)
    if S.EMULATED:
        passes: int = i64(tl.load(_row(table_ptr, PASSES_NS, S)))
        next_ns: int = i64(tl.load(_row(table_ptr, NEXT_NS, S)))
        if (near > 0) & (waits == 0) & (now >= passes):
            # Before another is begun, not after: the ports would idle for a step.
            chunk: int = _of(begun, d == serving) - 1
            n: int = i64(tl.load(send_load_ptr + serving * S.G + me % S.G))
            if at >= _edge(table_ptr, serving, chunk + 1, n, S):
                _land(
                    *(table_ptr, bases_ptr, me, leader, serving, chunk, n),
                    *(arrived_off, landed_off, base, value, S),
                )
                ended_now: int = ended_now + 1
                serving: int = serving * 0 - 1
                near: int = near * 0
    opens: int = i64(serving < 0) * i64(held < 0)
    idle: int = i64(serving < 0)
    if serving < 0:
        first: int = i64(tile_min(tl.where(new > 0, wave, S.N), 0))
        serving: int = held + 0
        held: int = held * 0 - 1
        if (serving < 0) & (first < S.N):
            serving: int = (node + first) % S.N
            new = new - (d == serving).to(tl.int64)
        if serving >= 0:
            at: int = _of(begun * tl.load(_row(table_ptr, RUN, S) + d), d == serving)
            begun = begun + (d == serving).to(tl.int64)
    to: int = clamp(serving, 0, S.N - 1)
    n: int = i64(tl.load(send_load_ptr + to * S.G + me % S.G))
    chunk: int = _of(begun, d == to) - 1
    end: int = _edge(table_ptr, to, chunk + 1, n, S)
    part: int = i64(tl.load(_row(table_ptr, PART, S) + to))
    moves: int = i64(serving >= 0)
    last_part: int = i64(end - at <= part)
    if S.EMULATED:
        if idle * moves > 0:
            passes: int = next_ns + 0
            next_ns: int = next_ns * 0
            if passes == 0:
                passes: int = _queue(
                    *(table_ptr, bases_ptr, state_ptr, send_load_ptr, me, to, chunk, port_off, S),
                    RECORD_WORDS,
                )
        last_part: int = i64(now >= passes - slot_ns(state_ptr, part_words * 4))
    if (moves > 0) & (near == 0) & (last_part > 0):
        near: int = near * 0 + 1
        opens: int = opens * 0 + 1
        _say(bases_ptr, me, to * S.G + leader, landed_off, base + 2 * _of(begun, d == to) - 1, S)
    if (near > 0) & (held < 0):
        first: int = i64(tile_min(tl.where(new > 0, wave, S.N), 0))
        if first < S.N:
            held: int = (node + first) % S.N
            new = new - (d == held).to(tl.int64)
    if S.EMULATED:
        if (held >= 0) & (next_ns == 0):
            next_ns: int = _queue(
                *(table_ptr, bases_ptr, state_ptr, send_load_ptr, me, held),
                *(_of(begun, d == held), port_off, S, RECORD_WORDS),
            )

    back = before + (1 - before % 2) * opens * sends
    back = tl.where(new > 0, back + 2 * new - back % 2, back)
    _answer(bases_ptr, me, leader, back_off, base, before, back, S)
    tl.debug_barrier()  # all threads have read these rows
    tl.store(_row(table_ptr, GRANTED_READ, S) + d, tl.where(packed, grants, taken))
    tl.store(_row(table_ptr, BACK_SAID, S) + d, back)
    tl.store(_row(table_ptr, BEGUN, S) + d, begun)

    if moves > 0:
        buffer_off: int = (to - node + S.N - 1) % S.N * (S.PROXY_RECORDS * RECORD_WORDS * 4)
        last: int = clamp(at + part, 0, end)
        if last > at:
            put_chunks(
                *(bases_ptr, put_words_ptr, me, to, n, at, last, send_off + buffer_off),
                *(recv_off + buffer_off, arrived_off, value, S, RECORD_WORDS, BLOCK_W, AT_ONCE),
            )
        if S.REMOTE:
            quiet()  # a chunk has ended when its bytes have left
        at: int = last + 0
        ended: int = i64(at >= end)
        if S.EMULATED:
            if (ended > 0) & (waits > 0):
                wait_until(passes)
            ended: int = ended * i64((now >= passes) | (waits > 0))
        if ended > 0:
            _land(
                *(table_ptr, bases_ptr, me, leader, to, chunk, n),
                *(arrived_off, landed_off, base, value, S),
            )
            serving: int = serving * 0 - 1
            near: int = near * 0
    tl.debug_barrier()
    tl.store(_row(table_ptr, SERVING, S), serving)
    tl.store(_row(table_ptr, HELD, S), held)
    tl.store(_row(table_ptr, NEAR, S), near)
    tl.store(_row(table_ptr, AT, S), at)
    if S.EMULATED:
        tl.store(_row(table_ptr, PASSES_NS, S), passes)
        tl.store(_row(table_ptr, NEXT_NS, S), next_ns)
    tl.debug_barrier()
    return i64(news + moves + ended_now > 0)


@helper
def _owed(table_ptr, S: tl.constexpr):
    """Return how many chunks have not landed here, and how many have not left."""
    q = iota(S.N_P * S.RAIL_GPUS_P)
    landed = tl.load(_row(table_ptr, LANDED_READ, S) + q) // 2
    comes: int = i64(tile_sum(tl.load(_row(table_ptr, CHUNKS_IN, S) + q) - landed, 0))
    d = iota(S.N_P)
    begun = tl.load(_row(table_ptr, BEGUN, S) + d)
    goes: int = i64(tile_sum(tl.load(_row(table_ptr, CHUNKS_OUT, S) + d) - begun, 0))
    return comes + goes + i64(i64(tl.load(_row(table_ptr, SERVING, S))) >= 0)


@helper
def _fail(
    table_ptr,
    bases_ptr,
    state_ptr,
    rail_mates_ptr,
    me,
    ready,
    packed_off,
    packs,
    base,
    S: tl.constexpr,
):
    """Say whose word has not come: a node-mate's that packs; of a sender, a receiver."""
    q = iota(S.N_P * S.RAIL_GPUS_P)
    s = q // S.RAIL_GPUS_P
    chunks = tl.load(_row(table_ptr, CHUNKS_IN, S) + q)
    landed = tl.load(_row(table_ptr, LANDED_READ, S) + q)
    owes = landed < 2 * chunks
    back = tl.load(_row(table_ptr, BACK_READ, S) + q)
    out = tl.load(_row(table_ptr, GIVEN, S) + q) - landed // 2 - back // 2
    late = (out > 0) | (back == 0)
    lane: int = i64(tile_min(tl.where(owes & late, q, NOBODY), 0))
    if lane == NOBODY:
        lane: int = i64(tile_min(tl.where(owes, q, NOBODY), 0))
    g = iota(S.G_P)
    told = read(heap_i64(bases_ptr, me, packed_off) + g, g < S.G)
    last: int = mark(state_ptr, packs, S)
    who: int = i64(tile_min(tl.where((g < S.G) & (told < last), g, S.G), 0))
    if (ready < S.N) & (who < S.G):  # else all have told meanwhile
        fail(state_ptr, PACKED, me - me % S.G + who, _of(told, g == who), last)
    elif lane < NOBODY:
        pe: int = _of(s, q == lane) * S.G + i64(tl.load(rail_mates_ptr + lane % S.RAIL_GPUS_P))
        seen: int = base + _of(landed, q == lane)
        fail(state_ptr, LANDED, pe, seen, base + 2 * _of(chunks, q == lane))
    else:
        d = iota(S.N_P)
        taken = tl.load(_row(table_ptr, GRANTED_READ, S) + d)
        left = tl.load(_row(table_ptr, CHUNKS_OUT, S) + d) - tl.load(_row(table_ptr, BEGUN, S) + d)
        node: int = clamp(i64(tile_min(tl.where(left > 0, d, S.N), 0)), 0, S.N - 1)
        pe: int = node * S.G + i64(tl.load(rail_mates_ptr))
        seen: int = base + _of(taken, d == node)
        fail(state_ptr, GRANTED, pe, seen, seen + 1)


@jit
def _granted_kernel(
    table_ptr,
    bases_ptr,
    state_ptr,
    put_words_ptr,
    send_load_ptr,
    recv_load_ptr,
    rail_mates_ptr,
    me,
    send_off,
    recv_off,
    arrived_off,
    granted_off,
    landed_off,
    back_off,
    packed_off,
    port_off,
    begin,
    packs,
    most_steps,
    least_words,
    part_words,
    patience_ns,
    S: tl.constexpr,
    RECORD_WORDS: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Put this PE's records as they are granted, and grant others theirs, until all is done.

    Or for `most_steps` steps, or until there is nothing to do, and go on in another launch.
    """
    me: int = i64(me)
    local: int = me % S.G
    leader: int = i64(tl.load(rail_mates_ptr))
    base: int = i64(tl.load(state_ptr + EPOCH)) * 4294967296
    value: int = mark(state_ptr, 1, S)
    tl.atomic_max(state_ptr + CLOCK_NS, clock_ns(), sem="relaxed")  # gives the time before
    now: int = i64(tl.atomic_max(state_ptr + CLOCK_NS, clock_ns(), sem="relaxed"))
    if i64(begin) > 0:
        _begin(
            *(table_ptr, send_load_ptr, recv_load_ptr, rail_mates_ptr, me, now),
            *(i64(least_words), i64(part_words), S, RECORD_WORDS),
        )
    deadline: int = i64(tl.load(state_ptr + DEADLINE_NS))
    steps: int = i64(0)
    going: int = alive(state_ptr)
    while going > 0:
        now: int = i64(tl.atomic_max(state_ptr + CLOCK_NS, clock_ns(), sem="relaxed"))
        ready: int = _ready(bases_ptr, state_ptr, me, packed_off, i64(packs), S)
        news: int = _send(
            *(table_ptr, bases_ptr, state_ptr, put_words_ptr, send_load_ptr, me, leader, ready),
            *(now, i64(most_steps), i64(part_words), i64(port_off)),
            *(send_off, recv_off, arrived_off, granted_off, landed_off, back_off),
            *(base, value, S, RECORD_WORDS, BLOCK_W),
        )
        if leader == local:
            news: int = news + _receive(
                *(table_ptr, bases_ptr, state_ptr, rail_mates_ptr, me),
                *(granted_off, landed_off, back_off, base, now, i64(patience_ns), S),
            )
        steps: int = steps + 1
        owed: int = _owed(table_ptr, S)
        if owed == 0:
            tl.store(_row(table_ptr, DONE, S), i64(1))
        tl.store(_row(table_ptr, NEWS, S), i64(news > 0))
        if news > 0:
            tl.store(_row(table_ptr, NEWS_NS, S), now)
        else:
            relax()
            if (owed > 0) & (now - i64(tl.load(_row(table_ptr, NEWS_NS, S))) > deadline):
                _fail(
                    *(table_ptr, bases_ptr, state_ptr, rail_mates_ptr, me),
                    *(ready, packed_off, i64(packs), base, S),
                )
        stops: int = i64(i64(most_steps) > 0) * i64((steps >= i64(most_steps)) | (news == 0))
        going: int = alive(state_ptr) * i64(owed > 0) * (1 - stops)
        tl.debug_barrier()


def granted(
    table: torch.Tensor,
    bases: torch.Tensor,
    state: torch.Tensor,
    put_words: torch.Tensor,
    send_load: torch.Tensor,
    recv_load: torch.Tensor,
    rail_mates: torch.Tensor,
    *,
    me: int,
    send_off: int,
    recv_off: int,
    arrived_off: int,
    granted_off: int,
    landed_off: int,
    back_off: int,
    packed_off: int,
    port_off: int,
    begin: bool,
    packs: int,
    most_steps: int,
    record_words: int,
    least_bytes: int,
    part_bytes: int,
    patience_ns: int,
    shape: Shape,
    block_w: int,
    warps: int = WARPS,
) -> None:
    """Put all of this proxy's records into the ingress PEs' buffers, as those grant them.

    Args:
        table: (ROWS, lanes) int64, what this PE knows; `begin` fills it.
        bases: (W,) int64, address of every PE's heap.
        state: (STATE_WORDS,) int64 of this PE.
        put_words: (N, ...) int64, grows by the 32-bit words put to each node.
        send_load: (N, G) int32, records that each PE of this node sends to each node.
        recv_load: (N, G) int32, records that each PE of each node puts to this node.
        rail_mates: (RAIL_GPUS,) int32, local GPUs of this PE's rail, -1 for none.
        me: this PE.
        send_off, recv_off: byte offsets of the buffers: of PROXY_RECORDS a peer, node own + 1 + i
            (own - 1 - i to receive) for i < N - 1.
        arrived_off, granted_off, landed_off, back_off, packed_off: byte offsets of the words.
        port_off: byte offset of the ports of emulated NICs, see `port`.
        begin: the phase begins; else an earlier launch's steps go on.
        packs: records for wave k may be put once the node has said packed(k), all of them once it
            has said packed(packs); 0: they are there.
        most_steps: after so many, or as soon as nothing happens, the launch ends; DONE in the table
            says whether all is done. 0: it ends when that is so, or at the deadline.
        record_words: 32-bit words of a record.
        least_bytes: of a chunk that is granted, unless a slice has less.
        part_bytes: a part holds as many, or one of `put`'s chunks.
        patience_ns: how long a sender may say nothing before another is granted in its place.
        block_w, warps: words a tile, warps.
    """
    _granted_kernel[(1,)](
        *(table, bases, state, put_words, send_load, recv_load, rail_mates),
        *(me, send_off, recv_off, arrived_off, granted_off, landed_off, back_off, packed_off),
        *(port_off, int(begin), packs, most_steps),
        *(-(-least_bytes // 4), -(-part_bytes // 4), patience_ns),
        S=shape,
        RECORD_WORDS=record_words,
        BLOCK_W=min(block_w, pow2(max(1, shape.PROXY_RECORDS) * record_words)),
        num_warps=warps,
        **libraries(shape),
    )


def granted_ref(
    recv: list[torch.Tensor],
    put_words: torch.Tensor,
    send: torch.Tensor,
    send_load: torch.Tensor,
    *,
    me: int,
    shape: Shape,
) -> None:
    """Move what `granted` moves, record by record, whatever the order of grants.

    Args: as `put_ref`, with all other nodes as peers.
    """
    put_ref(recv, put_words, send, send_load, me=me, wave=1, first=0, shape=shape)
