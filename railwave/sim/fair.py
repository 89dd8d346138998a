"""Share send and receive ports among flows, max-min fairly, until all flows have ended.

Letters: n flows, P ports on each side, C components (flows of two components share no port).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

# Shares and times this close, relatively, count as equal: float rounding is far below.
CLOSE = 1e-12
CLOSE_RATE = 1e-9  # wider: a rate is what subtractions leave


def max_min_rates(
    send: np.ndarray, receive: np.ndarray, send_rate: np.ndarray, receive_rate: np.ndarray
) -> np.ndarray:
    """Return the max-min fair rates of flows that each use one send and one receive port.

    Progressive filling, many ports a round: a port is full when each of its open flows has its
    smaller share there. They take that share: no later round could give them more or less, as the
    shares of the ports left never fall.

    Args:
        send, receive: (n,) int64 ports of each flow, in [0, P).
        send_rate, receive_rate: (P,) float64, positive.

    Returns:
        (n,) float64 rates.

    Source: progressive filling (Bertsekas and Gallager, Data Networks, section 6.5).

    Example:
        Port 0 sends to 0 and 1, port 1 to 1; all ports have rate 1 but receive port 1 has 0.5.
        Its two flows get 0.25 each, and the other flow what is left of send port 0.

        >>> one = np.ones(2)
        >>> flows = np.array([0, 0, 1]), np.array([0, 1, 1])
        >>> max_min_rates(*flows, one, np.array([1, 0.5])).tolist()
        [0.75, 0.25, 0.25]
    """
    send_left, receive_left = send_rate.astype(np.float64), receive_rate.astype(np.float64)
    num_send, num_receive = len(send_left), len(receive_left)
    send_flows = np.bincount(send, minlength=num_send)
    receive_flows = np.bincount(receive, minlength=num_receive)
    rates = np.zeros(len(send))
    flow = np.arange(len(send))
    while len(flow):
        at_send = (send_left / np.maximum(send_flows, 1)).take(send)
        at_receive = (receive_left / np.maximum(receive_flows, 1)).take(receive)
        from_here = send.compress(at_send <= at_receive * (1 + CLOSE))
        to_here = receive.compress(at_receive <= at_send * (1 + CLOSE))
        send_full = np.bincount(from_here, minlength=num_send) == send_flows
        receive_full = np.bincount(to_here, minlength=num_receive) == receive_flows
        full = send_full.take(send) | receive_full.take(receive)
        now, still = np.flatnonzero(full), np.flatnonzero(~full)
        assert len(now), "the port with the smallest share is full"
        share = np.minimum(at_send.take(now), at_receive.take(now))
        rates[flow.take(now)] = share
        out, into = send.take(now), receive.take(now)
        send_left -= np.bincount(out, weights=share, minlength=num_send)
        receive_left -= np.bincount(into, weights=share, minlength=num_receive)
        send_flows -= np.bincount(out, minlength=num_send)
        receive_flows -= np.bincount(into, minlength=num_receive)
        flow, send, receive = flow.take(still), send.take(still), receive.take(still)
    return rates


def finish_times(
    send: np.ndarray,
    receive: np.ndarray,
    amount: np.ndarray,
    component: np.ndarray,
    port_rate: float,
    efficiency: Callable[[np.ndarray], np.ndarray],
) -> np.ndarray:
    """Return when each flow ends, all having begun at 0 and sharing ports max-min fairly.

    Rates change only when a flow ends, and only those at least as high as that flow's. Each
    component goes from one end to the next by its own clock, all in the same array operations.

    Args:
        send, receive: (n,) int64 ports of each flow; no two flows have both the same.
        amount: (n,) bytes, positive.
        component: (n,) int64; flows that share a port have the same one.
        port_rate: bytes per second of a port, in each direction.
        efficiency: from the (P,) numbers of senders of receive ports to the (P,) parts of the
            rate left to them.

    Returns:
        (n,) float64 seconds.

    Example:
        Two flows of 1 and 3 bytes into one port of rate 1: both at 1/2 until 2, then one at 1.

        >>> flows = np.array([0, 1]), np.array([0, 0]), np.array([1, 3]), np.array([0, 0])
        >>> finish_times(*flows, 1.0, lambda senders: 1.0 + 0 * senders).tolist()
        [2.0, 4.0]
    """
    flows = _Flows(send, receive, amount, component)
    finish = np.zeros(len(amount))
    while flows.num_left:
        flows.share(port_rate, efficiency)
        flow, end = flows.advance()
        finish[flow] = end
    return finish


class _Flows:
    """Flows that have not ended (and some that have), sorted by component."""

    def __init__(
        self, send: np.ndarray, receive: np.ndarray, amount: np.ndarray, component: np.ndarray
    ) -> None:
        self.flow = np.lexsort((receive, send, component))
        self.send, self.receive = send[self.flow], receive[self.flow]
        _, self.component = np.unique(component[self.flow], return_inverse=True)
        self.num_components = int(self.component.max(initial=-1)) + 1
        self.num_send = int(send.max(initial=-1)) + 1
        self.num_receive = int(receive.max(initial=-1)) + 1
        self.num_senders = np.bincount(self.receive, minlength=self.num_receive)
        self.left = amount[self.flow].astype(np.float64)  # bytes, at the time `since`
        self.since, self.rate, self.end = np.zeros((3, len(self.flow)))
        self.changed = np.arange(len(self.flow))  # those that need a new rate
        self.num_left = len(self.flow)

    def share(self, port_rate: float, efficiency: Callable) -> None:
        """Give the changed flows what the others leave them of their ports."""
        changed = self.changed
        self.rate[changed] = 0
        send_rate = port_rate - np.bincount(self.send, self.rate, self.num_send)
        receive_rate = port_rate * efficiency(np.maximum(self.num_senders, 1))
        receive_rate -= np.bincount(self.receive, self.rate, self.num_receive)
        ports = self.send[changed], self.receive[changed]
        self.rate[changed] = max_min_rates(*ports, send_rate, receive_rate)
        self.end[changed] = self.since[changed] + self.left[changed] / self.rate[changed]

    def advance(self) -> tuple[np.ndarray, np.ndarray]:
        """Go to the next end in each component; return the flows that end and when.

        Those with smaller rates than every flow that ends keep theirs: their ports fill before the
        ones that are set free. The others are changed.
        """
        starts = np.flatnonzero(np.append(True, self.component[1:] != self.component[:-1]))
        now = np.full(self.num_components, -np.inf)
        now[self.component[starts]] = np.minimum.reduceat(self.end, starts)
        now[np.isinf(now)] = -np.inf  # all of the component's flows have ended
        ended = np.flatnonzero(self.end <= (now * (1 + CLOSE)).take(self.component))
        slowest = np.full(self.num_components, np.inf)
        np.minimum.at(slowest, self.component[ended], self.rate[ended] * (1 - CLOSE_RATE))
        finished = self.flow[ended], now[self.component[ended]]
        self.num_senders -= np.bincount(self.receive[ended], minlength=self.num_receive)
        self.rate[ended], self.end[ended] = 0, np.inf
        self.num_left -= len(ended)
        self.changed = np.flatnonzero(self.rate >= slowest.take(self.component))
        then = now[self.component[self.changed]]
        self.left[self.changed] -= self.rate[self.changed] * (then - self.since[self.changed])
        self.since[self.changed] = then
        self._drop_ended()
        return finished

    def _drop_ended(self) -> None:
        if self.num_left >= 0.8 * len(self.flow):
            return
        on = self.end < np.inf
        self.changed = (np.cumsum(on) - 1)[self.changed]
        for name in ("flow", "send", "receive", "component", "left", "since", "rate", "end"):
            setattr(self, name, getattr(self, name)[on])
