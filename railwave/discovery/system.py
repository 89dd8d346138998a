"""Ask the system for GPUs and NIC ports: NVML, and files of sysfs."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from railwave.discovery.node import UNKNOWN_LAYER, Gpu, Nic, Node
from railwave.discovery.spread import arrange

SYSFS = "/sys"
_ROOT = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}")
_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_NUMBER = re.compile(r"[1-9][0-9]{0,3}")
_NVIDIA = "0x10de"
_GPU_CLASSES = ("0x0300", "0x0302")  # with and without a display


def discover(sysfs: str | os.PathLike = SYSFS) -> Node:
    """Find the GPUs and ports of this node and arrange them.

    GPUs come from NVML if nvidia-ml-py and a driver are there, else from the PCI devices of sysfs.

    Args:
        sysfs: where sysfs is mounted; a folder other than /sys is read without asking NVML.

    Raises:
        ValueError: there is no such folder.
    """
    if not isinstance(sysfs, (str, os.PathLike)) or not sysfs:
        raise ValueError(f"sysfs must be a folder, got {sysfs!r}")
    root = Path(sysfs)
    if not root.is_dir():
        raise ValueError(f"sysfs must be a folder, got {os.fspath(sysfs)!r}")
    found, warnings = _nvml_gpus() if is_own_sysfs(sysfs) else ([], [])
    gpus = []
    for index, (pci, name, uuid) in enumerate(found or _sysfs_gpus(root)):
        path = _place(root / "bus/pci/devices" / pci)
        gpus.append(Gpu(index, name, pci, _numa(path), _pci_path(path), uuid))
    node = arrange(gpus, list(_find_ports(root)))
    return replace(node, warnings=(*warnings, *node.warnings))


def is_own_sysfs(sysfs: str | os.PathLike) -> bool:
    """Say whether a sysfs is this machine's own, however it is written, not a copy of another's.

    Example:
        >>> is_own_sysfs("/sys/"), is_own_sysfs("/sys/class/.."), is_own_sysfs("/mnt/copy")
        (True, True, False)
    """
    return os.path.realpath(sysfs) == os.path.realpath(SYSFS)


def _nvml_gpus() -> tuple[list[tuple[str, str, str]], list[str]]:
    """Return (PCI address, name, UUID) of each GPU, none if NVML cannot say; and warnings."""
    gpus: list[tuple[str, str, str]] = []
    warnings: list[str] = []
    try:
        import pynvml
    except ImportError:
        return gpus, warnings
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return gpus, warnings
    try:
        for index in range(pynvml.nvmlDeviceGetCount()):
            try:
                gpus.append(_nvml_gpu(pynvml, index))
            except pynvml.NVMLError as error:
                text = (
                    f"NVML does not say what its GPU {index} is, left out: {error}; see nvidia-smi"
                )
                warnings.append(text)
    except pynvml.NVMLError:
        pass
    finally:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()
    return gpus, warnings if gpus else []


def _nvml_gpu(pynvml: Any, index: int) -> tuple[str, str, str]:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    address = _text(pynvml.nvmlDeviceGetPciInfo(handle).busId)  # 00000000:1A:00.0
    domain, _, rest = address.lower().partition(":")
    texts = _text(pynvml.nvmlDeviceGetName(handle)), _nvml_uuid(pynvml, handle)
    return f"{int(domain, 16):04x}:{rest}", *texts


def _nvml_uuid(pynvml: Any, handle: Any) -> str:
    """Return a GPU's UUID, "" if NVML keeps it to itself: all else can do without."""
    try:
        return _text(pynvml.nvmlDeviceGetUUID(handle))
    except pynvml.NVMLError:
        return ""


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value  # bytes until nvidia-ml-py 11.5


def _sysfs_gpus(root: Path) -> list[tuple[str, str, str]]:
    gpus = []
    for device in _entries(root / "bus/pci/devices"):
        if _read(device / "vendor") == _NVIDIA and _read(device / "class")[:6] in _GPU_CLASSES:
            gpus.append((device.name, f"NVIDIA {_read(device / 'device')}", ""))
    return gpus  # by address, since all parts of one have a fixed width


def _find_ports(root: Path) -> Iterable[Nic]:
    for device in _entries(root / "class/infiniband"):
        if not _NAME.fullmatch(device.name):
            continue  # NVSHMEM could not be told of it
        path = _pci_path(_place(device / "device"))
        pci = path[-1] if path else ""
        numa = _numa(root / "bus/pci/devices" / pci) if pci else -1
        for port in _entries(device / "ports"):
            if not _NUMBER.fullmatch(port.name):
                continue
            state = _read(port / "state").rpartition(":")[2].strip() or "UNKNOWN"
            rate = _read(port / "rate").partition(" ")[0]
            yield Nic(
                *(device.name, int(port.name), pci, numa),
                link_layer=_read(port / "link_layer") or UNKNOWN_LAYER,
                state=state,
                rate_gbits=float(rate) if re.fullmatch(r"\d{1,6}(\.\d{1,6})?", rate) else 0.0,
                path=path,
            )


def _entries(folder: Path) -> list[Path]:
    """List a folder, mlx5_2 before mlx5_10; nothing if there is none, or it may not be read."""
    try:
        return sorted(folder.iterdir(), key=lambda path: _natural(path.name))
    except OSError:
        return []


def _place(link: Path) -> Path:
    """Return where a link leads; the link itself if that is nowhere."""
    try:
        return link.resolve()
    except (OSError, RuntimeError):  # a loop is the latter before Python 3.13
        return link


def _natural(name: str) -> list[tuple[int, str]]:
    hexadecimal = _ADDRESS.fullmatch(name)
    parts = [name] if hexadecimal else re.findall(r"[0-9]{1,9}|[^0-9]+", name)
    return [(int(part), "") if re.fullmatch("[0-9]+", part) else (-1, part) for part in parts]


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
    return int(text) if re.fullmatch(r"-?[0-9]{1,6}", text) else -1


def _read(file: Path) -> str:
    """Return a file's text, "" if there is none; what a terminal would obey is left out."""
    try:
        text = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""
    return "".join(filter(str.isprintable, text))
