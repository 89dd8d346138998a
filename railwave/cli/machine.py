"""`railwave topo`: this node's GPUs and NICs; `railwave doctor`: whether dispatch will run here."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from railwave._check import check_fields, check_index, check_positive_int
from railwave._files import check_different
from railwave.cli.options import Help, add_verbose
from railwave.cli.output import check_writable, write_json
from railwave.discovery import SYSFS, Nic, Said

_LISTS = ("gpus", "ports", "used", "rail_of_gpu", "warnings")
_NODE = {**dict.fromkeys(_LISTS, list), "num_rails": int}
_PORT = {
    **dict.fromkeys(("name", "pci", "link_layer", "state"), str),
    **{"port": int, "numa": int, "rate_gbits": float},
}


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
        help="hosts of the job: several need a wire between them "
        "(default: WORLD_SIZE / LOCAL_WORLD_SIZE, or 1)",
    )
    _add_common(doctor)


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--sysfs",
        metavar="FOLDER",
        help=f"where sysfs is; another than /sys: a copy (default: {SYSFS})",
    )
    parser.add_argument("--json", metavar="FILE", help="write what is found there too")
    add_verbose(parser)


def _topo(args: argparse.Namespace) -> int:
    from railwave.discovery import discover
    from railwave.table import print_node

    if args.compare is not None:
        for option, value in (("--json", args.json), ("--sysfs", args.sysfs)):
            if value is not None:
                raise ValueError(f"{option} must be left out with --compare, got {value!r}")
        return _compare(args.compare)
    if args.json is not None:
        check_writable(args.json)
    node = discover(_sysfs(args))
    if args.json is not None:
        write_json(args.json, node.to_json())
    print_node(node)
    return 0


def _sysfs(args: argparse.Namespace) -> str:
    return SYSFS if args.sysfs is None else args.sysfs


def _compare(files: Sequence[str]) -> int:
    from railwave.discovery import differences, joined

    if len(files) < 2:
        raise ValueError(f"--compare must name two or more files, got {files}")
    check_different(files, "files of --compare")
    reports = {file: _read(file) for file in files}
    said = [one for file, report in reports.items() for one in _told(file, report)]
    try:
        joined(said)
    except ValueError as error:
        print(error)
        return 1
    texts = differences(said)
    if not any(one.ports for one in said):
        texts.append("no rail has a port: these nodes reach no other")
    texts += [f"{file}: {text}" for file, report in reports.items() for text in report["warnings"]]
    for text in texts:
        print(f"warning: {text}")
    print(f"the same map: {', '.join(files)}")
    return 0


def _told(file: str, report: dict[str, Any]) -> list[Said]:
    """Return what the ranks of a node, one a GPU, would say."""
    ports = [report["ports"][port] for port in report["used"]]
    rails, gpus = tuple(report["rail_of_gpu"]), len(report["gpus"])
    of_rails = tuple(Nic(**{field: port[field] for field in _PORT}) for port in ports)
    return [Said(file, gpus, report["num_rails"], rails, of_rails)] * gpus


def _read(file: str) -> dict[str, Any]:
    """Return what `topo --json` wrote of a node."""
    try:
        report = json.loads(Path(file).read_bytes())
        _check_node(report)
    except (TypeError, ValueError, ArithmeticError, RecursionError) as error:
        raise ValueError(
            f"--compare must name files that railwave topo --json wrote, got {file!r}: {error}"
        ) from None
    return report


def _check_node(report: Any) -> None:
    """Raise with the field, the rule and the value unless it is a node with GPUs."""
    check_fields(report, _NODE)
    gpus, ports, used, rails, warnings = (report[name] for name in _LISTS)
    for i, port in enumerate(ports):
        check_fields(port, _PORT, f"ports[{i}]")
        if port["rate_gbits"] < 0:
            raise ValueError(f"ports[{i}].rate_gbits must be at least 0, got {port['rate_gbits']}")
    for i, port in enumerate(used):
        check_index(port, len(ports), f"used[{i}]")
    if not gpus:
        raise ValueError("gpus must be one at least, got none")
    num_rails = len(used or gpus)
    if report["num_rails"] != num_rails:
        what = "used ports" if used else "gpus"
        raise ValueError(
            f"num_rails must be that of {what}, {num_rails}, got {report['num_rails']}"
        )
    for i, rail in enumerate(rails):
        check_index(rail, num_rails, f"rail_of_gpu[{i}]")
    if len(rails) != len(gpus) or len(set(rails)) != num_rails or len(set(used)) != len(used):
        raise ValueError(
            f"rail_of_gpu must give {len(gpus)} GPUs all of {num_rails} rails, each another port "
            f"in used, got {rails} and {used}"
        )
    if not all(isinstance(text, str) for text in warnings):
        raise TypeError(f"warnings must be texts, got {warnings!r:.60}")


def _doctor(args: argparse.Namespace) -> int:
    from railwave.doctor import examine, look
    from railwave.table import print_diagnosis

    if args.json is not None:
        check_writable(args.json)
    nodes = None if args.nodes is None else check_positive_int(args.nodes, "--nodes")
    diagnosis = examine(look(_sysfs(args), nodes=nodes))
    if args.json is not None:
        write_json(args.json, diagnosis.to_json())
    print_diagnosis(diagnosis)
    return 0 if diagnosis.runs else 1
