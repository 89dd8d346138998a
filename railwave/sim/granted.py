"""Follow granted chunks on one rail, event by event: the protocol of `docs/granted.md` with time.

Letters: N nodes; s a sending, d a receiving node.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from railwave.sim.fabric import Fabric

# While a chunk's last round trips run, its receiver may grant another and its sender take one: one
# for the grant itself, one for a first try that is handed back.
AHEAD_ROUND_TRIPS = 2


@dataclass(frozen=True)
class RailRun:
    """Say how the chunks of one rail went."""

    time_s: float  # until the last chunk has arrived
    fan_in: int  # the most senders with a chunk on its way to one receiver
    num_chunks: int
    num_words: int  # grants, hand-backs and openings written; arrivals, one a chunk, are not in it


def run_rail(
    slice_bytes: np.ndarray, chunk_bytes: np.ndarray, fabric: Fabric, outstanding: int = 2
) -> RailRun:
    """Run the protocol on one rail.

    Every word and every byte takes half of `fabric.grant_latency_s` to its reader, so that this is
    the time from a grant to its first byte. A NIC sends and receives one chunk at a time, at line
    rate: a chunk whose receiver is busy waits with its sender. One that begins while another is on
    its way there takes 1 / fabric.efficiency(2) as long. Ties go in the order of `_Rail`.

    Args:
        slice_bytes: (N, N) int64, what s sends to d on this rail.
        chunk_bytes: (N, N) int64, at least 1 where there is something to send.
        fabric: rates and the round trip of a grant.
        outstanding: 1 or 2 grants out at a receiver, and held by a sender.

    Source: `docs/granted.md`.

    Example:
        Nodes 1 and 2 send 2 and 4 bytes to node 0 in chunks of 2; a round trip takes 1 s. With one
        grant out, each of 3 chunks takes 1 + 2 s; with two, the round trips after the first hide.

        >>> slices = np.array([[0, 0, 0], [2, 0, 0], [4, 0, 0]])
        >>> chunks = np.full((3, 3), 2)
        >>> fabric = Fabric(1.0, grant_latency_s=1.0)
        >>> run_rail(slices, chunks, fabric, 1).time_s, run_rail(slices, chunks, fabric, 2).time_s
        (9.0, 7.0)
    """
    return _Rail(slice_bytes, chunk_bytes, fabric, outstanding).run()


class _Rail:
    """Hold the state of all nodes; sets of nodes are bits of an int, node n being 1 << n.

    A receiver grants the sender that has most chunks left for it; of equals, in descending order
    from its wave-1 sender, d - 1, on. A sender opens in ascending order from s + 1 on, and takes
    grants first come, first served. Events of one instant are handled in the order in which they
    were made.
    """

    def __init__(
        self, slice_bytes: np.ndarray, chunk_bytes: np.ndarray, fabric: Fabric, outstanding: int
    ) -> None:
        nodes = range(len(slice_bytes))
        self.fabric, self.outstanding = fabric, outstanding
        self.hop_s = fabric.grant_latency_s / 2
        self.ahead_s = AHEAD_ROUND_TRIPS * fabric.grant_latency_s if outstanding > 1 else 0.0
        # Receivers: by sender, bytes still to come and chunks not granted, chunk sizes ...
        self.owed = slice_bytes.T.tolist()
        self.chunk = chunk_bytes.T.tolist()
        self.left = [
            [-(-b // c) if b else 0 for b, c in zip(owed, chunk, strict=True)]
            for owed, chunk in zip(self.owed, self.chunk, strict=True)
        ]
        # ... senders by chunks not granted, those that may be granted, grants out, chunks near
        # their end, who is next.
        self.by_left = [
            [sum(1 << s for s in nodes if left[s] == n) for n in range(max(left) + 1)]
            for left in self.left
        ]
        self.open = [sum(1 << s for s in nodes if left[s]) for left in self.left]
        self.out, self.near = [0 for _ in nodes], [0 for _ in nodes]
        self.next = [(d - 1) % len(nodes) for d in nodes]
        # Senders: the receiver of the chunk under way, of the grant held, may take, who waits.
        self.serving: list[int | None] = [None for _ in nodes]
        self.held: list[int | None] = [None for _ in nodes]
        self.taking, self.waiting = [True for _ in nodes], [0 for _ in nodes]
        # Ports: when the receiving one is free, chunks on their way to it.
        self.port_free = [0.0 for _ in nodes]
        self.in_flight = [0 for _ in nodes]
        self.time_s, self.fan_in, self.num_chunks, self.num_words = 0.0, 0, 0, 0
        self.now, self.num_events = 0.0, 0
        self.events: list[tuple[float, int, Callable[[int, int], None], int, int]] = []

    def run(self) -> RailRun:
        for d in range(len(self.owed)):
            self._give(d)
        while self.events:
            self.now, _, handle, s, d = heapq.heappop(self.events)
            handle(s, d)
        assert not any(map(any, self.owed)), "every chunk has been sent"
        return RailRun(self.time_s, self.fan_in, self.num_chunks, self.num_words)

    def _at(self, time_s: float, handle: Callable[[int, int], None], s: int, d: int) -> None:
        self.num_events += 1
        heapq.heappush(self.events, (max(time_s, self.now), self.num_events, handle, s, d))

    def _give(self, d: int) -> None:
        """Grant open senders, one at a time but for the end of a chunk, as many as may be out."""
        while self.open[d] and self.out[d] < (
            self.outstanding if self.near[d] >= self.out[d] else 1
        ):
            s = self._choose(d)
            self._count_left(d, s, -1)
            self.next[d] = (s - 1) % len(self.owed)
            self.out[d] += 1
            self.num_words += 1
            self._at(self.now + self.hop_s, self._granted, s, d)

    def _choose(self, d: int) -> int:
        """Return the open sender with the most chunks left; of equals, the next in turn."""
        most = next(some for level in reversed(self.by_left[d]) if (some := level & self.open[d]))
        first = most & ((2 << self.next[d]) - 1)
        return (first or most).bit_length() - 1

    def _count_left(self, d: int, s: int, change: int) -> None:
        """Change how many chunks of s are not granted; d may grant s while there are some."""
        left = self.left[d][s]
        self.by_left[d][left] &= ~(1 << s)
        self.left[d][s] = left = left + change
        self.by_left[d][left] |= 1 << s
        if not left:
            self.open[d] &= ~(1 << s)

    def _granted(self, s: int, d: int) -> None:
        """Begin, or hold the grant for after the chunk under way, or hand it back."""
        if not self.taking[s]:
            self.waiting[s] |= 1 << d
            self.num_words += 1
            self._at(self.now + self.hop_s, self._handed_back, s, d)
        elif self.serving[s] is None:
            self._begin(s, d)
        else:
            self.held[s], self.taking[s] = d, False

    def _handed_back(self, s: int, d: int) -> None:
        self.out[d] -= 1
        self._count_left(d, s, 1)
        self.open[d] &= ~(1 << s)
        self._give(d)

    def _begin(self, s: int, d: int) -> None:
        self.serving[s], self.taking[s] = d, False
        size = min(self.chunk[d][s], self.owed[d][s])
        self.owed[d][s] -= size
        self.num_chunks += 1
        self.in_flight[d] += 1
        self.fan_in = max(self.fan_in, self.in_flight[d])
        rate = self.fabric.rail_bytes_s * self.fabric.efficiency(self.in_flight[d])
        # Bytes arrive a hop after they leave, as soon as the port has ended the chunk before.
        end = max(self.now, self.port_free[d] - self.hop_s) + size / rate
        self.port_free[d] = end + self.hop_s
        if self.ahead_s:
            self._at(end - self.ahead_s, self._sender_near, s, d)
            self._at(max(self.now, end - self.ahead_s) + self.hop_s, self._receiver_near, s, d)
        self._at(end, self._sent, s, d)
        self._at(end + self.hop_s, self._arrived, s, d)

    def _sender_near(self, s: int, _: int) -> None:
        self.taking[s] = True
        self._open_up(s)

    def _receiver_near(self, _: int, d: int) -> None:
        self.near[d] += 1
        self._give(d)

    def _sent(self, s: int, _: int) -> None:
        held, self.held[s], self.serving[s] = self.held[s], None, None
        if held is not None:
            self._begin(s, held)
            return
        self.taking[s] = True
        self._open_up(s)

    def _arrived(self, _: int, d: int) -> None:
        self.time_s = self.now
        self.in_flight[d] -= 1
        self.out[d] -= 1
        self.near[d] -= bool(self.ahead_s)
        self._give(d)

    def _open_up(self, s: int) -> None:
        """Tell all whose grants were handed back that a grant can be taken again."""
        waiting, self.waiting[s] = self.waiting[s], 0
        if waiting:
            self.num_words += waiting.bit_count()
            self._at(self.now + self.hop_s, self._opened, s, waiting)

    def _opened(self, s: int, waiting: int) -> None:
        after = waiting >> (s + 1) << (s + 1)
        for some in (after, waiting ^ after):
            while some:
                lowest = some & -some
                some ^= lowest
                d = lowest.bit_length() - 1
                self.open[d] |= 1 << s
                self._give(d)
