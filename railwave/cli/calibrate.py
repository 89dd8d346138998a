"""`railwave calibrate`: measure the paths here, and write a cost table.

Under torchrun each process is a rank. Without it, the command starts itself under torchrun, with a
process for each GPU of the cluster that it is told of.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

from railwave.cli.options import (
    Help,
    add_rails,
    add_verbose,
    progress_bar,
    rails_text,
    topology,
)
from railwave.cli.output import check_writable

if TYPE_CHECKING:
    from railwave.communicator import Communicator
    from railwave.cost_table import CostTable
    from railwave.topology import Topology

QUICK_SAMPLES = 5
DEADLINE_S = 120.0
TORCHRUN = ("WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")  # beside RANK
DTYPES = ("bfloat16", "float16", "float32")  # names of torch's
PR_SET_PDEATHSIG = 1  # of Linux's prctl
POLL_S = 0.1  # between looks at whether torchrun has ended


def add_command(commands: argparse._SubParsersAction) -> None:
    """Add `calibrate`."""
    parser = commands.add_parser(
        "calibrate", help="measure the paths here; write a cost table", formatter_class=Help
    )
    parser.set_defaults(command=_calibrate)
    parser.add_argument("--nodes", type=int, default=2, help="nodes of the cluster")
    parser.add_argument("--gpus", type=int, default=2, help="GPUs of a node, a process each")
    add_rails(parser)
    parser.add_argument("--hidden", type=int, default=7168, help="elements of a token")
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0], help="of an element")
    parser.add_argument(
        "--payloads",
        default="0.25,1",
        metavar="B,...",
        help="mean bytes that a GPU sends to other nodes, in MiB, a comma list",
    )
    parser.add_argument(
        "--max-tokens",
        type=int,
        help="most tokens of a rank, as the program declares (default: what the payloads need)",
    )
    parser.add_argument(
        "--staging-records",
        type=int,
        help="as the program declares (default: whole slices, as up to 8192 records by default)",
    )
    parser.add_argument("--samples", type=int, default=20, help="of each path at each point")
    parser.add_argument(
        "--quick", action="store_true", help=f"{QUICK_SAMPLES} samples, the first payload alone"
    )
    parser.add_argument("--out", metavar="FILE", default="table.json", help="the table")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on with what --out holds, if it does; measure points with fewer samples again",
    )
    add_verbose(parser)


def _calibrate(args: argparse.Namespace) -> int:
    _check_torchrun()
    payloads = _payloads(args)
    if os.environ.get("RANK", "0") == "0":  # who writes it
        check_writable(args.out, "--out")
        if not args.resume and os.path.exists(args.out) and os.path.getsize(args.out):
            raise ValueError(f"--out must be a new file without --resume, got {args.out!r}")
    samples = QUICK_SAMPLES if args.quick else args.samples
    if samples < QUICK_SAMPLES:
        raise ValueError(f"--samples must be at least {QUICK_SAMPLES}, got {samples}")
    topo = topology(args.nodes, args.gpus, args.rails)
    if "RANK" not in os.environ:
        finished = _finished(args, topo, payloads, samples)
        if finished:
            _print(finished, args.out)
            print(f"nothing to do: every point has {samples} samples or more")
            return 0
        return _under_torchrun(args, topo.num_ranks)
    return _measure(args, topo, payloads, samples)


def _check_torchrun() -> None:
    """Refuse half of torchrun's environment: who sets RANK alone meant something else."""
    missing = [name for name in TORCHRUN if name not in os.environ]
    if "RANK" in os.environ and missing:
        raise ValueError(
            f"{', '.join(missing)} must be set where RANK is ({os.environ['RANK']!r}), as torchrun "
            "sets them; unset RANK, and this command starts torchrun itself"
        )


def _payloads(args: argparse.Namespace) -> list[float]:
    try:
        payloads = [float(part) for part in args.payloads.split(",")]
    except ValueError:
        payloads = []
    if not payloads or not all(0 < payload <= 1e6 for payload in payloads):
        raise ValueError(f"--payloads must be numbers in (0, 1e6] MiB, got {args.payloads!r}")
    return payloads[:1] if args.quick else payloads


def _sizes(args: argparse.Namespace, topo: Topology, payloads: list[float]) -> dict[str, Any]:
    """Return what a `Communicator` declares for these points."""
    import torch

    from railwave._check import check_positive_int
    from railwave.sched.selector import MIB

    hidden = check_positive_int(args.hidden, "--hidden")
    dtype = getattr(torch, args.dtype)
    # All on one rail, a GPU there sends what all GPUs of its node would.
    most = int(max(payloads) * MIB / (dtype.itemsize * hidden) * topo.gpus_per_node) + 1
    if args.max_tokens is not None:
        most = check_positive_int(args.max_tokens, "--max-tokens")
    staging = max(1, topo.max_proxy_records(most))
    if args.staging_records is not None:
        staging = check_positive_int(args.staging_records, "--staging-records")
    sizes = {"num_experts": topo.num_ranks, "top_k": 1, "hidden": hidden, "dtype": dtype}
    return {**sizes, "max_tokens_per_rank": most, "staging_records": staging}


def _finished(
    args: argparse.Namespace, topo: Topology, payloads: list[float], samples: int
) -> CostTable | None:
    """Return the table to go on with if it holds all that is asked for.

    Refuses what no rank could measure and a table of another configuration, before any rank is
    started.
    """
    from railwave.agreement import default_device
    from railwave.calibrate import points, unmeasured
    from railwave.config import Config
    from railwave.cost_table import CostTable, fingerprint

    sizes = _sizes(args, topo, payloads)
    config = Config(topo, device=default_device(), **sizes)
    list(points(config, payloads))
    if not _goes_on(args):
        return None
    table = CostTable.load(args.out)
    # Which wire there is, GPUs know only once they have a communicator.
    on_cpu = config.device.type == "cpu"
    transport = "shared memory" if on_cpu else table.fingerprint.get("transport", "")
    table.check_fits(fingerprint(config, transport))
    return None if unmeasured(config, table, payloads, samples) else table


def _goes_on(args: argparse.Namespace) -> bool:
    return args.resume and os.path.exists(args.out) and os.path.getsize(args.out) > 0


def _under_torchrun(args: argparse.Namespace, num_ranks: int) -> int:
    """Start this command again, as so many ranks."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={num_ranks}"]
    again = ["-m", "railwave", "calibrate"]
    if args.rails is not None:
        again.append(f"--rails={rails_text(args.rails)}")
    sizes = ("nodes", "gpus", "hidden", "dtype", "payloads", "max_tokens", "staging_records")
    for name in (*sizes, "samples", "out"):
        if getattr(args, name) is not None:
            again.append(f"--{name.replace('_', '-')}={getattr(args, name)}")
    again += [f"--{name}" for name in ("quick", "resume", "verbose") if getattr(args, name)]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    return _run_to_its_end([*torchrun, *again], environment)


def _run_to_its_end(command: list[str], environment: dict[str, str]) -> int:
    """Run a command; end it, with all that it started, if this process is told to end or killed.

    The command hears SIGTERM whatever the signal, and in a session of its own only from here:
    torchrun ends its ranks at the first signal, and a second one would break that off.

    Returns:
        Its exit code; 128 + n after signal n.
    """
    heard: list[int] = []
    libc, parent = ctypes.CDLL(None), os.getpid()

    def end_with_parent() -> None:  # whom SIGKILL gives no time to hand it on
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)

    ends = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in ends}
    for number in ends:
        if before[number] != signal.SIG_IGN:  # as nohup has it
            signal.signal(number, lambda n, _: heard.append(n))
    try:
        child = subprocess.Popen(
            command, env=environment, start_new_session=True, preexec_fn=end_with_parent
        )
        try:
            while child.poll() is None and not heard:
                time.sleep(POLL_S)
        finally:
            if child.poll() is None:
                child.terminate()
            child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 128 + heard[0] if heard else child.returncode


def _measure(args: argparse.Namespace, topo: Topology, payloads: Any, samples: int) -> int:
    import torch
    import torch.distributed as dist

    from railwave.calibrate import calibrate, points
    from railwave.communicator import Communicator

    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group("gloo")
    first = dist.get_rank() == 0
    try:
        sizes = _sizes(args, topo, payloads)
        with Communicator(topo, deadline_s=DEADLINE_S, **sizes) as rw:
            table = _begin(args, rw)
            total = sum(1 for _ in points(rw.config, payloads))
            with progress_bar(total if first else 0) as progress:
                table = calibrate(
                    *(rw, table, payloads),
                    samples=samples,
                    save=args.out if first else None,
                    progress=progress if first else None,
                )
        if first:
            table.save(args.out)
            _print(table, args.out)
    finally:
        dist.destroy_process_group()
    return 0


def _begin(args: argparse.Namespace, rw: Communicator) -> CostTable:
    """Return the table to go on with: what the first rank reads, on all."""
    from railwave.cost_table import CostTable, fingerprint
    from railwave.sched import Scales

    here = fingerprint(rw.config, rw.transport)
    table, wrong = CostTable(here, Scales(rails=rw.config.topo.rails_per_node)), ""
    if rw.rank == 0 and _goes_on(args):
        try:
            table = CostTable.load(args.out)
            table.check_fits(here)
        except (ValueError, OSError) as error:
            wrong = str(error)
    table, wrong = rw._gather((table, wrong))[0]
    if wrong:
        raise ValueError(wrong)
    return table


def _print(table: CostTable, out: str) -> None:
    from statistics import median

    from rich.console import Console
    from rich.table import Table

    from railwave.retention import fastest_other

    heads = ("MiB", "rho", "kappa", "joint ms", "best other ms", "joint / it", "verdict")
    shown = Table(*heads, title=f"{out}: every point, medians")
    anchors = {(a.payload_mib, a.rho, a.kappa): a.path for a in table.anchors}
    for point in table.points:
        path = anchors.get((point.payload_mib, point.rho, point.kappa))
        joint_us = median(point.samples_us["joint"])
        other = path or fastest_other(point.samples_us)
        beside = ("-", "-")
        if other:
            other_us = median(point.samples_us[other])
            beside = (f"{other} {other_us / 1e3:.2f}", f"{joint_us / other_us:.3f}")
        shown.add_row(
            f"{point.payload_mib:.3g}",
            f"{point.rho:.3g}",
            f"{point.kappa:.3g}",
            f"{joint_us / 1e3:.2f}",
            *beside,
            f"anchor: {path}; {point.verdict}" if path else f"rejected: {point.verdict}",
        )
    Console(width=100).print(shown)
    print(f"{len(table.anchors)} anchor(s) of {len(table.points)} point(s); elsewhere: joint")
