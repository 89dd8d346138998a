"""What is run through emulated NICs: demands in whole records, and the calls of each method.

A method is a list of calls of railwave, one after another. Native and rail replay the submitted
windows, a call each (A.6); permutation and joint take the whole demand in one call, or a call a
cyclic wave; what is like NCCL or FAST goes through the same wire by path native, a call a window,
with the records where such a library would have put them on the sending side. Granted takes one
call.

Payload and rate are both an eighth of the paper's by default, so times are like the paper's.

Letters: N nodes, G GPUs a node, W = N * G ranks, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
import torch

from bench.granted import zipf_pairs
from bench.schedulers import PAPER_ULTRAEP_MS
from railwave.sched import SCHEDULERS, Demand, Schedule, audit
from railwave.topology import Topology
from railwave.workloads import (
    RECORD_BYTES,
    ULTRAEP_CASES,
    Replay,
    apportion,
    replay,
    replay_windows,
    standin_loads,
    ultraep_demand,
)

PAPER_RECORDS = 32_768  # of a node, at 56 MiB a GPU
PATTERNS = ("ring", "moderate", "extreme")
PATHS = ("native", "rail", "permutation", "joint")  # the paper's
RUN_PATHS = (*PATHS, "granted")
METHODS = (
    *(*PATHS, "permutation, a call a wave", "joint, a call a wave", "nccl-like", "fast"),
    "granted",
)
PATH_OF = dict(
    zip(METHODS, (*PATHS, "permutation", "joint", "native", "native", "granted"), strict=True)
)
TRACE_LAYERS = 24
DEEP_LAYERS = 6  # spread over the skew
DEEP_SAMPLES, SAMPLES = 100, 20
# Median latencies of one 56 MiB case of Figure 9.
PAPER_HIGH_HIGH_MS = {"rail": 73.28, "permutation": 10.96, "joint": 4.11}


@dataclass(frozen=True)
class Cluster:
    """Hold a layout and the rate of its NICs: the paper's, scaled."""

    layout: str  # h800: a NIC a GPU; h20: two GPUs a NIC, of twice the rate; wide: a GPU a node
    topo: Topology
    nic_gbs: float
    paths: tuple[str, ...] = RUN_PATHS
    part: int = 1  # ranks have room for 1 / part of a node's tokens


@dataclass(frozen=True)
class Case:
    """Hold what is sent and how often it is measured."""

    about: dict[str, Any]  # names the case
    replay: Replay  # in records
    samples: int
    rate: float = 1.0  # of the cluster's
    paper_ms: dict[str, float] = field(default_factory=dict)  # by method, there and back

    @property
    def key(self) -> str:
        """Name the case as one text."""
        return " ".join(f"{name}={value}" for name, value in self.about.items())


@dataclass(frozen=True)
class Plan:
    """Hold the calls of a method."""

    method: str
    path: str
    calls: tuple[np.ndarray, ...]  # each (W, W) int64, records from rank to rank
    schedule: Schedule  # in records: what the simulator is asked

    def equals(self, other: Plan) -> bool:
        """Say whether the calls are the same."""
        same = self.path == other.path and len(self.calls) == len(other.calls)
        return same and all(map(np.array_equal, self.calls, other.calls))


def cluster(layout: str, nodes: int, gpus: int, nic_gbs: float) -> Cluster:
    """Return a layout; `nic_gbs` is a NIC's rate where each GPU has one.

    Example:
        >>> h20 = cluster("h20", 4, 8, 3.125)
        >>> h20.topo.rails_per_node, h20.topo.gpus_of_rail[0], h20.nic_gbs
        (4, (0, 1), 6.25)
    """
    if layout == "h800":
        return Cluster(layout, Topology(nodes, gpus, gpus), nic_gbs)
    if layout == "wide":  # native and rail would have too many programs that wait for so many peers
        few = ("permutation", "joint", "granted")
        return Cluster(layout, Topology(nodes * gpus, 1, 1), nic_gbs, few, part=4)
    return Cluster(layout, Topology(nodes, gpus, max(1, gpus // 2)), nic_gbs * min(2, gpus))


def spread_layers(loads: torch.Tensor, gpus: int, count: int = DEEP_LAYERS) -> list[int]:
    """List layers spread evenly over the share of their largest bin, least to most.

    Example:
        >>> spread_layers(torch.tensor([[4, 0], [2, 2], [3, 1]]), gpus=2, count=2)
        [1, 0]
    """
    size = max(1, loads.shape[1] // gpus)
    largest = loads.sort(dim=1, descending=True).values[:, :size].sum(dim=1)
    order = largest.argsort(stable=True).tolist()
    places = np.linspace(0, len(order) - 1, min(count, len(order))).round().astype(int)
    return [order[place] for place in dict.fromkeys(places.tolist())]


def replays(
    on: Cluster, loads: torch.Tensor, routing: str, layers: list[int], samples: int, rate: float
) -> Iterator[Case]:
    """Yield the paper's patterns over some layers; those that the number of nodes allows."""
    patterns = PATTERNS if on.topo.nodes == 4 else PATTERNS[:1]
    for layer, pattern in product(layers, patterns):
        about = {"family": "replay", "layout": on.layout, "rate": rate, "routing": routing}
        made = replay(pattern, loads[layer], on.topo, record_bytes=1)
        yield Case({**about, "pattern": pattern, "layer": layer}, made, samples, rate)


def ultraep(
    on: Cluster,
    records: int,
    samples: int,
    rate: float = 1.0,
    names: Sequence[str] = ULTRAEP_CASES,
) -> Iterator[Case]:
    """Yield UltraEP's cases, at records / PAPER_RECORDS of their payload."""
    scaled = RECORD_BYTES * PAPER_RECORDS // records
    everything = frozenset((node, 0) for node in range(1, on.topo.nodes))
    hot = {"hot_rails": min(2, on.topo.rails_per_node)}
    for name in names:
        more = hot if name[0] == "R" else {}
        in_bytes = ultraep_demand(name, on.topo, record_bytes=scaled, **more)
        demand = Demand(in_bytes.owned // scaled, in_bytes.bound // scaled, on.topo)
        about = {"family": "ultraep", "layout": on.layout, "rate": rate, "case": name}
        paper = dict(zip(PATHS, PAPER_ULTRAEP_MS[name], strict=True)) if rate == 1 else {}
        yield Case(about, Replay(demand, (everything,)), samples, rate, paper)


def figure_9(on: Cluster, loads: torch.Tensor, records: int, samples: int) -> Iterator[Case]:
    """Yield low and high rail skew and concurrency, at 56 and 14 MiB a GPU of the paper's scale."""
    if on.topo.nodes != 4:
        return
    steep = loads[spread_layers(loads, on.topo.gpus_per_node)[-1]]
    for mib, total in ((14, records // 4), (56, records)):
        rows = {"low": apportion(total, [1] * loads.shape[1]), "high": apportion(total, steep)}
        for skew, concurrency in product(rows, ("low", "high")):
            pattern = "permutation" if concurrency == "low" else "extreme"
            about = {"family": "figure 9", "layout": on.layout, "rate": 1.0, "mib": mib}
            about |= {"rail_skew": skew, "concurrency": concurrency}
            made = replay(pattern, rows[skew], on.topo, record_bytes=1)
            hardest = (mib, skew, concurrency) == (56, "high", "high")
            yield Case(about, made, samples, paper_ms=PAPER_HIGH_HIGH_MS if hardest else {})


def zipf(
    on: Cluster, records: int, samples: int, rate: float = 1.0, seeds: int = 2
) -> Iterator[Case]:
    """Yield pairs of nodes that differ, Zipf(2); the busiest GPU has a quarter of `records`."""
    N, G = on.topo.nodes, on.topo.gpus_per_node
    pairs_of_all = frozenset((s, d) for s in range(N) for d in range(N) if s != d)
    for seed in range(seeds):
        pairs = zipf_pairs(N, seed)
        busiest = max(pairs.sum(axis=0).max(), pairs.sum(axis=1).max())
        per_gpu = pairs * max(1, records // 4) // busiest
        if not per_gpu.any():
            per_gpu = (pairs == pairs.max()).astype(np.int64)
        per_gpu = per_gpu[:, :, None].repeat(G, axis=2)
        demand = Demand(per_gpu.transpose(0, 2, 1), per_gpu, on.topo)
        about = {"family": "zipf", "layout": on.layout, "rate": rate, "seed": seed}
        yield Case(about, Replay(demand, (pairs_of_all,)), samples, rate)


def first_cases(on: Cluster, records: int, samples: int | None) -> list[Case]:
    """List the cases that matter most, on H800's layout; arguments as of `more_cases`."""
    few, many = samples or SAMPLES, samples or DEEP_SAMPLES
    loads = standin_loads(seed=0, records=records)
    deep = spread_layers(loads, on.topo.gpus_per_node)
    return [
        *replays(on, loads, "stand-in", deep, many, 1.0),
        *ultraep(on, records, few),
        *zipf(on, records, few),
        *figure_9(on, loads, records, few),
        *zipf(on, records, few, rate=0.5),
        *ultraep(on, records, few, rate=0.5, names=("R42",)),
    ]


def more_cases(
    clusters: dict[str, Cluster], records: int, samples: int | None, trace: torch.Tensor | None
) -> list[Case]:
    """List the others: more layers, other rates, a trace, other layouts.

    Args:
        clusters: by layout.
        records: of a node in a layer of a replay.
        samples: of each case; None for DEEP_SAMPLES and SAMPLES.
        trace: (layers, experts) recorded loads, of which the first 24 are run, or None.
    """
    few = samples or SAMPLES
    loads = standin_loads(seed=0, records=records)
    on, cases = clusters["h800"], []
    deep = spread_layers(loads, on.topo.gpus_per_node)
    others = [layer for layer in range(len(loads)) if layer not in deep]
    cases += replays(on, loads, "stand-in", others, few, 1.0)
    for rate in (0.5, 2.0):
        cases += replays(on, loads, "stand-in", deep, few, rate)
    if trace is not None:
        scaled = torch.stack([apportion(records, row) for row in trace[:TRACE_LAYERS]])
        cases += replays(on, scaled, "trace", list(range(len(scaled))), few, 1.0)
    if "wide" in clusters:
        for rate in (1.0, 0.5):
            cases += zipf(clusters["wide"], records, few, rate)
    if "h20" in clusters:
        cases += replays(clusters["h20"], loads, "stand-in", deep, few, 1.0)
    return cases


def most_sent(cases: list[Case]) -> np.ndarray:
    """Return how many records each rank owns at most in a call of any method: (W,), at least 1.

    A rank owns what is its own; in the order of NCCL what is bound for its number; in that of FAST
    its part of what goes to one node.

    Example:
        >>> owned, bound = np.zeros((2, 2, 2), int), np.zeros((2, 2, 2), int)
        >>> owned[0, :, 1], bound[0, 1] = [5, 1], [2, 4]
        >>> demand = Demand(owned, bound, Topology(2, 2, 2))
        >>> most_sent([Case({}, Replay(demand, ()), 1)]).tolist()
        [5, 4, 1, 1]
    """
    most = 1
    for demand in (case.replay.demand for case in cases):
        evenly = -(-demand.between_nodes.max(axis=1) // demand.topo.gpus_per_node)
        for sent in (demand.owned.sum(axis=2), demand.bound.sum(axis=1), evenly[:, None]):
            most = np.maximum(most, sent)
    return most.reshape(-1)


def between_ranks(demand: Demand) -> np.ndarray:
    """Return (W, W) records from rank to rank with the demand's margins.

    Filled in order of GPU number: where a GPU owns as much as is bound for the one of its number,
    the two are paired.

    Example:
        >>> owned, bound = np.zeros((2, 2, 2), int), np.zeros((2, 2, 2), int)
        >>> owned[0, :, 1], bound[0, 1] = [3, 1], [2, 2]
        >>> between_ranks(Demand(owned, bound, Topology(2, 2, 2)))[:2, 2:].tolist()
        [[2, 1], [0, 1]]
    """
    N, G = demand.topo.nodes, demand.topo.gpus_per_node
    table = np.zeros((N, G, N, G), dtype=np.int64)
    for s, d in np.argwhere(demand.between_nodes).tolist():
        ends = [
            np.append(0, counts.cumsum()) for counts in (demand.owned[s, :, d], demand.bound[s, d])
        ]
        # Where two runs, of an owner and of one it's bound for, lie over one another.
        first = np.maximum(ends[0][:-1, None], ends[1][None, :-1])
        last = np.minimum(ends[0][1:, None], ends[1][None, 1:])
        table[s, :, d] = np.maximum(last - first, 0)
    return table.reshape(N * G, N * G)


def plans(case: Case) -> list[Plan]:
    """Return the calls of every method, and what the simulator is asked of each."""
    demand, windows = case.replay.demand, case.replay.windows
    topo, ranks = demand.topo, between_ranks(demand)
    cyclic = [w for w in replay_windows("permutation", topo.nodes) if _within(ranks, w, topo).any()]
    as_bound = Demand(demand.bound.transpose(0, 2, 1), demand.bound, topo)
    submitted = [_within(ranks, window, topo) for window in windows]
    by_wave = [_within(ranks, wave, topo) for wave in cyclic]
    nccl = [_within(between_ranks(as_bound), window, topo) for window in windows]
    stages = _planned("fast", demand)
    stepwise = {"order": "stepwise"}  # in one call a PE's rounds wait for those of its peers alone
    return [
        Plan("native", "native", tuple(submitted), _planned("native", demand, windows=windows)),
        Plan("rail", "rail", tuple(submitted), _planned("rail", demand, windows=windows)),
        Plan("permutation", "permutation", (ranks,), _planned("permutation", demand, **stepwise)),
        Plan("joint", "joint", (ranks,), _planned("joint", demand, **stepwise)),
        Plan(METHODS[4], "permutation", tuple(by_wave), _planned("permutation", demand)),
        Plan(METHODS[5], "joint", tuple(by_wave), _planned("joint", demand)),
        Plan(
            *("nccl-like", "native", tuple(nccl)),
            _planned("native", demand, windows=windows, rail_rule="destination"),
        ),
        Plan("fast", "native", tuple(_stage_calls(stages)), stages),
        Plan("granted", "granted", (ranks,), _planned("granted", demand)),
    ]


def _planned(name: str, demand: Demand, **options: Any) -> Schedule:
    schedule = SCHEDULERS[name](demand, **options)
    audit(schedule, demand)
    return schedule


def _within(ranks: np.ndarray, pairs: Any, topo: Topology) -> np.ndarray:
    """Keep what goes between some pairs of nodes."""
    nodes = np.zeros((topo.nodes, topo.nodes), dtype=np.int64)
    for s, d in pairs:
        nodes[s, d] = 1
    G = topo.gpus_per_node
    return ranks * nodes.repeat(G, axis=0).repeat(G, axis=1)


def _stage_calls(stages: Schedule) -> Iterator[np.ndarray]:
    """Yield each stage's records, owned by the GPUs of the rail that carries them."""
    topo, G = stages.topo, stages.topo.gpus_per_node
    columns = (stages.window, stages.source, stages.destination, stages.source_rail)
    calls = np.zeros((stages.num_windows, topo.num_ranks, topo.num_ranks), dtype=np.int64)
    for window, s, d, rail, records in zip(*columns, stages.transfer_bytes, strict=True):
        gpus = topo.gpus_of_rail[rail]
        for i, gpu in enumerate(gpus):
            share = (records + len(gpus) - 1 - i) // len(gpus)
            calls[window, s * G + gpu, d * G + gpu] += share
    yield from calls
