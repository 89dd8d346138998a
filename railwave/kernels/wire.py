"""Between PEs: addresses, words (signals), waits, and puts from proxy to ingress PE.

Every PE's heap has the same layout, so an address is (PE, byte offset): `bases[pe] + offset`.
Peers whose memory is mapped (same process, shared memory, NVLink) are reached by plain loads and
stores through that table, others (base 0) through NVSHMEM, see `nvshmem`.

Words are int64, have one writer each and only grow. A word's value is a mark, `epoch * MAX_STEPS +
step` (of verdict and of `granted`'s, `epoch << 32` and more); the epoch lives in device memory, so
no launch argument depends on it. Memory order is decided here and in `nvshmem` alone:

- `signal` orders all that this program has stored before it (barrier, then a release at system
  scope): whoever sees the word sees those stores.
- `wait_all` polls with an acquire at system scope: what the writers stored before their words is
  visible after it. It ends at the deadline, leaves an error record in the state and returns 0; the
  later waits of the phase then return 0 at once, and callers move and signal nothing.
- what came over a NIC is visible after `settle`, and what was put from is free after `quiet`;
  notify and packed also say that.

Letters: N nodes, G GPUs a node; k wave, d destination node, s source node, g local GPU.
"""

import torch
import triton.language as tl
from triton.language import core  # noqa: F401  (see lang.jit)

from . import nvshmem as nvshmem
from .lang import cdiv, clamp, clock_ns, helper, i64, iota, jit, relax, tile_max, tile_min
from .nvshmem import libraries, put_signal, settle, signal_pe
from .port import SLOT_WORDS, egress_port, ingress_port, slot_ns, take, wait_until
from .shape import Shape, pow2

# The state of a PE: int64 (STATE_WORDS,) in its own memory.
EPOCH = tl.constexpr(0)  # number of the running phase; its first kernel advances it
NOTIFIES = tl.constexpr(1)  # number of notify exchanges so far; its parity picks the area
DEADLINE_NS = tl.constexpr(2)  # how long a wait may take
HOST_FLAG = tl.constexpr(3)  # address of an int64 of the host's that becomes 1 with FAILED, or 0
NOTES = tl.constexpr(4)  # address of what `note` writes, int64 (1 + 4 * MAX_NOTES,), or 0
FAILED = tl.constexpr(5)  # 1 once a phase has failed; then why, as `fail` was told:
FAILED_WORD = tl.constexpr(6)
FAILED_PE = tl.constexpr(7)
FAILED_SEEN = tl.constexpr(8)
FAILED_EXPECTED = tl.constexpr(9)
FAILED_EPOCH = tl.constexpr(10)  # the phase that failed first
CLOCK_NS = tl.constexpr(11)  # the latest time that a waiting program has seen
ROWS = tl.constexpr(12)  # that this PE receives in the running dispatch
DONE = tl.constexpr(13)  # programs of a launch that have ended, see `is_last`
BAD_IDS = tl.constexpr(14)  # 1 if a token of the running dispatch names no expert
STATE_WORDS = 17  # the last two are those of `port`
MAX_NOTES = tl.constexpr(1 << 15)
GAVE = tl.constexpr(100)  # what a note says beside the words: a grant given, to a node

# The words, each with its writer and readers; an error record holds the position in this tuple.
# The last two are no words: a record says that a call was wrong or another one, or that rows do not
# fit.
WORDS = (
    "notify",  # rank -> all: its message is here
    "packed",  # owner -> node: all that I owe your round is in your staging
    "grant",  # receiver -> each sender of its rail: put the round
    "arrived",  # sender -> receiver, one a chunk: the chunk is here
    "delivered",  # ingress -> node: all rows that I owe you are stored
    "rows_in",  # expert -> node: my rows may be read
    "returned",  # proxy -> node: the sums of the round are here
    "taken",  # owner -> node: I have read your sums of the round
    "rows_read",  # ingress -> node: I have read your rows
    "verdict",  # node -> all: the most rows of one of its ranks (`max_recv_rows` bounds them)
    "granted",  # receiver -> sender: you may put so many chunks; the next two too: see `granted`
    "landed",  # sender -> receiver: twice the chunks that are put
    "back",  # sender -> receiver: twice the grants that came back, and 1 if I may be granted
    "call",
    "overflow",
)
NOTIFY = tl.constexpr(0)
PACKED = tl.constexpr(1)
GRANT = tl.constexpr(2)
ARRIVED = tl.constexpr(3)
DELIVERED = tl.constexpr(4)
ROWS_IN = tl.constexpr(5)
RETURNED = tl.constexpr(6)
TAKEN = tl.constexpr(7)
ROWS_READ = tl.constexpr(8)
VERDICT = tl.constexpr(9)
GRANTED = tl.constexpr(10)
LANDED = tl.constexpr(11)
BACK = tl.constexpr(12)
CALL = tl.constexpr(13)
OVERFLOW = tl.constexpr(14)


@helper
def heap_i32(bases_ptr, pe, offset):
    """Return an int32 pointer to byte `offset` of the heap of `pe`."""
    return (tl.load(bases_ptr + pe) + offset).to(tl.pointer_type(tl.int32))


@helper
def heap_i64(bases_ptr, pe, offset):
    """Return an int64 pointer to byte `offset` of the heap of `pe`."""
    return (tl.load(bases_ptr + pe) + offset).to(tl.pointer_type(tl.int64))


@helper
def heaps_i32(bases_ptr, pe, offset, mask):
    """Return int32 pointers into the heaps of several PEs."""
    return (tl.load(bases_ptr + pe, mask=mask, other=0) + offset).to(tl.pointer_type(tl.int32))


@helper
def heaps_i64(bases_ptr, pe, offset, mask):
    """Return int64 pointers into the heaps of several PEs."""
    return (tl.load(bases_ptr + pe, mask=mask, other=0) + offset).to(tl.pointer_type(tl.int64))


@helper
def mark(state_ptr, step, S: tl.constexpr):
    """Return the value that a word of this phase carries for `step`."""
    return i64(tl.load(state_ptr + EPOCH)) * S.MAX_STEPS + step


@helper
def signal(word_ptrs, value, mask):
    """Set words to `value`, after all that this program stored before."""
    tl.debug_barrier()
    tl.atomic_xchg(word_ptrs, value, mask=mask, sem="release", scope="sys")


@helper
def send(bases_ptr, pe, offset, words, mask, word_off, value, mask_pe):
    """Store a row of words at `offset` of each PE's heap, then set its word there.

    words, mask: (len(pe), words a row); pe, mask_pe: (PEs,).
    """
    c = iota(words.shape[1])
    ptrs = heaps_i32(bases_ptr, pe, offset, mask_pe)[:, None] + c[None, :]
    tl.store(ptrs, words, mask=mask)
    signal(heaps_i64(bases_ptr, pe, word_off, mask_pe), value, mask_pe)


@helper
def is_mapped(bases_ptr, pe):
    """Return 1 if the heap of `pe` can be reached by address, 0 if only NVSHMEM reaches it."""
    return i64(i64(tl.load(bases_ptr + pe)) != 0)


@helper
def own_address(bases_ptr, me, offset):
    """Return the address of byte `offset` of the own heap: how NVSHMEM names it at every PE."""
    return i64(tl.load(bases_ptr + me)) + offset


@helper
def behind(word_ptrs, expected, mask):
    """Return how far each word is behind `expected` (0 or less: it has come), with an acquire."""
    seen = tl.atomic_add(word_ptrs, 0, mask=mask, sem="acquire", scope="sys")
    return tl.where(mask, expected - seen, 0)


@helper
def read(word_ptrs, mask):
    """Return words as they are now, with an acquire: what their writers stored before is visible.

    For who waits for none of them.
    """
    words = tl.atomic_add(word_ptrs, 0, mask=mask, sem="acquire", scope="sys")
    tl.debug_barrier()
    return words


@helper
def alive(state_ptr):
    """Return 1, or 0 once the phase has failed: the same to all threads (see `wait_all`)."""
    return 1 - i64(tl.atomic_add(state_ptr + FAILED, 0, sem="relaxed"))


@helper
def fail(state_ptr, word, pe, seen, expected):
    """End the phase: from now on nothing is moved, told or waited for. The first record is kept."""
    if i64(tl.atomic_cas(state_ptr + FAILED, i64(0), i64(1))) == 0:
        tl.store(state_ptr + FAILED_WORD, word)
        tl.store(state_ptr + FAILED_PE, pe)
        tl.store(state_ptr + FAILED_SEEN, seen)
        tl.store(state_ptr + FAILED_EXPECTED, expected)
        tl.store(state_ptr + FAILED_EPOCH, tl.load(state_ptr + EPOCH))
        flag = tl.load(state_ptr + HOST_FLAG)
        if i64(flag) != 0:
            tl.store(flag.to(tl.pointer_type(tl.int64)), i64(1))


@helper
def _notes(state_ptr):
    """Return where notes go, or 0: the same to all threads (see `wait_all`)."""
    return tl.atomic_add(state_ptr + NOTES, i64(0), sem="relaxed")


@helper
def note(state_ptr, what, who, began_ns, ended_ns):
    """Write a note for a trace, if one is taken: what was waited for, and for whom; or a grant.

    Notes beyond MAX_NOTES are counted only.

    Example: the first note, that "grant" was waited for from 5 to 9 and rank 3 came last, makes the
    notes [1, 2, 3, 5, 9, ...].
    """
    notes = _notes(state_ptr)
    if i64(notes) != 0:
        ptr = notes.to(tl.pointer_type(tl.int64))
        place: int = i64(tl.atomic_add(ptr, i64(1), sem="relaxed"))
        if place < MAX_NOTES:
            tl.store(ptr + 1 + place * 4, what)
            tl.store(ptr + 2 + place * 4, who)
            tl.store(ptr + 3 + place * 4, began_ns)
            tl.store(ptr + 4 + place * 4, ended_ns)


@helper
def is_last(state_ptr):
    """Return 1 to the last program of a launch that comes here, else 0.

    What the others stored before is visible to it, and it may say so to other PEs. Nobody waits.
    Launches that use it must not run at the same time.
    """
    tl.debug_barrier()
    programs: int = i64(tl.num_programs(0)) * i64(tl.num_programs(1))
    before: int = i64(tl.atomic_add(state_ptr + DONE, i64(1), sem="acq_rel"))
    last: int = i64(before == programs - 1)
    if last > 0:
        tl.store(state_ptr + DONE, i64(0))
    return last


@helper
def wait_all(word_ptrs, expected, mask, writers, word, state_ptr):
    """Wait until every word has reached `expected`; return 1, or 0 when the phase has failed.

    `writers` (the PE to name for each word) and `word` go into the error record.
    """
    # Branches around barriers must be taken by all threads of a program alike, and a thread's own
    # clock or load may differ from its neighbour's: a scalar atomic is done once and handed to all.
    ok: int = alive(state_ptr)
    late = behind(word_ptrs, expected, mask)
    worst: int = i64(tile_max(late, 0))
    if worst > 0:
        tl.atomic_max(state_ptr + CLOCK_NS, clock_ns(), sem="relaxed")  # gives the time before
        now: int = i64(tl.atomic_max(state_ptr + CLOCK_NS, clock_ns(), sem="relaxed"))
        began: int = now + 0
        deadline: int = now + i64(tl.load(state_ptr + DEADLINE_NS))
        last = late  # as it was before the last poll: who came last
        while worst * ok > 0:
            relax()
            last = late
            late = behind(word_ptrs, expected, mask)
            worst: int = i64(tile_max(late, 0))
            now: int = i64(tl.atomic_max(state_ptr + CLOCK_NS, clock_ns(), sem="relaxed"))
            if (worst > 0) & (now > deadline):
                who: int = i64(tile_min(tl.where(late > 0, writers, 0x7FFFFFFF), 0))
                missing: int = i64(tile_max(tl.where(writers == who, late, 0), 0))
                fail(state_ptr, word, who, expected - missing, expected)
                ok: int = ok * 0
        if i64(_notes(state_ptr)) != 0:
            came: int = i64(tile_min(tl.where(last > 0, writers, 0x7FFFFFFF), 0))
            note(state_ptr, word, came, began, now)
    tl.debug_barrier()
    return ok


@helper
def tell_node(bases_ptr, state_ptr, me, word_off, value, S: tl.constexpr):
    """Set this PE's word at every PE of its node (nothing once the phase has failed)."""
    g = iota(S.G_P)
    mask = g < S.G * alive(state_ptr)
    local: int = me % S.G
    ptrs = heaps_i64(bases_ptr, me - local + g, word_off + local * 8, mask)
    signal(ptrs, value, mask)


@helper
def wait_node(bases_ptr, state_ptr, me, word_off, expected, word, S: tl.constexpr):
    """Wait for the words that the PEs of this node set at this one."""
    g = iota(S.G_P)
    ptrs = heap_i64(bases_ptr, me, word_off) + g
    return wait_all(ptrs, expected, g < S.G, me - me % S.G + g, word, state_ptr)


@helper
def rail_mates(rail_mates_ptr, S: tl.constexpr):
    """Return the local GPUs of this PE's rail, itself included, -1 where there is none."""
    j = iota(S.RAIL_GPUS_P)
    return tl.load(rail_mates_ptr + j, mask=j < S.RAIL_GPUS, other=-1).to(tl.int64)


@helper
def grant(
    bases_ptr,
    state_ptr,
    me,
    recv_load_ptr,
    rail_mates_ptr,
    grant_off,
    wave,
    first,
    value,
    S: tl.constexpr,
):
    """Let the senders of `wave` put their records from slot `first` on (unless the phase failed).

    To every PE of this rail at the sending node that has such records. A sender waits for all
    receivers of its rail, so that one source node at a time has payload in flight to a rail.
    """
    s: int = (me // S.G + S.N - wave) % S.N
    g = rail_mates(rail_mates_ptr, S)
    load = tl.load(recv_load_ptr + s * S.G + g, mask=g >= 0, other=0).to(tl.int64)
    mask = load * alive(state_ptr) > first
    bases = tl.load(bases_ptr + s * S.G + g, mask=mask, other=0)
    ptrs = (bases + (grant_off + me * 8)).to(tl.pointer_type(tl.int64))
    signal(ptrs, value, bases != 0)
    if i64(_notes(state_ptr)) != 0:
        if i64(tile_max(mask.to(tl.int64), 0)) > 0:
            now: int = i64(clock_ns())
            note(state_ptr, GAVE, s, now, now)
    if S.REMOTE:
        word: int = own_address(bases_ptr, me, grant_off + me * 8)
        RAIL_GPUS: tl.constexpr = S.RAIL_GPUS  # static_range takes nothing else
        for j in tl.static_range(RAIL_GPUS):
            pe: int = s * S.G + i64(tl.load(rail_mates_ptr + j))
            if pe >= s * S.G:
                due: int = i64(tl.load(recv_load_ptr + pe)) * alive(state_ptr)
                if (due > first) & (is_mapped(bases_ptr, pe) == 0):
                    signal_pe(word, value, pe)


@helper
def grant_first(
    bases_ptr,
    state_ptr,
    me,
    recv_load_ptr,
    rail_mates_ptr,
    grant_off,
    waves,
    value,
    S: tl.constexpr,
):
    """Let the senders of waves 1 to `waves` put their first round."""
    for wave in range(1, waves + 1):
        grant(
            *(bases_ptr, state_ptr, me, recv_load_ptr, rail_mates_ptr),
            *(grant_off, wave, 0, value, S),
        )


@helper
def wait_grants(
    bases_ptr, state_ptr, me, rail_mates_ptr, grant_off, expected, d, num_records, S: tl.constexpr
):
    """Wait for the grants of all PEs of this rail at node `d`, if there is anything to put."""
    g = rail_mates(rail_mates_ptr, S)
    pe = d * S.G + tl.where(g >= 0, g, 0)
    ptrs = heap_i64(bases_ptr, me, grant_off) + pe
    mask = (g + 1) * num_records > 0
    return wait_all(ptrs, expected, mask, pe, GRANT, state_ptr)


@helper
def wait_chunks(
    bases_ptr, state_ptr, me, arrived_off, expected, s, first_chunk, num_chunks, S: tl.constexpr
):
    """Wait for `num_chunks` chunks from node `s`, from `first_chunk` on."""
    c = iota(S.CHUNKS_P)
    word_off: int = arrived_off + (s * S.CHUNKS + first_chunk) * 8
    writers = s * S.G + me % S.G + c * 0
    ptrs = heap_i64(bases_ptr, me, word_off) + c
    ok: int = wait_all(ptrs, expected, c < num_chunks, writers, ARRIVED, state_ptr)
    if S.REMOTE:
        settle(own_address(bases_ptr, me, arrived_off))
    return ok


@helper
def chunks_of(n, S: tl.constexpr):
    """Return the chunks of a round of `n` records: chunk c starts at record c * n // chunks.

    Equal to within a record, so that equal numbers of programs have equal work.

    Example: CHUNK 2, CHUNKS 4: 3 records are 2 chunks (1 and 2 records), 9 are 4 (2, 2, 2, 3).
    """
    return clamp(cdiv(n, S.CHUNK), 0, S.CHUNKS)


@helper
def share(n, p):
    """Return where program p starts of those that share n records, equally to within a record."""
    return n * p // i64(tl.num_programs(0))


@helper
def records_in_round(load_ptr, peer, first, ROUND_RECORDS: tl.constexpr):
    """Return how many of `peer`'s records have slots in [first, first + ROUND_RECORDS)."""
    return clamp(i64(tl.load(load_ptr + peer)) - first, 0, ROUND_RECORDS)


@helper
def start_counting(put_words_ptr, record_words, S: tl.constexpr):
    """Begin to count what a phase puts to each node: N zeros, then the words of a record."""
    d = iota(2 * S.N_P)
    counts = tl.where(d == S.N, d * 0 + record_words, 0)
    tl.store(put_words_ptr + d, counts, mask=d <= S.N)


@helper
def say_arrived(words_ptr, first, last, value, AT_ONCE: tl.constexpr):
    """Set the words of chunks [first, last), up to AT_ONCE together, after what was stored.

    AT_ONCE: 1 where there is one chunk, last being first + 1.
    """
    if AT_ONCE == 1:
        signal(words_ptr + first, value, None)
    else:
        for start in range(first, last, AT_ONCE):
            c = start + iota(AT_ONCE)
            signal(words_ptr + c, value + c * 0, c < last)


@helper
def put_chunks(
    bases_ptr,
    put_words_ptr,
    me,
    d,
    n,
    first,
    last,
    src_off,
    dst_off,
    arrived_off,
    value,
    S: tl.constexpr,
    RECORD_WORDS: tl.constexpr,
    BLOCK_W: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Put chunks [first, last) of n records to the PE with this local index at node d; then words.

    They lie one behind another, here as there. Through emulated NICs the caller sets the words,
    once the chunks have passed.

    AT_ONCE: as of `say_arrived`; 1 for one chunk.
    """
    ingress: int = d * S.G + me % S.G
    chunks: int = chunks_of(n, S)
    start: int = n * first // chunks * RECORD_WORDS
    # Times 4, which it is already, so that the compiler knows and moves 16 bytes at a time.
    num_words: int = (n * last // chunks * RECORD_WORDS - start) // 4 * 4
    words_off: int = arrived_off + me // S.G * S.CHUNKS * 8
    if is_mapped(bases_ptr, ingress) > 0:
        src = tl.multiple_of(heap_i32(bases_ptr, me, src_off) + start, 16)
        dst = tl.multiple_of(heap_i32(bases_ptr, ingress, dst_off) + start, 16)
        for w in range(0, num_words, BLOCK_W):
            offs_w = w + iota(BLOCK_W)
            words = tl.load(src + offs_w, mask=offs_w < num_words, other=0)
            tl.store(dst + offs_w, words, mask=offs_w < num_words)
        if not S.EMULATED:
            say_arrived(heap_i64(bases_ptr, ingress, words_off), first, last, value, AT_ONCE)
    elif S.REMOTE:
        for c in range(first, last):
            begin: int = n * c // chunks * (RECORD_WORDS * 4)
            num_bytes: int = n * (c + 1) // chunks * (RECORD_WORDS * 4) - begin
            put_signal(
                own_address(bases_ptr, me, dst_off + begin),
                own_address(bases_ptr, me, src_off + begin),
                *(num_bytes, own_address(bases_ptr, me, words_off + c * 8), value, ingress),
            )
    tl.atomic_add(put_words_ptr + d, num_words, sem="relaxed")


@helper
def _arrive(word_ptr, chunk, value, passed_ns):
    """Wait until a slot has passed; if a chunk (0 or more) ends with it, set the chunk's word."""
    wait_until(passed_ns)
    if chunk >= 0:
        signal(word_ptr + chunk, value, None)


@helper
def _put_through_nics(
    bases_ptr,
    state_ptr,
    put_words_ptr,
    src_ptr,
    dst_ptr,
    word_ptr,
    port_off,
    me,
    d,
    n,
    value,
    S: tl.constexpr,
    RECORD_WORDS: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Put this program's chunks of n records in slots, with up to four of them under way."""
    out_ptr = egress_port(bases_ptr, state_ptr, port_off, me, S)
    in_ptr = ingress_port(bases_ptr, state_ptr, port_off, d * S.G + me % S.G, S)
    # When slots have passed and which chunk, if any, ends with each: a is the oldest.
    ns_a: int = i64(0)
    ns_b: int = i64(0)
    ns_c: int = i64(0)
    ns_d: int = i64(0)
    chunk_a: int = i64(-1)
    chunk_b: int = i64(-1)
    chunk_c: int = i64(-1)
    chunk_d: int = i64(-1)
    chunks: int = chunks_of(n, S)
    for c in range(i64(tl.program_id(0)), chunks, i64(tl.num_programs(0))):
        start: int = n * c // chunks * RECORD_WORDS
        num_words: int = (n * (c + 1) // chunks * RECORD_WORDS - start) // 4 * 4  # see put_chunks
        src = tl.multiple_of(src_ptr + start, 16)
        dst = tl.multiple_of(dst_ptr + start, 16)
        for first in range(0, num_words, SLOT_WORDS):
            _arrive(word_ptr, chunk_a, value, ns_a)
            end: int = clamp(first + SLOT_WORDS, 0, num_words)
            num_ns: int = slot_ns(state_ptr, (end - first) * 4)
            began: int = take(out_ptr, clock_ns(), num_ns)
            for w in range(first, end, BLOCK_W):
                offs_w = w + iota(BLOCK_W)
                words = tl.load(src + offs_w, mask=offs_w < end, other=0)
                tl.store(dst + offs_w, words, mask=offs_w < end)
            wait_until(began)
            ns_a: int = ns_b + 0
            ns_b: int = ns_c + 0
            ns_c: int = ns_d + 0
            ns_d: int = take(in_ptr, began, num_ns) + num_ns
            chunk_a: int = chunk_b + 0
            chunk_b: int = chunk_c + 0
            chunk_c: int = chunk_d + 0
            chunk_d: int = (c + 1) * i64(end == num_words) - 1
        tl.atomic_add(put_words_ptr + d, num_words, sem="relaxed")
    _arrive(word_ptr, chunk_a, value, ns_a)
    _arrive(word_ptr, chunk_b, value, ns_b)
    _arrive(word_ptr, chunk_c, value, ns_c)
    _arrive(word_ptr, chunk_d, value, ns_d)


@jit
def _put_kernel(
    bases_ptr,
    state_ptr,
    put_words_ptr,
    send_load_ptr,
    rail_mates_ptr,
    me,
    send_off,
    recv_off,
    arrived_off,
    grant_off,
    packed_off,
    taken_off,
    wave,
    first,
    step,
    wait_packed,
    wait_grant,
    tell_taken,
    port_off,
    S: tl.constexpr,
    RECORD_WORDS: tl.constexpr,
    ROUND_RECORDS: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Put this proxy's records for node d, chunk by chunk, each followed by its word.

    arrived[node, c] at the ingress PE vouches for chunk c of the round only.
    """
    me: int = i64(me)
    node: int = me // S.G
    local: int = me % S.G
    peer: int = i64(tl.program_id(1))
    d: int = (node + i64(wave) + peer) % S.N
    value: int = mark(state_ptr, i64(step), S)
    if i64(tell_taken) > 0:
        if i64(tl.program_id(0) + tl.program_id(1)) == 0:
            tell_node(bases_ptr, state_ptr, me, taken_off, value - 1, S)
    n: int = records_in_round(send_load_ptr, d * S.G + local, i64(first), ROUND_RECORDS)
    if i64(wait_packed) > 0:
        n: int = n * wait_node(bases_ptr, state_ptr, me, packed_off, value, PACKED, S)
    if i64(wait_grant) > 0:
        n: int = n * wait_grants(
            bases_ptr, state_ptr, me, rail_mates_ptr, grant_off, value, d, n, S
        )

    buffer_off: int = peer * (ROUND_RECORDS * RECORD_WORDS * 4)
    if S.EMULATED:
        word_off: int = arrived_off + node * (S.CHUNKS * 8)
        ingress: int = d * S.G + local
        _put_through_nics(
            *(bases_ptr, state_ptr, put_words_ptr),
            heap_i32(bases_ptr, me, send_off + buffer_off),
            heap_i32(bases_ptr, ingress, recv_off + buffer_off),
            heap_i64(bases_ptr, ingress, word_off),
            *(i64(port_off), me, d, n, value, S, RECORD_WORDS, BLOCK_W),
        )
    else:
        src_off: int = send_off + buffer_off
        dst_off: int = recv_off + buffer_off
        for c in range(i64(tl.program_id(0)), chunks_of(n, S), i64(tl.num_programs(0))):
            put_chunks(
                *(bases_ptr, put_words_ptr, me, d, n, c, c + 1, src_off, dst_off),
                *(arrived_off, value, S, RECORD_WORDS, BLOCK_W, 1),
            )


def put(
    bases: torch.Tensor,
    state: torch.Tensor,
    put_words: torch.Tensor,
    send_load: torch.Tensor,
    rail_mates: torch.Tensor,
    *,
    me: int,
    send_off: int,
    recv_off: int,
    arrived_off: int,
    grant_off: int,
    packed_off: int,
    taken_off: int,
    wave: int,
    num_peers: int,
    first: int,
    round_records: int,
    record_words: int,
    step: int,
    wait_packed: bool,
    wait_grant: bool,
    tell_taken: bool,
    port_off: int = 0,
    shape: Shape,
    programs: int,
    block_w: int,
    warps: int = 4,
) -> None:
    """Put one round's records from this proxy's send buffer into the ingress PEs' buffers.

    Args:
        bases: (W,) int64, address of every PE's heap.
        state: (STATE_WORDS,) int64 of this PE.
        put_words: (N, ...) int64, grows by the 32-bit words put to each node.
        send_load: (N, G) int32, records that each PE of this node sends to each node.
        rail_mates: (RAIL_GPUS,) int32, local GPUs of this PE's rail, -1 for none.
        me: this PE.
        send_off, recv_off: byte offsets of the round's buffers; one of round_records a peer.
        arrived_off, grant_off, packed_off, taken_off: byte offsets of the words.
        wave, num_peers: the peers are nodes (own + wave + i) mod N for i < num_peers.
        first, round_records: slots [first, first + round_records) are this round's.
        step: the round's number in its phase, from 1.
        wait_packed: wait for packed(step) of the node; wait_grant: for the rail's grants.
        tell_taken: say taken(step - 1) first.
        port_off: byte offset of the emulated NICs' ports, if the shape has such.
        programs, block_w, warps: programs a peer, words a tile, warps a program.
    """
    _put_kernel[(programs, num_peers)](
        *(bases, state, put_words, send_load, rail_mates),
        *(me, send_off, recv_off, arrived_off, grant_off, packed_off, taken_off),
        *(wave, first, step, int(wait_packed), int(wait_grant), int(tell_taken)),
        port_off,
        S=shape,
        RECORD_WORDS=record_words,
        ROUND_RECORDS=round_records,
        BLOCK_W=min(block_w, pow2(round_records * record_words)),
        num_warps=warps,
        **libraries(shape),
    )


@jit
def _stamp_kernel(clock_ptr):
    """Store the device's time: what the notes of a trace are told by."""
    tl.store(clock_ptr, i64(clock_ns()))


def stamp(clock: torch.Tensor) -> None:
    """Store the device's time in nanoseconds.

    Args:
        clock: out, (1,) int64.
    """
    _stamp_kernel[(1,)](clock)


def put_ref(
    recv: list[torch.Tensor],
    put_words: torch.Tensor,
    send: torch.Tensor,
    send_load: torch.Tensor,
    *,
    me: int,
    wave: int,
    first: int,
    shape: Shape,
) -> None:
    """Move what `put` moves, record by record.

    Args: as `put`, and
        recv: out, per node, (peers, round_records, record_words) int32: the round's receive
            buffers of the PE with this one's local index.
        send: (peers, round_records, record_words) int32, this PE's send buffers.
    """
    node, local = divmod(me, shape.G)
    for peer, records in enumerate(send):
        d = (node + wave + peer) % shape.N
        num_records = min(max(int(send_load[d, local]) - first, 0), len(records))
        for i in range(num_records):
            recv[d][peer, i] = records[i]
            put_words[d] += records[i].numel()
