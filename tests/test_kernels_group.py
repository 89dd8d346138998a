"""The kernels of rows by expert against their references, byte by byte."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from heaps import (
    KERNELS,
    LEAST,
    Memory,
    make_config,
    make_state,
    mark,
    pattern,
    same_bytes,
    seeds,
)
from railwave.kernels.shape import make_format
from worlds import random_values

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
group = KERNELS.group


@pytest.mark.parametrize("what", ["gather", "place"])
def test_a_phase_that_failed_places_and_sums_nothing(what):
    """Its tables hold anything: what they name must not be read."""
    config = make_config(1, 1, 1, hidden=8, dtype=torch.float32)
    memory, state, S = Memory(config), make_state(failed=1), config.shape
    before = state.clone()
    anything = torch.full((4, 3), 2**30).int()
    received = torch.tensor([4, *[0] * S.RANK_EXPERTS]).int()
    memory.words(0, "delivered")[:] = mark(config, 1)
    memory.start()
    if what == "gather":
        group.gather(
            *(memory.bases, state, torch.zeros(4, 8).int(), None, anything),
            received,
            **{"me": 0, "rows_off": memory.off("rows"), "row_words": 8, "most_rows": 4},
            **{"hidden": 8, "dtype": torch.float32, "programs": 2, "block_m": 2, "block_h": 8},
        )
    else:
        fmt, of = make_format(32, 3, 1), config.tables
        sizes = {"me": 0, "alignment": 4, "shape": S, "fmt": fmt, "programs": 2, "block_m": 2}
        got = tables(config, 4, sizes)
        group.place(
            *(*got, memory.bases, state, received, of.expert_rank, of.expert_pos),
            of.expert_start,
            **{"rows_off": memory.off("rows"), "delivered_off": memory.off("delivered")},
            **sizes,
        )
        assert got[3].tolist() == [0] * (1 + S.RANK_EXPERTS)
        assert same_bytes(got[0], pattern(4, 3))
    memory.check()
    assert torch.equal(state, before)


@st.composite
def arrived(draw):
    """Draw a PE's rows as they arrived, and tiles."""
    draw(seeds)
    nodes, gpus, K = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    sizes = {"max_tokens_per_rank": 4, "top_k": K, "hidden": 16, "dtype": torch.float32}
    config = make_config(nodes, gpus, gpus, **sizes)
    memory, S = Memory(config), config.shape
    fmt = make_format(draw(st.sampled_from([4, 12, 16, 40])), K, gpus)
    me = draw(st.integers(0, nodes * gpus - 1))
    num_rows = draw(st.integers(0, config.max_rows))
    rows = memory.view(me, "rows", config.max_rows, fmt.META)
    rows[:] = torch.randint(-(2**31), 2**31, rows.shape).int()
    rows[:, fmt.IDS :][:, :K] = torch.randint(-1, S.E, (len(rows), K)).int()
    rows[:, fmt.WEIGHTS :][:, :K] = torch.rand(len(rows), K).view(torch.int32)
    memory.words(me, "delivered")[:] = mark(config, 1)
    memory.start()
    received = torch.tensor([num_rows, *[0] * S.RANK_EXPERTS]).int()
    programs, block_m = draw(st.integers(1, 3)), draw(st.sampled_from([LEAST, 2, 4]))
    sizes = {"programs": programs, "block_m": block_m, "shape": S, "fmt": fmt, "me": me}
    sizes |= {"rows_off": memory.off("rows"), "delivered_off": memory.off("delivered")}
    sizes |= {"alignment": draw(st.integers(1, 5))}
    return config, memory, rows[:num_rows], received, sizes


def tables(config, num_rows, sizes):
    """Make the tables that `place` writes, poisoned, with guards behind what it may write."""
    S, K = config.shape, sizes["fmt"].K
    most = config.most_rows_by_expert(sizes["me"], num_rows, K, sizes["alignment"])
    return (
        pattern(num_rows, K),
        pattern(most, dtype=torch.int64),
        pattern(most, dtype=torch.float32),
        pattern(1 + S.RANK_EXPERTS),
        pattern(1 + S.RANK_EXPERTS),
    )


@settings(max_examples=25)
@given(arrived(), st.booleans(), st.integers(1, 3), st.data())
def test_place_and_spread(case, zero_padding, extra, data):
    config, memory, rows, received, sizes = case
    of = config.tables
    experts = (of.expert_rank, of.expert_pos, of.expert_start)
    got, want = (tables(config, len(rows), sizes) for _ in range(2))
    group.place(*got, memory.bases, memory.state(), received, *experts, **sizes)
    ref = {name: sizes[name] for name in ("me", "alignment", "shape", "fmt")}
    group.place_ref(*want, rows, *experts, **ref)
    for a, b in zip(got, want, strict=True):
        assert same_bytes(a, b)
    places, _, _, counts, offsets = got
    fmt = sizes["fmt"]
    words, wanted = (pattern(int(counts[0]) + extra, fmt.X_WORDS) for _ in range(2))
    spread = {"zero_padding": zero_padding, "block_w": data.draw(st.sampled_from([LEAST, 8]))}
    group.spread(
        *(words, memory.bases, memory.state(), received, places, counts, offsets),
        **{**sizes, **spread},
    )
    group.spread_ref(wanted, rows, places, counts, offsets, zero_padding=zero_padding, fmt=fmt)
    memory.check()
    assert same_bytes(words, wanted)


def test_place_example():
    """Alignment 2; rows with experts [1, 0] and [1, -1] take places [2, 0] and [3, -1]."""
    config = make_config(1, 1, 1, max_tokens_per_rank=2, top_k=2)
    memory, fmt, tables_ = Memory(config), make_format(4, 2, 1), config.tables
    rows = memory.view(0, "rows", 2, fmt.META)
    rows[:, fmt.IDS :][:, :2] = torch.tensor([[1, 0], [1, -1]])
    memory.words(0, "delivered")[:] = mark(config, 1)
    memory.start()
    sizes = {"me": 0, "alignment": 2, "shape": config.shape, "fmt": fmt, "programs": 2}
    got = tables(config, 2, sizes)
    group.place(
        *(*got, memory.bases, memory.state(), torch.tensor([2, 0, 0]).int()),
        *(tables_.expert_rank, tables_.expert_pos, tables_.expert_start),
        **{"rows_off": memory.off("rows"), "delivered_off": memory.off("delivered")},
        **{**sizes, "block_m": 2},
    )
    assert got[0].tolist() == [[2, 0], [3, -1]]
    assert got[1].tolist()[0] == 0 and got[1].tolist()[2:4] == [1, 1]
    assert got[3].tolist()[:3] == [4, 1, 2] and got[4].tolist()[:3] == [0, 2, 4]


@settings(max_examples=25)
@given(
    *(seeds, st.sampled_from(DTYPES), st.integers(1, 9), st.integers(0, 5), st.integers(1, 3)),
    *(st.booleans(), st.booleans(), st.sampled_from([0, 4, 8]), st.data()),
)
def test_gather(_, dtype, hidden, num_rows, programs, placed, weighed, gap, data):
    """Results at any stride of whole words; some rows have no place, some several.

    No more than most_rows are written, though `more` came.
    """
    more = data.draw(st.integers(0, 2))
    config = make_config(1, 1, 1, max_tokens_per_rank=8, hidden=64, dtype=torch.float32)
    memory, K = Memory(config), data.draw(st.integers(1, 3)) if placed else 1
    num_places = max(1, 2 * num_rows)
    words = -(-hidden * dtype.itemsize // 4)
    store = torch.zeros(num_places, words + gap).int()[:, :words]
    out = store.view(dtype)[:, :hidden]
    out[:] = random_values(num_places, hidden, dtype)
    weights = torch.randn(num_places) if weighed else None
    places = torch.randint(-3, num_places, (num_rows, K)).int() if placed else None
    row_words = -(-words // 4) * 4
    memory.start()
    group.gather(
        *(memory.bases, memory.state(), store, weights, places),
        torch.tensor([num_rows + more]).int(),
        **{"me": 0, "rows_off": memory.off("rows"), "row_words": row_words, "most_rows": num_rows},
        **{"hidden": hidden, "dtype": dtype, "programs": programs},
        **{"block_m": data.draw(st.sampled_from([LEAST, 4])), "block_h": 4},
    )
    rows = memory.view(0, "rows", num_rows, row_words).view(dtype)[:, :hidden]
    group.gather_ref(rows, out, weights, places)
    memory.check()
