"""Device code, written once and loaded once per mode.

`load(interpret=False)` gives the kernels compiled by Triton for a GPU; `load(interpret=True)` gives
the same files run by Triton's interpreter on CPU tensors. Interpretation is chosen when a function
is decorated, so each mode has modules of its own: a second package, `railwave.kernels.interpreted`,
whose path is this folder. Relative imports keep the two sets apart. Nothing is loaded before the
first call, and no environment variable or global setting is read or changed.
"""

import importlib
import sys
from collections.abc import Callable, Iterable
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

OPS = (
    *("notify", "verdict", "count", "describe", "quota", "match"),
    *("pack", "port", "wire", "granted", "unpack", "reduce", "group", "combine"),
)

_INTERPRETED = f"{__name__}.interpreted"
_around: Callable[[bool, str, dict[str, Any]], Any] | None = None  # see `trace_launches`


def load(*, interpret: bool) -> SimpleNamespace:
    """Import the kernel modules of one mode and return them by name.

    Args:
        interpret: True for Triton's interpreter on CPU tensors, False for compiled kernels.

    Returns:
        A namespace with one module per entry of `OPS`.

    Example:
        >>> load(interpret=True).count.__name__
        'railwave.kernels.interpreted.count'
    """
    package = __name__
    if interpret:
        package = _INTERPRETED
        if package not in sys.modules:
            mirror = ModuleType(package, "This package's files, interpreted.")
            mirror.__path__ = list(__path__)
            sys.modules[package] = mirror
    modules = SimpleNamespace(**{op: importlib.import_module(f"{package}.{op}") for op in OPS})
    _trace(package)
    return modules


def trace_launches(around: Callable[[bool, str, dict[str, Any]], Any] | None) -> None:
    """Have every launch, from now on, run inside `around(interpreted, kernel, scalars)`; None: no.

    Args:
        around: a context manager of the mode, a kernel's name and its scalar arguments.
    """
    global _around
    _around = around
    for package in (__name__, _INTERPRETED):
        if f"{package}.lang" in sys.modules:
            _trace(package)


def _trace(package: str) -> None:
    around = _around and partial(_around, package == _INTERPRETED)
    sys.modules[f"{package}.lang"].around_launch = around  # type: ignore[attr-defined]


def tell_launches(tell: Callable[..., None] | None, *, interpret: bool = False) -> None:
    """Tell of every launch of one mode by this thread from now on; None: no more.

    Args:
        tell: called after it with the kernel that is loaded, its grid, arguments and constants.
    """
    load(interpret=interpret)
    package = _INTERPRETED if interpret else __name__
    sys.modules[f"{package}.lang"].told.launch = tell


def launches_hooked() -> bool:
    """Say whether somebody, a profiler of Triton's, is told of every launch of compiled kernels."""
    return sys.modules[f"{__name__}.lang"].hooked()  # which are loaded by now


def initialise_modules() -> None:
    """Let every compiled kernel that calls NVSHMEM, which runs by now, do so once it is loaded."""
    kernels = load(interpret=False)
    kernels.wire.nvshmem.initialise_modules(set(_kernel_names(vars(kernels).values())))


def _kernel_names(modules: Iterable[ModuleType]) -> Iterable[str]:
    return (name for module in modules for name in vars(module) if name.endswith("_kernel"))
