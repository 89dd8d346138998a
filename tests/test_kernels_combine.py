"""The kernels that bring results back, against their references: every bit, in a fixed order.

Letters: N nodes, G GPUs a node, W = N * G ranks, T tokens, H hidden.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from heaps import (
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
from railwave.kernels.shape import padded

# numpy warns where the interpreter makes an infinite float16 or adds infinities of both signs.
pytestmark = pytest.mark.filterwarnings(
    "ignore:(overflow|invalid value) encountered:RuntimeWarning"
)

combine, reduce = KERNELS.combine, KERNELS.reduce
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@st.composite
def clusters(draw):
    """Draw (config, dtype, hidden, tile arguments, memory)."""
    draw(seeds)
    N, G = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    rail_of_gpu = draw(st.lists(st.integers(0, 1), min_size=G, max_size=G))
    config = make_config(
        *(N, G, 2),
        rail_of_gpu=rail_of_gpu,
        top_k=draw(st.integers(1, 4)),
        hidden=9,
        dtype=torch.float32,
        staging_records=draw(st.integers(1, 5)),
        tiles={
            "chunk": draw(st.sampled_from([1, 4, 64])),
            "chunks": draw(st.sampled_from([1, 3, 256])),
        },
    )
    sizes = {
        "programs": draw(st.integers(1, 3)),
        "block_m": draw(st.sampled_from([LEAST, 2, 8])),
        "block_h": draw(st.sampled_from([LEAST, 4, 16])),
    }
    memory = Memory(config, shift=draw(st.sampled_from([0, FAR])))
    return config, draw(st.sampled_from(DTYPES)), draw(st.sampled_from([1, 7, 8, 9])), sizes, memory


def row_bytes_of(hidden, dtype):
    """Return the bytes from one row to the next, in the region and on the wire."""
    return 4 * padded(-(-hidden * dtype.itemsize // 4))


def values(*shape, dtype):
    """Return sums' worst company: 28 binades, signed zeros, infinities, NaN, huge and tiny."""
    x = torch.randn(shape) * 2.0 ** torch.randint(-14, 14, shape)
    special = torch.tensor(
        [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 3e38, 65504.0, 6e-8, 1e-40]
    )
    pick = torch.randint(0, 60, shape)
    return torch.where(pick < len(special), special[pick.clamp(max=len(special) - 1)], x).to(dtype)


def rows_of(memory, pe, hidden, dtype):
    """Return a PE's rows region, (slots, H), of `want`."""
    width = row_bytes_of(hidden, dtype) // dtype.itemsize
    return memory.view(pe, "rows", memory.config.max_rows, width, dtype=dtype)[:, :hidden]


def fill_rows(memory, pes, hidden, dtype):
    """Fill the rows regions of PEs; return them."""
    rows = [rows_of(memory, pe, hidden, dtype) for pe in pes]
    for part in rows:
        part[:] = values(*part.shape, dtype=dtype)
    return rows


def random_entries(config, num_records):
    """Draw entries of records, ascending by GPU, -1 behind them: (num_records, ENTRIES)."""
    S = config.shape
    num_entries = min(config.top_k, S.G)
    entries = torch.full((num_records, num_entries), -1, dtype=torch.int32)
    for record in entries:
        gpus = torch.randperm(S.G)[: int(torch.randint(1, num_entries + 1, ()))].sort().values
        rows = torch.randint(0, config.max_rows, gpus.shape)
        record[: len(gpus)] = (rows * S.G + gpus).int()
    return entries


def round_block(memory, pe, name, this, hidden, dtype, *, start=0):
    """Return a staging region as (peers, round_records, H), of `want`."""
    size = row_bytes_of(hidden, dtype)
    shape = (this.num_peers, this.records, size // dtype.itemsize)
    return memory.view(pe, name, *shape, dtype=dtype, start=start)[..., :hidden]


def granted(memory, me, load, wave):
    """Set, in `want`, what granting the first round of a wave sets."""
    config, G = memory.config, memory.config.shape.G
    s = (me // G - wave) % config.shape.N
    for g in config.topo.gpus_of_rail[config.topo.rail_of_gpu[me % G]]:
        if load[s, g] > 0:
            memory.words(s * G + g, "grant")[me] = mark(config, 1, epoch=7)


def told(memory, me, counts):
    """Set, in `want`, what telling these counts to all ranks sets."""
    S, (node, local) = memory.config.shape, divmod(me, memory.config.shape.G)
    for pe in {n * S.G + local for n in range(S.N)} | {node * S.G + g for g in range(S.G)}:
        starts = memory.config.tables.expert_start
        area = KERNELS.notify.notify_ref([counts], starts, node=pe // S.G, shape=S)
        memory.view(pe, "messages", 2, S.N * S.G, S.NOTIFY_WORDS)[1, me] = area[0]
        memory.words(pe, "notify")[me] = mark(memory.config, 0, epoch=7)


@settings(max_examples=25)
@given(clusters(), st.integers(0, 9), st.integers(0, 3), st.none() | st.just(5), st.data())
def test_copy_in(cluster, num_rows, more, status, data):
    """There are `more` rows than came: they are not copied."""
    config, dtype, hidden, sizes, memory = cluster
    S, tables = config.shape, config.tables
    me, waves = data.draw(st.integers(0, S.N * S.G - 1)), data.draw(st.integers(0, S.N - 1))
    row_words = row_bytes_of(hidden, dtype) // 4
    num_rows = min(num_rows, config.max_rows)
    words = torch.randint(-(2**31), 2**31, (num_rows + more, row_words + 3)).int()
    words = words[:, : data.draw(st.integers(1, row_words))]
    load = torch.randint(0, S.PROXY_RECORDS + 1, (S.N, S.G)).int()
    counts = torch.randint(0, 99, (1 + S.N + S.N * S.G + S.E,)).int()
    want_counts, words_off = counts.clone(), {}
    for name, region in {"notify": "messages", "word": "notify", "outbox": "outbox"}.items():
        words_off[f"{name}_off"] = memory.off(region)
    memory.start()
    state, put_words = make_state(epoch=6, notifies=4), pattern(S.N + 2, dtype=torch.int64)
    reduce.copy_in(
        *(memory.bases, state, words, torch.tensor([num_rows]).int(), load),
        *(tables.rail_mates(me), counts, tables.expert_start, put_words),
        **{f"{name}_off": memory.off(name) for name in ("rows", "rows_in", "grant")},
        **{"me": me, "row_words": row_words, "most_rows": len(words), **words_off},
        **{"grant_waves": waves, "status": status, "sum_words": 12},
        **{"shape": S, "programs": sizes["programs"]},
        **{"block_m": sizes["block_m"], "block_w": sizes["block_h"]},
    )
    reduce.copy_in_ref(memory.view(me, "rows", config.max_rows, row_words), words[:num_rows])
    for pe in range(me // S.G * S.G, (me // S.G + 1) * S.G):
        memory.words(pe, "rows_in")[me % S.G] = mark(config, 1, epoch=7)
    for wave in range(1, waves + 1):
        granted(memory, me, load, wave)
    if status is not None:
        want_counts[0] = status
        told(memory, me, want_counts)
        want_counts[-S.E :] = 0
    memory.check()
    assert torch.equal(counts, want_counts)
    assert put_words[:-1].tolist() == [0] * S.N + [12]
    assert same_bytes(put_words[-1:], pattern(1, dtype=torch.int64))
    assert torch.equal(state, make_state(epoch=7, notifies=4 + (status is not None)))


@settings(max_examples=25)
@given(clusters(), st.integers(0, 4), st.booleans(), st.data())
def test_own(cluster, num_tokens, tell, data):
    config, dtype, hidden, sizes, memory = cluster
    S = config.shape
    me = data.draw(st.integers(0, config.topo.num_ranks - 1))
    node = me // S.G
    mates = range(node * S.G, (node + 1) * S.G)
    rows = fill_rows(memory, mates, hidden, dtype)
    memory.words(me, "rows_in")[:] = mark(config, 1)
    memory.start()
    own_rows = pattern(S.T, min(config.top_k, S.G))
    own_rows[:num_tokens] = random_entries(config, num_tokens)
    own_rows[: num_tokens // 2] = -1  # tokens without a row on the node
    got, want = (pattern(num_tokens, hidden, dtype=torch.float32) for _ in range(2))
    reduce.own(
        *(got, memory.bases, memory.state(), own_rows),
        **{f"{name}_off": memory.off(name) for name in ("rows", "rows_in", "rows_read")},
        **{"me": me, "tell": tell},
        **{"row_bytes": row_bytes_of(hidden, dtype), "dtype": dtype, "shape": S, **sizes},
    )
    reduce.own_ref(want, rows, own_rows)
    for pe in mates if tell else ():
        memory.words(pe, "rows_read")[me % S.G] = mark(config, 1)
    memory.check()
    assert same_sums(got, want)


@pytest.mark.parametrize(
    ("rows", "total"),
    [([2.0**24, 1, -(2.0**24)], 0), ([-(2.0**24), 2.0**24, 1], 1), ([-0.0, -0.0, -0.0], 0.0)],
)
def test_rows_are_added_by_ascending_gpu_from_plus_zero(rows, total):
    """2**24 + 1 is 2**24 in float32, so any other order gives another sum; -0.0 + 0.0 is 0.0."""
    config = make_config(2, 3, 3, hidden=1, dtype=torch.float32)
    memory, S = Memory(config), config.shape
    for pe, value in enumerate(rows):
        rows_of(memory, pe, 1, torch.float32)[0] = value
    memory.words(0, "rows_in")[:] = mark(config, 1)
    memory.start()
    entries = torch.arange(3).int()
    sizes = {"me": 0, "rows_off": memory.off("rows"), "row_bytes": 16, "dtype": torch.float32}
    sizes |= {"shape": S, "programs": 1, "block_m": 2, "block_h": 2}
    acc = pattern(1, 1, dtype=torch.float32)
    reduce.own(
        *(acc, memory.bases, memory.state(), entries.expand(4, 3).contiguous()),
        **{"rows_in_off": memory.off("rows_in"), "rows_read_off": 0, "tell": False, **sizes},
    )
    want = torch.tensor([[total]], dtype=torch.float32)
    assert same_bytes(acc, want)
    reduce.reduce(
        *(memory.bases, memory.state(), entries.expand(2, S.PROXY_RECORDS, 3).contiguous()),
        torch.tensor([[0, 0, 0], [1, 0, 0]]).int(),
        **{"send_off": memory.off("send"), "wave": 1, "num_peers": 1, "first": 0, "hidden": 1},
        **{"round_records": 4, "record_words": 4, "wire_dtype": torch.float32, **sizes},
    )
    memory.view(0, "send", 1, dtype=torch.float32)[:] = total
    memory.check()


def same_sums(a, b):
    """Tell whether float32 sums agree in every bit; which NaN an addition makes is not fixed."""
    return same_bytes(a.nan_to_num(nan=0.5), b.nan_to_num(nan=0.5)) and torch.equal(
        a.isnan(), b.isnan()
    )


def draw_round(data, config):
    """Draw one round of either kind of path."""
    return data.draw(st.sampled_from(config.rounds("joint") + config.rounds("native")))


def with_peers(cluster):
    """Tell whether there is anyone to return to."""
    return cluster[0].topo.nodes > 1


def unify_nan(memory, pes, name, dtype):
    """Make every NaN of a region the same one, in `got` and `want`."""
    for heap in (memory.got, memory.want):
        for pe in pes:
            region = heap.region(pe, name, dtype)
            region[region.isnan()] = torch.nan


@settings(max_examples=25)
@given(clusters().filter(with_peers), st.sampled_from(DTYPES), st.booleans(), st.data())
def test_reduce(cluster, wire_dtype, wait, data):
    config, dtype, hidden, sizes, memory = cluster
    S, this = config.shape, draw_round(data, config)
    me = data.draw(st.integers(0, config.topo.num_ranks - 1))
    rows = fill_rows(memory, range(me // S.G * S.G, (me // S.G + 1) * S.G), hidden, dtype)
    memory.words(me, "rows_in")[:] = mark(config, int(wait))
    memory.start()
    in_load = torch.randint(0, S.PROXY_RECORDS + 1, (S.N, S.G)).int()
    in_rows = random_entries(config, S.N * S.PROXY_RECORDS).view(S.N, S.PROXY_RECORDS, -1)
    size = row_bytes_of(hidden, wire_dtype)
    where = {"me": me, "wave": this.wave, "first": this.first, "shape": S}
    reduce.reduce(
        *(memory.bases, memory.state(), in_rows, in_load),
        **{"rows_off": memory.off("rows"), "row_bytes": row_bytes_of(hidden, dtype)},
        **{"send_off": memory.off("send") + this.buffer * size, "record_words": size // 4},
        **{"num_peers": this.num_peers, "round_records": this.records, "hidden": hidden},
        **{"rows_in_off": memory.off("rows_in"), "wait": wait},
        **{"dtype": dtype, "wire_dtype": wire_dtype, **where, **sizes},
    )
    send = round_block(memory, me, "send", this, hidden, wire_dtype, start=this.buffer * size)
    reduce.reduce_ref(send, rows, in_rows, in_load, **where)
    if wire_dtype != torch.bfloat16:  # whose NaN is fixed
        unify_nan(memory, [me], "send", wire_dtype)
    memory.check()


def test_reduce_rounds_a_tie_to_even():
    """Rows 1.0 and 2**-9 in bfloat16: 1.001953125 rounds to 1.0."""
    config = make_config(2, 2, 2, hidden=1, top_k=2)
    memory, S = Memory(config), config.shape
    for pe, value in ((0, 1.0), (1, 2.0**-9)):
        rows_of(memory, pe, 1, torch.bfloat16)[0] = value
    memory.start()
    in_rows = torch.tensor([0, 1]).int().expand(2, S.PROXY_RECORDS, 2).contiguous()
    reduce.reduce(
        *(memory.bases, memory.state(), in_rows, torch.tensor([[0, 0], [1, 0]]).int()),
        **{"me": 0, "rows_off": memory.off("rows"), "row_bytes": 16, "wave": 1, "num_peers": 1},
        **{"send_off": memory.off("send"), "first": 0, "round_records": S.PROXY_RECORDS},
        **{"record_words": 4, "hidden": 1, "dtype": torch.bfloat16, "shape": S},
        **{"wire_dtype": torch.bfloat16, "programs": 1, "block_m": 2, "block_h": 2},
    )
    memory.view(0, "send", 1, dtype=torch.bfloat16)[0] = 1.0
    memory.check()


@settings(max_examples=25)
@given(clusters().filter(with_peers), st.data())
def test_take(cluster, data):
    config, dtype, hidden, sizes, memory = cluster
    S, this = config.shape, draw_round(data, config)
    me = data.draw(st.integers(0, config.topo.num_ranks - 1))
    mates = range(me // S.G * S.G, (me // S.G + 1) * S.G)
    size = row_bytes_of(hidden, dtype)
    start = this.buffer * size
    recv = [round_block(memory, pe, "recv", this, hidden, dtype, start=start) for pe in mates]
    for part in recv:
        part[:] = values(*part.shape, dtype=dtype)
    memory.words(me, "returned")[:] = mark(config, this.step)
    memory.start()
    num_records = torch.randint(0, S.T + 1, (S.N,)).int()
    record_token = torch.full((S.N, S.T), -1).int()
    for d, n in enumerate(num_records.tolist()):
        record_token[d, :n] = torch.randperm(S.T)[:n].sort().values.int()
    proxy = torch.randint(0, S.G, (S.N, S.T)).int()
    slot = torch.randint(0, S.PROXY_RECORDS, (S.N, S.T)).int()
    got = values(S.T, hidden, dtype=torch.float32)
    want = got.clone()
    records = (num_records, record_token, proxy, slot)
    where = {"me": me, "wave": this.wave, "first": this.first, "shape": S}
    tell = data.draw(st.booleans())
    combine.take(
        *(got, memory.bases, memory.state(), *records),
        **{"recv_off": memory.off("recv") + start, "returned_off": memory.off("returned")},
        **{"rows_read_off": memory.off("rows_read"), "tell": tell, "num_peers": this.num_peers},
        **{"round_records": this.records, "record_words": size // 4, "step": this.step},
        **{"wire_dtype": dtype, **where, **sizes},
    )
    combine.take_ref(want, recv, *records, **where)
    for pe in mates if tell else ():
        memory.words(pe, "rows_read")[me % S.G] = mark(config, 1)
    memory.check()
    assert same_sums(got, want)


def run_final(acc, dtype, *, bias=(), programs=1, block_m=4, block_h=4096, shift=0):
    """Run `final` on poisoned output of one PE."""
    config = make_config(1, 1, 1)
    memory = Memory(config, shift=shift)
    memory.words(0, "rows_read")[:] = mark(config, 1)
    memory.start()
    y = pattern(acc.numel() + 16, dtype=dtype)  # with a guard behind it
    combine.final(
        *(y[: acc.numel()].view(acc.shape), acc, bias, memory.bases, memory.state()),
        **{"me": 0, "rows_read_off": memory.off("rows_read"), "shape": config.shape},
        **{"programs": programs, "block_m": block_m, "block_h": block_h},
    )
    memory.check()
    assert same_bytes(y[acc.numel() :], pattern(16, dtype=dtype))
    return y[: acc.numel()].view(acc.shape)


@settings(max_examples=30)
@given(
    *(seeds, st.integers(0, 5), st.integers(1, 9), st.integers(0, 2), st.data()),
)
def test_final(_, tokens, hidden, num_biases, data):
    sizes = {
        "programs": data.draw(st.integers(1, 3)),
        "block_m": data.draw(st.sampled_from([2, 8])),
    }
    sizes["block_h"] = data.draw(st.sampled_from([LEAST, 4, 64]))
    acc = values(tokens, hidden, dtype=torch.float32)
    kinds = [
        data.draw(st.tuples(st.sampled_from(DTYPES), st.booleans())) for _ in range(num_biases)
    ]
    # Of every token, at odd strides; or one for all.
    bias = tuple(
        values(1, hidden, dtype=kind).expand(tokens, -1)
        if one_for_all
        else values(hidden, 2 * tokens, dtype=kind)[:, ::2].T
        for kind, one_for_all in kinds
    )
    for dtype in DTYPES:
        want = torch.empty(tokens, hidden, dtype=dtype)
        combine.final_ref(want, acc, bias)
        got = run_final(acc, dtype, bias=bias, shift=FAR, **sizes)
        assert torch.equal(got.isnan(), want.isnan())
        assert same_bytes(got.nan_to_num(nan=0.5), want.nan_to_num(nan=0.5))


def all_upper_halves(*lower):
    """Return float32 values of all 65,536 upper halves, with each of the lower halves."""
    upper = torch.arange(2**16, dtype=torch.int64)[:, None] << 16
    bits = upper | torch.tensor(lower, dtype=torch.int64)
    return torch.where(bits >= 2**31, bits - 2**32, bits).int().view(torch.float32)


def test_case_n2_bfloat16_is_rounded_as_by_torch():
    """Ties to even and odd, one above and below them, exact, subnormal, overflow, inf, NaN."""
    acc = all_upper_halves(0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF)
    y = run_final(acc, torch.bfloat16, block_m=2**16, block_h=8)
    nan = acc.isnan()
    assert same_bytes(y[~nan], acc.bfloat16()[~nan])
    assert (y[nan].view(torch.int16) == 0x7FC0).all()
    assert nan.sum() == 2 * (127 * 6 + 5)


def test_float16_is_rounded_as_by_numpy():
    """Upper halves cover sign, exponent and 7 bits; fp16 keeps 3 more: its ties are at 0x1000."""
    acc = all_upper_halves(0x0000, 0x0FFF, 0x1000, 0x1001, 0x3000, 0xFFFF)
    y = run_final(acc, torch.float16, block_m=2**16, block_h=8)
    with np.errstate(over="ignore"):
        want = torch.from_numpy(acc.cpu().numpy().astype(np.float16)).to(acc.device)
    nan = acc.isnan()
    assert same_bytes(y[~nan], want[~nan]) and same_bytes(y[~nan], acc.half()[~nan])
    assert y[nan].isnan().all()


def test_float32_is_copied():
    acc = all_upper_halves(0x0000, 0xFFFF)
    assert same_bytes(run_final(acc, torch.float32, block_m=2**16, block_h=8), acc)


def test_case_c5_rounding_errors_of_a_sum_do_not_grow():
    """Case C5: 8 rows of one token: bfloat16 sums would lose 2**-8 each time."""
    config = make_config(1, 8, 8, hidden=1, top_k=8)
    memory = Memory(config)
    for pe in range(8):
        rows_of(memory, pe, 1, torch.bfloat16)[0] = 1.0 if pe == 0 else 2.0**-9
    memory.words(0, "rows_in")[:] = mark(config, 1)
    memory.start()
    acc = torch.zeros(1, 1)
    reduce.own(
        *(acc, memory.bases, memory.state(), torch.arange(8).int().expand(4, 8).contiguous()),
        **{"me": 0, "rows_off": memory.off("rows"), "rows_in_off": memory.off("rows_in")},
        **{"rows_read_off": memory.off("rows_read"), "tell": False},
        **{"row_bytes": 16, "dtype": torch.bfloat16, "shape": config.shape},
        **{"programs": 1, "block_m": 2, "block_h": 2},
    )
    assert acc.item() == 1 + 7 * 2.0**-9


# return: words only


@settings(max_examples=25)
@given(clusters().filter(with_peers), st.booleans(), st.data())
def test_give_back(cluster, has_next, data):
    config, _, _, _, memory = cluster
    S, this = config.shape, draw_round(data, config)
    me = data.draw(st.integers(0, config.topo.num_ranks - 1))
    node, local = divmod(me, S.G)
    load = torch.randint(0, S.PROXY_RECORDS + 1, (S.N, S.G)).int()
    for i in range(this.num_peers):  # only what must be there is there
        d = (node - this.wave - i) % S.N
        n = min(max(int(load[d, local]) - this.first, 0), this.records)
        arrived = memory.words(me, "arrived").view(S.N, S.CHUNKS)
        arrived[d, : S.num_chunks(n)] = mark(config, this.step)
    if this.step > 1:
        memory.words(me, "taken")[:] = mark(config, this.step - 1)
    memory.start()
    state, after = make_state(), (data.draw(st.integers(1, S.N - 1)), data.draw(st.integers(0, 3)))
    give_back(memory, state, load, me=me, this=this, after=after if has_next else None)
    assert failure(state) is None
    if has_next:
        s = (node - after[0]) % S.N
        for g in config.topo.gpus_of_rail[config.topo.rail_of_gpu[local]]:
            if load[s, g] > after[1]:
                memory.words(s * S.G + g, "grant")[me] = mark(config, this.step + 1)
    for pe in range(node * S.G, (node + 1) * S.G):
        memory.words(pe, "returned")[local] = mark(config, this.step)
    memory.check()


def give_back(memory, state, load, *, me, this, after):
    """Run `give_back` of one round."""
    words = ("arrived", "grant", "taken", "returned")
    combine.give_back(
        *(memory.bases, state, load, memory.config.tables.rail_mates(me)),
        **{f"{word}_off": memory.off(word) for word in words},
        **{"me": me, "wave": this.wave, "num_peers": this.num_peers, "first": this.first},
        **{"round_records": this.records, "step": this.step, "next_round": after},
        shape=memory.config.shape,
    )


@pytest.mark.parametrize("word", ["arrived", "taken"])
def test_give_back_that_misses_a_word_says_nothing(word):
    config = make_config(3, 2, 1, staging_records=2)
    memory, S, this = Memory(config), config.shape, config.rounds("joint")[1]
    value = mark(config, this.step)
    memory.words(0, "arrived")[:] = value
    memory.words(0, "taken")[:] = value - 1
    s, index = {"arrived": (4, 2 * S.CHUNKS), "taken": (1, 1)}[word]
    memory.words(0, word)[index] -= 3
    memory.start()
    state, seen = make_state(), int(memory.words(0, word)[index])
    load = torch.full((3, 2), 4).int()
    give_back(memory, state, load, me=0, this=this, after=(1, 0))
    assert failure(state) == (word, s, seen, seen + 3)
    memory.check()


@pytest.mark.parametrize("waits", ["own", "reduce"])
def test_nothing_is_written_once_the_phase_has_failed(waits):
    """A missing word at the start; then own, reduce, take and final leave all as it was."""
    config = make_config(2, 2, 2, dtype=torch.float32)
    memory, S = Memory(config), config.shape
    for word in set(WIRE.WORDS[: WIRE.CALL.value]) - {"rows_in"}:
        memory.words(0, word)[:] = mark(config, 9)
    memory.words(0, "rows_in")[:] = torch.tensor([mark(config, 1), 5])
    memory.start()
    state, acc, y = make_state(), pattern(4, 5, dtype=torch.float32), pattern(4, 5)
    tables = (torch.full((2,), 4).int(), torch.arange(4).int().repeat(2, 1))
    entries = random_entries(config, 4)
    sizes = {"shape": S, "programs": 2, "block_m": 2}
    rows = {"rows_off": memory.off("rows"), "row_bytes": 32, "dtype": torch.float32, "block_h": 8}
    told = {"rows_read_off": memory.off("rows_read"), "tell": True}
    wire = {"wave": 1, "first": 0, "round_records": 4, "record_words": 8}
    wire |= {"wire_dtype": torch.float32}

    def run_own():
        reduce.own(
            *(acc, memory.bases, state, entries),
            **{"me": 0, "rows_in_off": memory.off("rows_in"), **rows, **told, **sizes},
        )

    def run_reduce(wait):
        in_rows, in_load = entries.expand(2, 4, -1).contiguous(), torch.full((2, 2), 4).int()
        reduce.reduce(
            *(memory.bases, state, in_rows, in_load),
            **{"me": 0, "send_off": memory.off("send"), "num_peers": 1, "hidden": 5},
            **{"rows_in_off": memory.off("rows_in"), "wait": wait, **wire, **rows, **sizes},
        )

    run_own() if waits == "own" else run_reduce(wait=True)
    failed = failure(state)
    assert failed == ("rows_in", 1, 5, mark(config, 1))
    run_own()
    run_reduce(wait=False)
    combine.take(
        *(acc, memory.bases, state, *tables, torch.zeros(2, 4).int(), tables[1]),
        **{"me": 0, "recv_off": memory.off("recv"), "returned_off": memory.off("returned")},
        **{"step": 1, "num_peers": 1, "block_h": 8, **told, **wire, **sizes},
    )
    combine.final(
        *(y.view(torch.float32), acc, (), memory.bases, state),
        **{"me": 0, "rows_read_off": memory.off("rows_read"), "shape": S},
        **{"programs": 1, "block_m": 2, "block_h": 8},
    )
    memory.check()
    assert failure(state) == failed
    assert same_bytes(acc, pattern(4, 5, dtype=torch.float32)) and same_bytes(y, pattern(4, 5))
