"""Whole worlds: every path gives the reference's bytes and bits, whatever the shape and routing.

Each run checks, besides, quotas, traffic and guards: see worlds.py.
"""

import doctest
import importlib
import itertools
import random
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from heaps import DEVICE
from railwave.config import BALANCED, INTERPRETED, PATHS
from worlds import (
    LastFirst,
    bytes_equal,
    check_bound,
    combine,
    dispatch,
    make_batch,
    make_outs,
    make_world,
    run,
)

pytestmark = pytest.mark.usefixtures("poison_empty")


def test_four_paths_twice_give_the_same_bits():
    """In float32, where the order of additions shows; then in bfloat16, on the same handles."""
    world = make_world(3, 2, 2, dtype=torch.float32, top_k=6)
    batch = make_batch(world, [4, 0, 3, 4, 1, 4])
    outs = make_outs(batch)
    for path in PATHS:
        ys = run(batch, path, outs=outs)
        check_bound(batch, outs, ys)
    handles = dispatch(batch, path)
    again = combine(batch, handles, outs)
    assert all(bytes_equal(a, b) for a, b in zip(again, ys, strict=True))
    outs = make_outs(batch, dtype=torch.bfloat16)
    check_bound(batch, outs, combine(batch, handles, outs))


def rank_0_sends_one_token_to_all(world):
    """Dispatch one token of rank 0 to an expert on every rank; return the handles."""
    W = world.config.topo.num_ranks
    ids = [torch.arange(W)[None], *[torch.zeros(0, W, dtype=torch.int64)] * (W - 1)]
    ids = [i.to(DEVICE) for i in ids]
    xs = [torch.zeros(len(i), 1, dtype=world.config.dtype, device=DEVICE) for i in ids]
    return [r.handle for r in world.dispatch(xs, ids, [i.float() for i in ids])]


def test_nodes_are_added_in_the_order_of_waves():
    """Node sums 2**24, -2**24, 1: own node, then s - 1 = 2, where 2**24 + 1 rounds, then 1."""
    world = make_world(3, 2, 2, dtype=torch.float32, num_experts=6, top_k=6)
    rows = [[2.0**24, 1], [0, 2], [-(2.0**24), 3], [0, 4], [1, 5], [0, 6]]
    outs = [torch.tensor([row], dtype=torch.float32, device=DEVICE) for row in rows]
    ys = world.combine(outs, rank_0_sends_one_token_to_all(world))
    assert ys[0].tolist() == [[0.0, 21.0]]
    assert [y.shape for y in ys[1:]] == [(0, 2)] * 5


def test_rows_of_a_node_are_added_by_ascending_rank():
    """Ranks 0, 1, 2 return 2**24, 1, -2**24: 2**24 + 1 rounds; from the other end it would not."""
    world = make_world(1, 3, 1, dtype=torch.float32, num_experts=3, top_k=3)
    outs = [torch.tensor([[row]], device=DEVICE) for row in (2.0**24, 1.0, -(2.0**24))]
    assert world.combine(outs, rank_0_sends_one_token_to_all(world))[0].tolist() == [[0.0]]


def test_wire_rounds_remote_sums_only():
    """1 + 2**-8 rounds to 1 in bfloat16: on the wire, not on the owner's node."""
    world = make_world(2, 2, 2, num_experts=4, top_k=4)
    rows = [[1, -1], [2.0**-8, 0], [-1, 1], [0, 2.0**-8]]
    outs = [torch.tensor([row], dtype=torch.bfloat16, device=DEVICE) for row in rows]
    ys = world.combine(outs, rank_0_sends_one_token_to_all(world))
    assert ys[0].tolist() == [[2.0**-8, 0.0]]


def test_infinities_and_nan_are_summed_as_by_the_reference():
    world = make_world(2, 2, 2, top_k=6, dtype=torch.float16)
    batch = make_batch(world, 4)
    special = torch.tensor([0.0, -0.0, 1.0, -65504.0, 65504.0, torch.inf, -torch.inf, torch.nan])
    outs = [special.half()[torch.randint(8, (len(r.x), 8))] for r in batch.expected]
    ys = torch.cat(run(batch, "joint", outs=outs))
    assert ys.isnan().any() and ys.isposinf().any() and ys.isneginf().any()


@pytest.mark.parametrize("ids", [torch.int32, torch.int64], ids=str)
def test_case_b1_repeated_and_absent_ids(ids):
    """Row 0 names an expert three times, row 1 none, row 2 two of one rank, one of another node."""
    world = make_world(2, 2, 2)
    topk = torch.tensor([[7, 7, 7], [-1, -1, -1], [0, 1, 4], [-1, 5, -1]])
    batch = make_batch(world, 4, topk=topk, ids=ids)
    for path in ("native", "joint"):
        ys = run(batch, path)
        assert all((y[1].view(torch.int16) == 0).all() for y in ys)
    last = batch.expected[3]
    assert last.num_tokens_per_expert.tolist() == [0, 12] and len(last.x) == 4


@pytest.mark.parametrize(
    "tokens", [[0, 0, 0, 0], [1, 0, 0, 0], [0, 0, 3, 4]], ids=["none", "one", "half"]
)
def test_case_a1_ranks_without_tokens(tokens):
    world = make_world(2, 2, 2)
    batch = make_batch(world, tokens)
    for path in ("native", "joint"):
        ys = run(batch, path)
        assert [y.shape for y in ys] == [(T, 8) for T in tokens]


def test_case_d2_all_tokens_to_one_expert_beyond_every_tile():
    """More records than a chunk, a tile of rows and a step of count hold."""
    T = 2 * INTERPRETED.block_t + 3
    world = make_world(2, 2, 2, max_tokens_per_rank=T, top_k=2, hidden=3)
    one = torch.full((T, 2), 6)
    run(make_batch(world, T, topk=one), "joint")
    run(make_batch(world, [T, 5, 0, T]), "permutation")


@pytest.mark.parametrize(
    ("nodes", "path"), [(1, "native"), (2, "rail"), (4, "permutation"), (5, "joint")]
)
def test_one_gpu_a_node(nodes, path):
    world = make_world(nodes, 1, 1, order=random.Random(nodes))
    run(make_batch(world, [4, 3, 4, 4, 2][:nodes]), path)


def test_one_node_has_no_wire():
    world = make_world(1, 3, 2)
    batch = make_batch(world, 4)
    for path in PATHS:
        outs = make_outs(batch)
        check_bound(batch, outs, run(batch, path, outs=outs))
        assert not world.traffic.windows and not world.traffic.put_bytes.any()


def test_fewer_rails_than_gpus_and_three_rounds_a_slice():
    world = make_world(
        2, 3, 2, rail_of_gpu=(0, 0, 1), staging_records=2, order=LastFirst(), num_experts=7
    )
    assert world.config.rounds_per_wave == 3
    batch = make_batch(world, 4)
    for path in BALANCED:
        run(batch, path)


def test_more_rails_than_gpus():
    world = make_world(3, 2, 3, rail_of_gpu=(2, 0))
    run(make_batch(world, 4), "rail")


def test_ineligible_rails():
    """Between nodes 0 and 1 only rail 1 carries, between 1 and 2 only rail 0."""
    eligible = torch.ones(3, 3, 2, dtype=torch.bool)
    eligible[0, 1] = eligible[1, 0] = torch.tensor([False, True])
    eligible[1, 2] = eligible[2, 1] = torch.tensor([True, False])
    world = make_world(3, 2, 2, eligible=eligible, staging_records=3, order=random.Random(7))
    batch = make_batch(world, 4)
    for path in ("native", "joint"):
        run(batch, path)


def test_seven_experts_on_three_ranks_and_twenty_on_one():
    world = make_world(3, 1, 1, num_experts=7)
    assert world.config.experts_per_rank == [3, 2, 2]
    run(make_batch(world, 4), "joint")
    world = make_world(2, 1, 1, num_experts=40, top_k=8)
    run(make_batch(world, 4), "joint")


def test_experts_anywhere():
    """Ranks 1 and 2 have no expert; those of rank 3 are far apart."""
    world = make_world(2, 2, 2, num_experts=6, expert_to_rank=torch.tensor([3, 0, 0, 3, 0, 3]))
    batch = make_batch(world, 4)
    assert [len(r.num_tokens_per_expert) for r in batch.expected] == [3, 0, 0, 3]
    run(batch, "joint")


def test_two_layers_dispatched_before_either_is_combined():
    world = make_world(2, 2, 2, dtype=torch.float32)
    first, second = make_batch(world, 4), make_batch(world, [1, 4, 0, 2])
    handles = dispatch(first, "joint"), dispatch(second, "native")
    outs = make_outs(first)
    ys = combine(first, handles[0], outs)
    combine(second, handles[1], make_outs(second))
    again = combine(first, handles[0], outs)
    assert all(bytes_equal(a, b) for a, b in zip(ys, again, strict=True))


def test_two_worlds_side_by_side():
    worlds = (
        make_world(1, 2, 1, top_k=1),
        make_world(3, 1, 2, dtype=torch.float32, hidden=5),
    )
    batches = [make_batch(world, 4) for world in worlds]
    handles = [dispatch(b, path) for b, path in zip(batches, ("joint", "permutation"), strict=True)]
    for batch, own in zip(batches, handles, strict=True):
        combine(batch, own, make_outs(batch))


def test_results_do_not_depend_on_tiles(monkeypatch):
    """Tiles of one or two, and several programs a peer, as on a GPU."""
    small = dict.fromkeys(("chunk", "block_m", "block_t", "match", "programs"), 2)
    tiles = replace(INTERPRETED, **small, tile_words=4, block_h=4, block_n=1, parts=3)
    module = importlib.import_module("railwave.world")
    monkeypatch.setattr(module, "Config", partial(module.Config, tiles=tiles))
    world = make_world(2, 2, 2, hidden=10, top_k=2)
    run(make_batch(world, [4, 4, 3, 1]), "joint")


@st.composite
def worlds(draw):
    """Draw a world of at most 6 ranks, its routing skewed to few experts."""
    nodes, gpus = draw(st.sampled_from([(1, 2), (2, 1), (2, 2), (2, 3), (3, 1), (3, 2), (4, 1)]))
    rails = draw(st.integers(1, 3))
    rail_of_gpu = draw(st.lists(st.integers(0, rails - 1), min_size=gpus, max_size=gpus))
    eligible = torch.zeros(nodes, nodes, rails, dtype=torch.bool)
    for node, peer in itertools.combinations(range(nodes), 2):
        chosen = sorted(draw(st.sets(st.sampled_from(sorted(set(rail_of_gpu))), min_size=1)))
        eligible[node, peer, chosen] = eligible[peer, node, chosen] = True
    experts = draw(st.integers(1, 9))
    T = draw(st.integers(1, 5))
    return make_world(
        *(nodes, gpus, rails),
        rail_of_gpu=rail_of_gpu,
        eligible=eligible,
        num_experts=experts,
        expert_to_rank=draw(
            st.lists(st.integers(0, nodes * gpus - 1), min_size=experts, max_size=experts)
        ),
        top_k=draw(st.integers(1, 4)),
        hidden=draw(st.integers(1, 9)),
        max_tokens_per_rank=T,
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])),
        staging_records=draw(st.integers(1, 6)),
        order=draw(st.sampled_from([None, LastFirst(), random.Random(0)])),
    )


@settings(max_examples=6)
@given(st.data())
def test_any_world(data):
    world = data.draw(worlds())
    torch.manual_seed(data.draw(st.integers(0, 2**16)))
    T, W = world.config.max_tokens_per_rank, world.config.topo.num_ranks
    batch = make_batch(world, data.draw(st.lists(st.integers(0, T), min_size=W, max_size=W)))
    outs = make_outs(batch)
    check_bound(batch, outs, run(batch, data.draw(st.sampled_from(PATHS)), outs=outs))


@pytest.mark.parametrize("name", ["exchange.words", "heap.layout", "reference", "traffic", "world"])
def test_examples(name):
    result = doctest.testmod(importlib.import_module(f"railwave.{name}"))
    assert result.attempted and not result.failed
