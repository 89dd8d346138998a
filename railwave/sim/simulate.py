"""Time a `Schedule` on a `Fabric`.

Letters: n transfers, W windows, N nodes, R rails.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from railwave.sched import Schedule
from railwave.sched.granted import chunk_bytes
from railwave.sched.schedule import sum_by
from railwave.sim.fabric import Fabric
from railwave.sim.fair import finish_times
from railwave.sim.granted import RailRun, run_rail


@dataclass(frozen=True, eq=False)
class Result:
    """Hold how long a schedule takes and what its NICs do meanwhile."""

    time_s: float  # from the first redistribution to the last
    window_s: np.ndarray  # (W,) float64, each window's transfers alone, latencies not counted
    before_s: np.ndarray  # (W,) float64, NVLink redistribution at the sources
    after_s: np.ndarray  # (W,) float64, NVLink redistribution at the destinations
    sent_bytes: np.ndarray  # (N, R) int64, by sending NIC
    received_bytes: np.ndarray  # (N, R) int64, by receiving NIC
    rail_share: np.ndarray  # (R,) float64, each rail's part of all bytes; zeros without any
    fan_in: int  # the most transfers that one NIC receives at the same time
    send_busy: np.ndarray  # (N, R) float64, each NIC's mean use while sending, of its line rate
    # Bytes between nodes / (GPUs * time), in 1e9 bytes/s: a demand has none within nodes.
    algbw_gbs: float
    busbw_gbs: float  # algbw * (ranks - 1) / ranks, as nccl-tests has it


def simulate(schedule: Schedule, fabric: Fabric) -> Result:
    """Return how long the schedule takes on the fabric.

    - A window's transfers share ports (a NIC's sending side, a NIC's receiving side) max-min
      fairly; transfers between the same two ports are one flow. Where no receiving port has two
      flows, the window lasts as long as its busiest port: that is exact, and no flow is followed.
      A paced window lasts that long, too, and sees no incast.
    - Redistribution lasts, in a window, as long as the busiest GPU's bytes at nvlink_bytes_s.
    - barrier: sum over windows of before + latencies + transfers + after.
    - pipelined: before[0] + sum of max(latencies + transfers of w, before[w+1] + after[w-1]) +
      after[-1].
    - free: a NIC starts window w when its last sending, its peer's last receiving and its node's
      redistribution for w have ended; a node redistributes window after window, and again for
      what has arrived. Each window may have one transfer a port.
    - stepwise: a NIC starts window w when all NICs of its node have sent, and it and its peer have
      sent and received, in the windows before: as a dispatch's rounds on the device. Those of a
      combine wait for what the whole node receives, too, which matters where rails differ.
      Redistribution is as in free.
    - chunkwise: as barrier, and the one window's transfers last as long as `granted.run_rail` says
      of the slowest rail; what is added before it is wave_latency_s. grant_latency_s is the round
      trip of a grant there.

    Args:
        schedule: what a scheduler made; not audited here.
        fabric: the network.

    Raises:
        TypeError: another class.
        ValueError: order "free" or "stepwise" with two transfers of one window at a port.

    Source: max-min sharing by `fair`; incast by `Fabric`.

    Example:
        Nodes 1 and 2 send 2 and 4 bytes to node 0 by one NIC of 1 byte/s. Together they need 6 s.
        Severe incast divides the rate by 5 while both send, 4 bytes in all, and then not: 20 + 2 s.

        >>> from railwave.sched import SCHEDULERS, Demand
        >>> from railwave.topology import Topology
        >>> demand = Demand.of([[0, 0, 0], [2, 0, 0], [4, 0, 0]], Topology(3, 1, 1))
        >>> native = SCHEDULERS["native"](demand)
        >>> simulate(native, Fabric(1.0)).time_s, simulate(native, Fabric(1.0, incast=4)).time_s
        (6.0, 22.0)

        In waves, node 2 sends in wave 1 (2 + 1 = 0 mod 3), node 1 in wave 2: 4 + 2 s.

        >>> simulate(SCHEDULERS["permutation"](demand), Fabric(1.0, incast=4)).window_s.tolist()
        [4.0, 2.0]
    """
    if not isinstance(schedule, Schedule):
        raise TypeError(f"schedule must be a railwave Schedule, got {type(schedule).__name__}")
    if not isinstance(fabric, Fabric):
        raise TypeError(f"fabric must be a Fabric, got {type(fabric).__name__}")
    before_s = schedule.before.port_bytes.max(axis=1) / fabric.nvlink_bytes_s
    after_s = schedule.after.port_bytes.max(axis=1) / fabric.nvlink_bytes_s
    latency_s = latencies(schedule, fabric)
    if schedule.order == "chunkwise":
        runs = rail_runs(schedule, fabric)
        window_s = np.array([max((run.time_s for run in runs), default=0.0)])
        time_s = float((before_s + latency_s + window_s + after_s).sum())
        fan_in = max((run.fan_in for run in runs), default=0)
        return _result(schedule, fabric, time_s, fan_in, window_s, before_s, after_s)
    window_s, send_flows, receive_flows = _window_times(schedule, fabric)
    if schedule.order in ("free", "stepwise"):
        has_shared_port = (send_flows > 1) | (receive_flows > 1)
        if has_shared_port.any():
            raise ValueError(
                f"schedule must have one transfer a port in each window where order is "
                f"{schedule.order!r}; window {int(np.flatnonzero(has_shared_port)[0])} has more"
            )
        time_s = _time_without_barriers(schedule, fabric, latency_s)
    elif schedule.order == "pipelined":
        beside = np.append(before_s[1:], 0) + np.append(0, after_s[:-1])
        steps = np.maximum(window_s + latency_s, beside)
        time_s = before_s[0] + steps.sum() + after_s[-1]
    else:
        time_s = (before_s + latency_s + window_s + after_s).sum()
    fan_in = int(receive_flows.max(initial=0))
    return _result(schedule, fabric, float(time_s), fan_in, window_s, before_s, after_s)


def rail_runs(schedule: Schedule, fabric: Fabric) -> list[RailRun]:
    """Return a run of each rail that carries something, of a schedule of order "chunkwise".

    Rails do not meet; those that carry the same are run once.

    Raises:
        ValueError: another order, or transfers that change rail.

    Source: `granted.run_rail`.

    Example:
        >>> from railwave.sched import SCHEDULERS, Demand
        >>> from railwave.topology import Topology
        >>> demand = Demand.of([[0, 0, 0], [64, 0, 0], [64, 0, 0]], Topology(3, 1, 1))
        >>> (run,) = rail_runs(SCHEDULERS["granted"](demand), Fabric(1.0))
        >>> run.num_chunks, run.time_s, run.fan_in
        (64, 128.0, 1)
    """
    if schedule.order != "chunkwise":
        raise ValueError(f"schedule must be of order 'chunkwise', got {schedule.order!r}")
    if not np.array_equal(schedule.source_rail, schedule.destination_rail):
        raise ValueError("schedule must keep to one rail in each transfer of order 'chunkwise'")
    nodes, rails = schedule.topo.nodes, schedule.topo.rails_per_node
    pair = (schedule.source_rail * nodes + schedule.source) * nodes + schedule.destination
    slices = sum_by(pair, schedule.transfer_bytes, rails * nodes**2).reshape(rails, nodes, nodes)
    round_trip_bytes = fabric.grant_latency_s * fabric.rail_bytes_s
    runs: dict[bytes, RailRun] = {}
    for rail in slices[slices.any(axis=(1, 2))]:
        if rail.tobytes() not in runs:
            chunks = chunk_bytes(rail, schedule.unit_bytes, round_trip_bytes)
            runs[rail.tobytes()] = run_rail(rail, chunks, fabric, schedule.outstanding)
    return [runs[rail.tobytes()] for rail in slices if rail.any()]


def _result(
    schedule: Schedule,
    fabric: Fabric,
    time_s: float,
    fan_in: int,
    window_s: np.ndarray,
    before_s: np.ndarray,
    after_s: np.ndarray,
) -> Result:
    sent, total = schedule.sent_bytes, int(schedule.transfer_bytes.sum())
    ranks = schedule.topo.num_ranks
    algbw_gbs = total / (ranks * time_s) / 1e9 if total else 0.0
    busy = sent / (fabric.rail_bytes_s * time_s) if total else np.zeros(sent.shape)
    return Result(
        time_s=time_s,
        window_s=window_s,
        before_s=before_s,
        after_s=after_s,
        sent_bytes=sent,
        received_bytes=schedule.received_bytes,
        rail_share=sent.sum(axis=0) / max(total, 1),
        fan_in=fan_in,
        send_busy=busy,
        algbw_gbs=algbw_gbs,
        busbw_gbs=algbw_gbs * (ranks - 1) / ranks,
    )


def _ports(schedule: Schedule) -> tuple[np.ndarray, np.ndarray, int]:
    """Return (n,) int64 send and receive ports, node * R + rail, and how many there are."""
    rails = schedule.topo.rails_per_node
    send = schedule.source * rails + schedule.source_rail
    receive = schedule.destination * rails + schedule.destination_rail
    return send, receive, schedule.topo.nodes * rails


def _window_times(schedule: Schedule, fabric: Fabric) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (W,) float64 seconds of transfers; (W,) int64, the most of one sender, receiver."""
    send, receive, ports = _ports(schedule)
    shape = (schedule.num_windows, ports)
    send_load, send_flows = _load(schedule, send, shape)
    receive_load, receive_flows = _load(schedule, receive, shape)
    window_s = np.maximum(send_load, receive_load) / fabric.rail_bytes_s
    shared = (receive_flows > 1) & (not schedule.paced)
    chosen = np.flatnonzero(shared[schedule.window])
    if len(chosen):
        window_s[shared] = 0
        window, end_s = _fluid(schedule, fabric, chosen, send, receive, ports)
        np.maximum.at(window_s, window, end_s)
    return window_s, send_flows, receive_flows


def _load(schedule: Schedule, port: np.ndarray, shape: tuple[int, int]) -> tuple:
    """Return (W,) float64, bytes of each window's busiest port, and (W,) int64, flows of one."""
    index = schedule.window * shape[1] + port
    size = shape[0] * shape[1]
    load = np.bincount(index, weights=schedule.transfer_bytes, minlength=size).reshape(shape)
    flows = np.bincount(index, minlength=size).reshape(shape)
    return load.max(axis=1), flows.max(axis=1)


def _fluid(
    schedule: Schedule,
    fabric: Fabric,
    chosen: np.ndarray,
    send: np.ndarray,
    receive: np.ndarray,
    ports: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Follow the flows of some transfers; return (flows,) windows and end times."""
    window = schedule.window[chosen]
    key = (window * ports + send[chosen]) * ports + receive[chosen]
    key, flow = np.unique(key, return_inverse=True)
    amount = sum_by(flow, schedule.transfer_bytes[chosen], len(key))
    window, pair = np.divmod(key, ports * ports)
    # Windows do not meet; nor do rails where every transfer keeps to one.
    component = window
    if np.array_equal(schedule.source_rail, schedule.destination_rail):
        rails = schedule.topo.rails_per_node
        component = window * rails + pair % rails
    _, send_port = np.unique(window * ports + pair // ports, return_inverse=True)
    _, receive_port = np.unique(window * ports + pair % ports, return_inverse=True)
    flows = (send_port, receive_port, amount, component)
    return window, finish_times(*flows, fabric.rail_bytes_s, fabric.efficiency)


def latencies(schedule: Schedule, fabric: Fabric) -> np.ndarray:
    """Return (W,) float64 seconds added before each window that sends anything."""
    sends = np.bincount(schedule.window, minlength=schedule.num_windows) > 0
    granted = sends & (np.cumsum(sends) > 1) & schedule.granted
    return sends * fabric.wave_latency_s + granted * fabric.grant_latency_s


def _time_without_barriers(schedule: Schedule, fabric: Fabric, latency_s: np.ndarray) -> float:
    """Return the end of the last transfer and redistribution where there are no barriers."""
    send, receive, ports = _ports(schedule)
    order = np.argsort(schedule.window, kind="stable")
    ends = np.cumsum(np.bincount(schedule.window, minlength=schedule.num_windows))
    before_s = schedule.before.port_bytes / fabric.nvlink_bytes_s
    after_s = schedule.after.port_bytes / fabric.nvlink_bytes_s
    nodes, rails = schedule.topo.nodes, schedule.topo.rails_per_node
    stepwise = schedule.order == "stepwise"
    send_free, receive_free = np.zeros(ports), np.zeros(ports)
    ready, done = np.zeros(nodes), np.zeros(nodes)
    for window, now in enumerate(np.split(order, ends[:-1])):
        ready += before_s[window]
        out, into = send[now], receive[now]
        if stepwise:  # a put waits for what its node has put, and for what is taken at both ends
            put = send_free.reshape(nodes, rails).max(axis=1).repeat(rails)
            send_free = np.maximum(put, receive_free)
        start = np.maximum(np.maximum(send_free[out], receive_free[into]), ready[out // rails])
        end = start + latency_s[window] + schedule.transfer_bytes[now] / fabric.rail_bytes_s
        send_free[out], receive_free[into] = end, end
        if stepwise:
            receive_free = np.maximum(send_free, receive_free)
        arrived = receive_free.reshape(nodes, rails).max(axis=1)
        done = np.maximum(done, arrived) + after_s[window]
    return float(done.max())
