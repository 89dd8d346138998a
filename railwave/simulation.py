"""Compare schedulers on one demand and one simulated network: what `railwave simulate` shows.

Letters: N nodes, R rails.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from railwave.sched import SCHEDULERS, Demand, audit, bound_s, source_rail_skew
from railwave.sched.demand import check_demand
from railwave.sim import Fabric, Result, simulate

logger = logging.getLogger("railwave")

Progress = Callable[[int, str], None]  # schedulers done so far, the name of the one that begins


@dataclass(frozen=True)
class Row:
    """Say how one scheduler fared; times in microseconds, rates in 1e9 bytes/s."""

    scheduler: str
    time_us: float  # from the first redistribution over NVLink to the last
    speedup: float  # native's time / this one's
    ratio_to_bound: float  # time / T*, at least 1
    algbw_gbs: float  # bytes between nodes / (GPUs * time)
    busbw_gbs: float  # algbw * (ranks - 1) / ranks
    plan_us: float  # planning for all nodes, by one process
    rail_share: tuple[float, ...]  # (R,) each rail's part of all bytes sent; zeros without any
    rho_g: float  # bytes sent by the busiest rail of any node / mean over all rails
    fan_in: int  # the most nodes that send to one NIC at the same time


@dataclass(frozen=True)
class Comparison:
    """Hold T* in microseconds, the bytes between nodes, and a row for each scheduler."""

    bound_us: float
    sent_bytes: int
    rows: tuple[Row, ...]

    def to_json(self) -> dict[str, Any]:
        """Return plain data: {"bound_us": ..., "sent_bytes": ..., "rows": [{...}, ...]}."""
        rows = [{**asdict(row), "rail_share": list(row.rail_share)} for row in self.rows]
        return {"bound_us": self.bound_us, "sent_bytes": self.sent_bytes, "rows": rows}


def compare_schedulers(
    demand: Demand,
    fabric: Fabric,
    *,
    schedulers: Sequence[str] = tuple(SCHEDULERS),
    windows: Any = None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Plan a demand with several schedulers, audit each plan and simulate it.

    Native is planned and simulated in any case: it is what the others are compared with.

    Args:
        demand: what must be moved.
        fabric: the network.
        schedulers: names of `SCHEDULERS`, in the order of the rows.
        windows: (source, destination) pairs by window, which native and rail keep to; None for one
            window of all pairs. See `native`.
        options: more arguments by scheduler, such as {"joint": {"record_bytes": 14336}}.
        progress: called before each scheduler.

    Returns:
        Comparison; of nothing to send, all times are 0 and all ratios 1.

    Raises:
        TypeError, ValueError: an unknown scheduler, or what the schedulers refuse.

    Example:
        Node 0 has 8 bytes for node 1, all on rail 0 of two, each of 1 byte a microsecond.

        >>> from railwave.topology import Topology
        >>> demand = Demand.of([[0, 0, 8, 0]] + [[0] * 4] * 3, Topology(2, 2, 2))
        >>> comparison = compare_schedulers(demand, Fabric(1e6), schedulers=["native", "joint"])
        >>> comparison.bound_us, [row.time_us for row in comparison.rows]
        (4.0, [8.0, 4.0])
        >>> comparison.rows[1].speedup, comparison.rows[1].rail_share
        (2.0, (0.5, 0.5))
    """
    check_demand(demand)
    if not schedulers:
        raise ValueError("schedulers must name at least one, got none")
    if isinstance(schedulers, str):
        raise TypeError(f"schedulers must be a sequence of names, got {schedulers!r}")
    for what, names in (("schedulers", schedulers), ("options", options or {})):
        for name in names:
            if name not in SCHEDULERS:
                raise ValueError(f"{what} must be of {list(SCHEDULERS)}, got {name!r}")
    timed: dict[str, tuple[Result, float]] = {}
    for name in dict.fromkeys(["native", *schedulers]):
        if progress is not None:
            progress(len(timed), name)
        schedule = SCHEDULERS[name](demand, windows=windows, **(options or {}).get(name, {}))
        audit(schedule, demand)
        timed[name] = simulate(schedule, fabric), schedule.plan_us
        times = schedule.num_windows, schedule.plan_us, timed[name][0].time_s * 1e6
        logger.info("%s: %d windows, planned in %.0f us, %.1f us on the network", name, *times)
    bound_us = bound_s(demand, fabric.rail_bytes_s) * 1e6
    native_us = timed["native"][0].time_s * 1e6
    rows = [_row(name, *timed[name], native_us, bound_us) for name in schedulers]
    return Comparison(bound_us, int(demand.between_nodes.sum()), tuple(rows))


def _row(name: str, result: Result, plan_us: float, native_us: float, bound_us: float) -> Row:
    time_us = result.time_s * 1e6
    return Row(
        scheduler=name,
        time_us=time_us,
        speedup=native_us / time_us if time_us else 1.0,
        ratio_to_bound=max(1.0, time_us / bound_us) if bound_us else 1.0,  # float64 rounds below
        algbw_gbs=result.algbw_gbs,
        busbw_gbs=result.busbw_gbs,
        plan_us=plan_us,
        rail_share=tuple(result.rail_share.tolist()),
        rho_g=source_rail_skew(result.sent_bytes),
        fan_in=result.fan_in,
    )
