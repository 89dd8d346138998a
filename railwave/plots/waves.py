"""Draw who sends to whom, and when. Letters: N nodes."""

from __future__ import annotations

import math
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from railwave._check import check_positive_int
from railwave.plots.style import EVEN, MAX_LANES, MOST, check_row, literal, node_colour, set_title

_LANE = 0.84  # of the height between two receivers
_LEAST_LABELLED = 0.035  # of the axis: a shorter bar has no room for its number

# Sums of times that are equal differ by what float64 rounds: of the axis, and ulps of its ends.
_CLOSE, _CLOSE_ULPS = 1e-9, 4

Span = tuple[int, int, float, float]  # source node, destination node, begin, end


def plot_waves(
    spans: Any,
    *,
    nodes: int | None = None,
    xlabel: str = "time (us)",
    title: str = "",
) -> Figure:
    """Draw transfers between nodes over time: a lane a receiver, a bar a sender, with its number.

    Bars that overlap in time share the lane's height: a bar of full height is a receiver's only
    sender, and thin ones show incast.

    Args:
        spans: (source, destination, begin, end) of each transfer, in any order and any one unit of
            time: what `railwave.sim.node_spans` returns, (s, d, wave, wave + 1) for waves alone, or
            an array of four columns. A bar that is short beside the axis has no number.
        nodes: N. Default: one more than the largest node in spans.
        xlabel: what time is, and its unit.
        title: a line above.

    Returns:
        Figure; `figure.savefig(...)` writes it.

    Raises:
        TypeError: spans are no transfers, nodes is no int, or xlabel no str.
        ValueError: no spans, a node outside [0, N) or equal to its peer, an end before its begin,
            or more nodes than can be told apart.

    Example:
        Nodes 1 and 2 send to node 0 at once, then node 1 to node 2.

        >>> figure = plot_waves([(1, 0, 0, 3), (2, 0, 0, 3), (1, 2, 3, 4)])
        >>> [round(float(bar.get_height()), 2) for bar in figure.axes[0].patches]
        [0.42, 0.42, 0.84]
    """
    checked = _checked(spans, nodes)
    num_nodes = nodes or 1 + max(max(s, d) for s, d, _, _ in checked)
    if num_nodes > MAX_LANES:
        raise ValueError(
            f"nodes must be at most {MAX_LANES}, of which lanes are drawn: {num_nodes}"
        )
    figure = Figure(figsize=(8, 1.3 + 0.5 * num_nodes), layout="constrained")
    axes = figure.subplots()
    first, last = min(begin for *_, begin, _ in checked), max(end for *_, end in checked)
    close = _CLOSE * (last - first) + _CLOSE_ULPS * math.ulp(max(abs(first), abs(last)))
    room = 0.05 * (abs(first) or 1) if first == last else 0  # of one time alone there is no axis
    axes.set_xlim(first - room, last + room)
    for receiver in range(num_nodes):
        _draw_lane(axes, receiver, [span for span in checked if span[1] == receiver], close)
    axes.set_ylim(num_nodes - 0.5, -0.5)  # node 0 on top
    axes.set_yticks(range(num_nodes), [f"to node {node}" for node in range(num_nodes)])
    axes.set_xlabel(literal(xlabel, "xlabel"))
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    senders = sorted({source for source, *_ in checked})
    patches = [Patch(color=node_colour(node), label=f"from {node}") for node in senders]
    figure.legend(handles=patches, loc="outside right center", frameon=False, fontsize="small")
    set_title(figure, title)
    return figure


def _draw_lane(axes: Axes, receiver: int, spans: list[Span], close: float) -> None:
    low, high = axes.get_xlim()
    for together in _groups(spans, close):
        ends: list[float] = []
        lines = [_free_line(ends, span, close) for span in together]
        height = _LANE / len(ends)
        for (source, _, begin, end), line in zip(together, lines, strict=True):
            bar = axes.barh(
                receiver - _LANE / 2 + (line + 0.5) * height,
                end - begin,
                height,
                left=begin,
                color=node_colour(source),
                edgecolor="white",
                linewidth=0.8,
            )
            if end - begin >= _LEAST_LABELLED * (high - low):
                axes.bar_label(bar, [str(source)], label_type="center", fontsize="small")
    axes.axhline(receiver + 0.5, color=EVEN, linewidth=0.3)


def _groups(spans: list[Span], close: float) -> list[list[Span]]:
    """Part a receiver's spans, by begin, where no earlier one is still going on."""
    groups: list[list[Span]] = []
    latest = -math.inf
    for span in sorted(spans, key=lambda span: (span[2], span[0])):
        if span[2] >= latest - close:
            groups.append([])
        groups[-1].append(span)
        latest = max(latest, span[3])
    return groups


def _free_line(ends: list[float], span: Span, close: float) -> int:
    """Take the first line of a group whose last bar has ended, or a new one."""
    free = [line for line, end in enumerate(ends) if end <= span[2] + close]
    line = free[0] if free else len(ends)
    ends[line : line + 1] = [span[3]]
    return line


def _checked(spans: Any, nodes: int | None) -> list[Span]:
    if nodes is not None:
        nodes = check_positive_int(nodes, "nodes")
    checked: list[Span] = []
    for number, span in enumerate(check_row(spans, "spans", "transfers")):
        try:
            source, destination, begin, end = span
            if any(isinstance(value, (str, bytes)) for value in span):
                raise TypeError
            s, d, begin_f, end_f = (float(value) for value in span)
        except (TypeError, ValueError, OverflowError, RuntimeError):
            raise TypeError(
                f"spans[{number}] must be four numbers (source, destination, begin, end), got "
                f"{span!r}"
            ) from None
        in_range = all(node.is_integer() and 0 <= node < (nodes or math.inf) for node in (s, d))
        if not in_range or s == d:
            raise ValueError(
                f"spans[{number}] must be between two nodes of {nodes or 'any number'}, got "
                f"({source}, {destination})"
            )
        if not -MOST <= begin_f <= end_f <= MOST:
            raise ValueError(
                f"spans[{number}] must be finite, within {MOST:g} of 0, and end no sooner than it "
                f"begins, got {begin} to {end}"
            )
        checked.append((int(s), int(d), begin_f, end_f))
    if not checked:
        raise ValueError("spans must hold at least one transfer, got none")
    return checked
