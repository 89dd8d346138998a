"""Check the schedulers: every one moves the demand exactly, and each keeps its own promise."""

import dataclasses
import doctest
import importlib
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from demands import demands, equal_pairs, random_demand, windows_of
from railwave import sched
from railwave.sched import SCHEDULERS, Demand, audit, bound_s, build
from railwave.sched.birkhoff import birkhoff
from railwave.sched.parts import owned_by_rail
from railwave.topology import Topology

VARIANTS = [(name, {}) for name in SCHEDULERS]
VARIANTS += [("native", {"rail_rule": "destination"}), ("rails_lpt", {"chunk_bytes": 3})]
VARIANTS += [("permutation", {"order": "stepwise"}), ("joint", {"order": "stepwise"})]


def sent(schedule):
    """Return (N, N, R) bytes by pair and source rail, added up one by one."""
    topo = schedule.topo
    table = np.zeros((topo.nodes, topo.nodes, topo.rails_per_node), dtype=np.int64)
    for i in range(len(schedule.source)):
        ends = schedule.source[i], schedule.destination[i], schedule.source_rail[i]
        table[ends] += schedule.transfer_bytes[i]
    return table


@pytest.mark.parametrize(("name", "options"), VARIANTS)
@settings(max_examples=40, deadline=None)
@given(demand=demands())
def test_every_scheduler_conserves_demand(name, options, demand):
    schedule = SCHEDULERS[name](demand, **options)
    audit(schedule, demand)
    assert np.array_equal(sent(schedule).sum(axis=2), demand.between_nodes)
    assert schedule.name == name and schedule.plan_us > 0
    for moves in (schedule.before, schedule.after):
        assert (moves.moved_bytes >= 0).all() and (moves.port_bytes >= 0).all()


@settings(max_examples=40, deadline=None)
@given(demand=demands(unit=7))
def test_records_are_never_divided(demand):
    for name in ("rail", "joint", "granted"):
        schedule = SCHEDULERS[name](demand, record_bytes=7)
        audit(schedule, demand)
        assert (schedule.transfer_bytes % 7 == 0).all()


@settings(max_examples=30, deadline=None)
@given(demand=demands(unit=3))
def test_parts_are_those_of_the_references(demand):
    """Pair by pair, in records and in bytes: quota_ref and native_quota_ref."""
    by_rail, eligible = owned_by_rail(demand), demand.topo.eligible_rails
    balanced = sent(SCHEDULERS["rail"](demand, record_bytes=3))
    native = sent(SCHEDULERS["native"](demand))
    for node in range(demand.topo.nodes):
        counts = torch.as_tensor(by_rail[node].T)
        records = torch.zeros_like(counts)
        records[0] = counts.sum(dim=0) // 3  # a pair's records, whatever their rail
        quotas = sched.quota_ref(records, eligible[node], node)
        assert np.array_equal(balanced[node].T, quotas.numpy() * 3)
        stay = sched.native_quota_ref(counts, eligible[node], node)
        assert np.array_equal(native[node].T, stay.numpy())


@pytest.mark.parametrize("name", ["native", "rail"])
def test_submitted_windows_are_replayed(name):
    topo = Topology(4, 8, 8)
    windows = windows_of("extreme")
    schedule = SCHEDULERS[name](equal_pairs(topo, 800), windows=windows)
    assert schedule.num_windows == 3
    for number, window in enumerate(windows):
        rows = schedule.window == number
        pairs = set(zip(schedule.source[rows], schedule.destination[rows], strict=True))
        assert pairs == window


@pytest.mark.parametrize("name", ["permutation", "joint"])
def test_wave_paths_take_waves_in_place_of_windows(name):
    schedule = SCHEDULERS[name](equal_pairs(Topology(4, 8, 8), 800), windows=windows_of("extreme"))
    for number, wave in enumerate(sched.waves(4)):
        rows = schedule.window == number
        pairs = set(zip(schedule.source[rows], schedule.destination[rows], strict=True))
        assert pairs == set(enumerate(wave))


def test_windows_must_be_whole():
    demand = equal_pairs(Topology(2, 1, 1), 5)
    native = SCHEDULERS["native"]
    for windows, words in [
        ([{(0, 1)}], r"every pair with bytes, got none with \(1, 0\)"),
        ([{(0, 1)}, {(0, 1), (1, 0)}], r"each pair once, got \(0, 1\) in windows 0 and 1"),
        ([{(0, 0)}], r"windows\[0\] must pair different nodes, got \(0, 0\)"),
        ([{(0, 2)}], r"windows\[0\]: destination must be in \[0, 2\), got 2"),
    ]:
        with pytest.raises(ValueError, match=words):
            native(demand, windows=windows)


def test_bad_options_are_refused():
    demand = equal_pairs(Topology(2, 1, 1), 5)
    with pytest.raises(ValueError, match=r"record_bytes must divide .* got 2 for 5 bytes of .*\(0"):
        SCHEDULERS["rail"](demand, record_bytes=2)
    with pytest.raises(ValueError, match="rail_rule must be 'source' or 'destination', got 'x'"):
        SCHEDULERS["native"](demand, rail_rule="x")
    with pytest.raises(ValueError, match="chunk_bytes must be at least 1, got 0"):
        SCHEDULERS["rails_lpt"](demand, chunk_bytes=0)
    with pytest.raises(ValueError, match=r"chunk_bytes must leave at most .* chunks a node"):
        SCHEDULERS["rails_lpt"](equal_pairs(Topology(2, 1, 1), 10**9), chunk_bytes=1)
    with pytest.raises(ValueError, match="rail_bytes_s must be positive, got 0"):
        bound_s(demand, 0)


def test_audit_finds_what_is_wrong():
    topo = Topology(3, 2, 2)
    demand = random_demand(topo, seed=1, high=50)
    good = SCHEDULERS["native"](demand)
    first = (np.arange(len(good.source)) == 0).astype(np.int64)
    other_rail = np.where(first, 1 - good.source_rail, good.source_rail)
    for changes, words in [
        ({"transfer_bytes": good.transfer_bytes + first}, r"must move \d+ bytes of the pair"),
        ({"transfer_bytes": good.transfer_bytes * (1 - first)}, "transfer_bytes must be at least"),
        ({"window": good.window + first}, r"window must be in \[0, 1\), got 1"),
        ({"destination": np.where(first, good.source, good.destination)}, "differ from source"),
        (
            {"source_rail": other_rail, "destination_rail": other_rail},
            "rail of their source GPU",
        ),
        ({"source_rail": good.source_rail - 9}, r"source_rail must be in \[0, 2\)"),
    ]:
        with pytest.raises(ValueError, match=words):
            audit(dataclasses.replace(good, **changes), demand)
    with pytest.raises(ValueError, match="schedule must be for"):
        audit(good, equal_pairs(Topology(3, 4, 2), 4))


def test_audit_refuses_a_rail_that_is_not_eligible():
    eligible = torch.ones(2, 2, 2, dtype=torch.bool)
    eligible[0, 1, 1] = eligible[1, 0, 1] = False
    wide, narrow = Topology(2, 2, 2), Topology(2, 2, 2, eligible_rails=eligible)
    demand = equal_pairs(wide, 4)
    schedule = dataclasses.replace(SCHEDULERS["native"](demand), topo=narrow)
    with pytest.raises(ValueError, match=r"source_rail must be eligible for the pair \(0, 1\)"):
        audit(schedule, Demand(demand.owned, demand.bound, narrow))


def test_audit_wants_stranded_bytes_divided_evenly():
    """GPU 2's rail is not eligible; its 4 bytes go 2 and 2, not 1 and 3."""
    eligible = torch.ones(2, 2, 3, dtype=torch.bool)
    eligible[0, 1, 2] = eligible[1, 0, 2] = False
    matrix = np.zeros((6, 6), dtype=int)
    matrix[:3, 3] = 5, 1, 4
    demand = Demand.of(matrix, Topology(2, 3, 3, eligible_rails=eligible))
    schedule = SCHEDULERS["native"](demand)
    assert schedule.transfer_bytes.tolist() == [7, 3]
    with pytest.raises(ValueError, match=r"has \[5, 1, 4\] by rail and sends \[6, 4, 0\]"):
        audit(dataclasses.replace(schedule, transfer_bytes=np.array([6, 4])), demand)


def test_bound_takes_rows_and_columns_and_the_rails_there_are():
    """Node 0 sends 12 to three nodes that receive 4 each; with node 3 in reach of one rail only."""
    matrix = np.zeros((8, 8), dtype=int)
    matrix[0, 2], matrix[0, 4], matrix[0, 6] = 4, 4, 4
    assert bound_s(Demand.of(matrix, Topology(4, 2, 2)), 1.0) == 6
    assert bound_s(Demand.of(matrix.T, Topology(4, 2, 2)), 1.0) == 6
    eligible = torch.ones(4, 4, 2, dtype=torch.bool)
    eligible[3, :, 1] = eligible[:, 3, 1] = False
    matrix[0, 6] = 10
    narrow = Demand.of(matrix, Topology(4, 2, 2, eligible_rails=eligible))
    assert bound_s(narrow, 1.0) == 10


def test_redistribution_counts_what_enters_a_busy_gpu():
    """6 bytes leave rail 0's two GPUs, 3 each, and enter the one GPU of rail 1."""
    matrix = np.zeros((6, 6), dtype=int)
    matrix[0, 5] = 6
    topo = Topology(2, 3, 2, rail_of_gpu=[0, 0, 1])
    moves = SCHEDULERS["native"](Demand.of(matrix, topo), rail_rule="destination").before
    assert moves.moved_bytes.tolist() == moves.port_bytes.tolist() == [[6, 0]]


def test_schedulers_say_how_windows_follow():
    demand = equal_pairs(Topology(3, 2, 2), 4)
    say = {name: scheduler(demand) for name, scheduler in SCHEDULERS.items()}
    assert {name for name, schedule in say.items() if schedule.granted} == {"permutation", "joint"}
    assert {name for name, schedule in say.items() if schedule.paced} == {"rate"}
    assert {
        name: schedule.order for name, schedule in say.items() if schedule.order != "barrier"
    } == {"fast": "pipelined", "granted": "chunkwise"}
    assert SCHEDULERS["joint"](demand, order="free").order == "free"


def test_schedule_refuses_other_columns():
    good = SCHEDULERS["native"](equal_pairs(Topology(2, 1, 1), 5))
    with pytest.raises(TypeError, match="window must be int64 of shape"):
        dataclasses.replace(good, window=good.window.astype(np.int32))
    with pytest.raises(ValueError, match="source_rail must be int64 of shape"):
        dataclasses.replace(good, source_rail=good.source_rail[:1])
    with pytest.raises(ValueError, match="order must be one of"):
        dataclasses.replace(good, order="later")


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 7), st.integers(0, 2**32 - 1), st.sampled_from([1, 4, 1000]))
def test_birkhoff_stages_rebuild_the_matrix(nodes, seed, high):
    matrix = np.random.default_rng(seed).integers(0, high + 1, (nodes, nodes))
    stages = birkhoff(matrix)
    rebuilt = np.zeros_like(matrix)
    for destination, moved, weight in zip(
        stages.destination, stages.moved, stages.weight, strict=True
    ):
        assert sorted(destination) == list(range(nodes))
        assert (moved <= weight).all() and weight > 0
        rebuilt[np.arange(nodes), destination] += moved
    assert np.array_equal(rebuilt, matrix)
    assert stages.weight.sum() == max(matrix.sum(axis=0).max(), matrix.sum(axis=1).max())
    assert len(stages.weight) <= nodes * nodes - 2 * nodes + 2


def test_fast_redistributes_each_pair_once():
    """Balanced before the first stage; what all stages deliver adds up to one delivery."""
    topo = Topology(3, 2, 2)
    owned, bound = np.zeros((3, 2, 3), dtype=int), np.zeros((3, 3, 2), dtype=int)
    for s, d in itertools.permutations(range(3), 2):
        owned[s, 0, d] = bound[s, d, 1] = 100 * (s + 1) + 20 * d
    schedule = SCHEDULERS["fast"](Demand(owned, bound, topo))
    half = owned[:, 0, :].sum(axis=1) // 2
    assert schedule.num_windows > 1 and not schedule.before.moved_bytes[1:].any()
    # A byte for each stage and rail: its remainder.
    slack = schedule.num_windows * topo.rails_per_node
    assert np.abs(schedule.before.moved_bytes[0] - half).max() <= slack
    delivered = bound[:, :, 1].sum(axis=0) // 2
    assert np.abs(schedule.after.moved_bytes.sum(axis=0) - delivered).max() <= slack


def lpt_by_hand(flows, num_rails, chunk_bytes):
    """Return rail loads per destination, chunk by chunk in plain Python."""
    chunks = []
    for destination, size in enumerate(flows):
        while size > 0:
            chunks.append((-min(size, chunk_bytes), destination))
            size -= chunk_bytes
    load = [0] * num_rails
    parts = [[0] * num_rails for _ in flows]
    for size, destination in sorted(chunks):
        rail = load.index(min(load))
        load[rail] -= size
        parts[destination][rail] -= size
    return parts


@settings(max_examples=40, deadline=None)
@given(demands(even=True), st.sampled_from([1000, 70, 400]))
def test_lpt_is_the_plain_algorithm(demand, chunk_bytes):
    schedule = SCHEDULERS["rails_lpt"](demand, chunk_bytes=chunk_bytes)
    table = sent(schedule)
    for node, flows in enumerate(demand.between_nodes.tolist()):
        by_hand = lpt_by_hand(flows, demand.topo.rails_per_node, chunk_bytes)
        assert table[node].tolist() == by_hand


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 5), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_rails_sources_uniform_over_rails_make_receivers_uniform(nodes, rails, seed):
    """With flows of whole rounds of chunks, as RailS' proof has it: flow by flow."""
    rng = np.random.default_rng(seed)
    flows = rng.integers(0, 5, (nodes, nodes)) * ~np.eye(nodes, dtype=bool) * rails * 10
    owned, bound = np.zeros((nodes, rails, nodes), int), np.zeros((nodes, nodes, rails), int)
    owned[:, 0], bound[:, :, 0] = flows, flows
    schedule = SCHEDULERS["rails_lpt"](
        Demand(owned, bound, Topology(nodes, rails, rails)), chunk_bytes=10
    )
    for by_nic in (schedule.sent_bytes, schedule.received_bytes):
        assert (by_nic == by_nic[:, :1]).all()


def test_rails_uniform_totals_alone_do_not_make_receivers_uniform():
    """Each source is even over its two rails, but sends each destination one chunk."""
    matrix = np.zeros((6, 6), dtype=int)
    matrix[0, 2] = matrix[0, 4] = 10
    schedule = SCHEDULERS["rails_lpt"](Demand.of(matrix, Topology(3, 2, 2)), chunk_bytes=10)
    assert schedule.sent_bytes[0].tolist() == [10, 10]
    assert schedule.received_bytes.tolist() == [[0, 0], [10, 0], [0, 10]]


MODULES = ["parts", "schedule", "build", "audit", "paths", "spray", "birkhoff", "demand"]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name):
    result = doctest.testmod(importlib.import_module(f"railwave.sched.{name}"))
    assert result.attempted > 0 and result.failed == 0


def test_every_scheduler_has_an_example_and_a_source():
    for function in SCHEDULERS.values():
        assert "Example:" in function.__doc__ and "Source: " in function.__doc__


def test_audit_finds_uneven_rails_crossed_rails_and_shared_receivers():
    matrix = np.zeros((6, 6), int)
    matrix[0, 2], matrix[2, 5], matrix[4, 1], matrix[0, 4] = 8, 6, 4, 6
    demand = Demand.of(matrix, Topology(3, 2, 2))
    joint = SCHEDULERS["joint"](demand, record_bytes=2)
    audit(joint, demand)
    zero = joint.source_rail * 0
    with pytest.raises(ValueError, match="evenly over its rails, to within 2 bytes; pair"):
        audit(dataclasses.replace(joint, source_rail=zero, destination_rail=zero), demand)
    with pytest.raises(ValueError, match="source_rail and destination_rail must be the same"):
        audit(dataclasses.replace(joint, destination_rail=1 - joint.source_rail), demand)
    with pytest.raises(ValueError, match="in a wave a node must send to one other, got 2 for node"):
        audit(dataclasses.replace(joint, window=joint.window * 0), demand)


def test_audit_refuses_what_is_no_schedule():
    demand = Demand.of(np.zeros((2, 2), int), Topology(2, 1, 1))
    with pytest.raises(TypeError, match="schedule must be a railwave Schedule, got NoneType"):
        audit(None, demand)


@settings(max_examples=40, deadline=None)
@given(demands())
def test_fast_redistributes_as_many_bytes_as_it_has(demand):
    def redistribute(topo, have, want, *others):
        assert np.array_equal(have.sum(axis=1), want.sum(axis=1)) and (want >= 0).all()
        return build.redistribute(topo, have, want, *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("railwave.sched.birkhoff.redistribute", redistribute)
        SCHEDULERS["fast"](demand)
