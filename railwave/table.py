"""Show paths of a report, or schedulers of a simulation, to a reader, and their rails as bars.

And what a node has, and what a doctor found.

Letters: R rails.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from railwave.discovery import LINK_MEANING, Node
from railwave.simulation import Comparison, Row

if TYPE_CHECKING:
    from railwave.doctor import Diagnosis
    from railwave.report import Report

WIDTH = 100  # columns, where the output is not a terminal; a narrower one leaves out the ranges
_BARS = "▁▂▃▄▅▆▇█"
_DIGITS = "12345678"  # the same heights, for an output that cannot show the bars
_MAX_RANGED = 8  # rails beside whose bars there is room for their range
_MAX_BARS = 16  # rails that there is room for
_COMPARISON_LEGEND = (
    "speedup: over native. T*: no schedule ends sooner, whatever moves over NVLink. algbw: bytes",
    "between nodes / (GPUs x time); busbw: x (GPUs - 1) / GPUs. plan: one process, for all nodes",
    "rails: each rail's part of all bytes sent; rho_g: busiest rail of any node / mean over all;",
    "fan-in: the most nodes that send to one NIC at the same time",
)


def print_report(report: Report, *, seconds: float) -> None:
    """Print the table of paths and what was verified.

    Args:
        report: what to show.
        seconds: of the whole run.
    """
    console = _console()
    console.print(_table(report, console))
    for line in [*_legend(report), *_verdict(report, seconds)]:
        console.print(line, markup=False)


def print_comparison(comparison: Comparison) -> None:
    """Print a table of times and one of rails, each with a row per scheduler."""
    console = _console()
    console.print(_times(comparison.rows))
    console.print()
    console.print(_shares(comparison.rows, _levels(console)))
    for line in _COMPARISON_LEGEND:
        console.print(line, markup=False)


def print_node(node: Node) -> None:
    """Print GPUs by ports, the ports, the rail of each GPU, warnings, and variables to export."""
    console = _console()
    if node.gpus:
        for table in _gpus(node, console.width):
            console.print(table)
            console.print()
    if node.ports:
        console.print(_ports(node))
        console.print()
    counts = {"GPU": len(node.gpus), "port": len(node.ports), "rail": node.num_rails}
    lines = [", ".join(f"{n} {what}{'s' * (n != 1)}" for what, n in counts.items())]
    if node.gpus and node.ports:
        links = "; ".join(f"{link}: {meaning}" for link, meaning in LINK_MEANING.items())
        lines.append(f"*: the port that the GPU uses. {links}")
    for line in [*lines, *(f"warning: {text}" for text in node.warnings)]:
        console.print(line, markup=False)
    for line in _exports(node):  # to be copied: never broken
        console.print(line, markup=False, soft_wrap=True)


def print_diagnosis(diagnosis: Diagnosis) -> None:
    """Print each finding with its mend, and the verdict."""
    console = _console()
    table = _empty_table()
    for name in ("", "what"):
        table.add_column(name, no_wrap=True)
    table.add_column("found, and what to do", overflow="fold")
    styles = {"ok": "green", "warning": "yellow", "error": "bold red"}
    for finding in diagnosis.findings:
        said = escape(finding.found + (f"\n-> {finding.mend}" if finding.mend else ""))
        status = f"[{styles[finding.status]}]{finding.status}[/]"
        table.add_row(status, escape(finding.name), said)
    console.print(table)
    console.print(diagnosis.verdict, markup=False, soft_wrap=True)


def _gpus(node: Node, width: int) -> Iterator[Table]:
    """Make tables of GPUs by ports, each of as many ports as there is room for."""
    numa = ["?" if gpu.numa < 0 else str(gpu.numa) for gpu in node.gpus]
    columns = [
        ("GPU", [str(gpu.index) for gpu in node.gpus]),
        ("name", [escape(gpu.name) for gpu in node.gpus]),
        ("PCI", [gpu.pci for gpu in node.gpus]),
        ("NUMA", numa),
        ("rail", [str(rail) for rail in node.rail_of_gpu]),
    ]
    far = [
        (f"P{port}", [_link(node, gpu, port) for gpu in range(len(node.gpus))])
        for port in range(len(node.ports))
    ]
    while True:
        room = width - sum(max(map(len, (name, *cells))) + 1 for name, cells in columns)
        shown = max(1, room // (len("NODE*") + 1))
        table = _empty_table()
        for name, _ in [*columns, *far[:shown]]:
            table.add_column(name, no_wrap=name != "name", overflow="fold")
        for cells in zip(*(cells for _, cells in [*columns, *far[:shown]]), strict=True):
            table.add_row(*cells)
        yield table
        columns, far = columns[:1], far[shown:]
        if not far:
            return


def _link(node: Node, gpu: int, port: int) -> str:
    own = node.used[node.rail_of_gpu[gpu]] if node.used else -1
    return node.distance[gpu][port].link + "*" * (port == own)


def _ports(node: Node) -> Table:
    table = _empty_table()
    for name in ("port", "NIC", "PCI", "NUMA", "link layer", "state", "Gb/s", "rail", "GPUs"):
        table.add_column(name, no_wrap=True)
    for index, port in enumerate(node.ports):
        rail = node.used.index(index) if index in node.used else -1
        gpus = [str(gpu) for gpu, own in enumerate(node.rail_of_gpu) if own == rail]
        table.add_row(
            *(f"P{index}", escape(port.label), port.pci or "virtual"),
            "?" if port.numa < 0 else str(port.numa),
            *(escape(port.link_layer), escape(port.state), port.rate_text),
            *(("-", "") if rail < 0 else (str(rail), ", ".join(gpus))),
        )
    return table


def _exports(node: Node) -> list[str]:
    """Return what a shell, or each of several, must be told."""
    if not node.gpus:
        return [
            "no GPU: nothing to export, as expected on a machine without one; --sysfs reads a copy "
            "of another's"
        ]

    def of(environment: dict[str, str]) -> list[str]:
        return [f"export {name}={value}" for name, value in environment.items()]

    alone = of(node.environment(nodes=1))
    if not node.used:
        return ["# for this node alone:", *alone]
    lines = ["# for several nodes like this one, a process a GPU (for one alone, in their place:"]
    lines.append(f"# {alone[0]})")
    if node.in_order:
        return lines + of(node.environment())
    for gpu in range(len(node.gpus)):
        lines += [f"# the process of GPU {gpu}:", *of(node.environment(gpu=gpu))]
    return lines


def _console() -> Console:
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDTH
    return console


def _levels(console: Console) -> str:
    return _BARS if console.encoding.startswith("utf") else _DIGITS


def _empty_table() -> Table:
    return Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))


def _times(rows: Sequence[Row]) -> Table:
    table = _empty_table()
    table.add_column("scheduler", no_wrap=True)
    for name in ("time us", "speedup", "time / T*", "algbw GB/s", "busbw GB/s", "plan us"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.scheduler,
            f"{row.time_us:,.1f}",
            f"{row.speedup:.2f}",
            f"{row.ratio_to_bound:.3f}",
            f"{row.algbw_gbs:.2f}",
            f"{row.busbw_gbs:.2f}",
            f"{row.plan_us:,.0f}",
        )
    return table


def _shares(rows: Sequence[Row], levels: str) -> Table:
    num_rails = len(rows[0].rail_share)
    top = max(max(row.rail_share) for row in rows)
    table = _empty_table()
    for name in ("scheduler", "rails"):
        table.add_column(name, no_wrap=True)
    numbered = num_rails <= _MAX_RANGED
    names = [f"{rail} %" for rail in range(num_rails)] if numbered else ["least %", "most %"]
    for name in (*names, "rho_g", "fan-in"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        bars = _rails(row.rail_share, top=top, levels=levels, with_range=False)
        shares = row.rail_share if numbered else (min(row.rail_share), max(row.rail_share))
        percent = [f"{100 * share:.1f}" for share in shares]
        table.add_row(row.scheduler, bars, *percent, f"{row.rho_g:.2f}", str(row.fan_in))
    return table


def _table(report: Report, console: Console) -> Table:
    table = _empty_table()
    rails = f"share per rail, node {report.paths[0].hot_node}\nbefore -> after"
    for name in ("path", "verified", rails):
        table.add_column(name, no_wrap=True, vertical="bottom")
    for name in ("quota\nspread", "rho_g", "kappa", "fan-in", "relocated"):
        table.add_column(name, justify="right", overflow="fold", vertical="bottom")
    top = max(max(path.rail_share + path.rail_share_before) for path in report.paths)
    style = {
        "top": top,
        "levels": _levels(console),
        "with_range": console.width >= WIDTH,
    }
    for path in report.paths:
        before, after = (_rails(s, **style) for s in (path.rail_share_before, path.rail_share))
        table.add_row(
            path.path,
            "[green]yes[/]" if path.verified else "[bold red]NO[/]",
            f"{before} -> {after}",
            f"{path.quota_spread:,}",
            f"{path.rho_g:#.4g}",
            f"{path.kappa:#.4g}",
            str(path.max_fan_in),
            f"{path.relocated:,}",
        )
    return table


def _rails(shares: Sequence[float], *, top: float, levels: str, with_range: bool) -> str:
    """Draw (R,) shares as one bar a rail, the highest for `top`, and their range in percent.

    Example:
        >>> _rails([0.75, 0.25, 0.0], top=0.75, levels="12345678", with_range=True)
        '83. 0-75 %'
    """
    low, high = f"{min(shares) * 100:.0f}", f"{max(shares) * 100:.0f}"
    extent = f"{low}-{high} %" if low != high else f"{high} %"
    if len(shares) > _MAX_BARS:
        return extent
    bars = "".join(
        levels[max(round(share / top * len(levels)), 1) - 1] if share else "." for share in shares
    )
    return f"{bars} {extent}" if with_range and len(shares) <= _MAX_RANGED else bars


def _legend(report: Report) -> list[str]:
    return [
        f"bars: the rails of node {report.paths[0].hot_node}, which has the most loaded one: "
        "shares by the owners' rails -> as put",
        "rho_g: busiest rail of any node / mean over all; above 1 too where nodes send unequal "
        "amounts",
        "kappa: busiest receiving node of a window / mean; waves leave it, they lower fan-in: the "
        "most",
        "nodes sending to one rail of a node at the same time. quota spread, relocated: in records",
    ]


def _verdict(report: Report, seconds: float) -> list[str]:
    bad = [path for path in report.paths if not path.verified]
    if bad:
        return ["NOT VERIFIED: " + "; ".join(f"{path.path} ({path.mismatch})" for path in bad)]
    put_bytes = sorted({path.put_bytes for path in report.paths})
    return [
        f"Verified bit for bit against a dense reference, per path: {report.num_rows:,} rows and "
        f"{sum(report.case.num_tokens):,} sums,",
        f"{' or '.join(f'{b:,}' for b in put_bytes)} bytes between nodes; {seconds:.0f} s in all.",
    ]
