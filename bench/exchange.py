"""Dispatch and combine as a whole, on every path: the slowest PE, and the fraction of the floor.

One process a PE, all on one GPU: rank 0 yields the results. Forms of a call:

- eager: rows are copied out, the host waits for their number (dispatch's default arguments)
- static: worst-case shapes and a view of the region; nothing is copied out, calls are repeated
- graph: static, captured; dispatch, combine and both together are a graph each
- training: eager, with gradients of x: forward, then the backward pass of both verbs
- fp8: a static dispatch of e4m3 rows with a float32 scale for each 128 elements, alone
- traced: static, and a graph of both phases, while `railwave.trace` is on and while it is off
- shares: the time of each kernel, by a profiler that slows launches down from then on; so this one
  is measured only where it is asked for, by a run of its own

A sample runs twice without a pause; the first is not timed: its end lines the PEs up. All forms,
paths and peers take turns within a sample, so that what drifts drifts for all.

The floor: bytes of all PEs (`bench/floor.py`) over the rate of the device's own copy, which one
process measures while the others idle, since all PEs share that rate.

Letters: T tokens, H hidden, K top-k, E experts.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench import vdev
from bench.forms import FORMS, TOP_K, World
from bench.mps import mps_daemon
from bench.sampling import first, gather
from railwave.config import PATHS

ROOT = Path(__file__).parents[1]


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Say what can be asked for."""
    command.add_argument("--pes", type=int, default=8, help="processes, all on one GPU")
    command.add_argument("--tokens", type=int, nargs="+", default=[128, 1024, 4096])
    command.add_argument("--hidden", type=int, nargs="+", default=[2880, 4096, 7168])
    command.add_argument("--experts", type=int, nargs="+", default=[64, 256])
    command.add_argument("--paths", nargs="+", choices=PATHS, default=list(PATHS))
    command.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS[:-1]))
    command.add_argument("--staging-records", type=int, default=None, help="fewer: more rounds")
    command.add_argument(
        "--no-graphs", dest="graphs", action="store_false", help="graphs=False of railwave.init"
    )
    command.add_argument("--samples", type=int, default=100)
    command.add_argument("--time-limit", type=float, default=None, help="seconds; then no new size")
    command.add_argument("--no-peer", action="store_true", help="without all_to_all_vdev_2d")
    command.add_argument("--device", default="cuda", help="cpu: eager alone, interpreted")


def is_rank() -> bool:
    """Say whether torchrun has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def start(
    options: argparse.Namespace, arguments: list[str], symmetric_bytes: int | None = None
) -> int:
    """Run a benchmark in a process a PE, under MPS where they share a GPU; return a code.

    Args:
        symmetric_bytes: of NVSHMEM's heap, of each process; by default what `measure` needs.
    """
    on_gpu = torch.device(options.device).type == "cuda"
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    command = [sys.executable, *torchrun, str(options.pes), "-m", "bench.run", *arguments]
    # Each heap of the process takes its part, and the peer's 3 GiB.
    size = symmetric_bytes or ("6G" if options.pes <= vdev.MAX_PES else "3G")
    wanted = {**vdev.ENVIRONMENT, "NVSHMEM_SYMMETRIC_SIZE": str(size)} if on_gpu else {}
    paths = (str(ROOT), os.environ.get("PYTHONPATH"))
    wanted["PYTHONPATH"] = os.pathsep.join(filter(None, paths))

    def environment() -> dict[str, str]:  # once the daemon has named its folders there
        return {"OMP_NUM_THREADS": "1", **wanted, **os.environ, "PYTHONPATH": wanted["PYTHONPATH"]}

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the daemon is stopped, too
    with (
        mps_daemon() if on_gpu and options.pes > 1 else nullcontext(),
        subprocess.Popen(command, env=environment()) as ranks,
    ):
        try:
            return ranks.wait()
        finally:
            ranks.terminate()  # torchrun ends its processes, then


def measure(options: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield results at rank 0; run as the others do at the others. Under torchrun."""
    began_s = time.monotonic()
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))

    def late() -> bool:
        limit_s = options.time_limit
        return first(limit_s is not None and time.monotonic() - began_s > limit_s)

    for result in _all_sizes(options, device, late):
        if dist.get_rank() == 0:
            yield {"bench": "exchange", **result}
    dist.barrier()
    dist.destroy_process_group()


def _all_sizes(
    options: argparse.Namespace, device: torch.device, late: Callable[[], bool]
) -> Iterator[dict[str, Any]]:
    """Yield results of every size, and a line for what is not measured. Collective."""
    peer = _Peer(options, device)
    for experts, tokens in product(options.experts, options.tokens):
        size = {"experts": experts, "tokens": tokens}
        if late():
            yield {**size, "skipped": f"--time-limit {options.time_limit}"}
            continue
        world = World(options, device, experts, tokens)
        world.peer = peer.buffers(experts)
        if why := peer.why_not(experts):
            yield {**size, "form": "all_to_all_vdev_2d", "skipped": why}
        for hidden in options.hidden:
            if late():
                yield {**size, "hidden": hidden, "skipped": f"--time-limit {options.time_limit}"}
            else:
                yield from world.results(hidden)
        world.rw.close()


class _Peer:
    """The peer's buffers, made at their first use: when railwave has started NVSHMEM."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self._options, self._device = options, device
        self._made: vdev.Buffers | None = None
        self._failed = "--no-peer" if options.no_peer else ""
        if device.type == "cpu":
            self._failed = "no GPU"

    def why_not(self, experts: int) -> str:
        """Say why there is no peer for so many experts; "" if there is."""
        return self._failed or vdev.why_not(experts, self._options.pes)

    def buffers(self, experts: int) -> vdev.Buffers | None:
        """Return the buffers, for all sizes that there will be. Collective."""
        if self.why_not(experts):
            return None
        if self._made is None:
            options, error = self._options, ""
            sizes = [e for e in options.experts if not vdev.why_not(e, options.pes)]
            try:
                rows = max(options.tokens) * TOP_K
                self._made = vdev.Buffers(rows, max(options.hidden), sizes, self._device)
            except Exception as caught:  # railwave's own results are wanted all the same
                error = f"{type(caught).__name__}: {caught}"
            self._failed = next(filter(None, gather(error)), "")
        return None if self._failed else self._made
