"""What a phase must move between nodes: the input of every scheduler.

Letters: N nodes, G GPUs a node, W = N * G ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from railwave.topology import Topology

MOST_BYTES = 2**53  # in all: sums in float64 are exact below


@dataclass(frozen=True, eq=False)
class Demand:
    """Bytes between nodes, by the GPU that owns them and by the GPU that they are bound for.

    The two tables are the margins of the (W, W) demand that schedulers need: a rail is chosen by
    the source GPU, by the destination GPU, or by neither. What stays within a node is not in them.

    Args:
        owned: (N, G, N) int64, bytes that GPU g of node s owns for node d.
        bound: (N, N, G) int64, bytes from node s to node d that are bound for GPU g of d.
        topo: the cluster.

    Raises:
        TypeError, ValueError: a wrong type or shape; an entry that is not a whole number in
            [0, 2**53), or a sum that is not below; bytes from a node to itself; or tables whose
            sums over GPUs differ.

    Example:
        >>> topo = Topology(nodes=2, gpus_per_node=2, rails_per_node=2)
        >>> demand = Demand.of([[9, 0, 1, 2], [0, 9, 3, 4], [0, 0, 9, 0], [5, 0, 0, 9]], topo)
        >>> demand.between_nodes.tolist()
        [[0, 10], [5, 0]]
        >>> demand.owned[0, :, 1].tolist(), demand.bound[0, 1].tolist()
        ([3, 7], [4, 6])
    """

    owned: np.ndarray
    bound: np.ndarray
    topo: Topology

    def __post_init__(self) -> None:
        if not isinstance(self.topo, Topology):
            raise TypeError(f"topo must be a railwave.Topology, got {type(self.topo).__name__}")
        N, G = self.topo.nodes, self.topo.gpus_per_node
        for name, shape in (("owned", (N, G, N)), ("bound", (N, N, G))):
            table = _checked(getattr(self, name), name, shape)
            object.__setattr__(self, name, table)
        own = self.owned.sum(axis=1)
        if np.diagonal(own).any():
            raise ValueError("owned must be 0 from a node to itself: that crosses no rail")
        if not np.array_equal(own, self.bound.sum(axis=2)):
            raise ValueError("owned and bound must have the same sums over GPUs")

    @classmethod
    def of(cls, matrix: Any, topo: Topology) -> Demand:
        """Take the margins of a (W, W) table of bytes from rank to rank."""
        if not isinstance(topo, Topology):
            raise TypeError(f"topo must be a railwave.Topology, got {type(topo).__name__}")
        N, G = topo.nodes, topo.gpus_per_node
        table = _checked(matrix, "matrix", (N * G, N * G)).reshape(N, G, N, G)
        away = ~np.eye(N, dtype=bool)
        owned, bound = table.sum(axis=3), table.sum(axis=1)
        return cls(owned * away[:, None, :], bound * away[:, :, None], topo)

    @property
    def between_nodes(self) -> np.ndarray:
        """(N, N) int64, bytes from node to node; the diagonal is 0."""
        return self.owned.sum(axis=1)


def check_demand(demand: Any) -> None:
    """Raise TypeError for what is no `Demand`."""
    if not isinstance(demand, Demand):
        raise TypeError(
            f"demand must be a railwave.sched.Demand, got {type(demand).__name__}; make one with "
            "Demand.of(matrix, topo)"
        )


def _checked(table: Any, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return a table of whole numbers in [0, 2**53), with a sum below that, as int64."""
    if hasattr(table, "detach"):
        table = table.detach().cpu()
    try:
        array = np.asarray(table)
    except (ValueError, TypeError, RuntimeError) as error:
        raise TypeError(f"{name} must be numbers of bytes of shape {shape}: {error}") from None
    if array.dtype.kind not in "iuf":
        raise TypeError(f"{name} must be numbers of bytes, got {array.dtype}")
    if array.shape != shape:
        raise ValueError(f"{name} must be of shape {shape}, got {array.shape}")
    wrong = ~((array >= 0) & (array < MOST_BYTES) & (array == np.floor(array)))
    for place in np.argwhere(wrong)[:1].tolist():
        raise ValueError(
            f"{name} must be whole numbers of bytes in [0, 2**53), got {array[tuple(place)]} at "
            f"{tuple(place)}"
        )
    total = float(array.sum(dtype=np.float64))
    if total >= MOST_BYTES:
        raise ValueError(f"{name} must have a sum below 2**53 bytes, got {total:.4g}")
    return array.astype(np.int64)
