"""The kernels that count and plan, against their references: exact, whatever the tile sizes.

Letters: N nodes, G GPUs a node, R rails, W = N * G ranks, E experts, K top-k, T tokens.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from heaps import (
    DEVICE,
    FAR,
    KERNELS,
    PATTERN,
    WIRE,
    Memory,
    failure,
    make_config,
    make_state,
    mark,
    pattern,
    seeds,
)
from railwave.sched import match_ref

count, notify, quota, match = KERNELS.count, KERNELS.notify, KERNELS.quota, KERNELS.match
describe = KERNELS.describe
PlanTables = quota.PlanTables

shifts = st.sampled_from([0, FAR])
powers = st.sampled_from([1, 2, 4, 16, 64])


# count


def run_count(config, topk_idx, *, block_t=4, parts=2, status=0):
    """Run `count` on poisoned outputs and check it; return counts, record_token, row_index.

    A phase that has failed tells nobody.
    """
    S, tables, memory = config.shape, config.tables, Memory(config)
    memory.start()
    counts = pattern(1 + S.N + S.N * S.G + S.E)
    counts[-S.E :] = 0
    record_token, row_index = pattern(S.N, S.T), pattern(S.T, S.N * S.G)
    state = make_state(epoch=6, notifies=4, failed=1)
    count.count(
        *(topk_idx, tables.expert_rank, tables.expert_pos),
        *(counts, record_token, row_index, memory.bases, state, tables.expert_start),
        **{"status": status, "shape": S, "tell": False, **notify_args(memory, 0)},
        **{"block_t": block_t, "parts": parts},
    )
    memory.check()
    want, maps = count.count_ref(topk_idx, tables.expert_rank, tables.expert_pos, shape=S)
    want[0] = status
    assert torch.equal(counts, want)
    T = len(topk_idx)
    assert torch.equal(row_index[:T], maps["row_index"][:T])
    assert (row_index[T:] == PATTERN).all()
    token = maps["record_token"]
    assert torch.equal(record_token, torch.where(token >= 0, token, PATTERN))
    assert torch.equal(state, make_state(epoch=7, notifies=5, failed=1))
    return counts, record_token, row_index


def notify_args(memory, me):
    """Return the arguments of a launcher that tells all ranks."""
    where = {"notify_off": "messages", "word_off": "notify", "outbox_off": "outbox"}
    return {"me": me, **{name: memory.off(region) for name, region in where.items()}}


@st.composite
def routings(draw):
    """Draw (config, topk_idx): ids -1 and repeats, experts on any rank, any strides."""
    N, G = draw(st.integers(1, 5)), draw(st.sampled_from([1, 2, 3, 9]))
    E = draw(st.integers(1, 70) | st.sampled_from([N * G, 2 * N * G]))
    T, K = draw(st.integers(0, 9)), draw(st.integers(1, 4))
    ranks = st.integers(0, N * G - 1)
    expert_to_rank = draw(st.none() | st.lists(ranks, min_size=E, max_size=E))
    ids = draw(st.lists(st.integers(-1, E - 1), min_size=T * K, max_size=T * K))
    topk_idx = torch.tensor(ids, dtype=draw(st.sampled_from([torch.int32, torch.int64])))
    layout = draw(st.sampled_from(["rows", "columns", "apart"]))
    if layout == "columns":
        topk_idx = topk_idx.view(K, T).T
    else:
        topk_idx = topk_idx.view(T, K)
        if layout == "apart":
            topk_idx = topk_idx.repeat_interleave(3, 1)[:, ::3]
    config = make_config(
        *(N, G, 1), num_experts=E, top_k=K, max_tokens_per_rank=9, expert_to_rank=expert_to_rank
    )
    return config, topk_idx


@given(routings(), powers, st.integers(1, 9))
def test_count(case, block_t, parts):
    run_count(*case, block_t=block_t, parts=parts)


@settings(max_examples=20)
@given(routings(), powers, st.integers(1, 9), st.booleans(), st.data())
def test_the_last_program_of_count_tells_all_ranks(case, block_t, parts, wrong, data):
    config, topk_idx = case
    S, tables, memory = config.shape, config.tables, Memory(config)
    me = data.draw(st.integers(0, S.N * S.G - 1))
    wrong = wrong and len(topk_idx) > 0
    if wrong:
        topk_idx = topk_idx.long()
        row = data.draw(st.integers(0, len(topk_idx) - 1))
        topk_idx[row, -1] = data.draw(st.sampled_from([-2, S.E, 2**31 - 1, 2**32]))
    counts = torch.zeros(1 + S.N + S.N * S.G + S.E, dtype=torch.int32)
    maps, state = (pattern(S.N, S.T), pattern(S.T, S.N * S.G)), make_state(epoch=6, notifies=4)
    memory.start()
    count.count(
        *(topk_idx, tables.expert_rank, tables.expert_pos, counts, *maps),
        *(memory.bases, state, tables.expert_start),
        **{"status": 5, "shape": S, "block_t": block_t, "parts": parts},
        **notify_args(memory, me),
    )
    assert torch.equal(state, make_state(epoch=7, notifies=5))
    sane = torch.where((topk_idx < S.E) & (topk_idx >= -1), topk_idx, -1)
    told, _ = count.count_ref(sane, tables.expert_rank, tables.expert_pos, shape=S)
    told[0] = count.WRONG_IDS.value if wrong else 5
    assert not counts[-S.E :].any()  # for the next count
    node, local = divmod(me, S.G)
    for pe in {n * S.G + local for n in range(S.N)} | {node * S.G + g for g in range(S.G)}:
        area = notify.notify_ref([told], tables.expert_start, node=pe // S.G, shape=S)
        memory.view(pe, "messages", 2, S.N * S.G, S.NOTIFY_WORDS)[1, me] = area[0]
        memory.words(pe, "notify")[me] = mark(config, 0, epoch=7)
    memory.check()


def test_count_example():
    config = make_config(2, 1, 1, num_experts=2, top_k=1)
    counts, record_token, row_index = run_count(config, torch.tensor([[0], [1], [0]]))
    assert counts.tolist() == [0, 2, 1, 2, 1, 2, 1]
    assert record_token[0, :2].tolist() == [0, 2] and record_token[1, 0] == 1
    assert row_index[:3].tolist() == [[0, -1], [-1, 0], [1, -1]]


def test_count_of_one_hot_expert_of_nothing_and_of_refused_arguments():
    config = make_config(3, 2, 2, max_tokens_per_rank=300)
    counts, *_ = run_count(config, torch.full((300, 3), 11), block_t=64)
    assert counts[-1] == 900 and counts[1:4].tolist() == [0, 0, 300]
    counts, *_ = run_count(config, torch.full((4, 3), -1))
    assert not counts.any()
    config = make_config(2, 1, 1, num_experts=40, top_k=39)  # more than 15 of a token on one rank
    counts, *_ = run_count(config, torch.arange(40).roll(1)[None, :39])
    assert counts[1:5].tolist() == [1, 1, 1, 1]
    counts, *_ = run_count(config, torch.empty(0, 3, dtype=torch.int32), status=2)
    assert counts[0] == 2 and not counts[1:].any()


# notify and forward


def notify_all(config, memory, states, all_counts, *, block_n, order):
    """Run notify, then forward, of every PE in some order."""
    where = {"notify_off": memory.off("messages"), "word_off": memory.off("notify")}
    for me in order:
        notify.notify(
            *(memory.bases, states[me], all_counts[me], config.tables.expert_start),
            me=me,
            outbox_off=memory.off("outbox"),
            status=int(all_counts[me][0]),
            shape=config.shape,
            **where,
        )
    for me in reversed(order):
        notify.forward(
            memory.bases,
            states[me],
            me=me,
            shape=config.shape,
            programs=2,
            block_n=block_n,
            **where,
        )


@settings(max_examples=20)
@given(seeds, st.integers(1, 5), st.integers(1, 3), st.integers(1, 30), powers, shifts, st.data())
def test_notify_and_forward(_, N, G, E, block_n, shift, data):
    W = N * G
    to_rank = data.draw(st.lists(st.integers(0, W - 1), min_size=E, max_size=E))
    config = make_config(N, G, 1, num_experts=E, expert_to_rank=to_rank)
    memory, S = Memory(config, shift=shift), config.shape
    order = data.draw(st.permutations(range(W)))
    states = [make_state() for _ in range(W)]
    memory.start()
    for number in (4, 5):  # one after the other, each into its own area
        all_counts = [torch.randint(1, 99, (1 + N + W + E,)).int() for _ in range(W)]
        told = [counts.clone() for counts in all_counts]
        for state in states:
            state[WIRE.EPOCH.value] = 2 * number - 1
            state[WIRE.NOTIFIES.value] = number - 1
        notify_all(config, memory, states, all_counts, block_n=block_n, order=order)
        for pe in range(W):
            areas = memory.view(pe, "messages", 2, W, S.NOTIFY_WORDS)
            areas[number % 2] = notify.notify_ref(
                told, config.tables.expert_start, node=pe // G, shape=S
            )
            memory.words(pe, "notify")[:] = mark(config, 0, epoch=2 * number)
            assert torch.equal(all_counts[pe][:-E], told[pe][:-E])
            assert not all_counts[pe][-E:].any()  # for the next count
        memory.check()


def test_forward_without_a_message_passes_nothing_on():
    config = make_config(3, 2, 2)
    memory, state = Memory(config), make_state()
    memory.words(1, "notify")[:] = mark(config, 0)
    memory.words(1, "notify")[5] -= 1  # from node 2, along rail 1
    memory.start()
    notify.forward(
        *(memory.bases, state),
        me=1,
        notify_off=memory.off("messages"),
        word_off=memory.off("notify"),
        shape=config.shape,
        programs=1,
        block_n=4,
    )
    memory.check()
    assert failure(state) == ("notify", 5, mark(config, -1), mark(config, 0))


# quota, match


class Slices:
    """All slices of one node, as messages: records[i, g] of slice i, numbered as in `quota`.

    Args:
        config: of the cluster.
        records: (2N, G) ints; those of the slices (node, node) count nothing.
        node: whose slices.
    """

    def __init__(self, config, records, node, *, shift=0):
        self.config, self.node, self.records = config, node, records
        S = config.shape
        self.memory, self.state = Memory(config, shift=shift), make_state()
        self.messages = torch.zeros(S.N * S.G, S.NOTIFY_WORDS, dtype=torch.int32)
        self.messages[:, 1 + S.N :] = torch.arange(S.NOTIFY_WORDS - 1 - S.N)
        for i in range(2 * S.N):
            s, d = self.ends(i)
            self.messages[s * S.G : (s + 1) * S.G, 1 + d] = records[i]
        for pe in range(node * S.G, (node + 1) * S.G):
            self.memory.view(pe, "messages", 2, S.N * S.G, S.NOTIFY_WORDS)[1] = self.messages
            self.memory.words(pe, "notify")[:] = mark(config, 0)
        self.memory.start()

    def ends(self, i):
        """Return source and destination of slice i."""
        N = self.config.shape.N
        return (self.node, i) if i < N else (i - N, self.node)

    def plan(self, *, balanced, local=0):
        """Run `quota` on poisoned tables."""
        S, tables = self.config.shape, self.config.tables
        out = PlanTables.empty(S, DEVICE)
        for table in vars(out).values():
            table.fill_(PATTERN)
        quota.quota(
            *(self.memory.bases, self.state, tables.rail_of_gpu, tables.rail_gpus),
            *(tables.eligible(self.node), tables.expert_start, out),
            me=self.node * S.G + local,
            notify_off=self.memory.off("messages"),
            word_off=self.memory.off("notify"),
            verdict_off=self.memory.off("verdict"),
            balanced=balanced,
            block_i=4,
            shape=S,
        )
        assert failure(self.state) is None
        want = PlanTables.empty(S, DEVICE)
        me = self.node * S.G + local
        quota.arrivals_ref(self.messages, tables.expert_start, want, me=me, shape=S)
        for name in ("row_start", "received", "num_records"):
            assert torch.equal(getattr(out, name), getattr(want, name)), name
        return out

    def match(self, plan, local, *, block):
        """Run `match` of one PE on poisoned tables; return proxy and slot."""
        S = self.config.shape
        counts = torch.full((1 + S.N + S.N * S.G + S.E,), PATTERN, dtype=torch.int32)
        counts[1 : 1 + S.N] = self.records[: S.N, local]
        proxy, slot = pattern(S.N, S.T), pattern(S.N, S.T)
        put_words = pattern(2, S.N + 1, dtype=torch.int64)
        match.match(
            *(counts, plan, self.config.tables.rail_gpus, proxy, slot, put_words),
            me=self.node * S.G + local,
            record_words=24,
            shape=S,
            block=block,
        )
        assert put_words.tolist() == [[0] * S.N + [24], [0] * (S.N + 1)]
        return proxy, slot

    def quotas(self, *, balanced):
        """Return (2N, R) by the literal references."""
        topo, N = self.config.topo, self.config.shape.N
        rule = quota.quota_ref if balanced else quota.native_quota_ref
        counts = self.rail_records()
        eligible = topo.eligible_rails
        out = rule(counts[:N].T, eligible[self.node], self.node).T
        arriving = []
        for s in range(N):
            alone = torch.zeros(topo.rails_per_node, N, dtype=torch.int64)
            alone[:, self.node] = counts[N + s]
            arriving.append(rule(alone, eligible[s], s)[:, self.node])
        return torch.cat([out, torch.stack(arriving)])

    def rail_records(self):
        """Return (2N, R): the records of each slice by their owners' rails."""
        rails = torch.tensor(self.config.topo.rail_of_gpu)
        counts = torch.zeros(2 * self.config.shape.N, self.config.shape.R, dtype=torch.int64)
        return counts.index_add_(1, rails, self.records)


def check_slice(slices, i, plan, quotas):
    """Check the tables of one slice against Algorithm 1; return its `ProxyMatch`."""
    rail_of_gpu, own = slices.config.topo.rail_of_gpu, slices.records[i].tolist()
    have = slices.rail_records()[i].cpu()
    assert plan.rail_records[i].tolist() == have.tolist()
    assert plan.quota[i].tolist() == quotas.tolist()
    deficit = (quotas - have).clamp(min=0)
    assert plan.deficit_start[i].tolist() == (deficit.cumsum(0) - deficit).tolist()
    want = match.assign_ref(own, rail_of_gpu, quotas)
    stays = [sum(proxy == g for proxy in want.proxy[g]) for g in range(len(own))]
    puts = [sum(row.count(g) for row in want.proxy) for g in range(len(own))]
    assert plan.kept[i].tolist() == stays
    assert plan.load[i].tolist() == puts
    streams = sorted((rail, g, j) for g, rail in enumerate(rail_of_gpu) for j in range(own[g]))
    surplus = [(g, j) for _, g, j in streams if j >= stays[g]]
    for number, (g, j) in enumerate(surplus):
        assert plan.surplus_start[i, g] + j == number
    # The same by rails, in the words of the paper.
    rails = match_ref(have, quotas)
    targets = [rail_of_gpu[want.proxy[g][j]] for _, g, j in streams]
    assert targets == [target for row in rails.target_rail for target in row]
    return want


def check_node(slices, *, balanced, block):
    """Check quota and match of every slice of a node."""
    S, node = slices.config.shape, slices.node
    plan, quotas = slices.plan(balanced=balanced), slices.quotas(balanced=balanced)
    tables = [slices.match(plan, local, block=block) for local in range(S.G)]
    for i in range(2 * S.N):
        s, d = slices.ends(i)
        if s == d:
            for table in (plan.quota, plan.rail_records, plan.kept, plan.load):
                assert not table[i].any()
            continue
        want = check_slice(slices, i, plan, quotas[i])
        if i < S.N:
            for g, (proxy, slot) in enumerate(tables):
                own = int(slices.records[i, g])
                assert tuple(proxy[d, :own].tolist()) == want.proxy[g]
                assert tuple(slot[d, :own].tolist()) == want.slot[g]
                assert (proxy[d, own:] == PATTERN).all() and (slot[d, own:] == PATTERN).all()
    for proxy, slot in tables:
        assert (proxy[node] == PATTERN).all() and (slot[node] == PATTERN).all()
    slices.memory.check()


NODES = 24


@st.composite
def node_slices(draw):
    """Draw the 2 * NODES slices of a node: shared rails, rails without a GPU, some ineligible."""
    G, R, T = draw(st.integers(1, 5)), draw(st.integers(1, 4)), draw(st.sampled_from([1, 3, 9]))
    rail_of_gpu = draw(st.lists(st.integers(0, R - 1), min_size=G, max_size=G))
    node = draw(st.integers(0, NODES - 1))
    bits = draw(st.binary(min_size=NODES, max_size=NODES))
    used = torch.tensor([rail in rail_of_gpu for rail in range(R)])
    eligible = used.expand(NODES, NODES, R).clone()
    for peer, mask in enumerate(bits):
        allowed = used & torch.tensor([not mask >> rail & 1 for rail in range(R)])
        if allowed.any():
            eligible[node, peer] = eligible[peer, node] = allowed
    raw = draw(st.binary(min_size=2 * NODES * G, max_size=2 * NODES * G))
    records = torch.tensor(list(raw)).view(2 * NODES, G) % (T + 1)
    records[[node, NODES + node]] = 0
    config = make_config(
        *(NODES, G, R), rail_of_gpu=rail_of_gpu, eligible=eligible, max_tokens_per_rank=T
    )
    return Slices(config, records, node, shift=draw(shifts))


@settings(max_examples=35)
@given(node_slices(), st.booleans(), st.sampled_from([32, 64, 1024]))
def test_quota_and_match_are_algorithm_1(slices, balanced, block):
    check_node(slices, balanced=balanced, block=block)


@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize(("nodes", "gpus"), [(1, 1), (1, 3), (2, 1), (3, 2), (5, 8)])
def test_quota_and_match_of_few_nodes(nodes, gpus, balanced):
    config = make_config(nodes, gpus, gpus, max_tokens_per_rank=6)
    records = torch.randint(0, 7, (2 * nodes, gpus))
    records[[nodes - 1, 2 * nodes - 1]] = 0
    check_node(Slices(config, records, nodes - 1), balanced=balanced, block=4)


def test_quota_does_not_depend_on_which_pe_of_the_node_computes_it():
    config = make_config(3, 3, 2)
    slices = Slices(config, torch.randint(0, 5, (6, 3)), node=1)
    one, other = (slices.plan(balanced=True, local=local) for local in (0, 2))
    for name in ("quota", "rail_records", "deficit_start", "kept", "surplus_start", "load"):
        assert torch.equal(getattr(one, name), getattr(other, name))


def test_quota_and_match_examples():
    config = make_config(2, 3, 3, max_tokens_per_rank=5)
    records = torch.zeros(4, 3, dtype=torch.int64)
    records[1] = torch.tensor([5, 0, 1])
    slices = Slices(config, records, node=0)
    plan = slices.plan(balanced=True)
    assert plan.quota[1].tolist() == [2, 2, 2]
    assert plan.kept[1].tolist() == [2, 0, 1]
    assert plan.deficit_start[1].tolist() == [0, 0, 2]
    assert plan.load[1].tolist() == [2, 2, 2]
    proxy, slot = slices.match(plan, 0, block=4)
    assert proxy[1].tolist() == [0, 0, 1, 1, 2]
    assert slot[1].tolist() == [0, 1, 0, 1, 1]
    proxy, slot = slices.match(plan, 2, block=4)
    assert (proxy[1, 0], slot[1, 0]) == (2, 0)


def test_a_missing_message_leaves_zeros_in_the_plan():
    """What never came must not become an index of a later kernel of the phase."""
    config = make_config(3, 2, 2)
    slices = Slices(config, torch.randint(1, 5, (6, 2)), node=1)
    memory, state, S = slices.memory, slices.state, config.shape
    memory.got.region(2, "notify", torch.int64)[4] -= 1
    out, tables = PlanTables.empty(S, DEVICE), config.tables
    for table in vars(out).values():
        table.fill_(PATTERN)
    where = {"me": 2, "notify_off": memory.off("messages"), "shape": S}
    quota.quota(
        *(memory.bases, state, tables.rail_of_gpu, tables.rail_gpus, tables.eligible(1)),
        *(tables.expert_start, out),
        **{"word_off": memory.off("notify"), "balanced": True, "block_i": 4, **where},
        verdict_off=memory.off("verdict"),
    )
    assert failure(state) == ("notify", 4, mark(config, -1), mark(config, 0))
    for name, table in vars(out).items():
        assert not table.any(), name
    proxy, slot = slices.match(out, 0, block=8)
    for d in (0, 2):
        own = int(slices.records[d, 0])
        assert proxy[d, :own].tolist() == [0] * own and slot[d, :own].tolist() == list(range(own))


def run_arrivals(config, messages, me, *, shift=0):
    """Run `quota` on poisoned tables; check what it says of rows, to this PE and to all nodes."""
    memory, S, state = Memory(config, shift=shift), config.shape, make_state(notifies=2)
    memory.view(me, "messages", 2, S.N * S.G, S.NOTIFY_WORDS)[0] = messages
    memory.words(me, "notify")[:] = mark(config, 0)
    memory.start()
    got, want = (PlanTables.empty(S, DEVICE) for _ in range(2))
    for table in vars(got).values():
        table.fill_(PATTERN)
    tables = config.tables
    quota.quota(
        *(memory.bases, state, tables.rail_of_gpu, tables.rail_gpus),
        *(tables.eligible(me // S.G), tables.expert_start, got),
        **{"me": me, "notify_off": memory.off("messages"), "word_off": memory.off("notify")},
        **{"verdict_off": memory.off("verdict"), "balanced": True, "block_i": 4, "shape": S},
    )
    quota.arrivals_ref(messages, tables.expert_start, want, me=me, shape=S)
    for name in ("row_start", "received", "num_records"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    assert state[WIRE.ROWS.value] == got.received[0]
    statuses = messages[:, 0].tolist()
    named = KERNELS.verdict.compare_calls_ref(statuses, me=me)
    if named:
        assert failure(state) == ("call", *named, statuses[me])
    elif S.BOUNDED:
        most = messages[:, 1 + S.N :][:, : S.G].sum(dim=0).max()
        for n in range(S.N):
            memory.words(n * S.G + me % S.G, "verdict")[me // S.G] = 3 * 2**32 + most
        assert failure(state) is None
    memory.check()
    return got


@settings(max_examples=25)
@given(
    seeds,
    *(st.integers(1, 5), st.integers(1, 3), st.integers(1, 40), shifts),
    *(st.sampled_from([[7], [7], [7, 7, 8], [7, -1], [7, 8, -1], [-1]]), st.booleans(), st.data()),
)
def test_arrivals(_, N, G, E, shift, statuses, bounded, data):
    to_rank = data.draw(st.lists(st.integers(0, N * G - 1), min_size=E, max_size=E))
    rows = {"max_recv_rows": 1} if bounded else {}
    config = make_config(N, G, 1, num_experts=E, expert_to_rank=to_rank, **rows)
    messages = torch.randint(0, 1000, (N * G, config.shape.NOTIFY_WORDS)).int()
    messages[:, 1 : 1 + N] = torch.randint(0, config.shape.T + 1, (N * G, N)).int()
    messages[:, 0] = torch.tensor([data.draw(st.sampled_from(statuses)) for _ in range(N * G)])
    run_arrivals(config, messages, data.draw(st.integers(0, N * G - 1)), shift=shift)


def test_arrivals_example():
    config = make_config(3, 1, 1, num_experts=3)
    messages = torch.tensor([[0, 4, 0, 1, rows, rows] for rows in (2, 0, 5)]).int()
    plan = run_arrivals(config, messages, me=1)
    assert plan.row_start[:, 0].tolist() == [0, 2, 2]
    assert plan.received.tolist() == [7, 7] and plan.num_records.tolist() == [4, 0, 1]


@pytest.mark.parametrize("rows", [[5, 0, 4], [6, 5, 7], [6, 6, 0], [5, -1, 4]])
def test_verdict(rows):
    """Three nodes say the most rows of their ranks, 5 fit; -1: one does not say any."""
    config = make_config(3, 2, 1, max_recv_rows=5)
    memory, state, flag = Memory(config), make_state(), torch.zeros(1, dtype=torch.int64)
    state[WIRE.HOST_FLAG.value] = flag.data_ptr()
    for node, most in enumerate(rows):
        memory.words(1, "verdict")[node] = 3 * 2**32 + most
    memory.start()
    KERNELS.verdict.verdict(
        *(memory.bases, state), me=1, verdict_off=memory.off("verdict"), shape=config.shape
    )
    memory.check()
    want = None
    if -1 in rows:
        want = ("verdict", 3, 3 * 2**32 - 1, 3 * 2**32)
    elif named := KERNELS.verdict.verdict_ref(rows, max_rows=5):
        want = ("overflow", 2 * named[0] + 1, named[1], 5)
    assert failure(state) == want
    assert state[WIRE.FAILED_EPOCH.value] == (3 if want else 0)
    assert flag.item() == bool(want)


# describe


def run_describe(config, records, windows, record_bytes):
    """Check `describe` against the host's functions; return the three numbers."""
    memory, state, S, tables = Memory(config), make_state(), config.shape, config.tables
    areas = memory.view(0, "messages", 2, S.N * S.G, S.NOTIFY_WORDS)
    areas[3 % 2, :, 1 : 1 + S.N] = records
    memory.words(0, "notify")[:] = mark(config, 0)
    memory.start()
    out = pattern(3, dtype=torch.float64)
    size = {"record_bytes": record_bytes, "shape": S}
    describe.describe(
        *(out, memory.bases, state, windows, tables.rail_gpus),
        **{"me": 0, "notify_off": memory.off("messages"), "word_off": memory.off("notify")},
        **size,
    )
    want = describe.describe_ref(records, windows, tables.rail_of_gpu, **size)
    assert out.tolist() == want
    assert failure(state) is None
    memory.check()
    return want


@settings(max_examples=25)
@given(
    seeds,
    *(st.integers(1, 5), st.sampled_from([1, 2, 3, 8]), st.integers(1, 4), st.integers(0, 3)),
    *(st.sampled_from([0, 2, 4096]), st.data()),
)
def test_describe_is_what_the_host_computes(_, N, G, R, num_windows, most, data):
    rails = data.draw(st.lists(st.integers(0, R - 1), min_size=G, max_size=G))
    config = make_config(N, G, R, rail_of_gpu=rails, max_tokens_per_rank=9)
    records = torch.randint(0, most + 1, (N * G, N)).int()
    windows = torch.randint(0, 2, (num_windows, N, N)).to(torch.int8)
    windows[:, torch.arange(N), torch.arange(N)] = 0
    run_describe(config, records, windows, data.draw(st.sampled_from([1, 14448])))


def test_describe_example():
    config = make_config(2, 2, 2)
    records = torch.tensor([[99, 6], [0, 0], [1, 0], [1, 99]]).int()
    both = 1 - torch.eye(2).to(torch.int8)
    assert run_describe(config, records, both[None], 10) == [20.0, 3.0, 1.5]
    waves = torch.tensor([[[0, 1], [0, 0]], [[0, 0], [1, 0]]]).to(torch.int8)
    assert run_describe(config, records, waves, 10) == [20.0, 3.0, 2.0]
    assert run_describe(config, records * 0, both[None], 10) == [0.0, 1.0, 1.0]
