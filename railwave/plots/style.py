"""What the pictures share: colours that the colour-blind tell apart, titles, checked tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
MOST = 1e300  # beyond, matplotlib's own sums are infinite
MAX_LANES = 128  # lanes or panels that can be told apart, and drawn in seconds


def set_title(figure: Figure, title: str) -> None:
    """Put a line above a figure, at its left; "" for none.

    Raises:
        TypeError: it is no text.
    """
    if text := literal(title, "title"):
        figure.suptitle(text, x=0.01, ha="left", fontsize="medium")


def literal(text: Any, name: str) -> str:
    """Return a text that matplotlib takes for no formula: a file's name, for example.

    Raises:
        TypeError: it is no text.

    Example:
        >>> print(literal("a $b", "title"))
        a \\$b
    """
    if not isinstance(text, str):
        raise TypeError(f"{name} must be a str, got {said(text)}")
    return text.replace("$", r"\$")


def node_colour(node: int) -> str:
    """Return the colour of a node, the same in every picture.

    Example:
        >>> node_colour(0) == node_colour(len(NODE))
        True
    """
    return NODE[node % len(NODE)]


def check_table(value: Any, name: str) -> np.ndarray:
    """Return a non-empty table of numbers from 0 to `MOST` as float64.

    Raises:
        TypeError: it holds no real numbers.
        ValueError: it is no such table.

    Example:
        >>> check_table([[1, 2]], "records").tolist()
        [[1.0, 2.0]]
    """
    try:
        if np.iscomplexobj(value):
            raise TypeError("got complex ones")
        table = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise TypeError(f"{name} must be a table of real numbers: {error}") from None
    if table.ndim != 2 or not table.size:
        raise ValueError(f"{name} must have 2 non-empty dimensions, got shape {table.shape}")
    wrong = ~((table >= 0) & (table <= MOST))
    for place in np.argwhere(wrong)[:1].tolist():
        got = table[tuple(place)]
        raise ValueError(
            f"{name} must be finite, at most {MOST:g} and at least 0, got {got} at {tuple(place)}"
        )
    return table


def check_number(value: Any, name: str, *, least: float = -math.inf) -> float:
    """Return a finite number of at least so much, and within `MOST`.

    Raises:
        TypeError: it is no number.
        ValueError: it is no such number.
    """
    try:
        if isinstance(value, (str, bytes, bool)):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise TypeError(f"{name} must be a number, got {said(value)}") from None
    if not (math.isfinite(number) and number >= least):
        bound = "" if least == -math.inf else f" and at least {least:g}"
        raise ValueError(f"{name} must be finite{bound}, got {number}")
    if abs(number) > MOST:
        raise ValueError(f"{name} must be within {MOST:g} of 0 to be drawn, got {number}")
    return number


def check_numbers(
    value: Any, name: str, *, count: int | None = None, least: float = -math.inf
) -> list[float]:
    """Return a row of finite numbers, so many if `count` says, of at least so much.

    Raises:
        TypeError, ValueError: it is no such row.

    Example:
        >>> check_numbers((1, 2.5), "rho", count=2)
        [1.0, 2.5]
    """
    many = "numbers" if count is None else f"{count} numbers"
    row = check_row(value, name, many)
    if count not in (None, len(row)):
        raise ValueError(f"{name} must be {many}, got {len(row)}: {said(value)}")
    return [check_number(each, f"{name}[{i}]", least=least) for i, each in enumerate(row)]


def check_row(value: Any, name: str, what: str) -> list[Any]:
    """Return what is in a sequence, array or tensor.

    Args:
        what: its entries, for the error.

    Raises:
        TypeError: it is none of them.
    """
    try:
        if isinstance(value, (str, bytes, Mapping)):
            raise TypeError
        len(value)  # none of what is read only once
        return list(value)
    except TypeError:
        raise TypeError(f"{name} must be a sequence of {what}, got {said(value)}") from None


def check_entries(value: Any, names: Sequence[str], name: str) -> Mapping[str, Any]:
    """Return a mapping that has these entries.

    Raises:
        TypeError: it is no mapping.
        ValueError: an entry is missing.
    """
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must be a mapping with {', '.join(names)}, got {said(value)}")
    missing = [each for each in names if each not in value]
    if missing:
        raise ValueError(f"{name} must have {', '.join(names)}, got no {', '.join(missing)}")
    return value


def said(value: Any) -> str:
    """Say a value and its type for an error, cut short."""
    return f"{type(value).__name__} {value!r:.60}"
