"""The kernel of granted chunks: every byte, every state against the protocol's model, and faults.

Letters: N nodes, G GPUs a node, R rails, W = N * G ranks.
"""

import random
import time
from collections import deque
from threading import Thread

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from heaps import (
    KERNELS,
    LEAST,
    ON_GPU,
    WIRE,
    Memory,
    failure,
    make_config,
    make_state,
    mark,
    seeds,
)
from test_granted_model import NOBODY, Model, State, table

granted, wire = KERNELS.granted, KERNELS.wire

EPOCH = 3
BASE = EPOCH << 32
RECORD_WORDS = 8
MS = 1_000_000


class Cluster:
    """All PEs of a small cluster in the stage: their tables, states and words.

    Args:
        load: (N, N, G) records that GPU g of node s puts to node d.
    """

    def __init__(self, config, load, *, patience_ms=10**9, deadline_ms=10**9, **sizes):
        self.config, self.load, self.sizes = config, load, sizes
        self.memory, W = Memory(config), config.topo.num_ranks
        self.patience_ns = patience_ms * MS
        shape = (granted.ROWS.value, granted.lanes(config.shape))
        self.tables = [torch.full(shape, -7, dtype=torch.int64) for _ in range(W)]
        self.states = [make_state(epoch=EPOCH, deadline_ms=deadline_ms) for _ in range(W)]
        self.put_words = [torch.zeros(config.shape.N, dtype=torch.int64) for _ in range(W)]
        self.begun = set()
        for pe in range(W):
            memory = self.memory.want.region(pe, "send", torch.int32)
            memory[:] = torch.randint(-(2**31), 2**31, memory.shape).int()
        self.memory.start()

    def step(self, pe, *, packs=0, most_steps=1):
        """Let a PE take a step; return whether it is done."""
        layout, (s, _) = self.memory.layout, divmod(pe, self.config.shape.G)
        words = ("arrived", "granted", "landed", "back", "packed")
        granted.granted(
            *(self.tables[pe], self.memory.bases, self.states[pe], self.put_words[pe]),
            *(self.load[s].int(), self.load[:, s].contiguous().int()),
            self.config.tables.rail_mates(pe),
            **{"me": pe, "send_off": layout["send"], "recv_off": layout["recv"]},
            **{f"{name}_off": layout[name] for name in words},
            **{
                "port_off": layout["ports"] if self.config.shape.EMULATED else 0,
                "begin": pe not in self.begun,
                "packs": packs,
                "most_steps": most_steps,
            },
            **{"record_words": RECORD_WORDS, "patience_ns": self.patience_ns},
            **{"least_bytes": 0, "part_bytes": 0, "block_w": 8, **self.sizes},
            shape=self.config.shape,
        )
        self.begun.add(pe)
        return bool(self.knows(pe, "DONE"))

    def knows(self, pe, row):
        """Return what a PE has in the first lane of a row."""
        return int(self.tables[pe][getattr(granted, row).value, 0])

    def row(self, pe, row):
        return self.tables[pe][getattr(granted, row).value]

    def word(self, pe, name, writer):
        """Return what `writer` has said to `pe`, above the phase's base."""
        return max(int(self.memory.got.region(pe, name, torch.int64)[writer]) - BASE, 0)

    def records(self, node, chunk):
        """Return what node 0 put, by now, as one of `put`'s chunks to a node, and what it has."""
        layout = {"recv": (node, node - 1), "send": (0, node - 1)}  # who has it, for which peer
        size = self.config.shape.CHUNK * RECORD_WORDS
        slices = self.config.shape.PROXY_RECORDS * RECORD_WORDS
        return [
            self.memory.got.region(pe, name, torch.int32)[peer * slices :][chunk * size :][
                :size
            ].clone()
            for name, (pe, peer) in layout.items()
        ]

    def back(self, receiver, sender):
        """Return what a sender has said of hand-backs; -1 if it has said nothing."""
        return self.word(receiver, "back", sender) - 1

    def out(self, pe):
        """Return the grants out at a receiver, by lane."""
        handed_back = self.row(pe, "BACK_READ") // 2
        landed = self.row(pe, "LANDED_READ")
        out = self.row(pe, "GIVEN") - landed // 2 - handed_back
        return torch.where(landed < 2 * self.row(pe, "CHUNKS_IN"), out, 0)

    def in_flight(self, node, rail):
        """List the nodes that are putting a chunk to a rail of a node."""
        topo = self.config.topo
        return {
            topo.node_of(pe)
            for pe in self.begun
            if self.knows(pe, "SERVING") == node and topo.rail_of_gpu[topo.local_of(pe)] == rail
        }

    def pack(self, order, packs):
        """Let some PE tell its node that it has packed one wave more, if there is one."""
        S = self.config.shape
        node, local = divmod(order.randrange(S.N * S.G), S.G)
        before = self.waves_of(node * S.G + local)
        if before < packs:
            for pe in range(node * S.G, node * S.G + S.G):
                words = self.memory.got.region(pe, "packed", torch.int64)
                words[local] = mark(self.config, before + 1, epoch=EPOCH)

    def waves_of(self, pe):
        """Return how many waves a PE has told its node that it has packed."""
        told = int(self.memory.got.region(pe, "packed", torch.int64)[pe % self.config.shape.G])
        return max(0, told - mark(self.config, 0, epoch=EPOCH))

    def ready(self, node, packs):
        """Return how many waves a node has packed: all, where it need not tell."""
        G = self.config.shape.G
        return min(self.waves_of(node * G + g) for g in range(G)) if packs else self.config.shape.N

    def granted_too_early(self, packs):
        """List who has been granted what is for a node, and has not packed it: (PE, node)."""
        N, G = self.config.shape.N, self.config.shape.G
        granted_to = [self.memory.got.region(pe, "granted", torch.int64) for pe in range(N * G)]
        return [
            (pe, d)
            for pe, words in enumerate(granted_to)
            for d in range(N)
            if (d - pe // G) % N > self.ready(pe // G, packs) and words[d * G :][:G].max() > BASE
        ]

    def run(self, order, packs=0):
        """Let PEs take steps until all are done; check the bound at every moment."""
        waiting, topo = list(range(self.config.topo.num_ranks)), self.config.topo
        for _ in range(10_000):
            pe = order.choice(waiting)
            if order.random() < 0.5:
                self.pack(order, packs)
            assert not self.granted_too_early(packs)
            if self.step(pe, packs=packs, most_steps=order.choice([1, 1, 2, 5])):
                waiting.remove(pe)
            rail = topo.rail_of_gpu[topo.local_of(pe)]
            for node in range(topo.nodes):
                assert len(self.in_flight(node, rail)) <= granted.OUTSTANDING.value
            if pe in self.begun:
                assert int(self.out(pe).sum()) <= granted.OUTSTANDING.value
            if not waiting:
                return
        raise AssertionError(f"PEs {waiting} came to no end")

    def check(self):
        """Check every byte of every PE, what is counted, and that words balance."""
        S, memory = self.config.shape, self.memory
        for pe in range(self.config.topo.num_ranks):
            node, local = divmod(pe, S.G)
            peers, size = S.N - 1, (S.PROXY_RECORDS, RECORD_WORDS)
            into = [memory.view(d * S.G + local, "recv", peers, *size) for d in range(S.N)]
            counted = torch.zeros_like(self.put_words[pe])
            send = memory.view(pe, "send", peers, *size)
            granted.granted_ref(into, counted, send, self.load[node].int(), me=pe, shape=S)
            assert torch.equal(self.put_words[pe], counted)
            for d in range(S.N):
                chunks = S.num_chunks(int(self.load[node, d, local]))
                words = memory.words(d * S.G + local, "arrived")[node * S.CHUNKS :][:chunks]
                words[:] = mark(self.config, 1, epoch=EPOCH)
        for pe in range(self.config.topo.num_ranks):
            leader = int(self.config.tables.rail_mates(pe)[0])
            for d in range(S.N):
                receiver = d * S.G + leader
                lanes = self.row(pe, "CHUNKS_OUT")
                given, back = self.word(pe, "granted", receiver), max(self.back(receiver, pe), 0)
                landed = self.word(receiver, "landed", pe)
                assert landed == 2 * int(lanes[d]) == 2 * (given - (back + 1) // 2)
                assert back % 2 == 0
            for name in ("granted", "landed", "back", "packed"):  # as just checked, or told
                memory.words(pe, name)[:] = memory.got.region(pe, name, torch.int64)
        memory.check()


@st.composite
def clusters(draw):
    """Draw a cluster and its records: any rails, chunks of any length."""
    draw(seeds)
    N, G = draw(st.integers(2, 4)), draw(st.integers(1, 3))
    rail_of_gpu = draw(st.lists(st.integers(0, 1), min_size=G, max_size=G))
    config = make_config(
        *(N, G, 2),
        rail_of_gpu=rail_of_gpu,
        max_tokens_per_rank=draw(st.sampled_from([1, 6, 20])),
        tiles={
            "chunk": draw(st.sampled_from([LEAST, 4])),
            "chunks": draw(st.sampled_from([3, 64])),
        },
    )
    most = config.shape.PROXY_RECORDS
    load = torch.randint(0, most + 1, (N, N, G))
    load *= torch.rand(load.shape) < draw(st.sampled_from([0.3, 0.7, 1.0]))
    load[range(N), range(N)] = 0
    sizes = {name: draw(st.sampled_from([0, 1, 300])) for name in ("least_bytes", "part_bytes")}
    return Cluster(config, load, **sizes)


@settings(max_examples=12)
@given(clusters(), st.randoms(use_true_random=False), st.booleans())
def test_every_record_arrives_once_whatever_the_order(cluster, order, by_wave):
    cluster.run(order, packs=(cluster.config.shape.N - 1) * by_wave)
    cluster.check()


def ring_of_chunks(*slices, nodes=3, parts=1, deadline_ms=10**9, patience_ms=10**9, **more):
    """Make a cluster of one GPU a node; slices (s, d, chunks), of so many parts each."""
    load = torch.tensor(table(nodes, *slices))[:, :, None] * LEAST * parts
    config = make_config(
        *(nodes, 1, 1),
        max_tokens_per_rank=max(2, int(load.max())),
        staging_records=1,
        tiles={"chunk": LEAST, "chunks": 256},
        **more,
    )
    times = {"deadline_ms": deadline_ms, "patience_ms": patience_ms}
    return Cluster(config, load, **times, least_bytes=parts * LEAST * RECORD_WORDS * 4)


def test_granted_example():
    """Node 2 is busy with node 0 when node 1 grants it: the grant comes back, then is given again.

    Two chunks are bound for node 0 from node 2, one for node 1; each is a part, so "near" at once.
    """
    cluster = ring_of_chunks((2, 0, 2), (2, 1, 1))
    cluster.step(0)
    assert cluster.word(2, "granted", 0) == 0  # node 2 has not begun
    cluster.step(2)
    cluster.step(0)
    cluster.step(1)
    assert [cluster.word(2, "granted", d) for d in (0, 1)] == [1, 1]
    cluster.step(2)  # takes the first in its waves' order, that of node 0; holds that of node 1
    assert [cluster.word(d, "landed", 2) for d in (0, 1)] == [2, 0]
    assert (cluster.knows(2, "SERVING"), cluster.knows(2, "HELD")) == (NOBODY, 1)
    cluster.step(0)  # sees the chunk; grants the other
    assert cluster.word(2, "granted", 0) == 2
    cluster.step(2)  # puts the one held, and so near its end holds the other
    assert [cluster.word(d, "landed", 2) for d in (0, 1)] == [2, 2]
    assert cluster.knows(2, "HELD") == 0 and cluster.step(1)
    assert cluster.step(2) and cluster.step(0)
    cluster.check()


def as_state(cluster, model, packs=0):
    """Return a cluster of one GPU a node as a state of the model.

    What a sender is about to do by itself, and nobody can have seen, is done.
    """
    N = model.N

    def by_pair(value):
        return tuple(value(s, d) if s != d else 0 for s in range(N) for d in range(N))

    def row(pe, name, lane):
        return int(cluster.row(pe, name)[lane]) if pe in cluster.begun else 0

    def one(name, none):
        return tuple(
            cluster.knows(pe, name) if pe in cluster.begun else none(pe) for pe in range(N)
        )

    def back_read(s, d):
        return row(d, "BACK_READ", s) - 1 if model.chunks[s * N + d] else 0

    state = State(
        grant=by_pair(lambda s, d: cluster.word(s, "granted", d)),
        landed=by_pair(lambda s, d: cluster.word(d, "landed", s)),
        back=by_pair(lambda s, d: cluster.back(d, s) if model.chunks[s * N + d] else 0),
        grant_read=by_pair(lambda s, d: row(s, "GRANTED_READ", d)),
        landed_read=by_pair(lambda s, d: row(d, "LANDED_READ", s)),
        back_read=by_pair(back_read),
        begun=by_pair(lambda s, d: row(s, "BEGUN", d)),
        serving=one("SERVING", lambda _: NOBODY),
        held=one("HELD", lambda _: NOBODY),
        turn=one("TURN", lambda d: (d - 1) % N),
        aside=by_pair(lambda s, d: bool(row(d, "ASIDE", s))),
    )
    for s in range(N):
        if state.serving[s] == NOBODY and state.held[s] != NOBODY:
            held = state.held[s]
            nobody = tuple(NOBODY if i == s else h for i, h in enumerate(state.held))
            state = model.begin(state._replace(held=nobody), s, held)
        elif state.serving[s] == NOBODY and s in cluster.begun:
            ready = cluster.ready(s, packs)
            opened = (
                max(back, 0) if p // N == s and (p % N - s) % N <= ready else back
                for p, back in enumerate(state.back)
            )
            state = model.open_up(state._replace(back=tuple(opened)), s)
    return state


def can_reach(model, before, after, pe):
    """Say whether the model has steps of one node that lead from one state to another."""
    seen, queue = {before}, deque([before])
    while queue:
        state = queue.popleft()
        if state == after:
            return True
        for steps in (model.receiver_steps(state, pe), model.sender_steps(state, pe)):
            for following in steps:
                if following not in seen:
                    seen.add(following)
                    queue.append(following)
    return False


DEMANDS = {
    "a ring": (3, (0, 1, 2), (1, 2, 1), (2, 0, 3)),
    "all to one": (4, (1, 0, 2), (2, 0, 1), (3, 0, 2)),
    "one to all": (4, (0, 1, 2), (0, 2, 2), (0, 3, 1)),
    "two by two": (4, (0, 2, 2), (0, 3, 1), (1, 2, 1), (1, 3, 2)),
    "skewed": (3, (0, 1, 4), (2, 1, 1), (0, 2, 2), (1, 2, 1), (2, 0, 1)),
}


@pytest.mark.parametrize("parts, seed, by_wave", [(1, 0, 0), (1, 1, 1), (2, 2, 1), (3, 3, 0)])
@pytest.mark.parametrize("demand", DEMANDS)
def test_every_step_is_one_that_the_model_may_take(demand, parts, seed, by_wave):
    """Node by node in random order: the kernel does what was searched in test_granted_model."""
    nodes, *slices = DEMANDS[demand]
    cluster, order = ring_of_chunks(*slices, nodes=nodes, parts=parts), random.Random(seed)
    model = Model(table(nodes, *slices), granted.OUTSTANDING.value)
    state, waiting, packs = model.start(), list(range(nodes)), (nodes - 1) * by_wave
    while waiting:
        pe = order.choice(waiting)
        cluster.pack(order, packs)
        if state != (packed := as_state(cluster, model, packs)):
            # An idle sender is about to open to whom it has packed something for.
            assert any(can_reach(model, state, packed, s) for s in range(nodes))
            state = packed
        if cluster.step(pe, packs=packs):
            waiting.remove(pe)
        after = as_state(cluster, model, packs)
        model.check(after)
        assert can_reach(model, state, after, pe), (pe, state, after)
        state = after
    assert all(state.landed[p] == 2 * n for p, n in enumerate(model.chunks))
    cluster.check()


@pytest.mark.parametrize("begun", [False, True])
def test_a_dead_sender_is_named_and_holds_up_no_other(begun):
    """Node 0 dies before it says that it is there; or after, and node 1 has granted it first."""
    cluster = ring_of_chunks((0, 1, 2), (2, 1, 1), (2, 0, 1), deadline_ms=60, patience_ms=2)
    if begun:
        cluster.step(0)
    for _ in range(200):
        if not failure(cluster.states[1]):
            cluster.step(1)
        if not failure(cluster.states[2]):
            cluster.step(2)
    assert cluster.word(0, "granted", 1) == int(begun) == int(cluster.row(1, "ASIDE")[0])
    assert cluster.word(1, "landed", 2) == 2
    assert failure(cluster.states[1]) == ("landed", 0, BASE, BASE + 4)
    # Node 0 would have to grant node 2's chunk.
    assert failure(cluster.states[2]) == ("granted", 0, BASE, BASE + 1)


def test_a_late_sender_is_waited_for_again_once_it_says_something():
    cluster = ring_of_chunks((0, 1, 2), (2, 1, 1), patience_ms=0)
    for pe in (0, 2, 1, 1):
        cluster.step(pe)  # node 1's patience runs out: node 2 is granted in node 0's place
    assert bool(cluster.row(1, "ASIDE")[0]) and cluster.word(2, "granted", 1) == 1
    cluster.patience_ns = 10**9 * MS
    cluster.step(0)
    cluster.step(1)
    assert not cluster.row(1, "ASIDE").any()
    cluster.run(random.Random(0))
    cluster.check()


def test_grants_of_the_next_phase_are_not_taken_for_this_one():
    """Node 1 has all from node 0, and is a phase ahead, while node 0 still owes node 2."""
    cluster = ring_of_chunks((0, 1, 1), (0, 2, 2))
    cluster.step(0)
    words = cluster.memory.got.region(0, "granted", torch.int64)
    words[1] = BASE + 1
    cluster.step(0)
    assert cluster.word(1, "landed", 0) == 2
    words[1] = ((EPOCH + 1) << 32) + 1
    for _ in range(3):
        assert not cluster.step(0)
    assert cluster.row(0, "BEGUN")[:3].tolist() == [0, 1, 0]
    assert (cluster.word(1, "landed", 0), cluster.back(1, 0)) == (2, 0)
    words[2] = BASE + 2
    while not cluster.step(0):
        pass
    assert cluster.word(2, "landed", 0) == 4


def test_a_sender_that_begins_the_next_phase_is_not_heard_in_this_one():
    """Node 2 hears node 0's first word of the next phase while node 1 still owes it a chunk."""
    cluster = ring_of_chunks((0, 2, 1), (1, 2, 1))
    for pe in (0, 2, 0, 2):
        cluster.step(pe)
    assert cluster.word(2, "landed", 0) == 2 and not cluster.step(2)
    cluster.memory.got.region(2, "back", torch.int64)[0] = ((EPOCH + 1) << 32) + 1
    for _ in range(3):
        assert not cluster.step(2)
    assert cluster.row(2, "BACK_READ")[:3].tolist() == [1, 0, 0]
    assert cluster.row(2, "GIVEN")[:3].tolist() == [1, 0, 0]
    for pe in (1, 2, 1):
        cluster.step(pe)
    assert cluster.step(2)


def test_of_several_packs_a_wave_goes_once_it_is_packed():
    """Nor is it granted before, so that who has packed what is for a receiver comes first there."""
    cluster = ring_of_chunks((0, 1, 1), (0, 2, 1))
    packed = cluster.memory.got.region(0, "packed", torch.int64)
    for step, landed in ((0, [0, 0]), (1, [2, 0]), (2, [2, 2])):
        packed[0] = mark(cluster.config, step, epoch=EPOCH)
        for _ in range(3):
            cluster.step(0, packs=2)
            for pe in (1, 2):
                cluster.step(pe)
        assert [cluster.word(d, "landed", 0) for d in (1, 2)] == landed
        assert [cluster.word(0, "granted", d) for d in (1, 2)] == [n // 2 for n in landed]


def test_a_launch_without_a_bound_runs_to_the_end():
    """As in a process a PE: here the words of all others are there already."""
    cluster = ring_of_chunks((0, 1, 3), (0, 2, 1))
    for d, n in ((1, 3), (2, 1)):
        cluster.memory.got.region(0, "granted", torch.int64)[d] = BASE + min(n, 1)
    assert not cluster.step(0, most_steps=3)
    cluster.memory.got.region(0, "granted", torch.int64)[1] = BASE + 2
    cluster.step(0)
    cluster.memory.got.region(0, "granted", torch.int64)[1] = BASE + 3
    assert cluster.step(0, most_steps=0)
    assert [cluster.word(d, "landed", 0) for d in (1, 2)] == [6, 2]


def test_nothing_is_said_once_the_phase_has_failed():
    cluster = ring_of_chunks((0, 1, 1), (1, 0, 1))
    cluster.states[0][WIRE.FAILED.value] = 1
    assert not cluster.step(0, most_steps=0)
    assert cluster.word(1, "granted", 0) == 0
    cluster.memory.check()


played = pytest.mark.skipif(ON_GPU, reason="plays the others beside an interpreted kernel")


def play(others, until):
    """Let `others`, which are played, say what they have to until `until` says that all is said."""

    def run():
        while not until():
            others()
            time.sleep(0.001)

    thread = Thread(target=run, daemon=True)
    thread.start()
    return thread


@played
def test_a_sender_that_runs_to_its_end_through_nics_ends_each_chunk_once():
    """As on a GPU: one launch, which sees slots end; receivers that are played grant it chunks."""
    granted_chunks, parts = {1: 3, 2: 2}, 2
    slices = ((0, d, n) for d, n in granted_chunks.items())
    more = {"nic_gbs": 1e-6, "deadline_ms": 60_000}
    cluster = ring_of_chunks(*slices, parts=2 * parts, **more)
    S, memory = cluster.config.shape, cluster.memory.got
    part_words = S.CHUNK * RECORD_WORDS
    cluster.sizes |= {"part_bytes": 4 * part_words}
    state, port = cluster.states[0], KERNELS.port
    state[port.NIC_RATE.value] = 1  # byte a millisecond: a chunk takes longer than a few steps
    state[port.NIC_GPU.value] = 0
    came = []
    given, seen = dict.fromkeys(granted_chunks, 0), dict.fromkeys(granted_chunks, 0)

    def receive():
        for d, n in granted_chunks.items():
            landed, back = cluster.word(d, "landed", 0), cluster.word(d, "back", 0)
            out, left = given[d] - landed // 2 - back // 2, n - given[d] + back // 2
            if back % 2 and left and not out:
                given[d] += 1
                memory.region(0, "granted", torch.int64)[d] = BASE + given[d]
            arrived = memory.region(d, "arrived", torch.int64)[seen[d]]
            if seen[d] < parts * n and arrived == mark(cluster.config, 1, epoch=EPOCH):
                came.append(cluster.records(d, seen[d]))
                seen[d] += 1

    receivers = play(receive, lambda: len(came) == parts * sum(granted_chunks.values()))
    cluster.step(0, most_steps=0)
    receivers.join(10)
    assert failure(state) is None and not receivers.is_alive()
    assert all(torch.equal(*both) for both in came)
    assert cluster.knows(0, "SERVING") == cluster.knows(0, "HELD") == -1
    assert cluster.knows(0, "NEXT_NS") == 0
    for d, n in granted_chunks.items():
        assert cluster.word(d, "landed", 0) == 2 * n
        assert int(cluster.put_words[0][d]) == n * parts * part_words


@played
def test_a_receiver_that_runs_to_its_end_grants_all_and_never_more_than_two_at_once():
    """As on a GPU, a program of its own; senders that are played take a grant or hand it back."""
    chunks, order = {1: 5, 2: 4}, random.Random(0)
    cluster = ring_of_chunks(*((s, 0, n) for s, n in chunks.items()), deadline_ms=60_000)
    memory = cluster.memory.got
    answered, landed = dict.fromkeys(chunks, 0), dict.fromkeys(chunks, 0)
    back, out = dict.fromkeys(chunks, 0), []

    def say(name, sender, value):
        memory.region(0, name, torch.int64)[sender] = BASE + value

    def send():
        for s in chunks:
            if back[s] % 2 == 0 and landed[s] < chunks[s]:  # opens, at first or again
                back[s] += 1
                say("back", s, back[s])
            given = cluster.word(s, "granted", 0)
            open_grants = sum(cluster.word(q, "granted", 0) - answered[q] for q in chunks)
            out.append(open_grants)
            if given == answered[s]:
                continue
            answered[s] += 1
            if order.random() < 0.3:  # busy
                back[s] += 1
                say("back", s, back[s])
            else:
                say("landed", s, 2 * landed[s] + 1)
                time.sleep(0.005)  # of which the receiver may grant one more
                landed[s] += 1
                say("landed", s, 2 * landed[s])

    senders = play(send, lambda: landed == chunks)
    cluster.step(0, most_steps=0)
    senders.join(10)
    assert failure(cluster.states[0]) is None and not senders.is_alive()
    assert torch.equal(cluster.row(0, "LANDED_READ")[1:3], torch.tensor([10, 8]))
    assert max(out) <= granted.OUTSTANDING.value >= cluster.knows(0, "MOST_OUT") >= 1
    given = [cluster.word(s, "granted", 0) for s in chunks]
    assert given == [n + back[s] // 2 for s, n in chunks.items()]
