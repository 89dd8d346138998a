"""Draw which path a cost table takes for which traffic, eq. 11 and 12."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from railwave.plots.style import PATH, check_numbers, check_row, said, set_title
from railwave.sched import Anchor, Scales, select
from railwave.sched.selector import MIB

_CELLS = 48  # along each axis, beside those that the anchors' bounds add
_PATHS = tuple(PATH)
_NEAR: dict[str, Any] = {"marker": "D", "markersize": 6, "markeredgecolor": "black"}
_FAR: dict[str, Any] = {
    "marker": "D",
    "markersize": 6,
    "markeredgecolor": "#777777",
    "markerfacecolor": "none",
}
_POINT: dict[str, Any] = {
    "marker": "x",
    "markersize": 9,
    "markeredgecolor": "black",
    "markeredgewidth": 2,
}


def plot_path_map(
    anchors: Sequence[Anchor],
    scales: Scales,
    payloads_mib: Sequence[float],
    *,
    rho: tuple[float, float] | None = None,
    kappa: tuple[float, float] = (1.0, 3.2),
    points: Sequence[tuple[float, float]] = (),
    title: str = "",
) -> Figure:
    """Draw the path that `select` takes over rail skew and receiver concentration.

    A panel a payload. A diamond with its path's colour is an anchor near in payload; a hollow grey
    one is an anchor of another payload, whose neighbourhood does not reach this panel.

    Args:
        anchors, scales: of a `CostTable`.
        payloads_mib: mean remote payload per GPU of each panel, in MiB.
        rho: range of rho_g to draw, from 1 on. Default: to R, the rails of scales.
        kappa: range of kappa to draw, from 1 on.
        points: (rho_g, kappa) of traffic to mark with a cross in every panel.
        title: a line above.

    Returns:
        Figure; `figure.savefig(...)` writes it.

    Raises:
        TypeError, ValueError: an argument is not as above; no payload; an empty range, or one below
            1.

    Source: eq. (11) and (12).

    Example:
        >>> figure = plot_path_map([Anchor(28, 1, 1, "native")], Scales(rails=8), [28, 56])
        >>> [axes.get_title() for axes in figure.axes]
        ['28 MiB a GPU', '56 MiB a GPU']
    """
    if not isinstance(scales, Scales):
        raise TypeError(f"scales must be Scales, got {said(scales)}")
    anchors = _checked(anchors)
    rho = (1.0, max(2.0, float(scales.rails))) if rho is None else rho
    ranges = {"rho": _range(rho, "rho"), "kappa": _range(kappa, "kappa")}
    payloads_mib = check_numbers(payloads_mib, "payloads_mib", least=0)
    if not payloads_mib:
        raise ValueError("payloads_mib must name at least one payload, got none")
    marked = [
        check_numbers(point, f"points[{i}]", count=2)
        for i, point in enumerate(check_row(points, "points", "(rho, kappa)"))
    ]
    num_panels = len(payloads_mib)
    layout = ConstrainedLayoutEngine(wspace=0.08)  # less, and the panels' outer ticks meet
    figure = Figure(figsize=(1.4 + 2.6 * num_panels, 3.4), layout=layout)
    panels = figure.subplots(1, num_panels, sharex=True, sharey=True, squeeze=False)[0]
    for axes, payload_mib in zip(panels, payloads_mib, strict=True):
        _draw_regions(axes, anchors, scales, payload_mib, ranges)
        _draw_anchors(axes, anchors, scales, payload_mib, ranges)
        for x, y in marked:
            axes.plot(x, y, clip_on=False, **_POINT)
        axes.set_xlim(*ranges["rho"])
        axes.set_ylim(*ranges["kappa"])
        axes.set_title(f"{payload_mib:g} MiB a GPU", fontsize="small")
        axes.set_xlabel("rail skew ρg")
    panels[0].set_ylabel("receiver concentration κ")
    _add_legend(figure, anchors, has_points=bool(marked))
    set_title(figure, title)
    return figure


def _checked(anchors: Any) -> list[Anchor]:
    row = check_row(anchors, "anchors", "Anchor")
    for number, anchor in enumerate(row):
        if not isinstance(anchor, Anchor):
            raise TypeError(f"anchors[{number}] must be an Anchor, got {said(anchor)}")
        if anchor.path not in _PATHS:
            raise ValueError(
                f"anchors[{number}].path must be one of {', '.join(_PATHS)}, got {anchor.path!r}"
            )
    return row


def _range(given: Any, name: str) -> tuple[float, float]:
    low, high = check_numbers(given, name, count=2)
    if not 1 <= low < high:
        raise ValueError(f"{name} must be a range from at least 1, got {(low, high)}")
    return low, high


def _draw_regions(
    axes: Axes,
    anchors: Sequence[Anchor],
    scales: Scales,
    payload_mib: float,
    ranges: dict[str, tuple[float, float]],
) -> None:
    """Fill the plane by what `select` says at the middle of each cell; bounds are cells' edges."""
    half = {"rho": scales.shape * max(1, scales.rails - 1), "kappa": scales.shape * scales.kappa}
    edges = {}
    for name, (low, high) in ranges.items():
        bounds = [getattr(a, name) + side * half[name] for a in anchors for side in (-1, 1)]
        inside = [bound for bound in bounds if low < bound < high]
        edges[name] = np.unique([*np.linspace(low, high, _CELLS + 1), *inside])
    x, y = ((edge[1:] + edge[:-1]) / 2 for edge in (edges["rho"], edges["kappa"]))
    traffic = {"payload_bytes": payload_mib * MIB}
    chosen = [
        [
            _PATHS.index(select(anchors, scales, **traffic, rho=float(r), kappa=float(k)).path)
            for r in x
        ]
        for k in y
    ]
    colours = ListedColormap(list(PATH.values()))
    axes.pcolormesh(
        edges["rho"],
        edges["kappa"],
        chosen,
        cmap=colours,
        vmin=-0.5,
        vmax=len(_PATHS) - 0.5,
        alpha=0.75,
    )


def _draw_anchors(
    axes: Axes,
    anchors: Sequence[Anchor],
    scales: Scales,
    payload_mib: float,
    ranges: dict[str, tuple[float, float]],
) -> None:
    """Mark the anchors in range: one beyond would be drawn outside the axes."""
    inside = [
        anchor
        for anchor in anchors
        if all(low <= getattr(anchor, name) <= high for name, (low, high) in ranges.items())
    ]

    def is_near(anchor: Anchor) -> bool:
        traffic = {"payload_bytes": payload_mib * MIB, "rho": anchor.rho, "kappa": anchor.kappa}
        return select([anchor], scales, **traffic).anchor is not None

    for anchor in sorted(inside, key=is_near):  # filled ones on top
        style = _NEAR | {"markerfacecolor": PATH[anchor.path]} if is_near(anchor) else _FAR
        axes.plot(anchor.rho, anchor.kappa, clip_on=False, **style)


def _add_legend(figure: Figure, anchors: Sequence[Anchor], *, has_points: bool) -> None:
    """Name the paths that the table can take, and the marks that are drawn."""
    paths = [path for path in _PATHS if path in {"joint", *(anchor.path for anchor in anchors)}]
    handles: list[Patch | Line2D] = [Patch(color=PATH[p], alpha=0.75, label=p) for p in paths]
    marks: dict[str, dict[str, Any]] = {}
    if anchors:
        marks = {"anchor": _NEAR | {"markerfacecolor": "white"}, "anchor, other payload": _FAR}
    if has_points:
        marks["this traffic"] = _POINT
    for label, style in marks.items():
        handles.append(Line2D([], [], linestyle="", label=label, **style))
    figure.legend(handles=handles, loc="outside right center", frameon=False, fontsize="small")
