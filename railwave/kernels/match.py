"""Match surplus records to deficit slots: which PE sends each record, and from which slot.

Algorithm 1, lines 8-17. A rail's surplus records and the slice's deficit slots are numbered by
prefix sums; record i of GPU g has surplus number u = surplus_start[g] + i, and its rail is the one
whose deficit interval holds u:

    rail = number of rails r with deficit_start[r] + deficit[r] <= u
    GPU  = the rail's GPU number (u - deficit_start[rail]) mod n,  n GPUs on that rail
    slot = the records that GPU keeps + (u - deficit_start[rail]) div n

Letters: N nodes, G GPUs a node, R rails, T tokens a rank, d destination node.
"""

import torch
import triton.language as tl
from triton.language import core  # noqa: F401  (see lang.jit)

from railwave.sched import assign_ref as assign_ref  # the reference of `match`

from .lang import i64, iota, jit, tile_sum
from .quota import PlanTables
from .shape import Shape
from .wire import start_counting


@jit
def _match_kernel(
    proxy_ptr,
    slot_ptr,
    put_words_ptr,
    counts_ptr,
    kept_ptr,
    surplus_start_ptr,
    quota_ptr,
    rail_records_ptr,
    deficit_start_ptr,
    rail_gpus_ptr,
    me,
    record_words,
    S: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the proxy and the slot of BLOCK records of this PE that leave its node.

    The first program starts the counters of what is put.

    Example: one GPU a rail, C = [5, 0, 1], Q = [2, 2, 2]: records 0-4 of GPU 0 go to proxies
    0, 0, 1, 1, 2 at slots 0, 1, 0, 1, 1; record 0 of GPU 2 stays at its slot 0.
    """
    me: int = i64(me)
    local: int = me % S.G
    if i64(tl.program_id(0)) == 0:
        start_counting(put_words_ptr, record_words, S)
        start_counting(put_words_ptr + (S.N + 1), 0, S)  # of a combine that has not been
    offs = i64(tl.program_id(0)) * BLOCK + iota(BLOCK)
    d = offs // S.T
    i = offs % S.T
    away = (d < S.N) & (d != me // S.G)
    own = tl.load(counts_ptr + 1 + d, mask=away, other=0).to(tl.int64)
    mask = i < own
    kept = tl.load(kept_ptr + d * S.G + local, mask=mask, other=0).to(tl.int64)
    start = tl.load(surplus_start_ptr + d * S.G + local, mask=mask, other=0).to(tl.int64)
    moved = mask & (i >= kept)
    u = start + i

    r = iota(S.R_P)
    offs_r = (d * S.R)[:, None] + r[None, :]
    mask_r = moved[:, None] & (r < S.R)[None, :]
    quota = tl.load(quota_ptr + offs_r, mask=mask_r, other=0).to(tl.int64)
    have = tl.load(rail_records_ptr + offs_r, mask=mask_r, other=0).to(tl.int64)
    first = tl.load(deficit_start_ptr + offs_r, mask=mask_r, other=0).to(tl.int64)
    end = first + tl.where(quota > have, quota - have, 0)
    rail = tile_sum((mask_r & (end <= u[:, None])).to(tl.int64), 1)
    moved = moved & (rail < S.R)  # always, unless the phase has failed: then the plan is zeros

    RAIL_GPUS: tl.constexpr = S.RAIL_GPUS  # static_range takes nothing else
    n = rail * 0
    for j in tl.static_range(RAIL_GPUS):
        ptrs = rail_gpus_ptr + rail * S.RAIL_GPUS + j
        n += (tl.load(ptrs, mask=moved, other=-1) >= 0).to(tl.int64)
    n = tl.where(n > 0, n, 1)
    place = u - tl.load(deficit_start_ptr + d * S.R + rail, mask=moved, other=0).to(tl.int64)
    ptrs = rail_gpus_ptr + rail * S.RAIL_GPUS + place % n
    gpu = tl.load(ptrs, mask=moved, other=0).to(tl.int64)
    gpu_kept = tl.load(kept_ptr + d * S.G + gpu, mask=moved, other=0).to(tl.int64)
    tl.store(proxy_ptr + offs, tl.where(moved, gpu, local), mask=mask)
    tl.store(slot_ptr + offs, tl.where(moved, gpu_kept + place // n, i), mask=mask)


def match(
    counts: torch.Tensor,
    plan: PlanTables,
    rail_gpus: torch.Tensor,
    proxy: torch.Tensor,
    slot: torch.Tensor,
    put_words: torch.Tensor,
    *,
    me: int,
    record_words: int,
    shape: Shape,
    block: int,
) -> None:
    """Assign every record of this PE to a proxy of its node and a slot there.

    Args:
        counts: (1 + N + W + E,) int32, from `count`.
        plan: from `quota`.
        rail_gpus: (R, RAIL_GPUS) int32.
        proxy: out, (N, S.T) int32, local GPU that sends record i to node d.
        slot: out, (N, S.T) int32, its place among what that GPU sends to node d.
        put_words: out, (2, N + 1) int64: zeros for what dispatch and combine will put, and
            record_words at the end of the first row.
        me: this PE.
        record_words: 32-bit words of a record.
        block: records per program, a power of two; results do not depend on it.

    Source: Algorithm 1, lines 8-17. Reference: `railwave.sched.assign_ref`.
    """
    S = shape
    _match_kernel[(-(-S.N * S.T // block),)](
        *(proxy, slot, put_words, counts, plan.kept, plan.surplus_start, plan.quota),
        *(plan.rail_records, plan.deficit_start, rail_gpus, me, record_words),
        S=S,
        BLOCK=block,
    )
