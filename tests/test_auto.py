"""path="auto": every rank decides alike, by the traffic of this dispatch."""

import re
from dataclasses import replace

import pytest
import torch

from heaps import DEVICE
from processes import run_all
from railwave import CostTable, Topology
from railwave.config import Config
from railwave.cost_table import fingerprint
from railwave.sched import Anchor, Scales, payload_per_gpu, receiver_concentration, source_rail_skew
from railwave.sched.selector import MIB
from railwave.world import TRANSPORT
from test_processes import combine, dispatch
from test_processes import init as init_rank
from worlds import combine as combine_all
from worlds import make_batch, make_outs, make_world

SIZES = dict(num_experts=8, top_k=3, hidden=8, max_tokens_per_rank=4, dtype=torch.bfloat16)
TOPO = (2, 2, 2)


def traffic_of(batch):
    """Return B in MiB, rho and kappa of a batch, by the host's functions."""
    topo = batch.world.config.topo
    row_bytes = batch.xs[0].shape[1] * batch.xs[0].dtype.itemsize
    demand = batch.rail_records.sum(dim=2)
    pairs = [(s, d) for s in range(topo.nodes) for d in range(topo.nodes) if s != d]
    return (
        payload_per_gpu(demand * row_bytes, topo.gpus_per_node) / MIB,
        source_rail_skew(batch.rail_records.sum(dim=1)),
        receiver_concentration(demand, [pairs]),
    )


def table(anchors=(), transport=TRANSPORT, **sizes):
    """Make a table of this configuration."""
    topo = Topology(*TOPO)
    config = Config(topo=topo, **{**SIZES, **sizes}, device=DEVICE)
    return CostTable(fingerprint(config, transport), Scales(rails=2), tuple(anchors))


def test_auto_takes_the_path_of_the_anchor_that_this_traffic_is_near():
    batch = make_batch(make_world(*TOPO, **SIZES), 4)
    here = traffic_of(batch)
    assert here[0] > 0 and here[1] > 1
    for path in ("native", "rail", "permutation", "granted"):
        anchors = [Anchor(here[0] * 1.3, *here[1:], "joint"), Anchor(*here, path)]
        world = make_world(*TOPO, **SIZES, cost_table=table(anchors))
        received = world.dispatch(*batch.arguments, path="auto")
        for got, want in zip(received, batch.expected, strict=True):
            assert torch.equal(got.x.cpu().view(torch.int16), want.x.view(torch.int16))
            assert got.handle.path == path
            assert got.handle.decision.anchor == 1 and got.handle.decision.distance < 1e-9
        combine_all(replace(batch, world=world), [r.handle for r in received], make_outs(batch))
        assert {each.path for each in world._exchanges} == {path}  # of the phase that ran last


def test_auto_is_joint_far_from_all_anchors_and_native_without_remote_payload():
    world = make_world(*TOPO, **SIZES, cost_table=table())
    batch = make_batch(world, 4)
    (decision,) = {r.handle.decision for r in world.dispatch(*batch.arguments, path="auto")}
    assert decision.path == "joint" and "no anchor" in decision.reason
    batch = make_batch(world, 0)
    (decision,) = {r.handle.decision for r in world.dispatch(*batch.arguments, path="auto")}
    assert decision.path == "native" and "no remote payload" in decision.reason
    received = world.dispatch(*batch.arguments, path="rail")
    assert {(r.handle.path, r.handle.decision) for r in received} == {("rail", None)}


def test_auto_without_a_table_is_refused():
    world = make_world(*TOPO, **SIZES)
    with pytest.raises(ValueError, match=r"path must be one of .*'auto'; auto needs a cost_table"):
        world.dispatch(*make_batch(world, 1).arguments, path="auto")
    with pytest.raises(ValueError, match=r"granted, got 'wave'; auto needs a cost_table$"):
        world.dispatch(*make_batch(world, 1).arguments, path="wave")
    world = make_world(*TOPO, **SIZES, cost_table=table())
    with pytest.raises(ValueError, match=r"granted, auto, got 'wave'$"):
        world.dispatch(*make_batch(world, 1).arguments, path="wave")


def test_a_table_that_does_not_fit_is_refused(tmp_path):
    other = table(hidden=16)
    other = replace(other, fingerprint={**other.fingerprint, "torch": "0.1"})
    with pytest.raises(ValueError) as refused:
        make_world(*TOPO, **SIZES, cost_table=other)
    assert str(refused.value).splitlines()[1:] == [
        "hidden: here '8', table '16'",
        f"torch: here '{torch.__version__}', table '0.1'",
    ]
    with pytest.raises(ValueError, match=r"paths must hold all .* \['joint', 'native', 'rail'\]"):
        anchors = [Anchor(1, 1, 1, "rail")]
        make_world(*TOPO, **SIZES, cost_table=table(anchors), paths=("joint", "native"))
    with pytest.raises(
        TypeError, match=r"cost_table must be a railwave.CostTable or its file, got"
    ):
        make_world(*TOPO, **SIZES, cost_table=5)
    with pytest.raises(FileNotFoundError, match=re.escape("none.json")):
        make_world(*TOPO, **SIZES, cost_table=tmp_path / "none.json")


def choose_alike(rank, tables, file):
    rw = init_rank(Topology(*TOPO), **SIZES, cost_table=file)
    batch = make_batch(rw, [4, 1, 0, 3])
    outs = make_outs(batch)
    handle = dispatch(rw, batch, "auto")
    combine(rw, batch, handle, outs)
    assert handle.decision.path == handle.path
    rw.close()
    with pytest.raises(ValueError, match="cost_table must be the same on all ranks"):
        init_rank(Topology(*TOPO), **SIZES, cost_table=tables[rank % 2])
    wrong = replace(tables[0], fingerprint={}) if rank == 2 else tables[0]
    with pytest.raises(Exception, match="the cost table must be of this configuration"):
        init_rank(Topology(*TOPO), **SIZES, cost_table=wrong)
    return handle.path, handle.decision


@pytest.mark.skipif(DEVICE.type != "cpu", reason="its table is of shared memory")
def test_ranks_in_processes_decide_alike(tmp_path):
    batch = make_batch(make_world(*TOPO, **SIZES), [4, 1, 0, 3])
    torch.manual_seed(0)  # as every rank
    batch = make_batch(batch.world, [4, 1, 0, 3])
    tables = [
        table([Anchor(*traffic_of(batch), path)], "shared memory")
        for path in ("permutation", "native")
    ]
    file = tmp_path / "table.json"
    tables[0].save(file)
    said = run_all(choose_alike, 4, tables, str(file))
    assert {path for path, _ in said} == {"permutation"}
    assert len({decision for _, decision in said}) == 1
