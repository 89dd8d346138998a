"""Benchmarks: one JSON line a result.

python -m bench.run kernels --out results.jsonl
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import sys
from importlib.metadata import version
from pathlib import Path

import torch

from bench import kernels
from railwave._check import check_device


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark that the arguments name; return an exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.run", description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("kernels", help="the kernels of a dispatch, one by one")
    command.add_argument("--plan-nodes", type=int, nargs="*", default=[4, 64])
    command.add_argument("--nodes", type=int, default=4, help="of the moves; 1: no moves")
    command.add_argument("--gpus", type=int, default=8)
    command.add_argument("--tokens", type=int, default=4096)
    command.add_argument("--hidden", type=int, default=7168)
    command.add_argument("--top-k", type=int, default=8)
    command.add_argument("--device", default="cuda")
    command.add_argument("--repeats", type=int, default=20, help="launches a sample")
    command.add_argument("--samples", type=int, default=30)
    command.add_argument("--out", type=Path, default=None, help="append to this file as well")
    options = parser.parse_args(argv)
    try:
        device = check_device(options.device)
    except ValueError as error:
        parser.error(f"--{error}; --device cpu runs the kernels interpreted")
    about = machine(device)
    sizes = kernels.Sizes(
        *(tuple(options.plan_nodes), options.nodes, options.gpus, options.tokens),
        *(options.hidden, options.top_k, device, options.repeats, options.samples),
    )
    for result in kernels.measure(sizes):
        line = json.dumps({**result, **about})
        print(line, flush=True)
        if options.out:
            with options.out.open("a") as file:
                print(line, file=file)
    return 0


def machine(device: torch.device) -> dict[str, str]:
    """Say what a result was measured on, and with which versions."""
    name = platform.processor() or platform.machine()
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    versions = {package: version(package) for package in ("torch", "triton")}
    return {"machine": name, "date": datetime.date.today().isoformat(), **versions}


if __name__ == "__main__":
    sys.exit(main())
