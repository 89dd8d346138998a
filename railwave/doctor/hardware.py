"""Judge memory and wires: shared memory, MPS, NVLink, NICs, NVSHMEM's variables."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import torch

from railwave.config import Config
from railwave.doctor.machine import ERROR, GET_NVML, OK, WARNING, Finding, Machine
from railwave.heap import shm
from railwave.topology import Topology

NO_TCP = "NVSHMEM has no documented transport over TCP"
_OFF = ("", "0", "n", "no", "f", "false")
_MIB = 1 << 20


def shared_memory(machine: Machine) -> Iterator[Finding]:
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


def mps(machine: Machine) -> Iterator[Finding]:
    if not machine.num_gpus:
        return
    folder = Path(machine.environment.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps")
    ranks = machine.environment.get("LOCAL_WORLD_SIZE", "")
    sharing = bool(re.fullmatch("[0-9]{1,6}", ranks)) and int(ranks) > machine.num_gpus
    if _mps_runs(folder):
        yield Finding("MPS", OK, f"a daemon listens in {folder}")
    elif sharing:
        found = f"no daemon in {folder}, and {ranks} ranks share {machine.num_gpus} GPU(s)"
        yield Finding("MPS", WARNING, found, "nvidia-cuda-mps-control -d")
    else:
        yield Finding("MPS", OK, f"no daemon in {folder}; only ranks that share a GPU need one")


def _mps_runs(folder: Path) -> bool:
    """Say whether a daemon listens there; one that was killed leaves its pipe, and its number."""
    try:
        os.stat(folder / "control")
    except OSError:  # not there, or another user's: of no use to this one
        return False
    try:
        pid = (folder / "nvidia-cuda-mps-control.pid").read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return True
    return not re.fullmatch("[0-9]{1,9}", pid) or Path("/proc", pid).exists()


def nvlink(machine: Machine) -> Iterator[Finding]:
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
        yield Finding("NVLink", WARNING, f"all GPUs reach one another; {links}", GET_NVML)
    elif not all(machine.nvlinks):
        found = f"all GPUs reach one another, some over PCI alone; {links}"
        yield Finding("NVLink", WARNING, found, "see nvidia-smi nvlink --status")
    else:
        yield Finding("NVLink", OK, f"all GPUs reach one another; {links}")


def nics(machine: Machine) -> Iterator[Finding]:
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


def conflicts(machine: Machine) -> Iterator[Finding]:
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


def link_layer(machine: Machine) -> str:
    """Return the link layer that reaches other nodes; "" if nothing does."""
    off = machine.environment.get("NVSHMEM_REMOTE_TRANSPORT", "").lower() == "none"
    if off or not machine.node.used:
        return ""
    layer = machine.node.ports[machine.node.used[0]].link_layer
    return "RoCE" if layer == "Ethernet" else layer


def wires(machine: Machine) -> Iterator[Finding]:
    within, between = "wire within a node", "wire between nodes"
    if not machine.num_gpus:
        found = "shared memory, since torch finds no GPU: triton's interpreter runs on a CPU"
        yield Finding(within, OK, found)
        yield Finding(between, OK, "none: shared memory is of one host; only GPUs reach another")
        return
    found = "mapped memory, by plain stores: the same GPU, NVLink or PCI peers"
    yield Finding(within, OK, found)
    if layer := link_layer(machine):
        labels = [machine.node.ports[port].label for port in machine.node.used]
        yield Finding(between, OK, f"NVSHMEM over {layer}: {', '.join(labels)}")
    elif machine.node.used:
        found = f"none possible while NVSHMEM_REMOTE_TRANSPORT is none; {NO_TCP}"
        yield Finding(between, OK, found, "unset NVSHMEM_REMOTE_TRANSPORT for several nodes")
    else:
        found = f"none possible: no active InfiniBand or RoCE port, and {NO_TCP}"
        yield Finding(between, OK, found, "several nodes need a port that is up: see ibstat")
