"""What a node has: its GPUs, its NIC ports, how far apart they are, and the rail of each GPU.

Letters: G GPUs, P ports, R rails (the ports in use).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

LINKS = ("PIX", "PXB", "PHB", "NODE", "SYS")  # nearest first, as nvidia-smi topo names them
LINK_MEANING = {
    "PIX": "the same PCI switch",
    "PXB": "several PCI switches",
    "PHB": "the same host bridge",
    "NODE": "the same NUMA node",
    "SYS": "another NUMA node",
}
INFINIBAND = "InfiniBand"
UNKNOWN_LAYER = "unknown"  # where the system does not say


@dataclass(frozen=True)
class Gpu:
    """A GPU, as NVML and CUDA in PCI order number it."""

    index: int
    name: str
    pci: str  # such as 0000:1a:00.0
    numa: int  # -1: the system does not say
    path: tuple[str, ...] = field(default=(), repr=False)  # from the host bridge; () if unknown
    uuid: str = field(
        default="", repr=False
    )  # as CUDA knows it, such as GPU-1a2b...; "" if unknown


@dataclass(frozen=True)
class Nic:
    """One port of a NIC."""

    name: str  # such as mlx5_0
    port: int  # from 1
    pci: str  # "" for a virtual NIC
    numa: int  # -1: the system does not say
    link_layer: str
    state: str  # ACTIVE, DOWN, INIT, ...
    rate_gbits: float  # 0: the system does not say
    path: tuple[str, ...] = field(default=(), repr=False)

    @property
    def label(self) -> str:
        """Name the port as NVSHMEM does."""
        return f"{self.name}:{self.port}"

    @property
    def rate_text(self) -> str:
        """Write the rate; "?" if the system does not say."""
        return f"{self.rate_gbits:g}" if self.rate_gbits else "?"

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
            >>> from railwave.discovery import arrange
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
