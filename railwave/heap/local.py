"""A symmetric heap whose PEs all live in this process."""

import numpy as np
import torch

from railwave.heap.layout import ALIGNMENT, Layout


class LocalHeap:
    """Hold one zeroed block of memory per PE, and the table of their addresses.

    Args:
        num_pes: W.
        layout: the regions of every PE.
        device: where the memory lies.

    Raises:
        MemoryError: there is no room.

    Attributes:
        bases: (W,) int64 on `device`, address of every PE's heap.
    """

    def __init__(self, num_pes: int, layout: Layout, *, device: torch.device) -> None:
        self.layout = layout
        self._blocks = [_zeros(layout.size, device) for _ in range(num_pes)]
        addresses = [block.data_ptr() for block in self._blocks]
        self.bases = torch.tensor(addresses, dtype=torch.int64, device=device)

    def memory(self, pe: int) -> torch.Tensor:
        """Return all of a PE's heap: (layout.size,) uint8."""
        return self._blocks[pe]

    def region(self, pe: int, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Return a region of a PE's heap as a flat view of `dtype`."""
        region = self.layout.regions[name]
        return self._blocks[pe][region.offset : region.offset + region.size].view(dtype)


def _zeros(size: int, device: torch.device) -> torch.Tensor:
    """Return `size` zero bytes at an aligned address; on the host, pages come when touched."""
    try:
        if device.type == "cpu":
            block = torch.from_numpy(np.zeros(size + ALIGNMENT, dtype=np.uint8))
        else:
            block = torch.zeros(size + ALIGNMENT, dtype=torch.uint8, device=device)
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise MemoryError(
            f"a symmetric heap needs {size} bytes per PE on {device}, which there is no room for; "
            "lower max_tokens_per_rank, hidden or top_k"
        ) from error
    start = -block.data_ptr() % ALIGNMENT
    return block[start : start + size]
