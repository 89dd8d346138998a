"""Tensors of any dtype as 32-bit words, and back. T tokens, H hidden."""

from collections.abc import Sequence

import torch

from railwave.handle import Call
from railwave.kernels.shape import padded


def are_words(x: torch.Tensor) -> bool:
    """Say whether the rows of (T, H) can be viewed as 32-bit words."""
    size = x.dtype.itemsize
    # Where rows start, from the storage's start too (for `view`), and end: 4 divides all of these
    # if it divides what their bits are together.
    sizes = (x.storage_offset() | x.stride(0) | x.shape[1]) * size
    return x.stride(1) == 1 and (x.data_ptr() | sizes) % 4 == 0


def as_words(x: torch.Tensor) -> torch.Tensor:
    """View (T, H) as 32-bit words: (T, ceil(H * item size / 4)) int32; a copy where it must be.

    Example:
        >>> as_words(torch.tensor([[1, 2, 3]], dtype=torch.int16)).tolist()
        [[131073, 3]]
    """
    if are_words(x):
        return x.view(torch.int32)
    row_bytes = x.shape[1] * x.dtype.itemsize
    words = torch.zeros(x.shape[0], -(-row_bytes // 4), dtype=torch.int32, device=x.device)
    # clone, since contiguous() keeps odd strides where there is one column, or no row.
    bytes_ = x.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    words.view(torch.uint8)[:, :row_bytes] = bytes_
    return words


def join_words(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """View several (T, ...) side by side as 32-bit words, each from 16 bytes on; a copy of several.

    Example:
        >>> parts = [torch.tensor([[1, 2, 3]], dtype=torch.int16), torch.tensor([[7]]).int()]
        >>> join_words(parts).tolist()
        [[131073, 3, 0, 0, 7, 0, 0, 0]]
    """
    words = [as_words(part) for part in parts]
    if len(words) == 1:
        return words[0]
    starts, width = part_starts(parts), payload_bytes(parts) // 4
    joined = torch.empty(len(words[0]), width, dtype=torch.int32, device=words[0].device)
    for start, end, part in zip(starts, [*starts[1:], width], words, strict=True):
        filled = start + part.shape[1]
        joined[:, start:filled] = part
        if filled < end:
            joined[:, filled:end] = 0
    return joined


def words_of(call: Call) -> torch.Tensor:
    """Return what kernels read of a call's x and extras: (T, words) int32."""
    return join_words(call.parts) if call.joined is None else call.joined


def part_starts(parts: Sequence[torch.Tensor]) -> list[int]:
    """Return the word at which each part starts in `join_words`."""
    starts = [0]
    for part in parts[:-1]:
        starts.append(starts[-1] + padded(-(-part.shape[1] * part.dtype.itemsize // 4)))
    return starts


def payload_bytes(parts: Sequence[torch.Tensor]) -> int:
    """Return the bytes of a token's payload; of several parts each is padded to 16 bytes."""
    last = parts[-1].shape[1] * parts[-1].dtype.itemsize
    if len(parts) == 1:
        return last
    return 4 * (part_starts(parts)[-1] + padded(-(-last // 4)))


def part_of(words: torch.Tensor, start: int, hidden: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a part of joined words as (T, hidden) of its dtype: a view, rows at a stride."""
    bytes_ = words.view(torch.uint8)[:, 4 * start : 4 * start + hidden * dtype.itemsize]
    return bytes_.view(dtype)


def from_words(words: torch.Tensor, hidden: int, dtype: torch.dtype) -> torch.Tensor:
    """Undo `as_words`: (T, hidden) of `dtype`, contiguous."""
    row_bytes = hidden * dtype.itemsize
    if row_bytes % 4 == 0:
        return words.view(dtype)
    return words.view(torch.uint8)[:, :row_bytes].contiguous().view(dtype)
