"""Quotas (eq. 9) and what follows from them, for every slice that touches this node.

From the notify messages alone, the same on every PE of the node. With C[r] the records of a slice
(s, d) whose owners sit on rail r, B their sum, m eligible rails, x the number of r among them:

    Q[r] = B div m + [(x - s - d) mod m < B mod m]        on eligible rails, 0 elsewhere
    native: Q[r] = C[r] + the same share of the records that sit on ineligible rails

A rail's surplus is the run [Q, C) of its stream, its free slots are [C, Q). Kept records stay with
their owner at their own index; surplus number u of the slice goes to the rail whose deficit
interval holds u (Algorithm 1's sorted zip as two prefix sums, see `match`).

Slice number i < N is (this node, i), number N + s is (s, this node).

Letters: N nodes, G GPUs a node, R rails, W = N * G ranks; s source, d destination node.
"""

from dataclasses import dataclass

import torch
import triton.language as tl
from triton.language import core  # noqa: F401  (see lang.jit)

# The references of `quota`, native and balanced.
from railwave.sched import native_quota_ref as native_quota_ref
from railwave.sched import quota_ref as quota_ref

from .lang import cumsum, helper, i64, iota, jit, tile_max, tile_sum
from .notify import area
from .nvshmem import libraries
from .shape import Shape, pow2
from .verdict import compare_calls, tell_verdict
from .wire import NOTIFY, ROWS, heap_i32, heap_i64, mark, wait_all


@dataclass(frozen=True)
class PlanTables:
    """What the plan kernels write: int32 tensors, slices numbered as above."""

    quota: torch.Tensor  # (2N, R) records each rail carries
    rail_records: torch.Tensor  # (2N, R) C: records whose owner sits on the rail
    deficit_start: torch.Tensor  # (2N, R) first surplus number that goes to the rail
    kept: torch.Tensor  # (2N, G) records each GPU keeps
    surplus_start: torch.Tensor  # (2N, G) surplus number of GPU g's record i, less i
    load: torch.Tensor  # (2N, G) records each GPU puts, kept and relocated
    row_start: torch.Tensor  # (W, G) first final slot of each source's rows at each GPU of the node
    received: torch.Tensor  # (1 + RANK_EXPERTS,) rows here, then slots of each expert here
    num_records: torch.Tensor  # (N,) records of this rank to each node

    @classmethod
    def empty(cls, shape: Shape, device: torch.device) -> "PlanTables":
        """Allocate the tables of one PE."""
        S = shape
        sizes = {
            **dict.fromkeys(("quota", "rail_records", "deficit_start"), (2 * S.N, S.R)),
            **dict.fromkeys(("kept", "surplus_start", "load"), (2 * S.N, S.G)),
            "row_start": (S.N * S.G, S.G),
            "received": (1 + S.RANK_EXPERTS,),
            "num_records": (S.N,),
        }
        return cls(
            **{k: torch.empty(v, dtype=torch.int32, device=device) for k, v in sizes.items()}
        )


@helper
def _plan_slices(
    quota_ptr,
    rail_records_ptr,
    deficit_start_ptr,
    kept_ptr,
    surplus_start_ptr,
    load_ptr,
    messages_ptr,
    rail_of_gpu_ptr,
    rail_gpus_ptr,
    eligible_ptr,
    node,
    ok,
    S: tl.constexpr,
    BALANCED: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    """Write quotas, kept records and loads of BLOCK_I slices; zeros if not `ok`.

    Example: one slice (0, 1) on 3 rails of one GPU each, C = [5, 0, 1]: B = 6, Q = [2, 2, 2],
    kept [2, 0, 1], 3 surplus records on rail 0, deficits 0, 2, 1, load [2, 2, 2].
    """
    i = (i64(tl.program_id(0)) - 1) * BLOCK_I + iota(BLOCK_I)
    other = i % S.N
    s = tl.where(i < S.N, node, other)
    d = tl.where(i < S.N, other, node)
    mask_i = (i < 2 * S.N * ok) & (s != d)
    records_ptr = messages_ptr + 1 + d  # plus source rank * NOTIFY_WORDS

    r = iota(S.R_P)
    mask_r = r < S.R
    mask_ir = mask_i[:, None] & mask_r[None, :]
    RAIL_GPUS: tl.constexpr = S.RAIL_GPUS  # static_range takes nothing else
    have = i[:, None] * 0 + r[None, :] * 0
    for j in tl.static_range(RAIL_GPUS):
        g = tl.load(rail_gpus_ptr + r * S.RAIL_GPUS + j, mask=mask_r, other=-1).to(tl.int64)
        rank = (s * S.G)[:, None] + g[None, :]
        mask = mask_ir & (g >= 0)[None, :]
        ptrs = records_ptr[:, None] + rank * S.NOTIFY_WORDS
        have += tl.load(ptrs, mask=mask, other=0).to(tl.int64)
    ptrs = eligible_ptr + (other * S.R)[:, None] + r[None, :]
    eligible = tl.load(ptrs, mask=mask_ir, other=0).to(tl.int64)
    num_eligible = tile_sum(eligible, 1)
    m = tl.where(num_eligible > 0, num_eligible, 1)
    x = cumsum(eligible, 1) - eligible
    spread = have
    if not BALANCED:
        spread = have * (1 - eligible)
    total = tile_sum(spread, 1)
    turn = (x - ((s + d) % m)[:, None] + m[:, None]) % m[:, None]
    quota = (total // m)[:, None] + (turn < (total % m)[:, None]).to(tl.int64)
    if not BALANCED:
        quota += have
    quota *= eligible

    deficit = tl.where(quota > have, quota - have, 0)
    surplus = tl.where(quota < have, have - quota, 0)
    deficit_start = cumsum(deficit, 1) - deficit
    surplus_start = cumsum(surplus, 1) - surplus
    offs_ir = (i * S.R)[:, None] + r[None, :]
    store_ir = (i < 2 * S.N)[:, None] & mask_r[None, :]
    tl.store(quota_ptr + offs_ir, quota, mask=store_ir)
    tl.store(rail_records_ptr + offs_ir, have, mask=store_ir)
    tl.store(deficit_start_ptr + offs_ir, deficit_start, mask=store_ir)

    # The same per GPU: gather the rail's numbers by a one-hot sum, then walk the rail's GPUs.
    g = iota(S.G_P)
    mask_g = g < S.G
    rail = tl.load(rail_of_gpu_ptr + g, mask=mask_g, other=-1).to(tl.int64)
    on_rail = (rail[:, None] == r[None, :]).to(tl.int64)[None, :, :]
    quota_g = tile_sum(quota[:, None, :] * on_rail, 2)
    have_g = tile_sum(have[:, None, :] * on_rail, 2)
    surplus_g = tile_sum(surplus_start[:, None, :] * on_rail, 2)
    mask_ig = mask_i[:, None] & mask_g[None, :]
    ptrs = records_ptr[:, None] + ((s * S.G)[:, None] + g[None, :]) * S.NOTIFY_WORDS
    own = tl.load(ptrs, mask=mask_ig, other=0).to(tl.int64)
    before = own * 0
    place = g * 0
    mates = g * 0
    for j in tl.static_range(RAIL_GPUS):
        mate = tl.load(rail_gpus_ptr + rail * S.RAIL_GPUS + j, mask=mask_g, other=-1).to(tl.int64)
        mates += (mate >= 0).to(tl.int64)
        earlier = (mate >= 0) & (mate < g)
        place += earlier.to(tl.int64)
        ptrs = records_ptr[:, None] + ((s * S.G)[:, None] + mate[None, :]) * S.NOTIFY_WORDS
        before += tl.load(ptrs, mask=mask_ig & earlier[None, :], other=0).to(tl.int64)
    kept = tl.minimum(tl.maximum(quota_g - before, 0), own)
    extra = tl.maximum(quota_g - have_g, 0)
    mates = tl.where(mates > 0, mates, 1)
    relocated = tl.maximum(extra - place[None, :] + mates[None, :] - 1, 0) // mates[None, :]
    offs_ig = (i * S.G)[:, None] + g[None, :]
    store_ig = (i < 2 * S.N)[:, None] & mask_g[None, :]
    tl.store(kept_ptr + offs_ig, kept, mask=store_ig)
    tl.store(surplus_start_ptr + offs_ig, surplus_g + before - quota_g, mask=store_ig)
    tl.store(load_ptr + offs_ig, kept + relocated, mask=store_ig)


@helper
def _plan_arrivals(
    row_start_ptr,
    received_ptr,
    bases_ptr,
    state_ptr,
    messages_ptr,
    expert_start_ptr,
    me,
    verdict_off,
    ok,
    S: tl.constexpr,
    W_P: tl.constexpr,
    EXPERTS_P: tl.constexpr,
):
    """Number the rows that will arrive: row_start[w, g] = rows at GPU g from ranks below w.

    Zeros if not `ok`. Fails the phase if the ranks' calls differ.

    Example: 3 ranks send 2, 0 and 5 rows to a GPU: its row_start is 0, 2, 2 and it receives 7.
    """
    node: int = me // S.G
    w = iota(W_P)
    store_w = w < S.N * S.G
    mask_w = w < S.N * S.G * ok
    g = iota(S.G_P)
    mask_g = g < S.G
    ptrs = messages_ptr + (w * S.NOTIFY_WORDS)[:, None] + (1 + S.N + g)[None, :]
    rows = tl.load(ptrs, mask=mask_w[:, None] & mask_g[None, :], other=0).to(tl.int64)
    offs = (w * S.G)[:, None] + g[None, :]
    store_wg = store_w[:, None] & mask_g[None, :]
    tl.store(row_start_ptr + offs, cumsum(rows, 0) - rows, mask=store_wg)
    received = tile_sum(rows, 0)
    here: int = i64(tile_sum(tl.where(g == me % S.G, received, 0), 0))
    tl.store(received_ptr, here)
    tl.store(state_ptr + ROWS, here)

    first: int = i64(tl.load(expert_start_ptr + me))
    end: int = i64(tl.load(expert_start_ptr + me + 1))
    node_first: int = i64(tl.load(expert_start_ptr + node * S.G))
    e = iota(EXPERTS_P)
    offs_e = 1 + S.N + S.G + first - node_first + e
    mask = mask_w[:, None] & (e < end - first)[None, :]
    ptrs = messages_ptr + (w * S.NOTIFY_WORDS)[:, None] + offs_e[None, :]
    slots = tl.load(ptrs, mask=mask, other=0).to(tl.int64)
    tl.store(received_ptr + 1 + e, tile_sum(slots, 0), mask=e < S.RANK_EXPERTS)
    compare_calls(messages_ptr, state_ptr, me, ok, S, W_P)
    if S.BOUNDED:
        tell_verdict(bases_ptr, state_ptr, me, verdict_off, i64(tile_max(received, 0)), S)


@jit
def _quota_kernel(
    quota_ptr,
    rail_records_ptr,
    deficit_start_ptr,
    kept_ptr,
    surplus_start_ptr,
    load_ptr,
    row_start_ptr,
    received_ptr,
    num_records_ptr,
    bases_ptr,
    state_ptr,
    rail_of_gpu_ptr,
    rail_gpus_ptr,
    eligible_ptr,
    expert_start_ptr,
    me,
    notify_off,
    word_off,
    verdict_off,
    S: tl.constexpr,
    BALANCED: tl.constexpr,
    BLOCK_I: tl.constexpr,
    W_P: tl.constexpr,
    EXPERTS_P: tl.constexpr,
):
    """Wait for every rank's message; plan what leaves this node and number what arrives.

    Zeros if a message is missing when a program gives up: what never came must not become an index.
    The first program numbers the rows, each other one plans BLOCK_I slices.
    """
    me: int = i64(me)
    w = iota(W_P)
    word_ptrs = heap_i64(bases_ptr, me, i64(word_off)) + w
    ok: int = wait_all(word_ptrs, mark(state_ptr, 0, S), w < S.N * S.G, w, NOTIFY, state_ptr)
    messages_ptr = heap_i32(bases_ptr, me, area(state_ptr, i64(notify_off), S))
    if i64(tl.program_id(0)) == 0:
        n = iota(S.N_P)
        own = tl.load(messages_ptr + me * S.NOTIFY_WORDS + 1 + n, mask=n < S.N * ok, other=0)
        tl.store(num_records_ptr + n, own, mask=n < S.N)
        _plan_arrivals(
            *(row_start_ptr, received_ptr, bases_ptr, state_ptr, messages_ptr),
            *(expert_start_ptr, me, i64(verdict_off), ok, S, W_P, EXPERTS_P),
        )
    else:
        _plan_slices(
            *(quota_ptr, rail_records_ptr, deficit_start_ptr),
            *(kept_ptr, surplus_start_ptr, load_ptr),
            *(messages_ptr, rail_of_gpu_ptr, rail_gpus_ptr, eligible_ptr),
            *(me // S.G, ok, S, BALANCED, BLOCK_I),
        )


def quota(
    bases: torch.Tensor,
    state: torch.Tensor,
    rail_of_gpu: torch.Tensor,
    rail_gpus: torch.Tensor,
    eligible: torch.Tensor,
    expert_start: torch.Tensor,
    out: PlanTables,
    *,
    me: int,
    notify_off: int,
    word_off: int,
    verdict_off: int,
    balanced: bool,
    shape: Shape,
    block_i: int,
    warps: int = 4,
) -> None:
    """Wait for all messages; plan this node's slices and number the rows that will arrive.

    Fails the phase if the ranks' calls differ; tells the verdict of this node if rows are bounded.

    Args:
        bases: (W,) int64, address of every PE's heap.
        state: (STATE_WORDS,) int64 of this PE.
        rail_of_gpu: (G,) int32.
        rail_gpus: (R, RAIL_GPUS) int32, GPUs of each rail, ascending, -1 where there are fewer.
        eligible: (N, R) int32, 1 where the rail may carry payload between this node and another.
        expert_start: (W + 1,) int32, first expert position of each rank.
        out: tables to fill.
        me: this PE.
        notify_off, word_off: byte offsets of the notify areas and of the words notify[rank].
        verdict_off: byte offset of the words verdict[node].
        balanced: True for eq. 9 (`rail`, `joint`), False for native quotas.
        block_i: slices a program, a power of two; results do not depend on it.
        warps: of a program; every program waits.

    Source: eq. (9), Algorithm 1 lines 1-7. References: `quota_ref`, `native_quota_ref` (quotas),
    `railwave.sched.assign_ref` (what each GPU keeps and puts), `arrivals_ref`.
    """
    block_i = min(block_i, pow2(2 * shape.N))
    _quota_kernel[(1 + -(-2 * shape.N // block_i),)](
        *(out.quota, out.rail_records, out.deficit_start, out.kept, out.surplus_start, out.load),
        *(out.row_start, out.received, out.num_records),
        *(bases, state, rail_of_gpu, rail_gpus, eligible, expert_start),
        *(me, notify_off, word_off, verdict_off),
        S=shape,
        BALANCED=balanced,
        BLOCK_I=block_i,
        W_P=pow2(shape.N * shape.G),
        EXPERTS_P=pow2(shape.RANK_EXPERTS),
        num_warps=warps,
        **libraries(shape),
    )


def arrivals_ref(
    messages: torch.Tensor, expert_start: torch.Tensor, out: PlanTables, *, me: int, shape: Shape
) -> None:
    """Write row_start, received and num_records.

    Args: as `quota`, and messages: (W, NOTIFY_WORDS) int32 of this node's area.
    """
    S = shape
    _, records, rows, slots = messages.split([1, S.N, S.G, S.NODE_EXPERTS], dim=1)
    first, end = expert_start[me : me + 2] - expert_start[me // S.G * S.G]
    out.num_records[:] = records[me]
    out.row_start[0] = 0
    out.row_start[1:] = rows.cumsum(0)[:-1]
    out.received[0] = rows[:, me % S.G].sum()
    out.received[1:] = 0
    out.received[1 : 1 + end - first] = slots[:, first:end].sum(0)
