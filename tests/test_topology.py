"""Check Topology: rules, values, and the bound on a proxy's records against brute force."""

import doctest
import importlib
import itertools
import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from railwave.sched import assign_ref, native_quota_ref, quota_ref
from railwave.topology import Topology


def eligible_for_two(*rails):
    """Return (2, 2, R) bool with `rails` between the two nodes."""
    table = torch.zeros(2, 2, len(rails), dtype=torch.bool)
    table[0, 1] = table[1, 0] = torch.tensor(rails, dtype=torch.bool)
    return table


@st.composite
def topologies(draw, max_nodes=4):
    nodes, gpus, rails = (draw(st.integers(1, top)) for top in (max_nodes, 5, 4))
    rail_of_gpu = draw(st.lists(st.integers(0, rails - 1), min_size=gpus, max_size=gpus))
    used = sorted(set(rail_of_gpu))
    eligible = torch.zeros(nodes, nodes, rails, dtype=torch.bool)
    for node, peer in itertools.combinations(range(nodes), 2):
        chosen = sorted(draw(st.sets(st.sampled_from(used), min_size=1)))
        eligible[node, peer, chosen] = eligible[peer, node, chosen] = True
    return Topology(nodes, gpus, rails, rail_of_gpu=rail_of_gpu, eligible_rails=eligible)


def heaviest_proxy(topo, node, peer, records):
    """Return the largest load of a proxy for the slice (node, peer), over both quota rules."""
    counts = torch.zeros(topo.rails_per_node, topo.nodes, dtype=torch.int64)
    for gpu, num_records in enumerate(records):
        counts[topo.rail_of_gpu[gpu], peer] += num_records
    worst = 0
    for rule in (quota_ref, native_quota_ref):
        quotas = rule(counts, topo.eligible_rails[node], node)[:, peer]
        match = assign_ref(records, topo.rail_of_gpu, quotas)
        proxies = [proxy for row in match.proxy for proxy in row]
        worst = max([worst, *(proxies.count(gpu) for gpu in range(topo.gpus_per_node))])
    return worst


def brute_force_proxy_records(topo, tokens):
    return max(
        heaviest_proxy(topo, node, peer, records)
        for node, peer in itertools.permutations(range(topo.nodes), 2)
        for records in itertools.product(range(tokens + 1), repeat=topo.gpus_per_node)
    )


def test_defaults():
    topo = Topology(nodes=2, gpus_per_node=8, rails_per_node=4)
    assert topo.rail_of_gpu == (0, 0, 1, 1, 2, 2, 3, 3)
    assert topo.gpus_of_rail == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert topo.max_gpus_per_rail == 2
    assert topo.num_ranks == 16
    assert topo.eligible_rails.dtype == torch.bool
    assert topo.eligible_rails.shape == (2, 2, 4) and topo.eligible_rails.all()


def test_more_rails_than_gpus_leaves_rails_ineligible():
    topo = Topology(2, 2, 4)
    assert topo.gpus_of_rail == ((0,), (), (1,), ())
    assert topo.eligible_rails[0, 1].tolist() == [True, False, True, False]


def test_rank_maps_are_inverse():
    topo = Topology(3, 4, 2)
    ranks = [topo.rank_of(topo.node_of(rank), topo.local_of(rank)) for rank in range(12)]
    assert ranks == list(range(12))


@settings(max_examples=30, deadline=None)
@given(topologies())
def test_equality_and_hash_are_by_value(topo):
    again = Topology(
        topo.nodes,
        topo.gpus_per_node,
        np.int64(topo.rails_per_node),
        rail_of_gpu=torch.tensor(topo.rail_of_gpu),
        eligible_rails=topo.eligible_rails.tolist(),
    )
    assert again == topo and hash(again) == hash(topo)
    assert pickle.loads(pickle.dumps(topo)) == topo
    assert all(type(rail) is int for rail in again.rail_of_gpu)


def test_values_that_differ_are_not_equal():
    assert Topology(2, 2, 2) != Topology(2, 2, 2, eligible_rails=eligible_for_two(1, 0))
    assert Topology(2, 2, 2) != Topology(2, 2, 2, rail_of_gpu=[1, 0])
    assert Topology(2, 2, 2) != "Topology"
    explicit = Topology(2, 2, 2, eligible_rails=torch.ones(2, 2, 2, dtype=torch.bool))
    assert Topology(2, 2, 2) == explicit
    assert "eligible_rails=all" in repr(explicit)


def test_the_diagonal_is_ignored_and_the_input_is_copied():
    table = eligible_for_two(1, 0)
    topo = Topology(2, 2, 2, eligible_rails=table)
    assert topo.eligible_rails[0, 0].all() and topo.eligible_rails[1, 1].all()
    assert not table[0, 0].any()
    table[0, 1] = False
    assert topo.eligible_rails[0, 1].tolist() == [True, False]


def asymmetric():
    table = torch.ones(2, 2, 2, dtype=torch.bool)
    table[0, 1, 1] = False
    return table


@pytest.mark.parametrize(
    ("error", "words", "arguments"),
    [
        (ValueError, "nodes must be at least 1, got 0", {"nodes": 0}),
        (TypeError, "gpus_per_node must be an int, got bool True", {"gpus_per_node": True}),
        (TypeError, "rails_per_node must be an int, got float 2.0", {"rails_per_node": 2.0}),
        (TypeError, "rail_of_gpu must be a sequence", {"rail_of_gpu": 3}),
        (ValueError, "rail_of_gpu must have one entry per GPU .2., got 1", {"rail_of_gpu": [0]}),
        (ValueError, r"rail_of_gpu\[1\] must be in \[0, 2\), got 2", {"rail_of_gpu": [0, 2]}),
        (TypeError, r"rail_of_gpu\[0\] must be an int", {"rail_of_gpu": [0.0, 1]}),
        (
            TypeError,
            "must be bool of shape .*int64",
            {"eligible_rails": torch.ones(2, 2, 2).long()},
        ),
        (ValueError, r"got shape \(1, 2\)", {"eligible_rails": [[True, True]]}),
        (ValueError, r"symmetric.*\[0, 1, 1\] = False", {"eligible_rails": asymmetric()}),
        (ValueError, r"at least one rail.*\[0, 1\]", {"eligible_rails": eligible_for_two(0, 0)}),
        (
            ValueError,
            r"False for a rail without a GPU, got \[0, 1, 1\] = True",
            {"eligible_rails": eligible_for_two(1, 1), "rail_of_gpu": [0, 0]},
        ),
    ],
)
def test_bad_arguments(error, words, arguments):
    shape = {"nodes": 2, "gpus_per_node": 2, "rails_per_node": 2}
    with pytest.raises(error, match=words):
        Topology(**(shape | arguments))


def test_bad_ranks():
    topo = Topology(2, 3, 3)
    with pytest.raises(ValueError, match=r"rank must be in \[0, 6\), got 6"):
        topo.node_of(6)
    with pytest.raises(ValueError, match=r"rank must be in \[0, 6\), got -1"):
        topo.local_of(-1)
    with pytest.raises(ValueError, match=r"local must be in \[0, 3\), got 3"):
        topo.rank_of(0, 3)
    with pytest.raises(TypeError, match="max_tokens_per_rank must be an int"):
        topo.max_proxy_records(1.5)


@pytest.mark.parametrize("tokens", [0, 1, 7, 128])
def test_one_gpu_a_rail_and_every_rail_eligible_needs_no_more_than_the_tokens(tokens):
    assert Topology(4, 8, 8).max_proxy_records(tokens) == tokens


@settings(max_examples=60, deadline=None)
@given(topologies(), st.integers(0, 9))
def test_native_needs_no_more_than_balanced(topo, tokens):
    gpus = [len(on_rail) for on_rail in topo.gpus_of_rail]
    for node, peer in itertools.combinations(range(topo.nodes), 2):
        eligible = topo.eligible_rails[node, peer].tolist()
        outside = sum(n for n, ok in zip(gpus, eligible, strict=True) if not ok)
        part = math.ceil(outside * tokens / sum(eligible))
        for n in (n for n, ok in zip(gpus, eligible, strict=True) if ok):
            assert tokens + math.ceil(part / n) <= topo.max_proxy_records(tokens)


def test_one_node_sends_nothing():
    assert Topology(1, 8, 8).max_proxy_records(128) == 0


@pytest.mark.parametrize(
    ("rail_of_gpu", "rails", "tokens", "expected"),
    [
        ((0, 1), (1, 0), 2, 4),  # rail 1 is ineligible: all its records join rail 0
        ((0, 0, 1), (1, 1), 1, 2),  # rail 1's GPU takes half of what two GPUs hold
        ((0, 0, 1), (1, 1), 2, 3),
        ((0, 0, 0, 1), (1, 1), 3, 6),
        ((0, 0, 1, 1), (1, 1), 3, 4),  # ceil(3 * 3 / 2) = 5: 2 beyond its own, over 2 GPUs
        ((0, 0, 1), (1, 0), 2, 3),  # balanced ceil(2 * 2 / 1) = 4: 2 beyond its own, over 2
        ((0, 1, 2), (1, 1, 0), 2, 3),
    ],
)
def test_bound_is_reached(rail_of_gpu, rails, tokens, expected):
    topo = Topology(
        2,
        len(rail_of_gpu),
        len(rails),
        rail_of_gpu=rail_of_gpu,
        eligible_rails=eligible_for_two(*rails),
    )
    assert topo.max_proxy_records(tokens) == expected
    assert brute_force_proxy_records(topo, tokens) == expected


@settings(max_examples=40, deadline=None)
@given(topologies(max_nodes=3), st.integers(0, 2))
def test_bound_holds_and_is_loose_by_at_most_one(topo, tokens):
    if topo.gpus_per_node > 4:
        tokens = min(tokens, 1)
    bound = topo.max_proxy_records(tokens)
    worst = brute_force_proxy_records(topo, tokens) if topo.nodes > 1 else 0
    assert bound - 1 <= worst <= bound


@settings(max_examples=80, deadline=None)
@given(topologies().filter(lambda topo: topo.nodes > 1), st.integers(0, 30), st.data())
def test_bound_holds(topo, tokens, data):
    gpus = topo.gpus_per_node
    few_or_all = st.one_of(st.sampled_from([0, tokens]), st.integers(0, tokens))
    records = data.draw(st.lists(few_or_all, min_size=gpus, max_size=gpus))
    node, peer = data.draw(st.permutations(range(topo.nodes)))[:2]
    assert heaviest_proxy(topo, node, peer, records) <= topo.max_proxy_records(tokens)


def test_examples_in_docstrings():
    result = doctest.testmod(importlib.import_module("railwave.topology"))
    assert result.attempted > 0 and result.failed == 0
