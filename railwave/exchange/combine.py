"""Combine: the results of a token's rows back to its owner, summed.

(gather) -> copy in -> reduce -> (put, reduce, give back, take) a round -> final

Beside a put, where that may be, the next round's sums are added up; beside the first one `own` adds
up what stays on the node. On the path granted, the one round's put is `granted`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from typing import Any

import torch

from railwave.config import Round
from railwave.exchange.granted import granted
from railwave.exchange.pe import Exchange, Stages
from railwave.exchange.words import as_words
from railwave.handle import Handle
from railwave.kernels.shape import padded


@dataclass(frozen=True)
class _Sums:
    """One PE's combine: the rows' layout and the sums so far."""

    pe: Exchange
    handle: Handle
    acc: torch.Tensor  # (T, H) float32
    dtype: torch.dtype  # of the rows and of the result
    wire: torch.dtype  # of the sums between nodes
    row_words: int  # 32-bit words from one row to the next
    sum_words: int  # 32-bit words from one sum to the next, on the wire


@dataclass(frozen=True)
class Options:
    """What else a combine of one PE may do; the others need not do it."""

    weights: torch.Tensor | None = None  # (rows,) float32, that rows are multiplied by first
    bias: tuple[torch.Tensor, ...] = ()  # up to two (T, H), any strides, added in turn at the end
    wire_dtype: torch.dtype | None = None  # between nodes, the same on all PEs; None: that of out


PLAIN = Options()


def combine(
    pe: Exchange,
    out: torch.Tensor,
    handle: Handle,
    options: Options = PLAIN,
    *,
    status: int = 0,
) -> Stages:
    """Run one PE's combine; the generator's value is (T, H).

    A PE that does not see the others' arguments compares `status` with theirs before it reads any
    rows; so of a wrong call only the handle's loads need to make sense. With static shapes nobody
    compares.
    """
    pe.path = handle.path
    rounds = pe.config.rounds(handle.path)
    acc = torch.empty(handle.num_tokens, out.shape[1], dtype=torch.float32, device=pe.device)
    words, wire = as_words(out), options.wire_dtype or out.dtype
    row_words = max(handle.row_words, padded(words.shape[1]))
    sum_words = padded(-(-out.shape[1] * wire.itemsize // 4))
    sums = _Sums(pe, handle, acc, out.dtype, wire, row_words, sum_words)
    compares = pe.compare_calls and not pe.device_decides(handle.static_shapes)
    options = apart(pe, options)
    there = handle.places is not None or options.weights is not None
    if there:
        _gather(sums, words, options.weights)
    _copy_in(sums, words, rounds, there=there, status=status if compares else None)
    if compares:
        yield from pe.hear_status()
    yield pe.all_wait("rows_in", 1)

    if not rounds or not pe.beside:
        _own(sums, tell=not rounds)
    if rounds and handle.path != "granted":
        _reduce(sums, rounds[0], wait=True)
    for this, after in zip_longest(rounds, rounds[1:]):
        if handle.path == "granted":
            yield from _granted(sums, this)
        else:
            yield from _put(sums, this, after)
        yield partial(pe.arrived_waits, handle.out_load, this, taken=this.step > 1)
        _give_back(sums, this, after)
        yield pe.all_wait("returned", this.step)
        _take(sums, this, last=after is None)
    yield pe.all_wait("rows_read", 1)
    return _final(sums, options.bias)


def _granted(sums: _Sums, this: Round) -> Stages:
    """Put all sums as receivers grant them; meanwhile add up later waves, then the own node."""
    pe, handle = sums.pe, sums.handle
    packs = pe.config.packs(this) if pe.beside else [this]
    more = packs[1:]
    _reduce(sums, packs[0], wait=True, tell=bool(more))

    def beside() -> None:
        for later in more:
            _reduce(sums, later, tell=True)
        _own(sums)

    loads = handle.in_load, handle.out_load
    words, waves = sums.sum_words, len(packs) if more else 0
    with pe.beside_put(beside if pe.beside else None):
        yield from granted(pe, *loads, record_words=words, packs=waves)


def _put(sums: _Sums, this: Round, after: Round | None) -> Stages:
    """Put a round's sums; meanwhile add up the next round's, and in the first the own node's."""
    pe, handle = sums.pe, sums.handle
    own = this.step == 1

    def beside() -> None:
        if after:
            _reduce(sums, after)
        if own:
            _own(sums)

    yield partial(pe.put_waits, handle.in_load, this, packed=False, grant=True)
    with pe.beside_put(beside if pe.beside and (after or own) else None):
        pe.put(
            *(handle.in_load, this),
            record_words=sums.sum_words,
            wait_packed=False,
            wait_grant=True,
            tell_taken=this.step > 1,
        )
    if after and not pe.beside:
        _reduce(sums, after)


def apart(pe: Exchange, options: Options) -> Options:
    """Copy what lies where rows are about to be written: views that a dispatch handed out."""
    weights, bias = options.weights, options.bias
    if weights is not None and pe.in_rows(weights):
        weights = weights.clone()
    bias = tuple(each.clone() if pe.in_rows(each) else each for each in bias)
    return replace(options, weights=weights, bias=bias)


def _gather(sums: _Sums, words: torch.Tensor, weights: torch.Tensor | None) -> None:
    """Sum the results of a token's experts here, or weigh its one, where rows are read."""
    pe, handle, tiles = sums.pe, sums.handle, sums.pe.config.tiles
    pe.kernels.group.gather(
        *(pe.heap.bases, pe.state, words.clone() if pe.in_rows(words) else words, weights),
        *(handle.places, handle.received),
        me=pe.pe,
        rows_off=pe.heap.layout["rows"],
        row_words=sums.row_words,
        most_rows=min(handle.max_rows, len(words)) if handle.places is None else handle.max_rows,
        hidden=sums.acc.shape[1],
        dtype=sums.dtype,
        programs=tiles.programs,
        block_m=tiles.block_m,
        block_h=tiles.block_h,
        warps=tiles.warps,
    )


def _tiles(pe: Exchange) -> dict[str, Any]:
    """Return the arguments that a launcher of tiles takes, as wide as what adds rows may be."""
    return {**pe.tiles(), "warps": pe.config.tiles.sum_warps}


def _copy_in(
    sums: _Sums,
    words: torch.Tensor,
    rounds: list[Round],
    *,
    there: bool,
    status: int | None,
) -> None:
    """Begin the phase; copy the results to where rows are read, unless they are there."""
    pe, handle, layout = sums.pe, sums.handle, sums.pe.heap.layout
    tiles = pe.config.tiles
    pe.put_words = handle.put_words[1]
    rows = pe.rows(pe.config.max_recv_rows, 4, torch.int32, row_words=sums.row_words)
    there |= words.data_ptr() == rows.data_ptr() and words.stride(0) == rows.stride(0)
    if not there and pe.in_rows(words):
        words = words.clone()  # another part of the view: rows would be copied over one another
    pe.kernels.reduce.copy_in(
        *(pe.heap.bases, pe.state, words, handle.received, handle.out_load, pe.rail_mates),
        *(pe.counts, pe.expert_start, pe.put_words),
        rows_off=layout["rows"],
        rows_in_off=layout["rows_in"],
        grant_off=layout["grant"],
        row_words=sums.row_words,
        most_rows=0 if there else len(words),
        grant_waves=rounds[0].num_peers if rounds and handle.path != "granted" else 0,
        status=status,
        sum_words=sums.sum_words,
        **pe.notify_args(),
        block_w=tiles.block_w(tiles.block_m),
        **_tiles(pe),
    )
    pe.advance()


def _own(sums: _Sums, *, tell: bool = False) -> None:
    pe, handle, layout = sums.pe, sums.handle, sums.pe.heap.layout
    pe.kernels.reduce.own(
        *(sums.acc, pe.heap.bases, pe.state, handle.own_rows),
        me=pe.pe,
        rows_off=layout["rows"],
        row_bytes=sums.row_words * 4,
        rows_in_off=layout["rows_in"],
        rows_read_off=layout["rows_read"],
        tell=tell,
        dtype=sums.dtype,
        block_h=pe.config.tiles.block_h,
        **_tiles(pe),
    )


def _reduce(sums: _Sums, this: Round, *, wait: bool = False, tell: bool = False) -> None:
    pe, handle, layout = sums.pe, sums.handle, sums.pe.heap.layout
    pe.kernels.reduce.reduce(
        *(pe.heap.bases, pe.state, handle.in_rows, handle.in_load),
        rows_off=layout["rows"],
        row_bytes=sums.row_words * 4,
        send_off=layout["send"] + this.buffer * sums.sum_words * 4,
        record_words=sums.sum_words,
        hidden=sums.acc.shape[1],
        dtype=sums.dtype,
        wire_dtype=sums.wire,
        block_h=pe.config.tiles.block_h,
        rows_in_off=layout["rows_in"],
        wait=wait,
        packed_off=layout["packed"],
        tell_step=this.step if tell else 0,
        **pe.round_args(this),
        **{**_tiles(pe), "programs": pe.programs(this)},
    )


def _give_back(sums: _Sums, this: Round, after: Round | None) -> None:
    pe, handle, layout = sums.pe, sums.handle, sums.pe.heap.layout
    pe.kernels.combine.give_back(
        *(pe.heap.bases, pe.state, handle.out_load, pe.rail_mates),
        arrived_off=layout["arrived"],
        grant_off=layout["grant"],
        taken_off=layout["taken"],
        returned_off=layout["returned"],
        next_round=(after.wave, after.first) if after else None,
        step=this.step,
        shape=pe.config.shape,
        **pe.round_args(this),
    )
    pe.saw_arrival(handle.out_load, this)


def _take(sums: _Sums, this: Round, *, last: bool) -> None:
    """Add what the peers of the round returned, in the order of the waves."""
    pe, handle, layout = sums.pe, sums.handle, sums.pe.heap.layout
    pe.kernels.combine.take(
        *(sums.acc, pe.heap.bases, pe.state, handle.num_records, handle.record_token),
        *(handle.proxy, handle.slot),
        recv_off=layout["recv"] + this.buffer * sums.sum_words * 4,
        returned_off=layout["returned"],
        rows_read_off=layout["rows_read"],
        tell=last,
        **pe.round_args(this),
        record_words=sums.sum_words,
        step=this.step,
        wire_dtype=sums.wire,
        block_h=pe.config.tiles.block_h,
        **_tiles(pe),
    )


def _final(sums: _Sums, bias: tuple[torch.Tensor, ...]) -> torch.Tensor:
    pe, tiles = sums.pe, sums.pe.config.tiles
    y = torch.empty(sums.acc.shape, dtype=sums.dtype, device=pe.device)
    pe.kernels.combine.final(
        *(y, sums.acc, bias, pe.heap.bases, pe.state),
        me=pe.pe,
        rows_read_off=pe.heap.layout["rows_read"],
        block_h=tiles.block_h,
        **(pe.tiles() if bias else _tiles(pe)),  # a bias takes registers
    )
    return y
