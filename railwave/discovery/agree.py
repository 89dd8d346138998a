"""Join what the ranks of a group see of their nodes: all nodes must have the same map.

Letters: W ranks.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from railwave.discovery.node import Node


def visible_rails(node: Node, devices: str | None) -> tuple[int, ...]:
    """Return the rails of the GPUs that CUDA shows to a process, in its order.

    Args:
        devices: CUDA_VISIBLE_DEVICES; None if it is not set. From the first number that is no
            GPU's, none is shown, as CUDA has it.

    Raises:
        ValueError: it names GPUs by other than numbers.

    Example:
        >>> from railwave.discovery import Gpu, arrange
        >>> node = arrange([Gpu(i, "H800", "", 0) for i in range(4)], [])
        >>> visible_rails(node, "2,3"), visible_rails(node, "1,-1,0"), visible_rails(node, "")
        ((2, 3), (1,), ())
    """
    if devices is None:
        return node.rail_of_gpu
    names = [name.strip() for name in devices.split(",")] if devices.strip() else []
    if not all(re.fullmatch(r"-?\d+", name) for name in names):
        raise ValueError(
            f"CUDA_VISIBLE_DEVICES must be numbers to find the GPUs' rails, got {devices!r}: set "
            "numbers, or make the Topology with rail_of_gpu from railwave topo"
        )
    shown = takewhile(lambda gpu: 0 <= gpu < len(node.gpus), map(int, names))
    return tuple(node.rail_of_gpu[gpu] for gpu in shown)


@dataclass(frozen=True)
class Said:
    """What one rank tells the others of its host."""

    host: str
    num_gpus: int
    num_rails: int
    rails: tuple[int, ...]  # of the GPUs that the rank sees
    link_layer: str = ""  # of the ports in use


def joined(said: Sequence[Said]) -> tuple[int, tuple[int, ...]]:
    """Return the number of nodes, and the rail of each rank of a node, if all nodes agree.

    A host is a node; local rank l uses GPU l of those that it sees, from the start again where GPUs
    are shared. Without GPUs each rank is a rail of its own. Rails that no rank uses are left out.

    Args:
        said: (W,) by rank.

    Raises:
        ValueError: the ranks of a host do not follow one another, or two hosts differ.

    Example:
        >>> joined([Said("a", 2, 2, (0, 1))] * 2 + [Said("b", 2, 2, (0, 1))] * 2)
        (2, (0, 1))
    """
    hosts = list(dict.fromkeys(one.host for one in said))
    maps: dict[str, dict[str, Any]] = {}
    for host in hosts:
        ranks = [rank for rank, one in enumerate(said) if one.host == host]
        if ranks != list(range(ranks[0], ranks[0] + len(ranks))):
            raise ValueError(f"ranks of a host must follow one another, got {ranks} on {host}")
        first, seen = said[ranks[0]], [said[rank].rails for rank in ranks]
        by_rank = list(range(len(ranks)))
        if all(seen):
            by_rank = [rails[local % len(rails)] for local, rails in enumerate(seen)]
        maps[host] = {
            "ranks": len(ranks),
            "GPUs": first.num_gpus,
            "rails": first.num_rails,
            "link layer": first.link_layer,
            "rail_of_gpu": tuple(sorted(set(by_rank)).index(rail) for rail in by_rank),
        }
    for host in hosts[1:]:
        if maps[host] != maps[hosts[0]]:
            raise ValueError(
                f"all nodes must have the same map, got {maps[host]} on {host} and "
                f"{maps[hosts[0]]} on {hosts[0]}; railwave topo shows a node's"
            )
    return len(hosts), maps[hosts[0]]["rail_of_gpu"]
