"""Plan one node's outgoing traffic as data: quotas per rail and what has to change rail.

Shape letters: N nodes, R rails.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from railwave._check import check_counts, check_index
from railwave.sched.quota import quota_ref
from railwave.topology import Topology


@dataclass(frozen=True, eq=False)
class Plan:
    """Hold the balanced plan of one source node. Column `node` of every table is zero."""

    counts: torch.Tensor  # (R, N) int64, records by owner rail and destination node
    quota: torch.Tensor  # (R, N) int64, records that each rail carries to each node
    relocated: torch.Tensor  # (N,) int64, records of each slice that change rail
    node: int
    topology: Topology

    def rail_share(self) -> torch.Tensor:
        """Return (R,) float64, each rail's part of the node's outgoing records once balanced.

        Zeros when the node sends nothing.
        """
        return _share(self.quota)

    def rail_share_before(self) -> torch.Tensor:
        """Return (R,) float64, each rail's part if every record left by its owner's rail."""
        return _share(self.counts)

    def spread(self) -> int:
        """Return the largest difference between eligible quotas of one slice: 0 or 1.

        Source: eq. (9).
        """
        spread = 0
        for peer in range(self.topology.nodes):
            quotas = self.quota[self.topology.eligible_rails[self.node, peer], peer]
            spread = max(spread, int(quotas.max() - quotas.min()))
        return spread


def plan(counts: Any, topo: Topology, *, node: int = 0) -> Plan:
    """Plan which rail carries how many of a node's records, from that node's counts alone.

    Args:
        counts: (R, N) integer tensor, ndarray or nested sequence: records of `node` by the rail
            of their owner and their destination node. Column `node` is not read, since traffic
            within a node never touches a rail.
        topo: the cluster.
        node: the source node, in [0, N).

    Raises:
        TypeError, ValueError: a wrong type, shape or sign, or records on a rail without a GPU.

    Source: eq. (9).

    Example:
        All 8 records start on rail 0. Each slice of 4 is divided in two, so 2 records of each
        change rail.

        >>> balanced = plan([[0, 4, 4], [0, 0, 0]], Topology(3, 2, 2), node=0)
        >>> balanced.quota.tolist(), balanced.relocated.tolist(), balanced.spread()
        ([[0, 2, 2], [0, 2, 2]], [0, 2, 2], 0)
        >>> balanced.rail_share_before().tolist(), balanced.rail_share().tolist()
        ([1.0, 0.0], [0.5, 0.5])
    """
    if not isinstance(topo, Topology):
        raise TypeError(f"topo must be a railwave.Topology, got {type(topo).__name__} {topo!r}")
    node = check_index(node, topo.nodes, "node")
    counts = check_counts(counts, (topo.rails_per_node, topo.nodes), "counts")
    counts[:, node] = 0
    for rail, gpus in enumerate(topo.gpus_of_rail):
        if not gpus and counts[rail].any():
            raise ValueError(
                f"counts must be 0 on a rail without a GPU, got {counts[rail].tolist()} on rail "
                f"{rail}; rail_of_gpu is {topo.rail_of_gpu}"
            )
    quota = quota_ref(counts, topo.eligible_rails[node], node)
    relocated = (counts - quota).clamp(min=0).sum(dim=0)
    return Plan(counts, quota, relocated, node, topo)


def _share(records: torch.Tensor) -> torch.Tensor:
    by_rail = records.sum(dim=1).to(torch.float64)
    return by_rail / by_rail.sum().clamp(min=1)
