"""What a fluid model says of a case, and the numbers that describe its traffic."""

from __future__ import annotations

from dataclasses import dataclass

from bench.emulated_cases import Case, Plan
from bench.phase import turned
from railwave.sched import bound_s, receiver_concentration, source_rail_skew
from railwave.sched.parts import owned_by_rail
from railwave.sim import Fabric, simulate
from railwave.workloads import RECORD_BYTES


@dataclass(frozen=True)
class Network:
    """Hold what the network alone needs, there and back, in microseconds."""

    bound_us: float  # T*: no schedule is faster
    by_method: dict[str, float]  # ports shared fairly, no latency, no loss


def network(case: Case, made: list[Plan], nic_gbs: float, bytes_there: int, back: int) -> Network:
    """Ask the simulator; nothing in it is fitted.

    Args:
        nic_gbs: of the run, 1e9 bytes/s.
        bytes_there, back: of a record of dispatch, and of a sum of combine, on the wire.
    """
    rates = [nic_gbs * 1e9 / size for size in (bytes_there, back)]
    times = {}
    for plan in made:
        ways = zip((plan.schedule, turned(plan.schedule)), rates, strict=True)
        # NVLink takes no time on such a fabric; calls follow one another, whatever their schedule.
        times[plan.method] = sum(simulate(s, Fabric(r)).time_s for s, r in ways) * 1e6
    bound = sum(bound_s(case.replay.demand, rate) for rate in rates) * 1e6
    return Network(bound, times)


def described(case: Case) -> dict[str, float]:
    """Return what eqs. (4), (5) and (7) say of a case."""
    demand, between = case.replay.demand, case.replay.demand.between_nodes
    rails = owned_by_rail(demand).sum(axis=1)
    return {
        "mib_per_gpu": round(
            float(between.sum()) * RECORD_BYTES / demand.topo.num_ranks / 2**20, 4
        ),
        "rho_g": round(source_rail_skew(rails), 4),
        "kappa": round(receiver_concentration(between, case.replay.windows), 4),
    }
