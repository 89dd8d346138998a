"""NVSHMEM's device functions, for PEs whose memory is not mapped here.

A PE is mapped if its base in the table of heaps is not 0. Others are named to NVSHMEM by number,
and a place in their heap by the address of the same place in the own heap. These calls exist in
compiled kernels only (`Shape.REMOTE`); they are linked from NVSHMEM's device bitcode.

Types must match the bitcode's exactly: addresses and sizes int64, values uint64, the rest int32.
"""

import functools
import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language import core

from .lang import helper
from .shape import Shape

LIBRARY = "libnvshmem_device"  # the name that Triton links the bitcode under

_SIGNAL_SET = tl.constexpr(9)
_GREATER_OR_EQUAL = tl.constexpr(5)

_I32, _I64, _U64 = core.dtype("int32"), core.dtype("int64"), core.dtype("uint64")


def libraries(shape: Shape) -> dict[str, Any]:
    """Return the launch arguments of a kernel that may call NVSHMEM: none if it does not."""
    if not shape.REMOTE:
        return {}
    return _current_libraries()


@functools.cache
def _current_libraries() -> dict[str, Any]:
    return {"extern_libs": {LIBRARY: device_library()}}


@core.extern
def _putmem_signal_nbi_block(dst, src, num_bytes, word, value, signal_op, pe, _semantic=None):
    return core.extern_elementwise(
        *("", "", [dst, src, num_bytes, word, value, signal_op, pe]),
        {
            (_I64, _I64, _I64, _I64, _U64, _I32, _I32): ("nvshmemx_putmem_signal_nbi_block", _I32),
        },
        is_pure=False,
        _semantic=_semantic,
    )


@core.extern
def _signal_op(word, value, signal_op, pe, _semantic=None):
    return core.extern_elementwise(
        *("", "", [word, value, signal_op, pe]),
        {(_I64, _U64, _I32, _I32): ("nvshmemx_signal_op", _I32)},
        is_pure=False,
        _semantic=_semantic,
    )


@core.extern
def _quiet(_semantic=None):
    return core.extern_elementwise(
        *("", "", []), {(): ("nvshmem_quiet", _I32)}, is_pure=False, _semantic=_semantic
    )


@core.extern
def _uint64_test(word, compare, value, _semantic=None):
    return core.extern_elementwise(
        *("", "", [word, compare, value]),
        {(_I64, _I32, _U64): ("nvshmem_uint64_test", _I32)},
        is_pure=False,
        _semantic=_semantic,
    )


@helper
def _thread():
    """Return the number of this thread in its program."""
    return tl.inline_asm_elementwise(
        "mov.u32 $0, %tid.x;", "=r", [], dtype=tl.int32, is_pure=True, pack=1
    )


@helper
def put_signal(dst, src, num_bytes, word, value, pe):
    """Start to put bytes to a PE; its word is set once they are there.

    dst, word: own addresses of the places in the PE's heap; src: an address in the own heap, which
    may be reused after `quiet`. All threads of the program call it.
    """
    tl.debug_barrier()  # what they have stored goes with it
    _putmem_signal_nbi_block(
        *(dst, src, num_bytes, word, tl.cast(value, tl.uint64)),
        *(tl.cast(_SIGNAL_SET, tl.int32), tl.cast(pe, tl.int32)),
    )


@helper
def signal_pe(word, value, pe):
    """Set a PE's word, after all that this program stored in mapped memory before."""
    tl.debug_barrier()
    if _thread() == 0:
        _signal_op(
            *(word, tl.cast(value, tl.uint64)),
            *(tl.cast(_SIGNAL_SET, tl.int32), tl.cast(pe, tl.int32)),
        )
    tl.debug_barrier()


@helper
def quiet():
    """Wait until all that this PE has put so far is there."""
    tl.debug_barrier()
    if _thread() == 0:
        _quiet()
    tl.debug_barrier()


@helper
def settle(word):
    """Make visible what words that a NIC wrote vouch for: a transport may need a step for it.

    Testing any word of the own heap takes that step; this one holds 0 or more.
    """
    tl.debug_barrier()
    if _thread() == 0:
        _uint64_test(word, tl.cast(_GREATER_OR_EQUAL, tl.int32), tl.cast(0, tl.uint64))
    tl.debug_barrier()


def device_library(arch: int | None = None) -> str:
    """Return the path of NVSHMEM's device bitcode, in either layout of its package.

    Args:
        arch: compute capability, 90 for sm_90; None for the current device's.

    Raises:
        ImportError: there is none.
        RuntimeError: the installed triton cannot link it.
    """
    roots = [Path(path) for path in _package_paths()]
    if "NVSHMEM_HOME" in os.environ:
        roots.append(Path(os.environ["NVSHMEM_HOME"]))
    _check_versions(_version_of("nvidia-nvshmem-cu13"), triton.__version__)
    for lib in (root / "lib" for root in roots):
        if (lib / "libnvshmem_device.bc").exists():  # until 3.6
            return str(lib / "libnvshmem_device.bc")
        if list(lib.glob("libnvshmem_device_sm_*.bc")):  # from 3.7, one an architecture
            if arch is None:
                major, minor = torch.cuda.get_device_capability()
                arch = 10 * major + minor
            path = lib / f"libnvshmem_device_sm_{arch}.bc"
            if path.exists():
                return str(path)
            raise ImportError(f"NVSHMEM has no device bitcode for sm_{arch} in {lib}")
    raise ImportError(
        "NVSHMEM's device bitcode is not installed: pip install nvidia-nvshmem-cu13, or set "
        f"NVSHMEM_HOME; looked in {[str(root) for root in roots]}"
    )


def _package_paths() -> list[str]:
    try:
        spec = importlib.util.find_spec("nvidia.nvshmem")
    except ModuleNotFoundError:
        return []
    return list(spec.submodule_search_locations or []) if spec else []


def _version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""  # under NVSHMEM_HOME


def _check_versions(nvshmem: str, installed_triton: str) -> None:
    """Raise if this triton's LLVM is too old for the bitcode."""
    versions = (nvshmem or "0.0", installed_triton)
    found = [tuple(map(int, re.findall(r"\d+", version)[:2])) for version in versions]
    if found[0] >= (3, 8) and found[1] < (3, 7):
        raise RuntimeError(
            f"triton {installed_triton} cannot link the device bitcode of NVSHMEM {nvshmem}: from "
            "NVSHMEM 3.8 on it needs triton 3.7 or newer (3.4 to 3.7 work with triton 3.6)"
        )


def initialise_modules(names: Collection[str]) -> None:
    """From now on, give NVSHMEM's state to every CUDA module that holds one of these kernels.

    A kernel that calls NVSHMEM without it would use null pointers.
    """
    from cuda.bindings import driver
    from nvshmem import bindings

    def loaded(module: int, _function: Any, name: str, *_: Any) -> None:
        if name not in names:
            return
        found, *_ = driver.cuModuleGetGlobal(module, b"nvshmemi_device_state_d")
        if found == driver.CUresult.CUDA_SUCCESS:
            bindings.cumodule_init(int(module))
        elif found != driver.CUresult.CUDA_ERROR_NOT_FOUND:
            raise RuntimeError(f"could not look for NVSHMEM's state in kernel {name}: {found}")

    triton.knobs.runtime.kernel_load_end_hook.add(loaded)
