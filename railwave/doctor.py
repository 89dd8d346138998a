"""Say whether dispatch will run on this machine, over which wire, and what to mend.

`look` asks the machine; `examine` judges what it said, so that tests can judge other machines.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from railwave.config import Config
from railwave.discovery import SYSFS, Node, discover
from railwave.heap import shm
from railwave.kernels import load
from railwave.topology import Topology

OK, WARNING, ERROR = "ok", "warning", "error"
LEAST_DRIVER = {12: 525, 13: 580}  # of a CUDA major version, as NVIDIA's release notes have it
NO_TCP = "NVSHMEM has no documented transport over TCP"
_GET_NVML = "pip install 'railwave[gpu]' (nvidia-ml-py)"
_GET_NVSHMEM = "pip install 'railwave[nvshmem]'"
_OFF = ("", "0", "n", "no", "f", "false")
_MIB = 1 << 20


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


@dataclass(frozen=True)
class Diagnosis:
    """All findings, and what follows."""

    findings: tuple[Finding, ...]
    wire: str  # where dispatch runs and over what

    @property
    def runs(self) -> bool:
        """Whether dispatch will run: nothing that was found is an error."""
        return all(finding.status != ERROR for finding in self.findings)

    @property
    def verdict(self) -> str:
        """Say so in one line."""
        if self.runs:
            return f"dispatch will run, {self.wire}"
        names = [finding.name for finding in self.findings if finding.status == ERROR]
        return f"dispatch will NOT run: mend {', '.join(dict.fromkeys(names))}"

    def to_json(self) -> dict[str, Any]:
        """Return all of it as JSON types."""
        return {**asdict(self), "runs": self.runs, "verdict": self.verdict}


def look(sysfs: str | os.PathLike = SYSFS) -> Machine:
    """Ask this machine. Uses the GPUs a little, and no group.

    Raises:
        ValueError: sysfs is no folder.
    """
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
        environment=dict(os.environ),
    )


def examine(machine: Machine) -> Diagnosis:
    """Judge a machine, and the packages of this Python."""
    software = (_versions, _torch, _driver, _nvshmem, _nvshmem4py)
    checks = (*software, _shared_memory, _mps, _nvlink, _nics, _conflicts, _wires)
    findings = tuple(finding for check in checks for finding in check(machine))
    wire = "on a CPU, over shared memory"
    if machine.num_gpus:
        wire = f"on {machine.num_gpus} GPU(s), over mapped memory"
        if _layer(machine):
            wire += f"; between nodes by NVSHMEM over {_layer(machine)}"
    return Diagnosis(findings, wire)


# Software


def _versions(machine: Machine) -> Iterator[Finding]:
    try:
        required = importlib.metadata.requires("railwave") or []
        python = importlib.metadata.metadata("railwave")["Requires-Python"] or ""
    except importlib.metadata.PackageNotFoundError:
        required, python = [], ""
        yield Finding(
            *("railwave", WARNING, "not installed as a package: what it allows is not known"),
            "pip install . in a clone",
        )
    yield _version("python", platform.python_version(), f"python{python}")
    for name in ("torch", "triton", "numpy"):
        rule = next((r for r in required if re.match(rf"{name}(?![\w.-])", r)), name)
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield Finding(name, ERROR, "not installed", f"pip install '{rule}'")
            continue
        yield _version(name, version, rule)


def _version(name: str, version: str, rule: str) -> Finding:
    """Compare a version with a rule such as torch>=2.11, the only kind that railwave has."""
    least = re.search(r">=\s*([\d.]+)", rule)
    if least and _numbers(version) < _numbers(least[1]):
        mend = "use a newer Python" if name == "python" else f"pip install '{rule}'"
        return Finding(name, ERROR, f"{version}, but {rule} is needed", mend)
    return Finding(name, OK, f"{version} ({rule})" if least else version)


def _numbers(version: str) -> tuple[int, ...]:
    """Return what compares: numbers before any local part.

    Example:
        >>> _numbers("2.13.0+cu130"), _numbers("2.11") < _numbers("2.13.0")
        ((2, 13, 0), True)
    """
    return tuple(map(int, re.findall(r"\d+", version.partition("+")[0])))


def _torch(machine: Machine) -> Iterator[Finding]:
    build = f"CUDA {machine.cuda_build} build" if machine.cuda_build else "CPU build"
    found = f"{build}, finds {machine.num_gpus} GPU(s)"
    present = len(machine.node.gpus)
    if present and not machine.num_gpus:
        mend = "see the driver, nvidia-smi and CUDA_VISIBLE_DEVICES"
        if not machine.cuda_build:
            mend = "install torch's CUDA build to use them"
        yield Finding("torch's GPUs", WARNING, f"{found}; the node has {present}", mend)
    else:
        yield Finding("torch's GPUs", OK, found)


def _driver(machine: Machine) -> Iterator[Finding]:
    if not machine.driver:
        if machine.node.gpus or machine.num_gpus:
            yield Finding("driver", WARNING, "NVML does not say its version", _GET_NVML)
        return
    least = LEAST_DRIVER.get((_numbers(machine.cuda_build or "") or (0,))[0], 0)
    if _numbers(machine.driver)[0] < least:
        found = f"{machine.driver}, older than CUDA {machine.cuda_build} asks for"
        yield Finding("driver", WARNING, found, f"install driver {least} or newer")
    else:
        yield Finding("driver", OK, machine.driver)


def _nvshmem(machine: Machine) -> Iterator[Finding]:
    """Look for the bitcode as a kernel's launch does, and for the library beside it."""
    needed = machine.num_gpus > 0
    try:
        bitcode = Path(load(interpret=False).wire.nvshmem.device_library(machine.arch))
    except (ImportError, RuntimeError) as error:
        found = str(error) if needed else f"none that can be used ({error}); only GPUs need it"
        mend = "pip install 'triton>=3.7' 'nvidia-nvshmem-cu13'" if needed else ""
        yield Finding("NVSHMEM", ERROR if needed else OK, found, mend)
        return
    names = ("nvidia-nvshmem-cu13", "nvidia-nvshmem-cu12")
    versions = [f"{name} {v}" for name in names if (v := _installed(name))]
    if needed and not list(bitcode.parent.glob("libnvshmem_host.so*")):
        found = f"{bitcode} without libnvshmem_host.so beside it"
        yield Finding("NVSHMEM", ERROR, found, "pip install --force-reinstall nvidia-nvshmem-cu13")
        return
    found = f"{', '.join(versions) or 'of NVSHMEM_HOME'}: {bitcode.name} fits this triton"
    yield Finding("NVSHMEM", OK, found if needed else f"{found}; only GPUs need it")


def _installed(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _nvshmem4py(machine: Machine) -> Iterator[Finding]:
    name = "nvshmem4py"
    if not machine.num_gpus:
        version = _installed("nvshmem4py-cu13") or "not installed"
        yield Finding(name, OK, f"{version}; only GPUs need it")
        return
    for module in ("nvshmem.core", "cuda.core"):
        try:
            importlib.import_module(module)
        except Exception as error:  # an ImportError, or what loading a library raises
            yield Finding(name, ERROR, f"{module} cannot be imported: {error}", _GET_NVSHMEM)
            return
    yield Finding(name, OK, "nvshmem.core and cuda.core can be imported")


# Memory


def _shared_memory(machine: Machine) -> Iterator[Finding]:
    needed = not machine.num_gpus
    try:
        free, left = shm.free_bytes(), shm.clean(remove=False)
    except OSError as error:
        status, mend = (ERROR, "mount a tmpfs there") if needed else (OK, "")
        yield Finding("shared memory", status, f"{shm.FOLDER}: {error}", mend)
        return
    need = small_heaps_bytes()
    found = f"{free // _MIB:,} MiB free in {shm.FOLDER}, 4 small ranks take {-(-need // _MIB)}"
    if needed and free < need:
        mend = "docker run --shm-size=1g, or mount -o remount,size=1g /dev/shm"
        yield Finding("shared memory", ERROR, found, mend)
    else:
        yield Finding("shared memory", OK, found if needed else f"{found}; GPUs do not use it")
    if left:
        found = f"killed processes left {len(left)} file(s) in {shm.FOLDER}"
        yield Finding("shared memory", WARNING, found, "railwave clean")


def small_heaps_bytes() -> int:
    """Return the shared memory of 2 x 2 ranks with 128 tokens of 1,024 bfloat16."""
    config = Config(
        Topology(2, 2, 2),
        num_experts=8,
        top_k=2,
        hidden=1024,
        max_tokens_per_rank=128,
        dtype=torch.bfloat16,
    )
    return config.layout.size * config.topo.num_ranks


def _mps(machine: Machine) -> Iterator[Finding]:
    if not machine.num_gpus:
        return
    folder = Path(machine.environment.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps")
    ranks = machine.environment.get("LOCAL_WORLD_SIZE", "")
    sharing = ranks.isdigit() and int(ranks) > machine.num_gpus
    if _mps_runs(folder):
        yield Finding("MPS", OK, f"a daemon listens in {folder}")
    elif sharing:
        found = f"no daemon in {folder}, and {ranks} ranks share {machine.num_gpus} GPU(s)"
        yield Finding("MPS", WARNING, found, "nvidia-cuda-mps-control -d")
    else:
        yield Finding("MPS", OK, f"no daemon in {folder}; only ranks that share a GPU need one")


def _mps_runs(folder: Path) -> bool:
    """Say whether a daemon listens there; one that was killed leaves its pipe, and its number."""
    if not (folder / "control").exists():
        return False
    try:
        pid = (folder / "nvidia-cuda-mps-control.pid").read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return True
    return not pid.isdigit() or Path("/proc", pid).exists()


# Wires


def _nvlink(machine: Machine) -> Iterator[Finding]:
    if machine.num_gpus < 2:
        return
    links = "NVML does not say how many NVLinks are up"
    if machine.nvlinks is not None:
        links = f"NVLinks up, by GPU: {', '.join(map(str, machine.nvlinks))}"
    if machine.apart:
        pairs = ", ".join(f"{a}-{b}" for a, b in machine.apart[:4])
        found = f"GPUs do not reach one another's memory: {pairs}; {links}"
        mend = "see nvidia-smi topo -m; run on GPUs that do (CUDA_VISIBLE_DEVICES), or nodes of one"
        yield Finding("NVLink", ERROR, found, mend)
    elif machine.nvlinks is None:
        yield Finding("NVLink", WARNING, f"all GPUs reach one another; {links}", _GET_NVML)
    elif not all(machine.nvlinks):
        found = f"all GPUs reach one another, some over PCI alone; {links}"
        yield Finding("NVLink", WARNING, found, "see nvidia-smi nvlink --status")
    else:
        yield Finding("NVLink", OK, f"all GPUs reach one another; {links}")


def _nics(machine: Machine) -> Iterator[Finding]:
    ports = machine.node.ports
    active = [port for port in ports if port.state == "ACTIVE"]
    found = f"{len(active)} of {len(ports)} ports are active"
    if not machine.num_gpus:
        yield Finding("NICs", OK, f"{found}; a CPU does not use them")
        return
    yield Finding("NICs", OK, f"{found}; rail of each GPU: {machine.node.rail_of_gpu}")
    for text in machine.node.warnings:
        mend = "railwave topo shows the map" if machine.node.used else "none is needed on one node"
        yield Finding("NICs", WARNING, text, mend)


def _conflicts(machine: Machine) -> Iterator[Finding]:
    """Find variables of NVSHMEM that undo one another."""
    given = machine.environment.get
    mapping, names = given("NVSHMEM_HCA_PE_MAPPING"), given("NVSHMEM_HCA_LIST")
    enabled = given("NVSHMEM_ENABLE_NIC_PE_MAPPING", "").lower() not in _OFF
    name, count = "environment", 0
    if mapping and names:
        count += 1
        found = "NVSHMEM_HCA_LIST is set, so NVSHMEM ignores NVSHMEM_HCA_PE_MAPPING"
        yield Finding(name, WARNING, found, "unset NVSHMEM_HCA_LIST")
    if (mapping or names) and not enabled:
        count += 1
        which = "NVSHMEM_HCA_PE_MAPPING" if mapping else "NVSHMEM_HCA_LIST"
        found = f"{which} has no effect without NVSHMEM_ENABLE_NIC_PE_MAPPING=1"
        yield Finding(name, WARNING, found, "export NVSHMEM_ENABLE_NIC_PE_MAPPING=1")
    active = {port.label for port in machine.node.ports if port.state == "ACTIVE"}
    listed = [":".join(entry.split(":")[:2]) for entry in (mapping or "").split(",") if entry]
    if unknown := [label for label in listed if label not in active]:
        count += 1
        found = f"NVSHMEM_HCA_PE_MAPPING names ports that are not active: {', '.join(unknown)}"
        yield Finding(name, WARNING, found, "railwave topo prints the mapping of this node")
    if not count:
        yield Finding(name, OK, "no variables of NVSHMEM that undo one another")


def _layer(machine: Machine) -> str:
    """Return the link layer that reaches other nodes; "" if nothing does."""
    off = machine.environment.get("NVSHMEM_REMOTE_TRANSPORT", "").lower() == "none"
    if off or not machine.node.used:
        return ""
    layer = machine.node.ports[machine.node.used[0]].link_layer
    return "RoCE" if layer == "Ethernet" else layer


def _wires(machine: Machine) -> Iterator[Finding]:
    within, between = "wire within a node", "wire between nodes"
    if not machine.num_gpus:
        found = "shared memory, since torch finds no GPU: triton's interpreter runs on a CPU"
        yield Finding(within, OK, found)
        yield Finding(between, OK, "none: shared memory is of one host; only GPUs reach another")
        return
    found = "mapped memory, by plain stores: the same GPU, NVLink or PCI peers"
    yield Finding(within, OK, found)
    if layer := _layer(machine):
        labels = [machine.node.ports[port].label for port in machine.node.used]
        yield Finding(between, OK, f"NVSHMEM over {layer}: {', '.join(labels)}")
    elif machine.node.used:
        found = f"none possible while NVSHMEM_REMOTE_TRANSPORT is none; {NO_TCP}"
        yield Finding(between, OK, found, "unset NVSHMEM_REMOTE_TRANSPORT for several nodes")
    else:
        found = f"none possible: no active InfiniBand or RoCE port, and {NO_TCP}"
        yield Finding(between, OK, found, "several nodes need a port that is up: see ibstat")


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
        pynvml.nvmlShutdown()
    return driver, links


def _active_links(pynvml: Any, handle: Any) -> int:
    active = 0
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        with suppress(pynvml.NVMLError):  # the GPU has no such link
            active += pynvml.nvmlDeviceGetNvLinkState(handle, link)
    return active
