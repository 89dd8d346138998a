"""Start one process per GPU of this host, and time there what all of them do together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

FLUSH_BYTES = 128 << 20  # above any L2 cache
WARM_UPS = 3
# NVLink multicast off, and no NICs: all on one host.
ENVIRONMENT = {
    "NVSHMEM_DISABLE_NVLS": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NVSHMEM_REMOTE_TRANSPORT": "none",
    "NVSHMEM_SYMMETRIC_SIZE": "8G",
    "OMP_NUM_THREADS": "1",
}
Timed = Callable[[], float]  # runs once, returns microseconds


@dataclass(frozen=True)
class Sizes:
    """What is measured."""

    gpus: int
    tokens: tuple[int, ...]  # of each rank
    hidden: int
    experts: int
    top_k: int
    layouts: tuple[str, ...]  # "nodes", "node"; or "vdev_2d" for that peer
    samples: int
    device: str


def run_ranks(sizes: Sizes, file: Path, environment: dict[str, str], until: float) -> str:
    """Run `bench.multigpu` in a process per GPU; return "" or what went wrong."""
    if time.monotonic() > until:
        return "no time was left"
    root = str(Path(__file__).parents[1])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--local-addr", "127.0.0.1", "--nproc-per-node", str(sizes.gpus)]
    command += ["-m", "bench.multigpu", json.dumps(asdict(sizes)), str(file)]
    process = subprocess.Popen(
        command,
        env={**ENVIRONMENT, **environment, **os.environ, "PYTHONPATH": path},
        stdout=2,
    )
    try:
        code = process.wait(max(0.0, until - time.monotonic()))
        return f"torchrun ended with {code}" if code else ""
    except subprocess.TimeoutExpired:
        return "the time limit is past"
    finally:
        if process.poll() is None:
            process.terminate()  # torchrun ends its processes
            try:
                process.wait(40)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class Rank:
    """One rank of torchrun: its groups, its routing, and how it times."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes, self.on_gpu = sizes, sizes.device == "cuda"
        self.rank = int(os.environ["RANK"])
        self.device = torch.device(sizes.device)
        if self.on_gpu:
            self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(self.device)
            self.flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=self.device)
        dist.init_process_group("gloo")
        self.group = dist.new_group(backend="nccl" if self.on_gpu else "gloo")
        self.one = torch.ones(1, device=self.device)

    def draw(self, tokens: int) -> list[torch.Tensor]:
        """Draw this rank's x, topk_idx and topk_weights."""
        sizes, draw = self.sizes, torch.Generator().manual_seed(self.rank)
        ids = torch.rand(tokens, sizes.experts, generator=draw).topk(sizes.top_k).indices
        weights = torch.rand(tokens, sizes.top_k, generator=draw)
        x = torch.randn(tokens, sizes.hidden, generator=draw).bfloat16()
        return [t.to(self.device) for t in (x, ids, weights)]

    def once_us(self, run: Callable[[], Any]) -> float:
        """Time a call that follows another, whose end lines the ranks' GPUs up.

        From an idle GPU the first launch's own latency, some 100 us, would be in it.
        """
        if not self.on_gpu:
            began_s = time.perf_counter()
            run()
            return (time.perf_counter() - began_s) * 1e6
        self.flush.zero_()
        dist.all_reduce(self.one.fill_(1), group=self.group)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        run()
        start.record()
        run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3

    def time_all(self, cases: dict[Any, Timed]) -> dict[Any, list[float]]:
        """Time cases in turn; return every sample's time of the slowest rank."""
        times: dict[Any, list[float]] = {name: [] for name in cases}
        for _ in range(WARM_UPS + self.sizes.samples):
            for name, timed in cases.items():
                dist.barrier()  # a copy that rank 0 times uses all GPUs
                times[name].append(timed())
        by_rank = self.gather(times)
        return {
            name: [max(of) for of in zip(*(t[name][WARM_UPS:] for t in by_rank), strict=True)]
            for name in cases
        }

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value."""
        values = [None] * dist.get_world_size()
        dist.all_gather_object(values, value)
        return values
