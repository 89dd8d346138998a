"""What the schedulers do in simulation, beside what the paper publishes.

No parameter is fitted to a published number: rates are those of the presets, loads the seeded
stand-in's, latencies 0, and the three incast models those of `railwave.sim.INCAST`, of which two
were read off the paper's Figure 2(c) and Table 2 beforehand.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch

from bench import granted, planning, routed
from bench.phase import PATHS, Seconds, schedule_path, total_seconds
from railwave.sched import bound_s, receiver_concentration, source_rail_skew
from railwave.sched.parts import owned_by_rail
from railwave.sim import INCAST
from railwave.workloads import (
    FIGURE_8_SHARES,
    PRESETS,
    RECORD_BYTES,
    ULTRAEP_CASES,
    Replay,
    bin_shares,
    preset,
    replay,
    standin_loads,
    ultraep_demand,
)

PATTERNS = ("ring", "moderate", "extreme")
PAPER_SPEEDUPS = {"h800": (2.02, 5.84), "h20": (1.74, 4.36)}  # over the three patterns, P50
PAPER_EXTREME_OVER_MODERATE = 1.671  # native, Figure 2(c)
# Table 2, P50, ms there and back, in the order of PATHS.
PAPER_ULTRAEP_MS = {
    "N28": (108.478, 79.735, 11.191, 11.489),
    "N42": (141.361, 76.374, 16.305, 16.712),
    "R28": (138.624, 37.467, 56.899, 17.632),
    "R42": (233.130, 102.411, 84.742, 25.721),
}
CORNER_PAYLOAD_MIB = 56  # of Figure 9's two; without latencies the times of the other are a quarter


def measure(
    trace: routed.Counts | None, granted_nodes: tuple[int, ...] = (4, 8, 16), granted_seeds: int = 3
) -> Iterator[dict[str, Any]]:
    """Yield every result; those of recorded routing only with a trace (`routed.read_trace`).

    Args:
        trace: counts by iteration, layer and micro-batch, or None.
        granted_nodes, granted_seeds: see `granted.measure`.
    """
    loads = standin_loads(seed=0)
    yield from three_five_eight()
    yield from replay_speedups(loads, "stand-in")
    if trace is not None:
        yield from replay_speedups(routed.layer_loads(trace), "trace")
    yield figure_8_arithmetic()
    yield from ultraep()
    yield from figure_8(loads)
    yield from figure_9(loads)
    yield from routed.measure(trace)
    yield from granted.measure(granted_nodes, granted_seeds)
    yield from planning.measure()


def three_five_eight() -> Iterator[dict[str, Any]]:
    """Yield what native needs for each pattern, in units of one pair of nodes alone.

    Table 8 with equal pairs.
    """
    cluster = preset("h800")
    counts = torch.full((128,), 3)
    for incast in INCAST:
        units = {}
        for pattern in ("permutation", *PATTERNS[1:]):
            replayed = replay(pattern, counts, cluster.topo)
            native = total_seconds([schedule_path("native", replayed)], cluster, incast)
            # All of a pair's rails are equally loaded, and nothing else is on them.
            pair_s = replayed.demand.between_nodes[0, 1] / 8 / (cluster.rail_gbytes_s * 1e9)
            units[pattern] = native.dispatch / pair_s
        yield {"result": "table 8, equal pairs", "incast": incast, "units": units}


def replay_speedups(loads: torch.Tensor, routing: str) -> Iterator[dict[str, Any]]:
    """Yield every path's speedup over native on the replay, all layers added up.

    Args:
        loads: (layers, experts) records.
        routing: what the loads are.
    """
    for name, even in product(PRESETS, (False, True)):
        case = {"routing": routing, "preset": name, "sources": "even" if even else "sorted"}
        times = {pattern: replay_times(loads, name, pattern, even) for pattern in PATTERNS}
        for incast in INCAST:
            for pattern in PATTERNS:
                yield {
                    **{"result": "replay", **case, "pattern": pattern, "incast": incast},
                    **speedups(times[pattern][incast]),
                    "paper_joint_range": PAPER_SPEEDUPS[name],
                }
            extreme, moderate = (times[p][incast]["native"] for p in ("extreme", "moderate"))
            yield {
                **{"result": "replay, native: extreme over moderate", **case, "incast": incast},
                "ratio": extreme.round_trip / moderate.round_trip,
                "dispatch_ratio": extreme.dispatch / moderate.dispatch,
                "paper": PAPER_EXTREME_OVER_MODERATE,
            }


def replay_times(
    loads: torch.Tensor, preset_name: str, pattern: str, even_sources: bool
) -> dict[str, dict[str, Seconds]]:
    """Return the times of all PATHS, all layers added up, by incast model."""
    cluster = preset(preset_name)
    layers = [replay(pattern, row, cluster.topo, even_sources=even_sources) for row in loads]
    schedules = {path: [schedule_path(path, layer) for layer in layers] for path in PATHS}
    return {
        incast: {path: total_seconds(schedules[path], cluster, incast) for path in PATHS}
        for incast in INCAST
    }


def speedups(times: dict[str, Seconds]) -> dict[str, Any]:
    """Return each path's speedup over native: one way, there and back, and with NVLink."""
    native = times["native"]
    return {
        "native_s": native.round_trip,
        "dispatch_speedup": {p: native.dispatch / t.dispatch for p, t in times.items()},
        "speedup": {p: native.round_trip / t.round_trip for p, t in times.items()},
        "speedup_with_nvlink": {p: native.with_nvlink / t.with_nvlink for p, t in times.items()},
    }


def ultraep() -> Iterator[dict[str, Any]]:
    """Yield every path's ratio to T* under UltraEP's traffic, all of which enters one node."""
    cluster = preset("h800")
    for case, incast in product(ULTRAEP_CASES, INCAST):
        demand = ultraep_demand(case, cluster.topo)
        everything = Replay(demand, (frozenset((node, 0) for node in range(1, 4)),))
        bound = bound_s(demand, cluster.rail_gbytes_s * 1e9)
        times = {p: total_seconds([schedule_path(p, everything)], cluster, incast) for p in PATHS}
        paper = dict(zip(PATHS, PAPER_ULTRAEP_MS[case], strict=True))
        yield {
            "result": "ultraep",
            "case": case,
            "incast": incast,
            "bound_both_ways_ms": 2 * bound * 1e3,
            "dispatch_over_bound": {p: t.dispatch / bound for p, t in times.items()},
            "over_bound": {p: t.round_trip / (2 * bound) for p, t in times.items()},
            "paper_over_bound": {p: ms / (2 * bound * 1e3) for p, ms in paper.items()},
        }


def figure_8(loads: torch.Tensor) -> Iterator[dict[str, Any]]:
    """Yield each path's shares of the NIC positions, Moderate on H20, all layers added up."""
    topo = preset("h20").topo
    layers = [replay("moderate", row, topo) for row in loads]
    for path in PATHS:
        schedules = [schedule_path(path, layer) for layer in layers]
        sent = sum(schedule.sent_bytes.sum(axis=0) for schedule in schedules)
        received = sum(schedule.received_bytes.sum(axis=0) for schedule in schedules)
        yield {
            "result": "figure 8",
            "path": path,
            "transmit_share": (sent / sent.sum()).tolist(),
            "receive_share": (received / received.sum()).tolist(),
            "bin_share": bin_shares(loads).tolist(),
            "paper_native_transmit": FIGURE_8_SHARES,
        }


def figure_8_arithmetic() -> dict[str, Any]:
    """Return joint's speedup on H20 from the paper's own shares, by arithmetic.

    Network alone, ports shared fairly: native takes 4 times its largest share longer in each
    window, and Table 8's patterns 1, 5/3 and 8/3 times as long as one-to-one waves.
    """
    skew = max(FIGURE_8_SHARES) * len(FIGURE_8_SHARES)
    units = zip(PATTERNS, (1, 5 / 3, 8 / 3), strict=True)
    return {
        "result": "h20 from figure 8's shares",
        "speedup": {pattern: skew * factor for pattern, factor in units},
        "paper_joint_range": PAPER_SPEEDUPS["h20"],
    }


def corners(loads: torch.Tensor) -> dict[tuple[str, str], Replay]:
    """Return Figure 9's four corners in kind, by (rail skew, receiver concentration).

    - Rail skew: low, equal bins; high, the layer whose largest bin of experts is largest.
    - Concentration: low, cyclic waves, eq. 7 being 1; high, those of Extreme, where it is 3.
    """
    topo = preset("h800").topo
    records = CORNER_PAYLOAD_MIB * 2**20 * topo.gpus_per_node // RECORD_BYTES
    assert int(loads[0].sum()) == records, "the stand-in's layers have this payload"
    bins = loads.sort(dim=1, descending=True).values[:, : loads.shape[1] // 8].sum(dim=1)
    rows = {"low": torch.full((128,), records // 128), "high": loads[int(bins.argmax())]}
    patterns = {"low": "permutation", "high": "extreme"}
    return {
        (skew, concentration): replay(patterns[concentration], rows[skew], topo)
        for skew, concentration in product(rows, patterns)
    }


def figure_9(loads: torch.Tensor) -> Iterator[dict[str, Any]]:
    """Yield the times of all paths at the four corners of Figure 9."""
    cluster = preset("h800")
    for (skew, concentration), replayed in corners(loads).items():
        for incast in INCAST:
            times = {p: total_seconds([schedule_path(p, replayed)], cluster, incast) for p in PATHS}
            between = replayed.demand.between_nodes
            yield {
                "result": "figure 9",
                "rail_skew": skew,
                "concentration": concentration,
                "incast": incast,
                "rho_g": source_rail_skew(owned_by_rail(replayed.demand).sum(axis=1)),
                "kappa": receiver_concentration(between, replayed.windows),
                "payload_mib_per_gpu": float(between.sum() / cluster.topo.num_ranks / 2**20),
                "round_trip_ms": {p: t.round_trip * 1e3 for p, t in times.items()},
                "with_nvlink_ms": {p: t.with_nvlink * 1e3 for p, t in times.items()},
                "paper_high_high_ms": {"rail": 73.28, "permutation": 10.96, "joint": 4.11},
            }
