"""What is put on the rails, as planned and as counted.

Letters: N nodes, G GPUs a node.
"""

import doctest
import re

import pandas
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import railwave
from heaps import DEVICE, ON_GPU, seeds
from processes import run_all
from railwave import Stats, handle, stats
from railwave.config import PATHS, WAVES
from test_processes import init
from worlds import make_batch, make_outs, make_world


def test_the_examples_hold():
    for module in (stats, handle):
        result = doctest.testmod(module)
        assert result.attempted and not result.failed


def of_all(received):
    return Stats.total(r.handle.stats() for r in received)


def by_slice(rows, topo):
    """(N, N, R) bytes put from node s to node d on each rail."""
    put = torch.zeros(topo.nodes, topo.nodes, topo.rails_per_node, dtype=torch.int64)
    for row in rows:
        put[row.source, row.destination, row.rail] += row.put_bytes
    return put


@settings(max_examples=10)
@given(
    *(seeds, st.integers(1, 3), st.integers(1, 3), st.sampled_from([1, 8])),
    *(st.sampled_from(PATHS), st.booleans(), st.booleans()),
)
def test_what_is_counted_is_what_was_planned(_, N, G, staging, path, static, again):
    """Of dispatch and combine, also of one that is repeated; the world counts the same."""
    world = make_world(N, G, G, staging_records=staging)
    batch = make_batch(world, [i % 5 for i in range(N * G)])
    received = world.dispatch(*batch.arguments, path=path, static_shapes=static)
    if again:
        received = world.dispatch(batch.arguments[0], handles=[r.handle for r in received])
    first = of_all(received)
    assert {row.phase for row in first.rows} <= {"dispatch"}
    assert torch.equal(by_slice(first.rows, world.config.topo), world.traffic.put_bytes)
    if N > 1:
        assert torch.equal(first.rail_bytes(), world.traffic.rail_bytes())
        assert torch.equal(first.rail_bytes(planned=True), first.rail_bytes())
    for _ in range(2):  # the later combine replaces the earlier one
        outs = [torch.zeros(len(r.x), 8, device=DEVICE).bfloat16() for r in received]
        world.combine(outs, [r.handle for r in received])
    both = of_all(received)
    assert [row for row in both.rows if row.phase == "dispatch"] == list(first.rows)
    combined = [row for row in both.rows if row.phase == "combine"]
    assert torch.equal(by_slice(combined, world.config.topo), world.traffic.put_bytes)
    assert N == 1 or torch.equal(both.rail_bytes(phase="combine"), world.traffic.rail_bytes())
    assert len(both.rows) == 2 * N * G * (N - 1)
    for row in both.rows:
        assert row.put_bytes == row.planned_bytes
        assert (row.planned_records > 0) == (row.put_bytes > 0)
        assert row.rail == world.config.topo.rail_of_gpu[row.gpu]
        wave = (row.destination - row.source) % N
        assert row.wave == (wave if path in WAVES else 1)
    records = batch.records.sum().item()
    assert sum(row.planned_records for row in both.rows) == 2 * records


def test_shares_and_tables():
    world = make_world(2, 2, 2)
    batch = make_batch(world, [4, 0, 0, 0], topk=torch.tensor([[4, 6]] * 4))
    received = world.dispatch(*batch.arguments, path="native")
    found = of_all(received)
    assert found.rail_share() == found.rail_share(planned=True) == {0: 1.0, 1: 0.0}
    assert found.rail_share(source=1) == {0: 0.0, 1: 0.0}
    balanced = of_all(world.dispatch(*batch.arguments, path="joint"))
    assert balanced.rail_share(source=0) == {0: 0.5, 1: 0.5}
    assert balanced.rail_share(phase="combine") == {}
    with pytest.raises(ValueError, match=re.escape("phase must be dispatch or combine, got 'x'")):
        balanced.rail_share(phase="x")
    with pytest.raises(ValueError, match=re.escape("phase must be dispatch or combine, got 'x'")):
        balanced.rail_bytes(phase="x")
    assert not balanced.rail_bytes(phase="combine").any() and Stats(()).rail_bytes().shape == (0, 0)
    with pytest.raises(ValueError, match=r"source must be one of the nodes \[0, 1\], got 5"):
        balanced.rail_share(5)
    with pytest.raises(TypeError, match="several must be Stats, got int"):
        Stats.total([5])
    assert Stats.total(balanced) == balanced
    columns = balanced.to_dict()
    assert columns["phase"] == ["dispatch"] * 4 and sum(columns["planned_records"]) == 4
    assert balanced.to_pandas().equals(pandas.DataFrame(columns))
    assert list(Stats(()).to_pandas().columns) == list(columns)


def count(rank):
    rw = init(railwave.Topology(2, 2, 2))
    batch = make_batch(rw, 4)
    handle = rw.dispatch(*(values[rank] for values in batch.arguments)).handle
    outs = make_outs(batch)
    rw.combine(outs[rank].to(rw.config.device), handle)
    rw.close()
    return handle.stats()


@pytest.mark.skipif(ON_GPU, reason="processes on a CPU")
def test_every_process_counts_its_own():
    found = Stats.total(run_all(count, 4))
    assert [row.gpu + 2 * row.source for row in found.rows] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert all(row.put_bytes == row.planned_bytes for row in found.rows)
    assert sum(found.rail_share().values()) == pytest.approx(1)
