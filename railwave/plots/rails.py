"""Draw how a node's traffic lies on its rails, before and after. Letters: N nodes, R rails."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from railwave.plots.style import EVEN, MAX_LANES, MAX_TICKS, SERIES, check_table, literal, set_title

_PER_LINE = 4  # panels


def plot_rail_shares(loads: Mapping[str, Any], *, title: str = "") -> Figure:
    """Draw what part of each node's traffic each rail carries: a panel a node, a colour a series.

    Args:
        loads: by name, such as native and joint, (N, R) bytes or records that each node puts on
            each rail: `Stats.rail_bytes()`, `Traffic.rail_bytes()`, `Result.sent_bytes`, or quotas
            summed. At most 6; the first is drawn in grey. A node's shares are of its own sum, zeros
            if it sends nothing.
        title: a line above.

    Returns:
        Figure; `figure.savefig(...)` writes it.

    Raises:
        TypeError, ValueError: no tables, too many, or not such tables of one shape.

    Source: Figure 8.

    Example:
        >>> figure = plot_rail_shares({"native": [[4, 0]], "joint": [[2, 2]]})
        >>> [float(bar.get_height()) for bar in figure.axes[0].patches]
        [100.0, 0.0, 50.0, 50.0]
    """
    if not isinstance(loads, Mapping):
        raise TypeError(f"loads must be tables by name, got {type(loads).__name__}")
    tables = {name: check_table(table, f"loads[{name!r}]") for name, table in loads.items()}
    shapes = {table.shape for table in tables.values()}
    if not 1 <= len(tables) <= len(SERIES) or len(shapes) > 1:
        raise ValueError(
            f"loads must be 1 to {len(SERIES)} tables of one shape, got "
            f"{ {name: table.shape for name, table in tables.items()} }"
        )
    num_nodes, _ = shapes.pop()
    if num_nodes > MAX_LANES:
        raise ValueError(f"loads must be of at most {MAX_LANES} nodes, got {num_nodes}")
    shares = {name: _percent(table) for name, table in tables.items()}
    lines, per_line = -(-num_nodes // _PER_LINE), min(num_nodes, _PER_LINE)
    figure = Figure(figsize=(max(4.0, 2.3 * per_line), 0.6 + 2.1 * lines), layout="constrained")
    panels = figure.subplots(lines, per_line, sharex=True, sharey=True, squeeze=False)
    for node, axes in enumerate(panels.flat):
        if node < num_nodes:
            _draw_node(axes, {name: share[node] for name, share in shares.items()})
            axes.set_title(f"node {node}", fontsize="small")
        else:
            axes.set_visible(False)
    for axes in panels[:, 0]:
        axes.set_ylabel("share (%)")
    first = panels[0, 0]
    names = [*shares, first.lines[0].get_label()]
    legend = figure.legend(
        [*first.containers, first.lines[0]],
        ["name"] * len(names),  # matplotlib leaves out names that begin with _
        loc="outside lower center",
        ncols=len(names),
        frameon=False,
    )
    for text, name in zip(legend.get_texts(), names, strict=True):
        text.set_text(literal(str(name), "name"))
    set_title(figure, title)
    return figure


def _percent(table: np.ndarray) -> np.ndarray:
    """Return what part of its row's sum each entry is, however small or large they are.

    Example:
        >>> _percent(np.array([[1e308, 1e308], [0, 0]])).tolist()
        [[50.0, 50.0], [0.0, 0.0]]
    """
    _, power = np.frexp(table.max(axis=1, keepdims=True))
    scaled = np.ldexp(table, -power)
    return 100 * scaled / np.maximum(scaled.sum(axis=1, keepdims=True), np.finfo(float).tiny)


def _draw_node(axes: Axes, shares: Mapping[str, np.ndarray]) -> None:
    """Draw (R,) percent of each series as a group of bars a rail."""
    width = 0.8 / len(shares)
    for place, (share, colour) in enumerate(zip(shares.values(), SERIES, strict=False)):
        x = np.arange(len(share)) + (place - (len(shares) - 1) / 2) * width
        axes.bar(x, share, width, color=colour)
    num_rails = len(next(iter(shares.values())))
    even = 100 / num_rails
    axes.axhline(even, color=EVEN, linewidth=0.8, linestyle="dotted", label=f"even: {even:.3g} %")
    axes.set_xlabel("rail")
    if num_rails <= MAX_TICKS:
        axes.set_xticks(range(num_rails))
    axes.spines[["top", "right"]].set_visible(False)
