"""Check `granted` in the simulator: by hand, against T*, its fan-in, and on skewed demand."""

import dataclasses
import doctest
import importlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from demands import demands, equal_pairs, random_demand
from railwave.sched import SCHEDULERS, Demand, audit, bound_s
from railwave.sched.granted import chunk_bytes
from railwave.sim import INCAST, Fabric, node_spans, simulate
from railwave.sim.granted import run_rail
from railwave.sim.simulate import rail_runs
from railwave.topology import Topology

granted = SCHEDULERS["granted"]


def seconds(demand, fabric, **options):
    return simulate(granted(demand, **options), fabric).time_s


@settings(max_examples=60, deadline=None)
@given(
    demands(unit=3),
    st.sampled_from([0.0, 0.5, 40.0]),
    st.sampled_from([1, 2]),
    st.sampled_from(list(INCAST.values())),
)
def test_the_demand_arrives_and_neither_bound_is_crossed(demand, round_trip_s, outstanding, incast):
    """What is owed and not sent is an assertion of the run itself."""
    schedule = granted(demand, record_bytes=3, outstanding=outstanding)
    audit(schedule, demand)
    result = simulate(schedule, Fabric(2.0, grant_latency_s=round_trip_s, incast=incast))
    assert result.time_s >= bound_s(demand, 2.0) * (1 - 1e-9)
    assert result.fan_in <= (outstanding if round_trip_s else 1)
    assert result.received_bytes.sum() == demand.between_nodes.sum()
    again = simulate(schedule, Fabric(2.0, grant_latency_s=round_trip_s, incast=incast))
    assert again.time_s == result.time_s


def test_chunks_are_counted():
    """64 and 10 bytes in records of 1: 32 chunks of 2, and 10 of 1."""
    demand = Demand.of([[0, 64, 10], [0, 0, 0], [0, 0, 0]], Topology(3, 1, 1))
    (run,) = rail_runs(granted(demand), Fabric(1.0))
    assert (run.num_chunks, run.time_s, run.fan_in) == (42, 74, 1)
    assert run.num_words >= run.num_chunks  # a grant each, and hand-backs with their openings


def test_a_slice_of_one_record_takes_a_round_trip_and_itself():
    demand = Demand.of([[0, 7], [0, 0]], Topology(2, 1, 1))
    fabric = Fabric(7.0, grant_latency_s=3.0, wave_latency_s=10.0)
    for outstanding in (1, 2):
        assert seconds(demand, fabric, record_bytes=7, outstanding=outstanding) == 10 + 3 + 1


@pytest.mark.parametrize("nodes", [1, 3])
def test_nothing_to_send_takes_no_time(nodes):
    demand = Demand.of(np.zeros((nodes * 2, nodes * 2), int), Topology(nodes, 2, 2))
    schedule = granted(demand)
    assert rail_runs(schedule, Fabric(1.0)) == []
    result = simulate(schedule, Fabric(1.0, grant_latency_s=1.0, wave_latency_s=1.0))
    assert (result.time_s, result.fan_in) == (0, 0)


@pytest.mark.parametrize("outstanding, hidden", [(1, 0), (2, 1)])
def test_a_second_grant_hides_round_trips(outstanding, hidden):
    """One pair, 5 chunks of 64 s, a round trip of 2 s: of all, or of the first only."""
    slices, chunks = np.array([[0, 320], [0, 0]]), np.full((2, 2), 64)
    run = run_rail(slices, chunks, Fabric(1.0, grant_latency_s=2.0), outstanding)
    assert run.num_chunks == 5 and run.time_s == 320 + (2 if hidden else 5 * 2)


def test_a_busy_sender_is_left():
    """Node 3 sends 8 to 0 and to 1; nodes 0 and 1 need not wait for it: 2 has 8 for each, too.

    Both receivers turn to node 2 or 3 first; the one that is handed back takes the other.
    """
    matrix = np.zeros((4, 4), int)
    matrix[2:, :2] = 8
    for round_trip_s in (0.0, 0.125):
        run = run_rail(matrix, matrix + 1, Fabric(1.0, grant_latency_s=round_trip_s), 1)
        assert run.time_s <= 16 + 4 * round_trip_s
        assert run.num_chunks == 4


@pytest.mark.parametrize("nodes", [2, 5, 8])
def test_even_demand_goes_in_waves(nodes):
    """The cyclic permutation leaves nobody waiting: T* exactly."""
    demand = equal_pairs(Topology(nodes, 2, 2), 64 * 30)
    assert seconds(demand, Fabric(2.0)) == bound_s(demand, 2.0)


def test_rails_do_not_meet():
    """With a second rail that nobody uses, with two that carry the same: the time of one."""
    slow = random_demand(Topology(5, 1, 1), seed=3, high=200, unit=2)
    twice = Demand(slow.owned.repeat(2, axis=1), slow.bound.repeat(2, axis=2), Topology(5, 2, 2))
    assert seconds(twice, Fabric(1.0), record_bytes=2) == seconds(slow, Fabric(1.0), record_bytes=2)


def zipf_demand(nodes, seed, unit_bytes):
    pairs = np.minimum(np.random.default_rng(seed).zipf(2.0, (nodes, nodes)), 50) * unit_bytes
    pairs = pairs * ~np.eye(nodes, dtype=bool)
    return Demand(pairs[:, None, :], pairs[:, :, None], Topology(nodes, 1, 1))


@pytest.mark.parametrize("nodes", [4, 8, 16, 32])
def test_skewed_demand_ends_near_the_bound(nodes):
    """Issue 11's first row, one rail: 64 records a unit."""
    ratios = []
    for seed in range(3):
        demand = zipf_demand(nodes, seed, 64 * 14336)
        took = seconds(demand, Fabric(25e9), record_bytes=14336)
        ratios.append(took / bound_s(demand, 25e9))
    assert max(ratios) <= 1.06 and np.mean(ratios) <= 1.03


def test_chunk_rule():
    sizes = np.array([0, 1, 31, 32, 33, 6400])
    assert chunk_bytes(sizes, 1, 0).tolist() == [1, 1, 1, 1, 2, 200]
    assert chunk_bytes(sizes, 7, 0).tolist() == [7, 7, 7, 7, 7, 203]
    assert chunk_bytes(sizes, 7, 3.0).tolist() == [98, 98, 98, 98, 98, 203]
    assert chunk_bytes(sizes, 1, 1e300).min() >= 6400
    with pytest.raises(ValueError, match="round_trip_bytes must be at least 0, got -1"):
        chunk_bytes(sizes, 1, -1)
    with pytest.raises(ValueError, match="record_bytes must be at least 1, got 0"):
        chunk_bytes(sizes, 0, 0)


def test_bad_input_is_refused():
    demand = equal_pairs(Topology(2, 1, 1), 5)
    for outstanding, words in [(0, "at least 1, got 0"), (3, "below 3, got 3")]:
        with pytest.raises(ValueError, match=f"outstanding must be {words}"):
            granted(demand, outstanding=outstanding)
    good = granted(demand)
    with pytest.raises(ValueError, match=r"outstanding must be in \[1, 2\], got 3"):
        dataclasses.replace(good, outstanding=3)
    with pytest.raises(ValueError, match="'chunkwise' must have one window, got 2 windows"):
        dataclasses.replace(
            SCHEDULERS["joint"](equal_pairs(Topology(3, 1, 1), 5)), order="chunkwise"
        )
    with pytest.raises(ValueError, match="must be of order 'chunkwise', got 'barrier'"):
        rail_runs(SCHEDULERS["native"](demand), Fabric(1.0))
    with pytest.raises(ValueError, match="must be of order 'barrier', got 'chunkwise'"):
        node_spans(good, Fabric(1.0))
    two = granted(equal_pairs(Topology(2, 2, 2), 4))
    crossed = dataclasses.replace(two, destination_rail=1 - two.destination_rail)
    with pytest.raises(ValueError, match="keep to one rail in each transfer"):
        simulate(crossed, Fabric(1.0))


@pytest.mark.parametrize("name", ["sched.granted", "sim.granted"])
def test_examples_in_docstrings(name):
    result = doctest.testmod(importlib.import_module(f"railwave.{name}"))
    assert result.attempted > 0 and result.failed == 0
