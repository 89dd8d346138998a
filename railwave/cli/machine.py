"""`railwave topo`: this node's GPUs and NICs; `railwave doctor`: whether dispatch will run here."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from railwave._check import check_positive_int
from railwave.cli.options import Help, add_verbose
from railwave.cli.output import check_writable, write_json
from railwave.discovery import SYSFS, Nic, Said


def add_commands(commands: argparse._SubParsersAction) -> None:
    """Add `topo` and `doctor`."""
    topo = commands.add_parser(
        "topo",
        help="show this node's GPUs and NIC ports, the rail of each GPU, NVSHMEM's variables",
        formatter_class=Help,
    )
    topo.set_defaults(command=_topo)
    topo.add_argument(
        "--compare",
        nargs="+",
        metavar="FILE",
        help="say whether nodes have the same map (exit code 0) or not (1), by what --json wrote "
        "on each; nothing is looked at here",
    )
    _add_common(topo)
    doctor = commands.add_parser(
        "doctor",
        help="say whether dispatch will run here (exit code 0) or not (1), and what to mend",
        formatter_class=Help,
    )
    doctor.set_defaults(command=_doctor)
    doctor.add_argument(
        "--nodes",
        type=int,
        metavar="N",
        help="of the job: several need a wire between them "
        "(default: WORLD_SIZE / LOCAL_WORLD_SIZE, or 1)",
    )
    _add_common(doctor)


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--sysfs", default=SYSFS, metavar="FOLDER", help="where sysfs is; another than /sys: a copy"
    )
    parser.add_argument("--json", metavar="FILE", help="write what is found there too")
    add_verbose(parser)


def _topo(args: argparse.Namespace) -> int:
    from railwave.discovery import discover
    from railwave.table import print_node

    if args.compare is not None:
        return _compare(args.compare)
    if args.json is not None:
        check_writable(args.json)
    node = discover(args.sysfs)
    if args.json is not None:
        write_json(args.json, node.to_json())
    print_node(node)
    return 0


def _compare(files: Sequence[str]) -> int:
    from railwave.discovery import joined, unlike

    if len(set(files)) < max(2, len(files)):
        raise ValueError(f"--compare must name two or more files, each once, got {files}")
    said = [one for file in files for one in _told(file)]
    try:
        joined(said)
    except ValueError as error:
        print(error)
        return 1
    for text in unlike(said):
        print(f"warning: {text}")
    print(f"the same map: {', '.join(files)}")
    return 0


def _told(file: str) -> list[Said]:
    """Return what the ranks of a node, one a GPU, would say, by what `topo --json` wrote there."""
    try:
        report = json.loads(Path(file).read_bytes())
        ports = tuple(Nic(**report["ports"][port]) for port in report["used"])
        rails, gpus = tuple(report["rail_of_gpu"]), len(report["gpus"])
        return [Said(file, gpus, report["num_rails"], rails, ports)] * max(1, gpus)
    except (LookupError, TypeError, ValueError) as error:
        raise ValueError(
            f"--compare must name files that railwave topo --json wrote, got {file!r}: {error!r}"
        ) from None


def _doctor(args: argparse.Namespace) -> int:
    from railwave.doctor import examine, look
    from railwave.table import print_diagnosis

    if args.json is not None:
        check_writable(args.json)
    nodes = None if args.nodes is None else check_positive_int(args.nodes, "--nodes")
    diagnosis = examine(look(args.sysfs, nodes=nodes))
    if args.json is not None:
        write_json(args.json, diagnosis.to_json())
    print_diagnosis(diagnosis)
    return 0 if diagnosis.runs else 1
