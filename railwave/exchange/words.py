"""Tensors of any dtype as 32-bit words, and back. T tokens, H hidden."""

import torch


def as_words(x: torch.Tensor) -> torch.Tensor:
    """View (T, H) as 32-bit words: (T, ceil(H * item size / 4)) int32; a copy where it must be.

    Example:
        >>> as_words(torch.tensor([[1, 2, 3]], dtype=torch.int16)).tolist()
        [[131073, 3]]
    """
    size = x.dtype.itemsize
    row_bytes = x.shape[1] * size
    # Where a row starts: its address, and its distance from the storage's start (for `view`).
    starts = (x.data_ptr(), x.storage_offset() * size, x.stride(0) * size)
    if x.stride(1) == 1 and all(n % 4 == 0 for n in (row_bytes, *starts)):
        return x.view(torch.int32)
    words = torch.zeros(x.shape[0], -(-row_bytes // 4), dtype=torch.int32, device=x.device)
    # clone, since contiguous() keeps odd strides where there is one column, or no row.
    bytes_ = x.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    words.view(torch.uint8)[:, :row_bytes] = bytes_
    return words


def from_words(words: torch.Tensor, hidden: int, dtype: torch.dtype) -> torch.Tensor:
    """Undo `as_words`: (T, hidden) of `dtype`, contiguous."""
    row_bytes = hidden * dtype.itemsize
    if row_bytes % 4 == 0:
        return words.view(dtype)
    return words.view(torch.uint8)[:, :row_bytes].contiguous().view(dtype)
