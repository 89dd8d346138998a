"""Describe the cluster: nodes, GPUs, rails, and which rails a pair of nodes may use.

Shape letters: N nodes, G GPUs a node, R rails a node, T tokens a rank.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from railwave._check import check_index, check_non_negative_int, check_positive_int
from railwave.discovery import (
    SYSFS,
    Said,
    differences,
    discover,
    is_own_sysfs,
    joined,
    visible_rails,
)
from railwave.errors import PeerError

logger = logging.getLogger("railwave")

MAX_RANKS = 1 << 20  # both bounds lie far above any cluster, and below what tables would cost
MAX_PAIR_RAILS = 1 << 28


@dataclass(frozen=True, eq=False, repr=False)
class Topology:
    """Hold the shape of a rail-optimised cluster; compare and hash by value.

    Args:
        nodes: N, scale-up (NVLink) domains.
        gpus_per_node: G. rank = node * G + local.
        rails_per_node: R, NIC positions; rail r of one node reaches rail r of every other.
        rail_of_gpu: (G,) ints in [0, R), the rail of each local GPU. Default: g * R // G.
            Several GPUs may share a rail; a rail without a GPU is never eligible.
        eligible_rails: (N, N, R) bool tensor or nested sequence: which rails may carry payload
            between two nodes (eq. 3). Per unordered pair, so symmetric in the nodes; never empty
            for two different nodes. The diagonal is not read. Default: every rail with a GPU.

    Raises:
        TypeError, ValueError: an argument breaks a rule above.

    Source: section 2.2, eq. (2) and (3).

    Example:
        >>> topo = Topology(2, 4, 2)
        >>> topo.rail_of_gpu, topo.gpus_of_rail
        ((0, 0, 1, 1), ((0, 1), (2, 3)))
        >>> topo.rank_of(1, 2), topo.node_of(6), topo.local_of(6)
        (6, 1, 2)
    """

    nodes: int
    gpus_per_node: int
    rails_per_node: int
    # After construction: a tuple of G ints.
    rail_of_gpu: Sequence[int] | None = field(default=None, kw_only=True)
    # After construction: (N, N, R) bool CPU tensor; its diagonal is the rails with a GPU.
    eligible_rails: Any = field(default=None, kw_only=True)

    @classmethod
    def discover(
        cls,
        nodes: int | None = None,
        *,
        sysfs: str | os.PathLike = SYSFS,
        group: dist.ProcessGroup | None = None,
    ) -> Topology:
        """Find the GPUs and NIC ports of this node, or of all nodes of a group. Collective then.

        A GPU's rail is the nearest active port (`railwave.discovery`; `railwave topo` shows it).
        Rank 0 logs in what nodes that agree differ, such as the rates of their ports.

        Args:
            nodes: N. Default: as many hosts as the group's ranks are on; 1 without a group, where
                other nodes are taken to be like this one.
            sysfs: where sysfs is mounted.
            group: a torch.distributed group; None for the default one, if torch.distributed is
                initialised. Local rank l uses GPU l of those that CUDA_VISIBLE_DEVICES leaves, in
                PCI order, modulo their number.

        Raises:
            ValueError: nodes differ from one another or from `nodes`, or there is neither a GPU nor
                a group.
            PeerError: another rank could not look.
        """
        if group is None and not (dist.is_available() and dist.is_initialized()):
            one = _say(sysfs)
            if not one.rails:
                raise ValueError(
                    "sysfs must show a GPU where there is no group, but none was found in "
                    f"{sysfs}: make a Topology(nodes, gpus_per_node, rails_per_node) instead"
                )
            _, rails = joined([one] * len(one.rails))
            nodes = 1 if nodes is None else nodes
            return cls(nodes, len(rails), max(rails) + 1, rail_of_gpu=rails)
        said = _gather_nodes(sysfs, group)
        found, rails = joined(said)
        if dist.get_rank(group) == 0:  # once for all
            for text in differences(said):
                logger.warning("%s", text)
        if nodes not in (None, found):
            raise ValueError(
                f"nodes must be the number of hosts that the group's ranks are on ({found}), got "
                f"{nodes}; make a Topology of numbers to split a host"
            )
        return cls(found, len(rails), max(rails) + 1, rail_of_gpu=rails)

    def __post_init__(self) -> None:
        for name in ("nodes", "gpus_per_node", "rails_per_node"):
            object.__setattr__(self, name, check_positive_int(getattr(self, name), name))
        size = self.nodes * self.nodes * self.rails_per_node
        if size > MAX_PAIR_RAILS or self.num_ranks > MAX_RANKS:
            raise ValueError(
                f"nodes x gpus_per_node must be at most {MAX_RANKS} and nodes x nodes x "
                f"rails_per_node at most {MAX_PAIR_RAILS}, got {self.nodes} nodes, "
                f"{self.gpus_per_node} GPUs and {self.rails_per_node} rails"
            )
        object.__setattr__(self, "rail_of_gpu", self._checked_rail_of_gpu())
        object.__setattr__(self, "eligible_rails", self._checked_eligible_rails())

    def _checked_rail_of_gpu(self) -> tuple[int, ...]:
        gpus, rails = self.gpus_per_node, self.rails_per_node
        if self.rail_of_gpu is None:
            return tuple(gpu * rails // gpus for gpu in range(gpus))
        try:
            given = list(self.rail_of_gpu)
        except TypeError:
            raise TypeError(
                f"rail_of_gpu must be a sequence of {gpus} ints, got {self.rail_of_gpu!r}"
            ) from None
        if len(given) != gpus:
            raise ValueError(
                f"rail_of_gpu must have one entry per GPU ({gpus}), got {len(given)}: {given}"
            )
        return tuple(check_index(r, rails, f"rail_of_gpu[{g}]") for g, r in enumerate(given))

    def _checked_eligible_rails(self) -> torch.Tensor:
        shape = (self.nodes, self.nodes, self.rails_per_node)
        has_gpu = torch.tensor([len(gpus) > 0 for gpus in self.gpus_of_rail], device="cpu")
        if self.eligible_rails is None:
            return has_gpu.expand(shape).clone()
        try:
            given = torch.as_tensor(self.eligible_rails, device="cpu")
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(f"eligible_rails must be bool of shape {shape}: {error}") from None
        if given.dtype != torch.bool:
            raise TypeError(f"eligible_rails must be bool of shape {shape}, got {given.dtype}")
        if tuple(given.shape) != shape:
            raise ValueError(
                f"eligible_rails must be bool of shape {shape}, got shape {tuple(given.shape)}"
            )
        eligible = given.detach().to(device="cpu", copy=True)
        eligible[range(self.nodes), range(self.nodes)] = has_gpu
        _check_pairs(eligible, has_gpu)
        return eligible

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Topology):
            return NotImplemented
        return self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        eligible = "all" if self._all_eligible() else self.eligible_rails.int().tolist()
        return (
            f"Topology(nodes={self.nodes}, gpus_per_node={self.gpus_per_node}, "
            f"rails_per_node={self.rails_per_node}, rail_of_gpu={self.rail_of_gpu}, "
            f"eligible_rails={eligible})"
        )

    def _key(self) -> tuple:
        bits = bytes(self.eligible_rails.flatten().tolist())
        return (self.nodes, self.gpus_per_node, self.rails_per_node, self.rail_of_gpu, bits)

    def _all_eligible(self) -> bool:
        return bool((self.eligible_rails == self.eligible_rails[0, 0]).all())

    @property
    def num_ranks(self) -> int:
        """Count the ranks: N * G."""
        return self.nodes * self.gpus_per_node

    @property
    def gpus_of_rail(self) -> tuple[tuple[int, ...], ...]:
        """List, per rail, its local GPUs in ascending order; empty for a rail without one."""
        return tuple(
            tuple(gpu for gpu, owned in enumerate(self.rail_of_gpu) if owned == rail)
            for rail in range(self.rails_per_node)
        )

    @property
    def max_gpus_per_rail(self) -> int:
        """Count the GPUs of the rail that has the most."""
        return max(len(gpus) for gpus in self.gpus_of_rail)

    def node_of(self, rank: int) -> int:
        """Return the node of `rank`."""
        return check_index(rank, self.num_ranks, "rank") // self.gpus_per_node

    def local_of(self, rank: int) -> int:
        """Return the index of `rank` among the GPUs of its node."""
        return check_index(rank, self.num_ranks, "rank") % self.gpus_per_node

    def rank_of(self, node: int, local: int) -> int:
        """Return the rank of local GPU `local` of `node`."""
        gpu = check_index(local, self.gpus_per_node, "local")
        return check_index(node, self.nodes, "node") * self.gpus_per_node + gpu

    def max_proxy_records(self, max_tokens_per_rank: int) -> int:
        """Bound the records that one proxy carries of one slice, on any path.

        A rail has n GPUs and C records of the slice; the pair of nodes has m eligible rails. A
        kept record stays with its owner GPU, and the Q - C relocated ones go round the rail's
        GPUs, so a GPU with c records of its own carries at most c + ceil((Q - C) / n).

        - Balanced: one record more on the GPU raises c by 1 and lowers the ceiling by at most 1,
          so the worst has c = T. A record on a rail-mate raises C by 1 and Q by at most 1, so the
          worst has empty rail-mates: C = T. Every other rail's GPU holds T, which makes the slice
          (G - n + 1) * T records and Q at most the ceiling of its m-th part. If that is below T,
          nothing is relocated to this rail and the GPU keeps at most its own T.
        - Native: only the records of ineligible rails move, at most G_inel * T, and an eligible
          rail takes at most the ceiling of the m-th part. That is never more than above: the
          other m - 1 eligible rails have a GPU each, so G_inel <= G - n - (m - 1).

        The bound is reached unless the remainder of eq. 9 falls on another rail; then it is
        larger than needed by at most one record.

        Args:
            max_tokens_per_rank: T, at least 0. A token is one record per destination node.

        Returns:
            P; 0 with one node, where nothing crosses a rail.

        Source: eq. (9), Alg. 1.

        Example:
            Rail 1 has one GPU, rail 0 two. With T = 1 and every GPU sending, the slice has 3
            records, and rail 1 may get 2 of them.

            >>> Topology(2, 3, 2, rail_of_gpu=(0, 0, 1)).max_proxy_records(1)
            2
        """
        tokens = check_non_negative_int(max_tokens_per_rank, "max_tokens_per_rank")
        if self.nodes == 1:
            return 0
        gpus_on_rail = [len(gpus) for gpus in self.gpus_of_rail]
        remote = ~torch.eye(self.nodes, dtype=torch.bool, device="cpu")
        worst = 0
        for eligible in torch.unique(self.eligible_rails[remote], dim=0).tolist():
            num_eligible = sum(eligible)
            for n in (n for n, ok in zip(gpus_on_rail, eligible, strict=True) if ok):
                quota = _ceil_div((self.gpus_per_node - n + 1) * tokens, num_eligible)
                worst = max(worst, tokens + _ceil_div(max(0, quota - tokens), n))
        return worst


def _say(sysfs: str | os.PathLike) -> Said:
    node = discover(sysfs)
    # Of another tree than this machine's, all GPUs.
    shown = os.environ.get("CUDA_VISIBLE_DEVICES") if is_own_sysfs(sysfs) else None
    rails = visible_rails(node, shown)
    ports = tuple(replace(node.ports[port], path=()) for port in node.used)
    return Said(socket.gethostname(), len(node.gpus), node.num_rails, rails, ports)


def _gather_nodes(sysfs: str | os.PathLike, group: dist.ProcessGroup | None) -> list[Said]:
    """Exchange what each rank sees of its node; raise on all ranks if one cannot look."""
    said: Said | None = None
    wrong: Exception | None = None
    try:
        said = _say(sysfs)
    except Exception as error:  # whatever it is, the others must hear
        wrong = error
    if dist.get_rank(group) < 0:
        raise ValueError("group must contain this rank")
    everything: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everything, (said, str(wrong or "")), group=group)
    if wrong:
        raise wrong
    bad = {rank: text for rank, (_, text) in enumerate(everything) if text}
    if bad:
        raise PeerError(f"rank(s) could not look at their node: {bad}")
    return [one for one, _ in everything]


def _ceil_div(numerator: int, divisor: int) -> int:
    return -(-numerator // divisor)


def _check_pairs(eligible: torch.Tensor, has_gpu: torch.Tensor) -> None:
    """Raise unless `eligible` is symmetric, on rails with a GPU only, and never empty."""
    for node, peer, rail in (eligible != eligible.transpose(0, 1)).nonzero()[:1].tolist():
        raise ValueError(
            "eligible_rails must be symmetric in the two nodes, got "
            f"[{node}, {peer}, {rail}] = {bool(eligible[node, peer, rail])} and "
            f"[{peer}, {node}, {rail}] = {bool(eligible[peer, node, rail])}"
        )
    for node, peer, rail in (eligible & ~has_gpu).nonzero()[:1].tolist():
        raise ValueError(
            f"eligible_rails must be False for a rail without a GPU, got "
            f"[{node}, {peer}, {rail}] = True, but rail_of_gpu puts no GPU on rail {rail}"
        )
    for node, peer in (~eligible.any(dim=2)).nonzero()[:1].tolist():
        raise ValueError(
            "eligible_rails must allow at least one rail for every two nodes, got none at "
            f"[{node}, {peer}]"
        )
