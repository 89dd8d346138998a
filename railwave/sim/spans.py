"""When each pair of nodes sends in a simulated schedule: what a Gantt chart needs.

Letters: W windows, N nodes, R rails.
"""

from __future__ import annotations

import numpy as np

from railwave.sched import Schedule
from railwave.sched.schedule import sum_by
from railwave.sim.fabric import Fabric
from railwave.sim.fair import finish_times
from railwave.sim.simulate import latencies, simulate


def node_spans(schedule: Schedule, fabric: Fabric) -> list[tuple[int, int, float, float]]:
    """Return when each node sends to each other in each window, over all rails.

    The window and all its transfers begin together, after redistribution at the sources and
    latencies; a pair ends with the last of its rails. Times are those of `simulate`.

    Args:
        schedule: of order "barrier", in which windows follow one another on all NICs.
        fabric: the network.

    Returns:
        (source, destination, begin, end) in seconds, by window, source and destination.

    Raises:
        TypeError: another class.
        ValueError: another order.

    Example:
        Nodes 1 and 2 send 2 and 4 bytes to node 0 at 1 byte/s: at half that each, until one ends.

        >>> from railwave.sched import SCHEDULERS, Demand
        >>> from railwave.topology import Topology
        >>> demand = Demand.of([[0, 0, 0], [2, 0, 0], [4, 0, 0]], Topology(3, 1, 1))
        >>> node_spans(SCHEDULERS["native"](demand), Fabric(1.0))
        [(1, 0, 0.0, 4.0), (2, 0, 0.0, 6.0)]
        >>> node_spans(SCHEDULERS["permutation"](demand), Fabric(1.0))
        [(2, 0, 0.0, 4.0), (1, 0, 4.0, 6.0)]
    """
    result = simulate(schedule, fabric)
    if schedule.order != "barrier":
        raise ValueError(f"schedule must be of order 'barrier', got {schedule.order!r}")
    latency_s = latencies(schedule, fabric)
    whole_s = result.before_s + latency_s + result.window_s + result.after_s
    begin_s = np.cumsum(whole_s) - whole_s + result.before_s + latency_s
    window, pair, end_s = _pair_ends(schedule, fabric, result.window_s)
    nodes = schedule.topo.nodes
    return [
        (int(p) // nodes, int(p) % nodes, float(begin_s[w]), float(begin_s[w] + end))
        for w, p, end in zip(window, pair, end_s, strict=True)
    ]


def _pair_ends(
    schedule: Schedule, fabric: Fabric, window_s: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return windows, pairs (source * N + destination), and seconds from the window's begin."""
    nodes, rails = schedule.topo.nodes, schedule.topo.rails_per_node
    ports = nodes * rails
    send = schedule.source * rails + schedule.source_rail
    receive = schedule.destination * rails + schedule.destination_rail
    key, flow = np.unique((schedule.window * ports + send) * ports + receive, return_inverse=True)
    window, rest = np.divmod(key, ports * ports)
    send, receive = np.divmod(rest, ports)
    if schedule.paced:
        end_s = window_s[window]  # that all end together is what pacing is
    else:
        amount = sum_by(flow, schedule.transfer_bytes, len(key))
        # Windows do not meet: a port of each window is a port of its own.
        flows = window * ports + send, window * ports + receive, amount, window
        end_s = finish_times(*flows, fabric.rail_bytes_s, fabric.efficiency)
    pair = window * nodes**2 + send // rails * nodes + receive // rails
    key, place = np.unique(pair, return_inverse=True)
    last_s = np.zeros(len(key))
    np.maximum.at(last_s, place, end_s)
    return *np.divmod(key, nodes**2), last_s
