"""Worlds for tests: poisoned and guarded memory, batches, and all that must hold of one run.

Letters: N nodes, G GPUs a node, R rails, W = N * G ranks, E experts, K top-k, T tokens, H hidden.
"""

import random
from dataclasses import dataclass
from functools import cached_property

import pytest
import torch

from heaps import DEVICE
from railwave import LocalWorld, Topology
from railwave.config import BALANCED, PATHS, WAVES
from railwave.kernels.shape import make_format, padded
from railwave.reference import combine_error_bound, combine_exact, combine_ref, dispatch_ref
from railwave.sched import native_quota_ref, quota_ref

# One path of each kind; the others in `make soak`.
FEW_PATHS = [
    pytest.param(path, marks=[] if path in ("native", "joint", "granted") else [pytest.mark.soak])
    for path in PATHS
]
GUARD, POISON = 0xA5, 0xFF  # 0xFF is NaN in every float dtype, and -1


class LastFirst(random.Random):
    """Let the last of the ready PEs run as far as it can."""

    def choice(self, ready):
        return ready[-1]


def make_world(nodes, gpus, rails, *, rail_of_gpu=None, eligible=None, **sizes):
    """Make a world whose gaps hold GUARD and whose data regions hold POISON."""
    topo = Topology(nodes, gpus, rails, rail_of_gpu=rail_of_gpu, eligible_rails=eligible)
    declared = dict(num_experts=2 * topo.num_ranks, top_k=3, hidden=8, max_tokens_per_rank=4)
    world = LocalWorld(topo, **{**declared, "dtype": torch.bfloat16, "device": DEVICE, **sizes})
    for pe in range(topo.num_ranks):
        for start, end in world.heap.layout.gaps():
            world.heap.memory(pe)[start:end] = GUARD
        for name in ("messages", "send", "recv", "rows"):
            world.heap.region(pe, name, torch.uint8)[:] = POISON
    return world


def random_bits(rows, columns, dtype):
    """Return a (rows, columns) tensor of random bits: NaN, infinity and -0.0 among them."""
    return torch.randint(0, 256, (rows, columns * dtype.itemsize), dtype=torch.uint8).view(dtype)


def random_values(rows, columns, dtype):
    """Return a (rows, columns) tensor of finite values over 16 binades."""
    scale = 2.0 ** torch.randint(-8, 8, (rows, columns))
    return (torch.randn(rows, columns) * scale).to(dtype)


def bits_equal(a, b):
    """Tell whether two tensors agree in dtype, shape and every bit; one NaN is as good as another.

    Only for NaN that arithmetic made; moved bytes are compared as uint8.
    """
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    a, b = a.cpu(), b.cpu()
    nan = a.isnan()
    ints = {2: torch.int16, 4: torch.int32}[a.dtype.itemsize]
    same = a.contiguous().view(ints) == b.contiguous().view(ints)
    return bool((same | (nan & b.isnan())).all())


def bytes_equal(a, b):
    """Tell whether two tensors agree in dtype, shape and every byte."""
    views = [t.cpu().contiguous().view(torch.uint8) for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*views)


@dataclass(frozen=True, eq=False)
class Batch:
    """The arguments of a dispatch, lists over ranks."""

    world: LocalWorld
    xs: list
    topk_idxs: list
    topk_weights: list

    @cached_property
    def arguments(self):
        lists = self.xs, self.topk_idxs, self.topk_weights
        return tuple([t.to(self.world.config.device) for t in values] for values in lists)

    @cached_property
    def num_tokens(self):
        return [len(x) for x in self.xs]

    @cached_property
    def expected(self):
        config = self.world.config
        arguments = self.xs, self.topk_idxs, self.topk_weights
        return dispatch_ref(config.topo, *arguments, expert_to_rank=config.expert_to_rank)

    @cached_property
    def records(self):
        """(W, N) int64: records of each rank to each other node, counted token by token."""
        config, topo = self.world.config, self.world.config.topo
        records = torch.zeros(topo.num_ranks, topo.nodes, dtype=torch.int64)
        for rank, topk_idx in enumerate(self.topk_idxs):
            for experts in topk_idx.tolist():
                ranks = {config.expert_to_rank[e] for e in experts if e >= 0}
                for node in {topo.node_of(r) for r in ranks} - {topo.node_of(rank)}:
                    records[rank, node] += 1
        return records

    def quotas(self, path):
        """(N, N, R) int64: records that rail r carries from node s to node d."""
        topo = self.world.config.topo
        rule = quota_ref if path in BALANCED else native_quota_ref
        return torch.stack(
            [
                rule(self.rail_records[s].T, topo.eligible_rails[s], node=s).T
                for s in range(topo.nodes)
            ]
        )

    @cached_property
    def rail_records(self):
        """(N, N, R) int64: records from node s to node d whose owner sits on rail r."""
        topo = self.world.config.topo
        records = torch.zeros(topo.nodes, topo.nodes, topo.rails_per_node, dtype=torch.int64)
        for rank in range(topo.num_ranks):
            rail = topo.rail_of_gpu[topo.local_of(rank)]
            records[topo.node_of(rank), :, rail] += self.records[rank]
        return records


def make_batch(world, tokens, *, hidden=None, dtype=None, top_k=None, ids=torch.int64, topk=None):
    """Draw a batch: random bits, random ids among them -1 and repeats.

    `tokens` is one number, or one per rank; `topk` (T, K) gives every rank the same ids, as
    many rows as it has tokens.
    """
    config = world.config
    W, K = config.topo.num_ranks, top_k or config.top_k
    tokens = [tokens] * W if isinstance(tokens, int) else tokens
    if topk is None:
        topk_idxs = [torch.randint(-1, config.num_experts, (T, K), dtype=ids) for T in tokens]
    else:
        topk_idxs = [topk[:T].to(ids) for T in tokens]
    xs = [random_bits(T, hidden or config.hidden, dtype or config.dtype) for T in tokens]
    return Batch(world, xs, topk_idxs, [torch.rand(idx.shape) for idx in topk_idxs])


def make_outs(batch, *, hidden=None, dtype=None):
    """Draw expert outputs for the rows of a batch."""
    config = batch.world.config
    hidden, dtype = hidden or config.hidden, dtype or config.dtype
    return [random_values(len(r.x), hidden, dtype) for r in batch.expected]


def dispatch(batch, path):
    """Dispatch and check all that must hold of it; return the handles."""
    received = batch.world.dispatch(*batch.arguments, path=path)
    for rank, (got, want) in enumerate(zip(received, batch.expected, strict=True)):
        for name in ("x", "topk_idx", "topk_weights", "num_tokens_per_expert"):
            assert bytes_equal(getattr(got, name), getattr(want, name)), (path, rank, name)
    handles = [r.handle for r in received]
    check_quotas(batch, path, handles)
    config = batch.world.config
    payload_bytes = batch.xs[0].shape[1] * batch.xs[0].dtype.itemsize
    fmt = make_format(payload_bytes, batch.topk_idxs[0].shape[1], config.topo.gpus_per_node)
    check_traffic(batch, path, batch.quotas(path) * fmt.RECORD_WORDS * 4)
    check_guards(batch.world)
    return handles


def combine(batch, handles, outs):
    """Combine and check all that must hold of it; return the sums."""
    topo, path = batch.world.config.topo, handles[0].path
    ys = batch.world.combine([out.to(batch.world.config.device) for out in outs], handles)
    ys = [y.cpu() for y in ys]
    for y, want in zip(ys, combine_ref(topo, outs, batch.expected, batch.num_tokens), strict=True):
        assert bits_equal(y, want), path
    row_words = padded(-(-outs[0].shape[1] * outs[0].dtype.itemsize // 4))
    # What node s sent to node d on a rail, node d returns to s on the same rail.
    check_traffic(batch, path, batch.quotas(path).transpose(0, 1) * row_words * 4)
    check_guards(batch.world)
    return ys


def run(batch, path, *, outs=None):
    """Dispatch and combine, checked; return the sums."""
    return combine(batch, dispatch(batch, path), make_outs(batch) if outs is None else outs)


def check_bound(batch, outs, ys):
    """Check the sums against float64, within the stated bound."""
    topo = batch.world.config.topo
    exact = combine_exact(topo, outs, batch.expected, batch.num_tokens)
    bounds = combine_error_bound(outs, batch.expected, batch.num_tokens, outs[0].dtype, topo)
    for y, value, bound in zip(ys, exact, bounds, strict=True):
        assert ((y.double() - value).abs() <= bound).all()


def check_quotas(batch, path, handles):
    """Check every node's quotas: by their rules, and against the literal reference."""
    topo = batch.world.config.topo
    quotas = batch.quotas(path)
    for rank, handle in enumerate(handles):
        node = topo.node_of(rank)
        assert torch.equal(handle.quota.cpu().long(), quotas[node])
        for d in set(range(topo.nodes)) - {node}:
            allowed = topo.eligible_rails[node, d]
            parts = handle.quota[d].cpu()
            assert parts.sum() == batch.rail_records[node, d].sum()
            assert not parts[~allowed].any()
            if path in BALANCED:
                assert parts[allowed].max() - parts[allowed].min() <= 1


def check_traffic(batch, path, put_bytes):
    """Check what was put, when, and by how many at once. `put_bytes` (N, N, R): what must be."""
    topo, traffic = batch.world.config.topo, batch.world.traffic
    assert torch.equal(traffic.put_bytes, put_bytes), path
    pairs = {tuple(pair) for pair in put_bytes.sum(dim=2).nonzero().tolist()}
    if path in WAVES:
        waves = [
            {(s, (s + k) % topo.nodes) for s in range(topo.nodes)} for k in range(1, topo.nodes)
        ]
        windows = [pairs & wave for wave in waves]
        assert traffic.max_fan_in <= 1
    else:
        windows = [pairs]
        assert path != "granted" or traffic.max_fan_in <= 2
    assert [set(window) for window in traffic.windows] == [w for w in windows if w], path
    assert (traffic.max_fan_in > 0) == bool(pairs)


def check_guards(world):
    """Check that nothing was written between the regions."""
    for pe in range(world.config.topo.num_ranks):
        for start, end in world.heap.layout.gaps():
            assert (world.heap.memory(pe)[start:end] == GUARD).all(), (pe, start)
