"""Draw how long schedulers take and which rails they use. Letters: S schedulers, R rails."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from railwave.plots.style import (
    BAR,
    BOUND,
    EVEN,
    MAX_TICKS,
    check_entries,
    check_number,
    check_numbers,
    check_row,
    literal,
    said,
    set_title,
)

_BAR_HEIGHT = 0.66
LOG_FROM = 20  # times T*: beyond, a linear axis would hide the short bars
_LOG_TO = 1e100  # times T*, and ms: matplotlib overflows where a log axis has its ticks


def plot_comparison(comparison: Mapping[str, Any], *, title: str = "") -> Figure:
    """Draw each scheduler's time beside T*, and its rails' shares of the bytes sent.

    Args:
        comparison: what `Comparison.to_json` returns, or `json.load` of a file that `railwave
            simulate --json` wrote: "bound_us" and, in "rows", "scheduler", "time_us", "speedup" and
            "rail_share" (R,).
        title: a line above.

    Returns:
        Figure; `figure.savefig(...)` writes it.

    Raises:
        TypeError, ValueError: an entry is missing, or not as above; no rows.

    Example:
        >>> row = {"scheduler": "joint", "time_us": 4.0, "speedup": 2.0, "rail_share": [0.5, 0.5]}
        >>> figure = plot_comparison({"bound_us": 4.0, "rows": [row]})
        >>> len(figure.axes)
        2
    """
    comparison = check_entries(comparison, ("bound_us", "rows"), "comparison")
    bound_us = check_number(comparison["bound_us"], "comparison['bound_us']", least=0)
    rows = _checked(comparison["rows"])
    figure = Figure(figsize=(10, 1.7 + 0.5 * len(rows)), layout="constrained")
    times, shares = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    _draw_times(times, rows, bound_us)
    _draw_shares(shares, rows)
    times.set_yticks(range(len(rows)), [literal(row["scheduler"], "name") for row in rows])
    times.set_ylim(len(rows) - 0.5, -0.5)  # the first row on top
    for axes in (times, shares):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
    set_title(figure, title)
    return figure


def _checked(rows: Any) -> list[dict[str, Any]]:
    """Return the rows with plain numbers."""
    checked = []
    for number, row in enumerate(check_row(rows, "comparison['rows']", "rows")):
        at = f"comparison['rows'][{number}]"
        row = check_entries(row, ("scheduler", "time_us", "speedup", "rail_share"), at)
        if not isinstance(row["scheduler"], str):
            raise TypeError(f"{at}['scheduler'] must be a str, got {said(row['scheduler'])}")
        numbers = {
            name: check_number(row[name], f"{at}['{name}']", least=0)
            for name in ("time_us", "speedup")
        }
        share = check_numbers(row["rail_share"], f"{at}['rail_share']", least=0)
        num_rails = len(checked[0]["rail_share"]) if checked else max(1, len(share))
        if len(share) != num_rails:
            raise ValueError(
                f"{at}['rail_share'] must have a number for each of the same rails, at least one, "
                f"got {len(share)}{f', row 0 has {num_rails}' if checked else ''}"
            )
        checked.append({"scheduler": row["scheduler"], **numbers, "rail_share": share})
    if not checked:
        raise ValueError("comparison must have at least one row, got none")
    return checked


def _draw_times(axes: Axes, rows: Any, bound_us: float) -> None:
    times_ms = [row["time_us"] / 1e3 for row in rows]
    bars = axes.barh(range(len(rows)), times_ms, _BAR_HEIGHT, color=BAR)
    labels = [f"{t:,.2f} ms, {row['speedup']:.2f}×" for t, row in zip(times_ms, rows, strict=True)]
    axes.bar_label(bars, labels, padding=4, fontsize="small")
    bound_ms = bound_us / 1e3
    axes.axvline(bound_ms, color=BOUND, linewidth=1.5)
    axes.annotate(
        f"T*, no schedule is faster: {bound_ms:,.2f} ms",
        (bound_ms, 1),
        xycoords=("data", "axes fraction"),
        xytext=(0, 3),
        textcoords="offset points",
        color=BOUND,
        ha="left",
        fontsize="small",
    )
    axes.set_xlabel("time (ms), and speedup over native")
    longest = max(*times_ms, bound_ms)
    if LOG_FROM * bound_ms < longest < _LOG_TO * min(bound_ms, 1):
        axes.set_xscale("log")
        axes.set_xlabel("time (ms, log scale), and speedup over native")
        axes.set_xlim(bound_ms / 2, bound_ms * (longest / bound_ms) ** 1.4)
    else:
        axes.set_xlim(0, 1.3 * longest or 1)  # room for the labels


def _draw_shares(axes: Axes, rows: Any) -> None:
    num_rails = len(rows[0]["rail_share"])
    top = max(max(row["rail_share"]) for row in rows) or 1
    for place, row in enumerate(rows):
        base = place + _BAR_HEIGHT / 2
        heights = [-_BAR_HEIGHT * share / top for share in row["rail_share"]]  # y points down
        axes.bar(range(num_rails), heights, 0.8, bottom=base, color=BAR)
        axes.axhline(base, color=EVEN, linewidth=0.5)
        even = base - _BAR_HEIGHT / num_rails / top
        axes.axhline(even, color=EVEN, linewidth=0.8, linestyle="dotted")
        axes.annotate(
            f"max {100 * max(row['rail_share']):.1f} %",
            (1.01, place),
            xycoords=("axes fraction", "data"),
            va="center",
            fontsize="small",
            annotation_clip=False,
        )
    axes.set_title("rails' shares of the bytes sent (dotted: even)", loc="left", fontsize="small")
    axes.set_xlabel("rail")
    if num_rails <= MAX_TICKS:
        axes.set_xticks(range(num_rails))
