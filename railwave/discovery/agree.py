"""Join what the ranks of a group see of their nodes: all nodes must have the same map.

Letters: W ranks.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from railwave.discovery.node import Nic, Node

_NO_GPUS = ("", "none", "void", "nodevfiles")  # as container runtimes say it
_NUMBER = re.compile(r"[+-]?0*[0-9]{1,9}")  # of a longer number its first digits: still no GPU's


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
            it; none at all, if one is there twice.

    Raises:
        ValueError: it begins with neither a number nor a UUID, or with a UUID that nobody knows.

    Example:
        >>> from railwave.discovery import Gpu, arrange
        >>> uuids = ["GPU-1a2b", "GPU-1a3c", "GPU-4d"]
        >>> node = arrange([Gpu(i, "H800", "", 0, (), uuid) for i, uuid in enumerate(uuids)], [])
        >>> visible_gpus(node, "2,1"), visible_gpus(node, "GPU-4,GPU-1a3,GPU-1a")
        ((2, 1), (2, 1))
    """
    if devices is None:
        return tuple(range(len(node.gpus)))
    first, *_ = names = [name.strip() for name in devices.split(",")]
    if first.lower() in _NO_GPUS:
        return ()
    by_uuid = first.startswith("GPU-")
    if not by_uuid and not _NUMBER.match(first):
        raise ValueError(
            "CUDA_VISIBLE_DEVICES must be numbers, or UUIDs such as GPU-1a2b, to find the GPUs' "
            f"rails, got {devices!r}: set either, or make the Topology with rail_of_gpu from "
            "railwave topo"
        )
    if by_uuid and not all(gpu.uuid for gpu in node.gpus):
        raise ValueError(
            "CUDA_VISIBLE_DEVICES must be numbers where NVML does not say the GPUs' UUIDs (pip "
            f"install nvidia-ml-py), got {devices!r}"
        )
    shown: list[int] = []
    for name in names:
        gpu = _of_uuid(node, name) if by_uuid else _of_number(name)
        if not 0 <= gpu < len(node.gpus):
            break
        if gpu in shown:
            return ()
        shown.append(gpu)
    return tuple(shown)


def _of_number(name: str) -> int:
    """Return the number that a text begins with, as CUDA reads it; -1 without one."""
    found = _NUMBER.match(name)
    return int(found[0]) if found else -1


def _of_uuid(node: Node, name: str) -> int:
    """Return the GPU whose UUID begins so; -1 if there is none, or several."""
    found = [gpu.index for gpu in node.gpus if gpu.uuid.startswith(name)]
    return found[0] if len(found) == 1 and name.startswith("GPU-") else -1


@dataclass(frozen=True)
class Said:
    """What one rank tells the others of its host."""

    host: str
    num_gpus: int
    num_rails: int
    rails: tuple[int, ...]  # of the GPUs that the rank sees
    ports: tuple[Nic, ...] = ()  # (R,) of the rails; () where there is none to use


def joined(said: Sequence[Said]) -> tuple[int, tuple[int, ...]]:
    """Return the number of nodes, and the rail of each rank of a node, if all nodes agree.

    A host is a node; local rank l uses GPU l of those that it sees, from the start again where GPUs
    are shared. Without GPUs each rank is a rail of its own. Rails that no rank uses are left out.
    A rail must be the same port on all nodes, by its name or by its PCI address.

    Args:
        said: (W,) by rank.

    Raises:
        ValueError: the ranks of a host do not follow one another, or two hosts differ.

    Example:
        >>> joined([Said("a", 2, 2, (0, 1))] * 2 + [Said("b", 2, 2, (0, 1))] * 2)
        (2, (0, 1))
    """
    maps = _maps(said)
    (first, (own, own_ports)), *others = maps.items()
    for host, (other, ports) in others:
        if other != own:
            raise ValueError(
                f"all nodes must have the same map, got {other} on {host} and {own} on {first}; "
                "railwave topo shows a node's"
            )
        for rail, (a, b) in enumerate(zip(own_ports, ports, strict=False)):
            if a.label != b.label and _place(a) != _place(b):
                raise ValueError(
                    f"rail {rail} must be the same port on all nodes, by name or PCI address, got "
                    f"{b.label} ({b.pci}) on {host} and {a.label} ({a.pci}) on {first}: see "
                    "railwave topo for ports that are down, or make the Topology by hand"
                )
    return len(maps), own["rail_of_gpu"]


def differences(said: Sequence[Said]) -> list[str]:
    """Say in what nodes that agree differ from the first: names, places, rates of rails' ports.

    Args:
        said: (W,) by rank, as of `joined`.

    Example:
        >>> fast, slow = (Nic("mlx5_0", 1, "", 0, "InfiniBand", "ACTIVE", r) for r in (400, 100))
        >>> differences([Said("a", 1, 1, (0,), (fast,)), Said("b", 1, 1, (0,), (slow,))])
        ['rail 0 has 100 Gb/s on b and 400 on a: the slowest sets the pace']
    """
    (first, (_, own_ports)), *others = _maps(said).items()
    texts = []
    for host, (_, ports) in others:
        for rail, (a, b) in enumerate(zip(own_ports, ports, strict=False)):
            if a.label != b.label or _place(a) != _place(b):
                texts.append(
                    f"rail {rail} is {b.label} ({b.pci}) on {host} and {a.label} ({a.pci}) on "
                    f"{first}: see that cables lead to the same rail"
                )
            if a.rate_gbits and b.rate_gbits and a.rate_gbits != b.rate_gbits:  # 0: unknown
                texts.append(
                    f"rail {rail} has {b.rate_text} Gb/s on {host} and {a.rate_text} on {first}: "
                    "the slowest sets the pace"
                )
    return texts


def _maps(said: Sequence[Said]) -> dict[str, tuple[dict[str, Any], tuple[Nic, ...]]]:
    """Return each host's map, and the ports of the rails that its ranks use."""
    maps = {}
    for host in dict.fromkeys(one.host for one in said):
        ranks = [rank for rank, one in enumerate(said) if one.host == host]
        if ranks != list(range(ranks[0], ranks[0] + len(ranks))):
            raise ValueError(f"ranks of a host must follow one another, got {ranks} on {host}")
        first, seen = said[ranks[0]], [said[rank].rails for rank in ranks]
        by_rank, ports = list(range(len(ranks))), first.ports if all(seen) else ()
        if all(seen):
            by_rank = [rails[local % len(rails)] for local, rails in enumerate(seen)]
        used = sorted(set(by_rank))
        told = {
            "ranks": len(ranks),
            "GPUs": first.num_gpus,
            "rails": first.num_rails,
            "link layer": first.ports[0].link_layer if first.ports else "",
            "rail_of_gpu": tuple(used.index(rail) for rail in by_rank),
        }
        maps[host] = (told, tuple(ports[rail] for rail in used) if ports else ())
    return maps


def _place(port: Nic) -> tuple[str, int]:
    return port.pci, port.port
