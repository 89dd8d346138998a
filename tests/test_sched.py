"""Check the schedule as data: quotas, matching, waves, plan and descriptors."""

import ast
import doctest
import importlib
import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from railwave import sched
from railwave.topology import Topology

num_records = st.one_of(st.just(0), st.integers(0, 12), st.integers(0, 10_000))


@st.composite
def slices(draw):
    """Draw (counts (R, N), eligible (N, R), node)."""
    nodes, rails = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    row = st.lists(num_records, min_size=nodes, max_size=nodes)
    counts = draw(st.lists(row, min_size=rails, max_size=rails))
    allowed = st.lists(st.booleans(), min_size=rails, max_size=rails).filter(any)
    eligible = draw(st.lists(allowed, min_size=nodes, max_size=nodes))
    return torch.tensor(counts), torch.tensor(eligible), draw(st.integers(0, nodes - 1))


@st.composite
def gpu_slices(draw):
    """Draw (records (G,), rail_of_gpu (G,), quotas (R,)) of one slice under either rule."""
    gpus, rails = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    rail_of_gpu = draw(st.lists(st.integers(0, rails - 1), min_size=gpus, max_size=gpus))
    used = sorted(set(rail_of_gpu))
    chosen = draw(st.sets(st.sampled_from(used), min_size=1))
    records = draw(st.lists(st.integers(0, 9), min_size=gpus, max_size=gpus))
    counts = torch.zeros(rails, 4, dtype=torch.int64)
    node, peer = draw(st.permutations(range(4)))[:2]
    for rail, own in zip(rail_of_gpu, records, strict=True):
        counts[rail, peer] += own
    eligible = torch.tensor([[rail in chosen for rail in range(rails)]] * 4)
    rule = draw(st.sampled_from([sched.quota_ref, sched.native_quota_ref]))
    return records, rail_of_gpu, rule(counts, eligible, node)[:, peer]


@settings(max_examples=30, deadline=None)
@given(slices())
def test_quotas_conserve_demand_and_differ_by_at_most_one(case):
    counts, eligible, node = case
    quotas = sched.quota_ref(counts, eligible, node)
    assert quotas.dtype == torch.int64 and quotas.shape == counts.shape
    for peer in range(counts.shape[1]):
        if peer == node:
            assert not quotas[:, peer].any()
            continue
        assert quotas[:, peer].sum() == counts[:, peer].sum()
        assert not quotas[~eligible[peer], peer].any()
        own = quotas[eligible[peer], peer]
        assert own.max() - own.min() <= 1


@settings(max_examples=30, deadline=None)
@given(slices())
def test_native_quotas_move_only_records_of_ineligible_rails(case):
    counts, eligible, node = case
    quotas = sched.native_quota_ref(counts, eligible, node)
    for peer in range(counts.shape[1]):
        if peer == node:
            assert not quotas[:, peer].any()
            continue
        assert quotas[:, peer].sum() == counts[:, peer].sum()
        assert not quotas[~eligible[peer], peer].any()
        extra = (quotas - counts)[eligible[peer], peer]
        assert extra.min() >= 0 and extra.max() - extra.min() <= 1


def test_native_equals_counts_where_every_rail_is_eligible():
    counts = torch.tensor([[0, 3, 9], [0, 1, 0]])
    assert torch.equal(
        sched.native_quota_ref(counts, torch.ones(3, 2, dtype=torch.bool), 0), counts
    )


def test_remainder_rotates_with_source_and_destination():
    nodes, rails = 4, 3
    eligible = torch.ones(nodes, rails, dtype=torch.bool)
    for node, peer in itertools.permutations(range(nodes), 2):
        counts = torch.zeros(rails, nodes, dtype=torch.int64)
        counts[0, peer] = 8  # 2 each and a remainder of 2
        quotas = sched.quota_ref(counts, eligible, node)[:, peer].tolist()
        first = (node + peer) % rails
        assert [rail for rail in range(rails) if quotas[rail] == 3] == sorted(
            [first, (first + 1) % rails]
        )


def test_remainder_counts_eligible_rails_only():
    eligible = torch.tensor([[True, False, True, True]] * 2)
    quotas = sched.quota_ref([[0, 4], [0, 0], [0, 0], [0, 0]], eligible, node=0)
    assert quotas[:, 1].tolist() == [1, 0, 2, 1]  # (0 + 1) mod 3 = 1: the second eligible rail


@settings(max_examples=30, deadline=None)
@given(gpu_slices())
def test_match_keeps_the_first_records_and_fills_every_rail(case):
    records, rail_of_gpu, quotas = case
    counts = torch.zeros_like(quotas).index_add_(
        0, torch.tensor(rail_of_gpu), torch.tensor(records)
    )
    match = sched.match_ref(counts, quotas)
    taken = []
    for rail, (count, quota) in enumerate(zip(counts.tolist(), quotas.tolist(), strict=True)):
        kept = min(count, quota)
        pairs = list(zip(match.target_rail[rail], match.slot[rail], strict=True))
        assert len(pairs) == count
        assert pairs[:kept] == [(rail, i) for i in range(kept)]
        assert all(target != rail for target, _ in pairs[kept:])
        taken += pairs
    assert sorted(taken) == [
        (r, j) for r, quota in enumerate(quotas.tolist()) for j in range(quota)
    ]


@settings(max_examples=30, deadline=None)
@given(gpu_slices())
def test_match_moves_surplus_in_order(case):
    """The moved records, by (rail, index), take the free slots by (rail, slot)."""
    records, rail_of_gpu, quotas = case
    counts = torch.zeros_like(quotas).index_add_(
        0, torch.tensor(rail_of_gpu), torch.tensor(records)
    )
    match = sched.match_ref(counts, quotas)
    moved = [
        (match.target_rail[rail][i], match.slot[rail][i])
        for rail, count in enumerate(counts.tolist())
        for i in range(count)
        if match.target_rail[rail][i] != rail
    ]
    assert moved == sorted(moved)


def brute_force_fewest_moves(counts, quotas):
    """Return the fewest records that leave their rail, over every way to meet the quotas."""
    owners = [rail for rail, count in enumerate(counts) for _ in range(count)]
    slots = [rail for rail, quota in enumerate(quotas) for _ in range(quota)]
    return min(
        sum(a != b for a, b in zip(owners, order, strict=True))
        for order in set(itertools.permutations(slots))
    )


@pytest.mark.parametrize(
    ("counts", "quotas"),
    [([3, 1, 0], [1, 1, 2]), ([0, 0, 5], [2, 2, 1]), ([2, 4, 0], [3, 0, 3]), ([6, 0], [3, 3])],
)
def test_match_moves_as_few_records_as_possible(counts, quotas):
    match = sched.match_ref(counts, quotas)
    moved = sum(target != rail for rail, row in enumerate(match.target_rail) for target in row)
    assert moved == brute_force_fewest_moves(counts, quotas)


@settings(max_examples=30, deadline=None)
@given(gpu_slices())
def test_proxy_slots_are_distinct_and_contiguous(case):
    records, rail_of_gpu, quotas = case
    match = sched.assign_ref(records, rail_of_gpu, quotas)
    assert [len(row) for row in match.proxy] == records
    taken = [
        pair
        for p, s in zip(match.proxy, match.slot, strict=True)
        for pair in zip(p, s, strict=True)
    ]
    loads = Counter(proxy for proxy, _ in taken)
    assert sorted(taken) == [(g, j) for g in range(len(records)) for j in range(loads[g])]
    for rail, quota in enumerate(quotas.tolist()):
        on_rail = [gpu for gpu, its_rail in enumerate(rail_of_gpu) if its_rail == rail]
        assert sum(loads[gpu] for gpu in on_rail) == quota


@settings(max_examples=30, deadline=None)
@given(gpu_slices())
def test_kept_records_stay_with_their_gpu_at_their_index(case):
    records, rail_of_gpu, quotas = case
    match = sched.assign_ref(records, rail_of_gpu, quotas)
    for rail, quota in enumerate(quotas.tolist()):
        stream = [
            (gpu, i)
            for gpu, its_rail in enumerate(rail_of_gpu)
            if its_rail == rail
            for i in range(records[gpu])
        ]
        for gpu, i in stream[:quota]:
            assert (match.proxy[gpu][i], match.slot[gpu][i]) == (gpu, i)
        for gpu, i in stream[quota:]:
            assert rail_of_gpu[match.proxy[gpu][i]] != rail


@pytest.mark.parametrize("nodes", range(1, 9))
def test_every_wave_is_a_permutation_and_every_pair_appears_once(nodes):
    table = sched.waves(nodes)
    assert len(table) == nodes - 1
    for wave, destinations in enumerate(table, start=1):
        assert sorted(destinations) == list(range(nodes))
        for node, peer in enumerate(destinations):
            assert peer == sched.wave_peer(node, wave, nodes)
            assert node == sched.wave_sender(peer, wave, nodes)
    pairs = [(node, peer) for destinations in table for node, peer in enumerate(destinations)]
    assert sorted(pairs) == list(itertools.permutations(range(nodes), 2))


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 6), st.integers(0, 5), st.randoms(use_true_random=False))
def test_rotating_the_node_labels_keeps_the_cost_of_waves(nodes, shift, random):
    demand = [[random.randrange(100) for _ in range(nodes)] for _ in range(nodes)]
    table = sched.waves(nodes)

    def cost(label):
        return sum(max(demand[label(s)][label(d)] for s, d in enumerate(w)) for w in table)

    assert cost(lambda node: node) == cost(lambda node: (node + shift) % nodes)


@settings(max_examples=30, deadline=None)
@given(slices())
def test_plan_reports_what_it_moves(case):
    counts, _, node = case
    rails, nodes = counts.shape
    plan = sched.plan(counts, Topology(nodes, rails, rails), node=node)
    remote = counts.clone()
    remote[:, node] = 0
    assert torch.equal(plan.counts, remote)
    assert torch.equal(plan.quota.sum(0), remote.sum(0))
    for peer in range(nodes):
        match = sched.match_ref(plan.counts[:, peer], plan.quota[:, peer])
        moved = sum(target != rail for rail, row in enumerate(match.target_rail) for target in row)
        assert plan.relocated[peer] == moved
    assert plan.spread() in (0, 1)
    total = float(remote.any())
    assert float(plan.rail_share().sum()) == pytest.approx(total, abs=1e-12)  # R divisions
    assert float(plan.rail_share_before().sum()) == pytest.approx(total, abs=1e-12)


def test_plan_honours_eligible_rails_and_shared_rails():
    eligible = torch.ones(2, 2, 3, dtype=torch.bool)
    eligible[0, 1, 2] = eligible[1, 0, 2] = False
    topo = Topology(2, 4, 3, rail_of_gpu=[0, 0, 1, 2], eligible_rails=eligible)
    plan = sched.plan(np.array([[9, 4], [9, 0], [9, 3]], dtype=np.int32), topo, node=0)
    assert plan.quota.tolist() == [[0, 3], [0, 4], [0, 0]]
    assert plan.relocated.tolist() == [0, 4]
    assert plan.spread() == 1
    assert plan.rail_share_before().tolist() == [4 / 7, 0, 3 / 7]


def test_plan_of_one_node_or_of_nothing():
    plan = sched.plan([[5], [7]], Topology(1, 2, 2))
    assert not plan.quota.any() and plan.spread() == 0
    assert plan.rail_share().tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("error", "words", "arguments"),
    [
        (ValueError, r"counts must be integers of shape \(2, 2\), got shape", {"counts": [[1, 2]]}),
        (TypeError, "counts must be integers .*float32", {"counts": torch.ones(2, 2)}),
        (TypeError, "counts must be integers .*bool", {"counts": [[True] * 2] * 2}),
        (TypeError, "counts must be integers .*str", {"counts": "abc"}),
        (
            ValueError,
            r"counts must not be negative, got -3 at \(1, 0\)",
            {"counts": [[0, 1], [-3, 0]]},
        ),
        (ValueError, r"node must be in \[0, 2\), got 2", {"node": 2}),
        (TypeError, "node must be an int, got bool", {"node": False}),
        (TypeError, "topo must be a railwave.Topology, got int 4", {"topo": 4}),
        (
            ValueError,
            r"0 on a rail without a GPU, got \[0, 1\] on rail 1",
            {"counts": [[0, 0], [0, 1]], "topo": Topology(2, 1, 2)},
        ),
    ],
)
def test_plan_refuses_bad_input(error, words, arguments):
    good = {"counts": [[0, 1], [1, 0]], "topo": Topology(2, 2, 2), "node": 0}
    with pytest.raises(error, match=words):
        sched.plan(**(good | arguments))


def test_references_refuse_bad_input():
    with pytest.raises(ValueError, match="quotas must add up to the slice's 3 records, got 2"):
        sched.match_ref([3, 0], [1, 1])
    with pytest.raises(ValueError, match="quotas must be 0 on a rail without a GPU, got 1 at 1"):
        sched.assign_ref([2], [0], [1, 1])
    with pytest.raises(ValueError, match=r"rail_of_gpu must have one entry per GPU \(2\), got 1"):
        sched.assign_ref([1, 1], [0], [2])
    with pytest.raises(ValueError, match="allow a rail from node 0 to node 1, got none for 2"):
        sched.quota_ref([[0, 2]], [[True], [False]], 0)
    with pytest.raises(TypeError, match="eligible must be bool, got"):
        sched.quota_ref([[0, 2]], [[1], [1]], 0)
    with pytest.raises(ValueError, match=r"eligible must be bool of shape \(2, 1\)"):
        sched.quota_ref([[0, 2]], [[True, True]], 0)
    for wave in (0, 3):
        with pytest.raises(ValueError, match=rf"wave must be in \[1, 3\), got {wave}"):
            sched.wave_peer(0, wave, 3)


def test_payload_and_skew():
    demand = torch.tensor([[7, 6, 0], [2, 7, 0], [0, 4, 0]])
    assert sched.payload_per_gpu(demand, 4) == 1.0
    assert sched.source_rail_skew(torch.full((3, 4), 5)) == 1.0
    assert sched.source_rail_skew([[8, 0], [0, 0]]) == 4.0


def test_concentration_is_the_worst_window_over_the_mean_of_all_nodes():
    demand = [[9, 1, 1, 1], [1, 9, 1, 1], [1, 1, 9, 1], [1, 1, 1, 9]]
    fan_in = [(1, 0), (2, 0), (3, 0)]
    ring = [(node, (node + 1) % 4) for node in range(4)]
    assert sched.receiver_concentration(demand, [ring]) == 1.0
    assert sched.receiver_concentration(demand, [ring, fan_in]) == 4.0
    assert sched.receiver_concentration(demand, [fan_in + fan_in, []]) == 4.0
    assert sched.receiver_concentration(demand, [[(0, 1), (1, 0)]]) == 2.0


def test_descriptors_without_remote_traffic():
    demand = [[5, 0], [0, 5]]
    assert sched.payload_per_gpu(demand, 2) == 0.0
    assert sched.source_rail_skew([[0, 0], [0, 0]]) == 1.0
    assert sched.receiver_concentration(demand, [[(0, 1)], []]) == 1.0
    assert sched.receiver_concentration(demand, []) == 1.0


def test_descriptors_refuse_bad_input():
    with pytest.raises(ValueError, match=r"windows\[0\] must pair different nodes, got \(1, 1\)"):
        sched.receiver_concentration([[0, 1], [1, 0]], [[(1, 1)]])
    with pytest.raises(ValueError, match=r"windows\[0\]: source must be in \[0, 2\), got 2"):
        sched.receiver_concentration([[0, 1], [1, 0]], [[(2, 1)]])
    with pytest.raises(ValueError, match=r"demand must be of shape \(N, N\), got \(1, 2\)"):
        sched.payload_per_gpu([[0, 1]], 2)
    with pytest.raises(ValueError, match="loads must be finite and not negative"):
        sched.source_rail_skew([[0, -1]])


@pytest.mark.parametrize("name", ["waves", "quota", "matching", "plan", "descriptors"])
def test_examples_in_docstrings(name):
    result = doctest.testmod(importlib.import_module(f"railwave.sched.{name}"))
    assert result.attempted > 0 and result.failed == 0


def test_every_public_function_has_an_example_and_a_source():
    for name in sched.__all__:
        thing = getattr(sched, name)
        if callable(thing) and not isinstance(thing, type):
            assert "Source: " in thing.__doc__, name
            assert "Example:" in thing.__doc__, name


def test_sched_imports_only_what_lies_above_it():
    allowed = (
        "__future__",
        "collections",
        "dataclasses",
        "math",
        "time",
        "typing",
        "numpy",
        "torch",
    )
    above = ("railwave._check", "railwave.topology", "railwave.sched")
    for path in Path(sched.__file__).parent.glob("*.py"):
        for statement in ast.walk(ast.parse(path.read_text())):
            if isinstance(statement, ast.Import):
                modules = [alias.name for alias in statement.names]
            elif isinstance(statement, ast.ImportFrom):
                modules = [statement.module]
            else:
                continue
            for module in modules:
                assert module.split(".")[0] in allowed or module.startswith(above), (path, module)


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_default_device_of_the_caller_plays_no_part(device):
    topo = Topology(3, 2, 2)
    with torch.device(device):
        balanced = sched.plan([[0, 5, 4], [0, 0, 0]], topo, node=0)
        kappa = sched.receiver_concentration([[0, 5], [3, 0]], [{(0, 1), (1, 0)}])
    assert balanced.quota.tolist() == [[0, 2, 2], [0, 3, 2]] and kappa == 1.25
