"""Give each GPU of a node its port: the nearest that can be used, evenly.

Letters: G GPUs, P ports, R rails (the ports in use).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile

from railwave.discovery.node import INFINIBAND, LINKS, Distance, Gpu, Nic, Node


def arrange(gpus: Sequence[Gpu], ports: Sequence[Nic]) -> Node:
    """Give each GPU the nearest port that can be used, evenly where several are as near.

    Ports that are down are left out, and those of the link layer that fewer ports have, since rails
    of two kinds do not reach one another; a virtual port is used only where no other is. Without
    any, each GPU is a rail of its own.

    Args:
        gpus: (G,) in order of their index.
        ports: (P,) in order of name and port.

    Example:
        >>> below = lambda i, name: ("pci0000:00", f"0000:00:0{i}.0", name)  # switch i
        >>> gpus = [Gpu(i, "H800", f"gpu{i}", 0, below(i, f"gpu{i}")) for i in range(2)]
        >>> kind = ("InfiniBand", "ACTIVE", 400.0)
        >>> ports = [Nic(f"mlx5_{i}", 1, "", 0, *kind, below(1 - i, "nic")) for i in range(2)]
        >>> arrange(gpus, ports).rail_of_gpu
        (1, 0)
    """
    distance = tuple(tuple(_distance(gpu, port) for port in ports) for gpu in gpus)
    usable, warnings = _usable(ports)
    if not usable:
        if gpus:
            warnings.append(
                "no active NIC port: each GPU is a rail of its own, and reaches no other node"
            )
        rails = tuple(range(len(gpus)))
        return Node(tuple(gpus), tuple(ports), distance, (), rails, tuple(warnings))
    near = []
    for row in distance:
        rank = {port: LINKS.index(row[port].link) for port in usable}
        near.append(tuple(port for port in usable if rank[port] == min(rank.values())))
    chosen = _spread(near, [port.card for port in ports])
    used = tuple(sorted(set(chosen)))
    rails = tuple(used.index(port) for port in chosen)
    node = Node(tuple(gpus), tuple(ports), distance, used, rails, tuple(warnings))
    return replace(node, warnings=(*warnings, *_uneven(node)))


def _usable(ports: Sequence[Nic]) -> tuple[list[int], list[str]]:
    """Return the ports that may be used, and what is to be said of the others."""
    warnings = []
    down = [port.label for port in ports if port.state != "ACTIVE"]
    if down:
        warnings.append(f"not active, left out: {', '.join(down)}; see ibstat, and the cables")
    active = [port for port in ports if port.state == "ACTIVE"]
    virtual = [port.label for port in active if not port.pci]
    if virtual and len(virtual) < len(active):
        warnings.append(f"virtual, left out: {', '.join(virtual)}")
        active = [port for port in active if port.pci]
    layers = Counter(port.link_layer for port in active)
    if len(layers) > 1:
        layer = max(layers, key=lambda name: (layers[name], name == INFINIBAND))
        other = [port.label for port in active if port.link_layer != layer]
        warnings.append(
            f"link layers are mixed: {layer} is used, which {layers[layer]} of {len(active)} ports "
            f"have; left out: {', '.join(other)}"
        )
        active = [port for port in active if port.link_layer == layer]
    return [ports.index(port) for port in active], warnings


def _spread(near: Sequence[tuple[int, ...]], cards: Sequence[str]) -> list[int]:
    """Choose one of each GPU's nearest ports, so that they carry as equally many as can be.

    Args:
        near: (G,) the ports that each GPU may use.
        cards: (P,) two ports of one card share its PCI link: another card comes first.

    Example:
        >>> _spread([(0, 1), (0, 1), (0, 1), (0,)], ["a", "b"])
        [0, 1, 1, 0]
    """
    load: Counter[int] = Counter()
    on_card: Counter[str] = Counter()
    chosen = [-1] * len(near)

    def move(gpu: int, port: int) -> None:
        if chosen[gpu] >= 0:
            load[chosen[gpu]] -= 1
            on_card[cards[chosen[gpu]]] -= 1
        chosen[gpu] = port
        load[port] += 1
        on_card[cards[port]] += 1

    # Those with the least choice first: in a tree the others then fill up what is left.
    for gpu in sorted(range(len(near)), key=lambda gpu: len(near[gpu])):
        move(gpu, min(near[gpu], key=lambda port: (load[port], on_card[cards[port]], port)))
    # Distances are not always those of a tree; each move makes loads more even, so they end.
    while moves := [
        (gpu, port)
        for gpu, ports in enumerate(near)
        for port in ports
        if load[port] < load[chosen[gpu]] - 1
    ]:
        move(*moves[0])
    # Among GPUs with the same choice, in order: NVSHMEM hands ports out so.
    for choice in set(near):
        alike = [gpu for gpu, ports in enumerate(near) if ports == choice]
        for gpu, port in zip(alike, sorted(chosen[gpu] for gpu in alike), strict=True):
            chosen[gpu] = port
    return chosen


def _uneven(node: Node) -> list[str]:
    """Say what of a map is uneven."""
    warnings = []
    gpus = Counter(node.rail_of_gpu)
    ports = [node.ports[port] for port in node.used]
    if len(set(gpus.values())) > 1:
        each = ", ".join(f"{port.label} {gpus[rail]}" for rail, port in enumerate(ports))
        warnings.append(f"rails have different numbers of GPUs: {each}")
    far = [
        f"GPU {gpu} ({ports[rail].label})"
        for gpu, rail in enumerate(node.rail_of_gpu)
        if node.distance[gpu][node.used[rail]].link == "SYS"
    ]
    if far:
        warnings.append(f"the nearest port is on another NUMA node: {', '.join(far)}")
    if len({port.rate_gbits for port in ports}) > 1:
        each = ", ".join(f"{port.label} {port.rate_gbits:g}" for port in ports)
        warnings.append(f"rails have different rates, Gb/s: {each}; the slowest sets the pace")
    if not node.in_order:
        warnings.append(
            f"GPUs do not use rails in order (rail of each GPU: {node.rail_of_gpu}): NVSHMEM needs "
            "a mapping of its own in each process"
        )
    return warnings


def _distance(gpu: Gpu, port: Nic) -> Distance:
    """Compare two places in the PCI tree."""
    if not gpu.path or not port.path:
        return Distance("SYS", -1)
    pairs = zip(gpu.path, port.path, strict=False)
    common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    up, down = len(gpu.path) - common, len(port.path) - common
    if common >= 2:  # a bridge below the host's; of one switch, each side has a port and a device
        return Distance("PIX" if max(up, down) <= 2 else "PXB", up + down)
    if common == 1:
        return Distance("PHB", up + down)
    if gpu.numa == port.numa or min(gpu.numa, port.numa) < 0:
        return Distance("NODE", up + down)
    return Distance("SYS", up + down + 1)
