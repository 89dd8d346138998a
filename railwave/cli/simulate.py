"""`railwave simulate`: how long schedulers take for a demand, on a simulated cluster."""

from __future__ import annotations

import argparse
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from railwave._version import __version__
from railwave.cli.options import Help, add_rails, add_verbose, chosen_names, progress_bar, topology
from railwave.cli.output import check_writable, write_file, write_json

# torch comes with the package in any case, but what runs railwave --help need not load the rest.
if TYPE_CHECKING:
    from railwave.sched import Demand
    from railwave.sim import Fabric
    from railwave.simulation import Comparison
    from railwave.topology import Topology
    from railwave.workloads import Preset

INCAST_SENDERS = 3  # where mild and severe come from
PLOT_SUFFIXES = (".png", ".svg", ".pdf")
BITS_PER_BYTE = 8


SCHEDULER_HELP = """schedulers:
  native       rail of a GPU, all pairs of a window at once (DeepEP, NCCL)
  rail         the same, each node's bytes spread evenly over its rails
  permutation  rail of a GPU, cyclic waves: one sender a receiver
  joint        waves and even rails
  granted      even rails, receivers grant senders chunk by chunk (docs/granted.md)
  rails_lpt    RailS: chunks sprayed over rails, largest first, all at once (arXiv 2510.19262)
  fast         FAST: one-to-one stages made for this demand, which every node must know
  rate         senders paced so that no receiver is oversubscribed; likewise"""


class _Help(Help, argparse.RawDescriptionHelpFormatter):
    """Keep the lines of what stands below."""


def add_command(commands: argparse._SubParsersAction) -> None:
    """Add `simulate`."""
    parser = commands.add_parser(
        "simulate",
        help="time schedulers on a simulated cluster",
        formatter_class=_Help,
        epilog=SCHEDULER_HELP,
    )
    parser.set_defaults(command=_run)
    _add_demand(parser)
    _add_cluster(parser)
    _add_schedulers(parser)
    parser.add_argument("--json", metavar="FILE", help="write the rows there too")
    parser.add_argument("--plot", metavar="FILE", help="draw them: .png, .svg or .pdf")
    add_verbose(parser)


def _add_demand(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what is sent, one of")
    group.add_argument(
        "--workload",
        choices=[name for name in _SOURCES if name not in ("trace", "demand")],
        help="ring, permutation, and on 4 nodes moderate, extreme: the paper's replay of one layer "
        "of expert loads, in its windows; n28, n42, r28, r42: its traffic under UltraEP, 28 or 42 "
        "MiB times the GPUs, all into node 0, from uneven nodes (n) or rails (r); uniform, zipf, "
        "hot: made-up routing (default: extreme)",
    )
    group.add_argument("--trace", metavar="FOLDER", help="recorded counts, as for railwave replay")
    group.add_argument(
        "--demand",
        metavar="FILE",
        help=".npy or .csv, (ranks, ranks) whole bytes: a row a sender, a column a receiver, no "
        "header; what stays on a node is left out",
    )
    group = parser.add_argument_group("more about it")
    group.add_argument(
        "--loads",
        metavar="FILE",
        help="replay: .csv or .json, layers x experts, the whole records that every node sends to "
        "each expert (default: a made-up layer)",
    )
    group.add_argument("--layer", type=int, help="of the loads or the trace (default: 0)")
    group.add_argument("--iteration", type=int, help="of the trace")
    group.add_argument("--micro-batch", type=int, help="of the trace (default: 0)")
    group.add_argument("--hot-rails", type=int, help="r28, r42: rails that send (default: 2)")
    group.add_argument(
        "--tokens", type=int, help="routing: tokens of a GPU, at most (default: 1024)"
    )
    group.add_argument(
        "--experts",
        type=int,
        help="routing: experts of the cluster (default: 128, at least the GPUs)",
    )
    group.add_argument("--topk", type=int, help="routing: experts of a token (default: 8)")
    group.add_argument(
        "--source-skew",
        type=float,
        help="routing: 0 for as many tokens on each GPU, above for uneven rails (default: 0)",
    )
    group.add_argument("--expert-skew", type=float, help="zipf: 0 for even experts (default: 1)")
    group.add_argument(
        "--hot-share", type=float, help="hot: chance that an expert is a hot one (default: 0.3)"
    )
    group.add_argument("--hot-experts", type=int, help="hot: hot experts (default: 1)")
    group.add_argument(
        "--record-bytes",
        type=int,
        help="of a record, which is never divided (default: 14336; with --demand, 1)",
    )
    group.add_argument("--seed", type=int, default=0, help="the same seed gives the same run")


def _add_cluster(parser: argparse.ArgumentParser) -> None:
    from railwave.sim import INCAST
    from railwave.workloads import PRESETS

    group = parser.add_argument_group("the cluster")
    group.add_argument("--preset", choices=PRESETS, default="h800", help="where to start from")
    group.add_argument("--nodes", type=int, default=4, help="nodes of the cluster")
    group.add_argument("--gpus", type=int, default=8, help="GPUs of a node")
    add_rails(group, default="the preset's, but at most the GPUs")
    group.add_argument(
        "--gbps", type=float, help="Gb/s of a rail, each way (default: h800 200, h20 400)"
    )
    group.add_argument(
        "--nvlink-gbps",
        type=float,
        help="Gb/s of a GPU's NVLink, each way (default: h800 1600, h20 3600)",
    )
    group.add_argument(
        "--incast",
        type=_incast,
        default="none",
        metavar="{" + ",".join(INCAST) + ",A}",
        help="a receiver with f senders keeps 1 / (1 + a (f - 1)) of its rate: "
        + ", ".join(f"{name} a = {a:g}" for name, a in INCAST.items())
        + ", or a itself",
    )
    group.add_argument(
        "--wave-latency-us", type=float, default=0.0, help="added to each window that sends"
    )
    group.add_argument(
        "--grant-latency-us",
        type=float,
        default=0.0,
        help="added to each wave after the first; granted: the round trip of a grant",
    )


def _add_schedulers(parser: argparse.ArgumentParser) -> None:

    group = parser.add_argument_group("schedulers")
    group.add_argument(
        "--scheduler",
        action="append",
        metavar="NAME",
        help="names as below, or all; a comma list, or given again (default: all)",
    )
    group.add_argument(
        "--rail-rule",
        choices=("source", "destination"),
        default="source",
        help="native: whose GPU's rail is taken",
    )
    group.add_argument(
        "--chunk-bytes",
        type=int,
        help="rails_lpt: the largest chunk (default: 1 MiB, larger for very large demands)",
    )
    group.add_argument(
        "--outstanding",
        type=int,
        choices=(1, 2),
        default=2,
        help="granted: grants that a receiver may have out",
    )


def _run(args: argparse.Namespace) -> int:
    from railwave.sched import SCHEDULERS
    from railwave.simulation import compare_schedulers
    from railwave.table import print_comparison

    plot = _check_outputs(args)
    schedulers = chosen_names(args.scheduler, list(SCHEDULERS), "--scheduler")
    source = _source(args)
    _set_defaults(args, source)
    cluster = _cluster(args)
    fabric = _fabric(args, cluster)
    demand, windows = _SOURCES[source][0](args, cluster.topo)
    in_records = {"record_bytes": args.record_bytes}
    options = {
        "native": {"rail_rule": args.rail_rule},
        "rail": in_records,
        "joint": in_records,
        "granted": in_records | {"outstanding": args.outstanding},
        "rails_lpt": {"chunk_bytes": args.chunk_bytes},
    }
    how = {"schedulers": schedulers, "windows": windows, "options": options}
    with progress_bar(len(schedulers) + ("native" not in schedulers)) as progress:
        comparison = compare_schedulers(demand, fabric, progress=progress, **how)
    title = _title(args, source)
    picture = plot(comparison, title) if plot else None
    if args.json is not None:
        config = _config(args, source, schedulers)
        write_json(args.json, {**comparison.to_json(), "config": config})
    if picture is not None:
        write_file(args.plot, picture)
    print(title)
    if comparison.sent_bytes:
        print(f"{comparison.sent_bytes:,} bytes between nodes, T* {comparison.bound_us:,.1f} us")
        for note in _notes(args, comparison, cluster.topo, windows):
            print(note)
        print()
        print_comparison(comparison)
    else:
        print("nothing is sent between nodes: there is nothing to compare")
    if picture is not None:
        print(f"the picture is in {args.plot}")
    return 0


def _check_outputs(args: argparse.Namespace) -> Callable[[Comparison, str], bytes] | None:
    """Refuse files that cannot be written; return what draws the plot, if one is asked for."""
    if args.json is not None:
        check_writable(args.json)
    _check_apart(args)
    if args.plot is None:
        return None
    check_writable(args.plot, "--plot")
    suffix = Path(args.plot).suffix.lower()
    if suffix not in PLOT_SUFFIXES:
        raise ValueError(f"--plot must end in {', '.join(PLOT_SUFFIXES)}, got {args.plot!r}")
    try:
        from railwave.plots import plot_comparison
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install 'railwave[notebook]'") from None

    def draw(comparison: Comparison, title: str) -> bytes:
        file = io.BytesIO()
        figure = plot_comparison(comparison.to_json(), title=title)
        figure.savefig(file, format=suffix[1:], dpi=150)
        return file.getvalue()

    return draw


def _check_apart(args: argparse.Namespace) -> None:
    """Refuse to write one file over another, or over what is read."""
    files = {name: getattr(args, name) for name in ("json", "plot", "demand", "loads")}
    given = {name: os.path.realpath(file) for name, file in files.items() if file}
    for output in ("json", "plot"):
        for name, file in given.items():
            if name != output and given.get(output) == file:
                raise ValueError(f"--{output} must be another file than --{name}, got {file!r}")


# What is sent


def _source(args: argparse.Namespace) -> str:
    """Return the name in `_SOURCES` of what the demand is from, refusing a second one."""
    given = [name for name in ("workload", "trace", "demand") if getattr(args, name) is not None]
    if len(given) > 1:
        names = " and ".join(f"--{name}" for name in given)
        raise ValueError(f"one of --workload, --trace and --demand may be given, got {names}")
    if given in (["trace"], ["demand"]):
        return given[0]
    return args.workload or "extreme"


def _set_defaults(args: argparse.Namespace, source: str) -> None:
    """Fill in the options that the source reads, refusing others that were given."""
    _, defaults = _SOURCES[source]
    own = "--" + source if source in ("trace", "demand") else f"--workload {source}"
    for option in {option for _, options in _SOURCES.values() for option in options}:
        value = getattr(args, option)
        if option in defaults:
            setattr(args, option, defaults[option] if value is None else value)
        elif value is not None:
            readers = [name for name, (_, options) in _SOURCES.items() if option in options]
            raise ValueError(f"{_flag(option)} must go with one of {', '.join(readers)}, got {own}")


def _replay(args: argparse.Namespace, topo: Topology) -> tuple[Demand, Any]:
    from railwave._check import check_index
    from railwave.workloads import read_loads, replay, standin_loads

    loads = standin_loads(seed=args.seed) if args.loads is None else read_loads(args.loads)
    counts = loads[check_index(args.layer, len(loads), "--layer")]
    replayed = replay(args.workload or "extreme", counts, topo, record_bytes=args.record_bytes)
    return replayed.demand, replayed.windows


def _ultraep(args: argparse.Namespace, topo: Topology) -> tuple[Demand, Any]:
    from railwave.workloads import ultraep_demand

    case, how = args.workload.upper(), {"record_bytes": args.record_bytes}
    if args.hot_rails is not None:
        how["hot_rails"] = args.hot_rails
    return ultraep_demand(case, topo, **how), None


def _routing(args: argparse.Namespace, topo: Topology) -> tuple[Demand, Any]:
    from railwave.workloads import demand_from_routing, hot_routing, zipf_routing

    if args.experts is None:
        args.experts = max(128, topo.num_ranks)
    sizes = (topo.num_ranks, args.tokens, args.experts, args.topk)
    how = {"gpus_per_node": topo.gpus_per_node, "source_skew": args.source_skew, "seed": args.seed}
    if args.workload == "hot":
        routing = hot_routing(*sizes, hot_share=args.hot_share, hot_experts=args.hot_experts, **how)
    else:
        # Uniform is Zipf without skew.
        routing = zipf_routing(*sizes, expert_skew=args.expert_skew or 0.0, **how)
    units = {"num_experts": args.experts, "record_bytes": args.record_bytes}
    return demand_from_routing(routing.topk_idx, topo, **units), None


def _trace(args: argparse.Namespace, topo: Topology) -> tuple[Demand, Any]:
    from railwave.workloads import list_iterations, trace_demand

    if args.iteration is None:
        raise ValueError(
            f"--iteration must be given with --trace, one of {list_iterations(args.trace)}"
        )
    place = (args.trace, args.iteration, args.layer, topo)
    how = {"micro_batch": args.micro_batch, "record_bytes": args.record_bytes}
    return trace_demand(*place, **how), None


def _demand(args: argparse.Namespace, topo: Topology) -> tuple[Demand, Any]:
    from railwave.workloads import read_demand

    return read_demand(args.demand, topo), None


_RECORD = {"record_bytes": 14336}  # as railwave.workloads.RECORD_BYTES, which a test checks
_OF_REPLAY = {"loads": None, "layer": 0} | _RECORD
_OF_ROUTING = {"tokens": 1024, "experts": None, "topk": 8, "source_skew": 0.0} | _RECORD

# What makes each demand, and the options that it reads with their defaults.
_SOURCES: dict[str, tuple[Callable[..., tuple[Demand, Any]], dict[str, Any]]] = {
    **{name: (_replay, _OF_REPLAY) for name in ("ring", "moderate", "extreme", "permutation")},
    **{name: (_ultraep, _RECORD) for name in ("n28", "n42")},
    **{name: (_ultraep, {"hot_rails": 2} | _RECORD) for name in ("r28", "r42")},
    "uniform": (_routing, _OF_ROUTING),
    "zipf": (_routing, {"expert_skew": 1.0} | _OF_ROUTING),
    "hot": (_routing, {"hot_share": 0.3, "hot_experts": 1} | _OF_ROUTING),
    "trace": (_trace, {"trace": None, "iteration": None, "layer": 0, "micro_batch": 0} | _RECORD),
    "demand": (_demand, {"demand": None, "record_bytes": 1}),
}


# The cluster


def _cluster(args: argparse.Namespace) -> Preset:
    """Return the preset with what was asked for changed, and note in `args` what it then has."""
    from railwave.workloads import Preset, preset

    base = preset(args.preset)
    rails = min(base.topo.rails_per_node, args.gpus) if args.rails is None else args.rails
    topo = topology(args.nodes, args.gpus, rails)
    args.rails = topo.rails_per_node
    if isinstance(rails, tuple):
        args.rail_of_gpu = list(rails)
    for name, rate in (("gbps", base.rail_gbytes_s), ("nvlink_gbps", base.nvlink_gbytes_s)):
        value = getattr(args, name)
        if value is not None and not 1e-6 <= value <= 1e9:
            raise ValueError(f"{_flag(name)} must be in [1e-06, 1e+09] Gb/s, got {value}")
        setattr(args, name, rate * BITS_PER_BYTE if value is None else value)
    return Preset(topo, args.gbps / BITS_PER_BYTE, args.nvlink_gbps / BITS_PER_BYTE)


def _fabric(args: argparse.Namespace, cluster: Preset) -> Fabric:
    from railwave.sim import INCAST, Fabric

    for name in ("wave_latency_us", "grant_latency_us"):
        value = getattr(args, name)
        if not 0 <= value <= 1e12:
            raise ValueError(f"{_flag(name)} must be in [0, 1e+12] us, got {value}")
    incast = INCAST[args.incast] if args.incast in INCAST else float(args.incast)
    return Fabric(
        cluster.rail_gbytes_s * 1e9,
        nvlink_bytes_s=cluster.nvlink_gbytes_s * 1e9,
        wave_latency_s=args.wave_latency_us / 1e6,
        grant_latency_s=args.grant_latency_us / 1e6,
        incast=incast,
    )


def _incast(text: str) -> str:
    """Check the name of an incast model, or its number a; return it."""
    from railwave.sim import INCAST

    if text not in INCAST and not 0 <= float(text) <= 1e6:
        raise ValueError
    return text


_incast.__name__ = "incast"  # argparse names the type in its message


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


# What is said


def _title(args: argparse.Namespace, source: str) -> str:
    """Say what is sent and on which cluster."""
    given = {option: getattr(args, option) for option in _SOURCES[source][1]}
    parts = [
        f"{name.replace('_', ' ')} {value}" if name != source else str(value)
        for name, value in given.items()
        if value is not None
    ]
    return (
        f"{source}: {', '.join(parts)}\n"
        f"{args.nodes} x {args.gpus} GPUs, {args.rails} rails of {args.gbps:g} Gb/s, "
        f"NVLink {args.nvlink_gbps:g} Gb/s a GPU, incast {_incast_text(args.incast)}"
    )


def _incast_text(incast: str) -> str:
    from railwave.sim import INCAST

    return f"{incast} (a = {INCAST[incast]:g})" if incast in INCAST else f"a = {incast}"


def _notes(
    args: argparse.Namespace, comparison: Comparison, topo: Topology, windows: Any
) -> list[str]:
    """Say what of the run's assumptions a reader might take for a result."""
    notes = []
    if windows:
        notes.append(
            f"native and rail send in the {len(windows)} window(s) of the workload, in turn; the "
            "others choose their own"
        )
    senders = max(row.fan_in for row in comparison.rows)
    if args.incast != "none" and senders > INCAST_SENDERS:
        notes.append(
            f"incast was read off results with {INCAST_SENDERS} senders; here up to {senders} send "
            "at once, which nobody measured"
        )
    empty = sum(not gpus for gpus in topo.gpus_of_rail)
    if empty:
        notes.append(f"{empty} of {topo.rails_per_node} rails have no GPU: they carry nothing")
    return notes


def _config(args: argparse.Namespace, source: str, schedulers: list[str]) -> dict[str, Any]:
    """Return what the run can be repeated from: the options that it read, as resolved."""
    unread = {option for _, options in _SOURCES.values() for option in options}
    unread -= set(_SOURCES[source][1])
    left_out = {*unread, "json", "plot", "verbose", "command", "workload", "scheduler"}
    config = {name: value for name, value in vars(args).items() if name not in left_out}
    return {"workload": source, **config, "scheduler": schedulers, "version": __version__}
