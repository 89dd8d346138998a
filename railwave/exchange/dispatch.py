"""Dispatch: every token to the ranks of its experts.

count -> notify -> forward -> plan, pack, local -> (put, pack, unpack) a round -> deliver, finish
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import zip_longest
from typing import Any

import torch

from railwave.config import BALANCED, Round
from railwave.exchange.pe import Exchange, Stages
from railwave.exchange.words import as_words, from_words
from railwave.handle import Call, Handle, Received
from railwave.sched import Decision


def dispatch(pe: Exchange, call: Call) -> Stages:
    """Run one PE's dispatch; the generator's value is its `Received`."""
    S, layout, pe.path = pe.config.shape, pe.heap.layout, call.path
    notified = {"me": pe.pe, "notify_off": layout["messages"], "shape": S}
    notified_word = {"word_off": layout["notify"], **notified}
    pe.put_words.zero_()
    record_token = _count(pe, call)
    pe.kernels.notify.notify(
        *(pe.heap.bases, pe.state, pe.counts, pe.expert_start),
        outbox_off=layout["outbox"],
        **notified_word,
    )
    yield pe.rail_wait("notify", 0)

    tiles = pe.config.tiles
    pe.kernels.notify.forward(
        *(pe.heap.bases, pe.state),
        programs=tiles.programs,
        block_n=tiles.block_n,
        **notified_word,
    )
    yield pe.all_wait("notify", 0)

    decision = None
    if call.path == "auto":
        decision = _choose(pe, call)
        call = replace(call, path=decision.path)
    pe.path = call.path
    rounds = pe.config.rounds(call.path)
    pe.kernels.quota.quota(
        *(pe.heap.bases, pe.state, pe.rail_of_gpu, pe.rail_gpus, pe.eligible, pe.plan),
        balanced=call.path in BALANCED,
        block_i=tiles.block_i,
        warps=tiles.warps,
        **notified_word,
    )
    pe.kernels.quota.arrivals(*(pe.heap.bases, pe.state, pe.expert_start, pe.plan), **notified)
    pe.check_same_call(call.status)
    handle = _match(pe, call, record_token, decision)
    tokens = pe.kernels.pack.Tokens(as_words(call.x), call.topk_idx, call.topk_weights)
    if rounds:
        _pack(pe, call, handle, tokens, rounds[0])
    _local(pe, call, handle, tokens, tell_packed=bool(rounds))
    for this, after in zip_longest(rounds, rounds[1:]):
        granted = this.step > 1  # a notify grants the first round
        yield partial(pe.put_waits, handle.out_load, this, packed=True, grant=granted)
        pe.put(
            *(handle.out_load, this),
            record_words=call.fmt.RECORD_WORDS,
            wait_packed=True,
            wait_grant=granted,
            tell_taken=False,
        )
        if after:
            _pack(pe, call, handle, tokens, after)
        yield partial(pe.arrived_waits, handle.in_load, this)
        _unpack(pe, call, handle, this, after)
    pe.tell("delivered", handle.in_load)
    yield pe.all_wait("delivered", 1)
    return _finish(pe, call, handle)


def _count(pe: Exchange, call: Call) -> torch.Tensor:
    """Number the call's records and rows; return record_token, (N, T_max) int32."""
    S, tiles = pe.config.shape, pe.config.tiles
    record_token = pe.ints(S.N, S.T)
    pe.kernels.count.count(
        *(call.topk_idx, pe.expert_rank, pe.expert_pos),
        *(pe.counts, record_token, pe.row_index, pe.state),
        status=call.status,
        shape=S,
        block_t=tiles.block_t,
        parts=tiles.parts,
    )
    pe.epoch += 1
    return record_token


def _choose(pe: Exchange, call: Call) -> Decision:
    """Choose the path by what all ranks have said that they will send: alike on all of them.

    One dispatch is one sending window. The host waits for three numbers from the device.
    """
    layout = pe.heap.layout
    pe.kernels.describe.describe(
        *(pe.descriptors, pe.heap.bases, pe.state, pe.all_pairs, pe.rail_gpus),
        me=pe.pe,
        notify_off=layout["messages"],
        word_off=layout["notify"],
        record_bytes=call.x.shape[1] * call.x.dtype.itemsize,
        shape=pe.config.shape,
    )
    payload_bytes, rho, kappa = pe.descriptors.tolist()
    return pe.config.cost_table.select(payload_bytes=payload_bytes, rho=rho, kappa=kappa)


def _match(
    pe: Exchange, call: Call, record_token: torch.Tensor, decision: Decision | None
) -> Handle:
    """Give every record its proxy and slot; copy what the handle must keep of the plan."""
    S, plan = pe.config.shape, pe.plan
    proxy, slot = torch.empty_like(record_token), torch.empty_like(record_token)
    pe.kernels.match.match(
        *(pe.counts, plan, pe.rail_gpus, proxy, slot),
        me=pe.pe,
        shape=S,
        block=pe.config.tiles.match,
    )
    load = plan.load.clone()
    return Handle(
        path=call.path,
        num_tokens=call.x.shape[0],
        num_rows=int(plan.received[0]),
        record_token=record_token,
        num_records=pe.counts[1 : 1 + S.N].clone(),
        proxy=proxy,
        slot=slot,
        own_rows=pe.ints(S.T, call.fmt.ENTRIES),
        in_rows=pe.ints(S.N, S.PROXY_RECORDS, call.fmt.ENTRIES),
        out_load=load[: S.N],
        in_load=load[S.N :],
        quota=plan.quota[: S.N].clone(),
        rail_records=plan.rail_records[: S.N].clone(),
        exchange=pe,
        epoch=pe.epoch,
        decision=decision,
    )


def _pack(pe: Exchange, call: Call, handle: Handle, tokens: Any, this: Round) -> None:
    layout, tiles = pe.heap.layout, pe.config.tiles
    pe.kernels.pack.pack(
        *(pe.heap.bases, pe.state, pe.counts, handle.record_token, handle.proxy, handle.slot),
        *(pe.row_index, tokens),
        send_off=layout["send"] + this.buffer * call.fmt.RECORD_WORDS * 4,
        fmt=call.fmt,
        block_w=tiles.block_w(tiles.block_m),
        **pe.round_args(this),
        **{**pe.tiles(), "programs": pe.programs(this)},
    )


def _local(pe: Exchange, call: Call, handle: Handle, tokens: Any, *, tell_packed: bool) -> None:
    layout, tiles = pe.heap.layout, pe.config.tiles
    pe.kernels.pack.local(
        *(handle.own_rows, pe.heap.bases, pe.state, pe.counts, handle.record_token),
        *(pe.row_index, pe.plan.row_start, tokens),
        me=pe.pe,
        rows_off=layout["rows"],
        packed_off=layout["packed"],
        tell_packed=tell_packed,
        fmt=call.fmt,
        block_w=tiles.block_w(2 * tiles.block_m),
        # Fewer rows at a time than pack: it keeps where each goes on every GPU of the node.
        **{**pe.tiles(), "block_m": max(2, tiles.block_m // 2)},
    )


def _unpack(pe: Exchange, call: Call, handle: Handle, this: Round, after: Round | None) -> None:
    layout, tiles = pe.heap.layout, pe.config.tiles
    pe.kernels.unpack.unpack(
        *(handle.in_rows, pe.heap.bases, pe.state, handle.in_load, pe.rail_mates),
        pe.plan.row_start,
        recv_off=layout["recv"] + this.buffer * call.fmt.RECORD_WORDS * 4,
        rows_off=layout["rows"],
        arrived_off=layout["arrived"],
        grant_off=layout["grant"],
        packed_off=layout["packed"],
        next_round=(after.wave, after.first) if after else None,
        fmt=call.fmt,
        block_w=tiles.block_w(tiles.block_m),
        step=this.step,
        **pe.round_args(this),
        **{**pe.tiles(), "programs": pe.programs(this)},
    )
    pe.saw_arrival(handle.in_load, this)


def _finish(pe: Exchange, call: Call, handle: Handle) -> Received:
    layout, fmt, rows = pe.heap.layout, call.fmt, handle.num_rows
    tiles = pe.config.tiles
    words = torch.empty(rows, fmt.X_WORDS, dtype=torch.int32, device=pe.device)
    topk_idx = torch.empty(rows, fmt.K, dtype=call.topk_idx.dtype, device=pe.device)
    weights = torch.empty(rows, fmt.K, dtype=torch.float32, device=pe.device)
    pe.kernels.unpack.finish(
        *(words, topk_idx, weights, pe.heap.bases, pe.state),
        *(pe.expert_rank, pe.expert_pos, pe.expert_start),
        me=pe.pe,
        rows_off=layout["rows"],
        delivered_off=layout["delivered"],
        fmt=fmt,
        block_w=tiles.block_w(tiles.block_m),
        **pe.tiles(),
    )
    num_experts = pe.config.experts_per_rank[pe.pe]
    return Received(
        x=from_words(words, call.x.shape[1], call.x.dtype),
        topk_idx=topk_idx,
        topk_weights=weights,
        num_tokens_per_expert=pe.plan.received[1 : 1 + num_experts].clone(),
        handle=handle,
    )
