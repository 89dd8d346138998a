"""Say whether dispatch will run on this machine, over which wire, and what to mend.

`look` asks the machine; `examine` judges what it said, so that tests can judge other machines.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from railwave.doctor import environment, hardware, software
from railwave.doctor.machine import ERROR as ERROR
from railwave.doctor.machine import OK as OK
from railwave.doctor.machine import WARNING as WARNING
from railwave.doctor.machine import Finding as Finding
from railwave.doctor.machine import Machine as Machine
from railwave.doctor.machine import look as look

__all__ = ["ERROR", "OK", "WARNING", "Diagnosis", "Finding", "Machine", "examine", "look"]

CHECKS = (
    *(software.versions, software.torch, software.driver, software.nvshmem, software.nvshmem4py),
    *(hardware.shared_memory, hardware.mps, hardware.nvlink, hardware.nics),
    *(environment.variables, hardware.wires),
)


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


def examine(machine: Machine) -> Diagnosis:
    """Judge a machine, and the packages of this Python."""
    findings = tuple(finding for check in CHECKS for finding in check(machine))
    wire = "on a CPU, over shared memory"
    if machine.num_gpus:
        wire = f"on {machine.num_gpus} GPU(s), over mapped memory"
        if hardware.link_layer(machine):
            wire += f"; between nodes by NVSHMEM over {hardware.link_layer(machine)}"
    return Diagnosis(findings, wire)
