"""Share send and receive ports among flows, max-min fairly, until all flows have ended.

Letters: n flows, P ports on each side, C components (flows of two components share no port).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

# Shares and times this close, relatively, count as equal: float rounding is far below.
CLOSE = 1e-12


def max_min_rates(
    send: np.ndarray, receive: np.ndarray, send_rate: np.ndarray, receive_rate: np.ndarray
) -> np.ndarray:
    """Return the max-min fair rates of flows that each use one send and one receive port.

    Progressive filling, many ports a round: a port is full when none of its open flows has a
    smaller share at its other end. Its flows take that share, and no later round could give them
    more, as the shares of the ports left never fall.

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
    rates = np.zeros(len(send))
    where = np.arange(len(send))
    while len(where):
        send_share = send_left / np.maximum(np.bincount(send, minlength=num_send), 1)
        receive_share = receive_left / np.maximum(np.bincount(receive, minlength=num_receive), 1)
        at_send, at_receive = send_share[send], receive_share[receive]
        share = np.minimum(at_send, at_receive)
        limit = share * (1 + CLOSE)
        send_waits = np.zeros(num_send, dtype=bool)
        send_waits[send[at_send > limit]] = True
        receive_waits = np.zeros(num_receive, dtype=bool)
        receive_waits[receive[at_receive > limit]] = True
        full = ~(send_waits[send] & receive_waits[receive])
        rates[where[full]] = share[full]
        send_left -= np.bincount(send[full], weights=share[full], minlength=num_send)
        receive_left -= np.bincount(receive[full], weights=share[full], minlength=num_receive)
        where, send, receive = where[~full], send[~full], receive[~full]
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

    Rates change only when a flow ends. Each component goes from one end to the next by its own
    clock, all components in the same array operations.

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
    order = np.argsort(component, kind="stable")
    send, receive, left = send[order], receive[order], amount[order].astype(np.float64)
    _, component = np.unique(component[order], return_inverse=True)
    num_send, num_receive = int(send.max(initial=-1)) + 1, int(receive.max(initial=-1)) + 1
    full_rate = np.full(num_send, float(port_rate))
    clock = np.zeros(int(component.max(initial=-1)) + 1)
    finish = np.zeros(len(order))
    while len(order):
        num_senders = np.maximum(np.bincount(receive, minlength=num_receive), 1)
        rates = max_min_rates(send, receive, full_rate, port_rate * efficiency(num_senders))
        lasts = left / rates
        starts = np.flatnonzero(np.append(True, component[1:] != component[:-1]))
        clock[component[starts]] += (step := np.minimum.reduceat(lasts, starts))
        step = np.repeat(step, np.diff(np.append(starts, len(component))))
        left -= rates * step
        now = clock[component]
        ended = lasts - step <= CLOSE * now
        finish[order[ended]] = now[ended]
        on = ~ended
        order, send, receive = order[on], send[on], receive[on]
        left, component = left[on], component[on]
    return finish
