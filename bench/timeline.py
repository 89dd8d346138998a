"""Which kernels one dispatch and its combine launch, when, and for how long: from the profiler.

On one GPU, under MPS, for every process that torchrun starts; rank 0 prints:

python -m bench.mps torchrun --nproc-per-node 8 -m bench.timeline --nodes 2
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

import railwave

WARM_UPS = 3


def main() -> None:
    """Run as one rank of torchrun."""
    parser = argparse.ArgumentParser(prog="python -m bench.timeline", description="see the module")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--path", default="joint")
    parser.add_argument("--staging-records", type=int, default=None, help="fewer: more rounds")
    parser.add_argument("--static", action="store_true", help="static shapes and a view")
    options = parser.parse_args()
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    dist.init_process_group("gloo")
    gpus = ranks // options.nodes
    railwave.init(
        railwave.Topology(options.nodes, gpus, gpus),
        num_experts=8 * ranks,
        top_k=options.top_k,
        hidden=options.hidden,
        max_tokens_per_rank=options.tokens,
        staging_records=options.staging_records,
        deadline_s=60,
    )
    torch.manual_seed(rank)
    x = torch.randn(options.tokens, options.hidden, device=device).bfloat16()
    topk_idx = torch.rand(options.tokens, 8 * ranks, device=device).topk(options.top_k).indices
    weights = torch.full(topk_idx.shape, 1 / options.top_k, device=device)

    form = {"static_shapes": True, "out": "view"} if options.static else {}

    def run() -> None:
        received = railwave.dispatch(x, topk_idx, weights, path=options.path, **form)
        railwave.combine(received.x, received.handle)

    kernels = kernels_of(run, device)
    if rank == 0:
        title = f"{vars(options)}, {ranks} ranks, {torch.cuda.get_device_name(device)}"
        table = Table("start us", "us", "gap us", "kernel", title=title)
        for one in kernels:
            table.add_row(*(f"{one[k]:.1f}" for k in ("start_us", "us", "gap_us")), one["kernel"])
        Console(width=120).print(table)
    dist.barrier()
    railwave.finalize()


def kernels_of(run: Callable[[], None], device: torch.device) -> list[dict[str, Any]]:
    """Return the kernels and copies that `run` puts on a GPU, by start, in microseconds.

    Each is {"kernel", "start_us", "us", "gap_us"}: gap_us is since the end of all before it, below
    0 where they overlap.
    """
    for _ in range(WARM_UPS):
        run()
    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        run()
        torch.cuda.synchronize(device)
    events = sorted(
        (event.time_range.start, event.time_range.elapsed_us(), event.name)
        for event in profiled.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    found, end = [], events[0][0] if events else 0.0
    for start, us, name in events:
        times = {"start_us": start - events[0][0], "us": us, "gap_us": start - end}
        found.append({"kernel": name, **times})
        end = max(end, start + us)
    return found


if __name__ == "__main__":
    main()
