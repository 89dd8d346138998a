"""Time the paths of the paper on one of its clusters: there (dispatch) and back (combine)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from railwave.sched import SCHEDULERS, Demand, Schedule, audit, source_rail_skew
from railwave.sim import INCAST, Fabric, simulate
from railwave.workloads import RECORD_BYTES, Preset, Replay

PATHS = ("native", "rail", "permutation", "joint")


@dataclass(frozen=True)
class Seconds:
    """Hold times of a phase; the network's and NVLink's do not overlap here."""

    dispatch: float  # network, one way
    combine: float  # network, the way back
    nvlink: float  # redistribution, one way, at the preset's rate

    @property
    def round_trip(self) -> float:
        """Return the network's time there and back."""
        return self.dispatch + self.combine

    @property
    def with_nvlink(self) -> float:
        """Return the time there and back if nothing hides what NVLink moves."""
        return self.round_trip + 2 * self.nvlink


def schedule_path(path: str, replayed: Replay) -> Schedule:
    """Schedule one of PATHS with whole records, over the windows that were submitted."""
    whole = {"record_bytes": RECORD_BYTES} if path in ("rail", "joint") else {}
    return planned(SCHEDULERS[path], replayed.demand, windows=replayed.windows, **whole)


def planned(scheduler: Callable[..., Schedule], demand: Demand, **options: Any) -> Schedule:
    """Schedule a demand, and audit the schedule."""
    schedule = scheduler(demand, **options)
    audit(schedule, demand)
    return schedule


def turned(schedule: Schedule) -> Schedule:
    """Send everything back, by the rails and in the windows by which it came: combine."""
    return replace(
        schedule,
        source=schedule.destination,
        destination=schedule.source,
        source_rail=schedule.destination_rail,
        destination_rail=schedule.source_rail,
        before=schedule.after,
        after=schedule.before,
        rail_rule=None,
    )


def total_seconds(schedules: Iterable[Schedule], cluster: Preset, incast: str) -> Seconds:
    """Add up the phases of some layers, one after another.

    Args:
        schedules: of PATHS: windows with barriers, so that their times add up.
        cluster: rates; no latencies are modelled.
        incast: a name of `INCAST`.
    """
    fabric = Fabric(
        cluster.rail_gbytes_s * 1e9, cluster.nvlink_gbytes_s * 1e9, incast=INCAST[incast]
    )
    dispatch = combine = nvlink = 0.0
    for schedule in schedules:
        there = simulate(schedule, fabric)
        dispatch += float(there.window_s.sum())
        combine += float(simulate(turned(schedule), fabric).window_s.sum())
        nvlink += float(there.before_s.sum() + there.after_s.sum())
    return Seconds(dispatch, combine, nvlink)


def worst_node(loads: np.ndarray) -> float:
    """Return max/mean over the rails of the node where it is largest, of (N, R) loads."""
    return max(source_rail_skew(row[None]) for row in loads)
