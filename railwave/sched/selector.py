"""Choose a path for a phase from calibrated anchors, eq. 11 and 12.

An anchor is a point of traffic at which a path was measured to be faster than joint. Near one its
path is used again; anywhere else the phase takes joint. Nothing is extrapolated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from railwave._check import check_positive_int

MIB = 1 << 20
MIB_RANGE = (1e-9, 1e9)  # of a payload in a table: no quotient of two overflows or is 0
SLACK = 1e-9  # of every bound, for what float64 rounds


@dataclass(frozen=True)
class Anchor:
    """Where a path was measured, and which one was faster than joint."""

    payload_mib: float  # B, mean remote payload per GPU
    rho: float  # source-rail skew, eq. 5
    kappa: float  # receiver concentration, eq. 7
    path: str

    def __post_init__(self) -> None:
        _check_range(self.payload_mib, *MIB_RANGE, "payload_mib")
        _check_range(self.rho, 1, 1e6, "rho")
        _check_range(self.kappa, 1, 1e6, "kappa")


@dataclass(frozen=True)
class Scales:
    """How traffic is compared with an anchor. The defaults are the paper's, for R rails.

    Source: A.3.
    """

    rails: int  # R: rho spans 1 (even) to R (one rail)
    payload_mib: float = 56.0  # where the payload feature is 0
    kappa: float = 2.0  # from low (1) to high (3) contention
    payload_factor: float = 1.25  # payloads differ at most by this factor
    shape: float = 0.02  # rho and kappa features differ at most by this

    def __post_init__(self) -> None:
        check_positive_int(self.rails, "rails", below=1 << 20)
        _check_range(self.payload_mib, *MIB_RANGE, "payload_mib")
        _check_range(self.kappa, 1e-6, 1e6, "kappa")
        _check_range(self.payload_factor, 1, 1e6, "payload_factor")
        _check_range(self.shape, 0, 1e6, "shape")

    def features(self, payload_mib: float, rho: float, kappa: float) -> tuple[float, float, float]:
        """Return x: (log2(B / 56 MiB), (rho - 1) / (R - 1), (kappa - 1) / 2).

        The rho feature is 0 with one rail, which cannot be uneven.

        Example:
            >>> Scales(rails=8).features(28.0, 8.0, 3.0)
            (-1.0, 1.0, 1.0)
        """
        skew = (rho - 1) / (self.rails - 1) if self.rails > 1 else 0.0
        return math.log2(payload_mib / self.payload_mib), skew, (kappa - 1) / self.kappa


@dataclass(frozen=True)
class Decision:
    """Which path a phase takes, and why."""

    path: str
    reason: str
    anchor: int | None = None  # its number in the table
    distance: float | None = None  # |x - x_j| to it


def select(
    anchors: Sequence[Anchor], scales: Scales, *, payload_bytes: float, rho: float, kappa: float
) -> Decision:
    """Choose the path of the nearest anchor of which the traffic is in the neighbourhood.

    Near means: payloads within a factor of 1.25, and the features of rho and kappa within 0.02, as
    `scales` says. Without such an anchor the path is joint; without remote payload it is native.

    Args:
        anchors: from a cost table; of equally near ones the first is taken.
        scales: from the same table.
        payload_bytes: B, mean remote payload per GPU, in bytes.
        rho: source-rail skew, at least 1.
        kappa: receiver concentration, at least 1.

    Raises:
        ValueError: a number is negative, below 1 or not finite.

    Source: eq. (11) and (12), A.3.

    Example:
        >>> table4 = [Anchor(14, 1, 1, "permutation"), Anchor(28, 1, 1, "native")]
        >>> near = {"rho": 1.1, "kappa": 1.03}
        >>> select(table4, Scales(rails=8), payload_bytes=35 * MIB, **near).path
        'native'
        >>> select(table4, Scales(rails=8), payload_bytes=36 * MIB, **near).path
        'joint'
    """
    for name, value, least in (("payload_bytes", payload_bytes, 0), ("rho", rho, 1)):
        _check_at_least(value, least, name)
    _check_at_least(kappa, 1, "kappa")
    if payload_bytes == 0:
        return Decision("native", "there is no remote payload")
    payload_mib = payload_bytes / MIB
    x = scales.features(payload_mib, rho, kappa)
    best: Decision | None = None
    for number, anchor in enumerate(anchors):
        place = scales.features(anchor.payload_mib, anchor.rho, anchor.kappa)
        if _too_far(scales, payload_mib, x, anchor, place):
            continue
        distance = math.dist(x, place)
        if best is None or distance < best.distance - SLACK:
            best = Decision(anchor.path, f"near anchor {number}: {anchor}", number, distance)
    return best or Decision("joint", _nearest(scales, payload_mib, x, anchors))


def _too_far(scales: Scales, payload_mib: float, x: tuple, anchor: Anchor, place: tuple) -> str:
    """Say which bound lies between traffic and an anchor; "" for none."""
    sizes = sorted((payload_mib, anchor.payload_mib))
    if sizes[1] > scales.payload_factor * sizes[0] * (1 + SLACK):
        factor = scales.payload_factor
        takes = f"{anchor.payload_mib / factor:.4g} to {anchor.payload_mib * factor:.4g}"
        apart = f"payload {payload_mib:.4g} MiB is more than {factor} times apart"
        return f"{apart}: the anchor takes {takes}"
    units = {"rho": scales.rails - 1, "kappa": scales.kappa}
    for name, here, there in zip(units, x[1:], place[1:], strict=True):
        if abs(here - there) > scales.shape + SLACK:
            apart = f"{abs(here - there):.4g} of its scale, above {scales.shape}"
            middle, reach = getattr(anchor, name), scales.shape * units[name]
            takes = f"{max(1, middle - reach):.4g} to {middle + reach:.4g}"
            return f"{name} differs by {apart}: the anchor takes {takes}"
    return ""


def _nearest(scales: Scales, payload_mib: float, x: tuple, anchors: Sequence[Anchor]) -> str:
    """Say why no anchor is near: what is wrong with the nearest."""
    if not anchors:
        return "the table has no anchor"
    places = [scales.features(a.payload_mib, a.rho, a.kappa) for a in anchors]
    number = min(range(len(anchors)), key=lambda j: math.dist(x, places[j]))
    why = _too_far(scales, payload_mib, x, anchors[number], places[number])
    return f"no anchor is near; of the nearest, {number}, {why}"


def _check_range(value: float, low: float, high: float, name: str) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name} must be in [{low:g}, {high:g}], got {value!r:.40}")


def _check_at_least(value: float, least: float, name: str) -> None:
    if not (math.isfinite(value) and value >= least * (1 - SLACK)):
        raise ValueError(f"{name} must be finite and at least {least}, got {value}")
