"""Time a schedule on a cluster too large to have: flows that share NICs, on one CPU core.

A fluid model: no packets, no switches beyond the NICs' own ports, no loss but what `Fabric` says.
"""

from railwave.sim.fabric import INCAST, Fabric
from railwave.sim.fair import finish_times, max_min_rates
from railwave.sim.simulate import Result, simulate
from railwave.sim.spans import node_spans

__all__ = ["INCAST", "Fabric", "Result", "finish_times", "max_min_rates", "node_spans", "simulate"]
