"""The kernels that move records and rows, against their references: every byte of every PE.

A reference writes to one set of heaps, the kernel to another; then all bytes must agree, so that
a store beside its place shows too. Offsets lie beyond 2**33 in half of the cases.

Letters: N nodes, G GPUs a node, R rails, W = N * G ranks, K top-k, T tokens.
"""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from heaps import (
    DEVICE,
    FAR,
    KERNELS,
    LEAST,
    WIRE,
    Memory,
    failure,
    make_config,
    make_state,
    mark,
    pattern,
    same_bytes,
    seeds,
)
from railwave.kernels.shape import bare_format, make_format

pack, unpack = KERNELS.pack, KERNELS.unpack

EPOCH = 3


@st.composite
def tiles(draw):
    """Draw (tile arguments, chunk): several programs, tiles smaller and larger than the work."""
    chunk = draw(st.sampled_from([LEAST, 2, 4, 64]))
    names = ("block_m", "block_w")
    sizes = {name: draw(st.sampled_from([LEAST, 2, 8, 64])) for name in names}
    return {"programs": draw(st.integers(1, 4)), **sizes}, chunk


@st.composite
def clusters(draw):
    """Draw (config, fmt, tile arguments, memory) of a cluster whose records have any size."""
    draw(seeds)
    N, G, K = draw(st.integers(2, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    rail_of_gpu = draw(st.lists(st.integers(0, 1), min_size=G, max_size=G))
    payload_bytes = draw(st.sampled_from([1, 4, 7, 16, 20, 36]))
    sizes, chunk = draw(tiles())
    config = make_config(
        *(N, G, 2),
        rail_of_gpu=rail_of_gpu,
        top_k=4,
        hidden=36,
        dtype=torch.uint8,
        staging_records=draw(st.integers(1, 5)),
        tiles={"chunk": chunk, "chunks": draw(st.sampled_from([1, 3, 256]))},
    )
    fmt = make_format(payload_bytes, K, G)
    if draw(st.booleans()):  # of a dispatch that repeats another
        fmt = bare_format(payload_bytes, fmt.ENTRIES)
    return config, fmt, sizes, Memory(config, shift=draw(st.sampled_from([0, FAR])))


def draw_round(data, config):
    """Draw one round of either kind of path."""
    return data.draw(st.sampled_from(config.rounds("joint") + config.rounds("native")))


def make_tokens(config, fmt, num_tokens):
    """Make a rank's tokens, of random bits, at odd strides."""
    words = torch.randint(-(2**31), 2**31, (num_tokens, fmt.X_WORDS + 3)).int()[:, : fmt.X_WORDS]
    topk_idx = torch.randint(-1, config.num_experts, (fmt.K, num_tokens)).T
    bits = torch.randint(-(2**31), 2**31, (num_tokens, 2 * fmt.K)).int()
    return pack.Tokens(words, topk_idx, bits.view(torch.float32)[:, ::2])


def make_records(config, num_tokens):
    """Draw which tokens of a rank are records to each node, and the rows of each.

    Returns counts, record_token and row_index, as `count` would; rows are any numbers.
    """
    S = config.shape
    counts = pattern(1 + S.N + S.N * S.G + S.E)
    record_token, row_index = pattern(S.N, S.T), pattern(S.T, S.N * S.G)
    row_index[:num_tokens] = -1
    for d in range(S.N):
        chosen = torch.randperm(num_tokens)[: int(torch.randint(num_tokens + 1, ()))]
        counts[1 + d] = len(chosen)
        record_token[d, : len(chosen)] = chosen.int()
        for t in chosen.tolist():
            # A record has at least one row, at most min(K, G).
            gpus = torch.randperm(S.G)[: int(torch.randint(1, S.G + 1, ()))]
            row_index[t, d * S.G + gpus] = torch.randint(0, S.T, gpus.shape).int()
    return counts, record_token, row_index


def limit_rows(row_index, config, fmt):
    """Keep at most ENTRIES rows of each record."""
    G = config.shape.G
    for part in row_index.split(G, dim=1):
        part[((part >= 0).cumsum(1) > fmt.ENTRIES) & (part >= 0)] = -1


def deal(config, all_counts, node):
    """Deal the node's records to proxies at random: per local GPU, proxy and slot (N, S.T)."""
    S = config.shape
    tables = [(pattern(S.N, S.T), pattern(S.N, S.T)) for _ in range(S.G)]
    for d in range(S.N):
        free = [(g, j) for g in range(S.G) for j in range(S.PROXY_RECORDS)]
        records = [(g, i) for g in range(S.G) for i in range(int(all_counts[g][1 + d]))]
        for (g, i), place in zip(records, torch.randperm(len(free)).tolist(), strict=False):
            tables[g][0][d, i], tables[g][1][d, i] = free[place]
    return tables


# pack and local


def node_batch(config, fmt, num_tokens):
    """Make tokens and records of a node's GPUs."""
    ranks = []
    for _ in range(config.shape.G):
        counts, record_token, row_index = make_records(config, num_tokens)
        limit_rows(row_index, config, fmt)
        ranks.append(
            SimpleNamespace(
                counts=counts,
                record_token=record_token,
                row_index=row_index,
                tokens=make_tokens(config, fmt, num_tokens),
            )
        )
    return ranks


@settings(max_examples=25)
@given(clusters(), st.integers(0, 4), st.integers(0, 2), st.sampled_from([0, 3]), st.data())
def test_pack(cluster, num_tokens, wait_step, tell_step, data):
    config, fmt, sizes, memory = cluster
    S, this = config.shape, draw_round(data, config)
    node = data.draw(st.integers(0, S.N - 1))
    mates = range(node * S.G, (node + 1) * S.G)
    ranks = node_batch(config, fmt, num_tokens)
    tables = deal(config, [rank.counts for rank in ranks], node)
    start = this.buffer * fmt.RECORD_WORDS * 4
    for pe in mates:
        memory.words(pe, "packed")[:] = mark(config, wait_step)
    memory.start()
    send = [
        memory.view(pe, "send", this.num_peers, this.records, fmt.RECORD_WORDS, start=start)
        for pe in mates
    ]
    for me, rank, (proxy, slot) in zip(mates, ranks, tables, strict=True):
        num_records = rank.counts[1 : 1 + S.N]
        records = (num_records, rank.record_token, proxy, slot, rank.row_index, rank.tokens)
        where = {"me": me, "wave": this.wave, "first": this.first}
        pack.pack(
            *(memory.bases, memory.state(), *records),
            send_off=memory.off("send") + start,
            packed_off=memory.off("packed"),
            wait_step=wait_step,
            tell_step=tell_step,
            num_peers=this.num_peers,
            round_records=this.records,
            shape=S,
            fmt=fmt,
            **where,
            **sizes,
        )
        pack.pack_ref(send, *records, shape=S, fmt=fmt, **where)
        for pe in mates if tell_step else ():
            memory.words(pe, "packed")[me % S.G] = mark(config, tell_step)
    memory.check()


def test_pack_example():
    """Of slots 0, 1, 2, 3 of a proxy, the round of slots 2 and 3 holds the last two."""
    config = make_config(2, 2, 2, tiles={"chunk": 2}, staging_records=2)
    fmt, memory, state = make_format(8, 2, 2), Memory(config), make_state()
    S = config.shape
    counts, record_token = pattern(1 + 2 + 4 + 8), torch.arange(4).int().repeat(2, 1)
    counts[1:3] = torch.tensor([0, 4])
    row_index = torch.tensor([[-1, -1, 5, -1]] * 3 + [[-1, -1, 2, 6]]).int()
    words = torch.arange(8).int().view(4, 2)
    tokens = pack.Tokens(words, torch.tensor([[4, 5]] * 4), torch.ones(4, 2))
    memory.start()
    pack.pack(
        *(memory.bases, state, counts[1:3], record_token, torch.ones(2, 4).int()),
        *(torch.arange(4).int().repeat(2, 1), row_index, tokens),
        **{"me": 0, "send_off": memory.off("send"), "packed_off": memory.off("packed")},
        **{"wave": 1, "num_peers": 1, "first": 2, "round_records": 2},
        **{"shape": S, "fmt": fmt, "programs": 1, "block_m": 4, "block_w": 4},
    )
    send = memory.got.region(1, "send", torch.int32)[: 2 * fmt.RECORD_WORDS].view(2, -1)
    one = torch.ones(1).view(torch.int32).item()
    for place, payload, entries in ((0, [4, 5], [10, -1]), (1, [6, 7], [4, 13])):
        record = send[place]
        assert record[:4].tolist() == [*payload, 0, 0]
        assert record[fmt.IDS :][:2].tolist() == [4, 5]
        assert record[fmt.WEIGHTS :][:2].tolist() == [one, one]
        assert record[fmt.META :][:3].tolist() == [0, *entries]


def test_entries_example():
    """G = 4, rows [-1, 5, -1, 0] become entries 21, 3, -1, -1."""
    config = make_config(2, 4, 1)
    fmt = make_format(4, 4, 4)
    want = pack._entries_ref(torch.tensor([-1, 5, -1, 0]), config.shape, fmt)
    assert want.tolist() == [21, 3, -1, -1]
    own_rows = run_local_once(config, fmt, torch.tensor([[-1, 5, -1, 0]]))
    assert own_rows[0].tolist() == [21, 3, -1, -1]


def run_local_once(config, fmt, rows):
    """Run `local` for rank 0, whose token t has the rows given on node 0; return own_rows."""
    S, memory = config.shape, Memory(config)
    row_index = pattern(S.T, S.N * S.G)
    row_index[: len(rows), : S.G] = rows.int()
    row_start, own_rows = torch.zeros(S.N * S.G, S.G).int(), pattern(S.T, fmt.ENTRIES)
    memory.start()
    pack.local(
        *(own_rows, memory.bases, memory.state(), row_index, row_start),
        make_tokens(config, fmt, len(rows)),
        **{"me": 0, "rows_off": memory.off("rows"), "delivered_off": memory.off("delivered")},
        **{"tell": False, "shape": S, "fmt": fmt},
        **{"programs": 1, "block_m": 2, "block_w": 4},
    )
    return own_rows


@settings(max_examples=25)
@given(clusters(), st.integers(0, 4), st.booleans(), st.data())
def test_local(cluster, num_tokens, tell, data):
    config, fmt, sizes, memory = cluster
    S = config.shape
    me = data.draw(st.integers(0, S.N * S.G - 1))
    mates = range(me // S.G * S.G, (me // S.G + 1) * S.G)
    (rank, *_) = node_batch(config, fmt, num_tokens)
    # Two tokens of a rank never share a row.
    own = rank.row_index[:num_tokens, mates[0] : mates[-1] + 1]
    own[own >= 0] = torch.randperm(int((own >= 0).sum())).int()
    row_start = torch.randint(0, 2, (S.N * S.G, S.G)).int()
    own_rows = pattern(S.T, fmt.ENTRIES)
    if not fmt.K:  # where rows went before
        own_rows[:num_tokens] = distinct_entries(config, num_tokens, fmt.ENTRIES)
    want_own_rows = own_rows.clone()
    memory.start()
    rows = [memory.view(pe, "rows", config.max_rows, fmt.META) for pe in mates]
    records = (rank.row_index, row_start, rank.tokens)
    pack.local(
        *(own_rows, memory.bases, memory.state(), *records),
        me=me,
        rows_off=memory.off("rows"),
        delivered_off=memory.off("delivered"),
        tell=tell,
        shape=S,
        fmt=fmt,
        **sizes,
    )
    pack.local_ref(want_own_rows, rows, *records, me=me, shape=S, fmt=fmt)
    for pe in mates if tell else ():
        memory.words(pe, "delivered")[me % S.G] = mark(config, 1)
    memory.check()
    assert torch.equal(own_rows, want_own_rows)


def distinct_entries(config, num_records, num_entries):
    """Draw entries that name no row twice, -1 behind them: (num_records, num_entries)."""
    S = config.shape
    free = torch.randperm(config.max_rows).tolist()
    entries = torch.full((num_records, num_entries), -1, dtype=torch.int32)
    for record in entries:
        gpus = torch.randperm(S.G)[: int(torch.randint(1, num_entries + 1, ()))].sort().values
        named = [free.pop() * S.G + int(g) for g in gpus] if len(free) >= len(gpus) else []
        record[: len(named)] = torch.tensor(named, dtype=torch.int32)
    return entries


# put


def run_put(memory, state, put_words, send_load, *, me, this, record_words, sizes, **options):
    """Run `put` of one round."""
    config = memory.config
    start = this.buffer * record_words * 4
    WIRE.put(
        *(memory.bases, state, put_words, send_load, config.tables.rail_mates(me)),
        **{f"{word}_off": memory.off(word) for word in ("arrived", "grant", "packed", "taken")},
        me=me,
        send_off=memory.off("send") + start,
        recv_off=memory.off("recv") + start,
        wave=this.wave,
        num_peers=this.num_peers,
        first=this.first,
        round_records=this.records,
        record_words=record_words,
        step=this.step,
        shape=config.shape,
        programs=sizes["programs"],
        block_w=sizes["block_w"],
        **{"wait_packed": True, "wait_grant": True, "tell_taken": False, **options},
    )


def random_load(config):
    """Draw (N, G) int32 records, none of them more than a proxy carries."""
    S = config.shape
    return torch.randint(0, S.PROXY_RECORDS + 1, (S.N, S.G)).int()


def records_in(load, local, nodes, this):
    """Return, per peer, (node, records of the round)."""
    return [(n, min(max(int(load[n, local]) - this.first, 0), this.records)) for n in nodes]


def allow_put(memory, me, this):
    """Set every word that a put of this round waits for."""
    memory.words(me, "packed")[:] = mark(memory.config, this.step)
    memory.words(me, "grant")[:] = mark(memory.config, this.step)


@settings(max_examples=25)
@given(clusters(), st.booleans(), st.data())
def test_put(cluster, tell_taken, data):
    config, fmt, sizes, memory = cluster
    S, this, record_words = config.shape, draw_round(data, config), fmt.RECORD_WORDS
    me = data.draw(st.integers(0, S.N * S.G - 1))
    node, local = divmod(me, S.G)
    start = this.buffer * record_words * 4
    block = (this.num_peers, this.records, record_words)
    send = memory.view(me, "send", *block, start=start)
    send[:] = torch.randint(-(2**31), 2**31, block).int()
    allow_put(memory, me, this)
    memory.start()
    send_load, put_words = random_load(config), torch.arange(S.N)
    want_words = put_words.clone()
    run_put(
        *(memory, memory.state(), put_words, send_load),
        **{"me": me, "this": this, "record_words": record_words, "sizes": sizes},
        tell_taken=tell_taken,
    )
    recv = [
        memory.view(d * S.G + local, "recv", *block, start=start).view(block) for d in range(S.N)
    ]
    WIRE.put_ref(
        *(recv, want_words, send, send_load), me=me, wave=this.wave, first=this.first, shape=S
    )
    peers = [(node + this.wave + i) % S.N for i in range(this.num_peers)]
    for d, n in records_in(send_load, local, peers, this):
        arrived = memory.words(d * S.G + local, "arrived").view(S.N, S.CHUNKS)
        arrived[node, : S.num_chunks(n)] = mark(config, this.step)
    if tell_taken:
        for pe in range(node * S.G, (node + 1) * S.G):
            memory.words(pe, "taken")[local] = mark(config, this.step - 1)
    memory.check()
    assert torch.equal(put_words, want_words)


def granted(memory, me, load, wave, first, step):
    """Set, in `want`, what `grant` of PE `me` sets."""
    config, G = memory.config, memory.config.shape.G
    s = (me // G - wave) % config.shape.N
    for g in config.topo.gpus_of_rail[config.topo.rail_of_gpu[me % G]]:
        if load[s, g] > first:
            memory.words(s * G + g, "grant")[me] = mark(config, step)


# unpack and finish


def fill_received(config, fmt, recv, in_rows, *, me, this):
    """Fill receive buffers with records as their proxies put them; return row_start.

    Entries name rows of the node that no other entry names; of records of payload alone they are in
    the table.
    """
    S = config.shape
    recv[:] = torch.randint(-(2**31), 2**31, recv.shape).int()
    nodes = [(me // S.G - this.wave - i) % S.N for i in range(this.num_peers)]
    entries = distinct_entries(config, this.num_peers * this.records, fmt.ENTRIES)
    entries = entries.view(this.num_peers, this.records, -1)
    for records, s, of in zip(recv, nodes, entries, strict=True):
        if fmt.K:
            records[:, fmt.META] = s * S.G + torch.randint(S.G, (this.records,)).int()
            records[:, fmt.META + 1 :][:, : fmt.ENTRIES] = of
        else:
            in_rows[s, this.first : this.first + this.records] = of[: S.PROXY_RECORDS - this.first]
    return torch.zeros(S.N * S.G, S.G).int()


def run_unpack(memory, state, in_rows, load, row_start, *, me, this, fmt, sizes, after=None):
    """Run `unpack` of one round."""
    config, start = memory.config, this.buffer * fmt.RECORD_WORDS * 4
    unpack.unpack(
        *(in_rows, memory.bases, state, load, config.tables.rail_mates(me), row_start),
        **{f"{name}_off": memory.off(name) for name in ("rows", "arrived", "grant", "packed")},
        delivered_off=memory.off("delivered"),
        me=me,
        recv_off=memory.off("recv") + start,
        wave=this.wave,
        num_peers=this.num_peers,
        first=this.first,
        round_records=this.records,
        step=this.step,
        next_round=after,
        shape=config.shape,
        fmt=fmt,
        programs=sizes["programs"],
        block_m=sizes["block_m"],
        block_w=sizes["block_w"],
    )


@settings(max_examples=25)
@given(clusters(), st.booleans(), st.data())
def test_unpack(cluster, has_next, data):
    config, fmt, sizes, memory = cluster
    S, this = config.shape, draw_round(data, config)
    has_next = has_next and this.num_peers == 1  # a round with all peers is the only one
    me = data.draw(st.integers(0, S.N * S.G - 1))
    node = me // S.G
    mates = range(node * S.G, (node + 1) * S.G)
    block = (this.num_peers, this.records, fmt.RECORD_WORDS)
    recv = memory.view(me, "recv", *block, start=this.buffer * fmt.RECORD_WORDS * 4)
    load = random_load(config)
    in_rows = pattern(S.N, S.PROXY_RECORDS, fmt.ENTRIES)
    row_start = fill_received(config, fmt, recv, in_rows, me=me, this=this)
    memory.words(me, "arrived")[:] = mark(config, this.step)
    memory.start()
    want_in_rows = in_rows.clone()
    after = (data.draw(st.integers(1, S.N - 1)), data.draw(st.integers(0, 3)))
    run_unpack(
        *(memory, memory.state(), in_rows, load, row_start),
        **{"me": me, "this": this, "fmt": fmt, "sizes": sizes},
        after=after if has_next else None,
    )
    rows = [memory.view(pe, "rows", config.max_rows, fmt.META) for pe in mates]
    unpack.unpack_ref(
        *(want_in_rows, rows, recv, load, row_start),
        **{"me": me, "wave": this.wave, "first": this.first, "shape": S, "fmt": fmt},
    )
    if has_next:
        for pe in mates:
            memory.words(pe, "packed")[me % S.G] = mark(config, this.step + 1)
        granted(memory, me, load, *after, this.step + 1)
    for pe in mates if not has_next else ():
        memory.words(pe, "delivered")[me % S.G] = mark(config, 1)
    memory.check()
    assert torch.equal(in_rows, want_in_rows)


def test_unpack_example():
    """A record of rank 3 with entries [8, -1], and row_start[3] = [10, 7]: row 14 of GPU 0."""
    config = make_config(2, 2, 2, max_tokens_per_rank=4)
    fmt, memory, S = make_format(4, 2, 2), Memory(config), config.shape
    record = memory.view(0, "recv", fmt.RECORD_WORDS)
    record[:] = torch.arange(fmt.RECORD_WORDS)
    record[fmt.META :][:3] = torch.tensor([3, 8, -1])
    memory.words(0, "arrived")[S.CHUNKS] = mark(config, 1)
    memory.start()
    row_start = torch.tensor([[0, 0], [0, 0], [0, 0], [10, 7]]).int()
    in_rows, load = pattern(2, S.PROXY_RECORDS, 2), torch.tensor([[0, 0], [1, 0]]).int()
    (this,) = config.rounds("native")
    run_unpack(
        *(memory, memory.state(), in_rows, load, row_start),
        **{"me": 0, "this": this, "fmt": fmt, "sizes": {"programs": 2, "block_m": 2, "block_w": 8}},
    )
    memory.view(0, "rows", config.max_rows, fmt.META)[14] = torch.arange(fmt.META)
    for pe in (0, 1):
        memory.words(pe, "delivered")[0] = mark(config, 1)
    memory.check()
    assert in_rows[1, 0].tolist() == [28, -1]


@settings(max_examples=25)
@given(
    *(clusters(), st.integers(0, 9), st.integers(0, 3), st.booleans()),
    *(st.sampled_from([torch.int32, torch.int64]), st.data()),
)
def test_finish(cluster, num_rows, more, copy, ids, data):
    """There is room for `more` rows than came, which have no expert."""
    config, fmt, sizes, memory = cluster
    S, tables = config.shape, config.tables
    me = data.draw(st.integers(0, S.N * S.G - 1))
    num_rows = min(num_rows, config.max_rows)
    rows = memory.view(me, "rows", config.max_rows, fmt.META)
    rows[:] = torch.randint(-(2**31), 2**31, rows.shape).int()
    rows[:, fmt.IDS :][:, : fmt.K] = torch.randint(-1, S.E, (len(rows), fmt.K)).int()
    memory.words(me, "delivered")[:] = mark(config, 1)
    memory.start()
    got, want = (
        (
            pattern(num_rows + more, fmt.X_WORDS),
            pattern(num_rows + more, fmt.K, dtype=ids),
            pattern(num_rows + more, fmt.K, dtype=torch.float32),
        )
        for _ in range(2)
    )
    experts = (tables.expert_rank, tables.expert_pos, tables.expert_start)
    received = torch.randint(0, 99, (1 + S.RANK_EXPERTS,)).int()
    received[0] = num_rows
    counts = pattern(2 + S.RANK_EXPERTS)
    unpack.finish(
        *(*got, counts, memory.bases, memory.state(), received, *experts),
        me=me,
        rows_off=memory.off("rows"),
        delivered_off=memory.off("delivered"),
        copy=copy,
        shape=S,
        fmt=fmt,
        **sizes,
    )
    unpack.finish_ref(*want, rows[:num_rows], *experts, me=me, fmt=fmt)
    if not copy:
        want[0][:] = pattern(*want[0].shape)
    memory.check()
    assert torch.equal(counts[:-1], received) and counts[-1] == pattern(1)
    for a, b in zip(got, want, strict=True):
        assert same_bytes(a, b)


# Failure: a word that never comes


def small_cluster(**sizes):
    """Return (config, fmt, memory) of 3 nodes of 2 GPUs on one rail, two records a round."""
    config = make_config(3, 2, 1, staging_records=2, tiles={"chunk": 1}, **sizes)
    return config, make_format(8, 2, 2), Memory(config)


FULL = torch.full((3, 2), 4, dtype=torch.int32, device=DEVICE)
SIZES = {"programs": 2, "block_m": 2, "block_w": 8}


@pytest.mark.parametrize(
    ("word", "index", "peer"), [("packed", 0, 2), ("grant", 4, 4), ("grant", 5, 5)]
)
def test_put_that_misses_a_word_moves_nothing_and_says_which(word, index, peer):
    config, fmt, memory = small_cluster()
    this = config.rounds("joint")[1]
    allow_put(memory, 3, this)
    memory.words(3, word)[index] = mark(config, this.step) - 1
    memory.start()
    state, put_words = make_state(), torch.zeros(3, dtype=torch.int64)
    where = {"me": 3, "this": this, "record_words": fmt.RECORD_WORDS, "sizes": SIZES}
    run_put(memory, state, put_words, FULL, **where)
    assert failure(state) == (word, peer, mark(config, this.step) - 1, mark(config, this.step))
    assert not put_words.any()
    # The word comes late: the phase has failed all the same, and nothing more moves.
    memory.words(3, word)[index] += 1
    memory.got.region(3, word, torch.int64)[index] += 1
    before = state.clone()
    run_put(memory, state, put_words, FULL, tell_taken=True, **where)
    memory.check()
    assert not put_words.any() and torch.equal(state, before)


def test_the_first_of_several_missing_peers_is_named_with_what_it_wrote():
    config, fmt, memory = small_cluster()
    this = config.rounds("joint")[0]
    value = mark(config, 1)
    allow_put(memory, 0, this)
    memory.words(0, "grant")[2:4] = torch.tensor([value - 7, value - 9])
    memory.start()
    state = make_state()
    run_put(
        *(memory, state, torch.zeros(3, dtype=torch.int64), FULL),
        **{"me": 0, "this": this, "record_words": fmt.RECORD_WORDS, "sizes": SIZES},
    )
    assert failure(state) == ("grant", 2, value - 7, value)
    memory.check()


def test_put_with_nothing_to_send_waits_for_no_grant():
    config, _, memory = small_cluster()
    memory.words(0, "packed")[:] = mark(config, 1)
    memory.start()
    state = make_state()
    run_put(
        *(memory, state, torch.zeros(3, dtype=torch.int64), FULL * 0),
        **{"me": 0, "this": config.rounds("joint")[0], "record_words": 16, "sizes": SIZES},
    )
    assert failure(state) is None
    memory.check()


def test_unpack_that_misses_a_chunk_grants_nothing():
    """Of two chunks the second is missing: nothing is stored, the next round is not granted."""
    config, fmt, memory = small_cluster()
    this, after = config.rounds("joint")[:2]
    value = mark(config, this.step)
    s = config.shape.N - 1
    memory.words(0, "arrived")[s * config.shape.CHUNKS :][:2] = torch.tensor([value, value - 1])
    memory.start()
    state = make_state()
    in_rows = pattern(3, config.shape.PROXY_RECORDS, fmt.ENTRIES)
    run_unpack(
        *(memory, state, in_rows, FULL, torch.zeros(6, 2).int()),
        **{"me": 0, "this": this, "fmt": fmt, "sizes": {"programs": 1, "block_m": 2, "block_w": 8}},
        after=(after.wave, after.first),
    )
    assert failure(state) == ("arrived", s * 2, value - 1, value)
    assert same_bytes(in_rows, pattern(*in_rows.shape))
    for pe in (0, 1):  # said before the wait
        memory.words(pe, "packed")[0] = value + 1
    memory.check()


def test_nothing_is_written_once_the_phase_has_failed():
    """A failed wait, then the rest of the phase: pack, local, put, unpack and finish."""
    config, fmt, memory = small_cluster()
    S, tables = config.shape, config.tables
    for word in WIRE.WORDS[: WIRE.CALL.value]:
        memory.words(0, word)[:] = mark(config, 9)
    memory.start()
    this = config.rounds("joint")[2]
    state, late = make_state(failed=1), make_state(failed=1)
    (rank, *_) = node_batch(config, fmt, 4)
    rank.counts[1 : 1 + S.N] = 4
    rank.record_token[:] = torch.arange(4)
    pack.pack(
        *(memory.bases, state, rank.counts[1 : 1 + S.N], rank.record_token),
        *(torch.zeros(3, 4).int(), torch.arange(4).int().repeat(3, 1)),
        *(rank.row_index, rank.tokens),
        **{"me": 0, "send_off": memory.off("send"), "packed_off": memory.off("packed")},
        **{"wave": 1, "num_peers": 1, "first": 0, "round_records": 2},
        **{"shape": S, "fmt": fmt, "programs": 1, "block_m": 4, "block_w": 4},
    )
    own_rows = pattern(S.T, fmt.ENTRIES)
    pack.local(
        *(own_rows, memory.bases, state, rank.row_index, torch.zeros(6, 2).int()),
        rank.tokens,
        **{"me": 0, "rows_off": memory.off("rows"), "delivered_off": memory.off("delivered")},
        **{"tell": True, "shape": S, "fmt": fmt},
        **{"programs": 1, "block_m": 4, "block_w": 4},
    )
    put_words = torch.zeros(3, dtype=torch.int64)
    for options in ({}, {"wait_packed": False}):
        run_put(
            *(memory, state, put_words, FULL),
            **{"me": 0, "this": this, "record_words": fmt.RECORD_WORDS, "sizes": SIZES},
            tell_taken=True,
            **options,
        )
    in_rows = pattern(3, S.PROXY_RECORDS, fmt.ENTRIES)
    run_unpack(
        *(memory, state, in_rows, FULL, torch.zeros(6, 2).int()),
        **{"me": 0, "this": this, "fmt": fmt, "sizes": SIZES},
        after=(1, 0),
    )
    outs = (pattern(2, 2), pattern(2, 2), pattern(2, 2, dtype=torch.float32))
    unpack.finish(
        *(*outs, pattern(9), memory.bases, state, torch.full((9,), 2).int()),
        *(tables.expert_rank, tables.expert_pos, tables.expert_start),
        **{"me": 0, "rows_off": memory.off("rows"), "delivered_off": memory.off("delivered")},
        **{"shape": S, "fmt": fmt, "programs": 1, "block_m": 4, "block_w": 4},
    )
    memory.check()
    assert torch.equal(state, late) and not put_words.any()
    for out in (own_rows, in_rows, outs[0]):
        assert same_bytes(out, pattern(*out.shape, dtype=out.dtype))
    assert (outs[1] == -1).all() and (outs[2] == 0).all()  # no row came: none has an expert
