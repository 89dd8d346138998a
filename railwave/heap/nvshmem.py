"""A symmetric heap of NVSHMEM: one process per PE, on GPUs of one or many hosts.

NVSHMEM is started once a process, for the ranks of the first communicator, and never ended: its end
is collective, and a process may end at any time. For the same reason a heap's memory is not freed
but kept for the next heap of the process.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from railwave.heap.layout import ALIGNMENT, Layout
from railwave.heap.together import Gather, together
from railwave.kernels import initialise_modules

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
        MemoryError: there is no room in the symmetric heap or on the GPU; on all PEs.
        RuntimeError: nvshmem4py or NVSHMEM is not installed or does not start, a PE of the own node
            is not mapped, or NVSHMEM runs with other PEs; on all PEs.

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
            try:
                mapped = [map_all or peer in near for peer in range(num_pes)]
                self._map(mapped, gather)
                _check_near(gather([peer for peer in near if not self._addresses[peer]]))
            except BaseException:
                self.close()
                raise
        #: whether some PEs, of this one or of another, are reached by NVSHMEM's calls alone
        self.remote = any(gather(0 in self._addresses))

    def _map(self, mapped: list[bool], gather: Gather) -> None:
        """Find the PEs' addresses; zero the own memory before anybody writes there."""
        from nvshmem import bindings

        address, _ = _runtime.blocks[self._block]

        def find() -> None:
            self._addresses = [
                bindings.ptr(address, peer) if wanted else 0 for peer, wanted in enumerate(mapped)
            ]
            self._own = torch.as_tensor(_Pointer(address, self.layout.size), device=self.device)
            # A copy would be silent; and kernels move 16 bytes at a time.
            assert self._own.data_ptr() == address and address % ALIGNMENT == 0, address
            self.bases = torch.tensor(self._addresses, dtype=torch.int64, device=self.device)
            self._side = torch.cuda.Stream(self.device)
            self._own.zero_()
            torch.cuda.synchronize(self.device)

        together(gather, "map symmetric GPU memory", find)

    def memory(self, pe: int) -> torch.Tensor:
        """Return all of the own heap: (layout.size,) uint8."""
        assert pe == self.pe, "the host sees its own heap alone"
        return self._own

    def region(self, pe: int, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Return a region of the own heap as a flat view of `dtype`."""
        region = self.layout.regions[name]
        return self.memory(pe)[region.offset : region.offset + region.size].view(dtype)

    def publish(self, name: str, words: list[int]) -> None:
        """Store int64 words in this PE's slot of a region, at every PE: the host's own signal.

        On a stream of its own, since a kernel of the current one may be waiting.
        """
        from nvshmem import bindings

        with torch.cuda.stream(self._side):
            slot = self.region(self.pe, name, torch.int64)[self.pe * len(words) :][: len(words)]
            slot.copy_(torch.tensor(words, dtype=torch.int64, device="cpu"))
            for peer in range(len(self._addresses)):
                if peer != self.pe:
                    bindings.putmem_on_stream(
                        *(slot.data_ptr(), slot.data_ptr(), slot.nbytes, peer),
                        self._side.cuda_stream,
                    )
            bindings.quiet_on_stream(self._side.cuda_stream)
        self._side.synchronize()

    def close(self) -> None:
        """Let the next heap of this process have the memory. Local."""
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


def _check_near(missing: list[list[int]]) -> None:
    if any(missing):
        raise RuntimeError(
            "the GPUs of a node must reach one another's memory (NVLink, or peer access), but by "
            f"rank these are not reached: {dict(enumerate(missing))}; see nvidia-smi topo -m, or "
            "make nodes of the GPUs that do"
        )


def _start(pe: int, num_pes: int, size: int, gather: Gather, device: torch.device) -> None:
    """Start NVSHMEM for these PEs, or check that it runs for them. Collective."""
    unique_id = together(gather, "load NVSHMEM", lambda: _unique_id(first=pe == 0))
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
    data = unique_id._data.view("int8")
    data[...] = np.frombuffer(gather(data.tobytes())[0], dtype=np.int8).reshape(data.shape)

    def start() -> None:
        import nvshmem.core as nvshmem
        from cuda.core import Device

        gpu = Device(device.index)
        gpu.set_current()
        nvshmem.init(device=gpu, uid=unique_id, rank=pe, nranks=num_pes, initializer_method="uid")
        _runtime.pes = pes
        initialise_modules()

    together(gather, "start NVSHMEM", start)


def _unique_id(*, first: bool) -> Any:
    """Return a new unique id at the first PE, room for it at the others."""
    try:
        import cuda.core  # noqa: F401
        import nvshmem.core as nvshmem
    except ImportError as error:
        raise ImportError(
            f"GPUs need nvshmem4py and cuda-python: pip install 'railwave[nvshmem]' ({error})"
        ) from error
    return nvshmem.get_unique_id(empty=not first)


def _take_block(size: int, gather: Gather) -> int:
    """Return the number of a block of at least `size` bytes, the same on every PE. Collective."""
    from nvshmem import bindings

    free = {n for n in _runtime.free if _runtime.blocks[n][1] >= size}
    everywhere = set.intersection(*gather(free))
    if everywhere:
        # A kernel of an interrupted phase may still write there, here or at a peer.
        torch.cuda.synchronize()
        gather(None)
        number = min(everywhere, key=lambda n: (_runtime.blocks[n][1], n))
        _runtime.free.remove(number)
        return number
    try:
        address, error = bindings.malloc(size), ""
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
