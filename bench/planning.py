"""What planning costs by the size of a cluster, and what the remainders' rotation is for.

Letters: N nodes, R rails.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from bench.phase import worst_node
from railwave import Topology
from railwave.sched import SCHEDULERS, Demand
from railwave.sched.parts import even_parts, pair_turn
from railwave.workloads import RECORD_BYTES

GPUS = RAILS = 8
# The largest cluster of each scheduler. FAST's grows as N**3 and more: beyond, it is extrapolated.
LARGEST = {"native": 1024, "joint": 1024, "rails_lpt": 1024, "fast": 64}
NODES = (4, 8, 16, 32, 64, 128, 256, 512, 1024)
FITTED = 3  # the largest measured clusters that the extrapolation goes through


def measure() -> Iterator[dict[str, Any]]:
    """Yield planning times, and ingress imbalance by remainders."""
    yield from planning_times(NODES)
    for tokens in (16, 128):
        yield remainders(tokens)


def planning_times(
    nodes: tuple[int, ...], largest: dict[str, int] = LARGEST
) -> Iterator[dict[str, Any]]:
    """Yield how long each scheduler plans, this machine's one core planning for all nodes.

    Native, joint and RailS plan a node from its own counts, so that N nodes share the work; FAST
    needs the whole demand, and every node does all of it (`per_node_us`).

    Args:
        nodes: N of each cluster, ascending.
        largest: scheduler -> the largest N that is run; beyond, a power law through the FITTED
            largest is given, and marked.
    """
    measured: dict[str, dict[int, float]] = {name: {} for name in largest}
    for N in nodes:
        demand = random_demand(N)
        for name, limit in largest.items():
            if limit >= N:
                repeats = 3 if N <= 64 else 1
                scheduler = SCHEDULERS[name]
                us = min(scheduler(demand).plan_us for _ in range(repeats))
                measured[name][N] = us
            else:
                us = power_law(measured[name], N)
            yield {
                "result": "planning",
                "scheduler": name,
                "nodes": N,
                "all_nodes_us": us,
                "per_node_us": us if name == "fast" else us / N,
                "extrapolated": limit < N,
            }


def power_law(measured: dict[int, float], nodes: int) -> float:
    """Extend log(time) as a straight line over log(nodes) through the FITTED largest clusters."""
    known = sorted(measured)[-FITTED:]
    slope, start = np.polyfit(np.log(known), np.log([measured[N] for N in known]), 1)
    return float(np.exp(start + slope * np.log(nodes)))


def random_demand(nodes: int, seed: int = 0) -> Demand:
    """Return 8 to 16 records from each GPU to each other node, bound evenly for its GPUs."""
    random = np.random.default_rng(seed)
    away = ~np.eye(nodes, dtype=bool)
    owned = random.integers(8, 17, (nodes, GPUS, nodes)) * away[:, None, :] * RECORD_BYTES
    bound = np.repeat(owned.sum(axis=1)[:, :, None] // GPUS, GPUS, axis=2)
    return Demand(owned, bound, Topology(nodes, GPUS, RAILS))


def remainders(tokens: int, *, nodes: int = 64, seed: int = 0) -> dict[str, Any]:
    """Return ingress max/mean over the rails of the worst receiver, by where remainders begin.

    Each of 8 GPUs a node routes its tokens to 8 experts, uniformly; a token is one record for each
    node that it goes to.
    """
    chance = 1 - (1 - 1 / nodes) ** 8
    random = np.random.default_rng(seed)
    # Drawn for each pair on its own.
    records = random.binomial(GPUS * tokens, chance, (nodes, nodes)) * ~np.eye(nodes, dtype=bool)
    eligible = np.ones((nodes, nodes, RAILS), dtype=bool)
    worst = {}
    destination_alone = np.broadcast_to(np.arange(nodes), (nodes, nodes))
    for name, turn in [("s + d", pair_turn(nodes)), ("d", destination_alone)]:
        worst[name] = worst_node(even_parts(records, eligible, turn).sum(axis=0))
    return {
        "result": "remainders",
        "nodes": nodes,
        "tokens_per_gpu": tokens,
        "max_over_mean": worst,
    }
