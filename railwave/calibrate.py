"""Measure the paths at points of traffic, and make a cost table of what was found.

Every rank of a `Communicator` calls `calibrate`. A point is routing with a chosen payload, source
rails even or all on one, receivers even or all one node; its descriptors are those of the routing
itself. Paths are measured in turn, so that what drifts drifts for all.

Letters: N nodes, G GPUs a node, R rails, W = N * G ranks, T tokens of a rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from railwave.communicator import Communicator
from railwave.config import PATHS, Config
from railwave.cost_table import CostTable, Point
from railwave.retention import CONTROL, LEAST_SAMPLES, judge
from railwave.sched import (
    Anchor,
    payload_per_gpu,
    plan,
    receiver_concentration,
    source_rail_skew,
)
from railwave.sched.selector import MIB

WARM_UPS = 5
Progress = Callable[[int, str], None]  # points done so far, the name of the one that begins


@dataclass(frozen=True)
class Traffic:
    """What one point sends, top-1: the tokens of each rank, by destination node."""

    payload_mib: float  # B
    rho: float
    kappa: float
    relocated: bool  # whether balancing moves any record to another rail
    records: torch.Tensor  # (W, N) int64

    @property
    def name(self) -> str:
        """Say the point to a reader, rounded."""
        return f"{self.payload_mib:.4g} MiB, rho {self.rho:.3g}, kappa {self.kappa:.3g}"

    @property
    def place(self) -> tuple[float, float, float]:
        """Identify the point, as `Point` and `Anchor` hold it: exactly."""
        return self.payload_mib, self.rho, self.kappa


def traffic(config: Config, payload_mib: float, *, one_rail: bool, one_receiver: bool) -> Traffic:
    """Make a point of traffic with about this payload.

    Args:
        config: sizes; a rank sends at most max_tokens_per_rank tokens.
        payload_mib: B, the mean a GPU sends to other nodes, in MiB.
        one_rail: all tokens are owned by GPUs of the first rail; else every GPU owns as many.
        one_receiver: all nodes send to node 0, which sends to node 1; else each to all others.

    Raises:
        ValueError: one node, or more tokens than a rank may have.

    Example:
        >>> from railwave.topology import Topology
        >>> config = Config(Topology(2, 2, 2), 4, 1, 512, 2048, torch.bfloat16)
        >>> point = traffic(config, 1.0, one_rail=True, one_receiver=False)
        >>> point.payload_mib, point.rho, point.kappa, point.records.tolist()
        (1.0, 2.0, 1.0, [[0, 2048], [0, 0], [2048, 0], [0, 0]])
    """
    topo = config.topo
    N, G = topo.nodes, topo.gpus_per_node
    if N < 2:
        raise ValueError(f"topo must have at least 2 nodes to calibrate, got {N}")
    owners = next(filter(None, topo.gpus_of_rail)) if one_rail else range(G)
    each = round(payload_mib * MIB / config.payload_bytes * G / len(owners))
    if not 1 <= each <= config.max_tokens_per_rank:
        raise ValueError(
            f"payload_mib must give a rank 1 to max_tokens_per_rank = {config.max_tokens_per_rank} "
            f"tokens of {config.payload_bytes} bytes, got {payload_mib} MiB: {each}"
        )
    records = torch.zeros(N * G, N, dtype=torch.int64, device="cpu")
    for node in range(N):
        others = [(node + k) % N for k in range(1, N)]
        receivers = [0 if node else 1] if one_receiver else others
        for gpu in owners:
            for i, receiver in enumerate(receivers):
                share = (each + len(receivers) - 1 - i) // len(receivers)
                records[node * G + gpu, receiver] = share
    return described(config, records)


def described(config: Config, records: torch.Tensor) -> Traffic:
    """Describe what the ranks send by the numbers that a table is asked with.

    Args:
        config: sizes.
        records: (W, N) int64, top-1: the tokens of each rank, by destination node.
    """
    topo = config.topo
    N, G = topo.nodes, topo.gpus_per_node
    rails = torch.tensor(topo.rail_of_gpu, device="cpu")
    by_rail = torch.zeros(N, topo.rails_per_node, dtype=torch.int64, device="cpu")
    away = records.clone().view(N, G, N)
    away[range(N), :, range(N)] = 0
    by_rail.index_add_(1, rails, away.sum(dim=2))
    demand = away.sum(dim=1)
    pairs = [(s, d) for s in range(N) for d in range(N) if s != d]
    return Traffic(
        payload_per_gpu(demand * config.payload_bytes, G) / MIB,
        source_rail_skew(by_rail),
        receiver_concentration(demand, [pairs]),
        any(_relocates(config, records, node) for node in range(N)),
        records,
    )


def _relocates(config: Config, records: torch.Tensor, node: int) -> bool:
    """Say whether balancing moves any record of a node to another rail."""
    topo, G = config.topo, config.topo.gpus_per_node
    counts = torch.zeros(topo.rails_per_node, topo.nodes, dtype=torch.int64, device="cpu")
    rails = torch.tensor(topo.rail_of_gpu, device="cpu")
    counts.index_add_(0, rails, records[node * G : (node + 1) * G])
    return bool(plan(counts, topo, node=node).relocated.any())


def points(config: Config, payloads_mib: Sequence[float]) -> Iterator[Traffic]:
    """Yield the four corners of even and uneven rails and receivers, for each payload.

    With one rail, or two nodes, some corners are the same point, which comes once.
    """
    seen = set()
    for payload_mib in payloads_mib:
        for one_rail in (False, True):
            for one_receiver in (False, True):
                made = traffic(config, payload_mib, one_rail=one_rail, one_receiver=one_receiver)
                if made.place not in seen:
                    seen.add(made.place)
                    yield made


def calibrate(
    rw: Communicator,
    table: CostTable,
    payloads_mib: Sequence[float],
    *,
    samples: int = 20,
    save: str | Path | None = None,
    progress: Progress | None = None,
) -> CostTable:
    """Measure what the table does not hold yet; return it with the new points and anchors.

    A point with fewer samples than asked for is measured again: the new samples replace the old.

    Collective: all ranks call it, with equal arguments but `save` and `progress`.

    Args:
        rw: every rank's, with all paths.
        table: what was measured so far; an empty one to begin.
        payloads_mib: B of the points, in MiB.
        samples: of each path at each point, after five warm-ups; at least 5.
        save: where this rank writes the table after every point, so that an interrupted run can go
            on; None on all ranks but one.
        progress: called before each point.

    Raises:
        ValueError: before anything is measured: as `points` and `unmeasured`.

    Source: section 3.3 and A.3.
    """
    missing = {point.place for point in unmeasured(rw.config, table, payloads_mib, samples)}
    for number, point in enumerate(points(rw.config, payloads_mib)):
        if progress:
            progress(number, point.name)
        if point.place in missing:
            table = _with(rw.config, table, point, measure(rw, point, samples))
            if save is not None:
                table.save(save)
    return table


def unmeasured(
    config: Config, table: CostTable, payloads_mib: Sequence[float], samples: int
) -> list[Traffic]:
    """List the points that a table has fewer samples of than asked for, or none.

    Raises:
        ValueError: too few samples are asked for to judge them, or the table has other rails.
    """
    if samples < LEAST_SAMPLES:
        raise ValueError(f"samples must be at least {LEAST_SAMPLES}, got {samples}")
    if table.scales.rails != config.topo.rails_per_node:
        raise ValueError(
            f"table's scales.rails must be {config.topo.rails_per_node} here, got "
            f"{table.scales.rails}"
        )
    done = {_place(p) for p in table.points if _samples(p) >= samples}
    return [point for point in points(config, payloads_mib) if point.place not in done]


def measure(
    rw: Communicator,
    point: Traffic,
    samples: int,
    *,
    paths: Sequence[str] = (*PATHS, CONTROL),
) -> dict[str, tuple[float, ...]]:
    """Time dispatch and combine of a point on each path: the slowest rank's, in microseconds.

    Collective. The paths take turns, by default joint twice (`CONTROL`), after five warm-ups.

    On a GPU a path's dispatch and combine are a CUDA graph, with static shapes and rows as a view:
    so the time between two events, as in A.3, is the data path's and not that of the hosts' Python.
    It is replayed twice, and the second is timed: the end of the first lines the ranks up. On a CPU
    it is the wall clock's.
    """
    call, names = tokens(rw, point), list(paths)
    timed = [_timed(rw, call, "joint" if name == CONTROL else name) for name in names]
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(WARM_UPS + samples):
        order = [(turn + i) % len(names) for i in range(len(names))]
        for i in order:
            rw._gather(None)  # all ranks begin together
            us = max(rw._gather(timed[i]()))
            if turn >= WARM_UPS:
                times[names[i]].append(us)
    rw.check()
    return {name: tuple(of) for name, of in times.items()}


def _with(
    config: Config, table: CostTable, point: Traffic, samples_us: dict[str, tuple[float, ...]]
) -> CostTable:
    """Return the table with a point just measured, and its anchor, in place of older ones."""
    verdict = judge(samples_us, relocated=point.relocated, one_wave=config.topo.nodes == 2)
    anchors = [Anchor(*point.place, verdict.path)] if verdict.path else []
    made = Point(*point.place, samples_us, verdict.reason)
    return replace(
        table,
        anchors=[*(a for a in table.anchors if _place(a) != point.place), *anchors],
        points=[*(p for p in table.points if _place(p) != point.place), made],
    )


def _place(at: Anchor | Point) -> tuple[float, float, float]:
    return at.payload_mib, at.rho, at.kappa


def _samples(point: Point) -> int:
    """Return how many samples there are of every path."""
    return min(len(point.samples_us.get(path, ())) for path in (*PATHS, CONTROL))


def tokens(rw: Communicator, point: Traffic) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what this rank dispatches at a point: x, topk_idx and topk_weights.

    Each token goes to one expert, those of a node in turn.
    """
    config, G = rw.config, rw.config.topo.gpus_per_node
    experts = []
    for node, num_tokens in enumerate(point.records[rw.rank].tolist()):
        homes = [e for e, rank in enumerate(config.expert_to_rank) if rank // G == node]
        experts += [homes[i % len(homes)] for i in range(num_tokens)]
    on = {"device": config.device}
    topk_idx = torch.tensor(experts, dtype=torch.int64, **on).view(-1, 1)
    x = torch.zeros(len(experts), config.hidden, dtype=config.dtype, **on)
    return x, topk_idx, torch.ones(len(experts), 1, **on)


def _timed(rw: Communicator, call: Any, path: str) -> Callable[[], float]:
    """Return what runs a dispatch and a combine and times them at this rank, in microseconds."""
    if rw.config.device.type == "cpu":
        return lambda: _clock_us(rw, call, path)
    if path == "auto":  # which no graph can hold: what it chooses
        path = rw.dispatch(*call, path=path).handle.path

    def run() -> None:
        received = rw.dispatch(*call, path=path, static_shapes=True, out="view")
        rw.combine(received.x, received.handle)

    run()
    torch.cuda.synchronize(rw.config.device)
    rw._gather(None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run()
    return lambda: _event_us(graph.replay, rw.config.device)


def _clock_us(rw: Communicator, call: Any, path: str) -> float:
    began_s = time.perf_counter()
    received = rw.dispatch(*call, path=path)
    rw.combine(received.x, received.handle)
    return (time.perf_counter() - began_s) * 1e6


def _event_us(replay: Callable[[], None], device: torch.device) -> float:
    stream = torch.cuda.current_stream(device)
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    replay()
    began.record(stream)
    replay()
    ended.record(stream)
    ended.synchronize()
    return began.elapsed_time(ended) * 1e3
