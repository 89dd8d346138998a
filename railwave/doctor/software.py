"""Judge the software: versions, torch's build, driver, NVSHMEM and its bindings."""

from __future__ import annotations

import importlib
import importlib.metadata
import platform
import re
from collections.abc import Iterator
from pathlib import Path

from railwave.doctor.machine import ERROR, GET_NVML, OK, WARNING, Finding, Machine
from railwave.kernels import load

LEAST_DRIVER = {12: 525, 13: 580}  # of a CUDA major version, as NVIDIA's release notes have it
_GET_NVSHMEM = "pip install 'railwave[nvshmem]'"


def versions(machine: Machine) -> Iterator[Finding]:
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
        if error := _import_error(name):
            mend = f"pip install --force-reinstall '{rule}'"
            yield Finding(name, ERROR, f"{version} cannot be imported: {error}", mend)
        else:
            yield _version(name, version, rule)


def _import_error(module: str) -> str:
    try:
        importlib.import_module(module)
    except Exception as error:  # an ImportError, or what loading a library raises
        return str(error) or type(error).__name__
    return ""


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


def torch(machine: Machine) -> Iterator[Finding]:
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


def driver(machine: Machine) -> Iterator[Finding]:
    if not (version := _numbers(machine.driver)):
        if machine.node.gpus or machine.num_gpus:
            yield Finding("driver", WARNING, "NVML does not say its version", GET_NVML)
        return
    least = LEAST_DRIVER.get((_numbers(machine.cuda_build or "") or (0,))[0], 0)
    if version[0] < least:
        found = f"{machine.driver}, older than CUDA {machine.cuda_build} asks for"
        yield Finding("driver", WARNING, found, f"install driver {least} or newer")
    else:
        yield Finding("driver", OK, machine.driver)


def nvshmem(machine: Machine) -> Iterator[Finding]:
    """Look for the bitcode as a kernel's launch does, and for the library beside it."""
    needed = machine.num_gpus > 0
    try:
        bitcode = Path(load(interpret=False).wire.nvshmem.device_library(machine.arch))
    except Exception as error:  # no bitcode, or whatever a triton that is broken raises
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


def nvshmem4py(machine: Machine) -> Iterator[Finding]:
    name = "nvshmem4py"
    if not machine.num_gpus:
        version = _installed("nvshmem4py-cu13") or "not installed"
        yield Finding(name, OK, f"{version}; only GPUs need it")
        return
    for module in ("nvshmem.core", "cuda.core"):
        if error := _import_error(module):
            yield Finding(name, ERROR, f"{module} cannot be imported: {error}", _GET_NVSHMEM)
            return
    yield Finding(name, OK, "nvshmem.core and cuda.core can be imported")
