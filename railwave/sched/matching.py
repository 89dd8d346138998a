"""Match surplus records to deficit slots, Algorithm 1: the readable reference.

Records of one slice stand in streams: a rail's stream is its GPUs in ascending order, each GPU's
records in their own order. Shape letters: G GPUs a node, R rails.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from railwave._check import check_counts, check_index


@dataclass(frozen=True)
class RailMatch:
    """Say, for every record of one slice, which rail carries it and where in that rail's quota.

    Entry [r][i] belongs to record i of owner rail r.
    """

    target_rail: tuple[tuple[int, ...], ...]  # R tuples of C[r] ints in [0, R)
    slot: tuple[tuple[int, ...], ...]  # R tuples of C[r] ints in [0, Q[target rail])


@dataclass(frozen=True)
class ProxyMatch:
    """Say, for every record of one slice, which GPU sends it and from which staging slot.

    Entry [g][i] belongs to record i of owner GPU g.
    """

    proxy: tuple[tuple[int, ...], ...]  # G tuples of ints in [0, G), local GPUs
    slot: tuple[tuple[int, ...], ...]  # G tuples of ints; a proxy's slots are 0 .. its load - 1


def match_ref(counts: Any, quotas: Any) -> RailMatch:
    """Run Algorithm 1 on one slice, by its own words.

    Line 5 runs over every rail, with a quota of zero where a rail is not eligible. As printed,
    over the eligible rails only, records owned by the others would be lost.

    Args:
        counts: (R,) integer, records by their owner's rail.
        quotas: (R,) integer, the same total.

    Raises:
        TypeError, ValueError: a wrong type or shape, or totals that differ.

    Source: Alg. 1.

    Example:
        Rail 0 owns 4 records and may carry 2: its records 2 and 3 go to the free slots of rail 1
        (slot 1, after its own record) and rail 2 (slot 0).

        >>> match_ref([4, 1, 0], [2, 2, 1])
        RailMatch(target_rail=((0, 0, 1, 2), (1,), ()), slot=((0, 1, 1, 0), (0,), ()))
    """
    counts = check_counts(counts, None, "counts", ndim=1).tolist()
    quotas = check_counts(quotas, (len(counts),), "quotas").tolist()
    if sum(counts) != sum(quotas):
        raise ValueError(
            f"quotas must add up to the slice's {sum(counts)} records, got {sum(quotas)}: {quotas}"
        )
    target_rail = [[-1] * num_records for num_records in counts]
    slot = [[-1] * num_records for num_records in counts]
    surplus: list[tuple[int, int]] = []  # (owner rail, local index)
    deficit: list[tuple[int, int]] = []  # (target rail, slot)
    for rail, (num_records, quota) in enumerate(zip(counts, quotas, strict=True)):
        for i in range(min(num_records, quota)):
            target_rail[rail][i] = rail
            slot[rail][i] = i
        if num_records > quota:
            surplus.extend((rail, i) for i in range(quota, num_records))
        elif num_records < quota:
            deficit.extend((rail, j) for j in range(num_records, quota))
    for (owner, i), (target, j) in zip(sorted(surplus), sorted(deficit), strict=True):
        target_rail[owner][i] = target
        slot[owner][i] = j
    return RailMatch(_frozen(target_rail), _frozen(slot))


def assign_ref(records: Any, rail_of_gpu: Sequence[int], quotas: Any) -> ProxyMatch:
    """Carry Algorithm 1 from rails to GPUs: name the proxy and staging slot of every record.

    A kept record stays with its owner GPU at its own index. A relocated one in slot j of a rail
    with C records of its own and n GPUs goes to the rail's GPU number (j - C) mod n, at slot
    kept + (j - C) div n, behind the records that GPU keeps, which are all of its own.

    Args:
        records: (G,) integer, records by their owner GPU.
        rail_of_gpu: (G,) ints in [0, R), the rail of each local GPU.
        quotas: (R,) integer, zero on a rail without a GPU, the same total.

    Raises:
        TypeError, ValueError: a wrong type or shape, a quota no GPU can carry, or totals that
            differ.

    Source: Alg. 1.

    Example:
        GPUs 1 and 2 share rail 1. GPU 0 keeps 1 of its 4 records; the others go round the
        GPUs 1, 2, 1, behind the record that each GPU owns.

        >>> assign_ref([4, 1, 1], [0, 1, 1], [1, 5])
        ProxyMatch(proxy=((0, 1, 2, 1), (1,), (2,)), slot=((0, 1, 1, 2), (0,), (0,)))
    """
    records = check_counts(records, None, "records", ndim=1).tolist()
    quotas = check_counts(quotas, None, "quotas", ndim=1).tolist()
    streams = _streams(records, rail_of_gpu, quotas)
    counts = [len(stream) for stream in streams]
    match = match_ref(counts, quotas)
    proxy = [[-1] * num_records for num_records in records]
    slot = [[-1] * num_records for num_records in records]
    for rail, stream in enumerate(streams):
        for position, (owner, i) in enumerate(stream):
            target, j = match.target_rail[rail][position], match.slot[rail][position]
            if target == rail:
                proxy[owner][i], slot[owner][i] = owner, i
                continue
            gpus = [gpu for gpu, its_rail in enumerate(rail_of_gpu) if its_rail == target]
            turn, number = divmod(j - counts[target], len(gpus))
            proxy[owner][i] = gpus[number]
            slot[owner][i] = records[gpus[number]] + turn
    return ProxyMatch(_frozen(proxy), _frozen(slot))


def _streams(
    records: list[int], rail_of_gpu: Sequence[int], quotas: list[int]
) -> list[list[tuple[int, int]]]:
    """Return, per rail, its records as (owner GPU, index in that GPU's records)."""
    if len(rail_of_gpu) != len(records):
        raise ValueError(
            f"rail_of_gpu must have one entry per GPU ({len(records)}), got {len(rail_of_gpu)}"
        )
    streams: list[list[tuple[int, int]]] = [[] for _ in quotas]
    with_gpu = set()
    for gpu, rail in enumerate(rail_of_gpu):
        with_gpu.add(check_index(rail, len(quotas), f"rail_of_gpu[{gpu}]"))
        streams[rail].extend((gpu, i) for i in range(records[gpu]))
    for rail, quota in enumerate(quotas):
        if quota and rail not in with_gpu:
            raise ValueError(f"quotas must be 0 on a rail without a GPU, got {quota} at {rail}")
    return streams


def _frozen(rows: list[list[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(row) for row in rows)
