"""Demands from routing, from counts and from traces; routing with two independent skews."""

import doctest
import importlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from railwave.topology import Topology
from railwave.workloads import (
    demand_from_counts,
    demand_from_routing,
    hot_routing,
    list_iterations,
    read_counts,
    read_iteration,
    skewed_routing,
    trace_demand,
    trace_demands,
    zipf_routing,
)
from traces import REAL_TRACE, needs_real_trace

# Demand from routing


@st.composite
def routings(draw):
    """Draw (topk_idx per rank, topo, num_experts, expert_to_rank)."""
    topo = Topology(draw(st.integers(1, 3)), draw(st.integers(1, 3)), 2)
    num_experts, top_k = draw(st.integers(1, 7)), draw(st.integers(1, 4))
    token = st.lists(st.integers(-1, num_experts - 1), min_size=top_k, max_size=top_k)
    topk_idx = [draw(st.lists(token, max_size=5)) for _ in range(topo.num_ranks)]
    ranks = st.integers(0, topo.num_ranks - 1)
    to_rank = draw(st.lists(ranks, min_size=num_experts, max_size=num_experts))
    return topk_idx, topo, num_experts, to_rank


def count_by_hand(topk_idx, topo, to_rank, per):
    """One token at a time, by sets and dictionaries."""
    N, G = topo.nodes, topo.gpus_per_node
    owned, bound = np.zeros((N, G, N), int), np.zeros((N, N, G), int)
    for source, tokens in enumerate(topk_idx):
        for token in tokens:
            ranks = [to_rank[expert] for expert in token if expert >= 0]
            if per == "row":
                units = set(ranks)
            else:
                units = {rank // G: rank for rank in reversed(ranks)}.values()
            for rank in units:
                if rank // G != source // G:
                    owned[source // G, source % G, rank // G] += 1
                    bound[source // G, rank // G, rank % G] += 1
    return owned, bound


@settings(deadline=None)
@given(routings(), st.sampled_from(["record", "row"]), st.integers(1, 9))
def test_demand_from_routing_counts_token_by_token(case, per, record_bytes):
    topk_idx, topo, num_experts, to_rank = case
    demand = demand_from_routing(
        topk_idx,
        topo,
        num_experts=num_experts,
        per=per,
        expert_to_rank=to_rank,
        record_bytes=record_bytes,
    )
    owned, bound = count_by_hand(topk_idx, topo, to_rank, per)
    assert (demand.owned == owned * record_bytes).all()
    assert (demand.bound == bound * record_bytes).all()


def test_rows_are_records_where_no_two_experts_share_a_node():
    routing = skewed_routing(4, 50, 8, 1, gpus_per_node=2, skew=1.0, seed=0)
    topo = Topology(2, 2, 2)
    pair = [
        demand_from_routing(routing.topk_idx, topo, num_experts=8, per=per)
        for per in ("record", "row")
    ]
    assert (pair[0].owned == pair[1].owned).all() and (pair[0].bound == pair[1].bound).all()
    counts = torch.stack([torch.bincount(t.flatten(), minlength=8) for t in routing.topk_idx])
    counted = demand_from_counts(counts, topo)
    assert (pair[0].owned == counted.owned).all() and (pair[0].bound == counted.bound).all()


def test_experts_are_spread_over_ranks_as_the_communicator_does():
    # e * 2 // 3: experts 0 and 1 on rank 0, expert 2 on rank 1.
    demand = demand_from_counts([[0, 1, 10], [100, 1000, 0]], Topology(2, 1, 1), record_bytes=1)
    assert demand.between_nodes.tolist() == [[0, 10], [1100, 0]]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(per="token"), ValueError, r"per must be one of \['record', 'row'\], got 'token'"),
        (dict(topk_idx=[[[0]]]), ValueError, "each of the 2 ranks, got 1"),
        (dict(topk_idx=[[[0]], [[4]]]), ValueError, r"topk_idx\[1\] must be in \[-1, 4\), got 4"),
        (dict(topk_idx=[[[-2]], []]), ValueError, r"topk_idx\[0\] must be in \[-1, 4\), got -2"),
        (dict(topk_idx=[[[0.5]], []]), TypeError, r"topk_idx\[0\] must be integers"),
        (dict(topk_idx=[[0], []]), ValueError, r"\(tokens, top_k\), got \(1,\)"),
        (dict(num_experts=0), ValueError, "num_experts must be at least 1, got 0"),
        (dict(expert_to_rank=[0, 1]), ValueError, r"one rank per expert \(4\), got 2"),
        (dict(expert_to_rank=[0, 1, 2, 1]), ValueError, r"expert_to_rank\[2\] must be in \[0, 2"),
        (dict(record_bytes=0), ValueError, "record_bytes must be at least 1"),
        (dict(record_bytes=2**62), ValueError, r"below (2\*\*53|9007)"),
    ],
)
def test_demand_from_routing_refuses(change, error, message):
    good = dict(topk_idx=[[[0]], [[3]]], topo=Topology(2, 1, 1), num_experts=4)
    with pytest.raises(error, match=message):
        demand_from_routing(**(good | change))


@pytest.mark.parametrize(
    ("counts", "error", "message"),
    [
        ([[1, 2]], ValueError, r"counts must be of shape \(2, experts\), got \(1, 2\)"),
        ([[], []], ValueError, r"counts must be of shape \(2, experts\), got \(2, 0\)"),
        ([[1], [-2]], ValueError, "counts must not be negative, got -2"),
        ([[1.0], [1.0]], TypeError, "counts must be integers"),
        ([[2**52], [2**52]], ValueError, r"counts must have a sum below 2\*\*53"),
    ],
)
def test_demand_from_counts_refuses(counts, error, message):
    with pytest.raises(error, match=message):
        demand_from_counts(counts, Topology(2, 1, 1))


# Traces


def test_trace_demand_by_hand(tmp_path):
    (tmp_path / "table_iter1_rank0.log").write_text("0:[[3.0, 1.0], [0.0, 8.0]]\n")
    (tmp_path / "table_iter1_rank1.log").write_text("0:[[2.0, 4.0], [0.0, 0.0]]\n")
    topo = Topology(2, 1, 1)
    demand = trace_demand(tmp_path, 1, 0, topo, record_bytes=10)
    assert demand.between_nodes.tolist() == [[0, 10], [20, 0]]
    demand = trace_demand(tmp_path, 1, 0, topo, micro_batch=1, record_bytes=10)
    assert demand.between_nodes.tolist() == [[0, 80], [0, 0]]
    with pytest.raises(ValueError, match=r"topo must have the 2 ranks of the trace in .*, got 4"):
        trace_demand(tmp_path, 1, 0, Topology(2, 2, 2))


@needs_real_trace
@pytest.mark.parametrize("layer", [0, 12, 23])
def test_real_trace_on_four_by_four(layer):
    topo = Topology(4, 4, 4)
    for iteration in list_iterations(REAL_TRACE):
        counts = read_counts(REAL_TRACE, iteration, layer, micro_batch=3)
        demand = trace_demand(REAL_TRACE, iteration, layer, topo, micro_batch=3)
        # 8 experts a node: what a node does not send itself leaves it.
        by_node = counts.view(4, 4, 4, 8).sum(dim=(1, 3)).numpy()
        assert (by_node.sum(axis=1) == 4 * 4096).all()
        np.fill_diagonal(by_node, 0)
        assert (demand.between_nodes == by_node * 14336).all()
        of_gpu = counts.view(4, 4, 4, 4, 2).sum(dim=4).numpy()  # node, GPU, node, GPU
        assert demand.owned[1, 2, 3] == of_gpu[1, 2, 3].sum() * 14336
        assert demand.bound[1, 3, 2] == of_gpu[1, :, 3, 2].sum() * 14336


@needs_real_trace
def test_a_whole_iteration_is_what_its_parts_are():
    topo = Topology(4, 4, 4)
    tables = read_iteration(REAL_TRACE, 501)
    demands = trace_demands(REAL_TRACE, 501, topo)
    places = [(layer, micro_batch) for layer in range(24) for micro_batch in range(4)]
    assert list(tables) == list(demands) == places
    for layer, micro_batch in [(0, 0), (9, 3), (23, 1)]:
        counts = read_counts(REAL_TRACE, 501, layer, micro_batch=micro_batch)
        assert torch.equal(tables[layer, micro_batch], counts)
        one = trace_demand(REAL_TRACE, 501, layer, topo, micro_batch=micro_batch)
        other = demands[layer, micro_batch]
        assert (one.owned == other.owned).all() and (one.bound == other.bound).all()


def test_read_iteration_by_hand(tmp_path):
    (tmp_path / "table_iter1_rank0.log").write_text("7:[[1.0]]\n2:[[3.0, 1.0], [5.0, 6.0]]\n")
    (tmp_path / "table_iter1_rank1.log").write_text("2:[[0.0, 4.0], [7.0, 8.0]]\n7:[[2.0]]\n")
    tables = read_iteration(tmp_path, 1)
    assert {place: table.tolist() for place, table in tables.items()} == {
        (2, 0): [[3, 1], [0, 4]],
        (2, 1): [[5, 6], [7, 8]],
        (7, 0): [[1], [2]],
    }
    assert list(tables) == [(2, 0), (2, 1), (7, 0)]
    with pytest.raises(ValueError, match="iteration must be one of"):
        read_iteration(tmp_path, 2)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("0:[[1.0, 1.0]]\n1:[[1.0]]", r"\(1, 0\) 0 experts for rank 0 and 1 in .*rank1.log"),
        ("0:[[1.0, 1.0], [1.0, 1.0]]", r"\(0, 1\) 0 experts for rank 0 and 2 in .*rank1.log"),
        ("0:[[1.0]]", r"\(0, 0\) 2 experts for rank 0 and 1 in .*rank1.log"),
        ("", r"\(0, 0\) 2 experts for rank 0 and 0 in .*rank1.log"),
        ("0:[[x]]", r"rank1.log, line 1: "),
    ],
)
def test_read_iteration_refuses(tmp_path, line, message):
    (tmp_path / "table_iter1_rank0.log").write_text("0:[[1.0, 2.0]]\n")
    (tmp_path / "table_iter1_rank1.log").write_text(line)
    with pytest.raises(ValueError, match=message):
        read_iteration(tmp_path, 1)


# Routing with two skews

SIZES = dict(num_ranks=4, num_tokens=300, num_experts=16, gpus_per_node=2)


def lengths(routing):
    return [len(topk_idx) for topk_idx in routing.topk_idx]


def counts_of(topk_idx):
    return torch.bincount(torch.cat(topk_idx).flatten(), minlength=16)


@pytest.mark.parametrize("skew", [0.0, 0.7, 2.0])
def test_skewed_routing_is_zipf_routing_with_both_knobs(skew):
    old = skewed_routing(**SIZES, top_k=2, skew=skew, seed=5)
    new = zipf_routing(**SIZES, top_k=2, expert_skew=skew / 2, source_skew=skew, seed=5)
    for name in ("topk_idx", "topk_weights"):
        for one, other in zip(getattr(old, name), getattr(new, name), strict=True):
            assert torch.equal(one, other)


def test_the_knobs_are_independent():
    for expert_skew in (0.0, 2.0):
        for source_skew, expected in ((0.0, [300] * 4), (1.0, [300, 150, 150, 300])):
            routing = zipf_routing(
                **SIZES, top_k=1, expert_skew=expert_skew, source_skew=source_skew, seed=1
            )
            assert lengths(routing) == expected
            counts = counts_of(routing.topk_idx)
            share = float(counts.max() / counts.sum())
            # Zipf(2) over 16: the first has 0.63; uniform: 0.0625. Under 0.017 deviations.
            assert abs(share - 0.63) < 0.08 if expert_skew else share < 0.1
    hot = [
        int(
            counts_of(
                zipf_routing(**SIZES, top_k=1, expert_skew=2, source_skew=s, seed=1).topk_idx
            ).argmax()
        )
        for s in (0, 1)
    ]
    assert hot[0] == hot[1]


def test_hot_experts_take_their_share_of_first_choices():
    for source_skew, expected in ((0.0, [300] * 4), (1.0, [300, 150, 150, 300])):
        routing = hot_routing(
            **SIZES, top_k=3, hot_share=0.6, hot_experts=2, source_skew=source_skew, seed=4
        )
        assert lengths(routing) == expected
        first = counts_of([topk_idx[:, :1] for topk_idx in routing.topk_idx])
        shares = first.sort(descending=True).values / first.sum()
        # 0.3 each, deviation below 0.016 for 900 tokens; the others 0.4 / 14 = 0.029.
        assert ((shares[:2] - 0.3).abs() < 0.055).all() and shares[2] < 0.06
        for topk_idx in routing.topk_idx:
            in_order = topk_idx.sort(dim=1).values
            assert (in_order[:, 1:] != in_order[:, :-1]).all()


@pytest.mark.parametrize(
    ("draw", "change", "error", "message"),
    [
        (zipf_routing, dict(expert_skew=-1), ValueError, "expert_skew must be finite and at"),
        (zipf_routing, dict(expert_skew="1"), TypeError, "expert_skew must be a number, got '1'"),
        (
            zipf_routing,
            dict(expert_skew=1, source_skew=float("inf")),
            ValueError,
            "source_skew must be finite and at least 0, got inf",
        ),
        (zipf_routing, dict(expert_skew=1, top_k=17), ValueError, "top_k must be at most"),
        (hot_routing, dict(hot_share=1), ValueError, "hot_share must be above 0 and below 1"),
        (hot_routing, dict(hot_share=0.0), ValueError, "hot_share must be above 0 and below 1"),
        (hot_routing, dict(hot_share=None), TypeError, "hot_share must be a number, got None"),
        (
            hot_routing,
            dict(hot_share=0.5, hot_experts=16),
            ValueError,
            r"hot_experts must be below num_experts \(16\), got 16",
        ),
        (hot_routing, dict(hot_share=0.5, source_skew=-1), ValueError, "source_skew must be"),
    ],
)
def test_draws_refuse(draw, change, error, message):
    with pytest.raises(error, match=message):
        draw(**(SIZES | dict(top_k=2, seed=0) | change))


@pytest.mark.parametrize("name", ["routing", "popularity", "demands"])
def test_docstring_examples(name):
    result = doctest.testmod(importlib.import_module(f"railwave.workloads.{name}"))
    assert result.attempted and not result.failed
