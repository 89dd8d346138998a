"""Samples that all ranks take together: each PE's time by its own clock, of them the slowest."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

Step = Callable[[], Any]


@dataclass(frozen=True)
class Timed:
    """What is run at once, and timed step by step."""

    about: dict[str, Any]  # columns of the row: path, form, launches, dtype
    steps: dict[str, Step]  # by phase, in order
    floor: str = ""  # which floor it is held against: "copied", "view", "fp8", or none


def take_samples(
    timed: list[Timed], samples: int, device: torch.device
) -> list[dict[str, list[float]]]:
    """Run all in turns; return the slowest PE's times by phase, in microseconds.

    Where there are several phases, "both" is all of them. Collective.
    """
    times: list[dict[str, list[float]]] = [{} for _ in timed]
    for i in range(1 + samples):  # one to warm up
        for one, found in zip(timed, times, strict=True):
            barrier(device)
            for phase, us in _once(one, device).items():
                if i:
                    found.setdefault(phase, []).append(us)
    return [{phase: slowest(us) for phase, us in found.items()} for found in times]


def _once(one: Timed, device: torch.device) -> dict[str, float]:
    """Run the steps twice without a pause; time the second: the first's end lines the PEs up."""
    for run in one.steps.values():
        run()
    marks = [_mark(device)]
    for run in one.steps.values():
        run()
        marks.append(_mark(device))
    if device.type == "cuda":
        rest()
    us = itertools.starmap(_between_us, itertools.pairwise(marks))
    found = dict(zip(one.steps, us, strict=True))
    return {**found, "both": _between_us(marks[0], marks[-1])} if len(found) > 1 else found


def _mark(device: torch.device) -> Any:
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between_us(a: Any, b: Any) -> float:
    return (b - a) * 1e6 if isinstance(a, float) else a.elapsed_time(b) * 1e3


def barrier(device: torch.device) -> None:
    """Wait until all ranks have come here and all of their work has ended."""
    if device.type == "cuda":
        rest()
        torch.cuda.synchronize(device)
    dist.barrier()


def rest() -> None:
    """Wait for the current stream, asleep: ranks may be more than cores, and a rank that spins
    keeps another from launching.
    """
    ended = torch.cuda.Event(blocking=True)
    ended.record()
    ended.synchronize()


def summary(samples_us: list[float]) -> dict[str, float]:
    """Summarise samples.

    Example:
        >>> summary([3.0, 1.0, 2.0])["median_us"], summary([3.0, 1.0, 2.0])["samples"]
        (2.0, 3)
    """
    several = samples_us if len(samples_us) > 1 else 2 * samples_us
    cuts = statistics.quantiles(several, n=100, method="inclusive")
    values = {"median_us": cuts[49], "min_us": min(samples_us), "p95_us": cuts[94]}
    values["p99_us"] = cuts[98]
    return {name: round(us, 2) for name, us in values.items()} | {"samples": len(samples_us)}


def captured(run: Step) -> Step:
    """Capture a graph; return its replay. Collective."""
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run()
    return graph.replay


def slowest(times_us: list[float]) -> list[float]:
    """Return, sample by sample, the slowest rank's time."""
    return [max(sample) for sample in zip(*gather(times_us), strict=True)]


def first(value: Any) -> Any:
    """Return rank 0's value on every rank."""
    return gather(value)[0]


def gather(value: Any) -> list[Any]:
    """Return every rank's value."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
