"""`railwave select`: explain one decision of a cost table."""

from __future__ import annotations

import argparse
import math
import os
from typing import Any

from railwave._files import check_different
from railwave.cli.options import Help, add_verbose
from railwave.cli.output import check_writable, write_json


def add_command(commands: Any) -> None:
    """Add the command to the program's."""
    parser = commands.add_parser(
        "select", help="say which path a cost table chooses, and why", formatter_class=Help
    )
    parser.set_defaults(command=_select)
    parser.add_argument("--table", required=True, metavar="FILE", help="as calibrate writes it")
    parser.add_argument(
        "--payload-mib",
        type=float,
        required=True,
        metavar="B",
        help="mean bytes that a GPU sends to other nodes, in MiB",
    )
    parser.add_argument(
        "--rho", type=float, default=1.0, help="load of the busiest rail of any node over the mean"
    )
    parser.add_argument(
        "--kappa", type=float, default=1.0, help="load of the busiest receiver over the mean"
    )
    parser.add_argument("--json", metavar="FILE", help="write the decision there too")
    add_verbose(parser)


def _select(args: argparse.Namespace) -> int:
    from railwave.cost_table import CostTable
    from railwave.sched.selector import MIB, MIB_RANGE

    if args.json is not None:
        check_writable(args.json)
        if os.path.exists(args.json):
            check_different([args.table, args.json], "--table and --json")
    for option, value, least in (
        *(("--payload-mib", args.payload_mib, 0), ("--rho", args.rho, 1)),
        ("--kappa", args.kappa, 1),
    ):
        if not (math.isfinite(value) and value >= least):
            raise ValueError(f"{option} must be finite and at least {least}, got {value}")
    low, high = MIB_RANGE
    if args.payload_mib and not low <= args.payload_mib <= high:
        raise ValueError(
            f"--payload-mib must be 0 or in [{low:g}, {high:g}], got {args.payload_mib}"
        )
    table = CostTable.load(args.table)
    traffic = {"rho": args.rho, "kappa": args.kappa}
    decision = table.select(payload_bytes=args.payload_mib * MIB, **traffic)
    print(decision.path)
    print(f"  {decision.reason}")
    if decision.distance is not None:
        print(f"  distance {decision.distance:.4g}, in features: {_features(table, args)}")
    print(f"  the table is of {dict(table.fingerprint)}")
    if args.json is not None:
        write_json(args.json, vars(decision))
    return 0


def _features(table: Any, args: argparse.Namespace) -> str:
    x = table.scales.features(args.payload_mib, args.rho, args.kappa)
    return "payload {:.4g}, rho {:.4g}, kappa {:.4g}".format(*x)
