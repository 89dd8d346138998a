"""Expert loads: the stand-in, files, and placement with replicas."""

import doctest
import importlib
import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from railwave import LocalWorld, workloads
from railwave.topology import Topology
from railwave.workloads import (
    FIGURE_8_SHARES,
    Placement,
    bin_shares,
    demand_from_counts,
    preset,
    read_loads,
    replay,
    standin_loads,
)


def test_every_public_function_has_an_example():
    for name in workloads.__all__:
        thing = getattr(workloads, name)
        if callable(thing) and not isinstance(thing, type):
            assert "Example:" in thing.__doc__, name


# The stand-in


def test_standin_has_the_papers_sizes_and_spread():
    loads = standin_loads(seed=0)
    assert loads.shape == (45, 128) and loads.dtype == torch.int64
    assert (loads.sum(dim=1) == 32768).all() and int(loads.min()) >= 0
    peaks = (loads.max(dim=1).values / 256).sort().values
    assert torch.allclose(peaks, torch.linspace(3, 12, 45), rtol=0, atol=1.01 / 256)
    # The steepest layer is anywhere: the seed orders them.
    assert peaks.tolist() != (loads.max(dim=1).values / 256).tolist()
    assert torch.equal(loads, standin_loads(seed=0))
    assert not torch.equal(loads, standin_loads(seed=1))
    assert len(set(loads.argmax(dim=1).tolist())) > 20


@settings(deadline=None, max_examples=40)
@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
def test_standin_reaches_any_peak(data, seed):
    experts = data.draw(st.integers(2, 40))
    lowest = data.draw(st.floats(1, experts - 0.01))
    highest = data.draw(st.floats(lowest, experts - 0.01))
    layers, records = data.draw(st.integers(1, 4)), 10**9
    loads = standin_loads(
        seed=seed, layers=layers, experts=experts, lowest=lowest, highest=highest, records=records
    )
    assert (loads.sum(dim=1) == records).all() and int(loads.min()) >= 0
    peaks = loads.double().max(dim=1).values.numpy() * experts / records
    assert np.allclose(np.sort(peaks), np.linspace(lowest, highest, layers), rtol=0, atol=1e-6)


def test_standin_shares_beside_figure_8():
    assert sum(FIGURE_8_SHARES) == pytest.approx(1, abs=2e-4)
    for seed in range(3):
        shares = bin_shares(standin_loads(seed=seed)).tolist()
        # In kind: falling, and no bin further than seven points away. Nothing was fitted.
        assert shares == sorted(shares, reverse=True) and sum(shares) == pytest.approx(1)
        for share, published in zip(shares, FIGURE_8_SHARES, strict=True):
            assert abs(share - published) < 0.07
    # As the docstring of bin_shares says.
    shares = bin_shares(standin_loads(seed=0)).tolist()
    assert [round(share, 2) for share in shares] == [0.60, 0.22, 0.12, 0.06]


def test_bin_shares_are_natives_rails_on_h20():
    loads = standin_loads(seed=2, layers=3)
    topo = preset("h20").topo
    sent = np.zeros(4)
    for row in loads:
        owned = replay("moderate", row, topo).demand.owned.sum(axis=(0, 2))
        sent += owned.reshape(4, 2).sum(axis=1)
    assert sent / sent.sum() == pytest.approx(bin_shares(loads).tolist(), rel=1e-12)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: standin_loads(seed=2**32), ValueError, r"seed must be below 2\*\*32"),
        (lambda: standin_loads(seed=0, layers=0), ValueError, "layers must be at least 1"),
        (lambda: standin_loads(seed=0, lowest=0.5), ValueError, "got 0.5 and 12.0"),
        (lambda: standin_loads(seed=0, lowest=13), ValueError, "got 13 and 12.0"),
        (lambda: standin_loads(seed=0, experts=12), ValueError, r"highest < experts \(12\)"),
        (lambda: standin_loads(seed=0, highest="9"), TypeError, "highest must be a number"),
        (lambda: standin_loads(seed=0, records=0), ValueError, "records must be at least 1"),
        (lambda: bin_shares([[1, 2, 3]], bins=2), ValueError, r"experts \(3\), got 2"),
        (lambda: bin_shares([[0, 0]], bins=2), ValueError, "loads must not be all 0"),
        (lambda: bin_shares([1, 2], bins=2), ValueError, "loads must be integers with 2 dim"),
    ],
)
def test_loads_refuse(call, error, message):
    with pytest.raises(error, match=message):
        call()


# Files


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", "3,1\n0,4\n"),
        ("a.CSV", "# made by hand\n\n 3 , 1.0 \r\n0,4e0"),
        ("a.csv", "layer,e0,e1\n0,3,1\n1,0,4\n"),
        ("a.csv", '\ufeff"layer","e0","e1"\n0,3,1\n1,0,4\n'),
        ("a.json", "[[3, 1], [0, 4.0]]"),
        ("a.json", '{"1": [0, 4], "0": [3, 1]}'),
    ],
)
def test_read_loads_by_hand(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8", newline="")
    loads = read_loads(path)
    assert loads.tolist() == [[3, 1], [0, 4]] and loads.dtype == torch.int64
    assert torch.equal(read_loads(str(path)), loads)


counts = st.integers(0, 2**53 - 1)


@settings(max_examples=50)
@given(
    st.integers(1, 5).flatmap(
        lambda E: st.lists(st.lists(counts, min_size=E, max_size=E), min_size=1)
    )
)
def test_files_are_read_exactly(tmp_path_factory, table):
    folder = tmp_path_factory.mktemp("loads")
    (folder / "a.json").write_text(json.dumps(table))
    (folder / "a.csv").write_text("\n".join(",".join(map(str, row)) for row in table))
    assert read_loads(folder / "a.json").tolist() == table
    assert read_loads(folder / "a.csv").tolist() == table


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.txt", "1", r"path must end in .csv or .json, got '.*a.txt'"),
        ("a.csv", "", "a.csv: must hold at least one layer"),
        ("a.csv", "# nothing\n", "a.csv: must hold at least one layer"),
        ("a.csv", "layer\n0\n", "a.csv, line 2: must hold at least one expert"),
        ("a.csv", "1,2\n\n1,2,3\n", "a.csv, line 3: layers .* got 3 and 2 in line 1"),
        ("a.csv", "1,2\n1,x\n", r"a.csv, line 2, field 2: must be a whole .*, got 'x'"),
        ("a.csv", "1,2,\n", r"a.csv, line 1, field 3: must be a whole .*, got ''"),
        ("a.csv", "1,1.5\n", "a.csv, line 1, field 2: .* got 1.5"),
        ("a.csv", "-1,1\n", "a.csv, line 1, field 1: .* got -1"),
        ("a.csv", "nan,1\n", "a.csv, line 1, field 1: .* got nan"),
        ("a.csv", "inf,1\n", "a.csv, line 1, field 1: .* got inf"),
        ("a.csv", "1_0,1\n", "a.csv, line 1, field 1: .* got '1_0'"),
        ("a.csv", "9007199254740992\n", r"a.csv, line 1, field 1: .* \[0, 2\*\*53\)"),
        ("a.csv", "e0,e1\n1,2\n", "a.csv, line 1, field 1: .* got 'e0'"),
        ("a.csv", "layer,e0\n1,7\n", "a.csv, line 2, field 1: layers must run .* got '1'"),
        ("a.csv", "layer,e0\n0,-7\n", "a.csv, line 2, field 2: .* got -7"),
        ("a.json", "[[1,\n2", "a.json, line 2, column 2: must be JSON"),
        ("a.json", "7", "a.json: must be a list or an object of layers, got 7"),
        ("a.json", "[]", "a.json: must hold at least one layer"),
        ("a.json", "[[]]", "a.json, layer 0: must hold at least one expert"),
        ("a.json", "[1]", "a.json, layer 0: must be a list of counts, got 1"),
        ("a.json", "[[1], [1, 2]]", "a.json, layer 1: layers .* got 2 and 1 in layer 0"),
        ("a.json", "[[1, true]]", "a.json, layer 0, expert 1: .* got True"),
        ("a.json", '[[1, "2"]]', "a.json, layer 0, expert 1: .* got '2'"),
        ("a.json", "[[NaN]]", "a.json, layer 0, expert 0: .* got nan"),
        ("a.json", "[[1.5]]", "a.json, layer 0, expert 0: .* got 1.5"),
        ("a.json", '{"0": [1], "2": [1]}', r"a.json: layers must be 0 to 1, got \['0', '2'\]"),
        ("a.json", '{"0": [1], "0": [2]}', "a.json: a layer must appear once, got '0' again"),
        ("a.json", "[" * 100_000, "a.json: "),
    ],
)
def test_read_loads_refuses(tmp_path, name, text, message):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_loads(path)


def test_read_loads_refuses_what_is_no_text_or_not_there(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_loads(tmp_path / "none.csv")
    (tmp_path / "a.csv").write_bytes(b"\xff\xfe1")
    with pytest.raises(ValueError, match=r"a.csv: must be UTF-8 text"):
        read_loads(tmp_path / "a.csv")


# Placement


@st.composite
def placements(draw):
    """Draw (phy2log rows, E): every logical expert at least once, in any order."""
    num_logical, extra = draw(st.integers(1, 5)), draw(st.integers(0, 4))
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        more = draw(st.lists(st.integers(0, num_logical - 1), min_size=extra, max_size=extra))
        rows.append(draw(st.permutations([*range(num_logical), *more])))
    return rows, num_logical


@settings(deadline=None)
@given(placements(), st.data())
def test_loads_are_conserved_and_even_over_replicas(case, data):
    phy2log, num_logical = case
    placement = Placement.of(phy2log, num_logical)
    layer = data.draw(st.integers(0, len(phy2log) - 1))
    row = st.lists(st.integers(0, 50), min_size=num_logical, max_size=num_logical)
    loads = torch.tensor(data.draw(st.lists(row, min_size=1, max_size=4)))
    physical = placement.physical_loads(loads, layer)
    total = placement.physical_loads(loads.sum(dim=0), layer)
    assert torch.equal(physical.sum(dim=0), total)
    logical = torch.tensor(phy2log[layer])
    for expert in range(num_logical):
        of_expert = physical[:, logical == expert]
        assert torch.equal(of_expert.sum(dim=1), loads[:, expert])
        assert (of_expert.max(dim=1).values - of_expert.min(dim=1).values <= 1).all()
        share = total[logical == expert]
        assert share.max() - share.min() <= 1
    num_physical = len(phy2log[layer])
    for num_ranks in (n for n in range(1, num_physical + 1) if num_physical % n == 0):
        ranks = placement.rank_loads(loads, layer, num_ranks)
        expected = torch.zeros(len(loads), num_ranks, dtype=torch.int64)
        for index in range(num_physical):
            expected[:, index // (num_physical // num_ranks)] += physical[:, index]
        assert torch.equal(ranks, expected)


def test_the_order_of_log2phy_says_which_replica_is_first():
    first = Placement([[0, 0]], [[[0, 1]]], [[2]]).physical_loads([3], 0)
    second = Placement([[0, 0]], [[[1, 0]]], [[2]]).physical_loads([3], 0)
    assert (first.tolist(), second.tolist()) == ([2, 1], [1, 2])


def test_the_published_example_of_eplb():
    """phy2log of EPLB's README: 12 logical experts, 16 physical, 2 layers."""
    phy2log = [
        [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
        [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
    ]
    placement = Placement.of(phy2log, 12)
    assert placement.logcnt[0].tolist() == [1, 2, 1, 1, 2, 2, 1, 1, 1, 1, 2, 1]
    assert placement.log2phy[1, 6].tolist() == [2, 4]
    weight = [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86]
    # Rank 0 has half of expert 5 (the larger) and expert 6, rank 1 the rest of 5 and expert 7.
    assert placement.rank_loads(weight, 0, 8)[:2].tolist() == [83 + 39, 82 + 4]


def test_a_placement_gives_a_demand():
    placement = Placement.of([[0, 1, 0, 1]], 2)
    physical = placement.physical_loads([[4, 0], [0, 3]], layer=0)
    demand = demand_from_counts(physical, Topology(2, 1, 1), record_bytes=1)
    # Physical experts 0 and 1 are on node 0: half of what each node sends stays there or leaves.
    assert demand.between_nodes.tolist() == [[0, 2], [2, 0]]


GOOD = dict(phy2log=[[0, 1, 0]], log2phy=[[[0, 2], [1, -1]]], logcnt=[[2, 1]])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(phy2log=[[0, 2, 0]]), ValueError, r"phy2log\[0\] must be in \[0, 2\), got 2"),
        (dict(phy2log=[[0, 0, 0]]), ValueError, r"phy2log\[0\] must hold every .*, got no 1"),
        (dict(phy2log=[[0, -1, 0]]), ValueError, "phy2log must not be negative, got -1"),
        (dict(phy2log=[[0, 1.0, 0]]), TypeError, "phy2log must be integers"),
        (dict(phy2log=[[0, 1, 0]] * 2), ValueError, r"got \(2, 3\) and \(1, 2\)"),
        (dict(phy2log=[0, 1, 0]), ValueError, "phy2log must be integers with 2 dim"),
        (dict(logcnt=[[1, 1]]), ValueError, r"logcnt\[0\]\[0\] must count .* \[0, 2\], got 1"),
        (dict(log2phy=[[[0, 1], [2, -1]]]), ValueError, r"log2phy\[0\]\[0\] must be .* \[0, 1\]"),
        (dict(log2phy=[[[0, 2], [-1, 1]]]), ValueError, r"log2phy\[0\]\[1\] must be .* \[-1, 1\]"),
        (dict(log2phy=[[[0, 2], [1, 1]]]), ValueError, r"log2phy\[0\]\[1\] must be .* \[1, 1\]"),
        (dict(log2phy=[[[0], [1]]]), ValueError, r"log2phy\[0\]\[0\] must be .* got \[0\]"),
        (dict(log2phy=[[[0, 0], [1, -1]]]), ValueError, r"log2phy\[0\]\[0\] must be .* \[0, 0\]"),
        (dict(log2phy=[[0, 1]]), ValueError, r"log2phy must be of shape \(1, 2, replicas\)"),
        (dict(log2phy=[[[0.0, 2.0]]]), TypeError, "log2phy must be integers, got torch.float32"),
        (dict(log2phy=[[[0, 2], [1]]]), TypeError, "log2phy must be integers, got list"),
    ],
)
def test_placement_refuses(change, error, message):
    Placement(**GOOD)
    with pytest.raises(error, match=message):
        Placement(**(GOOD | change))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: p.physical_loads([1, 2, 3], 0), "of 2 logical experts, got 3"),
        (lambda p: p.physical_loads([1, -2], 0), "loads must not be negative, got -2"),
        (lambda p: p.physical_loads([[[1, 2]]], 0), "1 or 2 dimensions, got 3"),
        (lambda p: p.physical_loads([1, 2], 1), r"layer must be in \[0, 1\), got 1"),
        (lambda p: p.rank_loads([1, 2], 0, 2), r"physical experts \(3\), got 2"),
        (lambda p: Placement.of([[0, 2]], 2), r"phy2log must be in \[0, 2\), got 2"),
        (lambda p: Placement.of([[0, 0]], 2), r"phy2log\[0\] must hold every .* got no 1"),
    ],
)
def test_placement_refuses_loads(call, message):
    with pytest.raises(ValueError, match=message):
        call(Placement(**GOOD))


def test_placement_keeps_its_own_copies():
    phy2log = torch.tensor([[0, 1, 0]])
    placement = Placement.of(phy2log, 2)
    phy2log[0, 0] = 1
    assert placement.phy2log.tolist() == [[0, 1, 0]]


@pytest.mark.parametrize("name", ["loads", "placement"])
def test_docstring_examples(name):
    result = doctest.testmod(importlib.import_module(f"railwave.workloads.{name}"))
    assert result.attempted and not result.failed


@settings(max_examples=50)
@given(st.integers(0, 2**16), st.integers(1, 5), st.integers(0, 9), st.integers(1, 3))
def test_every_choice_gets_a_replica_of_its_expert(seed, E, T, K):
    torch.manual_seed(seed)
    extra = torch.randint(E, (4,)).tolist()
    placement = Placement.of([[*range(E), *extra]], num_logical=E)
    ids = torch.randint(-1, E, (T, K), dtype=torch.int32)
    for rank in range(3):
        got = placement.physical_ids(ids, 0, rank=rank)
        assert got.dtype == ids.dtype and torch.equal(got == -1, ids == -1)
        pairs = zip(ids.flatten().tolist(), got.flatten().tolist(), strict=True)
        flat = [(e, p) for e, p in pairs if e >= 0]
        for e in range(E):
            replicas = placement.log2phy[0, e, : placement.logcnt[0, e]].tolist()
            chosen = [p for of, p in flat if of == e]
            wanted = [replicas[(n + rank) % len(replicas)] for n in range(len(chosen))]
            assert chosen == wanted
    bad = torch.full((1, 2), E)
    assert placement.physical_ids(bad, 0, rank=0).tolist() == [[E + 4, E + 4]]


def test_wrong_choices_are_refused():
    placement = Placement.of([[0, 1, 0]], num_logical=2)
    with pytest.raises(TypeError, match="topk_idx must be an int32 or int64 tensor"):
        placement.physical_ids(torch.zeros(1, 1), 0, rank=0)
    with pytest.raises(TypeError, match="got list"):
        placement.physical_ids([[0]], 0, rank=0)
    with pytest.raises(ValueError, match=r"topk_idx must have shape \(T, K\), got \(1,\)"):
        placement.physical_ids(torch.zeros(1, dtype=torch.int64), 0, rank=0)
    with pytest.raises(ValueError, match="layer must be"):
        placement.physical_ids(torch.zeros(1, 1, dtype=torch.int64), 1, rank=0)


def test_a_dispatch_takes_physical_experts_and_gives_them_back():
    """Twelve physical experts, four ranks: ids come out as they went in, less the rank's first."""
    placement = Placement.of([[*range(8), 0, 0, 3, 3]], num_logical=8)
    world = LocalWorld(
        *(Topology(2, 2, 2),),
        **{"num_experts": 12, "top_k": 2, "hidden": 4, "max_tokens_per_rank": 5},
        dtype=torch.float32,
    )
    logical = [torch.stack([torch.randperm(8)[:2] for _ in range(5)]) for _ in range(4)]
    ids = [placement.physical_ids(of, 0, rank=rank) for rank, of in enumerate(logical)]
    xs = [torch.randn(5, 4) for _ in range(4)]
    received = world.dispatch(xs, ids, [torch.ones(5, 2)] * 4, expert_alignment=1)
    outs = []
    for rank, r in enumerate(received):
        expert = placement.phy2log[0][3 * rank + r.topk_idx]
        outs.append(r.x * (1 + expert)[:, None])
    ys = world.combine(outs, [r.handle for r in received])
    for y, x, of in zip(ys, xs, logical, strict=True):
        assert torch.allclose(y, x * (1 + of).sum(dim=1, keepdim=True))
