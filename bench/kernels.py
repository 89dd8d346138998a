"""Every kernel of a dispatch that plans or moves, as one PE launches it, against its bound.

A `LocalWorld` runs one phase, so that all words are there and all tables filled; then each kernel
of PE 0 is launched again, many times, on the same data. Bytes are those that it must read and
write: pack distinct tokens and records, unpack records and rows, put records twice.
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
from railwave.exchange import Exchange
from railwave.exchange.dispatch import _finish, _pack, _unpack
from railwave.exchange.words import as_words
from railwave.workloads import skewed_routing


@dataclass(frozen=True)
class Sizes:
    """What is measured."""

    nodes: int
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
    device = sizes.device
    empty = _time(sizes, empty_launch(device)) if device.type == "cuda" else None
    for case in _cases(sizes):
        timing = _time(sizes, case.launch)
        result = {
            "kernel": case.name,
            "nodes": sizes.nodes,
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
        elif empty:
            result["of_empty_kernel"] = round(timing.median_us / empty.median_us, 2)
        yield result


def _time(sizes: Sizes, launch: Callable[[], None]) -> Timing:
    return time_launches(launch, sizes.device, repeats=sizes.repeats, samples=sizes.samples)


def _rate(num_bytes: int, timing: Timing) -> float:
    return round(num_bytes / timing.median_us / 1e3, 1)


def _cases(sizes: Sizes) -> list[Case]:
    topo = Topology(sizes.nodes, sizes.gpus, sizes.gpus)
    world = LocalWorld(
        topo,
        num_experts=8 * topo.num_ranks,
        top_k=sizes.top_k,
        hidden=sizes.hidden,
        max_tokens_per_rank=sizes.tokens,
        paths=("joint",),
        device=sizes.device,
    )
    routing = skewed_routing(
        *(topo.num_ranks, sizes.tokens, 8 * topo.num_ranks, sizes.top_k),
        **{"gpus_per_node": sizes.gpus, "skew": 0.0, "seed": 0},
    )
    ids = [t.to(sizes.device) for t in routing.topk_idx]
    weights = [t.to(sizes.device) for t in routing.topk_weights]
    xs = [torch.zeros(len(t), sizes.hidden, dtype=torch.bfloat16, device=sizes.device) for t in ids]
    received = world.dispatch(xs, ids, weights)
    pe = world._exchanges[0]
    pe.observer = None  # it has seen the phase's end
    # Whatever the epoch, and count advances it: all words are there, and both notify areas hold
    # what the phase's held.
    for word in ("notify", "packed", "arrived", "delivered"):
        world.heap.region(pe.pe, word, torch.int64).fill_(1 << 62)
    areas = world.heap.region(pe.pe, "messages", torch.int32).view(2, -1)
    areas[:] = areas[1].clone()
    call = check_call(world.config, xs[0], ids[0], weights[0], "joint")
    return [
        *_planning(pe, call, received[0].handle),
        *(_moving(pe, call, received[0].handle) if sizes.nodes > 1 else ()),
    ]


def _planning(pe: Exchange, call: Any, handle: Any) -> list[Case]:
    layout, S, tiles = pe.heap.layout, pe.config.shape, pe.config.tiles

    def count() -> None:
        pe.kernels.count.count(
            *(call.topk_idx, pe.expert_rank, pe.expert_pos),
            *(pe.counts, handle.record_token, pe.row_index, pe.state),
            status=call.status,
            shape=S,
            block_t=tiles.block_t,
            block_n=tiles.block_n,
            block_e=tiles.block_e,
        )

    def quota() -> None:
        pe.kernels.quota.quota(
            *(pe.heap.bases, pe.state, pe.rail_of_gpu, pe.rail_gpus, pe.eligible, pe.plan),
            me=pe.pe,
            balanced=True,
            notify_off=layout["messages"],
            word_off=layout["notify"],
            shape=S,
        )

    def match() -> None:
        pe.kernels.match.match(
            *(pe.counts, pe.plan, pe.rail_gpus, handle.proxy, handle.slot),
            me=pe.pe,
            shape=S,
            block=pe.config.tiles.match,
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


def _moving(pe: Exchange, call: Any, handle: Any) -> list[Case]:
    this, after = (*pe.config.rounds("joint"), None)[:2]
    tokens = pe.kernels.pack.Tokens(as_words(call.x), call.topk_idx, call.topk_weights)
    record_bytes, row_bytes = call.fmt.RECORD_WORDS * 4, call.fmt.META * 4
    d, s = ((pe.node + sign * this.wave) % pe.config.topo.nodes for sign in (1, -1))
    own = int(handle.num_records[d])
    out, into = int(handle.out_load[d, pe.local]), int(handle.in_load[s, pe.local])
    rows = int((handle.in_rows[s] >= 0).sum())

    def put() -> None:
        pe.put(
            *(handle.out_load, this),
            record_words=call.fmt.RECORD_WORDS,
            wait_packed=True,
            wait_grant=False,
            tell_taken=False,
        )

    programs = pe.programs(this)
    return [
        Case(
            "pack",
            lambda: _pack(pe, call, handle, tokens, this),
            own * (call.fmt.IDS * 4 + record_bytes),
            programs,
        ),
        Case("put", put, 2 * out * record_bytes, programs),
        Case(
            "unpack",
            lambda: _unpack(pe, call, handle, this, after),
            into * record_bytes + rows * row_bytes,
            programs,
        ),
        Case(
            "finish",
            lambda: _finish(pe, call, handle),
            2 * handle.num_rows * call.fmt.IDS * 4,
            programs,
        ),
    ]
