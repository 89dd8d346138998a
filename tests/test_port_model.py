"""Ports taken as put takes them share as the fluid model says: followed slot by slot, on paper.

Letters: N nodes.
"""

import contextlib
import heapq
import itertools

import numpy as np
import pytest

from railwave import Topology
from railwave.kernels import load
from railwave.sched import SCHEDULERS, Demand
from railwave.sim import Fabric, simulate
from railwave.workloads import replay_windows

take_ref = load(interpret=True).port.take_ref
SLOT_NS, COPY_NS = 1000, 150  # a slot, and what a program needs to store its bytes


def program(source, destination, slots, egress, ingress):
    """Run as one program of put; yield when to go on, be sent the time."""
    passed = [0] * 4
    now = yield 0
    for _ in range(slots):
        now = yield max(now, passed[0])
        began, egress[source] = take_ref(egress.get(source, 0), now, SLOT_NS)
        now = yield max(now + COPY_NS, began)
        _, ingress[destination] = take_ref(ingress.get(destination, 0), began, SLOT_NS)
        passed = [*passed[1:], ingress[destination]]
    yield max(passed)


def slots_time(pairs, programs):
    """Return how many slots long it takes to send (N, N) slots, all pairs at once."""
    egress, ingress, number, end = {}, {}, itertools.count(), 0
    queue = []
    for s, d in np.argwhere(pairs).tolist():
        for p in range(programs):
            slots = pairs[s, d] * (p + 1) // programs - pairs[s, d] * p // programs
            running = program(s, d, slots, egress, ingress)
            heapq.heappush(queue, (next(running), next(number), running))
    while queue:
        now, _, running = heapq.heappop(queue)
        end = max(end, now)
        with contextlib.suppress(StopIteration):
            heapq.heappush(queue, (max(now, running.send(now)), next(number), running))
    return end / SLOT_NS


def fluid(pairs, windows=None):
    """Return the fluid model's time of native, in slots."""
    per_gpu = pairs[:, None, :]
    demand = Demand(per_gpu, per_gpu.transpose(0, 2, 1), Topology(len(pairs), 1, 1))
    return simulate(SCHEDULERS["native"](demand, windows=windows), Fabric(1.0)).window_s.sum()


@pytest.mark.parametrize("programs", [1, 4])
@pytest.mark.parametrize("pattern, units", [("permutation", 3), ("moderate", 5), ("extreme", 8)])
def test_the_paper_s_windows_take_3_5_and_8(pattern, units, programs):
    total = 0
    for window in replay_windows(pattern, 4):
        pairs = np.zeros((4, 4), dtype=np.int64)
        for s, d in window:
            pairs[s, d] = 100
        total += slots_time(pairs, programs)
    assert total / 100 == pytest.approx(units, rel=0.01)


@pytest.mark.parametrize("programs", [1, 4])
@pytest.mark.parametrize("seed", range(8))
def test_all_pairs_at_once_take_as_long_as_the_fluid_model_says(seed, programs):
    """Uneven pairs of 2 to 8 nodes: 4 % is what queues of whole slots differ by at the end."""
    draw = np.random.default_rng(seed)
    nodes = int(draw.integers(2, 9))
    pairs = draw.integers(0, 200, (nodes, nodes)) * ~np.eye(nodes, dtype=bool)
    assert slots_time(pairs, programs) == pytest.approx(fluid(pairs), rel=0.04)
