"""The forms of a dispatch and a combine, as one rank measures them together with the others.

See `bench/exchange.py`. Letters: T tokens, H hidden, K top-k.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import railwave
from bench import vdev
from bench.floor import Counts, counts_of, floor_bytes
from bench.sampling import (
    Step,
    Timed,
    barrier,
    captured,
    first,
    gather,
    slowest,
    summary,
    take_samples,
)
from bench.timeline import WARM_UPS, kernels_of
from bench.timing import device_copy_launch, empty_launch, time_launches
from railwave.kernels import tell_launches

FORMS = ("eager", "static", "graph", "training", "fp8", "traced", "shares")
TOP_K = 8
NODES = {1: 1, 32: 4}  # of so many PEs; else 2
SERVING_TOKENS = 128  # up to here a graph is set beside one of empty launches
COPY_BYTES = 1 << 30
HOST_SAMPLES = 30
PLANNING = ("_count", "_forward", "_describe", "_verdict", "_quota", "_match")
STATIC = {"static_shapes": True, "out": "view"}


@dataclass(frozen=True)
class Batch:
    """One rank's tokens and where they go."""

    x: torch.Tensor  # (T, H) bfloat16
    topk_idx: torch.Tensor  # (T, K) int64
    topk_weights: torch.Tensor  # (T, K) float32
    num_ranks: torch.Tensor  # (T, 1) int64, ranks of each token: combine gives x times that

    @property
    def arguments(self) -> tuple[torch.Tensor, ...]:
        """Return what dispatch takes."""
        return self.x, self.topk_idx, self.topk_weights


class World:
    """One communicator, for one number of experts and of tokens."""

    def __init__(
        self,
        options: argparse.Namespace,
        device: torch.device,
        experts: int,
        tokens: int,
    ) -> None:
        nodes = NODES.get(options.pes, 2)
        gpus = options.pes // nodes
        self.options, self.device = options, device
        self.peer: vdev.Buffers | None = None
        self.experts, self.tokens, self.on_gpu = experts, tokens, device.type == "cuda"
        self.topo = railwave.Topology(nodes, gpus, gpus)
        self.rank, self.top_k = dist.get_rank(), min(TOP_K, experts)
        draw = torch.Generator().manual_seed(self.rank)
        topk_idx = torch.rand(tokens, experts, generator=draw).topk(self.top_k).indices
        self.ranks = topk_idx * options.pes // experts
        self.topk_idx = topk_idx.to(device)
        bound = {}
        if options.pes > vdev.MAX_PES:  # the worst case of all of them does not fit one GPU
            per_rank = sum(torch.tensor(rows) for rows in gather(self._rows_to_ranks().tolist()))
            bound["max_recv_rows"] = int(per_rank.max())
        self.rw = railwave.Communicator(
            self.topo,
            num_experts=experts,
            top_k=self.top_k,
            hidden=max(options.hidden),
            max_tokens_per_rank=tokens,
            staging_records=options.staging_records,
            graphs=options.graphs,
            paths=options.paths,
            device=device,
            deadline_s=60,
            **bound,
        )

    def _rows_to_ranks(self) -> torch.Tensor:
        held = torch.zeros(self.tokens, self.topo.num_ranks, dtype=torch.int64)
        return held.scatter_(1, self.ranks, 1).sum(dim=0)

    def results(self, hidden: int) -> Iterator[dict[str, Any]]:
        """Measure all forms and paths at one hidden size."""
        if self.on_gpu:
            barrier(self.device)
            torch.cuda.empty_cache()  # of the graphs before
        batch, forms = self._batch(hidden), self.options.forms
        makers = {"eager": self._eager, "training": self._training, "fp8": self._fp8}
        timed = [
            make(batch, path)
            for form, make in makers.items()
            for path in self.options.paths
            if form in forms
        ]
        copy_gbs = None
        if self.on_gpu:
            if "static" in forms:
                timed += [self._static(batch, path) for path in self.options.paths]
            # All that runs beside the phases is loaded now, see bench/mps.py.
            copy_gbs = self._copy_gbs()
            for path in self.options.paths if "graph" in forms else ():
                graphs = self._graphs(batch, path)
                timed += graphs
                if self.tokens <= SERVING_TOKENS:
                    timed.append(self._empties(path, graphs[-1].about["launches"]))
                    timed.append(self._nothing(batch, path))
            if "graph" in forms and "fp8" in forms:
                timed += [self._fp8(batch, path, captured) for path in self.options.paths]
            if self.peer:
                run = vdev.make_dispatch(self.peer, batch.x, batch.topk_idx, self.experts)
                timed.append(Timed({"form": "all_to_all_vdev_2d"}, {"dispatch": run}))
        about = {
            **{"pes": self.topo.num_ranks, "nodes": self.topo.nodes},
            **{"experts": self.experts, "top_k": self.top_k},
            **{"tokens": self.tokens, "hidden": hidden, "dtype": "bfloat16"},
            "graphs": self.options.graphs,
        }
        if self.options.staging_records:
            about["staging_records"] = self.options.staging_records
        floors = self._floors(hidden)
        samples = take_samples(timed, self.options.samples, self.device)
        for one, by_phase in zip(timed, samples, strict=True):
            for phase, samples_us in by_phase.items():
                result = {**about, **one.about, "phase": phase, **summary(samples_us)}
                if copy_gbs and one.floor in floors:
                    floor_us = floors[one.floor][phase] / copy_gbs / 1e3
                    result |= {"floor_us": round(floor_us, 2), "copy_gbs": round(copy_gbs, 1)}
                    result["of_floor"] = round(floor_us / result["median_us"], 4)
                yield result
        if self.on_gpu and "static" in forms:
            for path in self.options.paths:
                host = {"form": "static", "phase": "launch a dispatch, host", "path": path}
                repeats = self.rw._recorded.repeats["dispatch"]
                graphs = self.rw._graphs.launched
                measured = self._host(batch, path)
                if self.rw._recorded.repeats["dispatch"] == repeats:
                    raise RuntimeError(f"{path}: launches were not repeated")
                if self.options.graphs and self.rw._graphs.launched == graphs:
                    raise RuntimeError(f"{path}: repeated calls were no graphs")
                for calls, samples_us in measured.items():
                    yield {**about, **host, "calls": calls, **summary(samples_us)}
        for form, make in (("traced", self._traced), ("shares", self._stages)):
            for path in self.options.paths if self.on_gpu and form in forms else ():
                yield from ({**about, **line} for line in make(batch, path))

    def _batch(self, hidden: int) -> Batch:
        draw = torch.Generator().manual_seed(self.rank)
        x = torch.randn(self.tokens, hidden, generator=draw).bfloat16().to(self.device)
        weights = torch.full(self.topk_idx.shape, 1 / self.top_k, device=self.device)
        held = torch.zeros(self.tokens, self.topo.num_ranks, dtype=torch.int64)
        num_ranks = held.scatter_(1, self.ranks, 1).sum(dim=1, keepdim=True)
        return Batch(x, self.topk_idx, weights, num_ranks.to(self.device))

    def _floors(self, hidden: int) -> dict[str, dict[str, int]]:
        """Return the bytes of all PEs by phase: where rows are copied out and in, and of a view."""
        counts = Counts.total(gather(counts_of(self.ranks, self.topo, self.rank)))
        sizes = {"payload_bytes": 2 * hidden, "top_k": self.top_k}
        sizes["gpus_per_node"] = self.topo.gpus_per_node
        floors = {}
        fp8 = {**sizes, "payload_bytes": hidden + 4 * _blocks(hidden)}
        for name, copied, of in (
            ("copied", True, sizes),
            ("view", False, sizes),
            ("fp8", False, fp8),
        ):
            by_stage = floor_bytes(counts, copied=copied, **of)
            floor = {phase: sum(stages.values()) for phase, stages in by_stage.items()}
            floors[name] = {**floor, "both": sum(floor.values())}
        return floors

    def _pair(self, batch: Batch, path: str, **how: Any) -> dict[str, Step]:
        """Return the two phases as steps, checked once."""
        got = {}

        def dispatch() -> None:
            got["received"] = self.rw.dispatch(*batch.arguments, path=path, **how)

        def combine() -> None:
            got["y"] = self.rw.combine(got["received"].x, got["received"].handle)

        dispatch()
        combine()
        self._check(batch, got["y"], f"{path} {how}")
        return {"dispatch": dispatch, "combine": combine}

    def _eager(self, batch: Batch, path: str) -> Timed:
        return Timed({"path": path, "form": "eager"}, self._pair(batch, path), "copied")

    def _training(self, batch: Batch, path: str) -> Timed:
        """Return a dispatch and a combine with gradients of x, then the backward pass of both."""
        x, got = batch.x.detach().requires_grad_(), {}

        def forward() -> None:
            received = self.rw.dispatch(x, *batch.arguments[1:], path=path)
            got["y"] = self.rw.combine(received.x, received.handle)

        def backward() -> None:
            x.grad = None
            got["y"].backward(batch.x)

        forward()
        backward()
        self._check(batch, x.grad, f"{path}, backward")
        return Timed({"path": path, "form": "training"}, {"forward": forward, "backward": backward})

    def _fp8(self, batch: Batch, path: str, capture: Callable[[Step], Step] | None = None) -> Timed:
        """Return a dispatch of e4m3 rows with a float32 scale for each 128 elements."""
        x = batch.x.to(torch.float8_e4m3fn)
        scales = torch.rand(len(x), _blocks(x.shape[1]), device=self.device)
        how = {**STATIC, "extras": (scales,)} if self.on_gpu else {"extras": (scales,)}
        got = {}

        def dispatch() -> None:
            got["received"] = self.rw.dispatch(x, *batch.arguments[1:], path=path, **how)

        def sums() -> torch.Tensor:
            barrier(self.device)
            return self.rw.combine(got["received"].extras[0].contiguous(), got["received"].handle)

        dispatch()
        # The scales come back as often as a token has ranks: as rows of bfloat16 do.
        if not torch.allclose(sums(), scales * batch.num_ranks, rtol=1e-5):
            raise RuntimeError(f"{path}, e4m3: wrong scales at rank {self.rank}")
        barrier(self.device)
        form = ("graph" if capture else "static") if self.on_gpu else "eager"
        about = {"path": path, "form": f"{form}, e4m3 rows and float32 scales"}
        about["dtype"] = "float8_e4m3fn"
        return Timed(about, {"dispatch": capture(dispatch) if capture else dispatch}, "fp8")

    def _static(self, batch: Batch, path: str) -> Timed:
        return Timed({"path": path, "form": "static"}, self._pair(batch, path, **STATIC), "view")

    def _graphs(self, batch: Batch, path: str) -> list[Timed]:
        """Capture a dispatch, a combine of it, and both."""
        self._pair(batch, path, **STATIC)  # what is captured has run before
        received = y = None

        def dispatch() -> None:
            nonlocal received
            received = self.rw.dispatch(*batch.arguments, path=path, **STATIC)

        def combine() -> None:
            nonlocal y
            y = self.rw.combine(received.x, received.handle)

        def both() -> None:
            dispatch()
            combine()

        timed = []
        for phase, run in (("dispatch", dispatch), ("combine", combine), ("both", both)):
            launched: list[Any] = []
            tell_launches(lambda kernel, *_, to=launched: to.append(kernel))
            # A graph keeps the memory that it writes: the second reads the first's handle there.
            step = captured(run)
            tell_launches(None)
            about = {"path": path, "form": "graph", "launches": len(launched)}
            timed.append(Timed(about, {phase: step}, "view"))
            barrier(self.device)
            timed[-1].steps[phase]()
            if phase != "dispatch":
                self._check(batch, y, f"{path} in a graph: {phase}")
        return timed

    def _empties(self, path: str, count: int) -> Timed:
        """Capture as many empty launches as a dispatch and a combine have, without waits."""
        launch = empty_launch(self.device)

        def run() -> None:
            for _ in range(count):
                launch()

        launch()
        about = {"path": path, "form": f"graph of {count} empty launches, no waits"}
        return Timed(about, {"empty": captured(run)})

    def _nothing(self, batch: Batch, path: str) -> Timed:
        """Capture a dispatch and a combine of no token: the same launches and waits alone."""
        nothing = [tensor[:0] for tensor in batch.arguments]

        def run() -> None:
            received = self.rw.dispatch(*nothing, path=path, **STATIC)
            self.rw.combine(received.x, received.handle)

        run()
        barrier(self.device)
        about = {"path": path, "form": "graph of the same launches and waits, no tokens"}
        timed = Timed(about, {"both": captured(run)})
        barrier(self.device)
        return timed

    def _check(self, batch: Batch, y: torch.Tensor, what: str) -> None:
        """Compare a combine of unchanged rows: x times its ranks, rounded twice on the way."""
        barrier(self.device)  # no phase may wait while this loads its kernels
        want = batch.x.float() * batch.num_ranks
        right = torch.allclose(y.float(), want, rtol=2**-6, atol=0.0)
        bad = [rank for rank, ok in enumerate(gather(right)) if not ok]
        if bad:
            raise RuntimeError(f"{what}: combine gave wrong sums at ranks {bad}")

    def _stages(self, batch: Batch, path: str) -> list[dict[str, Any]]:
        """Share the time out over the kernels of each phase, by the profiler, at rank 0.

        A process that has been profiled launches more slowly from then on.
        """
        steps, lines = self._pair(batch, path, **STATIC), []
        for phase, run in steps.items():
            barrier(self.device)
            if self.rank == 0:
                kernels = kernels_of(run, self.device)
                about = {"path": path, "form": "shares", "phase": phase}
                lines.append({**about, **_shares(kernels)})
            else:
                for _ in range(WARM_UPS + 1):  # as many as `kernels_of` runs
                    run()
            barrier(self.device)
        return gather(lines)[0]

    def _host(self, batch: Batch, path: str) -> dict[str, list[float]]:
        """Time the call of a dispatch alone, at the slowest PE, in microseconds.

        After a barrier, from an idle process; and back to back, ahead of the GPU.
        """
        steps = self._pair(batch, path, **STATIC)

        def timed() -> float:
            began_s = time.perf_counter()
            steps["dispatch"]()
            return (time.perf_counter() - began_s) * 1e6

        times: dict[str, list[float]] = {"after a barrier": [], "back to back": []}
        for name, found in times.items():
            for turn in range(HOST_SAMPLES + WARM_UPS):
                # A GPU takes about a thousand launches ahead, then the host waits for it.
                if name == "after a barrier" or turn % 10 == 0:
                    barrier(self.device)
                found.append(timed())
                steps["combine"]()
        return {calls: slowest(us[WARM_UPS:]) for calls, us in times.items()}

    def _traced(self, batch: Batch, path: str) -> list[dict[str, Any]]:
        """Time a dispatch and a combine while a trace is taken and while none is, in turns.

        Static calls are launched anew while one is taken, as they are not otherwise.
        """
        timed = [
            Timed({"path": path, "form": "static"}, self._pair(batch, path, **STATIC)),
            *self._graphs(batch, path)[-1:],
        ]
        lines = []
        for one in timed:
            times: dict[bool, list[float]] = {False: [], True: []}
            for turn in range(2 * self.options.samples):
                on = turn % 4 in (1, 2)
                with railwave.trace() if on else nullcontext():
                    [by_phase] = take_samples([one], 1, self.device)
                times[on] += by_phase["both"]
            for on, samples_us in times.items():
                form = f"{one.about['form']}, a trace {'on' if on else 'off'}"
                lines.append({**one.about, "form": form, "phase": "both", **summary(samples_us)})
        return lines

    def _copy_gbs(self) -> float:
        """Measure bytes read and written per nanosecond by one process, the others idle."""
        barrier(self.device)
        rate = 0.0
        if self.rank == 0:
            launch = device_copy_launch(self.device, COPY_BYTES)
            timing = time_launches(launch, self.device, repeats=5, samples=10)
            rate = COPY_BYTES / timing.median_us / 1e3
        return first(rate)


def _blocks(hidden: int) -> int:
    """Return the scales of a row of float8."""
    return -(-hidden // 128)


def _shares(kernels: list[dict[str, Any]]) -> dict[str, Any]:
    """Share the time of kernels out by name: its waits are in a kernel's time."""
    total = sum(one["us"] for one in kernels)
    by_name: dict[str, float] = {}
    for one in kernels:
        name = one["kernel"][:60]
        by_name[name] = by_name.get(name, 0.0) + one["us"]
    planning = sum(us for name, us in by_name.items() if name.startswith(PLANNING))
    return {
        "launches": len(kernels),  # copies and fills, too
        "kernels_us": round(total, 1),
        "planning_share": round(planning / total, 4) if total else 0.0,
        "shares": {name: round(us / total, 4) for name, us in by_name.items()},
    }
