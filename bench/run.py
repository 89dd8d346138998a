"""Benchmarks: one JSON line a result.

python -m bench.run kernels --out results.jsonl
python -m bench.run schedulers --trace FOLDER
python -m bench.run multigpu --out results.jsonl
python -m bench.run exchange --pes 8
python -m bench.run emulated --slice 1/4 --out results.jsonl
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

from bench import emulated, exchange, kernels, multigpu, routed, schedulers
from bench.output import machine, print_results
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
    command.add_argument(
        "--granted-nodes",
        type=int,
        nargs="+",
        default=[4, 8, 16],
        help="of granted chunks on skewed pairs; 64 take half a minute a seed, 128 two minutes",
    )
    command.add_argument("--granted-seeds", type=int, default=3)
    _add_out(command)
    _add_multigpu(commands)
    command = commands.add_parser("exchange", help="dispatch and combine, a process a PE")
    exchange.add_arguments(command)
    _add_out(command)
    command = commands.add_parser("emulated", help="the paper's experiment, through emulated NICs")
    emulated.add_arguments(command)
    _add_out(command)
    options = parser.parse_args(argv)
    device = torch.device("cpu")
    if options.command in ("kernels", "multigpu", "exchange", "emulated"):
        try:
            device = check_device(options.device)
        except ValueError as error:
            parser.error(f"--{error}; --device cpu runs the kernels interpreted")
    if options.command == "kernels":
        results = kernels.measure(_sizes(options, device))
    elif options.command == "multigpu":
        try:
            results = multigpu.measure(_multigpu_sizes(options), options.time_limit)
        except ValueError as error:
            parser.error(str(error))
    elif options.command == "exchange":
        if not exchange.is_rank():
            return exchange.start(options, sys.argv[1:] if argv is None else argv)
        results = exchange.measure(options, device)
    elif options.command == "emulated":
        options.out = options.out or emulated.default_out(options)
        if not exchange.is_rank():
            try:
                return emulated.start(options, sys.argv[1:] if argv is None else argv)
            except (OSError, ValueError) as error:
                parser.error(str(error))
        results = emulated.measure(options, device)
    else:
        try:
            trace = options.trace and routed.read_trace(options.trace)
        except (OSError, ValueError) as error:
            parser.error(f"--trace: {error}")
        results = schedulers.measure(trace, tuple(options.granted_nodes), options.granted_seeds)
    print_results(results, machine(device), options.out)
    return 0


def _add_out(command: argparse.ArgumentParser) -> None:
    command.add_argument("--out", type=Path, default=None, help="append to this file as well")


def _add_multigpu(commands: Any) -> None:
    command = commands.add_parser("multigpu", help="one process per GPU, against NCCL and copies")
    command.add_argument("--gpus", type=int, default=None, help="default: all")
    command.add_argument("--tokens", type=int, nargs="+", default=[128, 4096, 16384])
    command.add_argument("--hidden", type=int, default=7168)
    command.add_argument("--experts", type=int, default=64)
    command.add_argument("--top-k", type=int, default=8)
    command.add_argument(
        "--layout", choices=("nodes", "node"), default=None, help="each GPU its own node, or one"
    )
    command.add_argument("--samples", type=int, default=30)
    command.add_argument("--time-limit", type=float, default=480.0, help="seconds, for all")
    command.add_argument("--device", default="cuda")
    _add_out(command)


def _multigpu_sizes(options: argparse.Namespace) -> multigpu.Sizes:
    on_gpu, found = options.device != "cpu", torch.cuda.device_count()
    gpus = options.gpus or (found if on_gpu else 2)
    if gpus < 2 or (on_gpu and gpus > found):
        raise ValueError(f"--gpus must be 2 or more, on GPUs at most {found}, got {gpus}")
    if options.experts % gpus or options.top_k > options.experts:
        raise ValueError(f"--experts must be a multiple of {gpus} and at least --top-k")
    if options.samples < 2:
        raise ValueError(f"--samples must be 2 or more, got {options.samples}")
    return multigpu.Sizes(
        *(gpus, tuple(options.tokens), options.hidden, options.experts, options.top_k),
        *((options.layout,) if options.layout else ("nodes", "node"),),
        *(options.samples, "cuda" if on_gpu else "cpu"),
    )


def _sizes(options: argparse.Namespace, device: torch.device) -> kernels.Sizes:
    return kernels.Sizes(
        *(tuple(options.plan_nodes), options.nodes, options.gpus, options.tokens),
        *(options.hidden, options.top_k, device, options.repeats, options.samples),
    )


if __name__ == "__main__":
    sys.exit(main())
