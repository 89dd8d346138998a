"""Routing to run railwave on: made up with a chosen skew, or drawn from recorded expert counts."""

from railwave.workloads.routing import Routing, skewed_routing
from railwave.workloads.tokens import subsample, tokens_from_counts
from railwave.workloads.trace import generate_trace, list_iterations, read_counts, write_counts

__all__ = [
    "Routing",
    "generate_trace",
    "list_iterations",
    "read_counts",
    "skewed_routing",
    "subsample",
    "tokens_from_counts",
    "write_counts",
]
