"""`railwave topo`: this node's GPUs and NICs; `railwave doctor`: whether dispatch will run here."""

from __future__ import annotations

import argparse

from railwave._check import check_positive_int
from railwave.cli.options import Help, add_verbose
from railwave.cli.output import check_writable, write_json
from railwave.discovery import SYSFS


def add_commands(commands: argparse._SubParsersAction) -> None:
    """Add `topo` and `doctor`."""
    topo = commands.add_parser(
        "topo",
        help="show this node's GPUs and NIC ports, the rail of each GPU, NVSHMEM's variables",
        formatter_class=Help,
    )
    topo.set_defaults(command=_topo)
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

    if args.json is not None:
        check_writable(args.json)
    node = discover(args.sysfs)
    if args.json is not None:
        write_json(args.json, node.to_json())
    print_node(node)
    return 0


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
