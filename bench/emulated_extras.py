"""What else is run through emulated NICs: shares, packing, memory, and the selector.

- shares (Figure 8): what each NIC position sends and receives, from the handles' own counts.
- packing (Table 6): joint as one call, a round packed beside the put before it, and in turn.
- workspace (Table 7): bytes a GPU, by arithmetic.
- selector (Table 5): a cost table calibrated through these NICs, then requests that it lacks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import asdict, replace
from typing import Any

import torch

import railwave
from bench import frozen
from bench.emulated_cases import PATHS, Case, Cluster, Plan, plans, spread_layers
from bench.emulated_rank import Rank, Sizes
from bench.sampling import summary
from railwave.calibrate import calibrate
from railwave.cost_table import fingerprint
from railwave.memory import eplb_bytes, paper_workspace_bytes, workspace_bytes
from railwave.sched import Scales
from railwave.workloads import FIGURE_8_SHARES, apportion, replay, standin_loads

FAMILIES = ("shares", "packing", "workspace", "selector")
# Table 6: MiB a GPU, and prepacked, sequential and pipelined milliseconds.
PAPER_PACKING_MS = {
    10.5: (3.200, 3.427, 3.301),
    17.5: (4.747, 5.127, 4.955),
    21: (5.503, 5.951, 5.760),
    28: (7.118, 7.692, 7.447),
    35: (8.642, 9.372, 9.098),
    42: (10.210, 11.074, 10.756),
}
PAPER_TOKENS, PAPER_HIDDEN = 50_176, 7168  # A.5
SELECTOR_MIB = (7, 14, 28)  # around the paper's anchors, at its scale
SELECTOR_SAMPLES = 10
PAPER_MIB, PAPER_RECORDS = 56, 32_768


def cases(clusters: dict[str, Cluster], tokens: int, samples: int) -> list[Case]:
    """List the cases; `tokens` that a node sends are 56 MiB a GPU at the paper's scale."""
    loads, made = standin_loads(seed=0, records=tokens), []
    for layout, on in clusters.items():
        pattern = "moderate" if on.topo.nodes == 4 else "ring"
        for layer in spread_layers(loads, on.topo.gpus_per_node):
            about = {"family": "shares", "layout": layout, "pattern": pattern, "layer": layer}
            made.append(Case(about, replay(pattern, loads[layer], on.topo, record_bytes=1), 1))
    on = clusters["h800"]
    deep = spread_layers(loads, on.topo.gpus_per_node)
    row = loads[deep[len(deep) // 2]]
    for mib, (_, sequential, pipelined) in PAPER_PACKING_MS.items():
        counts = apportion(int(tokens * mib / PAPER_MIB), row)
        about = {"family": "packing", "layout": "h800", "mib": mib}
        sent = replay("permutation", counts, on.topo, record_bytes=1)
        paper = {"pipelined": pipelined, "sequential": sequential}
        made.append(Case(about, sent, samples, paper_ms=paper))
    nothing = replay("ring", torch.zeros(on.topo.gpus_per_node, dtype=torch.int64), on.topo)
    for family in ("workspace", "selector"):
        made.append(Case({"family": family, "layout": "h800"}, nothing, 1))
    return made


def methods(case: Case, asked: Collection[str]) -> list[str]:
    """List the methods of a case's rows."""
    own = {
        "shares": [path for path in PATHS if path in asked],
        "packing": ["pipelined", "sequential"],
        "workspace": ["railwave"],
        "selector": ["auto"],
    }
    return own.get(case.about["family"], list(asked))


def needs_plans(case: Case) -> bool:
    """Say whether a case sends what its demand says."""
    return case.about["family"] not in ("workspace", "selector")


def rows(
    options: Any, rank: Rank, case: Case, empty: dict[tuple[str, int], float]
) -> Iterator[dict[str, Any]]:
    """Measure a case; yield its rows. Collective."""
    about = {"case_key": case.key, **case.about, "nic_gbs": rank.on.nic_gbs}
    about |= {"pes": rank.on.topo.num_ranks, "hidden": rank.sizes.hidden}
    about |= {"padded_tokens": rank.padded_tokens}
    family = case.about["family"]
    if family == "workspace":
        yield {**about, "method": "railwave", **workspace()}
        return
    if family == "selector":
        yield {**about, "method": "auto", **selector(options, rank)}
        return
    made = {plan.method: plan for plan in plans(case) if plan.method in PATHS}
    if family == "shares":
        for name in methods(case, options.methods):
            paper = list(FIGURE_8_SHARES) if name in ("native", "permutation") else None
            yield {**about, "method": name, **rank.shares(made[name]), "paper_transmit": paper}
        return
    for name, times in packing(rank, made["joint"], case).items():
        row = {**about, "method": name, "empty_us": empty["joint", 1], "samples": case.samples}
        yield {**row, "whole": times, "paper_ms": case.paper_ms[name]}


def packing(rank: Rank, joint: Plan, case: Case) -> dict[str, dict[str, float]]:
    """Time joint with and without packing beside a put, in turns; the same on a CPU."""
    both = [replace(joint, method=name) for name in ("pipelined", "sequential")]
    run = {"sequential": rank.sequential("joint")}
    times = rank.sample(both, case.samples, rank.on.nic_gbs, run=run)
    return {p.method: summary(of.whole_us) for p, of in zip(both, times, strict=True)}


def workspace() -> dict[str, Any]:
    """Return what the paper's configuration holds, in bytes a GPU, ours beside its formulas."""
    experts = {"num_experts": 128, "top_k": 8, "hidden": PAPER_HIDDEN}
    sizes = {**experts, "max_tokens_per_rank": PAPER_TOKENS}
    rows_bound = 2 * PAPER_TOKENS
    topo = railwave.Topology(4, 8, 8)
    held = {
        name: workspace_bytes(topo, **sizes, paths=paths, max_recv_rows=rows_bound)
        for name, paths in (("waves", ("permutation", "joint")), ("all paths", PATHS))
    }
    record = 2 * PAPER_HIDDEN + 32
    gradients = {"inference": {}, "one layer": {"gradient_bytes": 4, "gradient_layers": 1}}
    gradients["all layers"] = {"gradient_bytes": 4}
    return {
        "workspace_bytes": held,
        "max_recv_rows": rows_bound,
        "paper_workspace_bytes": paper_workspace_bytes(4, 8, PAPER_TOKENS, record),
        "eplb_bytes": {
            f"{name}, r = {r}": eplb_bytes(58, r, 3 * 7168 * 2048, **more)
            for r in (1, 2, 4)
            for name, more in gradients.items()
        },
    }


def selector_sizes(tokens: int, sizes: Sizes, on: Cluster) -> tuple[list[float], dict[str, Any]]:
    """Return payloads in MiB a GPU, and what a `Communicator` declares for points and requests.

    The node that all others send to spreads its rows evenly over its GPUs: no rank receives more
    than one may send.
    """
    full_mib = tokens * 2 * sizes.hidden / on.topo.gpus_per_node / 2**20
    payloads = [full_mib * mib / PAPER_MIB for mib in SELECTOR_MIB]
    most = int(tokens * max(SELECTOR_MIB) / PAPER_MIB * frozen.BEYOND) + 1
    declared = {"num_experts": on.topo.num_ranks, "top_k": 1, "hidden": sizes.hidden}
    declared |= {"max_tokens_per_rank": most, "max_recv_rows": most * on.topo.nodes}
    declared["staging_records"] = max(1, on.topo.max_proxy_records(most))
    return payloads, declared


def selector(options: Any, rank: Rank) -> dict[str, Any]:
    """Calibrate a table, then ask it about requests that it lacks; return every result."""
    on, samples = rank.on, options.samples or SELECTOR_SAMPLES
    payloads, declared = selector_sizes(options.tokens, rank.sizes, on)
    how = {"nic_gbs": on.nic_gbs, "device": rank.device, "deadline_s": rank.sizes.deadline_s}
    with railwave.Communicator(on.topo, **declared, **how) as rw:
        here = fingerprint(rw.config, rw.transport)
        empty = railwave.CostTable(here, Scales(rails=on.topo.rails_per_node))
        table = calibrate(rw, empty, payloads, samples=max(5, samples))
    with railwave.Communicator(on.topo, **declared, cost_table=table, **how) as rw:
        *requests, found = frozen.frozen(rw, table, samples)
    anchors = [asdict(anchor) for anchor in table.anchors]
    return {"payloads_mib": payloads, "anchors": anchors, "requests": requests, "summary": found}
