"""The stage in which receivers grant senders chunk by chunk: the put of the path granted.

Letters: N nodes, G GPUs a node, d destination node.
"""

from __future__ import annotations

import math
from functools import partial

import torch

from railwave.exchange.pe import Exchange, Late, News, Stages, Wait

WORDS = ("granted", "landed", "back", "packed")
ONE_STEP = 1  # a launch, where it does not run to the end


def granted(
    pe: Exchange,
    send_load: torch.Tensor,
    recv_load: torch.Tensor,
    *,
    record_words: int,
    packs: int = 0,
) -> Stages:
    """Put all of this PE's records, and grant others theirs, until both are done.

    Args:
        send_load, recv_load: (N, G) int32, records that each PE of this node puts to each node, and
            that each PE of each node puts to this one.
        packs: steps of packed that say that records are there: those of one more wave each, and of
            all with the last; 0: they are there.
    """
    begin, before = True, [[0] * pe.grants.shape[1] for _ in pe.grants]
    while True:
        seen = {name: pe.words(name).clone() for name in WORDS} if not pe.persists else {}
        pe.put_granted(
            *(send_load, recv_load),
            record_words=record_words,
            packs=packs,
            begin=begin,
            most_steps=0 if pe.persists else ONE_STEP,
        )
        if pe.persists:
            return
        knows = pe.grants.tolist()
        _observe(pe, before, knows)
        wire, rows = pe.kernels.wire, pe.kernels.granted
        if knows[rows.DONE.value][0] or int(pe.state[wire.FAILED.value]):
            return
        yield partial(_waits, pe, seen, knows)
        before, begin = knows, False


def _waits(
    pe: Exchange, seen: dict[str, torch.Tensor], knows: list[list[int]]
) -> list[Wait | News]:
    """Wait for any word, unless the last step did something, or for a sender's time to be up."""
    rows = pe.kernels.granted
    if knows[rows.NEWS.value][0]:
        return []
    if pe.beside:
        pe.beside.synchronize()  # a pack that still runs there has a word to say yet
    given, landed, back, aside, heard_ns = knows[rows.GIVEN.value : rows.HEARD_NS.value + 1]
    up_ns = [
        heard_ns[q] + pe.config.tiles.patience_ns
        for q in range(len(given))
        if given[q] > landed[q] // 2 + back[q] // 2 and not aside[q]
    ]
    # The clock of a GPU is another one: there only words count.
    until_ns = min(up_ns, default=math.inf) if pe.device.type == "cpu" else math.inf
    return [News(seen, until_ns, _missing(pe, knows))]


def _missing(pe: Exchange, knows: list[list[int]]) -> Late:
    """Name a word without which this PE cannot come to its end."""
    rows, base, G = pe.kernels.granted, pe.epoch << 32, pe.config.topo.gpus_per_node
    chunks, given, landed, back = knows[: rows.BACK_READ.value + 1]
    owed = [q for q, n in enumerate(chunks) if landed[q] < 2 * n]
    late = [q for q in owed if given[q] > landed[q] // 2 + back[q] // 2 or not back[q]]
    for q in (*late, *owed):
        s, j = divmod(q, pe.config.shape.RAIL_GPUS_P)
        sender = s * G + int(pe.rail_mates[j])
        return "landed", sender, base + 2 * chunks[q]
    out_chunks, begun = knows[rows.CHUNKS_OUT.value], knows[rows.BEGUN.value]
    d = next(d for d, n in enumerate(out_chunks) if begun[d] < n)
    return "granted", d * G + int(pe.rail_mates[0]), base + knows[rows.GRANTED_READ.value][d] + 1


def _observe(pe: Exchange, before: list[list[int]], knows: list[list[int]]) -> None:
    """Tell the observer of chunks that this PE has begun to put, and of those that landed here."""
    if pe.observer is None:
        return
    rows, G = pe.kernels.granted, pe.config.topo.gpus_per_node
    for q, landed in enumerate(knows[rows.LANDED_READ.value]):
        s, j = divmod(q, pe.config.shape.RAIL_GPUS_P)
        for _ in range(before[rows.LANDED_READ.value][q] // 2, landed // 2):
            pe.observer.arrived(s * G + int(pe.rail_mates[j]), pe.pe, rail=pe.rail)
    for d, begun in enumerate(knows[rows.BEGUN.value]):
        for _ in range(before[rows.BEGUN.value][d], begun):
            pe.observer.put(pe.pe, d * G + pe.local, rail=pe.rail, wave=1)
