"""One process per PE on GPUs, through NVSHMEM: the bits of the CPU, on both dialects of the wire.

`make test-gpu` runs these: under MPS, PEs sharing GPUs; those with one PE per GPU without it.
"""

import os

import pytest
import torch
import torch.distributed as dist

import railwave
from processes import run_all
from railwave.config import PATHS
from test_processes import combine, dispatch
from worlds import bytes_equal, make_batch, make_outs

pytestmark = pytest.mark.gpu
WIRES = [None, "nvshmem"]
GPUS = torch.cuda.device_count()
several_gpus = pytest.mark.skipif(GPUS < 2, reason=f"needs several GPUs, found {GPUS}")
NODES_GPUS = [(GPUS, 1), (1, GPUS)]


def init(topo, rank, **arguments):
    torch.cuda.set_device(rank % torch.cuda.device_count())
    declared = dict(num_experts=2 * topo.num_ranks, top_k=3, hidden=8, max_tokens_per_rank=4)
    return railwave.Communicator(topo, **{**declared, "deadline_s": 60, **arguments})


def every_path(rank, nodes, gpus, wire):
    rw = init(railwave.Topology(nodes, gpus, gpus), rank, wire=wire, staging_records=2)
    assert rw.config.remote == (wire is not None and nodes > 1)
    ranks = nodes * gpus
    for tokens in (4, [i % 5 for i in range(ranks)], [0] * ranks):
        batch = make_batch(rw, tokens)
        outs = make_outs(batch, dtype=torch.float32, hidden=3)
        for path in PATHS:
            combine(rw, batch, dispatch(rw, batch, path), outs)
    rw.close()


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("nodes, gpus", [(1, 1), (2, 4), (4, 8)])
def test_every_path_gives_the_bits_of_the_reference(nodes, gpus, wire):
    run_all(every_path, nodes * gpus, nodes, gpus, wire, timeout_s=200, fresh=nodes * gpus <= 8)


@several_gpus
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("nodes, gpus", NODES_GPUS, ids=["nodes", "node"])
def test_every_path_gives_the_bits_of_the_reference_one_per_gpu(nodes, gpus, wire):
    run_all(every_path, GPUS, nodes, gpus, wire, timeout_s=200)


def wrong_and_late(rank, nodes, gpus, wire):
    """Errors reach every rank; a rank that does not come is named; reset brings all back."""
    rw = init(railwave.Topology(nodes, gpus, gpus), rank, wire=wire, deadline_s=4)
    late = nodes * gpus - 2
    batch = make_batch(rw, 4)
    mine = [values[rank] for values in batch.arguments]
    if rank == 1:
        with pytest.raises(ValueError, match="path must be one of"):
            rw.dispatch(*mine, path="fast")
    else:
        with pytest.raises(railwave.PeerError, match=r"wrongly: \{1: .path must be one of"):
            rw.dispatch(*mine)
    with pytest.raises(railwave.PeerError, match=r"path native.* by ranks \[1\]"):
        rw.dispatch(*mine, path="native" if rank == 1 else "joint")
    handle = dispatch(rw, batch, "joint")
    dist.barrier()
    if rank != late:
        with pytest.raises(railwave.PeerTimeoutError) as caught:
            rw.combine(mine[0][:0].new_zeros(handle.num_rows, 8), handle)
        assert caught.value.missing == (late,), caught.value
    dist.barrier()
    assert rw.reset() == 3
    outs = make_outs(batch)
    combine(rw, batch, handle, outs)
    for path in PATHS:
        combine(rw, batch, dispatch(rw, batch, path), outs)


@pytest.mark.parametrize("wire", WIRES)
def test_errors_reach_every_rank_and_an_absent_rank_is_named(wire):
    run_all(wrong_and_late, 8, 2, 4, wire, timeout_s=200)


@several_gpus
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("nodes, gpus", NODES_GPUS, ids=["nodes", "node"])
def test_errors_reach_every_rank_one_per_gpu(nodes, gpus, wire):
    run_all(wrong_and_late, GPUS, nodes, gpus, wire, timeout_s=200)


class Big:
    """What a rank of the large test draws and must receive; all on the GPU, the same everywhere."""

    def __init__(self, rank, ranks, tokens, hidden, top_k, seed):
        self.rank, self.ranks = rank, ranks
        draw = dict(generator=torch.Generator("cuda").manual_seed(seed), device="cuda")
        self.ids = [torch.rand(tokens, 8 * ranks, **draw).topk(top_k).indices for _ in range(ranks)]
        bits = (-(2**31), 2**31, (tokens, hidden // 2))
        self.xs = [torch.randint(*bits, **draw).int().view(torch.bfloat16) for _ in range(ranks)]
        self.base = torch.randint(-2, 3, (tokens, hidden), **draw)
        self.on = [(ids // 8 == rank).any(dim=1).nonzero().flatten() for ids in self.ids]

    def rows(self):
        return torch.cat([x[tokens] for x, tokens in zip(self.xs, self.on, strict=True)])

    def out(self):
        """Small integers, whose sums are exact in bfloat16."""
        return torch.cat([self.base[tokens] for tokens in self.on]).mul(self.rank + 1).bfloat16()

    def sums(self):
        ids = self.ids[self.rank]
        held = torch.zeros(len(ids), self.ranks, device="cuda").scatter_(1, ids // 8, 1.0)
        factor = (held * torch.arange(1, self.ranks + 1, device="cuda")).sum(dim=1, keepdim=True)
        return (self.base * factor).bfloat16()


def same(got, want):
    return torch.equal(got.view(torch.int16), want.view(torch.int16))


def big_phases(rank, nodes, ranks, tokens, hidden, num_phases, wire):
    """Four dispatches and combines back to back, each on other data; then they are checked."""
    topo, top_k = railwave.Topology(nodes, ranks // nodes, ranks // nodes), 8
    sizes = dict(num_experts=8 * ranks, top_k=top_k, hidden=hidden, max_tokens_per_rank=tokens)
    rw = init(topo, rank, **sizes, wire=wire, staging_records=1024)
    weights = torch.full((tokens, top_k), 1 / top_k, device="cuda")
    bigs = [Big(rank, ranks, tokens, hidden, top_k, seed) for seed in range(len(PATHS))]
    rows, outs, sums = zip(*[(big.rows(), big.out(), big.sums()) for big in bigs], strict=True)
    assert same(rows[0], rows[0]) and bytes_equal(weights, weights)
    torch.cuda.synchronize()
    dist.barrier()  # all kernels of the checks are loaded, see bench/mps.py
    for turn in range(num_phases // (2 * len(bigs))):
        got = []
        for i, big in enumerate(bigs):
            path = PATHS[(i + turn) % len(PATHS)]
            received = rw.dispatch(big.xs[rank], big.ids[rank], weights, path=path)
            got.append((received, rw.combine(outs[i], received.handle)))
        for i, (received, y) in enumerate(got):
            assert same(received.x, rows[i]) and same(y, sums[i]), (turn, i)


@pytest.mark.parametrize("nodes, wire", [(2, None), (4, "nvshmem")])
def test_200_phases_back_to_back_at_full_size(nodes, wire):
    num_phases = int(os.environ.get("RAILWAVE_TEST_PHASES", "200"))
    run_all(big_phases, 8, nodes, 8, 4096, 7168, num_phases, wire, timeout_s=220)


@several_gpus
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("nodes", [GPUS, 1], ids=["nodes", "node"])
def test_40_phases_back_to_back_one_per_gpu(nodes, wire):
    run_all(big_phases, GPUS, nodes, GPUS, 4096, 7168, 40, wire, timeout_s=220)
