"""Draw the pictures of concepts.md from what the library itself computes.

    python docs/pictures.py [FOLDER]

Letters: N nodes, G GPUs a node, R rails.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

import railwave
from railwave.sched import SCHEDULERS, Demand, source_rail_skew, waves
from railwave.sched.selector import MIB

HERE = Path(__file__).parent
# Text stays text, and the same input gives the same bytes.
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "railwave",
    "font.family": ["DejaVu Sans", "sans-serif"],
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "hatch.linewidth": 0.6,
}
NODE_COLOURS = ("#4477aa", "#ee8866", "#44aa99", "#aa4477")  # told apart by the colour-blind
PATH_COLOURS = {"joint": "#e8ecf0", "permutation": "#4477aa", "native": "#ee8866"}
GREY, DARK = "#8895a3", "#333333"
TOPO = railwave.Topology(nodes=4, gpus_per_node=4, rails_per_node=4)
# Records of node 0, by the rail of their owner and the destination node: rail 0 has most.
COUNTS = [[0, 31, 22, 15], [0, 8, 12, 6], [0, 5, 3, 8], [0, 1, 4, 4]]


def rails() -> Figure:
    """Two nodes, who reaches whom, and one slice by the rails of its records' owners."""
    topo = railwave.Topology(nodes=2, gpus_per_node=8, rails_per_node=4)
    slice_counts = [row[1] for row in COUNTS]
    figure = Figure(figsize=(8, 3.9), layout="constrained")
    axes = figure.subplots()
    axes.axis("off")
    for node, left in ((0, 0.0), (1, 7.0)):
        axes.add_patch(Rectangle((left, -0.6), 3.4, 8.9, fill=False, edgecolor=GREY))
        axes.text(left + 1.7, 8.55, f"node {node}: {topo.gpus_per_node} GPUs, NVLink", ha="center")
        inner, outer = (left + 0.3, left + 2.5) if node == 0 else (left + 1.7, left + 0.0)
        for local, rail in enumerate(topo.rail_of_gpu):
            y = 7.6 - local
            colour = NODE_COLOURS[rail]
            axes.add_patch(Rectangle((inner, y - 0.32), 1.4, 0.64, color=colour, alpha=0.25))
            name = f"rank {topo.rank_of(node, local)}"
            axes.text(inner + 0.7, y, name, ha="center", va="center", fontsize=9)
            nic = 7.1 - 2 * rail
            edge = inner + 1.4 if node == 0 else inner
            port = outer if node == 0 else outer + 0.9
            axes.plot([edge, port], [y, nic], color=colour, linewidth=1)
        for rail in range(topo.rails_per_node):
            y = 7.1 - 2 * rail
            axes.add_patch(Rectangle((outer, y - 0.4), 0.9, 0.8, color=NODE_COLOURS[rail]))
            text = {"color": "white", "ha": "center", "va": "center", "fontsize": 9}
            axes.text(outer + 0.45, y, f"rail {rail}", **text)
    for rail, records in enumerate(slice_counts):
        y = 7.1 - 2 * rail
        axes.plot([3.4, 7.0], [y, y], color=NODE_COLOURS[rail], linewidth=1 + records / 4)
        text = f"{records} record{'s' * (records > 1)}"
        axes.text(5.2, y + 0.62, text, ha="center", fontsize=9, color=DARK)
    axes.text(
        *(5.2, -0.35, "the slice (0, 1), by its owners' rails"),
        **{"ha": "center", "fontsize": 9, "color": DARK},
    )
    axes.set_xlim(-0.1, 10.5)
    axes.set_ylim(-0.8, 9.1)
    return figure


def balance() -> Figure:
    """What each rail of node 0 carries to each node, before and after `railwave.plan`."""
    plan = railwave.plan(COUNTS, TOPO, node=0)
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    shared = figure.subplots(1, 2, sharey=True)
    titles = (
        f"by the owners' rails: {_percent(plan.rail_share_before())}",
        f"RailBalance: {_percent(plan.rail_share())}",
    )
    for axes, table, title in zip(shared, (plan.counts, plan.quota), titles, strict=True):
        bottom = np.zeros(TOPO.rails_per_node)
        for peer in range(1, TOPO.nodes):
            part = table[:, peer].numpy()
            colour, label = NODE_COLOURS[peer], f"to node {peer}"
            bars = axes.bar(range(len(part)), part, bottom=bottom, color=colour, label=label)
            labels = [str(records) if records > 2 else "" for records in part]
            axes.bar_label(bars, labels, label_type="center", color="white", fontsize=9)
            bottom += part
        axes.set_title(title, fontsize=10, loc="left")
        axes.set_xticks(range(TOPO.rails_per_node), [f"rail {r}" for r in range(len(bottom))])
    shared[0].set_ylabel("records of node 0")
    shared[0].legend(frameon=False, fontsize=9)
    moved = ", ".join(map(str, plan.relocated[1:].tolist()))
    text = f"records that change rail, by slice: {moved}\nlargest difference in a slice:"
    axes = shared[1]
    axes.text(0.02, 0.97, f"{text} {plan.spread()}", transform=axes.transAxes, va="top", fontsize=9)
    return figure


def wave_order() -> Figure:
    """Who sends to whom in each wave, beside all pairs at once."""
    figure = Figure(figsize=(8, 2.9), layout="constrained")
    alone, inorder = figure.subplots(1, 2, width_ratios=(1, TOPO.nodes - 1))
    others = [[d for d in range(TOPO.nodes) if d != s] for s in range(TOPO.nodes)]
    _windows(alone, [others], [f"all pairs at once\nfan-in {_fan_in(others)}"])
    order = [[[peer] for peer in wave] for wave in waves(TOPO.nodes)]
    names = [f"wave {k}\nfan-in {_fan_in(wave)}" for k, wave in enumerate(order, start=1)]
    _windows(inorder, order, names)
    alone.set_yticks(range(TOPO.nodes), [f"node {s} sends to" for s in range(TOPO.nodes)])
    inorder.set_yticks([])
    handles = [Patch(color=NODE_COLOURS[d], label=f"node {d}") for d in range(TOPO.nodes)]
    outside = {"loc": "outside lower center", "ncols": TOPO.nodes}
    figure.legend(handles=handles, frameon=False, fontsize=9, **outside)
    return figure


def _windows(axes: Axes, windows: list[list[list[int]]], names: list[str]) -> None:
    for column, window in enumerate(windows):
        for source, peers in enumerate(window):
            height = 0.8 / len(peers)
            for place, peer in enumerate(peers):
                y = source - 0.4 + place * height
                axes.add_patch(
                    Rectangle((column, y), 0.94, height * 0.94, color=NODE_COLOURS[peer])
                )
                middle = {"ha": "center", "va": "center", "color": "white", "fontsize": 8}
                axes.text(column + 0.47, y + height / 2, str(peer), **middle)
    axes.set_xlim(-0.05, len(windows))
    axes.set_ylim(TOPO.nodes - 0.5, -0.5)
    axes.set_xticks([column + 0.47 for column in range(len(windows))], names)
    axes.tick_params(length=0)
    axes.spines[["left", "bottom"]].set_visible(False)


def _fan_in(window: list[list[int]]) -> int:
    """Return the most senders of any receiver."""
    return max(np.bincount([peer for peers in window for peer in peers]))


def paths() -> Figure:
    """Bytes of node 0 by rail and window, as the four schedulers plan them."""
    figure = Figure(figsize=(8, 5.0), layout="constrained")
    demand = _demand()
    for axes, name in zip(figure.subplots(2, 2).flat, PATHS, strict=True):
        plan = SCHEDULERS[name](demand)
        mine = plan.source == 0
        sent = np.zeros((TOPO.rails_per_node, plan.num_windows), dtype=np.int64)
        at = (plan.source_rail[mine], plan.window[mine])
        np.add.at(sent, at, plan.transfer_bytes[mine])
        axes.imshow(sent, cmap="Blues", vmin=0, vmax=sum(COUNTS[0]), aspect="auto")
        for (rail, window), count in np.ndenumerate(sent):
            colour = "white" if count > sum(COUNTS[0]) / 2 else DARK
            axes.text(window, rail, str(count), ha="center", va="center", color=colour)
        skew = source_rail_skew(plan.sent_bytes)
        axes.set_title(f"{name}: ρg {skew:.2f}, fan-in {_fan_in_of(plan)}", fontsize=10, loc="left")
        axes.set_yticks(range(TOPO.rails_per_node), [f"rail {r}" for r in range(len(sent))])
        names = [f"wave {k + 1}" for k in range(plan.num_windows)]
        axes.set_xticks(range(plan.num_windows), names if len(names) > 1 else ["all pairs at once"])
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
    figure.supxlabel("records that node 0 puts on each rail, window by window", fontsize=10)
    return figure


PATHS = ("native", "rail", "permutation", "joint")


def _demand() -> Demand:
    """Let node s send as node 0 does, its destinations turned by s."""
    owned = np.zeros((TOPO.nodes, TOPO.gpus_per_node, TOPO.nodes), dtype=np.int64)
    for node in range(TOPO.nodes):
        owned[node] = np.roll(COUNTS, node, axis=1)
    return Demand(owned, np.swapaxes(owned, 1, 2), TOPO)


def _fan_in_of(plan: railwave.sched.Schedule) -> int:
    pairs = {
        (w, d, r, s)
        for w, d, r, s in zip(
            *(plan.window, plan.destination, plan.destination_rail, plan.source), strict=True
        )
    }
    senders: dict[tuple[int, int, int], int] = {}
    for *receiver, _ in pairs:
        senders[tuple(receiver)] = senders.get(tuple(receiver), 0) + 1
    return max(senders.values())


def selector() -> Figure:
    """The path that the paper's anchors choose, over payload and rail skew."""
    table = railwave.CostTable.load(HERE.parent / "examples" / "cost_table_paper.json")
    payloads, skews = np.geomspace(4, 56, 240), np.linspace(1, 1.3, 60)
    names = list(PATH_COLOURS)
    chosen = [
        [names.index(table.select(payload_bytes=p * MIB, rho=s, kappa=1).path) for p in payloads]
        for s in skews
    ]
    figure = Figure(figsize=(8, 3.0), layout="constrained")
    axes = figure.subplots()
    axes.set_facecolor(PATH_COLOURS["joint"])
    for number, colour in enumerate(PATH_COLOURS.values()):
        here = np.equal(chosen, number)
        axes.contourf(payloads, skews, here, levels=[0.5, 1.5], colors=[colour])
    for anchor in table.anchors:
        if anchor.kappa == 1:
            axes.plot(anchor.payload_mib, anchor.rho, "o", color=DARK, clip_on=False, zorder=3)
    axes.set_xscale("log")
    ticks = (4, 7, 14, 28, 56)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("payload of a GPU, MiB (κ = 1)")
    axes.set_ylabel("rail skew ρg")
    handles = [Patch(color=colour, label=name) for name, colour in PATH_COLOURS.items()]
    axes.legend(handles=handles, loc="upper right", fontsize=9)
    return figure


def static() -> Figure:
    """Rows that come, and rows that a static dispatch hands out, by rank."""
    most = 10
    world = _world(max_recv_rows=most)
    received = world.dispatch(*_tokens(world), static_shapes=True)
    came = [int(each.num_rows) for each in received]
    figure = Figure(figsize=(8, 2.4), layout="constrained")
    axes = figure.subplots()
    for rank, num_rows in enumerate(came):
        for row in range(len(received[rank].x)):
            look = {"color": NODE_COLOURS[0]} if row < num_rows else EMPTY
            axes.add_patch(Rectangle((row, rank - 0.35), 0.92, 0.7, **look))
        axes.text(most + 0.15, rank, f"num_rows {num_rows}", va="center", fontsize=9)
    axes.set_xlim(0, most + 2.4)
    axes.set_ylim(len(came) - 0.5, -0.5)
    axes.set_yticks(range(len(came)), [f"rank {rank}" for rank in range(len(came))])
    axes.set_xticks([])
    axes.set_title(f"received.x of a static dispatch: max_recv_rows = {most} rows on every rank")
    axes.title.set(fontsize=10, ha="left", x=0)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    handles = [Patch(color=NODE_COLOURS[0], label="came"), Patch(**EMPTY, label="undefined")]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return figure


EMPTY = {"facecolor": "white", "edgecolor": GREY, "hatch": "////"}


def by_expert() -> Figure:
    """The rows of one rank, by token and by expert with groups that start at multiples of 4."""
    world, rank = _world(), 1
    plain = world.dispatch(*_tokens(world))[rank]
    grouped = world.dispatch(*_tokens(world), expert_alignment=4)[rank]
    figure = Figure(figsize=(8, 2.3), layout="constrained")
    axes = figure.subplots()
    for row, ids in enumerate(plain.topk_idx.tolist()):
        _row(axes, row, 0, sorted(e for e in ids if e >= 0))
    for row, expert in enumerate(grouped.topk_idx.tolist()):
        _row(axes, row, 1, [expert] if expert >= 0 else [])
    offsets = grouped.expert_offsets.tolist()
    for offset in offsets:
        axes.plot([offset - 0.04] * 2, [0.55, 1.5], color=DARK, linewidth=1)
        axes.text(offset, 1.62, str(offset), ha="center", va="top", fontsize=9)
    axes.text(offsets[-1] + 0.5, 1.62, "expert_offsets", va="top", fontsize=9)
    axes.set_xlim(-0.1, len(grouped.x) + 3)
    axes.set_ylim(1.95, -0.5)
    axes.set_yticks([0, 1], ["a row a token", "expert_alignment=4"])
    axes.set_xticks([])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    handles = [Patch(color=NODE_COLOURS[e], label=f"for local expert {e}") for e in range(2)]
    handles.append(Patch(**EMPTY, label="free"))
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


def _row(axes: Axes, row: int, y: float, experts: list[int]) -> None:
    for place, expert in enumerate(experts):
        part = 0.7 / len(experts)
        colour = {"color": NODE_COLOURS[expert]}
        axes.add_patch(Rectangle((row, y - 0.35 + place * part), 0.92, part, **colour))
    if not experts:
        axes.add_patch(Rectangle((row, y - 0.35), 0.92, 0.7, **EMPTY))


def _world(**more: int) -> railwave.LocalWorld:
    topo = railwave.Topology(nodes=2, gpus_per_node=2, rails_per_node=2)
    sizes = {"num_experts": 8, "top_k": 2, "hidden": 8, "max_tokens_per_rank": 4}
    return railwave.LocalWorld(topo, **sizes, **more)


def _tokens(world: railwave.LocalWorld) -> tuple[list[torch.Tensor], ...]:
    """Return four tokens a rank, most of them for the experts 2 and 3 of rank 1."""
    choices = [[[2, 3], [2, 5], [3, 7], [0, 6]]] * 2 + [[[2, 4], [2, 3], [1, 7], [5, 6]]] * 2
    topk_idx = [torch.tensor(each) for each in choices]
    x = [torch.ones(len(idx), 8, dtype=torch.bfloat16) for idx in topk_idx]
    return x, topk_idx, [torch.full(idx.shape, 0.5) for idx in topk_idx]


def _percent(shares: torch.Tensor) -> str:
    return ", ".join(f"{100 * share:.0f}" for share in shares.tolist()) + " %"


PICTURES: dict[str, Callable[[], Figure]] = {
    "rails": rails,
    "balance": balance,
    "waves": wave_order,
    "paths": paths,
    "selector": selector,
    "static": static,
    "by-expert": by_expert,
}


def main(folder: Path, kind: str = "svg") -> None:
    """Write all pictures into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    matplotlib.rcParams.update(STYLE)
    for name, draw in PICTURES.items():
        file = folder / f"{name}.{kind}"
        if kind != "svg":
            draw().savefig(file, dpi=110)
            continue
        draw().savefig(file, metadata={"Date": None, "Creator": None})
        lines = (line.rstrip() for line in file.read_text(encoding="utf-8").splitlines())
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else HERE / "pictures", *sys.argv[2:3])
