"""Memory for kernel tests: every PE's heap twice, one for the kernel, one for its reference.

Letters: N nodes, G GPUs a node, R rails, W = N * G ranks, E experts, T tokens.
"""

import mmap
import os
from dataclasses import replace
from functools import cached_property

import pytest
import torch
from hypothesis import strategies as st

from railwave import Topology
from railwave.config import INTERPRETED, Config
from railwave.heap import LocalHeap
from railwave.kernels import load

DEVICE = torch.device(os.environ.get("RAILWAVE_TEST_DEVICE", "cpu"))  # make test-gpu: cuda
ON_GPU = DEVICE.type == "cuda"
# Compiled, a tile has two rows at least (see Tiles.clipped).
LEAST = 2 if ON_GPU else 1
KERNELS = load(interpret=not ON_GPU)
WIRE = KERNELS.wire
FAR = 2**33  # bytes: offsets that no int32 holds, in bytes or in words
GUARD = 0xA5
# Drawn first in an example, so that Hypothesis can repeat what torch draws in the rest of it.
seeds = st.integers(0, 2**16).map(torch.manual_seed)
PATTERN = -0x5A5A5A5B  # four GUARD bytes as an int32


class Memory:
    """The heaps of a cluster's PEs: `want`, written by the test and the reference, and `got`.

    Words start at 0, everything else is full of GUARD. With `shift`, every offset is that much
    larger and every base that much smaller, as if each region lay that far into its heap.

    Args:
        config: sizes and layout; see `make_config`.
        shift: bytes.
    """

    def __init__(self, config, *, shift=0):
        self.config, self.shift, self.layout = config, shift, config.layout
        W = config.topo.num_ranks
        self.got, self.want = (LocalHeap(W, self.layout, device=DEVICE) for _ in range(2))
        self.bases = self.got.bases - shift
        self._states = []
        for pe in range(W):
            self.want.memory(pe).fill_(GUARD)
            for word in WIRE.WORDS[: WIRE.CALL.value]:
                self.words(pe, word).zero_()

    def off(self, name):
        """Return the byte offset of a region, as kernels are given it."""
        return self.layout[name] + self.shift

    def words(self, pe, name):
        """Return the words of a PE, (n,) int64, of `want`."""
        return self.want.region(pe, name, torch.int64)

    def view(self, pe, name, *shape, dtype=torch.int32, start=0):
        """Return a region of a PE, of `want`, from byte `start` on, in a shape."""
        size = torch.Size(shape).numel()
        return self.want.region(pe, name, dtype)[start // dtype.itemsize :][:size].view(shape)

    def state(self):
        """Return a new PE's state, whose waits must all end well."""
        self._states.append(make_state())
        return self._states[-1]

    def start(self):
        """Copy `want` to `got`: what follows is the kernel's and the reference's own work."""
        for pe in range(self.config.topo.num_ranks):
            self.got.memory(pe).copy_(self.want.memory(pe))

    def check(self):
        """Check that the kernel left what the reference left, in every byte of every PE."""
        assert [failure(state) for state in self._states] == [None] * len(self._states)
        for pe in range(self.config.topo.num_ranks):
            differ = (self.got.memory(pe) != self.want.memory(pe)).nonzero().flatten().tolist()
            assert not differ, (pe, self._region_of(differ[0]), len(differ))

    def _region_of(self, byte):
        for name, region in self.layout.regions.items():
            if region.offset <= byte < region.offset + region.size:
                return name, byte - region.offset
        return "a gap", byte


class Tables:
    """The constant tables that kernels take, int32."""

    def __init__(self, config):
        topo, order = config.topo, config.expert_order
        rails = topo.gpus_of_rail
        self.expert_rank = torch.tensor(config.expert_to_rank, dtype=torch.int32)
        self.expert_pos = torch.empty(config.num_experts, dtype=torch.int32)
        self.expert_pos[order] = torch.arange(config.num_experts, dtype=torch.int32)
        ends = torch.tensor(config.experts_per_rank).cumsum(0)
        self.expert_start = torch.cat([torch.zeros(1, dtype=torch.int64), ends]).int()
        self.rail_of_gpu = torch.tensor(topo.rail_of_gpu, dtype=torch.int32)
        self.rail_gpus = torch.full((len(rails), topo.max_gpus_per_rail), -1, dtype=torch.int32)
        for rail, gpus in enumerate(rails):
            self.rail_gpus[rail, : len(gpus)] = torch.tensor(gpus)
        self._topo = topo

    def rail_mates(self, me):
        """Return the row of `rail_gpus` of a PE's own rail."""
        return self.rail_gpus[self.rail_of_gpu[me % self._topo.gpus_per_node]].contiguous()

    def eligible(self, node):
        """Return (N, R) int32."""
        return self._topo.eligible_rails[node].int().to(DEVICE).contiguous()


class KernelConfig(Config):
    """A config that holds its tables."""

    @cached_property
    def tables(self):
        return Tables(self)


def make_config(nodes, gpus, rails, *, rail_of_gpu=None, eligible=None, tiles=None, **sizes):
    """Make a small config; `tiles` replaces fields of INTERPRETED."""
    topo = Topology(nodes, gpus, rails, rail_of_gpu=rail_of_gpu, eligible_rails=eligible)
    declared = dict(num_experts=2 * topo.num_ranks, top_k=3, hidden=5, max_tokens_per_rank=4)
    declared |= {"dtype": torch.int32, **sizes}
    return KernelConfig(topo=topo, tiles=replace(INTERPRETED, **tiles or {}), **declared)


def make_state(*, epoch=3, notifies=3, deadline_ms=50, failed=0):
    """Make a PE's state in the middle of its life."""
    state = torch.zeros(WIRE.STATE_WORDS, dtype=torch.int64)
    state[WIRE.EPOCH.value] = epoch
    state[WIRE.NOTIFIES.value] = notifies
    state[WIRE.DEADLINE_NS.value] = deadline_ms * 1_000_000
    state[WIRE.FAILED.value] = failed
    return state


def mark(config, step, *, epoch=3):
    """Return the value of a word for `step` of the running phase."""
    return epoch * config.shape.MAX_STEPS + step


def failure(state):
    """Return the error record (word, PE, seen, expected), or None."""
    if not state[WIRE.FAILED.value]:
        return None
    word, pe, seen, expected = state[WIRE.FAILED_WORD.value : WIRE.FAILED_EPOCH.value].tolist()
    return WIRE.WORDS[word], pe, seen, expected


def pattern(*shape, dtype=torch.int32):
    """Return a tensor that is full of GUARD bytes."""
    size = torch.Size(shape).numel() * dtype.itemsize
    return torch.full((size,), GUARD, dtype=torch.uint8).view(dtype).view(shape)


def same_bytes(a, b):
    """Tell whether two tensors agree in dtype, shape and every byte."""
    views = [t.contiguous().view(torch.uint8) for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*views)


def sparse(*shape, dtype=torch.int32):
    """Return zeros of which only the pages that are written take memory, however many there are."""
    if ON_GPU:
        pytest.skip("needs memory that is there only where it is touched")
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    try:
        memory = mmap.mmap(-1, torch.Size(shape).numel() * dtype.itemsize, flags=flags)
    except OSError as error:
        pytest.skip(f"no address space for a sparse tensor of shape {shape}: {error}")
    return torch.frombuffer(memory, dtype=dtype).view(shape)
