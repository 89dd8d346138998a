"""Give each GPU of a node its port: the nearest that can be used, evenly.

Letters: G GPUs, P ports, R rails (the ports in use).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile

from railwave.discovery.node import INFINIBAND, LINKS, Distance, Gpu, Nic, Node

MUCH_FASTER = 2  # from so many times the rate on, an unused port is told
_BETTER = ("nearer to the GPUs", "faster", "in more ports", "as good as the other")


def arrange(gpus: Sequence[Gpu], ports: Sequence[Nic]) -> Node:
    """Give each GPU the nearest port that can be used, evenly where several are as near.

    Ports that are down are left out; a virtual port is used only where no other is. Rails of two
    link layers do not reach one another, so one is used: that which is nearer to the GPUs, or else
    gives them more Gb/s, or has more ports. Of ports as near, much slower ones are left out where
    GPUs get more without them. Without any, each GPU is a rail of its own.

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
    far = [[LINKS.index(each.link) for each in row] for row in distance]
    chosen, said = _of_one_layer(far, usable, ports)
    used = tuple(sorted(set(chosen)))
    rails = tuple(used.index(port) for port in chosen)
    node = Node(tuple(gpus), tuple(ports), distance, used, rails, ())
    return replace(node, warnings=(*warnings, *_lost(node), *said, *_uneven(node)))


def _usable(ports: Sequence[Nic]) -> tuple[list[int], list[str]]:
    """Return the ports that may be used, and what is to be said of the others."""
    warnings = []
    left_out: dict[tuple[str, str], list[str]] = {}
    for port in ports:
        if port.state != "ACTIVE":
            left_out.setdefault(_why(port.state), []).append(port.label)
    for (said, mend), labels in left_out.items():
        warnings.append(f"{said}, left out: {', '.join(labels)}; {mend}")
    active = [i for i, port in enumerate(ports) if port.state == "ACTIVE"]
    virtual = [ports[i].label for i in active if not ports[i].pci]
    if virtual and len(virtual) < len(active):
        warnings.append(f"virtual, left out: {', '.join(virtual)}")
        active = [i for i in active if ports[i].pci]
    return active, warnings


def _why(state: str) -> tuple[str, str]:
    """Return what is wrong with a port of this state, and where to look."""
    if state == "UNKNOWN":
        return "state not readable", "see the files of /sys/class/infiniband"
    if state in ("INIT", "ARMED"):
        return f"not yet active ({state})", "InfiniBand waits for a subnet manager: does one run?"
    return "not active", "see ibstat, and the cables"


def _lost(node: Node) -> list[str]:
    """Say what the ports that are not active take from the GPUs, if anything."""
    if all(port.state == "ACTIVE" for port in node.ports):
        return []
    whole = arrange(node.gpus, [replace(port, state="ACTIVE") for port in node.ports])
    if whole.num_rails <= node.num_rails:
        return []
    before, shared = Counter(whole.rail_of_gpu), []
    for rail, port in enumerate(node.used):
        gpus = [gpu for gpu, own in enumerate(node.rail_of_gpu) if own == rail]
        if len(gpus) > max(before[whole.rail_of_gpu[gpu]] for gpu in gpus):
            shared.append(f"GPUs {', '.join(map(str, gpus))} share {node.ports[port].label}")
    text = f"were all ports active, there would be {whole.num_rails} rails, not {node.num_rails}"
    return ["; ".join([text, *shared])]


def _of_one_layer(
    far: Sequence[Sequence[int]], usable: Sequence[int], ports: Sequence[Nic]
) -> tuple[list[int], list[str]]:
    """Return each GPU's port, all of one link layer, and what is to be said of others.

    Args:
        far: (G, P) index of LINKS.
    """
    layers = Counter(ports[port].link_layer for port in usable)
    given = {}
    for layer in layers:
        given[layer] = _nearest(far, [p for p in usable if ports[p].link_layer == layer], ports)

    def worth(layer: str) -> tuple[float, ...]:
        chosen = given[layer][0]
        away = sum(row[port] for row, port in zip(far, chosen, strict=True))
        gbits = sum(ports[port].rate_gbits for port in set(chosen))
        return -away, gbits, layers[layer], layer == INFINIBAND

    best, *others = sorted(layers, key=worth, reverse=True)
    chosen, warnings = given[best]
    if others:
        pairs = zip(worth(best), worth(others[0]), _BETTER, strict=True)
        why = next((text for a, b, text in pairs if a != b), "the first")
        left = [ports[port].label for port in usable if ports[port].link_layer != best]
        text = f"link layers are mixed: {best} is used, {why}; left out: {', '.join(left)}"
        warnings = [text, *warnings]
    return chosen, warnings


def _nearest(
    far: Sequence[Sequence[int]], usable: Sequence[int], ports: Sequence[Nic]
) -> tuple[list[int], list[str]]:
    """Return each GPU's port, and what is to be said of ports that are too slow."""
    least = [min(row[p] for p in usable) for row in far]
    near = [tuple(p for p in usable if row[p] == low) for row, low in zip(far, least, strict=True)]
    rates, cards = [port.rate_gbits for port in ports], [port.card for port in ports]
    fast = {choice: _fast(choice, gpus, rates) for choice, gpus in Counter(near).items()}
    slow = {
        port
        for choice, gpus in Counter(near).items()
        for port in set(choice) - set(fast[choice])
        if len(fast[choice]) < gpus
    }
    chosen = _spread([fast[choice] for choice in near], cards, rates)
    warnings = []
    if left := sorted(slow - set(chosen)):  # one may be the nearest of other GPUs
        each = ", ".join(f"{ports[port].label} {ports[port].rate_text}" for port in left)
        warnings.append(f"so slow that GPUs share faster ports, left out, Gb/s: {each}")
    return chosen, warnings


def _fast(near: Sequence[int], gpus: int, rates: Sequence[float]) -> tuple[int, ...]:
    """Return the ports that give so many GPUs most, the slowest setting the pace; more on a tie.

    A port whose rate is unknown, 0, is not called slow.

    Example:
        >>> _fast((0, 1), 2, [400.0, 100.0]), _fast((0, 1), 2, [400.0, 200.0])
        ((0,), (0, 1))
    """

    def of_rate(least: float) -> tuple[int, ...]:
        return tuple(port for port in near if rates[port] >= least or not rates[port])

    def worth(least: float) -> tuple[float, float]:
        return least * min(gpus, len(of_rate(least))), -least

    return of_rate(max({rates[port] for port in near}, key=worth))


def _spread(
    near: Sequence[tuple[int, ...]], cards: Sequence[str], rates: Sequence[float]
) -> list[int]:
    """Choose one of each GPU's nearest ports, so that they carry as equally many as can be.

    Args:
        near: (G,) the ports that each GPU may use.
        cards: (P,) two ports of one card share its PCI link: another card comes first.
        rates: (P,) of ports as loaded, the faster comes first.

    Example:
        >>> _spread([(0, 1), (0, 1), (0, 1), (0,)], ["a", "b"], [400.0, 400.0])
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
        order = {port: (load[port], -rates[port], on_card[cards[port]]) for port in near[gpu]}
        move(gpu, min(near[gpu], key=lambda port: (*order[port], port)))
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
    if len({port.rate_gbits for port in ports if port.rate_gbits}) > 1:  # 0: unknown
        each = ", ".join(f"{port.label} {port.rate_text}" for port in ports)
        warnings.append(f"rails have different rates, Gb/s: {each}; the slowest sets the pace")
    if faster := _faster(node):
        warnings.append(f"as near and much faster, but not used, Gb/s: {', '.join(faster)}")
    if not node.in_order:
        warnings.append(
            f"GPUs do not use rails in order (rail of each GPU: {node.rail_of_gpu}): NVSHMEM needs "
            "a mapping of its own in each process"
        )
    return warnings


def _faster(node: Node) -> list[str]:
    """Name ports that no GPU uses, though for some they are as near and at least twice as fast."""
    rank = LINKS.index
    texts = []
    for index, port in enumerate(node.ports):
        if index in node.used or port.state != "ACTIVE" or not port.pci:
            continue
        gpus = []
        for gpu, row in enumerate(node.distance):
            own = node.used[node.rail_of_gpu[gpu]]
            near = rank(row[index].link) <= rank(row[own].link)
            if near and port.rate_gbits >= max(MUCH_FASTER * node.ports[own].rate_gbits, 1):
                gpus.append(f"GPU {gpu} uses {node.ports[own].label} {node.ports[own].rate_text}")
        if gpus:
            texts.append(f"{port.label} {port.rate_text} ({'; '.join(gpus)})")
    return texts


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
