"""The command line: `railwave demo` on made-up routing, `railwave replay` on recorded counts.

`railwave clean` removes the shared memory that killed processes left.

Exit codes: 0, every path is verified; 1, one is not; 2, a mistake in the call.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from railwave._version import __version__

# What needs triton or rich is imported where it is used; torch comes with the package (3 s).
if TYPE_CHECKING:
    from railwave.cases import Case
    from railwave.report import Report
    from railwave.topology import Topology

logger = logging.getLogger("railwave")

PROGRESS_DELAY_S = 3.0
SIDE_BY_SIDE_PHASES = 64  # ranks x paths: about 10 s of work, a process takes 4 s to start


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: the arguments after the program's name; the process's own if None.

    Returns:
        The exit code.
    """
    try:
        args = _parser().parse_args(argv)
        with _logging(args.verbose):
            return args.command(args)
    except (ValueError, TypeError, OSError) as error:
        return _refuse(str(error))
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, RuntimeError) and "can't allocate memory" not in str(error):
            raise
        return _refuse("this run needs more memory than there is; make its sizes smaller")
    except KeyboardInterrupt:
        print("railwave: interrupted", file=sys.stderr)
        return 130


def _refuse(message: str) -> int:
    # The first line: torch adds a stack of C++ frames.
    print(f"railwave: error: {message.partition(chr(10))[0]}", file=sys.stderr)
    return 2


def _run(args: argparse.Namespace) -> int:
    from railwave.table import print_report

    began_s = time.perf_counter()
    if args.json is not None:
        check_writable(args.json)
    paths = _paths(args.path)
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


def _clean(args: argparse.Namespace) -> int:
    from railwave.heap import shm

    removed = shm.clean()
    for path in removed:
        print(f"removed {path}")
    if not removed:
        print(f"nothing of yours to remove in {shm.FOLDER}")
    return 0


def _processes(num_phases: int) -> int:
    """Choose how many paths run side by side: one, where a second process would not pay."""
    return len(os.sched_getaffinity(0)) if num_phases >= SIDE_BY_SIDE_PHASES else 1


def _run_with_progress(case: Case, paths: Sequence[str], processes: int) -> Report:
    from tqdm import tqdm

    from railwave.report import PHASES, run_paths

    total = len(paths) * len(PHASES)
    # disable=None: only where stderr is a terminal.
    with tqdm(total=total, delay=PROGRESS_DELAY_S, disable=None, leave=False) as bar:

        def progress(done: int, name: str) -> None:
            bar.set_description(name, refresh=False)
            bar.update(done - bar.n)

        return run_paths(case, paths, progress, processes=processes)


def _demo(args: argparse.Namespace) -> Case:
    from railwave.cases import demo_case

    return demo_case(
        _topology(args),
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
        _topology(args),
        read_counts(args.folder, args.iteration, args.layer, micro_batch=args.micro_batch),
        num_tokens=args.tokens,
        hidden=args.hidden,
        top_k=args.topk,
        seed=args.seed,
    )


def _topology(args: argparse.Namespace) -> Topology:
    from railwave.topology import Topology

    return Topology(args.nodes, args.gpus, args.gpus if args.rails is None else args.rails)


def _paths(given: Sequence[str] | None) -> list[str]:
    """Return the paths asked for, each once, in their order; all of them if none is."""
    from railwave.config import PATHS

    names = [name.strip() for part in given or ["all"] for name in part.split(",")]
    for name in names:
        if name not in (*PATHS, "all"):
            raise ValueError(f"--path must be of {', '.join(PATHS)} or all, got {name!r}")
    return list(PATHS) if "all" in names else list(dict.fromkeys(names))


def _config(args: argparse.Namespace, case: Case) -> dict[str, Any]:
    """Return what the run can be repeated from."""
    left_out = ("json", "verbose", "path", "processes", "command", "make_case")
    config = {name: value for name, value in vars(args).items() if name not in left_out}
    return {**config, "rails": case.topo.rails_per_node, "version": __version__}


def check_writable(path: str) -> None:
    """Refuse a path that `write_json` could not write, before any work is done.

    Raises:
        OSError: with the path and the reason.
    """
    if not path:
        raise FileNotFoundError("--json must be a file, got an empty name")
    if os.path.isdir(path):
        raise IsADirectoryError(f"--json must be a file, got the directory {path!r}")
    folder = os.path.dirname(os.path.realpath(path))
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"--json must be in an existing folder, got {path!r}")
    # A new file is written beside the old one and takes its place; a device or pipe is written to.
    if not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise PermissionError(f"--json must be a file that may be written, got {path!r}")
    if _replaceable(path) and not os.access(folder, os.W_OK):
        raise PermissionError(f"--json must be in a folder that may be written, got {path!r}")


def write_json(path: str, data: Any) -> None:
    """Write `data` to `path`: all of it or, if anything fails, nothing."""
    text = json.dumps(data, indent=2) + "\n"
    if not _replaceable(path):
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        return
    target = os.path.realpath(path)
    part = f"{target}.{os.getpid()}.part"
    try:
        with open(part, "x", encoding="utf-8") as file:
            file.write(text)
        if os.path.exists(target):
            shutil.copymode(target, part)
        os.replace(part, target)
    except BaseException:
        if os.path.exists(part):
            os.remove(part)
        raise


def _replaceable(path: str) -> bool:
    return os.path.isfile(path) or not os.path.exists(path)


@contextmanager
def _logging(verbose: bool) -> Iterator[None]:
    """Show railwave's log on stderr while a command runs, if asked to."""
    if not verbose:
        yield
        return
    handler, level = logging.StreamHandler(), logger.level
    handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; see {self.prog} --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="railwave",
        description="Dispatch and combine tokens of a whole cluster in this process, on a CPU, and "
        "check the result bit for bit. Exit code 0: verified, 1: not, 2: a mistake in the call.",
    )
    parser.add_argument("--version", action="version", version=f"railwave {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    demo = commands.add_parser(
        "demo", help="made-up routing, uneven over rails and experts", formatter_class=_Help
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
        "replay", help="recorded expert counts, as a trace folder has them", formatter_class=_Help
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

    clean = commands.add_parser(
        "clean", help="remove shared memory that killed processes of yours left on this machine"
    )
    clean.set_defaults(command=_clean)
    _add_verbose(clean)
    return parser


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    def _get_help_string(self, action: argparse.Action) -> str | None:
        hidden = action.default is None or action.default is False
        return action.help if hidden else super()._get_help_string(action)


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
    parser.add_argument("--rails", type=int, help="rails of a node (default: as many as GPUs)")


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hidden", type=int, default=256, help="bfloat16 elements of a token")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same run")
    parser.add_argument(
        "--path",
        action="append",
        metavar="PATH",
        help="native, rail, permutation, joint or all; a comma list, or given again (default: all)",
    )
    parser.add_argument(
        "--processes",
        type=_at_least_one,
        help="paths that run side by side (default: as many as cores, 1 for a small run)",
    )
    parser.add_argument("--json", metavar="FILE", help="write the report there too")
    _add_verbose(parser)


def _add_verbose(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-v", "--verbose", action="store_true", help="log what is done to stderr")
