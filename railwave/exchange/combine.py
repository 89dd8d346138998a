"""Combine: the results of a token's rows back to its owner, summed.

copy in -> own, reduce -> (put, reduce, give back, take) a round -> end, final
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import zip_longest

import torch

from railwave.config import Round
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
    dtype: torch.dtype  # of the rows, of the sums on the wire, and of the result
    row_words: int  # 32-bit words from one row, or one sum, to the next


def combine(pe: Exchange, out: torch.Tensor, handle: Handle, *, status: int = 0) -> Stages:
    """Run one PE's combine; the generator's value is (T, H).

    A PE that does not see the others' arguments compares `status` with theirs before it reads any
    rows; so of a wrong call only the handle's loads need to make sense.
    """
    pe.path = handle.path
    rounds = pe.config.rounds(handle.path)
    acc = torch.zeros(handle.num_tokens, out.shape[1], dtype=torch.float32, device=pe.device)
    words = as_words(out)
    sums = _Sums(pe, handle, acc, out.dtype, padded(words.shape[1]))
    pe.put_words.zero_()
    _copy_in(sums, words)
    pe.tell("rows_in", handle.out_load, grant_waves=rounds[0].num_peers if rounds else 0)
    if pe.compare_calls:
        yield from pe.compare_status(status)
    yield pe.all_wait("rows_in", 1)

    _own(sums)
    if rounds:
        _reduce(sums, rounds[0])
    for this, after in zip_longest(rounds, rounds[1:]):
        yield partial(pe.put_waits, handle.in_load, this, packed=False, grant=True)
        pe.put(
            *(handle.in_load, this),
            record_words=sums.row_words,
            wait_packed=False,
            wait_grant=True,
            tell_taken=this.step > 1,
        )
        if after:
            _reduce(sums, after)
        yield partial(pe.arrived_waits, handle.out_load, this, taken=this.step > 1)
        _give_back(sums, this, after)
        yield pe.all_wait("returned", this.step)
        for i in range(this.num_peers):
            _take(sums, this, i)
    pe.tell("rows_read", handle.out_load)
    yield pe.all_wait("rows_read", 1)
    return _final(sums)


def _copy_in(sums: _Sums, words: torch.Tensor) -> None:
    pe = sums.pe
    pe.kernels.reduce.copy_in(
        *(pe.heap.bases, pe.state, words),
        me=pe.pe,
        rows_off=pe.heap.layout["rows"],
        row_words=sums.row_words,
        notified=pe.compare_calls,
        block_w=pe.config.tiles.block_w(pe.config.tiles.block_m),
        **pe.tiles(),
    )
    pe.epoch += 1


def _own(sums: _Sums) -> None:
    pe, handle = sums.pe, sums.handle
    pe.kernels.reduce.own(
        *(sums.acc, pe.heap.bases, pe.state, handle.num_records, handle.record_token),
        handle.own_rows,
        me=pe.pe,
        rows_off=pe.heap.layout["rows"],
        row_bytes=sums.row_words * 4,
        rows_in_off=pe.heap.layout["rows_in"],
        dtype=sums.dtype,
        block_h=pe.config.tiles.block_h,
        **pe.tiles(),
    )


def _reduce(sums: _Sums, this: Round) -> None:
    pe, handle, layout = sums.pe, sums.handle, sums.pe.heap.layout
    pe.kernels.reduce.reduce(
        *(pe.heap.bases, pe.state, handle.in_rows, handle.in_load),
        rows_off=layout["rows"],
        row_bytes=sums.row_words * 4,
        send_off=layout["send"] + this.buffer * sums.row_words * 4,
        record_words=sums.row_words,
        hidden=sums.acc.shape[1],
        dtype=sums.dtype,
        wire_dtype=sums.dtype,
        block_h=pe.config.tiles.block_h,
        **pe.round_args(this),
        **{**pe.tiles(), "programs": pe.programs(this)},
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


def _take(sums: _Sums, this: Round, peer: int) -> None:
    """Add what one peer of the round returned: in the order of the waves, one launch each."""
    pe, handle, layout = sums.pe, sums.handle, sums.pe.heap.layout
    buffer = this.buffer + peer * this.records
    pe.kernels.combine.take(
        *(sums.acc, pe.heap.bases, pe.state, handle.num_records, handle.record_token),
        *(handle.proxy, handle.slot),
        me=pe.pe,
        recv_off=layout["recv"] + buffer * sums.row_words * 4,
        returned_off=layout["returned"],
        wave=this.wave + peer,
        first=this.first,
        round_records=this.records,
        record_words=sums.row_words,
        step=this.step,
        wire_dtype=sums.dtype,
        block_h=pe.config.tiles.block_h,
        **pe.tiles(),
    )


def _final(sums: _Sums) -> torch.Tensor:
    pe, tiles = sums.pe, sums.pe.config.tiles
    y = torch.empty(sums.acc.shape, dtype=sums.dtype, device=pe.device)
    pe.kernels.combine.final(
        *(y, sums.acc, pe.heap.bases, pe.state),
        me=pe.pe,
        rows_read_off=pe.heap.layout["rows_read"],
        shape=pe.config.shape,
        programs=tiles.programs,
        block=tiles.block_m * tiles.block_h,
    )
    return y
