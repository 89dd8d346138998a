"""Spray chunks over the rails of the source: longest processing time first, as RailS does it.

Letters: N nodes, R rails, K chunks of the node that has the most.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from railwave._check import check_positive_int
from railwave.sched.build import now_us, schedule_pairs
from railwave.sched.demand import MOST_BYTES, Demand, check_demand
from railwave.sched.parts import window_of_pairs
from railwave.sched.schedule import Schedule

MAX_CHUNKS = 1 << 26  # of N * K, the size of the tables


def rails_lpt(demand: Demand, *, windows: Any = None, chunk_bytes: int | None = None) -> Schedule:
    """Cut every node's flows into chunks and give each, largest first, to its least-loaded rail.

    A flow is what one node has for another. Ties go to the lower rail; chunks of one size go in
    the order of their destinations. All rails send at once.

    Args:
        demand: what must be moved.
        windows: not read: all pairs run at once.
        chunk_bytes: the largest chunk; RailS does not publish its own. Default: 1 MiB, doubled
            until no node has more than 2**16.

    Raises:
        TypeError, ValueError: chunk_bytes below 1, or so small that there are too many chunks.

    Source: RailS (Xu et al. 2026, arXiv 2510.19262).

    Example:
        Node 0 cuts 7 bytes for node 1 and 2 for node 2 into chunks of 4, 3 and 2: rails 0 and 1
        take 4 and 3, and rail 1, with less, takes 2.

        >>> from railwave.topology import Topology
        >>> owned = np.zeros((3, 2, 3), int); owned[0, 0] = 0, 7, 2
        >>> bound = np.zeros((3, 3, 2), int); bound[0, 1, 0], bound[0, 2, 0] = 7, 2
        >>> sprayed = rails_lpt(Demand(owned, bound, Topology(3, 2, 2)), chunk_bytes=4)
        >>> sprayed.sent_bytes[0].tolist(), sprayed.received_bytes.tolist()
        ([4, 5], [[0, 0], [4, 3], [0, 2]])
    """
    check_demand(demand)
    start_us = now_us()
    if chunk_bytes is None:
        chunk_bytes = _default_chunk(demand)
    check_positive_int(chunk_bytes, "chunk_bytes", below=MOST_BYTES)
    sizes, destinations = _sorted_chunks(demand, chunk_bytes)
    N, R = demand.topo.nodes, demand.topo.rails_per_node
    eligible = demand.topo.eligible_rails.numpy()
    parts = np.zeros((N, N, R), dtype=np.int64)
    load = np.zeros((N, R), dtype=np.int64)
    node = np.arange(N)
    most = np.iinfo(np.int64).max
    for size, destination in zip(sizes.T, destinations.T, strict=True):
        rail = np.where(eligible[node, destination], load, most).argmin(axis=1)
        load[node, rail] += size
        parts[node, destination, rail] += size
    return schedule_pairs(demand, parts, *window_of_pairs(None, demand), start_us, name="rails_lpt")


def _default_chunk(demand: Demand) -> int:
    chunk_bytes, between = 1 << 20, demand.between_nodes
    while (-(-between // chunk_bytes)).sum(axis=1).max() > 1 << 16:
        chunk_bytes *= 2
    return chunk_bytes


def _sorted_chunks(demand: Demand, chunk_bytes: int) -> tuple[np.ndarray, np.ndarray]:
    """Return two (N, K) int64 tables, sizes in descending order and destinations, 0-padded."""
    between, nodes = demand.between_nodes, demand.topo.nodes
    num_chunks = -(-between // chunk_bytes)
    per_node = num_chunks.sum(axis=1)
    if nodes * int(per_node.max()) > MAX_CHUNKS:
        raise ValueError(
            f"chunk_bytes must leave at most {MAX_CHUNKS // nodes} chunks a node, got "
            f"{int(per_node.max())} with {chunk_bytes}"
        )
    pair = np.repeat(np.arange(nodes * nodes), num_chunks.ravel())
    source, destination = np.divmod(pair, nodes)
    is_last = np.append(pair[1:] != pair[:-1], True)[: len(pair)]
    last = between - (num_chunks - 1) * chunk_bytes
    size = np.where(is_last, last.ravel()[pair], chunk_bytes)
    order = np.lexsort((destination, -size, source))
    column = np.arange(len(pair)) - (np.cumsum(per_node) - per_node)[source]
    sizes = np.zeros((nodes, int(per_node.max())), dtype=np.int64)
    destinations = np.zeros_like(sizes)
    sizes[source, column] = size[order]
    destinations[source, column] = destination[order]
    return sizes, destinations
