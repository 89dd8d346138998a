"""What the pictures share: colours that the colour-blind tell apart, titles, checked tables."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.figure import Figure

BAR, BOUND, EVEN = "#4477aa", "#cc3311", "#555555"
SERIES = ("#bbbbbb", BAR, "#228833", "#ccbb44", "#aa3377", "#66ccee")  # before is grey
PATH = {
    "native": "#bbbbbb",
    "rail": "#66ccee",
    "permutation": "#ccbb44",
    "joint": "#228833",
    "granted": "#aa3377",
}
# Nodes as senders: each of the others must stand out beside its neighbours.
NODE = (BAR, "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb")
MAX_TICKS = 16  # rails or nodes that there is room to number
MAX_LANES = 128  # lanes or panels that can be told apart, and drawn in seconds


def set_title(figure: Figure, title: str) -> None:
    """Put a line above a figure, at its left; "" for none."""
    if title:
        literal = title.replace("$", r"\$")  # a file's name is no formula
        figure.suptitle(literal, x=0.01, ha="left", fontsize="medium")


def node_colour(node: int) -> str:
    """Return the colour of a node, the same in every picture.

    Example:
        >>> node_colour(0) == node_colour(len(NODE))
        True
    """
    return NODE[node % len(NODE)]


def check_table(value: Any, name: str) -> np.ndarray:
    """Return a non-empty table of finite numbers of at least 0 as float64.

    Raises:
        TypeError: it holds no real numbers.
        ValueError: it is no such table.

    Example:
        >>> check_table([[1, 2]], "records").tolist()
        [[1.0, 2.0]]
    """
    try:
        table = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} must be a table of real numbers: {error}") from None
    if table.ndim != 2 or not table.size:
        raise ValueError(f"{name} must have 2 non-empty dimensions, got shape {table.shape}")
    wrong = ~(np.isfinite(table) & (table >= 0))
    for place in np.argwhere(wrong)[:1].tolist():
        got = table[tuple(place)]
        raise ValueError(f"{name} must be finite and at least 0, got {got} at {tuple(place)}")
    return table
