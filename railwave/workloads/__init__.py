"""What to run railwave on: routing, expert loads and demands, made up or recorded."""

from railwave.workloads.demand_files import read_demand
from railwave.workloads.demands import (
    demand_from_counts,
    demand_from_routing,
    trace_demand,
    trace_demands,
)
from railwave.workloads.load_files import read_loads
from railwave.workloads.loads import FIGURE_8_SHARES, bin_shares, standin_loads
from railwave.workloads.made_trace import generate_trace
from railwave.workloads.placement import Placement
from railwave.workloads.popularity import hot_routing, zipf_routing
from railwave.workloads.presets import PRESETS, Preset, preset
from railwave.workloads.records import RECORD_BYTES, apportion, deal
from railwave.workloads.replay import PATTERNS, Replay, expert_bins, replay, replay_windows
from railwave.workloads.routing import Routing, skewed_routing
from railwave.workloads.tokens import subsample, tokens_from_counts
from railwave.workloads.trace import (
    list_iterations,
    read_counts,
    read_iteration,
    write_counts,
)
from railwave.workloads.ultraep import ULTRAEP_CASES, ultraep_demand

__all__ = [
    "FIGURE_8_SHARES",
    "PATTERNS",
    "PRESETS",
    "RECORD_BYTES",
    "ULTRAEP_CASES",
    "Placement",
    "Preset",
    "Replay",
    "Routing",
    "apportion",
    "bin_shares",
    "deal",
    "demand_from_counts",
    "demand_from_routing",
    "expert_bins",
    "generate_trace",
    "hot_routing",
    "list_iterations",
    "preset",
    "read_counts",
    "read_demand",
    "read_iteration",
    "read_loads",
    "replay",
    "replay_windows",
    "skewed_routing",
    "standin_loads",
    "subsample",
    "tokens_from_counts",
    "trace_demand",
    "trace_demands",
    "ultraep_demand",
    "write_counts",
    "zipf_routing",
]
