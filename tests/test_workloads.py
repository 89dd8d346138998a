"""Workloads: skewed routing, the trace format, and tokens drawn from counts."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from railwave import Topology, workloads
from railwave.workloads import (
    generate_trace,
    list_iterations,
    read_counts,
    skewed_routing,
    subsample,
    tokens_from_counts,
    write_counts,
)
from railwave.workloads import tokens as tokens_module
from railwave.workloads.routing import distinct_experts, zipf_log_popularity
from traces import REAL_TRACE, needs_real_trace

ROOT = Path(__file__).resolve().parents[1]
seeds = st.integers(0, 2**63 - 1)


def assert_distinct(topk_idx):
    in_order = topk_idx.sort(dim=1).values
    assert (in_order[:, 1:] != in_order[:, :-1]).all()


def counts_of(topk_idx, num_experts):
    return torch.bincount(topk_idx.flatten(), minlength=num_experts)


# Skewed routing


@settings(deadline=None, max_examples=60)
@given(data=st.data(), skew=st.floats(0, 1e6), seed=seeds)
def test_skewed_routing_holds_its_promises(data, skew, seed):
    gpus_per_node = data.draw(st.integers(1, 4))
    num_ranks = gpus_per_node * data.draw(st.integers(1, 4))
    num_tokens = data.draw(st.integers(0, 20))
    num_experts = data.draw(st.integers(1, 12))
    top_k = data.draw(st.integers(1, num_experts))
    args = (num_ranks, num_tokens, num_experts, top_k)
    options = dict(gpus_per_node=gpus_per_node, skew=skew, seed=seed)
    routing = skewed_routing(*args, **options)
    again = skewed_routing(*args, **options)

    assert len(routing.topk_idx) == len(routing.topk_weights) == num_ranks
    for rank in range(num_ranks):
        topk_idx, topk_weights = routing.topk_idx[rank], routing.topk_weights[rank]
        assert topk_idx.dtype == torch.int64 and topk_weights.dtype == torch.float32
        assert topk_idx.shape == topk_weights.shape == (len(topk_idx), top_k)
        assert len(topk_idx) <= num_tokens
        assert ((topk_idx >= 0) & (topk_idx < num_experts)).all()
        assert_distinct(topk_idx)
        assert (topk_weights > 0).all()
        # K additions of float32 numbers below one: half an ulp each.
        torch.testing.assert_close(
            topk_weights.sum(dim=1), torch.ones(len(topk_idx)), rtol=0, atol=top_k * 2**-23
        )
        assert torch.equal(topk_idx, again.topk_idx[rank])
        assert torch.equal(topk_weights, again.topk_weights[rank])


def test_skewed_routing_rotates_the_hot_rail():
    routing = skewed_routing(6, 8, 16, 2, gpus_per_node=2, skew=1.0, seed=0)
    assert [len(topk_idx) for topk_idx in routing.topk_idx] == [8, 4, 4, 8, 8, 4]


def test_skew_zero_is_even_and_uniform():
    routing = skewed_routing(4, 1000, 8, 2, gpus_per_node=2, skew=0, seed=3)
    assert [len(topk_idx) for topk_idx in routing.topk_idx] == [1000] * 4
    counts = counts_of(torch.cat(routing.topk_idx), 8)
    # Mean 1000, standard deviation 27 for each expert: five of them.
    assert counts.min() > 865 and counts.max() < 1135


def test_skew_makes_experts_uneven_and_the_seed_chooses_them():
    hottest = set()
    for seed in range(8):
        routing = skewed_routing(2, 500, 16, 1, gpus_per_node=1, skew=2.0, seed=seed)
        counts = counts_of(torch.cat(routing.topk_idx), 16)
        # The Zipf share of the first of 16 is 1 / H(16) = 0.296; 0.25 is three deviations below.
        assert counts.max() > 0.25 * counts.sum()
        hottest.add(int(counts.argmax()))
    assert len(hottest) > 1


def test_distinct_experts_and_popularity_by_hand():
    uniform = torch.tensor([[0.5, 0.9, 0.1]])
    assert distinct_experts(uniform, torch.zeros(3), 2).tolist() == [[1, 0]]
    popularity = zipf_log_popularity(torch.tensor([1, 0]), 1.0).exp()
    assert popularity.tolist() == [0.5, 1.0]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(top_k=9), ValueError, r"top_k must be at most num_experts \(8\), got 9"),
        (dict(top_k=0), ValueError, "top_k must be at least 1, got 0"),
        (dict(num_ranks=3), ValueError, r"num_ranks must be a multiple .* \(2\), got 3"),
        (dict(num_tokens=-1), ValueError, "num_tokens must be at least 0, got -1"),
        (dict(num_experts=2.5), TypeError, "num_experts must be an int, got float 2.5"),
        (dict(gpus_per_node=0), ValueError, "gpus_per_node must be at least 1, got 0"),
        (dict(skew=-0.5), ValueError, "skew must be finite and at least 0, got -0.5"),
        (dict(skew=float("nan")), ValueError, "skew must be finite and at least 0, got nan"),
        (dict(skew="1"), TypeError, "skew must be a number, got '1'"),
        (dict(seed=-1), ValueError, "seed must be at least 0, got -1"),
        (dict(seed=2**63), ValueError, r"seed must be below 2\*\*63"),
    ],
)
def test_skewed_routing_refuses(change, error, message):
    good = dict(num_ranks=4, num_tokens=5, num_experts=8, top_k=2, gpus_per_node=2, skew=1, seed=0)
    with pytest.raises(error, match=message):
        skewed_routing(**(good | change))


# Tokens from counts


@st.composite
def feasible_counts(draw):
    """Counts of random tokens with distinct experts, so that a solution exists."""
    num_experts = draw(st.integers(1, 10))
    top_k = draw(st.integers(1, num_experts))
    token = st.permutations(range(num_experts)).map(lambda order: order[:top_k])
    tokens = draw(st.lists(token, max_size=20))
    flat = torch.tensor(tokens, dtype=torch.int64).reshape(-1)
    return counts_of(flat, num_experts), top_k


@settings(deadline=None, max_examples=60)
@given(case=feasible_counts(), seed=seeds)
def test_tokens_reproduce_counts(case, seed):
    counts_row, top_k = case
    topk_idx = tokens_from_counts(counts_row, top_k, seed=seed)
    assert topk_idx.dtype == torch.int64
    assert topk_idx.shape == (int(counts_row.sum()) // top_k, top_k)
    assert torch.equal(counts_of(topk_idx, len(counts_row)), counts_row)
    assert_distinct(topk_idx)
    assert torch.equal(topk_idx, tokens_from_counts(counts_row, top_k, seed=seed))


@settings(deadline=None, max_examples=60)
@given(case=feasible_counts(), seed=seeds)
def test_dealing_alone_is_distinct(case, seed):
    counts_row, top_k = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokens_module, "_SWAP_ROUNDS_PER_COLUMN", 0)
        topk_idx = tokens_from_counts(counts_row, top_k, seed=seed)
    assert torch.equal(counts_of(topk_idx, len(counts_row)), counts_row)
    assert_distinct(topk_idx)


def test_swaps_mix_the_experts_that_meet():
    num_experts, each = 16, 300
    topk_idx = tokens_from_counts(torch.full((num_experts,), each), 2, seed=0)
    in_order = topk_idx.sort(dim=1).values
    meetings = counts_of(in_order[:, 0] * num_experts + in_order[:, 1], num_experts**2)
    meetings = meetings[meetings > 0]
    # Dealing alone makes 8 pairs of 300; mixed, all 120 pairs meet 20 times, deviation under 5.
    assert len(meetings) == 120 and meetings.max() < 45


def test_tokens_from_counts_by_hand():
    topk_idx = tokens_from_counts(torch.tensor([0, 2, 2], dtype=torch.int32), 2, seed=0)
    assert topk_idx.sort(dim=1).values.tolist() == [[1, 2], [1, 2]]
    assert tokens_from_counts(torch.zeros(4, dtype=torch.int64), 2, seed=0).shape == (0, 2)


@pytest.mark.parametrize(
    ("counts_row", "top_k", "error", "message"),
    [
        (torch.tensor([2, 1]), 2, ValueError, r"sum divisible by top_k \(2\), got 3"),
        (torch.tensor([3, 1]), 2, ValueError, r"sum / top_k = 4 / 2 = 2, .*; got 3"),
        (torch.tensor([3, -1]), 2, ValueError, r"counts_row must be in \[0, 2\*\*53\], got -1 to"),
        (torch.tensor([[1, 1]]), 2, ValueError, r"counts_row must be of shape .* got \(1, 2\)"),
        (torch.tensor([1.0, 1.0]), 2, TypeError, "counts_row must be .*, got torch.float32"),
        ([1, 1], 2, TypeError, "counts_row must be a tensor of integers, got list"),
        (torch.tensor([1, 1]), 0, ValueError, "top_k must be at least 1, got 0"),
        (torch.tensor([1, 1]), 1.5, TypeError, "top_k must be an int, got float 1.5"),
    ],
)
def test_tokens_from_counts_refuses(counts_row, top_k, error, message):
    with pytest.raises(error, match=message):
        tokens_from_counts(counts_row, top_k, seed=0)


@settings(deadline=None)
@given(num_given=st.integers(0, 30), data=st.data(), seed=seeds)
def test_subsample_keeps_a_subset_in_order(num_given, data, seed):
    num_tokens = data.draw(st.integers(0, num_given))
    topk_idx = torch.arange(2 * num_given, dtype=torch.int32).view(num_given, 2)
    kept = subsample(topk_idx, num_tokens, seed=seed)
    assert kept.dtype == torch.int32 and kept.shape == (num_tokens, 2)
    assert (kept[1:, 0] > kept[:-1, 0]).all()
    assert torch.equal(kept, topk_idx[(kept[:, 0] // 2).long()])
    assert torch.equal(kept, subsample(topk_idx, num_tokens, seed=seed))


def test_subsample_refuses():
    topk_idx = torch.zeros(3, 2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"num_tokens must be at most .* \(3\), got 4"):
        subsample(topk_idx, 4, seed=0)
    with pytest.raises(ValueError, match="num_tokens must be at least 0, got -1"):
        subsample(topk_idx, -1, seed=0)


# The trace format


def test_trace_round_trip(tmp_path):
    counts = torch.arange(11 * 3 * 2 * 4).view(11, 3, 2, 4)
    write_counts(tmp_path / "new", 7, counts)
    write_counts(tmp_path / "new", 12, counts.int() * 2)
    assert list_iterations(tmp_path / "new") == [7, 12]
    for layer in range(3):
        for micro_batch in range(2):
            # 11 ranks: rank 10 sorts after rank 9, not after rank 1.
            read = read_counts(tmp_path / "new", 7, layer, micro_batch=micro_batch)
            assert read.dtype == torch.int64
            assert torch.equal(read, counts[:, layer, micro_batch])
    assert torch.equal(read_counts(tmp_path / "new", 12, 1), 2 * counts[:, 1, 0])


def test_trace_text_by_hand(tmp_path):
    write_counts(tmp_path, 0, torch.tensor([[[[3, 1], [0, 4]]]]))
    assert (tmp_path / "table_iter0_rank0.log").read_bytes() == b"0:[[3.0, 1.0], [0.0, 4.0]]\n"


def test_other_files_and_blank_lines_are_skipped(tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "table_iter1_rank00.log").write_text("x")
    (tmp_path / "table_iter1_rank0.log").write_text("\n 4 :[[1, 2]]\n\n")
    assert list_iterations(tmp_path) == [1]
    assert read_counts(tmp_path, 1, 4).tolist() == [[1, 2]]


def test_write_counts_refuses(tmp_path):
    with pytest.raises(ValueError, match=r"counts must be of shape .*, got \(2, 3\)"):
        write_counts(tmp_path, 0, torch.zeros(2, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match="no axis empty"):
        write_counts(tmp_path, 0, torch.zeros(2, 0, 1, 1, dtype=torch.int64))
    with pytest.raises(TypeError, match=r"counts must be .*, got torch.float32"):
        write_counts(tmp_path, 0, torch.zeros(1, 1, 1, 1))
    with pytest.raises(ValueError, match=r"counts must be in \[0, 2\*\*53\], got -1 to -1"):
        write_counts(tmp_path, 0, torch.full((1, 1, 1, 1), -1))
    with pytest.raises(ValueError, match="iteration must be at least 0, got -1"):
        write_counts(tmp_path, -1, torch.ones(1, 1, 1, 1, dtype=torch.int64))
    assert list(tmp_path.iterdir()) == []


def test_write_counts_refuses_to_mix_with_more_ranks(tmp_path):
    write_counts(tmp_path, 5, torch.ones(3, 1, 1, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"than the 2 written, got ranks \[2\]"):
        write_counts(tmp_path, 5, torch.zeros(2, 1, 1, 2, dtype=torch.int64))
    assert read_counts(tmp_path, 5, 0).tolist() == [[1, 1]] * 3


def test_read_counts_refuses_what_is_missing(tmp_path):
    missing = tmp_path / "none"
    for read in (lambda: list_iterations(missing), lambda: read_counts(missing, 1, 0)):
        with pytest.raises(FileNotFoundError, match=r"folder must be an existing directory .*none"):
            read()
    write_counts(tmp_path, 5, torch.ones(4, 2, 3, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"iteration must be one of \[5\] in .*, got 6"):
        read_counts(tmp_path, 6, 0)
    with pytest.raises(ValueError, match=r"layer must be one of \[0, 1\] in .*, got 2"):
        read_counts(tmp_path, 5, 2)
    with pytest.raises(ValueError, match=r"micro_batch must be below 3 .*, got 3"):
        read_counts(tmp_path, 5, 0, micro_batch=3)
    with pytest.raises(ValueError, match="micro_batch must be at least 0, got -1"):
        read_counts(tmp_path, 5, 0, micro_batch=-1)
    (tmp_path / "table_iter5_rank0.log").unlink()
    (tmp_path / "table_iter5_rank2.log").unlink()
    with pytest.raises(ValueError, match=r"ranks 0 to 3 of iteration 5, got none .* \[0, 2\]"):
        read_counts(tmp_path, 5, 0)


def test_read_counts_refuses_ranks_that_differ_in_experts(tmp_path):
    (tmp_path / "table_iter1_rank0.log").write_text("0:[[1.0, 2.0]]\n")
    (tmp_path / "table_iter1_rank1.log").write_text("0:[[1.0]]\n")
    with pytest.raises(
        ValueError, match=r"same number of experts, got 2 for rank 0 and 1 in .*rank1"
    ):
        read_counts(tmp_path, 1, 0)


@pytest.mark.parametrize(
    "line",
    [
        "[[1.0]]",
        "a:[[1.0]]",
        "-1:[[1.0]]",
        "1:[[1.0]",
        "1:",
        "1:7",
        "1:[]",
        "1:[[]]",
        "1:[1.0]",
        "1:[[1.0], [1.0, 2.0]]",
        "1:[[1.5]]",
        "1:[[-1.0]]",
        "1:[[NaN]]",
        "1:[[Infinity]]",
        "1:[[1e300]]",
        "1:[[true]]",
        '1:[["1"]]',
        "0:[[1.0]]",
        "1:" + "[" * 100_000,
    ],
    ids=lambda line: line[:24],
)
def test_read_counts_names_the_bad_line(tmp_path, line):
    (tmp_path / "table_iter1_rank0.log").write_text(f"0:[[1.0]]\n{line}\n")
    with pytest.raises(ValueError, match=r"table_iter1_rank0\.log, line 2: "):
        read_counts(tmp_path, 1, 0)


def test_read_counts_survives_bytes_that_are_not_text(tmp_path):
    (tmp_path / "table_iter1_rank0.log").write_bytes(b"0:[[1.0]]\n\xff\xfe\n")
    with pytest.raises(ValueError, match=r"table_iter1_rank0\.log, line 2: "):
        read_counts(tmp_path, 1, 0)


# The traces


def test_example_trace_regenerates_byte_for_byte(tmp_path):
    generate_trace(tmp_path)
    shipped = {path.name: path.read_bytes() for path in (ROOT / "examples/trace").glob("*.log")}
    assert len(shipped) == 8
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == shipped


def test_example_trace_is_skewed_and_can_be_drawn():
    hottest = set()
    for layer in range(3):
        for micro_batch in range(2):
            counts = read_counts(ROOT / "examples/trace", 1, layer, micro_batch=micro_batch)
            assert counts.shape == (8, 16)
            assert (counts.sum(dim=1) == 256).all() and counts.max() <= 128
            assert counts.sum(dim=0).max() > 2 * 128  # over twice the mean of an expert
            assert len(counts.unique(dim=0)) == 8
            for rank, row in enumerate(counts):
                assert torch.equal(counts_of(tokens_from_counts(row, 2, seed=rank), 16), row)
        hottest.add(int(counts.sum(dim=0).argmax()))
    assert len(hottest) == 3


def test_generate_trace_refuses(tmp_path):
    with pytest.raises(ValueError, match=r"top_k must be at most experts \(2\), got 3"):
        generate_trace(tmp_path, experts=2, top_k=3)
    with pytest.raises(ValueError, match="ranks must be at least 1, got 0"):
        generate_trace(tmp_path, ranks=0)
    with pytest.raises(TypeError, match=r"tokens must be an int, got float 1.5"):
        generate_trace(tmp_path, tokens=1.5)
    assert list(tmp_path.iterdir()) == []


@needs_real_trace
@pytest.mark.parametrize("iteration", [501, 2501])
def test_real_trace_is_reproduced_exactly(iteration):
    assert iteration in list_iterations(REAL_TRACE)
    counts = read_counts(REAL_TRACE, iteration, 12)
    assert counts.shape == (16, 32)
    for rank, row in enumerate(counts):
        topk_idx = tokens_from_counts(row, 2, seed=rank)
        assert topk_idx.shape == (2048, 2)
        assert torch.equal(counts_of(topk_idx, 32), row)
        assert_distinct(topk_idx)


@needs_real_trace
def test_real_file_is_written_back_byte_for_byte(tmp_path):
    name = "table_iter501_rank0.log"
    real = (REAL_TRACE / name).read_bytes()
    (tmp_path / name).write_bytes(real)
    counts = torch.stack(
        [
            torch.stack([read_counts(tmp_path, 501, layer, micro_batch=m) for m in range(4)], dim=1)
            for layer in range(24)
        ],
        dim=1,
    )
    write_counts(tmp_path, 501, counts)
    assert (tmp_path / name).read_bytes() == real


def test_a_default_device_of_the_caller_plays_no_part(tmp_path):
    """As after `torch.set_default_device("cuda")`; meta tensors hold no values."""
    loads = tmp_path / "loads.csv"
    loads.write_text("3,1,0,4\n")
    sizes, counts = {"gpus_per_node": 2, "seed": 0}, torch.tensor([3, 1, 2, 2])

    def run():
        topo = Topology(4, 2, 2)
        routing = workloads.skewed_routing(8, 4, 16, 2, skew=1.0, **sizes)
        hot = workloads.hot_routing(8, 4, 16, 2, hot_share=0.5, **sizes)
        tokens = workloads.tokens_from_counts(counts, 2, seed=0)
        placement = workloads.Placement.of([[0, 1, 0]], num_logical=2)
        demands = (
            workloads.demand_from_routing(routing.topk_idx, topo, num_experts=16),
            workloads.demand_from_counts([[1, 2, 3, 4, 5, 6, 7, 8]] * 8, topo),
            workloads.replay("extreme", [4, 3, 2, 1], topo).demand,
            workloads.ultraep_demand("R28", topo),
        )
        return [
            *(t.tolist() for t in (*routing.topk_idx, *hot.topk_weights, tokens)),
            workloads.subsample(tokens, 2, seed=0).tolist(),
            placement.physical_loads([3, 4], layer=0).tolist(),
            workloads.standin_loads(seed=0, layers=2, experts=16).tolist(),
            workloads.read_loads(loads).tolist(),
            *(demand.owned.tolist() for demand in demands),
        ]

    want = run()
    with torch.device("meta"):
        assert run() == want
