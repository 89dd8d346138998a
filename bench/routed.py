"""Schedulers on routed traffic: a recorded trace, or a stand-in; and RailS's kinds of demand.

Letters: W ranks, E experts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from bench.phase import planned, worst_node
from railwave import Topology
from railwave.sched import SCHEDULERS, Demand, Schedule, bound_s, source_rail_skew
from railwave.sched.parts import bound_by_rail, owned_by_rail
from railwave.sim import INCAST, Fabric, simulate
from railwave.workloads import (
    RECORD_BYTES,
    demand_from_counts,
    demand_from_routing,
    list_iterations,
    preset,
    read_iteration,
    standin_loads,
    zipf_routing,
)

# (W, E) tokens from ranks to experts, by (iteration, layer, micro-batch).
Counts = dict[tuple[int, int, int], torch.Tensor]

TRACE_TOPO = Topology(4, 4, 4)
PAPER_R2 = {"source": 0.019, "destination": 0.296}  # Figure 2(b)
RAILS_PAPER = {"completion_time_cut": (0.17, 0.78), "busbw_gain": (0.20, 0.78)}
RAIL_BYTES_S = 25e9

_WHOLE = {"record_bytes": RECORD_BYTES}
CONTESTANTS: dict[str, Callable[[Demand], Schedule]] = {
    "native": SCHEDULERS["native"],
    "native, destination's rail": partial(SCHEDULERS["native"], rail_rule="destination"),
    "rail": partial(SCHEDULERS["rail"], **_WHOLE),
    "permutation": SCHEDULERS["permutation"],
    "joint": partial(SCHEDULERS["joint"], **_WHOLE),
    "joint, no barriers": partial(SCHEDULERS["joint"], order="free", **_WHOLE),
    "rails_lpt": SCHEDULERS["rails_lpt"],
    "fast": SCHEDULERS["fast"],
    "rate": SCHEDULERS["rate"],
}


def measure(trace: Counts | None) -> Iterator[dict[str, Any]]:
    """Yield the results on the stand-in, on the trace if there is one, and on RailS's demands."""
    routing = {"stand-in": standin_counts()}
    if trace is not None:
        routing["trace"] = trace
    for name, counts in routing.items():
        yield from figure_2(counts, name)
        yield from over_bound(counts, name)
    yield from rails()
    yield from uneven_pairs()


def read_trace(folder: str | os.PathLike) -> Counts:
    """Read all of a trace of 16 ranks.

    Raises:
        FileNotFoundError, ValueError: as `read_iteration`; no file, or another number of ranks.
    """
    found = {
        (iteration, *place): counts
        for iteration in list_iterations(folder)
        for place, counts in read_iteration(folder, iteration).items()
    }
    ranks = {len(counts) for counts in found.values()}
    if ranks != {TRACE_TOPO.num_ranks}:
        raise ValueError(
            f"folder must hold a trace of {TRACE_TOPO.num_ranks} ranks, got {sorted(ranks)}"
        )
    return found


def layer_loads(counts: Counts) -> torch.Tensor:
    """Return (layers, E) loads of the first iteration's first micro-batch, ranks added up."""
    first = min(iteration for iteration, _, _ in counts)
    rows = {place: table.sum(dim=0) for place, table in counts.items() if place[::2] == (first, 0)}
    return torch.stack([rows[place] for place in sorted(rows)])


def standin_counts(*, seed: int = 0, layers: int = 45, tokens: int = 4096) -> Counts:
    """Draw counts of 16 ranks from the stand-in's loads, one micro-batch a layer."""
    random = np.random.RandomState(seed)
    loads = standin_loads(seed=seed, layers=layers).double().numpy()
    return {
        (0, layer, 0): torch.from_numpy(random.multinomial(tokens, row / row.sum(), size=16))
        for layer, row in enumerate(loads)
    }


def imbalances(counts: Counts) -> dict[str, np.ndarray]:
    """Return max/mean of every phase: of experts, and of rails at either end.

    "source" and "destination" are those of the rails of all nodes together, as the paper's shares
    with a mean of 12.5 % are (Figure 2(a)); "source node" and "destination node" those of the
    NICs, eq. 5. A rail is that of the GPU that owns the tokens, or that has the expert.
    """
    found: dict[str, list[float]] = {}
    for table in counts.values():
        demand = demand_from_counts(table, TRACE_TOPO)
        owned = owned_by_rail(demand).sum(axis=1)
        bound = bound_by_rail(demand).sum(axis=0)
        for name, loads in [
            ("expert", table.sum(dim=0, keepdim=True).numpy()),
            ("source", owned.sum(axis=0, keepdims=True)),
            ("destination", bound.sum(axis=0, keepdims=True)),
            ("source node", owned),
            ("destination node", bound),
        ]:
            found.setdefault(name, []).append(source_rail_skew(loads))
    return {name: np.array(values) for name, values in found.items()}


def linear_fit(x: np.ndarray, y: np.ndarray) -> dict[str, float]:
    """Fit y = slope * x + intercept by least squares; r2 is the part of y's variance explained."""
    slope, intercept = np.polyfit(x, y, 1)
    r2 = float(np.corrcoef(x, y)[0, 1] ** 2)
    return {"slope": float(slope), "intercept": float(intercept), "r2": r2}


def figure_2(counts: Counts, routing: str) -> Iterator[dict[str, Any]]:
    """Yield how far experts' imbalance explains that of rails, over all phases."""
    found = imbalances(counts)
    for rails, values in found.items():
        if rails != "expert":
            yield {
                "result": "figure 2",
                "routing": routing,
                "phases": len(counts),
                "rails": rails,
                "expert_range": _range(found["expert"]),
                "rail_range": _range(values),
                **linear_fit(found["expert"], values),
                "paper_r2": PAPER_R2.get(rails),
            }


def bound_ratios(counts: Counts, incast: str) -> dict[str, dict[tuple[int, int, int], float]]:
    """Return each scheduler's network time over T*, by phase; NVLink and latencies cost nothing."""
    fabric = Fabric(RAIL_BYTES_S, incast=INCAST[incast])
    ratios: dict[str, dict[tuple[int, int, int], float]] = {name: {} for name in CONTESTANTS}
    for place, table in counts.items():
        demand = demand_from_counts(table, TRACE_TOPO)
        bound = bound_s(demand, RAIL_BYTES_S)
        for name, scheduler in CONTESTANTS.items():
            ratios[name][place] = simulate(planned(scheduler, demand), fabric).time_s / bound
    return ratios


def by_layer(ratios: dict[tuple[int, int, int], float]) -> dict[int, tuple[float, float, float]]:
    """Return (min, median, max) over the iterations and micro-batches of each layer."""
    layers = sorted({layer for _, layer, _ in ratios})
    return {
        layer: _range([ratio for place, ratio in ratios.items() if place[1] == layer])
        for layer in layers
    }


def over_bound(counts: Counts, routing: str) -> Iterator[dict[str, Any]]:
    """Yield each scheduler's ratio to T* on 4 x 4, over all phases and by layer."""
    for incast in INCAST:
        for name, ratios in bound_ratios(counts, incast).items():
            yield {
                "result": "over bound",
                "routing": routing,
                "incast": incast,
                "scheduler": name,
                "min_median_max": _range(list(ratios.values())),
                "by_layer": by_layer(ratios),
            }


def rails_demands(seed: int) -> dict[str, Demand]:
    """Return demands of the kinds that RailS names, on 4 x 8 GPUs; the sizes are ours.

    - uniform: 1 MiB from every rank to every other.
    - sparse: a tenth of the rank pairs, 1 to 16 MiB.
    - mixtral: 4,096 tokens a rank, hidden 4,096, top-2 of 8 experts (Zipf 1), an expert on every
      fourth rank, so that two GPUs of a node have all its experts; "mixtral, uneven sources" has
      a source skew of 1, too.
    """
    topo = preset("h800").topo
    W, random = topo.num_ranks, np.random.RandomState(seed)
    sizes = random.randint(1, 17, (W, W)) * (random.random_sample((W, W)) < 0.1)
    found = {
        "uniform": Demand.of(np.full((W, W), 1 << 20), topo),
        "sparse": Demand.of(sizes << 20, topo),
    }
    for name, source_skew in [("mixtral", 0), ("mixtral, uneven sources", 1)]:
        routing = zipf_routing(
            *(W, 4096, 8, 2),
            gpus_per_node=topo.gpus_per_node,
            expert_skew=1,
            source_skew=source_skew,
            seed=seed,
        )
        found[name] = demand_from_routing(
            routing.topk_idx, topo, num_experts=8, record_bytes=2 * 4096
        )
    return found


def rails(seed: int = 0) -> Iterator[dict[str, Any]]:
    """Yield LPT spraying against native, by either rail rule, beside what RailS publishes."""
    for name, demand in rails_demands(seed).items():
        bound = bound_s(demand, RAIL_BYTES_S)
        for incast in INCAST:
            fabric = Fabric(RAIL_BYTES_S, incast=INCAST[incast])
            sprayed = planned(SCHEDULERS["rails_lpt"], demand)
            lpt = simulate(sprayed, fabric).time_s
            joint = simulate(planned(SCHEDULERS["joint"], demand), fabric).time_s
            for rule in ("source", "destination"):
                ruled = planned(SCHEDULERS["native"], demand, rail_rule=rule)
                native = simulate(ruled, fabric).time_s
                yield {
                    "result": "rails",
                    "demand": name,
                    "incast": incast,
                    "native_rail": rule,
                    "native_over_bound": native / bound,
                    "lpt_over_bound": lpt / bound,
                    "joint_over_bound": joint / bound,
                    "completion_time_cut": 1 - lpt / native,
                    "busbw_gain": native / lpt - 1,
                    "lpt_sender_skew": worst_node(sprayed.sent_bytes),
                    "lpt_receiver_skew": worst_node(sprayed.received_bytes),
                    "published": RAILS_PAPER,
                }


def uneven_pairs(nodes: tuple[int, ...] = (4, 8, 16, 32)) -> Iterator[dict[str, Any]]:
    """Yield ratios to T* where node pairs differ most: what waves cost when they wait.

    Pairs are independent Zipf(2) numbers, at most 50, of 64 records a GPU (so that RailS's chunks
    are small beside them); seeds 0 to 2.
    """
    fabric = Fabric(RAIL_BYTES_S)
    for N in nodes:
        ratios: dict[str, list[float]] = {}
        for seed in range(3):
            pairs = np.minimum(np.random.default_rng(seed).zipf(2.0, (N, N)), 50) * 64
            per_gpu = (pairs * ~np.eye(N, dtype=bool) * RECORD_BYTES)[:, :, None].repeat(8, axis=2)
            demand = Demand(per_gpu.transpose(0, 2, 1), per_gpu, Topology(N, 8, 8))
            bound = bound_s(demand, RAIL_BYTES_S)
            for name in ("native", "joint", "joint, no barriers", "rails_lpt", "fast"):
                time_s = simulate(planned(CONTESTANTS[name], demand), fabric).time_s
                ratios.setdefault(name, []).append(time_s / bound)
        yield {
            "result": "uneven pairs",
            "nodes": N,
            "mean_over_bound": {name: float(np.mean(values)) for name, values in ratios.items()},
        }


def _range(values: Any) -> tuple[float, float, float]:
    return float(np.min(values)), float(np.median(values)), float(np.max(values))
