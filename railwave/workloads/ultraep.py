"""The paper's two traffic families under UltraEP: every node sends to one.

Letters: N nodes, G GPUs a node, R rails.
"""

from __future__ import annotations

from typing import Any

import torch

from railwave._check import check_int, check_positive_int
from railwave.sched import Demand
from railwave.topology import Topology
from railwave.workloads.records import MAX_RECORDS, RECORD_BYTES, apportion, deal, in_bytes

_MIB = 2**20
_MIB_PER_GPU = {"N28": 28, "N42": 42, "R28": 28, "R42": 42}
ULTRAEP_CASES = tuple(_MIB_PER_GPU)


def ultraep_demand(
    case: str,
    topo: Topology,
    *,
    source_weights: Any = None,
    hot_rails: int = 2,
    record_bytes: int = RECORD_BYTES,
) -> Demand:
    """Build N28, N42 (source-node skew) or R28, R42 (source-rail skew), for one way.

    Nodes 1 to N - 1 send to node 0, in all 28 or 42 MiB times the ranks of the cluster (idle ones
    included: on 4 x 8 GPUs the paper's 65,536 or 98,304 records). A phase goes there and back, so
    the paper's times are two of these. What it leaves open is ours:

    - N: the sources' shares are N - 1 : ... : 1 (3 : 2 : 1 for four nodes), each spread evenly over
      its GPUs.
    - R: the sources' shares are equal, and each is owned, evenly, by the GPUs of rails 0 to
      hot_rails - 1 alone, the same in every node: the busiest rail has R / hot_rails times the
      mean. With 2 of 8 that is 4. One rail, 8, would need longer at 25 GB/s than the published
      times of Permutation.
    - Both: bound evenly for the GPUs of node 0, as routing is uniform over its experts. So a rail
      chosen by the destination's index is even here, and one chosen by the source's is not in R.

    Everything enters node 0, so T* is total / (R x rail rate), whatever the shares.

    Args:
        case: one of N28, N42, R28, R42.
        topo: the cluster, of at least 2 nodes.
        source_weights: (N - 1,) numbers >= 0, other shares of nodes 1, 2, ...; N cases only.
        hot_rails: in [1, R]; each needs a GPU; R cases only.
        record_bytes: bytes of a record; the total is rounded down to whole records.

    Returns:
        Demand.

    Raises:
        TypeError, ValueError: a case that is not listed, one node, or a bad argument.

    Source: A.2, Table 2.

    Example:
        28 MiB x 32 GPUs enter node 0 over 8 rails of 25 GB/s: 4.70 ms a way, 9.40 ms both ways.

        >>> demand = ultraep_demand("N28", Topology(4, 8, 8))
        >>> total = int(demand.between_nodes.sum())
        >>> total // 14336, round(2 * total / (8 * 25e9) * 1e3, 2)
        (65536, 9.4)
    """
    if case not in _MIB_PER_GPU:
        raise ValueError(f"case must be one of {list(ULTRAEP_CASES)}, got {case!r}")
    N, G = topo.nodes, topo.gpus_per_node
    if N < 2:
        raise ValueError(f"topo must have at least 2 nodes, got {N}")
    record_bytes = check_positive_int(record_bytes, "record_bytes", below=MAX_RECORDS)
    if source_weights is not None and case[0] == "R":
        raise ValueError(f"source_weights must go with N28 or N42, got {case}")
    total = _MIB_PER_GPU[case] * _MIB * topo.num_ranks // record_bytes
    if case[0] == "N":
        sent, owners = apportion(total, _checked_weights(source_weights, N - 1)), list(range(G))
    else:
        sent, owners = apportion(total, [1] * (N - 1)), _gpus_of(topo, hot_rails)
    owned = torch.zeros(N, G, N, dtype=torch.int64, device="cpu")
    owned[1:, owners, 0] = deal(sent, len(owners))
    bound = torch.zeros(N, N, G, dtype=torch.int64, device="cpu")
    bound[1:, 0] = deal(sent, G)
    return Demand(in_bytes(owned, record_bytes), in_bytes(bound, record_bytes), topo)


def _checked_weights(source_weights: Any, num_sources: int) -> list:
    if source_weights is None:
        return list(range(num_sources, 0, -1))
    weights = list(source_weights)
    if len(weights) != num_sources:
        raise ValueError(
            f"source_weights must have one number for each of the {num_sources} sending nodes, "
            f"got {len(weights)}: {weights}"
        )
    return weights


def _gpus_of(topo: Topology, hot_rails: int) -> list[int]:
    """List the GPUs of the first `hot_rails` rails, refusing a rail without one."""
    if not 1 <= check_int(hot_rails, "hot_rails") <= topo.rails_per_node:
        raise ValueError(f"hot_rails must be in [1, {topo.rails_per_node}], got {hot_rails}")
    groups = topo.gpus_of_rail[:hot_rails]
    if not all(groups):
        raise ValueError(f"hot_rails must be rails with a GPU, got {groups} on rails 0, 1, ...")
    return sorted(gpu for group in groups for gpu in group)
