"""Judge the environment: variables that undo one another, or name what is not there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from railwave.discovery import visible_gpus
from railwave.doctor.machine import ERROR, OK, WARNING, Finding, Machine

_OFF = ("", "0", "n", "no", "f", "false")
_NAME = "environment"


def shown_gpus(machine: Machine) -> tuple[int, ...] | None:
    """Return the node's GPUs that CUDA shows; None if they cannot be told."""
    try:
        return visible_gpus(machine.node, machine.environment.get("CUDA_VISIBLE_DEVICES"))
    except ValueError:
        return None


def variables(machine: Machine) -> Iterator[Finding]:
    findings = [*_devices(machine), *_conflicts(machine), *_ports(machine)]
    yield from findings or [Finding(_NAME, OK, "no variables that undo one another")]


def _devices(machine: Machine) -> Iterator[Finding]:
    """Find variables of CUDA by which a process does not know its GPU's rail."""
    given = machine.environment.get
    shown = given("CUDA_VISIBLE_DEVICES")
    try:
        visible_gpus(machine.node, shown)
    except ValueError as error:
        found, _, mend = str(error).partition(": ")
        status = ERROR if machine.num_gpus else WARNING
        yield Finding(_NAME, status, found, mend or "name GPUs by numbers")
        return
    numbers = not (shown or "").strip().startswith("GPU-")  # UUIDs are the same in any order
    names = sorted({gpu.name for gpu in machine.node.gpus})
    order = given("CUDA_DEVICE_ORDER", "")
    if machine.num_gpus and numbers and len(names) > 1 and order != "PCI_BUS_ID":
        found = f"GPUs of several kinds ({', '.join(names)}), which CUDA numbers by speed"
        yield Finding(_NAME, WARNING, found, "export CUDA_DEVICE_ORDER=PCI_BUS_ID")


def _conflicts(machine: Machine) -> Iterator[Finding]:
    """Find variables of NVSHMEM that undo one another."""
    given = machine.environment.get
    mapping, names = given("NVSHMEM_HCA_PE_MAPPING"), given("NVSHMEM_HCA_LIST")
    enabled = given("NVSHMEM_ENABLE_NIC_PE_MAPPING", "").lower() not in _OFF
    if mapping and names:
        found = "NVSHMEM_HCA_LIST is set, so NVSHMEM ignores NVSHMEM_HCA_PE_MAPPING"
        yield Finding(_NAME, WARNING, found, "unset NVSHMEM_HCA_LIST")
    if (mapping or names) and not enabled:
        which = "NVSHMEM_HCA_PE_MAPPING" if mapping else "NVSHMEM_HCA_LIST"
        found = f"{which} has no effect without NVSHMEM_ENABLE_NIC_PE_MAPPING=1"
        yield Finding(_NAME, WARNING, found, "export NVSHMEM_ENABLE_NIC_PE_MAPPING=1")


def _ports(machine: Machine) -> Iterator[Finding]:
    """Find ports that NVSHMEM is told of and that are not there, not active, or no rail."""
    node = machine.node
    active = [port.label for port in node.ports if port.state == "ACTIVE"]
    used = [node.ports[port].label for port in node.used]
    for variable in ("NVSHMEM_HCA_PE_MAPPING", "NVSHMEM_HCA_LIST"):
        text = machine.environment.get(variable, "")
        if text.lstrip().startswith("^"):  # those not to be used
            continue
        listed = [":".join(e.strip().split(":")[:2]) for e in text.split(",") if e.strip()]
        unknown = _not_of(listed, active)
        if unknown:
            found = f"{variable} names ports that are not active: {', '.join(unknown)}"
            yield Finding(_NAME, WARNING, found, "railwave topo prints the mapping of this node")
        if left_out := [label for label in _not_of(listed, used) if label not in unknown]:
            found = f"{variable} names ports that are no GPU's rail: {', '.join(left_out)}"
            yield Finding(_NAME, WARNING, found, "railwave topo prints the mapping of this node")


def _not_of(listed: Sequence[str], labels: Sequence[str]) -> list[str]:
    """Return what is none of some ports, a NIC without a port being any of its ports.

    Example:
        >>> _not_of(["mlx5_0", "mlx5_0:2", "mlx5_1"], ["mlx5_0:1"])
        ['mlx5_0:2', 'mlx5_1']
    """
    names = {label.partition(":")[0] for label in labels}
    return [entry for entry in listed if entry not in labels and entry not in names]
