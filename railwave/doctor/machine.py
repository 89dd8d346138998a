"""What a machine says of itself, and how a finding about it looks."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from railwave.discovery import SYSFS, Node, discover, is_own_sysfs

OK, WARNING, ERROR = "ok", "warning", "error"
GET_NVML = "pip install 'railwave[gpu]' (nvidia-ml-py)"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    name: str
    status: str  # OK, WARNING or ERROR
    found: str
    mend: str = ""  # what to do, in one line


@dataclass(frozen=True)
class Machine:
    """What a machine says of itself."""

    node: Node
    num_gpus: int = 0  # that torch can use
    cuda_build: str | None = None  # None: torch's CPU build
    arch: int = 90  # of the first GPU: 90 for sm_90
    apart: tuple[tuple[int, int], ...] = ()  # GPUs that do not reach each other's memory
    driver: str = ""  # "": unknown
    nvlinks: tuple[int, ...] | None = None  # active ones of each GPU; None: unknown
    environment: Mapping[str, str] = field(default_factory=dict)
    nodes: int = 1  # of the job


def look(sysfs: str | os.PathLike = SYSFS, *, nodes: int | None = None) -> Machine:
    """Ask this machine. Uses the GPUs a little, and no group.

    Args:
        sysfs: where sysfs is mounted.
        nodes: of the job. Default: WORLD_SIZE / LOCAL_WORLD_SIZE, 1 where they are not set.

    Raises:
        ValueError: sysfs is no folder.
    """
    environment = dict(os.environ)
    if not is_own_sysfs(sysfs):  # of another machine, CUDA shows all GPUs
        environment.pop("CUDA_VISIBLE_DEVICES", None)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    major, minor = torch.cuda.get_device_capability(0) if gpus else (9, 0)
    pairs = [(a, b) for a in range(gpus) for b in range(gpus) if a != b]
    driver, nvlinks = _ask_nvml()
    return Machine(
        discover(sysfs),
        num_gpus=gpus,
        cuda_build=torch.version.cuda,
        arch=10 * major + minor,
        apart=tuple(pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)),
        driver=driver,
        nvlinks=nvlinks,
        environment=environment,
        nodes=nodes_of(environment) if nodes is None else nodes,
    )


def nodes_of(environment: Mapping[str, str]) -> int:
    """Return the number of nodes of a job that torchrun started; 1 if nothing says so.

    Example:
        >>> nodes_of({"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}), nodes_of({})
        (2, 1)
    """
    world, local = (environment.get(name, "") for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if not all(re.fullmatch("[1-9][0-9]{0,6}", text) for text in (world, local)):
        return 1
    return -(-int(world) // int(local))


def _ask_nvml() -> tuple[str, tuple[int, ...] | None]:
    """Return the driver's version and each GPU's active NVLinks, if NVML says."""
    driver, links = "", None
    try:
        import pynvml
    except ImportError:
        return driver, links
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return driver, links
    try:
        version = pynvml.nvmlSystemGetDriverVersion()
        driver = version.decode() if isinstance(version, bytes) else version
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        links = tuple(_active_links(pynvml, handle) for handle in handles)
    except pynvml.NVMLError:
        pass
    finally:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()
    return driver, links


def _active_links(pynvml: Any, handle: Any) -> int:
    active = 0
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        with suppress(pynvml.NVMLError):  # the GPU has no such link
            active += pynvml.nvmlDeviceGetNvLinkState(handle, link)
    return active
