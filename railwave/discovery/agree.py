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
        devices: as of `visible_gpus`.

    Raises:
        ValueError: as `visible_gpus`.

    Example:
        >>> from railwave.discovery import Gpu, arrange
        >>> node = arrange([Gpu(i, "H800", "", 0) for i in range(4)], [])
        >>> visible_rails(node, "2,3"), visible_rails(node, "1,-1,0"), visible_rails(node, "")
        ((2, 3), (1,), ())
    """
    return tuple(node.rail_of_gpu[gpu] for gpu in visible_gpus(node, devices))


def visible_gpus(node: Node, devices: str | None) -> tuple[int, ...]:
    """Return the numbers of the GPUs that CUDA shows to a process, in its order.

    Args:
        devices: CUDA_VISIBLE_DEVICES: numbers, or UUIDs as far as they tell GPUs apart; None if it
            is not set. From the first that is no GPU's, or of several, none is shown, as CUDA has
            it; none at all, if one UUID is there twice.

    Raises:
        ValueError: it names GPUs by other than numbers or UUIDs, or by UUIDs that nobody knows.

    Example:
        >>> from railwave.discovery import Gpu, arrange
        >>> uuids = ["GPU-1a2b", "GPU-1a3c", "GPU-4d"]
        >>> node = arrange([Gpu(i, "H800", "", 0, (), uuid) for i, uuid in enumerate(uuids)], [])
        >>> visible_gpus(node, "2,1"), visible_gpus(node, "GPU-4,GPU-1a3,GPU-1a")
        ((2, 1), (2, 1))
    """
    if devices is None:
        return tuple(range(len(node.gpus)))
    names = [name.strip() for name in devices.split(",")] if devices.strip() else []
    if names and all(name.startswith("GPU-") for name in names):
        return _with_uuids(node, names, devices)
    if not all(re.fullmatch(r"-?\d+", name) for name in names):
        raise ValueError(
            "CUDA_VISIBLE_DEVICES must be numbers, or UUIDs such as GPU-1a2b, to find the GPUs' "
            f"rails, got {devices!r}: set either, or make the Topology with rail_of_gpu from "
            "railwave topo"
        )
    return tuple(takewhile(lambda gpu: 0 <= gpu < len(node.gpus), map(int, names)))


def _with_uuids(node: Node, names: list[str], devices: str) -> tuple[int, ...]:
    if not all(gpu.uuid for gpu in node.gpus):
        raise ValueError(
            "CUDA_VISIBLE_DEVICES must be numbers where NVML does not say the GPUs' UUIDs (pip "
            f"install nvidia-ml-py), got {devices!r}"
        )
    shown: list[int] = []
    for name in names:
        found = [gpu.index for gpu in node.gpus if gpu.uuid.startswith(name)]
        if len(found) != 1:
            break
        if found[0] in shown:
            return ()
        shown += found
    return tuple(shown)


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
