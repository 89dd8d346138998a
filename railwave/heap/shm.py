"""A symmetric heap in POSIX shared memory: one process per PE, all on one host.

Every PE makes one file of its own in /dev/shm (mode 0600, an unguessable name agreed through the
group), maps all the others', and removes its name once everybody has mapped it. From then on
nothing can be left behind, however a process ends. A kill between making and removing leaves a
file; `clean` removes it: each process holds a lock on what it has open, so a file without a lock
belongs to nobody.

Kernels order their loads and stores themselves; what the host stores (`publish`) and polls comes in
order where the processor keeps the order of stores, as x86-64 does.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import secrets
import socket
from contextlib import suppress
from typing import Any

import torch

from railwave.heap.layout import Layout
from railwave.heap.together import Gather, together

FOLDER = "/dev/shm"
_NAME = re.compile(r"railwave-(\d+)-[0-9a-f]{32}-\d+")


class ShmHeap:
    """This PE's block of shared memory, and every other PE's, mapped.

    Making one is collective: every PE calls it at the same place, and all of them raise if any
    fails. Closing is not.

    Args:
        pe: this PE's number; num_pes: W.
        layout: the regions of every PE.
        gather: exchanges one object per PE.

    Raises:
        MemoryError: there is less room in /dev/shm than the heaps need.
        RuntimeError: the PEs are not on one host, or one of them could not make or map a file.

    Attributes:
        bases: (W,) int64, this process's address of every PE's heap.
    """

    def __init__(self, pe: int, num_pes: int, layout: Layout, *, gather: Gather) -> None:
        self.layout, self.pe = layout, pe
        self._maps: list[mmap.mmap] = []
        self._blocks: list[torch.Tensor] = []
        host, free = together(gather, f"look at {FOLDER}", lambda: (_host(), free_bytes()))
        peers = gather((host, secrets.token_hex(16), free))
        _check_one_host([peer[0] for peer in peers])
        _check_room(layout.size * num_pes, min(peer[2] for peer in peers))
        prefix = f"{FOLDER}/railwave-{os.getuid()}-{peers[0][1]}"
        paths = [f"{prefix}-{peer}" for peer in range(num_pes)]
        files: list[int] = []
        try:
            make, where = lambda: files.append(_make(paths[pe], layout.size)), f"in {FOLDER}"
            together(gather, f"make shared memory {where}", make)
            together(gather, f"map shared memory {where}", lambda: self._map_all(paths, files))
        except BaseException:
            self.close()
            raise
        finally:
            for file in files:
                os.close(file)
            if files:
                with suppress(FileNotFoundError):
                    os.unlink(paths[pe])
        addresses = [block.data_ptr() for block in self._blocks]
        self.bases = torch.tensor(addresses, dtype=torch.int64, device="cpu")

    def _map_all(self, paths: list[str], files: list[int]) -> None:
        own = files[0]
        for peer, path in enumerate(paths):
            file = own
            if peer != self.pe:
                file = _open(path, self.layout.size)
                files.append(file)
            block = mmap.mmap(file, self.layout.size)
            self._maps.append(block)
            self._blocks.append(torch.frombuffer(block, dtype=torch.uint8))

    def memory(self, pe: int) -> torch.Tensor:
        """Return all of a PE's heap: (layout.size,) uint8."""
        return self._blocks[pe]

    def region(self, pe: int, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Return a region of a PE's heap as a flat view of `dtype`."""
        region = self.layout.regions[name]
        return self._blocks[pe][region.offset : region.offset + region.size].view(dtype)

    def publish(self, name: str, words: list[int]) -> None:
        """Store int64 words in this PE's slot of a region, at every PE: the host's own signal.

        The region has one slot a PE.
        """
        slot = torch.tensor(words, dtype=torch.int64, device="cpu")
        for pe in range(len(self._blocks)):
            slots = self.region(pe, name, torch.int64)
            slots[self.pe * len(words) : (self.pe + 1) * len(words)] = slot

    def close(self) -> None:
        """Unmap everything. Local: other PEs' mappings stay.

        The own memory stays as long as there is a tensor of it: a view of rows that was handed out.
        """
        self._blocks.clear()
        for pe, block in enumerate(self._maps):
            if pe != self.pe:
                with suppress(BufferError):  # a traceback still shows a view: unmapped with it
                    block.close()
        self._maps.clear()


def clean(*, remove: bool = True) -> list[str]:
    """Remove what killed processes of this user left in /dev/shm; return the paths.

    Only files that no process has open any more: a file's users hold a lock on it.

    Args:
        remove: False to look only.
    """
    removed = []
    for name in sorted(os.listdir(FOLDER)):
        match = _NAME.fullmatch(name)
        if not match or int(match[1]) != os.getuid():
            continue
        path = f"{FOLDER}/{name}"
        try:
            file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue  # removed meanwhile, or not ours
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            info = os.fstat(file)
            # A file without a link was removed meanwhile; its path may be another's by now.
            if info.st_uid == os.getuid() and info.st_nlink:
                if remove:
                    os.unlink(path)
                removed.append(path)
        except (BlockingIOError, FileNotFoundError):
            pass  # in use, or removed meanwhile
        finally:
            os.close(file)
    return removed


def _make(path: str, size: int) -> int:
    """Make a file that did not exist, with all its memory; return its descriptor, locked."""
    flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
    while True:
        file = os.open(path, flags, 0o600)
        fcntl.flock(file, fcntl.LOCK_SH)
        if os.fstat(file).st_nlink:
            break
        os.close(file)  # `clean` came between making and locking it
    try:
        os.posix_fallocate(file, 0, size)  # ENOSPC now rather than SIGBUS later
    except OSError:
        os.unlink(path)
        os.close(file)
        raise
    return file


def _open(path: str, size: int) -> int:
    """Open a peer's file; refuse one that is not what the peer made."""
    file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    info = os.fstat(file)
    if info.st_uid != os.getuid() or info.st_size != size:
        os.close(file)
        raise OSError(f"{path} belongs to user {info.st_uid} with {info.st_size} bytes")
    fcntl.flock(file, fcntl.LOCK_SH)
    return file


def free_bytes() -> int:
    stat = os.statvfs(FOLDER)
    return stat.f_bavail * stat.f_frsize


def _host() -> tuple[str, str]:
    return socket.gethostname(), _boot_id()


def _boot_id() -> str:
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def _check_one_host(hosts: list[Any]) -> None:
    if len(set(hosts)) > 1:
        names = [f"{name} (boot {boot})" for name, boot in hosts]
        raise RuntimeError(f"shared memory needs all ranks on one host, got {names}")


def _check_room(need: int, free: int) -> None:
    if need > free:
        raise MemoryError(
            f"the heaps of all ranks need {need} bytes of {FOLDER}, of which {free} are free; make "
            "it larger (docker run --shm-size=..., mount -o remount,size=... /dev/shm), or lower "
            "max_tokens_per_rank, hidden or top_k"
        )
