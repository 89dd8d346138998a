"""Ask a frozen cost table about requests that it was not made from, and measure what it chooses.

Table 5 of the paper: auto against joint, in turn, five warm-ups, the median of the first samples of
the slowest rank. Every rank of a torchrun job runs it, with the layout and the hidden size that the
table was calibrated for; rank 0 prints a JSON line a request, and a summary:

python -m bench.mps torchrun --nproc-per-node 8 -m bench.frozen --table table.json --nodes 4
torchrun --nproc-per-node 2 -m bench.frozen --table table.json --nodes 2 --device cpu
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.output import machine, print_results
from railwave import CostTable, Topology
from railwave.calibrate import Traffic, described, measure, tokens, traffic
from railwave.communicator import Communicator
from railwave.config import Config
from railwave.sched import Decision
from railwave.sched.selector import MIB

NEAR = 1.2  # within the factor of 1.25 in which an anchor is used again
BEYOND = 1.5  # outside it, of the smallest and the largest payload
SAME = 1.05  # payloads of the table that differ only by the rounding of tokens
# How much of the traffic is that of the corner with one rail and one receiver, else even: 1/64 is
# still within 0.02 of the features of an even anchor.
BETWEEN = (1 / 64, 1 / 2)


def main(argv: list[str] | None = None) -> None:
    """Run as one rank of torchrun."""
    parser = argparse.ArgumentParser(prog="python -m bench.frozen", description=__doc__)
    parser.add_argument("--table", required=True, help="as railwave calibrate writes it")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--samples", type=int, default=10, help="of each, after five warm-ups")
    parser.add_argument("--device", help="cpu, or the GPU of each rank (default: if there is one)")
    parser.add_argument("--deadline", type=float, default=120.0, help="seconds for other ranks")
    parser.add_argument("--out", type=Path, default=None, help="append to this file as well")
    options = parser.parse_args(argv)
    if options.device is None and torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    table = CostTable.load(options.table)
    dist.init_process_group("gloo")
    try:
        gpus = dist.get_world_size() // options.nodes
        topo = Topology(options.nodes, gpus, table.scales.rails)
        with Communicator(
            topo,
            cost_table=table,
            device=options.device,
            deadline_s=options.deadline,
            **sizes(table, topo),
        ) as rw:
            results = frozen(rw, table, options.samples)
            if rw.rank == 0:
                print_results(results, machine(rw.config.device), options.out)
            else:
                list(results)
    finally:
        dist.destroy_process_group()


def payloads(table: CostTable) -> list[float]:
    """Return payloads in MiB, near those of the table, half-way between them, and beyond.

    Example:
        >>> from railwave.sched import Anchor, Scales
        >>> anchors = (Anchor(6, 1, 1, "native"), Anchor(12, 1, 1, "rail"))
        >>> payloads(CostTable({}, Scales(rails=2), anchors))
        [4.0, 5.0, 7.2, 9.0, 10.0, 14.4, 18.0]
    """
    known: list[float] = []
    for one in sorted(at.payload_mib for at in (*table.anchors, *table.points)):
        if not known or one > SAME * known[-1]:
            known.append(one)
    if not known:
        raise ValueError("--table must hold an anchor or a point, got neither")
    near = [one * factor for one in known for factor in (1 / NEAR, NEAR)]
    half_way = [(a + b) / 2 for a, b in pairwise(known)]
    found = [known[0] / BEYOND, *near, *half_way, known[-1] * BEYOND]
    return sorted({round(one, 9) for one in found})


def sizes(table: CostTable, topo: Topology) -> dict[str, Any]:
    """Return what a `Communicator` declares for these requests, as calibrate for its points.

    Staging takes whole slices; a table that was calibrated for several rounds a wave is refused.
    """
    hidden = int(table.fingerprint["hidden"])
    most = int(max(payloads(table)) * MIB / (2 * hidden) * topo.gpus_per_node) + 1
    declared = {"num_experts": topo.num_ranks, "top_k": 1, "hidden": hidden}
    staging = max(1, topo.max_proxy_records(most))
    return {**declared, "max_tokens_per_rank": most, "staging_records": staging}


def requests(config: Config, table: CostTable) -> Iterator[Traffic]:
    """Yield traffic that the table has no point or anchor of: corners, and between them."""
    seen = {(at.payload_mib, at.rho, at.kappa) for at in (*table.anchors, *table.points)}
    for payload_mib in payloads(table):
        corners = [
            traffic(config, payload_mib, one_rail=one_rail, one_receiver=one_receiver)
            for one_rail in (False, True)
            for one_receiver in (False, True)
        ]
        even, uneven = corners[0].records, corners[-1].records
        between = [
            described(config, even + ((uneven - even) * share).round().long()) for share in BETWEEN
        ]
        for request in (*corners, *between):
            if request.place not in seen and request.payload_mib > 0:
                seen.add(request.place)
                yield request


def frozen(rw: Communicator, table: CostTable, samples: int) -> Iterator[dict[str, Any]]:
    """Measure every request; yield a result each, and the summary. Collective."""
    results = []
    for request in requests(rw.config, table):
        decision = table.select(
            payload_bytes=request.payload_mib * MIB, rho=request.rho, kappa=request.kappa
        )
        _check_auto(rw, request, decision)
        times = measure(rw, request, samples, paths=("joint", "auto"))
        joint_us, chosen_us = (statistics.median(times[path]) for path in ("joint", "auto"))
        results.append(
            {
                "result": "frozen request",
                "payload_mib": request.payload_mib,
                "rho": request.rho,
                "kappa": request.kappa,
                "path": decision.path,
                "anchor": decision.anchor,
                "reason": decision.reason,
                "joint_us": joint_us,
                "chosen_us": chosen_us,
                "ratio": joint_us / chosen_us,
            }
        )
        yield results[-1]
    yield summary(results)


def _check_auto(rw: Communicator, request: Traffic, decision: Decision) -> None:
    """Check that a real dispatch decides as the table does for the request's own numbers."""
    call = tokens(rw, request)
    rw._gather(None)  # all have loaded what `tokens` uses: see bench.mps
    received = rw.dispatch(*call, path="auto")
    rw.combine(received.x, received.handle)
    if rw.config.device.type == "cuda":
        torch.cuda.synchronize(rw.config.device)
    paths = rw._gather(received.handle.path)
    if set(paths) != {decision.path}:
        raise RuntimeError(f"auto took {paths} where the table says {decision} for {request.name}")


def summary(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Say how often the table left joint, how often that helped, and joint over chosen.

    Where the path is joint itself, the ratio is what auto costs and what varies between runs.

    Example:
        >>> two = [{"path": "joint", "ratio": 1.0}, {"path": "native", "ratio": 1.21}]
        >>> found = summary(two)
        >>> found["requests"], found["switches"], found["helped"], found["ratio_all"]["mean"]
        (2, 1, 1, 1.1)
    """
    switched = [result["ratio"] for result in results if result["path"] != "joint"]
    return {
        "result": "frozen summary",
        "requests": len(results),
        "switches": len(switched),
        "helped": sum(ratio > 1 for ratio in switched),
        "ratio_switches": _spread(switched),
        "ratio_all": _spread([result["ratio"] for result in results]),
    }


def _spread(ratios: Sequence[float]) -> dict[str, float] | None:
    """Return the geometric mean, the least and the most; None of nothing."""
    if not ratios:
        return None
    mean = math.prod(ratios) ** (1 / len(ratios))
    return {"mean": round(mean, 6), "min": min(ratios), "max": max(ratios)}


if __name__ == "__main__":
    main()
