"""What really went over the rails in one phase, counted while it ran.

Letters: N nodes, R rails, s source node, d destination node.
"""

from dataclasses import dataclass

import torch

from railwave.topology import Topology


@dataclass(frozen=True, eq=False)
class Traffic:
    """One phase, as it was carried out."""

    put_bytes: torch.Tensor  # (N, N, R) int64: bytes put from node s to node d on each rail
    # Per sending window (a wave, or all at once), the node pairs that put anything in it.
    windows: tuple[frozenset[tuple[int, int]], ...]
    max_fan_in: int  # most source nodes with payload in flight to one rail of one node at a time

    def rail_bytes(self) -> torch.Tensor:
        """Return (N, R) int64: bytes that each node put on each rail."""
        return self.put_bytes.sum(dim=1)


class TrafficRecorder:
    """Watch a phase: an `Observer` of every PE's exchange.

    A source node has payload in flight to a rail of a node from its first put of a round until the
    ingress PE has seen all of that PE's round.

    Example:
        >>> recorder = TrafficRecorder(Topology(3, 1, 1))
        >>> recorder.put(0, 2, rail=0, wave=2)
        >>> recorder.put(1, 2, rail=0, wave=1)
        >>> recorder.arrived(0, 2, rail=0)
        >>> recorder.max_fan_in
        2
    """

    def __init__(self, topo: Topology) -> None:
        self.topo = topo
        self.max_fan_in = 0
        self._windows: dict[int, set[tuple[int, int]]] = {}
        self._in_flight: dict[tuple[int, int], list[int]] = {}  # (node, rail): sending PEs

    def put(self, pe: int, peer: int, *, rail: int, wave: int) -> None:
        """PE `pe` starts to put a round of wave `wave` into PE `peer`."""
        s, d = self.topo.node_of(pe), self.topo.node_of(peer)
        self._windows.setdefault(wave, set()).add((s, d))
        senders = self._in_flight.setdefault((d, rail), [])
        senders.append(pe)
        self.max_fan_in = max(self.max_fan_in, len({self.topo.node_of(pe) for pe in senders}))

    def arrived(self, pe: int, peer: int, *, rail: int) -> None:
        """PE `peer` has seen all that PE `pe` put into it in the running round."""
        self._in_flight[self.topo.node_of(peer), rail].remove(pe)

    def traffic(self, put_words: list[torch.Tensor]) -> Traffic:
        """Sum the kernels' own counters, (N, ...) int64 32-bit words a PE, into what was put."""
        topo = self.topo
        put_bytes = torch.zeros(
            topo.nodes, topo.nodes, topo.rails_per_node, dtype=torch.int64, device="cpu"
        )
        for pe, words in enumerate(put_words):
            rail = topo.rail_of_gpu[topo.local_of(pe)]
            put_bytes[topo.node_of(pe), :, rail] += words[: topo.nodes].cpu() * 4
        windows = tuple(frozenset(self._windows[wave]) for wave in sorted(self._windows))
        return Traffic(put_bytes, windows, self.max_fan_in)
