"""What granted chunks cost in simulation, beside T* and joint: the targets of issue 11.

Letters: N nodes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from bench.phase import planned
from railwave import Topology
from railwave.sched import SCHEDULERS, Demand, bound_s
from railwave.sim import Fabric, simulate
from railwave.sim.simulate import rail_runs
from railwave.workloads import RECORD_BYTES, preset, replay, standin_loads, ultraep_demand

RAILS = 8
RAIL_BYTES_S = 25e9
ROUND_TRIP_S = 5e-6
PAYLOAD_MIB = 14  # a GPU, mean
UNIT_RECORDS = 64  # a GPU, where there is no round trip: as `routed.uneven_pairs`
PATTERNS = ("ring", "moderate", "extreme")


def measure(nodes: tuple[int, ...], seeds: int) -> Iterator[dict[str, Any]]:
    """Yield ratios to T* of skewed pairs, and to joint of the paper's replay.

    Args:
        nodes: N of each cluster; 128 takes some minutes a seed.
        seeds: how many of each, from 0 on.
    """
    for N in nodes:
        demands = [demand_of(zipf_pairs(N, seed) * UNIT_RECORDS) for seed in range(seeds)]
        yield {"result": "granted, no round trip", "nodes": N} | ratios(demands, 0.0, 2)
    for N in (N for N in nodes if N <= 32):
        demands = [demand_of(sized(zipf_pairs(N, seed))) for seed in range(seeds)]
        for outstanding in (1, 2):
            case = {"result": "granted, 5 us", "nodes": N, "outstanding": outstanding}
            yield case | ratios(demands, ROUND_TRIP_S, outstanding)
    for round_trip_s in (0.0, ROUND_TRIP_S):
        demand = ultraep_demand("R42", preset("h800").topo)
        case = {"result": "granted, all to one node", "round_trip_us": round_trip_s * 1e6}
        yield case | ratios([demand], round_trip_s, 2)
        for pattern in PATTERNS:
            yield against_joint(pattern, round_trip_s)


def zipf_pairs(nodes: int, seed: int) -> np.ndarray:
    """Return (N, N) independent Zipf(2) numbers, at most 50; 0 from a node to itself."""
    pairs = np.minimum(np.random.default_rng(seed).zipf(2.0, (nodes, nodes)), 50)
    return pairs * ~np.eye(nodes, dtype=bool)


def sized(pairs: np.ndarray) -> np.ndarray:
    """Return (N, N) records a GPU, so that GPUs send PAYLOAD_MIB on average."""
    records = PAYLOAD_MIB * 2**20 / RECORD_BYTES * len(pairs)
    return np.round(pairs * (records / pairs.sum())).astype(np.int64)


def demand_of(pairs: np.ndarray) -> Demand:
    """Return what 8 GPUs a node with as many records each, (N, N), send."""
    per_gpu = (pairs * RECORD_BYTES)[:, :, None].repeat(RAILS, axis=2)
    return Demand(per_gpu.transpose(0, 2, 1), per_gpu, Topology(len(pairs), RAILS, RAILS))


def ratios(demands: list[Demand], round_trip_s: float, outstanding: int) -> dict[str, Any]:
    """Return time over T* by seed, joint's beside it, and what granting took."""
    fabric = Fabric(RAIL_BYTES_S, grant_latency_s=round_trip_s)
    found: dict[str, list[float]] = {"over_bound": [], "joint_over_bound": []}
    fan_in, words, chunks = 0, 0, 0
    for demand in demands:
        bound = bound_s(demand, RAIL_BYTES_S)
        how = {"record_bytes": RECORD_BYTES, "outstanding": outstanding}
        runs = rail_runs(planned(SCHEDULERS["granted"], demand, **how), fabric)
        found["over_bound"].append(max(run.time_s for run in runs) / bound)
        joint = planned(SCHEDULERS["joint"], demand, record_bytes=RECORD_BYTES)
        found["joint_over_bound"].append(simulate(joint, fabric).time_s / bound)
        fan_in = max(fan_in, *(run.fan_in for run in runs))
        words += sum(run.num_words for run in runs)
        chunks += sum(run.num_chunks for run in runs)
    mean = float(np.mean(found["over_bound"]))
    return {**found, "mean": mean, "fan_in": fan_in, "words_a_chunk": words / chunks}


def against_joint(pattern: str, round_trip_s: float) -> dict[str, Any]:
    """Return granted's time over joint's on a pattern of the replay, network alone, by layer."""
    cluster = preset("h800")
    fabric = Fabric(cluster.rail_gbytes_s * 1e9, grant_latency_s=round_trip_s)
    found = []
    for loads in standin_loads(seed=0, layers=5):
        demand = replay(pattern, loads, cluster.topo).demand
        granted, joint = (
            simulate(planned(SCHEDULERS[name], demand, record_bytes=RECORD_BYTES), fabric).time_s
            for name in ("granted", "joint")
        )
        found.append(granted / joint)
    return {
        "result": "granted over joint, replay",
        "pattern": pattern,
        "round_trip_us": round_trip_s * 1e6,
        "ratio": found,
    }
