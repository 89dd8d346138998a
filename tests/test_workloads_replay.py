"""Workloads of the paper: the presets, the replay and UltraEP's traffic."""

import doctest
import importlib
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from railwave.sched import receiver_concentration, source_rail_skew, waves
from railwave.topology import Topology
from railwave.workloads import (
    PATTERNS,
    PRESETS,
    Preset,
    expert_bins,
    preset,
    replay,
    replay_windows,
    ultraep_demand,
)
from railwave.workloads.records import apportion, check_records, deal, in_bytes


def rail_loads(per_gpu, topo):
    """Sum (N, G) loads of GPUs to (N, R) loads of rails."""
    loads = np.zeros((topo.nodes, topo.rails_per_node))
    np.add.at(loads, (slice(None), list(topo.rail_of_gpu)), per_gpu)
    return loads


def egress(demand):
    return rail_loads(demand.owned.sum(axis=2), demand.topo)


def ingress(demand):
    """(N, R) loads where the rail is the destination's local index."""
    return rail_loads(demand.bound.sum(axis=0), demand.topo)


def bound_ms(demand, cluster):
    """T* of one way: the busiest node over all its rails."""
    between = demand.between_nodes
    busiest = max(between.sum(axis=0).max(), between.sum(axis=1).max())
    rails = cluster.topo.rails_per_node
    return busiest / (rails * cluster.rail_gbytes_s * 1e9) * 1e3


# Whole records


@given(st.lists(st.integers(0, 50), max_size=8), st.integers(1, 6))
def test_deal_is_a_round_of_cards(counts, parts):
    shares = deal(counts, parts)
    owner = [row for row, count in enumerate(counts) for _ in range(count)]
    expected = Counter((row, card % parts) for card, row in enumerate(owner))
    assert shares.shape == (len(counts), parts) and shares.dtype == torch.int64
    for row in range(len(counts)):
        assert shares[row].tolist() == [expected[row, part] for part in range(parts)]


@given(st.integers(0, 2**53 - 1), st.lists(st.floats(0, 1e300), min_size=1, max_size=9))
@example(2**53 - 9, [5.055798054370495e299, 0.0, 7.854936056943714e299])  # shares rounded up
def test_apportion_conserves_and_stays_within_one(total, weights):
    if not any(weights):
        weights[0] = 1.0
    shares = apportion(total, weights)
    assert int(shares.sum()) == total and int(shares.min()) >= 0
    assert not shares[[weight == 0 for weight in weights]].any()
    if total < 2**40:  # where float64 shares are exact to well below one record
        scaled = np.array(weights) / max(weights)
        exact = total * scaled / scaled.sum()
        assert (np.abs(shares.numpy() - exact) < 1 + 1e-3).all()


def test_apportion_gives_the_largest_remainders():
    assert apportion(7, [6, 6, 2]).tolist() == [3, 3, 1]
    assert apportion(5, [1, 2, 1]).tolist() == [1, 3, 1]  # 1.25, 2.5, 1.25
    assert apportion(0, [1, 0]).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: deal([1.5], 2), TypeError, "counts must be integers"),
        (lambda: deal([-1], 2), ValueError, "counts must not be negative, got -1"),
        (lambda: deal([1], 0), ValueError, "parts must be at least 1, got 0"),
        (lambda: deal([2**53, 1], 2), ValueError, r"counts must have a sum below 2\*\*53"),
        (lambda: apportion(-1, [1]), ValueError, "total must be at least 0, got -1"),
        (lambda: apportion(2**53, [1]), ValueError, r"total must be below 2\*\*53"),
        (lambda: apportion(1, [0, 0]), ValueError, r"not all 0, got \[0, 0\]"),
        (lambda: apportion(1, [1, float("nan")]), ValueError, "weights must be .* finite"),
        (lambda: apportion(1, ["a"]), TypeError, "weights must be numbers"),
        (lambda: in_bytes(torch.tensor([2**52]), 1024), ValueError, r"below (2\*\*53|9007)"),
        (lambda: in_bytes(torch.tensor([1]), 0), ValueError, "record_bytes must be at least 1"),
        (lambda: check_records([2**62, 2**62], None, "x"), ValueError, "x must have a sum"),
    ],
)
def test_records_refuse(call, error, message):
    with pytest.raises(error, match=message):
        call()


# Presets


def test_presets_are_the_papers_clusters():
    assert PRESETS == ("h800", "h20")
    h800, h20 = preset("h800"), preset("h20")
    assert h800.topo == Topology(4, 8, 8, rail_of_gpu=range(8))
    assert h20.topo == Topology(4, 8, 4, rail_of_gpu=(0, 0, 1, 1, 2, 2, 3, 3))
    for cluster in (h800, h20):  # both have 8 ports of 200 Gb/s a node
        assert cluster.topo.rails_per_node * cluster.rail_gbytes_s * 8 == 8 * 200
    assert (h800.nvlink_gbytes_s, h20.nvlink_gbytes_s) == (200, 450)
    other = preset("h800", nodes=16, nvlink_gbytes_s=160)
    assert (other.topo.nodes, other.nvlink_gbytes_s) == (16, 160)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: preset("h100"), ValueError, r"name must be one of \['h800', 'h20'\], got 'h100'"),
        (lambda: preset("h20", nodes=0), ValueError, "nodes must be at least 1, got 0"),
        (lambda: preset("h20", nvlink_gbytes_s=0), ValueError, "nvlink_gbytes_s must be finite"),
        (lambda: Preset(preset("h20").topo, "1", 2), TypeError, "rail_gbytes_s must be a number"),
        (lambda: Preset(preset("h20").topo, True, 2), TypeError, "rail_gbytes_s must be a number"),
        (lambda: Preset((4, 8), 1, 2), TypeError, "topo must be a railwave.Topology, got tuple"),
    ],
)
def test_presets_refuse(call, error, message):
    with pytest.raises(error, match=message):
        call()


# The replay


def test_table_8():
    tuples = {
        "ring": [(1, 2, 3, 0)],
        "moderate": [(1, 0, 0, 2), (2, 3, 1, 0), (3, 2, 3, 1)],
        "extreme": [(1, 0, 0, 0), (3, 3, 3, 2), (2, 2, 1, 1)],
        "permutation": [(1, 2, 3, 0), (2, 3, 0, 1), (3, 0, 1, 2)],
    }
    assert set(tuples) == set(PATTERNS)
    for pattern, table in tuples.items():
        windows = replay_windows(pattern, 4)
        assert list(windows) == [{(s, row[s]) for s in range(4)} for row in table]


def peak_incast(window):
    return max(Counter(destination for _, destination in window).values())


def test_incast_degrees_of_table_8_and_three_five_eight():
    degrees = {p: [peak_incast(w) for w in replay_windows(p, 4)] for p in PATTERNS}
    assert degrees["ring"] == [1]
    assert degrees["moderate"] == [2, 1, 2]
    assert degrees["extreme"] == [3, 3, 2]
    assert degrees["permutation"] == [1, 1, 1]
    # With equal pairs and shared ports, a window lasts as long as its busiest receiver.
    costs = [sum(degrees[p]) for p in ("permutation", "moderate", "extreme")]
    assert costs == [3, 5, 8]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_each_pair_with_bytes_sends_in_one_window(pattern):
    built = replay(pattern, range(128), preset("h800").topo)
    pairs = [pair for window in built.windows for pair in window]
    assert len(pairs) == len(set(pairs)) == (4 if pattern == "ring" else 12)
    assert set(pairs) == set(zip(*built.demand.between_nodes.nonzero(), strict=True))


@settings(deadline=None)
@given(data=st.data(), even=st.booleans())
def test_replay_keeps_what_a_source_owns_and_where_it_is_bound(data, even):
    nodes, gpus = data.draw(st.integers(2, 5)), data.draw(st.integers(1, 4))
    count = st.one_of(st.just(0), st.integers(0, 40), st.integers(0, 10**6))
    size = gpus * data.draw(st.integers(1, 3))
    counts = data.draw(st.lists(count, min_size=size, max_size=size))
    pattern = data.draw(st.sampled_from(PATTERNS if nodes == 4 else ("ring", "permutation")))
    topo = Topology(nodes, gpus, gpus)
    demand = replay(pattern, counts, topo, even_sources=even, record_bytes=3).demand
    bins = sorted(counts, reverse=True)
    bins = np.array(bins).reshape(gpus, -1).sum(axis=1)
    for node in range(nodes):
        assert (demand.bound[node].sum(axis=0) == 3 * bins).all()
        owned = demand.owned[node].sum(axis=1) // 3
        if even:
            assert owned.max() - owned.min() <= 1 and owned.sum() == bins.sum()
        else:
            assert (owned == bins).all()
        sent = demand.between_nodes[node][np.arange(nodes) != node] // 3
        if pattern == "ring":
            assert np.count_nonzero(sent) <= 1
        else:
            assert sent.max() - sent.min() <= 1
            each = np.delete(demand.bound[node], node, axis=0) // 3
            assert (each.max(axis=0) - each.min(axis=0) <= 1).all()
        # A rotation of the nodes changes nothing.
        turned = np.roll(demand.between_nodes, (node, node), axis=(0, 1))
        assert (turned == demand.between_nodes).all()


def test_the_three_patterns_share_a_demand():
    topo = preset("h20").topo
    counts = [7 * expert % 97 for expert in range(128)]
    one, *others = (replay(p, counts, topo).demand for p in PATTERNS if p != "ring")
    for other in others:
        assert (one.owned == other.owned).all() and (one.bound == other.bound).all()
    assert one.between_nodes.sum() == 4 * sum(counts) * 14336


def test_both_rail_rules_are_uneven_and_even_sources_one():
    topo = Topology(4, 2, 2)
    # Bins 30 and 6: the busiest rail has 30 of a mean of 18.
    demand = replay("moderate", [6, 30], topo).demand
    assert source_rail_skew(egress(demand)) == source_rail_skew(ingress(demand)) == 30 / 18
    even = replay("moderate", [6, 30], topo, even_sources=True).demand
    assert source_rail_skew(egress(even)) == 1
    assert source_rail_skew(ingress(even)) == 30 / 18


def test_even_sources_cost_one_five_thirds_and_eight_thirds_of_the_bound():
    """Rail = source GPU, ports shared fairly: a window lasts as long as its busiest port."""
    cluster = preset("h800")
    costs = []
    for pattern in ("permutation", "moderate", "extreme"):
        built = replay(pattern, [24] * 128, cluster.topo, even_sources=True)
        time = 0
        for window in built.windows:
            received = np.zeros((4, 8))
            for source, destination in window:
                received[destination] += built.demand.owned[source, :, destination]
            time += received.max() / 25e9 * 1e3
        costs.append(time / bound_ms(built.demand, cluster))
    assert costs == pytest.approx([1, 5 / 3, 8 / 3], rel=1e-12)


def test_receiver_concentration_of_the_patterns():
    between = replay("extreme", [24] * 128, preset("h800").topo).demand.between_nodes
    kappa = [receiver_concentration(between, replay_windows(p, 4)) for p in PATTERNS]
    assert kappa == [1, 2, 3, 1]


def test_permutation_uses_the_waves_of_any_number_of_nodes():
    windows = replay_windows("permutation", 6)
    assert [sorted(w) for w in windows] == [list(enumerate(row)) for row in waves(6)]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(pattern="Ring"), ValueError, r"pattern must be one of \['ring', .*\], got 'Ring'"),
        (dict(topo=Topology(3, 8, 8)), ValueError, r"nodes must be 4 for 'extreme' .*, got 3"),
        (dict(topo=Topology(1, 8, 8), pattern="ring"), ValueError, "at least 2 .*, got 1"),
        (dict(counts=[1] * 12), ValueError, r"gpus_per_node \(8\) experts, got 12"),
        (dict(counts=[]), ValueError, "positive multiple .* got 0"),
        (dict(counts=[0.5] * 8), TypeError, "counts must be integers"),
        (dict(counts=[-1] * 8), ValueError, "counts must not be negative, got -1"),
        (dict(record_bytes=0), ValueError, "record_bytes must be at least 1, got 0"),
        (dict(counts=[2**49] * 8), ValueError, r"records x record_bytes must be below 2\*\*53"),
    ],
)
def test_replay_refuses(change, error, message):
    good = dict(pattern="extreme", counts=[1] * 8, topo=Topology(4, 8, 8))
    with pytest.raises(error, match=message):
        replay(**(good | change))


def test_expert_bins_by_hand():
    assert expert_bins(np.arange(128), 8).tolist() == [
        sum(range(128 - 16 * (g + 1), 128 - 16 * g)) for g in range(8)
    ]


# UltraEP


@pytest.mark.parametrize(
    ("case", "tokens", "both_ways_ms"),
    [("N28", 65536, 9.40), ("R28", 65536, 9.40), ("N42", 98304, 14.09), ("R42", 98304, 14.09)],
)
def test_ultraep_reaches_the_bound_of_the_notes(case, tokens, both_ways_ms):
    cluster = preset("h800")
    demand = ultraep_demand(case, cluster.topo)
    between = demand.between_nodes
    assert between.sum() == tokens * 14336 == between[1:, 0].sum()
    assert between.sum() / 32 == int(case[1:]) * 2**20
    assert round(2 * bound_ms(demand, cluster), 2) == both_ways_ms
    # The GPUs of the destination get the same, whatever the source; each to a record a source.
    received = demand.bound[:, 0].sum(axis=0)
    assert received.max() - received.min() <= 14336


def test_ultraep_n_is_uneven_in_nodes_and_even_in_rails():
    demand = ultraep_demand("N28", preset("h800").topo)
    sent = demand.between_nodes[:, 0] / 14336
    assert sent.tolist() == [0, 32768, 21845, 10923]
    spread = demand.owned[:, :, 0].max(axis=1) - demand.owned[:, :, 0].min(axis=1)
    assert (spread <= 14336).all()
    other = ultraep_demand("N28", preset("h800").topo, source_weights=(0, 0, 5))
    assert other.between_nodes[:, 0].tolist() == [0, 0, 0, 65536 * 14336]


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("hot_rails", [1, 2, 4])
def test_ultraep_r_is_even_in_nodes_and_uneven_in_rails(name, hot_rails):
    topo = preset(name).topo
    demand = ultraep_demand("R42", topo, hot_rails=hot_rails)
    sent = demand.between_nodes[1:, 0] // 14336
    assert sent.max() - sent.min() <= 1
    for loads in egress(demand)[1:]:
        assert np.count_nonzero(loads) == hot_rails
        concentration = topo.rails_per_node / hot_rails
        assert loads.max() / loads.mean() == pytest.approx(concentration, rel=1e-3)


def test_ultraep_on_other_clusters():
    demand = ultraep_demand("N28", Topology(2, 4, 4))
    assert demand.between_nodes.tolist() == [[0, 0], [28 * 2**20 * 8, 0]]
    demand = ultraep_demand("N42", Topology(6, 2, 2), record_bytes=2**20)
    assert (demand.between_nodes[:, 0] // 2**20).tolist() == [0, 168, 134, 101, 67, 34]


@pytest.mark.parametrize(
    ("case", "topo", "options", "error", "message"),
    [
        ("N14", Topology(4, 8, 8), {}, ValueError, "case must be one of .*, got 'N14'"),
        ("N28", Topology(1, 8, 8), {}, ValueError, "at least 2 nodes, got 1"),
        (
            "N28",
            Topology(3, 8, 8),
            dict(source_weights=[3, 2, 1]),
            ValueError,
            r"each of the 2 sending nodes, got 3",
        ),
        ("N28", Topology(4, 8, 8), dict(source_weights=[0, 0, 0]), ValueError, "not all 0"),
        ("R28", Topology(4, 8, 8), dict(hot_rails=9), ValueError, r"in \[1, 8\], got 9"),
        ("R28", Topology(4, 8, 8), dict(hot_rails=2.0), TypeError, "hot_rails must be an int"),
        (
            "R28",
            Topology(2, 2, 2, rail_of_gpu=(1, 1)),
            dict(hot_rails=1),
            ValueError,
            "rails with a GPU",
        ),
        ("R28", Topology(4, 8, 8), dict(record_bytes=-1), ValueError, "record_bytes must be"),
    ],
)
def test_ultraep_refuses(case, topo, options, error, message):
    with pytest.raises(error, match=message):
        ultraep_demand(case, topo, **options)


@pytest.mark.parametrize("name", ["presets", "records", "replay", "ultraep"])
def test_docstring_examples(name):
    result = doctest.testmod(importlib.import_module(f"railwave.workloads.{name}"))
    assert result.attempted and not result.failed
