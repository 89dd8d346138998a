"""The paper's replay: four sending patterns over expert counts, sorted into bins.

Letters: N nodes, G GPUs a node, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from railwave._check import check_positive_int
from railwave.sched import Demand, waves
from railwave.topology import Topology
from railwave.workloads.records import RECORD_BYTES, check_records, deal, in_bytes

# Table 8: per wave, the destinations of nodes 0 to 3.
_FOUR_NODE_WAVES = {
    "moderate": ((1, 0, 0, 2), (2, 3, 1, 0), (3, 2, 3, 1)),
    "extreme": ((1, 0, 0, 0), (3, 3, 3, 2), (2, 2, 1, 1)),
}
PATTERNS = ("ring", "moderate", "extreme", "permutation")


@dataclass(frozen=True, eq=False)
class Replay:
    """Hold a demand and when its node pairs send; the windows follow one another."""

    demand: Demand
    windows: tuple[frozenset[tuple[int, int]], ...]  # of (source, destination) nodes


def expert_bins(counts: Any, gpus_per_node: int) -> torch.Tensor:
    """Sort expert counts, the largest first, and sum them in G groups of as many experts.

    Args:
        counts: (E,) integers >= 0; the paper has E = 128.
        gpus_per_node: G, dividing E; the paper's groups are of 16, for 8 GPUs.

    Returns:
        (G,) int64, not increasing: the bin of each local GPU.

    Raises:
        TypeError, ValueError: counts are not such integers, or G does not divide E.

    Source: A.6. That GPU 0 has the largest bin is ours, after the falling shares of Figure 8.

    Example:
        >>> expert_bins([1, 5, 2, 9], gpus_per_node=2).tolist()
        [14, 3]
    """
    loads = check_records(counts, None, "counts")
    gpus = check_positive_int(gpus_per_node, "gpus_per_node")
    if not len(loads) or len(loads) % gpus:
        raise ValueError(
            f"counts must be of a positive multiple of gpus_per_node ({gpus}) experts, "
            f"got {len(loads)}"
        )
    return loads.sort(descending=True).values.view(gpus, -1).sum(dim=1)


def replay_windows(pattern: str, nodes: int) -> tuple[frozenset[tuple[int, int]], ...]:
    """List the (source, destination) pairs of each wave of a pattern.

    Args:
        pattern: "ring" (one wave to the next node), "moderate" and "extreme" (Table 8), or
            "permutation" (the N - 1 cyclic waves).
        nodes: N, at least 2; moderate and extreme are known for 4 only.

    Raises:
        TypeError, ValueError: a pattern that is not listed, or a number of nodes that it lacks.

    Source: Table 8; eq. (10) for permutation.

    Example:
        Nodes 1 to 3 all send to node 0 in the first wave of extreme.

        >>> sorted(replay_windows("extreme", 4)[0])
        [(0, 1), (1, 0), (2, 0), (3, 0)]
    """
    if pattern not in PATTERNS:
        raise ValueError(f"pattern must be one of {list(PATTERNS)}, got {pattern!r}")
    nodes = check_positive_int(nodes, "nodes")
    if nodes < 2:
        raise ValueError(f"nodes must be at least 2 for a replay, got {nodes}")
    if pattern in _FOUR_NODE_WAVES and nodes != 4:
        raise ValueError(
            f"nodes must be 4 for {pattern!r} (the paper's Table 8), got {nodes}; ring and "
            "permutation take any number from 2"
        )
    if pattern == "ring":
        table = waves(nodes)[:1]
    else:
        table = _FOUR_NODE_WAVES.get(pattern) or waves(nodes)
    return tuple(frozenset(enumerate(destinations)) for destinations in table)


def replay(
    pattern: str,
    counts: Any,
    topo: Topology,
    *,
    even_sources: bool = False,
    record_bytes: int = RECORD_BYTES,
) -> Replay:
    """Build the paper's replay of one layer: the sum of its counts leaves every node.

    Bin g (see `expert_bins`) is what local GPU g of every source node owns, and also what is bound
    for local GPU g of the destinations. Native is therefore uneven whether the rail is that of the
    source GPU or of the destination's. Ring sends a bin whole to the next node; the other patterns
    share it out over the other nodes with `deal`, nodes s + 1, s + 2, ... in turn, so that two
    pairs of nodes differ by at most one record.

    Args:
        pattern: see `replay_windows`.
        counts: (E,) integers >= 0, records for each expert that one source node sends; G divides E.
        topo: the cluster.
        even_sources: share what a node sends out evenly over the GPUs that own it, to within one
            record. Not the paper's: it shows what the sources' share of the unevenness is.
        record_bytes: bytes of a record.

    Returns:
        Replay. Moderate, extreme and permutation have the same demand.

    Raises:
        TypeError, ValueError: as `expert_bins` and `replay_windows`; too many bytes for int64.

    Source: A.6, Table 8, Figure 8.

    Example:
        The bins are 5 and 1; over three nodes 2 + 2 + 1 and 0 + 0 + 1.

        >>> topo = Topology(4, 2, 2)
        >>> ring = replay("ring", [5, 1], topo, record_bytes=1).demand
        >>> ring.owned[0].tolist()
        [[0, 5, 0, 0], [0, 1, 0, 0]]
        >>> moderate = replay("moderate", [5, 1], topo, record_bytes=1).demand
        >>> moderate.owned[0].tolist(), moderate.bound[0].tolist()
        ([[0, 2, 2, 1], [0, 0, 0, 1]], [[0, 0], [2, 0], [2, 0], [1, 1]])
        >>> even = replay("ring", [5, 1], topo, even_sources=True, record_bytes=1).demand
        >>> even.owned[0].tolist(), even.bound[0, 1].tolist()
        ([[0, 3, 0, 0], [0, 3, 0, 0]], [5, 1])
    """
    N, G = topo.nodes, topo.gpus_per_node
    windows = replay_windows(pattern, N)
    bins = expert_bins(counts, G)
    bound_for = deal(bins, 1 if pattern == "ring" else N - 1)  # (G, shifts)
    owned_by = deal(bound_for.sum(dim=0), G).T if even_sources else bound_for
    owned = torch.zeros(N, G, N, dtype=torch.int64, device="cpu")
    bound = torch.zeros(N, N, G, dtype=torch.int64, device="cpu")
    for source in range(N):
        for place in range(bound_for.shape[1]):
            destination = (source + 1 + place) % N
            owned[source, :, destination] = owned_by[:, place]
            bound[source, destination] = bound_for[:, place]
    demand = Demand(in_bytes(owned, record_bytes), in_bytes(bound, record_bytes), topo)
    return Replay(demand, windows)
