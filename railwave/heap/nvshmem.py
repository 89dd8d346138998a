"""A symmetric heap of NVSHMEM: one process per PE, on GPUs of one or many hosts.

NVSHMEM is started once a process, for the ranks of the first communicator, and never ended: its end
is collective, and a process may end at any time. For the same reason a heap's memory is not freed
but kept for the next heap of the process.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from railwave.heap.layout import ALIGNMENT, Layout
from railwave.kernels import initialise_modules

Gather = Callable[[Any], list[Any]]  # one object per PE in, all PEs' objects out: collective

_MIB = 1 << 20


@dataclass
class _Runtime:
    """NVSHMEM in this process."""

    pes: tuple[Any, ...] = ()  # who the PEs are; empty before the start
    blocks: dict[int, tuple[int, int]] = field(default_factory=dict)  # number: address, bytes
    free: set[int] = field(default_factory=set)  # numbers of blocks that no heap uses


_runtime = _Runtime()


class NvshmemHeap:
    """This PE's block of symmetric GPU memory, and those of the PEs that are mapped here.

    Making one is collective; closing is not.

    Args:
        pe, num_pes: this PE's number, and W.
        layout: the regions of every PE.
        gather: exchanges one object per PE.
        device: this PE's GPU.
        near: PEs that must be mapped (those of the own node).
        map_all: map also others if they can be; else NVSHMEM's calls reach them.

    Raises:
        ImportError: nvshmem4py or NVSHMEM's library is not installed.
        MemoryError: there is no room in the symmetric heap or on the GPU; on all PEs.
        RuntimeError: a PE of the own node is not mapped, or NVSHMEM runs with other PEs.

    Attributes:
        bases: (W,) int64 on `device`, this process's address of every PE's heap; 0 if not mapped.
    """

    def __init__(
        self,
        pe: int,
        num_pes: int,
        layout: Layout,
        *,
        gather: Gather,
        device: torch.device,
        near: Collection[int],
        map_all: bool,
    ) -> None:
        self.layout, self.pe, self.device = layout, pe, device
        with torch.cuda.device(device):
            _start(pe, num_pes, layout.size, gather, device)
            self._block = _take_block(layout.size, gather)
            address, _ = _runtime.blocks[self._block]
            from nvshmem import bindings

            addresses = [
                bindings.ptr(address, peer) if map_all or peer in near else 0
                for peer in range(num_pes)
            ]
            assert address % ALIGNMENT == 0, address  # kernels move 16 bytes at a time
            missing = gather([peer for peer in near if not addresses[peer]])
            if any(missing):
                self.close()
                raise RuntimeError(
                    "the GPUs of a node must reach one another's memory (NVLink, or peer access), "
                    f"but by rank these are not reached: {dict(enumerate(missing))}; check "
                    "nvidia-smi topo -m, or make nodes of the GPUs that do"
                )
            self._memory = [_as_tensor(a, layout.size, device) if a else None for a in addresses]
            self.bases = torch.tensor(addresses, dtype=torch.int64, device=device)
            self.memory(pe).zero_()
            torch.cuda.synchronize()
        gather(None)  # nobody writes here before it is zero

    @property
    def remote(self) -> bool:
        """Whether some PEs are reached by NVSHMEM's calls alone."""
        return any(memory is None for memory in self._memory)

    def memory(self, pe: int) -> torch.Tensor:
        """Return all of a mapped PE's heap: (layout.size,) uint8."""
        memory = self._memory[pe]
        assert memory is not None, f"PE {pe} is not mapped"
        return memory

    def region(self, pe: int, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Return a region of a mapped PE's heap as a flat view of `dtype`."""
        region = self.layout.regions[name]
        return self.memory(pe)[region.offset : region.offset + region.size].view(dtype)

    def publish(self, name: str, words: list[int]) -> None:
        """Store int64 words in this PE's slot of a region, at every PE: the host's own signal."""
        from nvshmem import bindings

        slot = torch.tensor(words, dtype=torch.int64, device=self.device)
        start, end = self.pe * len(words), (self.pe + 1) * len(words)
        own = self.region(self.pe, name, torch.int64)[start:end]
        own.copy_(slot)
        stream = torch.cuda.current_stream(self.device).cuda_stream
        for pe, memory in enumerate(self._memory):
            if memory is None:
                bindings.putmem_on_stream(own.data_ptr(), own.data_ptr(), slot.nbytes, pe, stream)
            elif pe != self.pe:
                self.region(pe, name, torch.int64)[start:end].copy_(slot)
        if self.remote:
            bindings.quiet_on_stream(stream)
        torch.cuda.synchronize(self.device)

    def close(self) -> None:
        """Let the next heap of this process have the memory. Local."""
        self._memory = []
        _runtime.free.add(self._block)


class _Pointer:
    """Memory at an address, as torch.as_tensor takes it."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (size,),
            "typestr": "|u1",
            "version": 3,
        }


def _as_tensor(address: int, size: int, device: torch.device) -> torch.Tensor:
    return torch.as_tensor(_Pointer(address, size), device=device)


def _start(pe: int, num_pes: int, size: int, gather: Gather, device: torch.device) -> None:
    """Start NVSHMEM for these PEs, or check that it runs for them. Collective."""
    try:
        import nvshmem.core as nvshmem
        from cuda.core import Device
    except ImportError as error:
        raise ImportError(
            f"GPUs need nvshmem4py and cuda-python: pip install 'railwave[nvshmem]' ({error})"
        ) from error
    pes = tuple(gather((os.uname().nodename, os.getpid())))
    if _runtime.pes:
        if _runtime.pes != pes:
            raise RuntimeError(
                "NVSHMEM runs in this process for the ranks of an earlier communicator, and can't "
                f"run for others beside them: {_runtime.pes} before, {pes} now"
            )
        return
    # Its default, 1 GiB, is all that it may ever hold.
    os.environ.setdefault("NVSHMEM_SYMMETRIC_SIZE", str(max(1024 * _MIB, size + 64 * _MIB)))
    unique_id = nvshmem.get_unique_id(empty=pe != 0)
    data = unique_id._data.view("int8")
    sent = gather(data.tobytes() if pe == 0 else b"")[0]
    data[...] = np.frombuffer(sent, dtype=np.int8).reshape(data.shape)
    gpu = Device(device.index)
    gpu.set_current()
    nvshmem.init(device=gpu, uid=unique_id, rank=pe, nranks=num_pes, initializer_method="uid")
    initialise_modules()
    _runtime.pes = pes


def _take_block(size: int, gather: Gather) -> int:
    """Return the number of a block of at least `size` bytes, the same on every PE. Collective."""
    from nvshmem import bindings

    free = {n for n in _runtime.free if _runtime.blocks[n][1] >= size}
    everywhere = set.intersection(*gather(free))
    if everywhere:
        number = min(everywhere, key=lambda n: (_runtime.blocks[n][1], n))
        _runtime.free.remove(number)
        return number
    try:
        address, error = bindings.calloc(1, size), ""
    except Exception as caught:
        address, error = 0, str(caught)
    failed = {pe: text for pe, (ok, text) in enumerate(gather((bool(address), error))) if not ok}
    if failed:
        raise MemoryError(
            f"the symmetric heap needs {size} bytes per PE, which there is no room for at ranks "
            f"{failed}; set NVSHMEM_SYMMETRIC_SIZE (now {os.environ['NVSHMEM_SYMMETRIC_SIZE']}) "
            "before the first init, or lower max_tokens_per_rank, hidden or top_k"
        )
    number = len(_runtime.blocks)
    _runtime.blocks[number] = (address, size)
    return number
