"""Dispatch: every token to the ranks of its experts.

count -> forward -> quota -> (verdict) -> match, pack -> (put, pack, unpack) a round -> finish

or, for rows by expert, tally, place and spread in place of finish. The next round is packed beside
a put, where that may be; beside the last one `local` writes what stays on the node. On the path
granted, the one round's put is `granted`, with the other packs and `local` beside it, and `unpack`.

With an earlier call's handle nothing is counted or planned, and records are payload alone:

begin -> forward -> heard, pack -> (put, pack, unpack) a round -> finish
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import zip_longest
from typing import Any

import torch

from railwave.config import BALANCED, Round
from railwave.exchange.granted import granted
from railwave.exchange.pe import Exchange, Stages, Waits
from railwave.exchange.words import from_words, part_of, part_starts, payload_bytes, words_of
from railwave.handle import Call, Handle, Received
from railwave.sched import Decision


def dispatch(pe: Exchange, call: Call) -> Stages:
    """Run one PE's dispatch; the generator's value is its `Received`.

    Raises:
        CallsDiffer, ReceiveOverflowError: on every rank, before a row is stored. With static shapes
            on a GPU only the device knows.
    """
    pe.path = call.path
    call = _apart(pe, call)
    moves = yield from _repeat(pe, call) if call.again else _plan(pe, call)
    rounds = pe.config.rounds(moves.call.path)
    if rounds and moves.call.path == "granted":
        yield from _granted(moves, rounds[0])
    elif rounds:
        moves.pack(rounds[0], tell=True)
        if not pe.beside:
            moves.local()
        for this, after in zip_longest(rounds, rounds[1:]):
            yield from _round(moves, this, after)
    else:
        moves.local(tell=True)
    yield pe.all_wait("delivered", 1)
    return finish(pe, moves.call, moves.handle)


def _apart(pe: Exchange, call: Call) -> Call:
    """Copy what lies where rows are about to arrive: views that an earlier dispatch handed out."""

    def apart(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return tensor.clone() if tensor is not None and pe.in_rows(tensor) else tensor

    routing = {name: apart(getattr(call, name)) for name in ("topk_idx", "topk_weights")}
    if call.joined is not None:
        return replace(call, **routing, joined=apart(call.joined))
    return replace(call, **routing, x=apart(call.x), extras=tuple(map(apart, call.extras)))


def _round(moves: Moves, this: Round, after: Round | None) -> Stages:
    """Move a round; meanwhile pack the one after it, or write the own node's rows."""
    pe, out_load = moves.pe, moves.handle.out_load
    granted = this.step > 1  # a notify grants the first round
    beside: Callable[[], None] | None = None
    programs: int | None = None
    if pe.beside and after:
        programs, pack_programs = pe.programs_at_once()
        if pack_programs:
            beside = partial(moves.pack, after, wait_step=this.step, programs=pack_programs)
    elif pe.beside:
        beside = moves.local
    yield partial(pe.put_waits, out_load, this, packed=True, grant=granted)
    with pe.beside_put(beside):
        pe.put(
            *(out_load, this),
            record_words=moves.call.fmt.RECORD_WORDS,
            wait_packed=True,
            wait_grant=granted,
            tell_taken=False,
            programs=programs,
        )
    if after and not beside:
        moves.pack(after)
    yield partial(pe.arrived_waits, moves.handle.in_load, this)
    moves.unpack(this, after)


def _granted(moves: Moves, this: Round) -> Stages:
    """Move all records as receivers grant them.

    Meanwhile pack later waves, write the own node's rows, and take in what arrives.
    """
    pe, handle = moves.pe, moves.handle
    packs = pe.config.packs(this) if pe.beside else [this]
    moves.pack(packs[0], tell=True)
    if not pe.beside:
        moves.local()
    yield partial(pe.put_waits, handle.out_load, packs[0], packed=True, grant=False)

    def beside() -> None:
        for later in packs[1:]:
            moves.pack(later, tell=True, programs=max(1, pe.programs(later) // 2))
        moves.local()

    programs = pe.programs_beside_granted(this)
    unpack = partial(moves.unpack, this, None, programs=programs or None)
    words = moves.call.fmt.RECORD_WORDS
    loads = handle.out_load, handle.in_load
    with pe.beside_put(beside if pe.beside else None, unpack if programs else None):
        yield from granted(pe, *loads, record_words=words, packs=len(packs))
    if not programs:
        yield partial(pe.arrived_waits, handle.in_load, this)
        unpack()


def _plan(pe: Exchange, call: Call) -> Generator[Waits, None, Moves]:
    """Count, tell all ranks, and plan by what all have told."""
    record_token = _count(pe, call)
    yield pe.rail_wait("notify", 0)

    pe.forward()
    yield pe.all_wait("notify", 0)

    decision = None
    if call.path == "auto":
        decision = _choose(pe, call)
        call = replace(call, path=decision.path)
    pe.path = call.path
    plan = pe.plan(balanced=call.path in BALANCED)
    host_hears = not pe.device_decides(call.static_shapes)
    received = pe.check_plan() if host_hears else 0
    if pe.config.shape.BOUNDED:
        yield pe.verdict_wait()
        pe.hear_verdict()
        if host_hears:
            pe.check_plan()
    num_rows = pe.config.max_recv_rows if call.static_shapes else received
    return Moves(pe, call, _match(pe, call, record_token, plan, num_rows, decision), plan.row_start)


def _repeat(pe: Exchange, call: Call) -> Generator[Waits, None, Moves]:
    """Only tell all ranks that this one begins: who sends what where is as in an earlier call."""
    pe.begin(call.status)
    put_words = pe.new_put_words()
    host_hears = not pe.device_decides(call.static_shapes)
    counting = {"put_words": put_words, "record_words": call.fmt.RECORD_WORDS}
    yield from pe.hear_status(host_hears=host_hears, **counting)
    pe.put_words = put_words[0]
    form = {"view": call.view, "row_words": call.fmt.META, "anchor": None, "put_words": put_words}
    form |= {"epoch": pe.epoch, "serial": pe.serial, "stream": pe.stream(), "recorded": None}
    form |= {"epoch_tensor": pe.epoch_tensor(call.static_shapes)}
    handle = replace(call.again, **form)
    return Moves(pe, call, handle, handle.in_load)  # row_start is not read


def _count(pe: Exchange, call: Call) -> torch.Tensor:
    """Number the call's records and rows and tell all ranks; return record_token, (N, T) int32."""
    S, tiles = pe.config.shape, pe.config.tiles
    record_token = pe.empty(S.N, S.T)
    pe.kernels.count.count(
        *(call.topk_idx, pe.expert_rank, pe.expert_pos, pe.counts, record_token, pe.row_index),
        *(pe.heap.bases, pe.state, pe.expert_start),
        status=call.status,
        **pe.notify_args(),
        shape=S,
        block_t=tiles.block_t,
        parts=tiles.parts,
    )
    pe.advance()
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
        record_bytes=payload_bytes(call.parts),
        shape=pe.config.shape,
    )
    sent, rho, kappa = pe.descriptors.tolist()
    return pe.config.cost_table.select(payload_bytes=sent, rho=rho, kappa=kappa)


def _match(
    pe: Exchange,
    call: Call,
    record_token: torch.Tensor,
    plan: Any,
    num_rows: int,
    decision: Decision | None,
) -> Handle:
    """Give every record its proxy and slot; keep what a combine needs of the plan."""
    S = pe.config.shape
    proxy, slot = torch.empty_like(record_token), torch.empty_like(record_token)
    put_words = pe.new_put_words()
    pe.put_words = put_words[0]
    pe.kernels.match.match(
        *(pe.counts, plan, pe.rail_gpus, proxy, slot, put_words),
        me=pe.pe,
        record_words=call.fmt.RECORD_WORDS,
        shape=S,
        block=pe.config.tiles.match,
    )
    return Handle(
        path=call.path,
        num_tokens=call.x.shape[0],
        num_rows=num_rows,
        max_rows=num_rows,
        row_words=call.fmt.META,
        received=plan.received,
        record_token=record_token,
        num_records=plan.num_records,
        proxy=proxy,
        slot=slot,
        own_rows=pe.empty(S.T, call.fmt.ENTRIES),
        in_rows=pe.empty(S.N, S.PROXY_RECORDS, call.fmt.ENTRIES),
        out_load=plan.load[: S.N],
        in_load=plan.load[S.N :],
        quota=plan.quota[: S.N],
        rail_records=plan.rail_records[: S.N],
        put_words=put_words,
        exchange=pe,
        epoch=pe.epoch,
        static_shapes=call.static_shapes,
        view=call.view,
        serial=pe.serial,
        stream=pe.stream(),
        decision=decision,
        epoch_tensor=pe.epoch_tensor(call.static_shapes),
    )


@dataclass(frozen=True)
class Moves:
    """The kernels that move one PE's records and rows."""

    pe: Exchange
    call: Call
    handle: Handle
    row_start: torch.Tensor  # (W, G) int32, from `quota`

    @cached_property
    def _tokens(self) -> Any:
        """Hold the call's tensors as kernels take them; a copy of x where it must be."""
        call, words = self.call, words_of(self.call)
        if call.again:
            return self.pe.kernels.pack.Tokens(words, words, words.view(torch.float32))
        return self.pe.kernels.pack.Tokens(words, call.topk_idx, call.topk_weights)

    def pack(
        self, this: Round, *, tell: bool = False, wait_step: int = 0, programs: int | None = None
    ) -> None:
        """Write a round's records to their proxies; after `wait_step`, or at once."""
        pe, call, handle = self.pe, self.call, self.handle
        layout, tiles = pe.heap.layout, pe.config.tiles
        pe.kernels.pack.pack(
            *(pe.heap.bases, pe.state, handle.num_records, handle.record_token),
            *(handle.proxy, handle.slot, pe.row_index, self._tokens),
            send_off=layout["send"] + this.buffer * call.fmt.RECORD_WORDS * 4,
            packed_off=layout["packed"],
            wait_step=wait_step,
            tell_step=this.step if tell else 0,
            fmt=call.fmt,
            block_w=tiles.block_w(tiles.block_m),
            **pe.round_args(this),
            **{**pe.tiles(), "programs": programs or pe.programs(this)},
        )

    def local(self, *, tell: bool = False) -> None:
        """Write the rows of the own node; `tell`: no other come."""
        pe, call, layout, tiles = self.pe, self.call, self.pe.heap.layout, self.pe.config.tiles
        pe.kernels.pack.local(
            *(self.handle.own_rows, pe.heap.bases, pe.state, pe.row_index, self.row_start),
            self._tokens,
            me=pe.pe,
            rows_off=layout["rows"],
            delivered_off=layout["delivered"],
            tell=tell,
            fmt=call.fmt,
            block_w=tiles.block_w(2 * tiles.block_m),
            # Fewer rows at a time than pack: it keeps where each goes on every GPU of the node.
            **{**pe.tiles(), "block_m": max(2, tiles.block_m // 2)},
        )

    def unpack(self, this: Round, after: Round | None, *, programs: int | None = None) -> None:
        """Store the rows of a round's records where they belong; grant the round after."""
        pe, call, handle = self.pe, self.call, self.handle
        layout, tiles = pe.heap.layout, pe.config.tiles
        pe.kernels.unpack.unpack(
            *(handle.in_rows, pe.heap.bases, pe.state, handle.in_load, pe.rail_mates),
            self.row_start,
            recv_off=layout["recv"] + this.buffer * call.fmt.RECORD_WORDS * 4,
            rows_off=layout["rows"],
            arrived_off=layout["arrived"],
            grant_off=layout["grant"],
            packed_off=layout["packed"],
            delivered_off=layout["delivered"],
            next_round=(after.wave, after.first) if after else None,
            fmt=call.fmt,
            block_w=tiles.block_w(tiles.block_m),
            step=this.step,
            **pe.round_args(this),
            **{**pe.tiles(), "programs": programs or pe.programs(this)},
        )
        pe.saw_arrival(handle.in_load, this)


def finish(pe: Exchange, call: Call, handle: Handle) -> Received:
    """Hand out the rows that came, once the node has delivered them."""
    if call.alignment:
        return _by_expert(pe, call, handle)
    layout, fmt, rows, tiles = pe.heap.layout, call.fmt, handle.num_rows, pe.config.tiles
    words = pe.empty(0 if call.view else rows, fmt.X_WORDS)
    if call.again:
        topk_idx, weights, counts = handle.topk_idx, handle.topk_weights, handle.counts
    else:
        topk_idx = torch.empty(rows, fmt.K, dtype=call.topk_idx.dtype, device=pe.device)
        weights = torch.empty(rows, fmt.K, dtype=torch.float32, device=pe.device)
        counts = pe.empty(len(handle.received))
        handle = replace(handle, topk_idx=topk_idx, topk_weights=weights, counts=counts)
    pe.kernels.unpack.finish(
        *(words, topk_idx, weights, counts, pe.heap.bases, pe.state, handle.received),
        *(pe.expert_rank, pe.expert_pos, pe.expert_start),
        me=pe.pe,
        rows_off=layout["rows"],
        delivered_off=layout["delivered"],
        copy=not call.view,
        fmt=fmt,
        block_w=tiles.block_w(tiles.block_m),
        **pe.tiles(),
    )
    return _received(pe, call, handle, words)


def _by_expert(pe: Exchange, call: Call, handle: Handle) -> Received:
    """Hand out a row for each (token, local expert), once the node has delivered."""
    group, layout, fmt, tiles = pe.kernels.group, pe.heap.layout, call.fmt, pe.config.tiles
    where = {"me": pe.pe, "rows_off": layout["rows"], "delivered_off": layout["delivered"]}
    where |= {"alignment": call.alignment, "fmt": fmt, **pe.tiles()}
    if not call.again:
        handle = _place(pe, call, handle, where)
    words = pe.empty(handle.num_rows, fmt.X_WORDS)
    group.spread(
        *(words, pe.heap.bases, pe.state, handle.received),
        *(handle.places, handle.counts, handle.offsets),
        zero_padding=call.zero_padding,
        block_w=tiles.block_w(tiles.block_m),
        **where,
    )
    return _received(pe, call, handle, words)


def _place(pe: Exchange, call: Call, handle: Handle, where: dict[str, Any]) -> Handle:
    """Give each expert of the rows that came a row of its own."""
    K, num_experts = call.fmt.K, pe.config.experts_per_rank[pe.pe]
    most = pe.config.most_rows_by_expert(pe.pe, handle.max_rows, K, call.alignment)
    ids = torch.full((most,), -1, dtype=call.topk_idx.dtype, device=pe.device)
    weights = torch.zeros(most, dtype=torch.float32, device=pe.device)
    places, sizes = pe.empty(handle.max_rows, K), (len(handle.received),)
    counts, offsets = pe.empty(*sizes), pe.empty(*sizes)
    pe.kernels.group.place(
        *(places, ids, weights, counts, offsets, pe.heap.bases, pe.state, handle.received),
        *(pe.expert_rank, pe.expert_pos, pe.expert_start),
        **where,
    )
    host_counts = None
    if not call.static_shapes:
        most, *of_experts = counts.tolist()
        host_counts = tuple(of_experts[:num_experts])
    return replace(
        handle,
        num_rows=most,
        topk_idx=ids[:most],
        topk_weights=weights[:most],
        counts=counts,
        places=places,
        offsets=offsets,
        alignment=call.alignment,
        host_counts=host_counts,
    )


def _received(pe: Exchange, call: Call, handle: Handle, words: torch.Tensor) -> Received:
    """Return what a caller gets of the rows that are in `words`, or where they arrived."""
    x, *extras = _parts(pe, call, words, handle.num_rows)
    experts = slice(1, 1 + pe.config.experts_per_rank[pe.pe])
    assert handle.counts is not None
    return Received(
        x=x,
        topk_idx=handle.topk_idx,
        topk_weights=handle.topk_weights,
        num_rows=handle.counts[0],
        num_tokens_per_expert=handle.counts[experts],
        handle=handle,
        extras=tuple(extras),
        expert_offsets=None if handle.offsets is None else handle.offsets[: experts.stop],
        rows_per_expert=handle.host_counts,
    )


def _parts(pe: Exchange, call: Call, words: torch.Tensor, num_rows: int) -> list[torch.Tensor]:
    """Return the rows of x, then of each extra tensor."""
    if call.view:
        return [
            pe.rows(num_rows, part.shape[1], part.dtype, row_words=call.fmt.META, start=start)
            for part, start in zip(call.parts, part_starts(call.parts), strict=True)
        ]
    if not call.extras:
        return [from_words(words, call.x.shape[1], call.x.dtype)]
    return [
        part_of(words, start, part.shape[1], part.dtype)
        for part, start in zip(call.parts, part_starts(call.parts), strict=True)
    ]
