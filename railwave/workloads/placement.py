"""Experts with replicas: from the loads of logical experts to those of physical ones and ranks.

A logical expert is one of the model; each of its copies on a GPU is a physical expert.

Letters: L layers, E logical experts, P physical experts, X the most replicas of an expert, W ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from railwave._check import (
    check_counts,
    check_index,
    check_non_negative_int,
    check_positive_int,
)
from railwave.workloads.records import check_records, deal

_IDS = (torch.int32, torch.int64)


@dataclass(frozen=True, eq=False)
class Placement:
    """Hold the maps of an expert placement as EPLB hands them over, and check that they agree.

    Physical expert p is on rank p // (P / W): rank r holds the weights of the logical experts
    phy2log[layer, r * P // W : (r + 1) * P // W], and a dispatch's local expert 0 is the first of
    them. Gradients of an expert's replicas are the caller's to add up.

    Args:
        phy2log: (L, P) int64, the logical expert of each physical one.
        log2phy: (L, E, X) int64, the physical experts of each logical one, then -1.
        logcnt: (L, E) int64, how many those are, at least 1.

    Raises:
        TypeError: a map is not integers.
        ValueError: a wrong shape or range, a logical expert without a replica, or maps that
            disagree; with map, place, rule and value.

    Source: `rebalance_experts` of EPLB, which returns the three in this order.

    Example:
        Logical expert 0 has the replicas 0 and 2. It has 5 records: 3 for the first, 2 for the
        second.

        >>> placement = Placement([[0, 1, 0]], [[[0, 2], [1, -1]]], [[2, 1]])
        >>> placement.physical_loads([5, 7], layer=0).tolist()
        [3, 7, 2]
        >>> placement.rank_loads([5, 7], layer=0, num_ranks=3).tolist()
        [3, 7, 2]
    """

    phy2log: Any
    log2phy: Any
    logcnt: Any
    _there: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        logcnt = check_counts(self.logcnt, None, "logcnt")
        phy2log = check_counts(self.phy2log, None, "phy2log")
        log2phy = _integers(self.log2phy, "log2phy")
        (L, E), P = logcnt.shape, phy2log.shape[1]
        if not (L and E and P) or phy2log.shape[0] != L:
            raise ValueError(
                "phy2log and logcnt must be of shape (layers, physical) and (layers, logical), "
                f"no axis empty, got {tuple(phy2log.shape)} and {(L, E)}"
            )
        if log2phy.ndim != 3 or tuple(log2phy.shape[:2]) != (L, E):
            raise ValueError(
                f"log2phy must be of shape ({L}, {E}, replicas), got {tuple(log2phy.shape)}"
            )
        for layer in range(L):
            _check_layer(phy2log[layer], log2phy[layer], logcnt[layer], f"[{layer}]")
        for name, table in (("phy2log", phy2log), ("log2phy", log2phy), ("logcnt", logcnt)):
            object.__setattr__(self, name, table)

    @classmethod
    def of(cls, phy2log: Any, num_logical: int) -> Placement:
        """Derive the other two maps from (L, P) phy2log: replicas in the order of their indices.

        Example:
            >>> Placement.of([[1, 0, 1]], num_logical=2).log2phy.tolist()
            [[[1, -1], [0, 2]]]
        """
        table = check_counts(phy2log, None, "phy2log")
        E = check_positive_int(num_logical, "num_logical")
        if table.numel() and int(table.max()) >= E:
            raise ValueError(f"phy2log must be in [0, {E}), got {int(table.max())}")
        replicas = [[(row == e).nonzero().flatten().tolist() for e in range(E)] for row in table]
        width = max((len(found) for row in replicas for found in row), default=0)
        log2phy = [[found + [-1] * (width - len(found)) for found in row] for row in replicas]
        logcnt = [[len(found) for found in row] for row in replicas]
        return cls(table, log2phy, logcnt)

    def physical_ids(self, topk_idx: torch.Tensor, layer: int, *, rank: int) -> torch.Tensor:
        """Choose a replica for every choice of a router: the ids that a dispatch takes.

        Of a rank's choices of one expert, by token and then by k, number n takes replica
        (n + rank) mod logcnt: they differ by at most one, and ranks do not all begin with the same
        one. Nothing else is looked at, so the same arguments give the same ids. Runs on the device
        of topk_idx; a layer's first call there brings its tables, others wait for nothing.

        Args:
            topk_idx: (T, K) int32 or int64, logical experts; -1 for none.
            layer: which of the L placements.
            rank: of the caller.

        Returns:
            (T, K), dtype as given: physical experts, -1 for none; P, which a dispatch refuses, in
            the place of an id that is no logical expert. A dispatch with num_experts = P takes them
            as they are, and `Received.topk_idx` counts each rank's physical experts from its first.

        Raises:
            TypeError, ValueError: topk_idx is no such tensor, layer is not below L, or rank is
                negative.

        Example:
            Logical expert 0 has the replicas 0 and 2: its three choices alternate.

            >>> placement = Placement.of([[0, 1, 0]], num_logical=2)
            >>> ids = torch.tensor([[0, 1], [0, -1], [0, 1]])
            >>> placement.physical_ids(ids, 0, rank=0).tolist()
            [[0, 1], [2, -1], [0, 1]]
            >>> placement.physical_ids(torch.tensor([[0], [0]]), 0, rank=1).tolist()
            [[2], [0]]
        """
        layer = check_index(layer, len(self.logcnt), "layer")
        rank = check_non_negative_int(rank, "rank")
        if not isinstance(topk_idx, torch.Tensor) or topk_idx.dtype not in _IDS:
            kind = getattr(topk_idx, "dtype", type(topk_idx).__name__)
            raise TypeError(f"topk_idx must be an int32 or int64 tensor, got {kind}")
        if topk_idx.ndim != 2:
            raise ValueError(f"topk_idx must have shape (T, K), got {tuple(topk_idx.shape)}")
        log2phy, logcnt = self._tables(layer, topk_idx.device)
        E, P = len(logcnt), self.phy2log.shape[1]
        expert = topk_idx.reshape(-1).long()
        known = (expert >= 0) & (expert < E)
        expert = torch.where(known, expert, E)  # E: a place of its own for those that are none
        order = expert.argsort(stable=True)
        counts = torch.zeros(E + 1, dtype=torch.int64, device=expert.device)
        counts.scatter_add_(0, expert, torch.ones_like(expert))
        starts = counts.cumsum(0) - counts
        number = torch.empty_like(expert)
        place = torch.arange(len(expert), device=expert.device)
        number[order] = place - starts[expert[order]]
        expert = expert.clamp(max=E - 1)
        chosen = log2phy[expert, (number + rank) % logcnt[expert]]
        chosen = torch.where(known, chosen, P)
        ids = torch.where(topk_idx.reshape(-1) == -1, -1, chosen)
        return ids.view(topk_idx.shape).to(topk_idx.dtype)

    def _tables(self, layer: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log2phy (E, X) and logcnt (E,) of a layer on a device, brought there once."""
        key = (layer, device)
        if key not in self._there:
            with torch.inference_mode(False):  # else they could not be used outside it
                tables = (self.log2phy[layer].to(device), self.logcnt[layer].to(device))
            self._there[key] = tables
        return self._there[key]

    def physical_loads(self, loads: Any, layer: int) -> torch.Tensor:
        """Share the records of logical experts out over their replicas.

        The records of an expert are numbered source by source, and number k goes to replica
        k mod logcnt, in the order of log2phy. So replicas differ by at most one record in sum and
        also in what one source sends them, and adding up the sources before or after is the same.

        Args:
            loads: (E,) integers >= 0, records of each logical expert; or (S, E), by source.
            layer: which of the L placements.

        Returns:
            (P,) or (S, P) int64, with the sum of loads.

        Raises:
            TypeError, ValueError: loads are not such integers, or layer is not below L.

        Example:
            Source 0's records 0 to 2 go to replicas 0, 2, 0; source 1's record 3 to replica 2.

            >>> placement = Placement.of([[0, 1, 0]], num_logical=2)
            >>> placement.physical_loads([[3, 0], [1, 9]], layer=0).tolist()
            [[2, 0, 1], [0, 9, 1]]
        """
        layer = check_index(layer, len(self.logcnt), "layer")
        ndim = torch.as_tensor(loads, device="cpu").ndim
        if ndim not in (1, 2):
            raise ValueError(f"loads must have 1 or 2 dimensions, got {ndim}")
        table = check_records(loads, None, "loads", ndim=ndim)
        num_logical, num_physical = self.logcnt.shape[1], self.phy2log.shape[1]
        if table.shape[-1] != num_logical:
            raise ValueError(
                f"loads must be of {num_logical} logical experts, got {table.shape[-1]}"
            )
        by_source = table.view(-1, num_logical)
        physical = torch.zeros(len(by_source), num_physical, dtype=torch.int64, device="cpu")
        for expert, copies in enumerate(self.logcnt[layer].tolist()):
            replicas = self.log2phy[layer, expert, :copies]
            physical[:, replicas] = deal(by_source[:, expert], copies)
        return physical.view(*table.shape[:-1], num_physical)

    def rank_loads(self, loads: Any, layer: int, num_ranks: int) -> torch.Tensor:
        """Sum `physical_loads` over the experts of each rank.

        Args:
            loads, layer: as `physical_loads`.
            num_ranks: W, dividing P; physical expert p is on rank p // (P / W).

        Returns:
            (W,) or (S, W) int64, records for each rank.

        Example:
            >>> placement = Placement.of([[0, 1, 0, 0]], num_logical=2)
            >>> placement.rank_loads([6, 5], layer=0, num_ranks=2).tolist()
            [7, 4]
        """
        physical = self.physical_loads(loads, layer)
        num_ranks, P = check_positive_int(num_ranks, "num_ranks"), physical.shape[-1]
        if P % num_ranks:
            raise ValueError(f"num_ranks must divide the physical experts ({P}), got {num_ranks}")
        return physical.view(*physical.shape[:-1], num_ranks, -1).sum(dim=-1)


def _integers(value: Any, name: str) -> torch.Tensor:
    """Return value as a new int64 CPU tensor; -1 is allowed, unlike in `check_counts`."""
    try:
        table = torch.as_tensor(value, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name} must be integers, got {type(value).__name__}: {error}") from None
    if table.is_floating_point() or table.is_complex() or table.dtype == torch.bool:
        raise TypeError(f"{name} must be integers, got {table.dtype}")
    return table.detach().to(device="cpu", dtype=torch.int64, copy=True)


def _check_layer(
    phy2log: torch.Tensor, log2phy: torch.Tensor, logcnt: torch.Tensor, place: str
) -> None:
    """Refuse maps of one layer, phy2log (P,), log2phy (E, X), logcnt (E,), that disagree."""
    E = len(logcnt)
    if int(phy2log.max()) >= E:
        raise ValueError(f"phy2log{place} must be in [0, {E}), got {int(phy2log.max())}")
    missing = sorted(set(range(E)) - set(phy2log.tolist()))
    if missing:
        raise ValueError(f"phy2log{place} must hold every logical expert, got no {missing[0]}")
    for expert in range(E):
        where = f"{place}[{expert}]"
        replicas = (phy2log == expert).nonzero().flatten().tolist()
        if int(logcnt[expert]) != len(replicas):
            raise ValueError(
                f"logcnt{where} must count the replicas in phy2log, {replicas}, "
                f"got {int(logcnt[expert])}"
            )
        row = log2phy[expert].tolist()
        if sorted(row[: len(replicas)]) != replicas or set(row[len(replicas) :]) - {-1}:
            raise ValueError(
                f"log2phy{where} must be the replicas in phy2log, {replicas}, then -1, got {row}"
            )
