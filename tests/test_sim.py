"""Check the simulator against closed forms, plain Python, the paper's arithmetic and SimGrid."""

import dataclasses
import doctest
import functools
import importlib
import json
import math
import shutil
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from demands import demands, equal_pairs, random_demand, relabelled, windows_of
from railwave.sched import SCHEDULERS, Demand, bound_s
from railwave.sim import INCAST, Fabric, finish_times, max_min_rates, node_spans, simulate
from railwave.topology import Topology

CLOSE = {"rel": 1e-9, "abs": 1e-15}  # float64 sums of some thousand terms


def seconds(name, demand, fabric, **options):
    return simulate(SCHEDULERS[name](demand, **options), fabric).time_s


# --- sharing ---


def plain_rates(send, receive, send_rate, receive_rate):
    """Return max-min fair rates, one port a round, in plain Python."""
    left = {("s", port): rate for port, rate in enumerate(send_rate)}
    left |= {("r", port): rate for port, rate in enumerate(receive_rate)}
    open_flows, rates = set(range(len(send))), [0.0] * len(send)
    while open_flows:
        at = {}
        for flow in open_flows:
            for port in (("s", send[flow]), ("r", receive[flow])):
                at.setdefault(port, []).append(flow)
        port = min(at, key=lambda port: left[port] / len(at[port]))
        share = left[port] / len(at[port])
        for flow in at[port]:
            rates[flow] = share
            left[("s", send[flow])] -= share
            left[("r", receive[flow])] -= share
            open_flows.remove(flow)
    return rates


def plain_finish(send, receive, amount, rate, incast):
    """Follow flows from end to end in plain Python."""
    left, now, finish = dict(enumerate(map(float, amount))), 0.0, [0.0] * len(amount)
    ports = max([*send, *receive], default=0) + 1
    while left:
        flows = list(left)
        senders = [sum(receive[f] == port for f in flows) for port in range(ports)]
        receive_rate = [rate / (1 + incast * (max(f, 1) - 1)) for f in senders]
        rates = plain_rates(
            [send[f] for f in flows], [receive[f] for f in flows], [rate] * ports, receive_rate
        )
        step = min(left[f] / r for f, r in zip(flows, rates, strict=True))
        now += step
        for f, r in zip(flows, rates, strict=True):
            left[f] -= r * step
            if left[f] <= 1e-9 * amount[f]:
                del left[f]
                finish[f] = now
    return finish


@st.composite
def flow_sets(draw):
    """Draw (send, receive, amount) of flows between up to 6 ports a side, no two alike."""
    ports = draw(st.integers(1, 6))
    pairs = st.tuples(st.integers(0, ports - 1), st.integers(0, ports - 1))
    flows = draw(st.lists(pairs, min_size=1, max_size=24, unique=True))
    amount = draw(st.lists(st.integers(1, 50), min_size=len(flows), max_size=len(flows)))
    send, receive = np.array(flows).T
    return send, receive, np.array(amount)


@settings(max_examples=30, deadline=None)
@given(flow_sets(), st.integers(0, 2**32 - 1))
def test_rates_are_those_of_plain_progressive_filling(flows, seed):
    send, receive, _ = flows
    rng = np.random.default_rng(seed)
    send_rate, receive_rate = rng.integers(1, 9, (2, 6)).astype(float)
    rates = max_min_rates(send, receive, send_rate, receive_rate)
    assert rates == pytest.approx(plain_rates(send, receive, send_rate, receive_rate), **CLOSE)


@settings(max_examples=30, deadline=None)
@given(flow_sets(), st.sampled_from(list(INCAST.values())))
def test_ends_are_those_of_plain_steps(flows, incast):
    send, receive, amount = flows
    fabric = Fabric(2.0, incast=incast)
    together = np.zeros(len(send), dtype=int)
    ends = finish_times(send, receive, amount, together, 2.0, fabric.efficiency)
    assert ends == pytest.approx(plain_finish(send, receive, amount, 2.0, incast), rel=1e-8)


def test_components_do_not_meet():
    """Two copies of a set of flows on other ports, one of twice the size: each ends as alone."""
    rng = np.random.default_rng(3)
    send, receive = np.divmod(rng.permutation(36)[:20], 6)
    amount = rng.integers(1, 50, 20)
    one = Fabric(1.0, incast=0.5).efficiency
    alone = finish_times(send, receive, amount, np.zeros(20, int), 1.0, one)
    both = finish_times(
        np.append(send, send + 6),
        np.append(receive, receive + 6),
        np.append(amount, 2 * amount),
        np.repeat([5, 2], 20),
        1.0,
        one,
    )
    assert both == pytest.approx(np.append(alone, 2 * alone), **CLOSE)


# --- closed forms ---


@pytest.mark.parametrize("incast", INCAST.values())
def test_equal_senders_of_one_receiver(incast):
    """f flows of b bytes into one NIC: f * b at 1 / (1 + a (f - 1)) of its rate."""
    for num_senders in (1, 2, 3, 7):
        matrix = np.zeros((8, 8), dtype=int)
        matrix[1 : 1 + num_senders, 0] = 60
        demand = Demand.of(matrix, Topology(8, 1, 1))
        expected = num_senders * 60 * (1 + incast * (num_senders - 1)) / 4
        assert seconds("native", demand, Fabric(4.0, incast=incast)) == pytest.approx(expected)
        assert seconds("rate", demand, Fabric(4.0, incast=incast)) == num_senders * 15


@settings(max_examples=30, deadline=None)
@given(demands(), st.sampled_from(list(INCAST.values())))
def test_waves_cost_their_busiest_port(demand, incast):
    """One sender a receiver: no sharing, no incast; also when flows are followed all the same."""
    schedule = SCHEDULERS["permutation"](demand)
    result = simulate(schedule, Fabric(2.0, incast=incast))
    for window, window_s in enumerate(result.window_s):
        now = schedule.window == window
        assert window_s == schedule.transfer_bytes[now].max(initial=0) / 2
        if now.any():
            rails = demand.topo.rails_per_node
            ends = finish_times(
                schedule.source[now] * rails + schedule.source_rail[now],
                schedule.destination[now] * rails + schedule.destination_rail[now],
                schedule.transfer_bytes[now],
                schedule.source_rail[now],
                2.0,
                Fabric(2.0, incast=incast).efficiency,
            )
            assert ends == pytest.approx(schedule.transfer_bytes[now] / 2, **CLOSE)
    assert result.time_s == pytest.approx(result.window_s.sum(), **CLOSE)


def test_redistribution_costs_its_busiest_gpu():
    """GPU 0 owns 8 bytes for GPU 0 of node 1: 4 leave it, cross by rail 1 and go back."""
    matrix = np.zeros((4, 4), dtype=int)
    matrix[0, 2] = 8
    demand = Demand.of(matrix, Topology(2, 2, 2))
    result = simulate(SCHEDULERS["joint"](demand), Fabric(1.0, nvlink_bytes_s=8.0))
    assert (result.before_s, result.window_s, result.after_s) == ([0.5], [4], [0.5])
    assert result.time_s == 5.0
    assert seconds("native", demand, Fabric(1.0, nvlink_bytes_s=8.0)) == 8.0
    assert result.rail_share.tolist() == [0.5, 0.5]
    assert result.send_busy.tolist() == [[0.8, 0.8], [0, 0]]
    assert result.algbw_gbs == pytest.approx(8 / (4 * 5) / 1e9)
    assert result.busbw_gbs == pytest.approx(result.algbw_gbs * 3 / 4)


def test_latency_of_waves_and_grants():
    """Three waves; the first needs no grant. Waves without bytes cost nothing."""
    fabric = Fabric(1.0, wave_latency_s=10.0, grant_latency_s=100.0)
    demand = equal_pairs(Topology(4, 1, 1), 2)
    assert seconds("joint", demand, fabric) == 3 * (2 + 10) + 2 * 100
    assert seconds("native", demand, fabric) == 6 + 10
    assert seconds("native", demand, fabric, windows=windows_of("permutation")) == 3 * (2 + 10)
    ring = Demand.of([[0, 2, 0], [0, 0, 2], [2, 0, 0]], Topology(3, 1, 1))
    assert seconds("joint", ring, fabric) == 2 + 10


def test_pipelined_windows_redistribute_beside_transfers():
    """Steps of 4, 5 and 6 s; redistribution 1, 2, 3 before and 3, 2, 1 after."""
    zero, window = np.zeros(3, dtype=np.int64), np.arange(3)
    good = SCHEDULERS["native"](Demand.of([[0, 1], [0, 0]], Topology(2, 1, 1)))
    tables = {"moved_bytes": np.zeros((3, 2), int), "port_bytes": np.zeros((3, 2), int)}
    tables["port_bytes"][:, 0] = 1, 2, 3
    before = dataclasses.replace(good.before, **tables)
    after = dataclasses.replace(before, port_bytes=tables["port_bytes"][::-1].copy())
    columns = {"source": zero, "destination": zero + 1, "source_rail": zero}
    columns |= {"destination_rail": zero, "transfer_bytes": window + 4, "window": window}
    schedule = dataclasses.replace(good, **columns, before=before, after=after, order="pipelined")
    fabric = Fabric(1.0, nvlink_bytes_s=1.0)
    # Beside the steps: before[1] = 2; before[2] + after[0] = 3 + 3; after[1] = 2.
    assert simulate(schedule, fabric).time_s == 1 + 4 + 6 + 6 + 1
    barrier = dataclasses.replace(schedule, order="barrier")
    assert simulate(barrier, fabric).time_s == 15 + 6 + 6


def test_free_waves_wait_for_peers_only():
    """Node 0 sends 5 to node 1, then 1 to node 2; node 1 sends 1 to node 2, then 4 to node 0.

    Node 1 goes on at 1, while it still receives, and ends at 5; node 0 goes on at 5, ends at 6.
    """
    demand = Demand.of([[0, 5, 1], [4, 0, 1], [0, 0, 0]], Topology(3, 1, 1))
    assert seconds("joint", demand, Fabric(1.0)) == 5 + 4
    assert seconds("joint", demand, Fabric(1.0), order="free") == 6


def test_stepwise_waves_wait_for_what_both_ends_send_and_receive():
    """As above, node 1 goes on only at 5, when it has received, and ends at 9. On four nodes:

    In wave 1, 0 sends 6 to 1, and 2 sends 2 to 3; in wave 2 nodes 0 and 1 send 1 to 2 and 3, from 6
    on, node 2 sends 3 to 0, which is busy until 6: 9. In wave 3 node 3 sends 4 to 2, which is busy
    until 9: 13.
    """
    demand = Demand.of([[0, 5, 1], [4, 0, 1], [0, 0, 0]], Topology(3, 1, 1))
    assert seconds("joint", demand, Fabric(1.0), order="stepwise") == 9
    matrix = [[0, 6, 1, 0], [0, 0, 0, 1], [3, 0, 0, 2], [0, 0, 4, 0]]
    demand = Demand.of(matrix, Topology(4, 1, 1))
    assert seconds("joint", demand, Fabric(1.0), order="stepwise") == 13
    # A GPU sends to another node than its mate: its next put waits for the mate's.
    matrix = np.zeros((6, 6), dtype=int)
    matrix[0, 2] = matrix[1, 5] = 6
    demand = Demand.of(matrix, Topology(3, 2, 2))
    assert seconds("permutation", demand, Fabric(1.0), order="stepwise") == 12
    assert seconds("permutation", demand, Fabric(1.0), order="free") == 6
    with pytest.raises(ValueError, match=r"order must be one of .*, got 'chunkwise'"):
        SCHEDULERS["joint"](demand, order="chunkwise")


def test_free_waves_redistribute_in_turn():
    """Node 0 owns 4 bytes for node 1 and 8 for node 2, all between GPUs 0; two rails.

    Half of each changes rail, there and back: ready at 2, sent by 4, done at 6; ready at 2 + 4,
    sent by 10, done at 14. With barriers 2 + 2 + 2 and 4 + 4 + 4.
    """
    matrix = np.zeros((6, 6), dtype=int)
    matrix[0, 2], matrix[0, 4] = 4, 8
    demand = Demand.of(matrix, Topology(3, 2, 2))
    fabric = Fabric(1.0, nvlink_bytes_s=1.0)
    assert seconds("joint", demand, fabric, order="free") == 14
    assert seconds("joint", demand, fabric) == 18


def free_by_hand(schedule, rate):
    """Run waves without barriers, transfer by transfer."""
    sending, receiving = {}, {}
    for i in np.argsort(schedule.window, kind="stable"):
        out = schedule.source[i], schedule.source_rail[i]
        into = schedule.destination[i], schedule.destination_rail[i]
        start = max(sending.get(out, 0), receiving.get(into, 0))
        sending[out] = receiving[into] = start + schedule.transfer_bytes[i] / rate
    return max([0, *sending.values()])


@settings(max_examples=30, deadline=None)
@given(demands())
def test_free_waves_are_those_by_hand_and_no_slower_than_with_barriers(demand):
    for name in ("permutation", "joint"):
        schedule = SCHEDULERS[name](demand, order="free")
        free = simulate(schedule, Fabric(2.0)).time_s
        assert free == pytest.approx(free_by_hand(schedule, 2.0), **CLOSE)
        assert free <= seconds(name, demand, Fabric(2.0)) * (1 + 1e-12)
        assert seconds(name, demand, Fabric(2.0, nvlink_bytes_s=3.0), order="free") <= seconds(
            name, demand, Fabric(2.0, nvlink_bytes_s=3.0)
        ) * (1 + 1e-12)


def stepwise_by_hand(schedule, rate):
    """Run a dispatch's rounds as each GPU's stream does: put, then unpack, round after round.

    A put waits for the one word of each node-mate that it has put the round before, and for the
    receiver's grant, which comes when that has unpacked the round before.
    """
    rails, nodes = schedule.topo.rails_per_node, schedule.topo.nodes
    sends, comes = {}, {}
    for i in range(len(schedule.window)):
        out = int(schedule.source[i]), int(schedule.source_rail[i])
        into = int(schedule.destination[i]), int(schedule.destination_rail[i])
        step = int(schedule.window[i])
        sends[step, out], comes[step, into] = (into, schedule.transfer_bytes[i] / rate), out

    @functools.cache
    def put(step, nic):
        if step < 0:
            return 0.0
        mates = max(put(step - 1, (nic[0], rail)) for rail in range(rails))
        begin = max(mates, unpacked(step - 1, nic))
        into, takes = sends.get((step, nic), (nic, 0.0))
        return max(begin, unpacked(step - 1, into)) + takes

    @functools.cache
    def unpacked(step, nic):
        if step < 0:
            return 0.0
        came = put(step, comes[step, nic]) if (step, nic) in comes else 0.0
        return max(put(step, nic), came)

    last = schedule.num_windows - 1
    return max(unpacked(last, (node, rail)) for node in range(nodes) for rail in range(rails))


@settings(max_examples=30, deadline=None)
@given(demands())
def test_stepwise_waves_are_those_by_hand_between_free_ones_and_barriers(demand):
    for name in ("permutation", "joint"):
        free, stepwise, barrier = (
            simulate(SCHEDULERS[name](demand, order=order), Fabric(2.0)).time_s
            for order in ("free", "stepwise", "barrier")
        )
        by_hand = stepwise_by_hand(SCHEDULERS[name](demand), 2.0)
        assert stepwise == pytest.approx(by_hand, **CLOSE)
        assert free * (1 - 1e-12) <= stepwise <= barrier * (1 + 1e-12)


def test_free_order_needs_one_transfer_a_port():
    native = SCHEDULERS["native"](equal_pairs(Topology(3, 1, 1), 5))
    with pytest.raises(
        ValueError, match=r"one transfer a port in each window .* window 0 has more"
    ):
        simulate(dataclasses.replace(native, order="free"), Fabric(1.0))


def test_bad_input_is_refused():
    for changes, words in [
        ({"rail_bytes_s": 0}, r"rail_bytes_s must be in \[1e-06, 1e\+18\], got 0"),
        ({"rail_bytes_s": math.inf}, "rail_bytes_s must be in .*, got inf"),
        ({"nvlink_bytes_s": -1}, "nvlink_bytes_s must be in .*, got -1"),
        ({"incast": -0.1}, r"incast must be in \[0, 1e\+06\], got -0.1"),
        ({"wave_latency_s": math.nan}, "wave_latency_s must be in .*, got nan"),
    ]:
        with pytest.raises(ValueError, match=words):
            Fabric(**({"rail_bytes_s": 1.0} | changes))
    with pytest.raises(TypeError, match="schedule must be a railwave Schedule, got int"):
        simulate(3, Fabric(1.0))
    with pytest.raises(TypeError, match="fabric must be a Fabric, got float"):
        simulate(SCHEDULERS["native"](equal_pairs(Topology(2, 1, 1), 5)), 1.0)


def test_nothing_to_send_takes_no_time():
    demand = Demand.of(np.zeros((4, 4), dtype=int), Topology(2, 2, 2))
    for name, scheduler in SCHEDULERS.items():
        result = simulate(scheduler(demand), Fabric(1.0, wave_latency_s=1.0))
        assert result.time_s == 0 and result.algbw_gbs == 0, name


# --- the paper's arithmetic ---


def test_replay_of_equal_pairs_costs_3_5_8():
    """Table 8 with equal pairs: Permutation 3, Moderate 5, Extreme 8, in either of two ways."""
    demand = equal_pairs(Topology(4, 8, 8), 8 * 100)
    units = {"permutation": 3, "moderate": 5, "extreme": 8}
    for name in ("native", "rail"):
        for schedule, unit in units.items():
            time_s = seconds(name, demand, Fabric(100.0), windows=windows_of(schedule))
            assert time_s == pytest.approx(unit, **CLOSE), (name, schedule)
    for name in ("permutation", "joint"):
        assert seconds(name, demand, Fabric(100.0), windows=windows_of("extreme")) == 3


def ultra_ep(shares, rail_shares):
    """Return three nodes' demand on the fourth; 4 MiB per share and 8 rails at rail_shares."""
    owned, bound = np.zeros((4, 8, 4), dtype=int), np.zeros((4, 4, 8), dtype=int)
    for node, share in enumerate(shares, start=1):
        owned[node, :, 0] = share * np.array(rail_shares) << 22
        bound[node, 0, :] = owned[node, :, 0].sum() // 8
    return Demand(owned, bound, Topology(4, 8, 8))


def test_ultra_ep_by_arithmetic():
    """All to one node. Even rails: every path takes T*. Half of the rails: native twice that."""
    fabric = Fabric(25e9)
    skewed_nodes = ultra_ep([1, 2, 3], [1] * 8)
    total = int(skewed_nodes.between_nodes.sum())
    assert bound_s(skewed_nodes, 25e9) == pytest.approx(total / (8 * 25e9), **CLOSE)
    for name in ("native", "rail", "permutation", "joint"):
        assert seconds(name, skewed_nodes, fabric) == pytest.approx(
            bound_s(skewed_nodes, 25e9), **CLOSE
        )
    skewed_rails = ultra_ep([2, 2, 2], [2] * 4 + [0] * 4)
    for name, factor in [("native", 2), ("permutation", 2), ("rail", 1), ("joint", 1)]:
        expected = factor * bound_s(skewed_rails, 25e9)
        assert seconds(name, skewed_rails, fabric) == pytest.approx(expected, **CLOSE)
    severe = Fabric(25e9, incast=INCAST["severe"])
    assert seconds("permutation", skewed_nodes, severe) == pytest.approx(
        bound_s(skewed_nodes, 25e9), **CLOSE
    )
    # Loads 1, 2, 3: efficiencies 1/9, 1/5 and 1 while 3, 2 and 1 of them send.
    assert seconds("native", skewed_nodes, severe) == pytest.approx(
        (3 * 9 + 2 * 5 + 1) / 6 * bound_s(skewed_nodes, 25e9), **CLOSE
    )


# --- what must hold for any demand ---


@settings(max_examples=30, deadline=None)
@given(demands(), st.sampled_from(list(INCAST.values())), st.sampled_from([math.inf, 3.0]))
def test_the_bound_is_never_beaten(demand, incast, nvlink_bytes_s):
    fabric = Fabric(2.0, nvlink_bytes_s=nvlink_bytes_s, incast=incast)
    for name, scheduler in SCHEDULERS.items():
        time_s = simulate(scheduler(demand), fabric).time_s
        assert time_s >= bound_s(demand, 2.0) * (1 - 1e-9), name
    for name in ("permutation", "joint"):
        assert seconds(name, demand, fabric, order="free") >= bound_s(demand, 2.0) * (1 - 1e-9)


@settings(max_examples=30, deadline=None)
@given(demands(), st.randoms(use_true_random=False), st.sampled_from(list(INCAST.values())))
def test_any_relabelling_of_nodes_keeps_native_and_rate(demand, random, incast):
    """Of bytes that can stay on their rail: the others' remainders turn with the labels."""
    eligible = demand.topo.eligible_rails.numpy()[:, :, list(demand.topo.rail_of_gpu)]
    assume((eligible | (demand.owned.transpose(0, 2, 1) == 0)).all())
    label = random.sample(range(demand.topo.nodes), demand.topo.nodes)
    renamed = relabelled(demand, label)
    fabric = Fabric(2.0, nvlink_bytes_s=3.0, incast=incast)
    for name in ("native", "rate"):
        assert seconds(name, renamed, fabric) == pytest.approx(
            seconds(name, demand, fabric), **CLOSE
        )


@settings(max_examples=30, deadline=None)
@given(demands(unit=5), st.integers(0, 4))
def test_a_rotation_of_nodes_keeps_waves_to_within_a_record_a_wave(demand, shift):
    nodes = demand.topo.nodes
    renamed = relabelled(demand, (np.arange(nodes) + shift) % nodes)
    for name, options, record in [("permutation", {}, 1), ("joint", {"record_bytes": 5}, 5)]:
        times = [seconds(name, d, Fabric(1.0), **options) for d in (demand, renamed)]
        assert abs(times[0] - times[1]) <= record * (nodes - 1)


@settings(max_examples=30, deadline=None)
@given(demands(), st.sampled_from([1.0, 1.5, 4.0]), st.sampled_from(list(INCAST.values())))
def test_faster_ports_never_lengthen_a_path(demand, factor, incast):
    slow = Fabric(2.0, nvlink_bytes_s=3.0, wave_latency_s=0.5, incast=incast)
    fast = dataclasses.replace(slow, rail_bytes_s=2.0 * factor, nvlink_bytes_s=3.0 * factor)
    for name in ("native", "rail", "permutation", "joint"):
        assert seconds(name, demand, fast) <= seconds(name, demand, slow) * (1 + 1e-9)


@settings(max_examples=40, deadline=None)
@given(demands(even=True))
def test_fast_ends_at_the_bound_but_for_remainders(demand):
    """Stages of equal sums add up to T*; each adds at most a byte a rail, its remainder."""
    schedule = SCHEDULERS["fast"](demand)
    time_s = simulate(schedule, Fabric(1.0)).time_s
    assert time_s <= bound_s(demand, 1.0) + schedule.num_windows


# --- how long it takes ---


def test_wave_paths_of_256_nodes_are_simulated_soon():
    """5 s allow 1,024 nodes x 8 rails on one core; 256 have a 16th of the pairs. Twice that."""
    demand = random_demand(Topology(256, 8, 8), seed=0, high=1000, unit=14336)
    for name in ("permutation", "joint"):
        start = time.process_time()
        assert seconds(name, demand, Fabric(25e9)) >= bound_s(demand, 25e9)
        assert time.process_time() - start < 2 * 5 / 16, name


def test_native_of_32_nodes_is_simulated_soon():
    """10 s allow 64 nodes x 8 rails; flows times ends make 32 nodes a 16th. Four times that."""
    demand = random_demand(Topology(32, 8, 8), seed=0, high=1 << 20)
    start = time.process_time()
    assert seconds("native", demand, Fabric(25e9)) >= bound_s(demand, 25e9)
    assert time.process_time() - start < 4 * 10 / 16


# --- SimGrid ---

SIMGRID = Path(__file__).parent / "simgrid_flows.py"
SYSTEM_PYTHON = "/usr/bin/python3"


def have_simgrid():
    if shutil.which(SYSTEM_PYTHON) is None:
        return False
    command = [SYSTEM_PYTHON, "-c", "import simgrid"]
    return subprocess.run(command, capture_output=True, timeout=60).returncode == 0


@pytest.fixture(scope="module")
def simgrid():
    if not have_simgrid():
        pytest.skip("python3-simgrid is not installed for /usr/bin/python3 (Debian)")

    def run(schedule, rate):
        rails = schedule.topo.rails_per_node
        send = schedule.source * rails + schedule.source_rail
        receive = schedule.destination * rails + schedule.destination_rail
        flows = np.stack([send, receive, schedule.transfer_bytes], axis=1).tolist()
        reply = subprocess.run(
            [SYSTEM_PYTHON, str(SIMGRID)],
            input=json.dumps({"rate": rate, "flows": flows}),
            capture_output=True,
            text=True,
            check=True,
            timeout=300,
        )
        return json.loads(reply.stdout)

    return run


@pytest.mark.parametrize(("nodes", "rails"), [(4, 2), (16, 4), (32, 8)])
@pytest.mark.parametrize("rail_rule", ["source", "destination"])
def test_native_agrees_with_simgrid(simgrid, nodes, rails, rail_rule):
    topo = Topology(nodes, rails, rails)
    demand = random_demand(topo, seed=nodes, high=1000, unit=14336)
    schedule = SCHEDULERS["native"](demand, rail_rule=rail_rule)
    ours, theirs = simulate(schedule, Fabric(25e9)).time_s, simgrid(schedule, 25e9)
    print(f"{nodes}x{rails} {rail_rule}: ours {ours:.9f} s, SimGrid {theirs:.9f} s")
    assert ours == pytest.approx(theirs, rel=0.02)
    if rail_rule == "source":
        assert ours > 1.01 * bound_s(demand, 25e9)  # or the bound alone would pass


def test_sprayed_chunks_agree_with_simgrid(simgrid):
    """Uneven fan-in: few chunks a flow, so rails differ and many ports idle early."""
    demand = random_demand(Topology(16, 4, 4), seed=1, high=1000, unit=14336)
    schedule = SCHEDULERS["rails_lpt"](demand, chunk_bytes=14336 * 1500)
    ours, theirs = simulate(schedule, Fabric(25e9)).time_s, simgrid(schedule, 25e9)
    print(f"rails_lpt 16x4: ours {ours:.9f} s, SimGrid {theirs:.9f} s")
    assert ours == pytest.approx(theirs, rel=0.02)
    assert ours > 1.1 * bound_s(demand, 25e9)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("incast", INCAST.values())
def test_spans_end_with_the_schedule(scheduler, incast):
    """Each pair that sends has a span; the last of a window ends when `simulate` says."""
    demand = random_demand(Topology(4, 4, 2), seed=2, high=50)
    fabric = Fabric(
        3.0, nvlink_bytes_s=20.0, wave_latency_s=1.0, grant_latency_s=2.0, incast=incast
    )
    schedule = SCHEDULERS[scheduler](demand)
    if schedule.order != "barrier":
        with pytest.raises(ValueError, match=f"order 'barrier', got '{schedule.order}'"):
            node_spans(schedule, fabric)
        return
    spans, result = node_spans(schedule, fabric), simulate(schedule, fabric)
    columns = schedule.window, schedule.source, schedule.destination
    sent = sorted(set(zip(*(column.tolist() for column in columns), strict=True)))
    assert [span[:2] for span in spans] == [(s, d) for _, s, d in sent]
    assert max(end for *_, end in spans) + result.after_s[-1] == pytest.approx(result.time_s)
    begins = sorted({begin for _, _, begin, _ in spans})
    lasts = [max(end for _, _, begin, end in spans if begin == start) for start in begins]
    used = result.window_s[np.unique(schedule.window)]
    assert np.subtract(lasts, begins) == pytest.approx(used)


@pytest.mark.parametrize("name", ["fabric", "fair", "simulate", "spans"])
def test_examples_in_docstrings(name):
    result = doctest.testmod(importlib.import_module(f"railwave.sim.{name}"))
    assert result.attempted > 0 and result.failed == 0
