"""Find the GPUs and NIC ports of this node, how far apart they are, and which port each GPU uses.

A rail is a port that some GPU uses; rails are numbered by the names of their ports, so that nodes
built alike number them alike.

Letters: G GPUs, P ports, R rails (the ports in use).
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

SYSFS = "/sys"
LINKS = ("PIX", "PXB", "PHB", "NODE", "SYS")  # nearest first, as nvidia-smi topo names them
LINK_MEANING = {
    "PIX": "the same PCI switch",
    "PXB": "several PCI switches",
    "PHB": "the same host bridge",
    "NODE": "the same NUMA node",
    "SYS": "another NUMA node",
}
INFINIBAND, ETHERNET = "InfiniBand", "Ethernet"

_ROOT = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}")
_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_NVIDIA = "0x10de"
_GPU_CLASSES = ("0x0300", "0x0302")  # with and without a display


@dataclass(frozen=True)
class Gpu:
    """A GPU, as NVML and CUDA in PCI order number it."""

    index: int
    name: str
    pci: str  # such as 0000:1a:00.0
    numa: int  # -1: the system does not say
    path: tuple[str, ...] = field(
        default=(), repr=False
    )  # from the host bridge down; () if unknown


@dataclass(frozen=True)
class Nic:
    """One port of a NIC."""

    name: str  # such as mlx5_0
    port: int  # from 1
    pci: str  # "" for a virtual NIC
    numa: int  # -1: the system does not say
    link_layer: str
    state: str  # ACTIVE, DOWN, INIT, ...
    rate_gbits: float
    path: tuple[str, ...] = field(default=(), repr=False)

    @property
    def label(self) -> str:
        """Name the port as NVSHMEM does."""
        return f"{self.name}:{self.port}"

    @property
    def card(self) -> str:
        """Name what its ports share: the PCI address without the function, or the NIC."""
        return self.pci.rpartition(".")[0] or self.name


@dataclass(frozen=True)
class Distance:
    """How far a port is from a GPU."""

    link: str  # one of LINKS
    hops: int  # over the PCI tree; -1 if unknown


@dataclass(frozen=True)
class Node:
    """What a node has, and the port that each of its GPUs uses. See `discover`."""

    gpus: tuple[Gpu, ...]
    ports: tuple[Nic, ...]
    distance: tuple[tuple[Distance, ...], ...]  # (G, P)
    used: tuple[int, ...]  # (R,) indices of ports; () if there is none to use
    rail_of_gpu: tuple[int, ...]  # (G,)
    warnings: tuple[str, ...]

    @property
    def num_rails(self) -> int:
        """Count the rails: R, or as many as GPUs where there is no port."""
        return len(self.used) or len(self.gpus)

    @property
    def in_order(self) -> bool:
        """Whether GPUs in order use rails in order, as NVSHMEM hands them out."""
        return list(self.rail_of_gpu) == sorted(self.rail_of_gpu)

    def environment(self, *, nodes: int | None = None, gpu: int | None = None) -> dict[str, str]:
        """Return the variables that make NVSHMEM give each GPU the port of its rail.

        NVSHMEM walks the NICs in their own order, whatever that of the list, and hands each out as
        often as the list says; the PEs of a node take them in turn. So one list serves a node whose
        GPUs use rails in order, with a PE for each GPU. Otherwise each process needs its own.

        Args:
            nodes: of the job, if known: one has no need of a NIC.
            gpu: give the list of the process that runs on this GPU alone.

        Raises:
            ValueError: gpu must be given, or is none of the node's.

        Example:
            >>> node = arrange([Gpu(0, "H800", "", 0), Gpu(1, "H800", "", 0)], [])
            >>> node.environment()
            {'NVSHMEM_REMOTE_TRANSPORT': 'none'}
        """
        if gpu is not None and not 0 <= gpu < len(self.gpus):
            raise ValueError(f"gpu must be in [0, {len(self.gpus)}), got {gpu}")
        if nodes == 1 or not self.used:
            return {"NVSHMEM_REMOTE_TRANSPORT": "none"}
        if gpu is None and not self.in_order:
            raise ValueError(
                "gpu must be given where GPUs do not use rails in order: rail_of_gpu is "
                f"{self.rail_of_gpu}, and each process needs a list of its own"
            )
        gpus = Counter(self.rail_of_gpu)
        rails = range(len(self.used)) if gpu is None else [self.rail_of_gpu[gpu]]
        entries = [
            f"{self.ports[self.used[rail]].label}:{gpus[rail] if gpu is None else 1}"
            for rail in rails
        ]
        return {
            "NVSHMEM_ENABLE_NIC_PE_MAPPING": "1",
            "NVSHMEM_HCA_PE_MAPPING": ",".join(entries),
        }

    def to_json(self) -> dict[str, Any]:
        """Return all of it as JSON types."""
        environment: dict[str, Any] = {}
        if self.in_order:
            environment = {"environment": self.environment()}
        elif self.used:
            each = range(len(self.gpus))
            environment = {"environment_of_gpu": [self.environment(gpu=gpu) for gpu in each]}
        return {**asdict(self), "num_rails": self.num_rails, **environment}


def discover(sysfs: str | os.PathLike = SYSFS) -> Node:
    """Find the GPUs and ports of this node and arrange them.

    GPUs come from NVML if nvidia-ml-py and a driver are there, else from the PCI devices of sysfs.

    Args:
        sysfs: where sysfs is mounted; a folder other than /sys is read without asking NVML.

    Raises:
        ValueError: there is no such folder.
    """
    root = Path(sysfs)
    if not root.is_dir():
        raise ValueError(f"sysfs must be a folder, got {os.fspath(sysfs)!r}")
    found = _nvml_gpus() if os.fspath(sysfs) == SYSFS else None
    gpus = []
    for index, (pci, name) in enumerate(found or _sysfs_gpus(root)):
        path = (root / "bus/pci/devices" / pci).resolve()
        gpus.append(Gpu(index, name, pci, _numa(path), _pci_path(path)))
    return arrange(gpus, list(_find_ports(root)))


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


def visible_rails(node: Node, devices: str | None) -> tuple[int, ...]:
    """Return the rails of the GPUs that CUDA shows to a process, in its order.

    Args:
        devices: CUDA_VISIBLE_DEVICES; None if it is not set. From the first number that is no
            GPU's, none is shown, as CUDA has it.

    Raises:
        ValueError: it names GPUs by other than numbers.

    Example:
        >>> node = arrange([Gpu(i, "H800", "", 0) for i in range(4)], [])
        >>> visible_rails(node, "2,3"), visible_rails(node, "1,-1,0"), visible_rails(node, "")
        ((2, 3), (1,), ())
    """
    if devices is None:
        return node.rail_of_gpu
    names = [name.strip() for name in devices.split(",")] if devices.strip() else []
    if not all(re.fullmatch(r"-?\d+", name) for name in names):
        raise ValueError(
            f"CUDA_VISIBLE_DEVICES must be numbers to find the GPUs' rails, got {devices!r}"
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
            "rail_of_gpu": tuple(sorted(set(by_rank)).index(rail) for rail in by_rank),
        }
    for host in hosts[1:]:
        if maps[host] != maps[hosts[0]]:
            raise ValueError(
                f"all nodes must have the same map, got {maps[host]} on {host} and "
                f"{maps[hosts[0]]} on {hosts[0]}; railwave topo shows a node's"
            )
    return len(hosts), maps[hosts[0]]["rail_of_gpu"]


# Which port each GPU uses


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


# What the system says


def _nvml_gpus() -> list[tuple[str, str]] | None:
    """Return (PCI address, name) of each GPU; None if NVML cannot say."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        gpus = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            address = _text(pynvml.nvmlDeviceGetPciInfo(handle).busId)  # 00000000:1A:00.0
            domain, _, rest = address.lower().partition(":")
            gpus.append((f"{int(domain, 16):04x}:{rest}", _text(pynvml.nvmlDeviceGetName(handle))))
        return gpus
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value  # bytes until nvidia-ml-py 11.5


def _sysfs_gpus(root: Path) -> list[tuple[str, str]]:
    gpus = []
    for device in _entries(root / "bus/pci/devices"):
        if _read(device / "vendor") == _NVIDIA and _read(device / "class")[:6] in _GPU_CLASSES:
            gpus.append((device.name, f"NVIDIA {_read(device / 'device')}"))
    return gpus  # by address, since all parts of one have a fixed width


def _find_ports(root: Path) -> Iterable[Nic]:
    for device in _entries(root / "class/infiniband"):
        place = (device / "device").resolve()
        path = _pci_path(place)
        pci = path[-1] if path else ""
        numa = _numa(root / "bus/pci/devices" / pci) if pci else -1
        for port in _entries(device / "ports"):
            state = _read(port / "state").rpartition(":")[2].strip() or "UNKNOWN"
            rate = _read(port / "rate").partition(" ")[0]
            yield Nic(
                *(device.name, int(port.name), pci, numa),
                link_layer=_read(port / "link_layer"),
                state=state,
                rate_gbits=float(rate) if re.fullmatch(r"\d+(\.\d+)?", rate) else 0.0,
                path=path,
            )


def _entries(folder: Path) -> list[Path]:
    """List a folder, mlx5_2 before mlx5_10; nothing if there is none."""
    if not folder.is_dir():
        return []
    return sorted(folder.iterdir(), key=lambda path: _natural(path.name))


def _natural(name: str) -> list[tuple[int, str]]:
    hexadecimal = _ADDRESS.fullmatch(name)
    parts = [name] if hexadecimal else re.findall(r"\d+|\D+", name)
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]


def _pci_path(place: Path) -> tuple[str, ...]:
    """Return the part of a device's place that is a path through the PCI tree."""
    parts = place.parts
    roots = [i for i, part in enumerate(parts) if _ROOT.fullmatch(part)]
    if not roots:
        return ()
    below = takewhile(_ADDRESS.fullmatch, parts[roots[0] + 1 :])
    path = (parts[roots[0]], *below)
    return path if len(path) > 1 else ()


def _numa(device: Path) -> int:
    text = _read(device / "numa_node")
    return int(text) if re.fullmatch(r"-?\d+", text) else -1


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
