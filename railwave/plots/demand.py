"""Draw who sends how much to whom. Letters: N nodes."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from railwave.plots.style import BAR, MAX_TICKS, check_table, set_title

UNITS = {"records": 1, "MiB": 1 << 20, "GiB": 1 << 30}  # what an entry is divided by
_COLOURS = LinearSegmentedColormap.from_list("white to blue", ["#ffffff", BAR])


def plot_demand(demand: Any, *, unit: str = "records", title: str = "") -> Figure:
    """Draw a demand from node to node as a matrix, a number in each cell.

    Args:
        demand: (N, N) non-negative, from node (row) to node (column): `Demand.between_nodes`, for
            example. The diagonal is left out: what stays within a node crosses no rail.
        unit: "records" takes the entries as they are; "MiB" and "GiB" take them as bytes.
        title: a line above.

    Returns:
        Figure; `figure.savefig(...)` writes it.

    Raises:
        TypeError, ValueError: no such table, or another unit.

    Example:
        >>> figure = plot_demand([[9, 3], [1, 9]])
        >>> [text.get_text() for text in figure.axes[0].texts]
        ['3', '1']
    """
    if not isinstance(unit, str) or unit not in UNITS:
        raise ValueError(f"unit must be one of {list(UNITS)}, got {unit!r}")
    table = check_table(demand, "demand") / UNITS[unit]
    num_nodes = len(table)
    if table.shape[1] != num_nodes:
        raise ValueError(f"demand must be of shape (N, N), got {table.shape}")
    np.fill_diagonal(table, 0)  # of the copy: colours are scaled by what is masked, too
    shown = np.ma.masked_array(table, np.eye(num_nodes, dtype=bool))
    numbered = num_nodes <= MAX_TICKS
    side = min(9.0, 1.6 + 0.55 * num_nodes)
    figure = Figure(figsize=(side + 1.2, side), layout="constrained")
    axes = figure.subplots()
    axes.set_facecolor("#dddddd")  # the diagonal
    top = float(shown.max()) if num_nodes > 1 else 0.0
    image = axes.imshow(shown, cmap=_COLOURS, vmin=0, vmax=top or 1)
    figure.colorbar(image, ax=axes, label=unit, shrink=0.8)
    if numbered:
        for source, destination in np.argwhere(~np.eye(num_nodes, dtype=bool)).tolist():
            value = table[source, destination]
            colour = "white" if value > 0.7 * top else "black"
            text = f"{value:,.0f}" if unit == "records" else f"{value:.3g}"
            axes.text(destination, source, text, ha="center", va="center", color=colour)
        axes.set_xticks(range(num_nodes))
        axes.set_yticks(range(num_nodes))
    axes.set_xlabel("to node")
    axes.set_ylabel("from node")
    axes.tick_params(length=0)
    set_title(figure, title)
    return figure
