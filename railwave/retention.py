"""Which path deserves an anchor at a measured point of traffic: the rules of A.3.

Times are of a dispatch and its combine, of the slowest rank, in microseconds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SPREAD = 1.2  # p90 / p10 of joint and of the candidate, at most
ADVANTAGE = 1.05  # p10 of joint / p90 of the candidate, at least
AGREEMENT = 1.1  # between paths that do the same, and between two runs of one path
LEAST_SAMPLES = 5
# Where no record changes its rail, the paths of a pair do the same.
EQUIVALENT = (("native", "rail"), ("permutation", "joint"))
ONE_WAVE = (("native", "permutation"), ("rail", "joint"))  # with two nodes
SLACK = 1e-9  # of a ratio, for what float64 rounds
CONTROL = "joint again"  # the same path, measured a second time


@dataclass(frozen=True)
class Verdict:
    """The path that an anchor gets, or None, and why."""

    path: str | None
    reason: str


def judge(
    samples_us: Mapping[str, Sequence[float]], *, relocated: bool, one_wave: bool = False
) -> Verdict:
    """Decide whether a point becomes an anchor, and for which path.

    The point is noisy, and rejected, unless all controls agree within 10 %: joint measured twice,
    and, where nothing is relocated, native with rail and permutation with joint. Then the fastest
    path wins for which it and joint spread by at most 20 % and whose 90th percentile is at least
    5 % below joint's 10th.

    Args:
        samples_us: by path, and under `CONTROL`: at least 5 times each, interleaved.
        relocated: whether rail and joint move records to other rails here. If not, rail and
            permutation only repeat native and joint, and get no anchor.
        one_wave: there are two nodes, so that waves change nothing: permutation repeats native, and
            rail joint; these four are the same where nothing is relocated, and granted is little
            else: it gets no anchor.

    Raises:
        ValueError: joint is missing, or a path has too few times or one that is not above 0.

    Source: A.3.

    Example:
        >>> slow, fast = [110.0, 111, 112, 113, 114], [90.0, 91, 92, 93, 94]
        >>> paths = {"native": fast, "rail": slow, "permutation": slow, "joint": slow}
        >>> judge({**paths, CONTROL: slow}, relocated=True).path
        'native'
        >>> judge({**paths, CONTROL: fast}, relocated=True).reason
        'noisy: joint and joint again differ by 1.217, more than 1.1'
    """
    _check(samples_us)
    median = {path: statistics.median(times) for path, times in samples_us.items()}
    alike = (*(() if relocated else EQUIVALENT), *(ONE_WAVE if one_wave else ()))
    controls = [("joint", CONTROL), *alike]
    for one, other in controls:
        if one in median and other in median:
            apart = max(median[one], median[other]) / min(median[one], median[other])
            if apart > AGREEMENT:
                return Verdict(
                    None, f"noisy: {one} and {other} differ by {apart:.3f}, more than {AGREEMENT}"
                )
    candidates = ["native", "rail", "permutation"] if relocated and not one_wave else ["native"]
    candidates += [] if one_wave else ["granted"]
    if one_wave and not relocated:
        return Verdict(None, "all paths do the same here")
    present = sorted((c for c in candidates if c in median), key=lambda c: median[c])
    reasons = []
    for path in present:
        why = _too_weak(path, samples_us)
        if not why:
            return Verdict(path, _advantage(path, samples_us))
        reasons.append(why)
    return Verdict(None, "; ".join(reasons) or "no path beside joint was measured")


def fastest_other(samples_us: Mapping[str, Sequence[float]]) -> str | None:
    """Return the path beside joint with the least median; None if only joint was measured.

    Example:
        >>> fastest_other({"joint": [9.0], "native": [8.0], "rail": [7.0], CONTROL: [6.0]})
        'rail'
    """
    others = [path for path in samples_us if path not in ("joint", CONTROL)]
    return min(others, key=lambda path: statistics.median(samples_us[path]), default=None)


def _too_weak(path: str, samples_us: Mapping[str, Sequence[float]]) -> str:
    """Say which rule a candidate breaks; "" for none."""
    for name in ("joint", path):
        low, high = _deciles(samples_us[name])
        if high > SPREAD * low:
            return f"{path}: {name} spreads by {high / low:.3f}, more than {SPREAD}"
    if _deciles(samples_us["joint"])[0] / _deciles(samples_us[path])[1] < ADVANTAGE - SLACK:
        return f"{_advantage(path, samples_us)}, less than {ADVANTAGE}"
    return ""


def _advantage(path: str, samples_us: Mapping[str, Sequence[float]]) -> str:
    ratio = _deciles(samples_us["joint"])[0] / _deciles(samples_us[path])[1]
    return f"{path}: p10 of joint / p90 of it is {ratio:.3f}"


def _deciles(times: Sequence[float]) -> tuple[float, float]:
    deciles = statistics.quantiles(times, n=10, method="inclusive")
    return deciles[0], deciles[-1]


def _check(samples_us: Mapping[str, Sequence[float]]) -> None:
    if "joint" not in samples_us or CONTROL not in samples_us:
        raise ValueError(f"samples_us must hold joint and {CONTROL!r}, got {list(samples_us)}")
    for path, times in samples_us.items():
        if len(times) < LEAST_SAMPLES:
            raise ValueError(
                f"samples_us[{path!r}] must hold at least {LEAST_SAMPLES} times, got {len(times)}"
            )
        wrong = [us for us in times if not 0 < us < math.inf]
        if wrong:
            raise ValueError(f"samples_us[{path!r}] must be finite and above 0, got {wrong[0]}")
