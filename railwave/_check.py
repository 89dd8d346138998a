"""Check arguments: every helper raises with the argument's name, the rule and the value.

A wrong kind of object is a `TypeError`, a wrong value a `ValueError`. bool is not an int here.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from math import isfinite
from typing import Any

import torch

_KINDS: dict[type, str] = {
    int: "an int",
    float: "a finite number",
    str: "a str",
    dict: "an object",
    list: "a list",
}


def check_int(value: Any, name: str) -> int:
    """Return `value` as an int; numpy and zero-dimensional torch integers count, bool does not."""
    is_bool = isinstance(value, bool) or "bool" in str(getattr(value, "dtype", ""))
    try:
        if not is_bool:
            return operator.index(value)
    except TypeError:
        pass
    raise TypeError(f"{name} must be an int, got {type(value).__name__} {value!r}")


def check_bool(value: Any, name: str) -> None:
    """Check that `value` is True or False itself."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")


def check_positive_int(value: Any, name: str, *, below: int | None = None) -> int:
    """Return `value` as an int of at least 1, and below a bound if there is one."""
    number = check_int(value, name)
    if number < 1:
        raise ValueError(f"{name} must be at least 1, got {number}")
    if below is not None and number >= below:
        raise ValueError(f"{name} must be below {below}, got {number}")
    return number


def check_non_negative_int(value: Any, name: str) -> int:
    """Return `value` as an int of at least 0."""
    number = check_int(value, name)
    if number < 0:
        raise ValueError(f"{name} must be at least 0, got {number}")
    return number


def check_index(value: Any, size: int, name: str) -> int:
    """Return `value` as an int in [0, size)."""
    number = check_int(value, name)
    if not 0 <= number < size:
        raise ValueError(f"{name} must be in [0, {size}), got {number}")
    return number


def check_fields(of: Any, kinds: Mapping[str, type], name: str = "") -> None:
    """Check an object of a JSON file: each field is of its kind; a float is any finite number.

    Args:
        of: what the file holds.
        kinds: by field: int, float, str, dict or list.
        name: of the object; "" for the file's own.

    Raises:
        TypeError: one is not.
    """
    if not isinstance(of, dict):
        raise TypeError(f"{name or 'the file'} must hold an object, got {of!r:.60}")
    for key, kind in kinds.items():
        value: Any = of.get(key)
        fits = isinstance(value, (int, float) if kind is float else kind)
        if not fits or isinstance(value, bool) or (kind is float and not _is_finite(value)):
            field = f"{name}.{key}" if name else key
            raise TypeError(f"{field} must be {_KINDS[kind]}, got {value!r:.60}")


def _is_finite(value: float) -> bool:
    try:
        return isfinite(value)
    except OverflowError:  # an integer beyond floats
        return False


def check_counts(value: Any, shape: tuple[int, ...] | None, name: str, *, ndim: int = 2):
    """Return `value` as a new int64 CPU tensor of non-negative entries.

    Args:
        value: integer tensor, ndarray or nested sequence.
        shape: the exact shape, or None if only the number of dimensions is fixed.
        name: the argument's name, for the error.
        ndim: number of dimensions; read only where `shape` is None.
    """
    wanted = f"of shape {shape}" if shape is not None else f"with {ndim} dimension(s)"
    try:
        tensor = torch.as_tensor(value, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"{name} must be integers {wanted}, got {type(value).__name__}: {error}"
        ) from None
    # An empty list has no integers to show its type by; torch calls it float32.
    is_integer = not (tensor.is_floating_point() or tensor.is_complex())
    if (not is_integer and tensor.numel()) or tensor.dtype == torch.bool:
        raise TypeError(f"{name} must be integers {wanted}, got {tensor.dtype}")
    if tuple(tensor.shape) != shape if shape is not None else tensor.ndim != ndim:
        raise ValueError(f"{name} must be integers {wanted}, got shape {tuple(tensor.shape)}")
    counts = tensor.detach().to(device="cpu", dtype=torch.int64, copy=True)
    if counts.numel() and int(counts.min()) < 0:
        where = tuple((counts < 0).nonzero()[0].tolist())
        raise ValueError(f"{name} must not be negative, got {int(counts[where])} at {where}")
    return counts


def check_device(value: Any) -> torch.device:
    """Return a CPU or CUDA device, with its index; the current GPU for plain "cuda"."""
    if not isinstance(value, (str, torch.device)):
        raise TypeError(f"device must be a torch.device or its name, got {value!r}")
    try:
        device = torch.device(value)
    except RuntimeError as error:
        raise ValueError(f"device must be cpu or a cuda device, got {value!r}") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be cpu or a cuda device, got {value!r}")
    if device.type == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count == 0:
        raise ValueError(f"device must be cpu where torch finds no GPU, got {value!r}")
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= count:
        raise ValueError(f"device must be below cuda:{count} here, got {value!r}")
    return torch.device("cuda", index)
