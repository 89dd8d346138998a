"""Judge memory and wires: shared memory, MPS, NVLink, NICs, what reaches other nodes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import torch

from railwave.config import Config
from railwave.discovery.node import UNKNOWN_LAYER, Nic
from railwave.doctor.environment import shown_gpus
from railwave.doctor.machine import ERROR, GET_NVML, OK, WARNING, Finding, Machine
from railwave.heap import shm
from railwave.topology import Topology

NO_TCP = "NVSHMEM has no documented transport over TCP"
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
    node, shown = machine.node, shown_gpus(machine)
    active = [port for port in node.ports if port.state == "ACTIVE"]
    found = f"{len(active)} of {len(node.ports)} ports are active"
    if not machine.num_gpus:
        yield Finding("NICs", OK, f"{found}; a CPU does not use them")
        return
    if not node.gpus:
        rails = "discovery finds no GPU"
    elif shown is None:
        rails = "which GPUs CUDA shows is not known"
    elif len(shown) < len(node.gpus):
        each = ", ".join(f"GPU {gpu} rail {node.rail_of_gpu[gpu]}" for gpu in shown)
        rails = f"of {len(node.gpus)} GPUs CUDA shows {len(shown)}: {each or 'no port is used'}"
    else:
        rails = f"rail of each GPU: {node.rail_of_gpu}"
    yield Finding("NICs", OK, f"{found}; {rails}")
    needed = node.used or machine.nodes > 1
    for text in node.warnings:
        mend = "railwave topo shows the map" if needed else "none is needed on one node"
        yield Finding("NICs", WARNING, text, mend)


def link_layer(machine: Machine) -> str:
    """Return the link layer that reaches other nodes; "" if nothing does."""
    ports = _ports(machine)
    if _transport_is_off(machine) or not ports:
        return ""
    layer = ports[0].link_layer
    return {"Ethernet": "RoCE", UNKNOWN_LAYER: "an unknown link layer"}.get(layer, layer)


def _ports(machine: Machine) -> list[Nic]:
    """Return the ports of the GPUs that CUDA shows, of all GPUs where those cannot be told."""
    node, shown = machine.node, shown_gpus(machine)
    gpus = range(len(node.gpus)) if shown is None else shown
    rails = sorted({node.rail_of_gpu[gpu] for gpu in gpus}) if node.used else []
    return [node.ports[node.used[rail]] for rail in rails]


def _transport_is_off(machine: Machine) -> bool:
    return machine.environment.get("NVSHMEM_REMOTE_TRANSPORT", "").lower() == "none"


def wires(machine: Machine) -> Iterator[Finding]:
    found = "mapped memory, by plain stores: the same GPU, NVLink or PCI peers"
    if not machine.num_gpus:
        found = "shared memory, since torch finds no GPU: triton's interpreter runs on a CPU"
    yield Finding("wire within a node", OK, found)
    status, found, mend = _between(machine)
    if status == ERROR:
        found = f"{found}; the job has {machine.nodes} nodes"
    yield Finding("wire between nodes", status, found, mend)


def _between(machine: Machine) -> tuple[str, str, str]:
    """Return status, what is found and its mend: none is an error for a job of several nodes."""
    node = machine.node
    none = ERROR if machine.nodes > 1 else OK
    if not machine.num_gpus:
        found = "none: shared memory is of one host; only GPUs reach another"
        mend = "run on one node, or on GPUs that torch finds" if none == ERROR else ""
        return none, found, mend
    if not node.gpus and any(port.state == "ACTIVE" for port in node.ports):
        return none, "none possible: discovery finds no GPU, so no port is given out", GET_NVML
    if not node.used:
        found = f"none possible: no active InfiniBand or RoCE port, and {NO_TCP}"
        return none, found, "several nodes need a port that is up: see ibstat"
    if _transport_is_off(machine):
        found = f"none possible while NVSHMEM_REMOTE_TRANSPORT is none; {NO_TCP}"
        return none, found, "unset NVSHMEM_REMOTE_TRANSPORT for several nodes"
    ports = _ports(machine)
    if not ports:
        found = "none possible: CUDA_VISIBLE_DEVICES shows none of the GPUs that discovery finds"
        return none, found, "railwave topo numbers them"
    found = f"NVSHMEM over {link_layer(machine)}: {', '.join(port.label for port in ports)}"
    if any(port.link_layer == UNKNOWN_LAYER for port in ports):
        return WARNING, found, "see link_layer of these ports in /sys/class/infiniband"
    return OK, found, ""
