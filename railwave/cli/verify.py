"""`railwave demo` on made-up routing, `railwave replay` on recorded counts."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from railwave._version import __version__
from railwave.cli.options import (
    Help,
    add_rails,
    add_verbose,
    chosen_names,
    progress_bar,
    topology,
)
from railwave.cli.output import check_writable, write_json

if TYPE_CHECKING:
    from railwave.cases import Case
    from railwave.report import Report

SIDE_BY_SIDE_PHASES = 64  # ranks x paths: about 10 s of work, a process takes 4 s to start


def add_commands(commands: argparse._SubParsersAction) -> None:
    """Add `demo` and `replay`."""
    demo = commands.add_parser(
        "demo", help="made-up routing, uneven over rails and experts", formatter_class=Help
    )
    demo.set_defaults(command=_run, make_case=_demo)
    _add_cluster(demo, nodes=4, gpus=8)
    demo.add_argument("--tokens", type=int, default=64, help="the most tokens of a rank")
    demo.add_argument("--experts", type=int, default=64, help="experts of the cluster")
    demo.add_argument("--topk", type=int, default=4, help="experts of a token")
    demo.add_argument(
        "--skew", type=float, default=1.0, help="0: rails and experts are even, 1 and more: uneven"
    )
    _add_common(demo)

    replay = commands.add_parser(
        "replay", help="recorded expert counts, as a trace folder has them", formatter_class=Help
    )
    replay.set_defaults(command=_run, make_case=_replay)
    replay.add_argument(
        "folder",
        help="holds table_iter<I>_rank<r>.log for every rank; a line is layer:[[counts], ...]",
    )
    replay.add_argument(
        "--iteration", type=int, required=True, help="I: the number in the names of the files"
    )
    replay.add_argument(
        "--layer", type=int, required=True, help="the number at the start of a line"
    )
    replay.add_argument(
        "--micro-batch", type=int, default=0, help="which of the layer's lists of counts, from 0"
    )
    _add_cluster(replay, nodes=4, gpus=4)
    replay.add_argument(
        "--tokens",
        type=_tokens,
        default="all",
        help="run at most so many tokens of a rank, drawn from its counts; 64 take about a minute",
    )
    replay.add_argument("--topk", type=int, default=2, help="experts of a token in the trace")
    _add_common(replay)


def _run(args: argparse.Namespace) -> int:
    from railwave.config import PATHS
    from railwave.table import print_report

    began_s = time.perf_counter()
    if args.json is not None:
        check_writable(args.json)
    paths = chosen_names(args.path, PATHS, "--path")
    case = args.make_case(args)
    topo = case.topo
    print(
        f"{topo.nodes} x {topo.gpus_per_node} GPUs, {topo.rails_per_node} rails, "
        f"{case.num_experts} experts, top-{case.top_k}; {sum(case.num_tokens):,} tokens of "
        f"{case.hidden} bfloat16"
    )
    if case.note:
        print(case.note)
    processes = min(len(paths), args.processes or _processes(topo.num_ranks * len(paths)))
    report = _run_with_progress(case, paths, processes)
    if args.json is not None:
        by_path = {path.path: path.to_json() for path in report.paths}
        write_json(args.json, {"paths": by_path, "config": _config(args, case)})
    print_report(report, seconds=time.perf_counter() - began_s)
    return 0 if report.verified else 1


def _processes(num_phases: int) -> int:
    """Choose how many paths run side by side: one, where a second process would not pay."""
    return len(os.sched_getaffinity(0)) if num_phases >= SIDE_BY_SIDE_PHASES else 1


def _run_with_progress(case: Case, paths: Sequence[str], processes: int) -> Report:
    from railwave.report import PHASES, run_paths

    with progress_bar(len(paths) * len(PHASES)) as progress:
        return run_paths(case, paths, progress, processes=processes)


def _demo(args: argparse.Namespace) -> Case:
    from railwave.cases import demo_case

    return demo_case(
        topology(args.nodes, args.gpus, args.rails),
        num_tokens=args.tokens,
        hidden=args.hidden,
        num_experts=args.experts,
        top_k=args.topk,
        skew=args.skew,
        seed=args.seed,
    )


def _replay(args: argparse.Namespace) -> Case:
    from railwave.cases import replay_case
    from railwave.workloads import read_counts

    return replay_case(
        topology(args.nodes, args.gpus, args.rails),
        read_counts(args.folder, args.iteration, args.layer, micro_batch=args.micro_batch),
        num_tokens=args.tokens,
        hidden=args.hidden,
        top_k=args.topk,
        seed=args.seed,
    )


def _config(args: argparse.Namespace, case: Case) -> dict[str, Any]:
    """Return what the run can be repeated from."""
    left_out = ("json", "verbose", "path", "processes", "command", "make_case")
    config = {name: value for name, value in vars(args).items() if name not in left_out}
    if isinstance(args.rails, tuple):
        config["rail_of_gpu"] = list(args.rails)
    return {**config, "rails": case.topo.rails_per_node, "version": __version__}


def _tokens(text: str) -> int:
    return 0 if text == "all" else int(text)


def _at_least_one(text: str) -> int:
    if int(text) < 1:
        raise ValueError
    return int(text)


_at_least_one.__name__ = "number of processes"
_tokens.__name__ = "number of tokens"  # argparse names the type in its message


def _add_cluster(parser: argparse.ArgumentParser, *, nodes: int, gpus: int) -> None:
    parser.add_argument("--nodes", type=int, default=nodes, help="nodes of the cluster")
    parser.add_argument("--gpus", type=int, default=gpus, help="GPUs of a node")
    add_rails(parser)


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hidden", type=int, default=256, help="bfloat16 elements of a token")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same run")
    parser.add_argument(
        "--path",
        action="append",
        metavar="PATH",
        help="native, rail, permutation, joint, granted or all; a comma list, or given again "
        "(default: all)",
    )
    parser.add_argument(
        "--processes",
        type=_at_least_one,
        help="paths that run side by side (default: as many as cores, 1 for a small run)",
    )
    parser.add_argument("--json", metavar="FILE", help="write the report there too")
    add_verbose(parser)
