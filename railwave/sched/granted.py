"""Let receivers grant senders chunk by chunk: the path `granted`, as far as a plan goes.

Who sends when is not planned: it follows from the words of `docs/granted.md` while the phase runs,
as `railwave.kernels.granted` does it and `railwave.sim.granted` follows it. Planned are joint's
rails and, from the size of a slice, the chunks.

Letters: N nodes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from railwave._check import check_positive_int
from railwave.sched.build import now_us, schedule_pairs
from railwave.sched.demand import MOST_BYTES, Demand, check_demand
from railwave.sched.parts import balanced_parts, window_of_pairs
from railwave.sched.schedule import MOST_OUTSTANDING, Schedule

CHUNKS_A_SLICE = 32  # at most: fewer leave the last chunks of a busy receiver unbalanced
ROUND_TRIPS_A_CHUNK = 32  # at least: a hand-back costs a round trip in which a receiver may idle


def granted(
    demand: Demand, *, windows: Any = None, record_bytes: int = 1, outstanding: int = 2
) -> Schedule:
    """Divide every pair evenly among its eligible rails; receivers grant it chunk by chunk.

    Args:
        demand: what must be moved.
        windows: not read: grants take the place of the windows.
        record_bytes: the unit that is never divided.
        outstanding: grants that a receiver may have out on a rail, and that a sender may hold: 1,
            the next after the chunk has ended; 2, one more while the chunk ends.

    Raises:
        TypeError, ValueError: bytes that are no multiple of `record_bytes`, or outstanding other
            than 1 and 2.

    Source: `docs/granted.md`; the rails by eq. (9).

    Example:
        Node 0 has 5 bytes for node 1 and 1 for node 2, node 1 has 4 for node 2. In waves, 0 -> 1
        and 1 -> 2 take 5 seconds, and 0 -> 2 then 1; here, too: node 0 has 6 to send.

        >>> from railwave.sim import Fabric, simulate
        >>> from railwave.topology import Topology
        >>> demand = Demand.of([[0, 5, 1], [0, 0, 4], [0, 0, 0]], Topology(3, 1, 1))
        >>> schedule = granted(demand)
        >>> schedule.order, schedule.transfer_bytes.tolist(), simulate(schedule, Fabric(1.0)).time_s
        ('chunkwise', [5, 1, 4], 6.0)
    """
    check_demand(demand)
    check_positive_int(outstanding, "outstanding", below=MOST_OUTSTANDING + 1)
    start_us = now_us()
    parts = balanced_parts(demand, record_bytes)
    how: dict[str, Any] = {"name": "granted", "rail_rule": "even", "unit_bytes": record_bytes}
    how |= {"order": "chunkwise", "outstanding": outstanding}
    return schedule_pairs(demand, parts, *window_of_pairs(None, demand), start_us, **how)


def chunk_bytes(slice_bytes: np.ndarray, record_bytes: int, round_trip_bytes: float) -> np.ndarray:
    """Return how many bytes of each slice one grant lets go, in whole records.

    A 32nd of the slice, but at least 32 times what a rail carries in a grant's round trip, so that
    words cost little: short slices, which even demand is made of on many nodes, go whole.

    Args:
        slice_bytes: (...) int64, what a pair of nodes sends on one rail.
        record_bytes: the unit that is never divided.
        round_trip_bytes: a grant's round trip times the rail's rate, at least 0.

    Returns:
        (...) int64, at least one record; a slice's last chunk may have less.

    Raises:
        TypeError, ValueError: a unit or a round trip out of range.

    Source: `docs/granted.md`.

    Example:
        Of 640 and 10 bytes in records of 2; then with a round trip of 1 byte.

        >>> chunk_bytes(np.array([640, 10]), 2, 0).tolist()
        [20, 2]
        >>> chunk_bytes(np.array([640, 10]), 2, 1).tolist()
        [32, 32]
    """
    check_positive_int(record_bytes, "record_bytes", below=MOST_BYTES)
    if not round_trip_bytes >= 0:
        raise ValueError(f"round_trip_bytes must be at least 0, got {round_trip_bytes}")
    # Beyond MOST_BYTES every slice goes whole.
    least = int(min(ROUND_TRIPS_A_CHUNK * round_trip_bytes, MOST_BYTES))
    wanted = np.maximum(-(-slice_bytes // CHUNKS_A_SLICE), least)
    return np.maximum(-(-wanted // record_bytes), 1) * record_bytes
