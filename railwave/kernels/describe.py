"""Describe the traffic of a phase by three numbers, eq. 4, 5 and 7, from the counts of all ranks.

With D[s, d] the records from node s to node d, and load[s, r] those of node s that GPUs of rail r
own:

    B     = record bytes * sum of D / (N * G)
    rho_g = max of load * N * R / sum of D
    kappa = max over windows v of  max_d in[v, d] * N / sum of in[v],  in[v, d] = records to d in v

Integers are summed and divided once, in float64: bit for bit what `railwave.sched` computes on the
host. `notify` brings the counts, so every rank finds the same numbers without a further exchange.

Letters: N nodes, G GPUs a node, R rails, W = N * G ranks, V windows, s source, d destination node.
"""

import torch
import triton.language as tl
from triton.language import core  # noqa: F401  (see lang.jit)

from railwave.sched import payload_per_gpu, receiver_concentration, source_rail_skew

from .lang import clamp, f64, helper, i64, iota, jit, ratio, tile_max, tile_sum
from .notify import area
from .shape import Shape, pow2
from .wire import NOTIFY, heap_i32, heap_i64, mark, wait_all

_MOST = tl.constexpr(1 << 62)


@helper
def _load_sent(messages_ptr, s, n, ok, S: tl.constexpr):
    """Load the records of node s by GPU and destination node: (G_P, len(n)) int64."""
    g = iota(S.G_P)
    ptrs = messages_ptr + ((s * S.G + g) * S.NOTIFY_WORDS)[:, None] + (1 + n)[None, :]
    mask = (g < S.G * ok)[:, None] & ((n < S.N) & (n != s))[None, :]
    return tl.load(ptrs, mask=mask, other=0).to(tl.int64)


@helper
def _by_rail(sent, rail_gpus_ptr, S: tl.constexpr):
    """Add what each GPU sends up by rail: (G_P,) to (R_P,)."""
    r = iota(S.R_P)
    g = iota(S.G_P)
    load = r * 0
    RAIL_GPUS: tl.constexpr = S.RAIL_GPUS  # static_range takes nothing else
    for j in tl.static_range(RAIL_GPUS):
        mate = tl.load(rail_gpus_ptr + r * S.RAIL_GPUS + j, mask=r < S.R, other=-1).to(tl.int64)
        load += tile_sum(tl.where(mate[:, None] == g[None, :], sent[None, :], 0), 1)
    return load


@jit
def _describe_kernel(
    out_ptr,
    bases_ptr,
    state_ptr,
    windows_ptr,
    rail_gpus_ptr,
    me,
    notify_off,
    word_off,
    record_bytes,
    num_windows,
    S: tl.constexpr,
    N_P: tl.constexpr,
    W_P: tl.constexpr,
):
    """Wait for every rank's message; write B, rho_g and kappa, as of nothing if one is missing.

    Example: 2 nodes x 2 GPUs, one a rail; GPU 0 of node 0 sends 6 records of 10 bytes to node 1,
    which sends 1 with each GPU. B = 80 / 4; the busiest rail carries 6, 3 times the mean of 2; in
    one window of both pairs node 1 receives 6 of a mean of 4: kappa = 1.5.
    """
    me: int = i64(me)
    w = iota(W_P)
    word_ptrs = heap_i64(bases_ptr, me, word_off) + w
    ok: int = wait_all(word_ptrs, mark(state_ptr, 0, S), w < S.N * S.G, w, NOTIFY, state_ptr)
    messages_ptr = heap_i32(bases_ptr, me, area(state_ptr, notify_off, S))
    n = iota(N_P)
    total: int = i64(0)
    busiest: int = i64(0)
    for s in range(S.N):
        sent = tile_sum(_load_sent(messages_ptr, s, n, ok, S), 1)
        total: int = total + i64(tile_sum(sent, 0))
        load = _by_rail(sent, rail_gpus_ptr, S)
        busiest: int = clamp(i64(tile_max(load, 0)), busiest, _MOST)
    tl.store(out_ptr, f64(ratio(total * i64(record_bytes), S.N * S.G)))
    tl.store(out_ptr + 1, f64(1))
    if total > 0:
        tl.store(out_ptr + 1, f64(ratio(busiest * (S.N * S.R), total)))

    kappa: float = ratio(1, 1)
    for v in range(i64(num_windows)):
        received = n * 0
        for s in range(S.N):
            ptrs = windows_ptr + (v * S.N + s) * S.N + n
            sends = tl.load(ptrs, mask=n < S.N, other=0).to(tl.int64)
            received += tile_sum(_load_sent(messages_ptr, s, n, ok, S), 0) * sends
        in_window: int = i64(tile_sum(received, 0))
        if in_window > 0:
            here: float = ratio(i64(tile_max(received, 0)) * S.N, in_window)
            if here > kappa:
                kappa: float = here
    tl.store(out_ptr + 2, f64(kappa))


def describe(
    out: torch.Tensor,
    bases: torch.Tensor,
    state: torch.Tensor,
    windows: torch.Tensor,
    rail_gpus: torch.Tensor,
    *,
    me: int,
    notify_off: int,
    word_off: int,
    record_bytes: int,
    shape: Shape,
) -> None:
    """Write the descriptors of a phase, once all ranks' messages are here.

    Args:
        out: out, (3,) float64: B in bytes, rho_g, kappa; 0, 1, 1 when nothing is sent.
        bases, state: addresses of all heaps, state of this PE.
        windows: (V, N, N) int8, 1 where node s sends to node d in a window. One dispatch on native
            or rail is one window of all pairs.
        rail_gpus: (R, RAIL_GPUS) int32, GPUs of each rail, -1 where there are fewer.
        me: this PE.
        notify_off, word_off: byte offsets of the notify areas and of the words notify[rank].
        record_bytes: bytes of a record.

    One program: its time grows with V * N.

    Source: eq. (4), (5), (7). Reference: `describe_ref`.
    """
    _describe_kernel[(1,)](
        *(out, bases, state, windows, rail_gpus),
        *(me, notify_off, word_off, record_bytes, len(windows)),
        S=shape,
        N_P=pow2(shape.N),
        W_P=pow2(shape.N * shape.G),
    )


def describe_ref(
    records: torch.Tensor,
    windows: torch.Tensor,
    rail_of_gpu: torch.Tensor,
    *,
    record_bytes: int,
    shape: Shape,
) -> list[float]:
    """Return what `describe` writes, by the functions of `railwave.sched`.

    Args: as `describe`, and
        records: (W, N) int32, records from each rank to each node; within a node they don't count.
        rail_of_gpu: (G,) int32.
    """
    S = shape
    sent = records.cpu().long().view(S.N, S.G, S.N)
    sent[torch.arange(S.N), :, torch.arange(S.N)] = 0
    loads = torch.zeros(S.N, S.R, dtype=torch.int64, device="cpu")
    loads.index_add_(1, rail_of_gpu.cpu().long(), sent.sum(dim=2))
    demand = sent.sum(dim=1)
    pairs = [[tuple(pair) for pair in window.nonzero().tolist()] for window in windows.cpu()]
    return [
        payload_per_gpu(demand * record_bytes, S.G),
        source_rail_skew(loads),
        receiver_concentration(demand, pairs),
    ]
