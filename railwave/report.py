"""Run one set of routed tokens on several paths, check each and measure what went over the rails.

Shares and demand come from the bytes that were put, windows and fan-in from the order of events,
quotas and relocations from what the kernels wrote into the handles.

Letters: N nodes, G GPUs a node, R rails, W = N * G ranks, T tokens, K top-k, H hidden; s source
node, d destination node.
"""

from __future__ import annotations

import logging
import multiprocessing
import pickle
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

import torch

from railwave.cases import Case
from railwave.handle import Handle, Received
from railwave.reference import DenseReceived, combine_ref, dispatch_ref
from railwave.sched import receiver_concentration, source_rail_skew
from railwave.topology import Topology

logger = logging.getLogger("railwave")

PHASES = ("dispatch", "combine")
_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Progress = Callable[[int, str], None]  # phases done so far, the name of the one that begins


@dataclass(frozen=True)
class PathReport:
    """Say how one path carried a case."""

    path: str
    mismatch: str  # the first difference from the dense reference, "" for none
    hot_node: int  # the node with the most records on one rail by their owners
    rail_share_before: tuple[float, ...]  # (R,) of the hot node's records, by their owners' rails
    rail_share: tuple[float, ...]  # (R,) of the bytes that the hot node put in dispatch
    quota_spread: int  # largest difference between eligible quotas of one slice, in records
    rho_g: float  # eq. 5, from the bytes put in dispatch
    kappa: float  # eq. 7, from those bytes and the windows that they went in
    max_fan_in: int  # most nodes with payload in flight to one rail of a node, in both phases
    relocated: int  # records that left by another rail than their owner's
    put_bytes: int  # between nodes, in both phases
    num_rows: int  # rows of the dispatch, all ranks together
    seconds: float  # of both phases on this machine

    @property
    def verified(self) -> bool:
        """Tell whether dispatch and combine equal the dense reference bit for bit."""
        return not self.mismatch

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain values."""
        return {
            "verified": self.verified,
            "rail_share": list(self.rail_share),
            "rail_share_before": list(self.rail_share_before),
            "quota_spread": self.quota_spread,
            "rho_g": self.rho_g,
            "kappa": self.kappa,
            "max_fan_in": self.max_fan_in,
            "relocated": self.relocated,
            "put_bytes": self.put_bytes,
            "hot_node": self.hot_node,
            "seconds": round(self.seconds, 3),
        }


@dataclass(frozen=True, eq=False)
class Report:
    """Hold the reports of all paths of one case."""

    case: Case
    paths: tuple[PathReport, ...]

    @property
    def num_rows(self) -> int:
        """Count the rows of a dispatch, all ranks together; the same on every path."""
        return self.paths[0].num_rows

    @property
    def verified(self) -> bool:
        """Tell whether every path was verified."""
        return all(path.verified for path in self.paths)


def run_paths(
    case: Case, paths: Sequence[str], progress: Progress, *, processes: int = 1
) -> Report:
    """Dispatch and combine the case on every path; check and measure each.

    Args:
        case: what to run.
        paths: names of paths, in the order to run them.
        progress: called before each phase; a path has two. With several processes, after each path.
        processes: how many run side by side, a path each.
    """
    if processes > 1:
        reports = _run_side_by_side(case, paths, progress, processes)
    else:
        runner, reports = _Runner(case), []
        for path in paths:
            done = len(reports) * len(PHASES)

            def phase_begins(phase: int, done: int = done, path: str = path) -> None:
                progress(done + phase, f"{path}: {PHASES[phase]}")

            reports.append(runner.run(path, phase_begins))
    by_name = {report.path: report for report in reports}
    return Report(case, tuple(by_name[path] for path in paths))


def _run_side_by_side(
    case: Case, paths: Sequence[str], progress: Progress, processes: int
) -> list[PathReport]:
    # Pickled by pickle itself: multiprocessing would pass tensors through shared memory.
    pickled, context = pickle.dumps(case), multiprocessing.get_context("spawn")
    reports = []
    with ProcessPoolExecutor(processes, context) as pool:
        jobs = [pool.submit(_run_apart, pickled, path) for path in paths]
        for job in as_completed(jobs):
            reports.append(job.result())
            progress(len(reports) * len(PHASES), reports[-1].path)
    return reports


def _run_apart(pickled: bytes, path: str) -> PathReport:
    torch.set_num_threads(1)
    return _Runner(pickle.loads(pickled)).run(path, lambda phase: None)


class _Runner:
    """A case, its world and what the dense reference says of it."""

    def __init__(self, case: Case) -> None:
        self.case, self.world = case, case.world()
        routing = case.routing
        self.dense = dispatch_ref(
            *(case.topo, case.xs, routing.topk_idx, routing.topk_weights),
            expert_to_rank=self.world.config.expert_to_rank,
        )
        self.dense_ys = combine_ref(
            case.topo, self._outputs(self.dense), self.dense, case.num_tokens
        )

    def _outputs(self, rows: Sequence[Received] | Sequence[DenseReceived]) -> list[torch.Tensor]:
        return [expert_outputs(own, rank, len(rows)) for rank, own in enumerate(rows)]

    def run(self, path: str, phase_begins: Callable[[int], None]) -> PathReport:
        """Dispatch and combine on one path."""
        case, world = self.case, self.world
        phase_begins(0)
        begin_s = time.perf_counter()
        received = world.dispatch(
            case.xs, case.routing.topk_idx, case.routing.topk_weights, path=path
        )
        dispatch = world.traffic
        phase_begins(1)
        handles = [rows.handle for rows in received]
        ys = world.combine(self._outputs(received), handles)
        seconds, combine = time.perf_counter() - begin_s, world.traffic
        logger.info("%s: dispatch and combine in %.1f s", path, seconds)
        measured = _measure_plan(case.topo, handles)
        return PathReport(
            path=path,
            mismatch=_first_mismatch(received, self.dense, ys, self.dense_ys),
            rail_share=_shares(dispatch.rail_bytes()[measured["hot_node"]]),
            rho_g=source_rail_skew(dispatch.rail_bytes()),
            kappa=receiver_concentration(dispatch.put_bytes.sum(dim=2), dispatch.windows),
            max_fan_in=max(dispatch.max_fan_in, combine.max_fan_in),
            put_bytes=int(dispatch.put_bytes.sum() + combine.put_bytes.sum()),
            num_rows=sum(len(rows.x) for rows in received),
            seconds=seconds,
            **measured,
        )


def expert_outputs(received: Received | DenseReceived, rank: int, num_ranks: int) -> torch.Tensor:
    """Return (rows, H) what the experts of `rank` might: rows times weight times a rank's factor.

    It depends on all that an expert needs, and sums of it depend on their order.
    """
    factor = received.topk_weights.sum(dim=1, keepdim=True) * (1 + rank / num_ranks)
    return (received.x.float() * factor).to(received.x.dtype)


def _measure_plan(topo: Topology, handles: Sequence[Handle]) -> dict[str, Any]:
    """Read from the handles what the kernels planned: the fields of PathReport about records."""
    # All PEs of a node plan alike; the first one's tables are the node's.
    firsts = handles[:: topo.gpus_per_node]
    before = torch.stack([handle.rail_records.long().sum(dim=0) for handle in firsts])  # (N, R)
    hot_node = int(before.max(dim=1).values.argmax())
    spread = 0
    for s, handle in enumerate(firsts):
        for d in range(topo.nodes):
            if d != s:
                quotas = handle.quota[d][topo.eligible_rails[s, d]]
                spread = max(spread, int(quotas.max() - quotas.min()))
    rail_of_gpu, relocated = torch.tensor(topo.rail_of_gpu), 0
    for rank, handle in enumerate(handles):
        rail = rail_of_gpu[topo.local_of(rank)]
        for d, num_records in enumerate(handle.num_records.tolist()):
            if d != topo.node_of(rank):
                proxy = handle.proxy[d, :num_records].long()
                relocated += int((rail_of_gpu[proxy] != rail).sum())
    return {
        "hot_node": hot_node,
        "rail_share_before": _shares(before[hot_node]),
        "quota_spread": spread,
        "relocated": relocated,
    }


def _first_mismatch(
    received: Sequence[Received],
    dense: Sequence[DenseReceived],
    ys: Sequence[torch.Tensor],
    dense_ys: Sequence[torch.Tensor],
) -> str:
    """Name the first tensor that differs from the reference in a bit, or return ""."""
    for rank, (got, want) in enumerate(zip(received, dense, strict=True)):
        for name in ("x", "topk_idx", "topk_weights", "num_tokens_per_expert"):
            if not same_bits(getattr(got, name), getattr(want, name)):
                return f"dispatch: {name} of rank {rank}"
    for rank, (got_y, want_y) in enumerate(zip(ys, dense_ys, strict=True)):
        if not same_bits(got_y, want_y):
            return f"combine: y of rank {rank}"
    return ""


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Tell whether two tensors have one dtype, one shape and the same bits, NaN and -0 included."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    integer = _INTEGER[a.dtype.itemsize]
    return torch.equal(a.contiguous().view(integer), b.contiguous().view(integer))


def _shares(amounts: torch.Tensor) -> tuple[float, ...]:
    """Return (R,) each rail's part of the total; zeros when nothing was sent."""
    return tuple((amounts.double() / amounts.sum().clamp(min=1)).tolist())
