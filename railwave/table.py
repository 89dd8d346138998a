"""Show a report to a reader: one row per path, with the rails before and after as small bars.

Letters: R rails.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from railwave.report import Report

WIDTH = 100  # columns, where the output is not a terminal; a narrower one leaves out the ranges
_BARS = "▁▂▃▄▅▆▇█"
_DIGITS = "12345678"  # the same heights, for an output that cannot show the bars
_MAX_RANGED = 8  # rails beside whose bars there is room for their range
_MAX_BARS = 16  # rails that there is room for


def print_report(report: Report, *, seconds: float) -> None:
    """Print the table of paths and what was verified.

    Args:
        report: what to show.
        seconds: of the whole run.
    """
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDTH
    console.print(_table(report, console))
    for line in [*_legend(report), *_verdict(report, seconds)]:
        console.print(line, markup=False)


def _table(report: Report, console: Console) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    rails = f"share per rail, node {report.paths[0].hot_node}\nbefore -> after"
    for name in ("path", "verified", rails):
        table.add_column(name, no_wrap=True, vertical="bottom")
    for name in ("quota\nspread", "rho_g", "kappa", "fan-in", "relocated"):
        table.add_column(name, justify="right", overflow="fold", vertical="bottom")
    top = max(max(path.rail_share + path.rail_share_before) for path in report.paths)
    style = {
        "top": top,
        "levels": _BARS if console.encoding.startswith("utf") else _DIGITS,
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
