"""The paper's experiment on one host, through emulated NICs: all methods, a process a PE.

python -m bench.run emulated --out FILE --slice 1/4
python -m bench.run emulated --out FILE --trace FOLDER --families replay
python -m bench.run emulated --device cpu --nodes 4 --gpus 1 --tokens 12 --hidden 16 ...

One JSON line a case and method. Rows that are in FILE with as many samples are not measured again,
so a slice that was cut short, or reached its time limit, goes on where it stopped.
docs/evidence.md has the method.

Families: replay (Ring, Moderate and Extreme over layers of the stand-in and of a recorded trace, at
half and double rate, and on H20's layout), ultraep, figure 9, shares (Figure 8), packing (Table 6),
workspace (Table 7), selector (Table 5).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from bench import emulated_extras as extras
from bench import exchange, routed
from bench.emulated_cases import (
    DEEP_SAMPLES,
    METHODS,
    PATH_OF,
    SAMPLES,
    Case,
    Cluster,
    Plan,
    cluster,
    first_cases,
    more_cases,
    most_sent,
    plans,
)
from bench.emulated_model import described, network
from bench.emulated_rank import FAST_NIC_GBS, Rank, Sizes, Times
from bench.output import read_results
from bench.sampling import first, summary
from railwave.config import COMPILED, Config

FAMILIES = ("replay", "ultraep", "zipf", "figure 9", *extras.FAMILIES)
LAYOUTS = ("h800", "wide", "h20")
DATA_PATH_SAMPLES = 3
LEAST_S = {"selector": 200.0}  # that a family is begun with, if there is a GPU
ROOM = 256 << 20  # bytes of NVSHMEM's own, a process
GRAIN = 512 << 20  # bytes that NVSHMEM's heap grows by
BEGAN = "RAILWAVE_BENCH_BEGAN_S"


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Say what can be asked for."""
    command.add_argument("--nodes", type=int, default=4)
    command.add_argument("--gpus", type=int, default=8, help="of a node, a process each")
    command.add_argument("--nic-gbs", type=float, default=3.125, help="1e9 bytes/s, of a GPU's NIC")
    command.add_argument("--tokens", type=int, default=4096, help="that a node sends in a layer")
    command.add_argument("--hidden", type=int, default=7168)
    command.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    command.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    command.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    command.add_argument("--trace", type=Path, default=None, help="recorded trace of 16 ranks")
    command.add_argument("--samples", type=int, default=None, help="of each; default 20, 100 of 6")
    command.add_argument("--cases", type=int, default=None, help="most of a family and layout")
    command.add_argument("--slice", default="1/1", help="i/n: the i-th of n parts of the work")
    command.add_argument("--time-limit", type=float, default=480.0, help="seconds, from the start")
    command.add_argument("--device", default="cuda", help="cpu: interpreted, to try the program")


def default_out(options: argparse.Namespace) -> Path | None:
    """Return the file of a slice where none is named; none for what a CPU tries out.

    Example:
        >>> default_out(argparse.Namespace(device="cuda", slice="1/4")).name
        'emulated-1-of-4.jsonl'
    """
    name = f"emulated-{options.slice.replace('/', '-of-')}.jsonl"
    return Path(__file__).parent / "results" / name if options.device != "cpu" else None


def start(options: argparse.Namespace, arguments: list[str]) -> int:
    """Run this benchmark in a process a PE, under MPS on a GPU; return an exit code.

    Raises:
        ValueError, OSError: no such slice, or no such trace.
    """
    options.pes = options.nodes * options.gpus
    cases = _left(options, keys_in(options.out))
    if not cases:
        print(f"{options.out} has every row of slice {options.slice}", file=sys.stderr)
        return 0
    os.environ[BEGAN] = repr(time.time())
    return exchange.start(options, arguments, symmetric_bytes=symmetric_bytes(options, cases))


def symmetric_bytes(options: argparse.Namespace, cases: list[Case]) -> int:
    """Return what each process needs of NVSHMEM's heap for some cases."""
    here = {(case.about["layout"], case.about["family"] == "selector") for case in cases}
    sizes = ROOM
    for on in clusters(options).values():
        if any(layout == on.layout for layout, _ in here):
            sizes += _config(on, _sizes(options, on).declared(on)).layout.size
        if (on.layout, True) in here:
            _, declared = extras.selector_sizes(options.tokens, _sizes(options, on), on)
            sizes += _config(on, declared).layout.size
    return -(-sizes // GRAIN) * GRAIN


def clusters(options: argparse.Namespace) -> dict[str, Cluster]:
    """Return the layouts that are asked for."""
    sizes = options.nodes, options.gpus, options.nic_gbs
    return {layout: cluster(layout, *sizes) for layout in options.layouts}


def _config(on: Cluster, declared: dict[str, Any]) -> Config:
    return Config(on.topo, dtype=torch.bfloat16, nic_gbs=1.0, tiles=COMPILED, **declared)


def _sizes(options: argparse.Namespace, on: Cluster) -> Sizes:
    return Sizes(max(1, options.tokens // on.part), options.hidden)


def _asked(options: argparse.Namespace, on: Cluster) -> list[str]:
    """List the methods that are asked for and that a layout has."""
    return [method for method in options.methods if PATH_OF[method] in on.paths]


def listed(options: argparse.Namespace) -> list[Case]:
    """List every case of the layouts asked for, and all of H800's: what matters most first."""
    trace = options.trace and routed.layer_loads(routed.read_trace(options.trace))
    h800 = cluster("h800", options.nodes, options.gpus, options.nic_gbs)
    on = {**clusters(options), "h800": h800}
    paper = {layout: one for layout, one in on.items() if layout != "wide"}
    return [
        *first_cases(h800, options.tokens, options.samples),
        *extras.cases(paper, options.tokens, options.samples or SAMPLES),
        *more_cases(on, options.tokens, options.samples, trace),
    ]


def work(options: argparse.Namespace) -> list[Case]:
    """Keep the cases of the slice that is asked for, those of a layout one after another.

    Raises:
        ValueError: no such slice.
    """
    on = clusters(options)
    counts: dict[tuple[str, str], int] = {}
    kept = []
    for case in listed(options):
        family, layout = case.about["family"], case.about["layout"]
        counts[family, layout] = counts.get((family, layout), 0) + 1
        asked = family in options.families and layout in on
        if asked and counts[family, layout] <= (options.cases or counts[family, layout]):
            kept.append(case)
    kept.sort(key=lambda case: LAYOUTS.index(case.about["layout"]))
    return _sliced(kept, options.slice)


def _sliced(cases: list[Case], part: str) -> list[Case]:
    """Return the i-th of n runs of cases that take about as long: samples times payload / rate."""
    try:
        i, n = map(int, part.split("/"))
    except ValueError:
        i = n = 0
    if not 1 <= i <= n:
        raise ValueError(f"--slice must be i/n with 1 <= i <= n, got {part!r}")
    cost, ends = 0.0, []
    for case in cases:
        between = case.replay.demand.between_nodes
        cost += (case.samples + 20) * (1 + float(between.sum()) / case.rate)
        ends.append(cost)
    return [c for c, end in zip(cases, ends, strict=True) if (i - 1) < end / cost * n <= i]


def measure(options: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield rows at rank 0; run as the others do at the others. Under torchrun."""
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    until = float(os.environ.get(BEGAN, time.time())) + options.time_limit
    done = first(keys_in(options.out))
    everything, cases = listed(options), _left(options, done)
    for layout, on in clusters(options).items():
        here = [case for case in cases if case.about["layout"] == layout]
        if here and first(time.time() < until):
            # Of all cases, so that slices, whatever they hold, have the same graphs.
            sent = most_sent([case for case in everything if case.about["layout"] == layout])
            for row in _on_cluster(options, on, here, sent, device, until):
                had = done.get(row_key(row), 0)
                if dist.get_rank() == 0 and had < row.get("samples", DEEP_SAMPLES):
                    yield {"bench": "emulated", **row}
    dist.barrier()
    dist.destroy_process_group()


def keys_in(file: Path | None) -> dict[str, int]:
    """Return the most samples of each row in a file of JSON lines; none if there is no file.

    Raises:
        ValueError: a line is cut.
    """
    if file is None or not file.exists():
        return {}
    found: dict[str, int] = {}
    for row in read_results(file):
        key = row_key(row)
        found[key] = max(found.get(key, 0), row.get("samples", DEEP_SAMPLES))
    return found


def row_key(row: dict[str, Any]) -> str:
    """Name a row: its case and method."""
    return f"{row.get('case_key')} | {row.get('method')}"


def _left(options: argparse.Namespace, done: dict[str, int]) -> list[Case]:
    """List the cases of the slice that lack a row, or samples of one."""

    on = clusters(options)

    def is_done(case: Case) -> bool:
        methods = extras.methods(case, _asked(options, on[case.about["layout"]]))
        keys = [row_key({"case_key": case.key, "method": one}) for one in methods]
        return all(done.get(key, 0) >= case.samples for key in keys)

    return [case for case in work(options) if not is_done(case)]


def _on_cluster(
    options: argparse.Namespace,
    on: Cluster,
    cases: list[Case],
    sent: np.ndarray,
    device: torch.device,
    until: float,
) -> Iterator[dict[str, Any]]:
    """Make a world of one layout; yield the rows of its cases while there is time."""
    most = dict.fromkeys(on.paths, 1)
    made = {}
    for case in cases:
        wanted = plans(case) if extras.needs_plans(case) else []
        made[case.key] = [p for p in wanted if p.method in _asked(options, on)]
        for plan in made[case.key]:
            most[plan.path] = max(most[plan.path], len(plan.calls))
    rank = Rank(on, _sizes(options, on), sent, device, most)
    empty, slowest_s, left = {}, 0.0, 0
    try:
        empty = empty_calls(rank, most, min(SAMPLES, options.samples or SAMPLES))
        for number, case in enumerate(cases):
            began = time.time()
            needs_s = LEAST_S.get(case.about["family"], 0.0) if rank.on_gpu else 0.0
            if first(began + slowest_s > until):
                left += len(cases) - number
                break
            if first(began + needs_s > until):
                left += 1
                continue
            yield from _rows(options, rank, case, made[case.key], empty)
            if not needs_s:
                slowest_s = max(slowest_s, time.time() - began)
        if left and rank.rank == 0:
            what = f"{left} cases of {on.layout} are left; run this slice again"
            print(f"--time-limit {options.time_limit:g}: {what}", file=sys.stderr)
    finally:
        if sys.exc_info()[0] is None:
            rank.close()


def empty_calls(rank: Rank, most: dict[str, int], samples: int) -> dict[tuple[str, int], float]:
    """Measure calls in which nobody sends anything, by path and how many follow one another.

    Args:
        most: by path, calls of a sequence.

    Returns:
        Medians of the whole sequence, in microseconds.
    """
    nothing = np.zeros((rank.on.topo.num_ranks,) * 2, dtype=np.int64)
    asked = [(path, n) for path, calls in most.items() for n in range(1, calls + 1)]
    empties = [Plan(f"{path} {n}", path, (nothing,) * n, None) for path, n in asked]
    times = rank.sample(empties, samples, rank.on.nic_gbs)
    medians = (summary(of.whole_us)["median_us"] for of in times)
    return dict(zip(asked, medians, strict=True))


def _rows(
    options: argparse.Namespace,
    rank: Rank,
    case: Case,
    made: list[Plan],
    empty: dict[tuple[str, int], float],
) -> Iterator[dict[str, Any]]:
    """Measure a case; yield a row a method."""
    if case.about["family"] in extras.FAMILIES:
        yield from extras.rows(options, rank, case, empty)
        return
    rate = rank.on.nic_gbs * case.rate
    alone = network(case, made, rate, *rank.sizes.wire_bytes(rank.on.topo))
    same = {p.method: next(q.method for q in made if q.equals(p)) for p in made}
    distinct = [plan for plan in made if same[plan.method] == plan.method]
    times = dict(
        zip((p.method for p in distinct), rank.sample(distinct, case.samples, rate), strict=True)
    )
    few = min(case.samples, DATA_PATH_SAMPLES)
    bare = rank.sample(distinct, few, FAST_NIC_GBS, warm_ups=min(1, rank.warm_ups))
    data_path = dict(zip((p.method for p in distinct), map(_data_path, bare), strict=True))
    about = {"case_key": case.key, **case.about, **described(case)}
    about |= {"nic_gbs": rate, "bound_us": round(alone.bound_us, 2)}
    about |= {"pes": rank.on.topo.num_ranks, "hidden": rank.sizes.hidden}
    about |= {"padded_tokens": rank.padded_tokens}
    for plan in made:
        of = same[plan.method]
        row = {**about, "method": plan.method, "path": plan.path, "calls": len(plan.calls)}
        if of != plan.method:
            row["same_as"] = of  # the very same calls, measured once
        network_us = alone.by_method[plan.method]
        yield {
            **row,
            **_measured(times[of], case.samples),
            **({"most_out": times[of].most_out} if plan.path == "granted" else {}),
            "network_model_us": round(network_us, 2),
            "empty_us": empty[plan.path, 1],
            "empties_us": empty[plan.path, len(plan.calls)],
            "predicted_us": round(network_us + empty[plan.path, len(plan.calls)], 2),
            **data_path[of],
            "paper_ms": case.paper_ms.get(plan.method),
        }


def _data_path(times: Times) -> dict[str, float]:
    """Return what the GPU itself takes, through NICs that cost nothing: all, and before puts."""
    forms = {"data_path_us": times.whole_us, "late_us": times.late_us}
    return {name: summary(of)["median_us"] for name, of in forms.items()}


def _measured(times: Times, samples: int) -> dict[str, Any]:
    """Summarise both forms; P99 only of 100 samples."""
    found = {}
    forms = {"whole": times.whole_us, "network": times.network_us, "before": times.before_us}
    for form, of in forms.items():
        cuts = summary(of)
        found[form] = {name: cuts[name] for name in ("median_us", "min_us", "p95_us")}
        if samples >= 100:
            found[form]["p99_us"] = cuts["p99_us"]
    return {**found, "samples": samples}
