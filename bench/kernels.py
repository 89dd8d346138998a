"""Every kernel of a dispatch that plans or moves, as one PE launches it, against its bound.

Planning needs only the counts of all ranks, which are drawn. For what moves, a `LocalWorld` runs
one phase, so that all words are there and all tables filled; then each kernel of PE 0 is launched
again, many times, on the same data. Bytes are those that it must read and write: pack distinct
tokens and records, unpack records and rows, put records twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from bench.timing import (
    Timing,
    copy_launch,
    device_copy_launch,
    empty_launch,
    time_launches,
)
from railwave import LocalWorld, Topology
from railwave.arguments import check_call
from railwave.config import Config
from railwave.exchange import Exchange
from railwave.exchange.dispatch import Moves, finish
from railwave.handle import Call, Handle
from railwave.heap import LocalHeap
from railwave.kernels.shape import make_format
from railwave.workloads import skewed_routing
from railwave.world import DEADLINE_S

PUT_BYTES = 64 << 20


@dataclass(frozen=True)
class Sizes:
    """What is measured."""

    plan_nodes: tuple[int, ...]  # clusters to plan for
    nodes: int  # of the cluster in which records move
    gpus: int
    tokens: int
    hidden: int
    top_k: int
    device: torch.device
    repeats: int
    samples: int


@dataclass(frozen=True)
class Case:
    """A launch, and the bytes that it must move; 0 for one that is bound by its latency."""

    name: str
    launch: Callable[[], None]
    num_bytes: int
    programs: int


def measure(sizes: Sizes) -> Iterator[dict[str, Any]]:
    """Yield a result a kernel: times, bytes, rate, and its fraction of bounds of the same run."""
    for nodes in sizes.plan_nodes:
        for case in _planning(sizes, nodes):
            yield _measured(sizes, case, nodes)
    if sizes.nodes > 1:
        for case in _moving(sizes):
            yield _measured(sizes, case, sizes.nodes)
        yield _measured(sizes, _putting(sizes, PUT_BYTES), 2)


def _measured(sizes: Sizes, case: Case, nodes: int) -> dict[str, Any]:
    device = sizes.device
    timing = _time(sizes, case.launch)
    result = {
        "kernel": case.name,
        "nodes": nodes,
        "gpus": sizes.gpus,
        "tokens": sizes.tokens,
        "hidden": sizes.hidden,
        "top_k": sizes.top_k,
        "programs": case.programs,
        **{name: round(value, 2) for name, value in vars(timing).items()},
    }
    if case.num_bytes:
        result |= {"bytes": case.num_bytes, "GB_s": _rate(case.num_bytes, timing)}
    if case.num_bytes and device.type == "cuda":
        copy = _time(sizes, copy_launch(device, case.num_bytes, case.programs))
        whole = _time(sizes, device_copy_launch(device, case.num_bytes))
        result |= {
            "of_triton_copy": round(copy.median_us / timing.median_us, 3),
            "of_device_copy": round(whole.median_us / timing.median_us, 3),
        }
    elif device.type == "cuda":
        empty = _time(sizes, empty_launch(device))
        result["empty_kernel_us"] = round(empty.median_us, 2)
    return result


def _time(sizes: Sizes, launch: Callable[[], None]) -> Timing:
    return time_launches(launch, sizes.device, repeats=sizes.repeats, samples=sizes.samples)


def _rate(num_bytes: int, timing: Timing) -> float:
    return round(num_bytes / timing.median_us / 1e3, 1)


def _config(sizes: Sizes, nodes: int, **changes: Any) -> dict[str, Any]:
    topo = Topology(nodes, sizes.gpus, sizes.gpus)
    return {
        "topo": topo,
        "num_experts": 8 * topo.num_ranks,
        "top_k": sizes.top_k,
        "hidden": sizes.hidden,
        "max_tokens_per_rank": sizes.tokens,
        "paths": ("joint",),
        "device": sizes.device,
        **changes,
    }


def _planning(sizes: Sizes, nodes: int) -> list[Case]:
    """Plan for PE 0 from random counts: no time depends on them."""
    config = Config(dtype=torch.bfloat16, **_config(sizes, nodes, hidden=1))
    heap = LocalHeap(1, config.layout, device=sizes.device)  # the others' are not touched
    pe = Exchange(config, heap, 0, device=sizes.device, deadline_s=DEADLINE_S)
    _fill_words(heap)
    S, tiles = config.shape, config.tiles
    draw = {"generator": torch.Generator().manual_seed(0)}
    messages = heap.region(0, "messages", torch.int32).view(2, -1, S.NOTIFY_WORDS)
    messages[:, :, 1 : 1 + S.N] = torch.randint(S.T, (messages.shape[1], S.N), **draw)
    scores = torch.rand(sizes.tokens, S.E, **draw)
    topk_idx = scores.topk(sizes.top_k).indices.to(sizes.device)
    record_token, proxy, slot = (pe.ints(S.N, S.T) for _ in range(3))
    tables, put_words = pe.plan(balanced=True), pe.new_put_words()

    def count() -> None:
        pe.kernels.count.count(
            *(topk_idx, pe.expert_rank, pe.expert_pos),
            *(pe.counts, record_token, pe.row_index, heap.bases, pe.state, pe.expert_start),
            status=0,
            tell=False,
            **pe.notify_args(),
            shape=S,
            block_t=tiles.block_t,
            parts=tiles.parts,
        )

    def quota() -> None:
        pe.plan(balanced=True)

    def match() -> None:
        pe.kernels.match.match(
            *(pe.counts, tables, pe.rail_gpus, proxy, slot, put_words),
            me=pe.pe,
            record_words=1,
            shape=S,
            block=tiles.match,
        )

    def plan() -> None:
        count()
        quota()
        match()

    return [
        Case("count", count, 0, 1),
        Case("quota", quota, 0, 1),
        Case("match", match, 0, 1),
        Case("count+quota+match", plan, 0, 1),
    ]


def _fill_words(heap: LocalHeap) -> None:
    """Let every word of PE 0 be there, whatever the epoch: count advances it."""
    for word in ("notify", "packed", "arrived", "delivered"):
        heap.region(0, word, torch.int64).fill_(1 << 62)


def _after_dispatch(world: LocalWorld, ids: list[torch.Tensor]) -> tuple[Exchange, Call, Handle]:
    """Run a phase; return what PE 0 launches its kernels again with."""
    config = world.config
    weights = [torch.full(t.shape, 0.5, device=config.device) for t in ids]
    sizes = {"dtype": config.dtype, "device": config.device}
    xs = [torch.zeros(len(t), config.hidden, **sizes) for t in ids]
    received = world.dispatch(xs, ids, weights)
    pe = received[0].handle.exchange
    pe.observer = None  # it has seen the phase's end
    _fill_words(world.heap)
    return pe, check_call(config, xs[0], ids[0], weights[0], "joint"), received[0].handle


def _moving(sizes: Sizes) -> list[Case]:
    world = LocalWorld(**_config(sizes, sizes.nodes))
    topo = world.config.topo
    routing = skewed_routing(
        *(topo.num_ranks, sizes.tokens, world.config.num_experts, sizes.top_k),
        **{"gpus_per_node": sizes.gpus, "skew": 0.0, "seed": 0},
    )
    ids = [t.to(sizes.device) for t in routing.topk_idx]
    pe, call, handle = _after_dispatch(world, ids)
    this, after = (*pe.config.rounds("joint"), None)[:2]
    moves = Moves(pe, call, handle, pe.plan(balanced=True).row_start)
    record_bytes, row_bytes = call.fmt.RECORD_WORDS * 4, call.fmt.META * 4
    d, s = ((pe.node + sign * this.wave) % pe.config.topo.nodes for sign in (1, -1))
    own = int(handle.num_records[d])
    into = int(handle.in_load[s, pe.local])
    rows = int((handle.in_rows[s, :into] >= 0).sum())
    programs = pe.programs(this)
    return [
        Case(
            "pack",
            lambda: moves.pack(this),
            own * (call.fmt.IDS * 4 + record_bytes),
            programs,
        ),
        _put_case("put", pe, call, handle),
        Case(
            "unpack",
            lambda: moves.unpack(this, after),
            into * record_bytes + rows * row_bytes,
            programs,
        ),
        Case(
            "finish",
            lambda: finish(pe, call, handle),
            2 * handle.num_rows * call.fmt.IDS * 4,
            programs,
        ),
    ]


def _putting(sizes: Sizes, num_bytes: int) -> Case:
    """Put so many bytes to the other of two nodes of one GPU each."""
    fmt = make_format(2 * sizes.hidden, 1, 1)
    tokens = max(1, num_bytes // (4 * fmt.RECORD_WORDS))
    topo, one = Topology(2, 1, 1), {"num_experts": 2, "top_k": 1}
    changes = {"max_tokens_per_rank": tokens, "staging_records": tokens}
    world = LocalWorld(**_config(sizes, 2, topo=topo, **one, **changes))
    ids = [torch.full((tokens, 1), 1 - rank, device=sizes.device) for rank in range(2)]
    return _put_case(f"put {num_bytes >> 20} MiB", *_after_dispatch(world, ids))


def _put_case(name: str, pe: Exchange, call: Call, handle: Handle) -> Case:
    this = pe.config.rounds("joint")[0]
    records = int(handle.out_load[(pe.node + this.wave) % pe.config.topo.nodes, pe.local])

    def put() -> None:
        pe.put(
            *(handle.out_load, this),
            record_words=call.fmt.RECORD_WORDS,
            wait_packed=True,
            wait_grant=False,
            tell_taken=False,
        )

    return Case(name, put, 2 * records * call.fmt.RECORD_WORDS * 4, pe.programs(this))
