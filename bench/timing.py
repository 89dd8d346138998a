"""Time launches: medians with spread, and the bounds they are held against, in one run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

TILE = 4096  # words a program copies at a time


@dataclass(frozen=True)
class Timing:
    """Repeated times of one launch, in microseconds."""

    median_us: float
    min_us: float
    p10_us: float
    p90_us: float

    @classmethod
    def of(cls, samples_us: list[float]) -> Timing:
        """Summarise samples."""
        deciles = statistics.quantiles(samples_us, n=10, method="inclusive")
        return cls(statistics.median(samples_us), min(samples_us), deciles[0], deciles[-1])


def time_launches(
    launch: Callable[[], None], device: torch.device, *, repeats: int, samples: int
) -> Timing:
    """Time a launch, per launch, over `samples` runs of `repeats` launches each.

    On a GPU the repeats are one CUDA graph, so the host's own time is not in it.
    """
    for _ in range(3):
        launch()
    if device.type == "cpu":
        run = _repeated(launch, repeats)
        return Timing.of([_seconds(run) * 1e6 / repeats for _ in range(samples)])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _repeated(launch, repeats)()
    times = []
    for _ in range(samples + 5):  # five to warm up
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / repeats)
    return Timing.of(times[5:])


def _repeated(launch: Callable[[], None], repeats: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(repeats):
            launch()

    return run


def _seconds(run: Callable[[], None]) -> float:
    began_s = time.perf_counter()
    run()
    return time.perf_counter() - began_s


@triton.jit
def _empty_kernel(ptr):
    """Do nothing: what any launch costs."""


@triton.jit
def _copy_kernel(dst_ptr, src_ptr, num_tiles, BLOCK: tl.constexpr):
    """Copy whole tiles of words, 16 bytes a thread at a time."""
    for i in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        offs = i.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        tl.store(dst_ptr + offs, tl.load(src_ptr + offs))


def empty_launch(device: torch.device) -> Callable[[], None]:
    """Return a launch of a kernel that does nothing."""
    ptr = torch.zeros(1, dtype=torch.int32, device=device)
    return lambda: _empty_kernel[(1,)](ptr)


def copy_launch(device: torch.device, num_bytes: int, programs: int) -> Callable[[], None]:
    """Return a plain Triton copy that reads and writes `num_bytes` together, to a whole tile."""
    num_tiles = triton.cdiv(num_bytes, 8 * TILE)
    src = torch.zeros(num_tiles * TILE, dtype=torch.int32, device=device)
    dst = torch.empty_like(src)
    return lambda: _copy_kernel[(programs,)](dst, src, num_tiles, BLOCK=TILE)


def device_copy_launch(device: torch.device, num_bytes: int) -> Callable[[], None]:
    """Return the device's own copy that reads and writes `num_bytes` together."""
    src = torch.zeros(num_bytes // 8, dtype=torch.int32, device=device)
    dst = torch.empty_like(src)
    return lambda: dst.copy_(src)
