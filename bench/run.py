"""Benchmarks: one JSON line a result.

python -m bench.run kernels --out results.jsonl
python -m bench.run schedulers --trace FOLDER
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import sys
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

import torch

from bench import kernels, routed, schedulers
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
    _add_out(command)
    command = commands.add_parser("schedulers", help="whole clusters, simulated on one CPU core")
    command.add_argument(
        "--trace", type=Path, default=None, help="folder of a recorded trace of 16 ranks"
    )
    _add_out(command)
    options = parser.parse_args(argv)
    device = torch.device("cpu")
    if options.command == "kernels":
        try:
            device = check_device(options.device)
        except ValueError as error:
            parser.error(f"--{error}; --device cpu runs the kernels interpreted")
        results = kernels.measure(_sizes(options, device))
    else:
        try:
            trace = options.trace and routed.read_trace(options.trace)
        except (OSError, ValueError) as error:
            parser.error(f"--trace: {error}")
        results = schedulers.measure(trace)
    print_results(results, machine(device), options.out)
    return 0


def machine(device: torch.device) -> dict[str, str]:
    """Say what a result was measured on, and with which versions."""
    name = platform.processor() or platform.machine()
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    versions = {package: version(package) for package in ("torch", "triton", "numpy")}
    return {"machine": name, "date": datetime.date.today().isoformat(), **versions}


def _add_out(command: argparse.ArgumentParser) -> None:
    command.add_argument("--out", type=Path, default=None, help="append to this file as well")


def _sizes(options: argparse.Namespace, device: torch.device) -> kernels.Sizes:
    return kernels.Sizes(
        *(tuple(options.plan_nodes), options.nodes, options.gpus, options.tokens),
        *(options.hidden, options.top_k, device, options.repeats, options.samples),
    )


def print_results(results: Iterable[dict], about: dict[str, str], out: Path | None) -> None:
    """Print each result as a JSON line as it comes, with `about`; append it to a file, too."""
    for result in results:
        line = json.dumps({**result, **about})
        print(line, flush=True)
        if out:
            with out.open("a") as file:
                print(line, file=file)


if __name__ == "__main__":
    sys.exit(main())
