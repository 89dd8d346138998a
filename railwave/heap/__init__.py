"""Symmetric memory: every PE's heap has the same regions at the same offsets.

`Layout` says where each region lies; a heap holds the memory of the PEs that this process can see
and the table of their base addresses that kernels use. `LocalHeap` keeps all PEs in this process,
`ShmHeap` has one process per PE on one host, `NvshmemHeap` one per GPU.
"""

from railwave.heap.layout import Layout as Layout
from railwave.heap.layout import Region as Region
from railwave.heap.local import LocalHeap as LocalHeap
from railwave.heap.nvshmem import NvshmemHeap as NvshmemHeap
from railwave.heap.shm import ShmHeap as ShmHeap
from railwave.heap.together import Gather as Gather
from railwave.heap.together import together as together

__all__ = ["Gather", "Layout", "LocalHeap", "NvshmemHeap", "Region", "ShmHeap", "together"]
