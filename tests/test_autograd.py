"""Gradients, and dispatches that repeat an earlier one's routing.

Letters: W ranks, E experts, T tokens, H hidden, K top-k.
"""

import copy
import pickle
from collections import deque
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import railwave
from heaps import DEVICE, ON_GPU, seeds
from processes import run_all
from railwave import autograd
from railwave.config import PATHS
from railwave.reference import combine_ref
from test_processes import errors_of, init
from worlds import Batch, bits_equal, bytes_equal, make_batch, make_outs, make_world, random_bits


@settings(max_examples=12)
@given(
    *(seeds, st.integers(1, 3), st.integers(1, 3), st.sampled_from([1, 2, 8])),
    *(st.sampled_from(PATHS), st.booleans(), st.sampled_from(["copy", "view"])),
    *(st.sampled_from([torch.bfloat16, torch.uint8, torch.float32]), st.integers(1, 4)),
)
def test_a_handle_repeats_its_routing(_, N, G, staging, path, static, out, dtype, hidden):
    world = make_world(N, G, G, staging_records=staging)
    batch = make_batch(world, [i % 5 for i in range(N * G)])
    form = {"path": path, "static_shapes": static}
    first = world.dispatch(*batch.arguments, **form)
    other = make_batch(world, batch.num_tokens)  # another phase in between
    world.dispatch(*other.arguments)
    xs = [random_bits(len(x), hidden, dtype) for x in batch.xs]
    again = Batch(world, xs, batch.topk_idxs, batch.topk_weights)
    handles = [r.handle for r in first]
    received = world.dispatch(again.arguments[0], handles=handles, out=out)
    for got, before, want in zip(received, first, again.expected, strict=True):
        n = len(want.x)
        assert bytes_equal(got.x[:n], want.x) and len(got.x) == len(before.x)
        for name in ("topk_idx", "topk_weights", "num_tokens_per_expert"):
            assert torch.equal(getattr(got, name)[:n], getattr(before, name)[:n]), name
        assert (
            int(got.num_rows) == n
            and got.handle.path == path
            and got.handle.static_shapes == static
        )
    outs = make_outs(batch)
    full = [
        torch.cat([o, torch.full((len(r.x) - len(o), o.shape[1]), torch.nan, dtype=o.dtype)])
        for o, r in zip(outs, received, strict=True)
    ]
    for these in (handles, [r.handle for r in received]):
        ys = world.combine([o.to(DEVICE) for o in full], these)
        wanted = combine_ref(world.config.topo, outs, batch.expected, batch.num_tokens)
        assert all(bits_equal(y, want) for y, want in zip(ys, wanted, strict=True))


@pytest.mark.parametrize(
    "change, error, said",
    [
        ({"topk_idxs": []}, TypeError, "topk_idxs must be left out where handles is given"),
        ({"path": "rail"}, ValueError, "path must be left out, or the handle's 'joint', got 'rail"),
        ({"static_shapes": True}, ValueError, "static_shapes must be left out, or the handle's"),
        ({"xs": 3}, ValueError, r"xs\[0\] must have the 2 tokens of the handle's dispatch, got 3"),
        ({"handles": None}, TypeError, "topk_idxs must be a list over ranks, got NoneType"),
    ],
)
def test_what_does_not_fit_a_handle_is_refused(change, error, said):
    world = make_world(2, 1, 1)
    batch = make_batch(world, 2)
    handles = [r.handle for r in world.dispatch(*batch.arguments)]
    xs = [torch.zeros(change.get("xs", 2), 8, dtype=torch.bfloat16, device=DEVICE)] * 2
    with pytest.raises(error, match=said):
        world.dispatch(**{"handles": handles, **change, "xs": xs})


# Gradients


class Moe:
    """An MoE layer whose experts are e -> x * scale[e] + x**2, weighted; over ranks, or dense."""

    def __init__(self, world, tokens, hidden=8, dtype=torch.float32):
        self.world, W = world, world.config.topo.num_ranks
        self.scale = torch.randn(world.config.num_experts, hidden, dtype=dtype)
        batch = make_batch(world, tokens)
        self.ids = [idx.to(DEVICE) for idx in batch.topk_idxs]
        self.xs = [torch.randn(t, hidden, dtype=dtype) for t in batch.num_tokens]
        self.weights = [w.to(dtype) for w in batch.topk_weights]
        self.ys = [torch.randn(t, hidden, dtype=dtype) for t in batch.num_tokens]  # of the loss
        self.homes = [
            [e for e, rank in enumerate(world.config.expert_to_rank) if rank == w] for w in range(W)
        ]

    def leaves(self):
        """Return fresh leaves: tokens, weights and experts of every rank."""
        tensors = [*self.xs, *self.weights, self.scale]
        made = [t.clone().to(DEVICE).requires_grad_() for t in tensors]
        W = len(self.xs)
        return made[:W], made[W : 2 * W], made[-1]

    @staticmethod
    def experts(x, ids, weights, scale):
        """Add up weighted experts of each row; ids name rows of `scale`, -1 none."""
        there = ids >= 0
        each = x[:, None] * scale[ids.clamp(min=0)] + (x**2)[:, None]
        return (each * torch.where(there, weights, 0)[:, :, None] * there[:, :, None]).sum(dim=1)

    def loss(self, outs):
        return sum((y * out).sum() for y, out in zip(self.ys, outs, strict=True))

    def dense(self):
        xs, weights, scale = self.leaves()
        ys = [y.to(DEVICE) for y in self.ys]
        outs = [
            self.experts(x, ids, w, scale) for x, ids, w in zip(xs, self.ids, weights, strict=True)
        ]
        sum((y * out).sum() for y, out in zip(ys, outs, strict=True)).backward()
        return [t.grad for t in (*xs, *weights, scale)]

    def spread(self, *, wire_dtype=None, again=False, **form):
        """Return the gradients through the verbs; `again`: what is between is computed anew."""
        leaves = xs, weights, scale = self.leaves()
        given = leaves, wire_dtype, form
        outs = checkpoint(self.layer, *given, use_reentrant=False) if again else self.layer(*given)
        sum((y.to(DEVICE) * o).sum() for y, o in zip(self.ys, outs, strict=True)).backward()
        return [t.grad for t in (*xs, *weights, scale)]

    def layer(self, leaves, wire_dtype, form):
        xs, weights, scale = leaves
        received = self.world.dispatch(xs, self.ids, weights, **form)
        outs = []
        for r, home in zip(received, self.homes, strict=True):
            n = int(r.num_rows)
            out = self.experts(r.x[:n], r.topk_idx[:n], r.topk_weights[:n], scale[home])
            outs.append(torch.cat([out, r.x.new_zeros(len(r.x) - n, out.shape[1])]))
        return self.world.combine(outs, [r.handle for r in received], wire_dtype=wire_dtype)


def close(got, want):
    """Agree to 1e-5 of each tensor's largest entry: sums in another order."""
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape
        if b.numel():
            assert (a - b).abs().max() <= 1e-5 * b.abs().max().clamp(min=1e-30)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_gradients_are_those_of_the_dense_model(path, static):
    world = make_world(2, 2, 2, dtype=torch.float32, staging_records=2)
    moe = Moe(world, [4, 0, 3, 1])
    close(moe.spread(path=path, static_shapes=static), moe.dense())
    with pytest.raises(ValueError, match="out must be 'copy' for gradients of xs and topk_weights"):
        moe.spread(path=path, static_shapes=static, out="view")


@pytest.mark.parametrize(
    "dtype, more",
    [
        *((torch.bfloat16, {}), (torch.float16, {})),
        *((torch.bfloat16, {"wire_dtype": torch.float32}), (torch.float16, {"again": True})),
    ],
)
def test_gradients_of_short_floats_are_exact_where_sums_are(dtype, more):
    """Integers below 256, whatever the order; with `again` in torch's checkpoint."""
    world = make_world(2, 2, 2, dtype=torch.float32, staging_records=2)
    moe = Moe(world, [4, 0, 3, 1], hidden=4, dtype=dtype)
    drawn = {"xs": (-2, 3), "weights": (1, 3), "ys": (-2, 3)}
    for name, ends in drawn.items():
        setattr(moe, name, [torch.randint(*ends, t.shape).to(dtype) for t in getattr(moe, name)])
    moe.scale = torch.randint(-2, 3, moe.scale.shape).to(dtype)
    for got, want in zip(moe.spread(**more), moe.dense(), strict=True):
        assert got.dtype == dtype and torch.equal(got, want) and (want.abs() < 256).all()


def test_experts_alone_may_need_gradients_and_a_rank_without_rows_takes_part():
    world = make_world(2, 1, 1, dtype=torch.float32, num_experts=2)
    ids = [torch.zeros(3, 1, dtype=torch.int64, device=DEVICE)] * 2  # rank 1 receives nothing
    x, w = torch.randn(3, 8, device=DEVICE), torch.ones(3, 1, device=DEVICE)
    scale = torch.ones(1, device=DEVICE, requires_grad=True)
    received = world.dispatch([x, x], ids, [w, w])
    ys = world.combine([r.x * scale for r in received], [r.handle for r in received])
    sum(y.sum() for y in ys).backward()
    assert torch.allclose(scale.grad, 2 * x.sum())
    leaf = x.clone().requires_grad_()
    received = world.dispatch([leaf, x], ids, [w, w])
    outs = [torch.zeros_like(r.x) for r in received]  # depends on nothing
    ys = world.combine(outs, [r.handle for r in received])
    sum(y.sum() for y in ys).backward()
    assert torch.equal(leaf.grad, torch.zeros_like(x))


@pytest.mark.parametrize("of", ["layer", "combine"])
def test_a_checkpoint_runs_no_phase_again_that_it_needs_nothing_of(of, monkeypatch):
    """A combine at its end, which keeps nothing for its backward."""
    world = make_world(2, 1, 1, dtype=torch.float32)
    batch = make_batch(world, 2, dtype=torch.float32)
    phases, run_stages = [], world._run

    def run(stages):
        phases.append(stages[0].__name__)
        return run_stages(stages)

    monkeypatch.setattr(world, "_run", run)
    received = world.dispatch(*batch.arguments)

    def layer(*xs):
        now = world.dispatch(xs, *batch.arguments[1:]) if of == "layer" else received
        outs = [r.x**2 for r in now] if of == "layer" else list(xs)
        return tuple(world.combine(outs, [r.handle for r in now]))

    given = batch.arguments[0] if of == "layer" else [r.x for r in received]
    leaves = [x.detach().clone().requires_grad_() for x in given]
    ys = checkpoint(layer, *leaves, use_reentrant=False)
    phases.clear()
    sum(y.sum() for y in ys).backward()
    assert phases == (["dispatch", "dispatch", "combine"] if of == "layer" else ["dispatch"])
    assert all(leaf.grad is not None for leaf in leaves)


def test_layers_stay_open_and_a_repeated_dispatch_has_gradients():
    world = make_world(2, 2, 2, dtype=torch.float32)
    batch = make_batch(world, 3)
    ids = batch.arguments[1]
    weights = batch.arguments[2]
    xs = [torch.randn(3, 8, device=DEVICE, requires_grad=True) for _ in ids]
    first = world.dispatch(xs, ids, weights)
    handles = [r.handle for r in first]
    second = world.dispatch([2 * x for x in xs], handles=handles)
    assert not second[0].topk_weights.requires_grad
    mixed = [a.x + b.x for a, b in zip(first, second, strict=True)]
    ys = world.combine(mixed, handles)
    more = world.combine([m * 0 + 1 for m in mixed], [r.handle for r in second])
    sum(y.sum() for y in (*ys, *more)).backward()
    held = [
        torch.tensor([len({world.config.expert_to_rank[e] for e in row if e >= 0}) for row in i])
        for i in (idx.tolist() for idx in ids)
    ]
    for x, num_ranks in zip(xs, held, strict=True):
        assert torch.allclose(x.grad, 3.0 * num_ranks.to(DEVICE)[:, None].expand(3, 8))


@pytest.mark.parametrize("by", ["given", "after"])
@pytest.mark.parametrize("through", ["dispatch", "combine"])
def test_a_gradient_that_is_differentiated_in_turn_raises(through, by):
    """A penalty of gradients, by what was given or came after; a part of it has no verbs in it."""
    world = make_world(2, 1, 1, dtype=torch.float32)
    batch = make_batch(world, 2, dtype=torch.float32)
    x, scale, factor = (torch.ones(8, device=DEVICE, requires_grad=True) for _ in range(3))

    def loss():
        if through == "dispatch":
            tokens = [x.expand(2, 8) * 1] * 2
            rows = [r.x for r in world.dispatch(tokens, *batch.arguments[1:])]
            return sum((row**3 * factor).sum() for row in rows) + (x**2).sum()
        received = world.dispatch(*batch.arguments)
        outs = [torch.ones_like(r.x) * scale for r in received]
        ys = world.combine(outs, [r.handle for r in received])
        return sum((y**3 * factor).sum() for y in ys) + (scale**2).sum()

    leaf = x if through == "dispatch" else scale
    (want,) = torch.autograd.grad(loss(), leaf)
    (once,) = torch.autograd.grad(loss(), leaf, create_graph=True)
    assert torch.equal(once, want)
    penalty = (once**2).sum() + (factor**2).sum()
    with pytest.raises(RuntimeError, match="dispatch and combine are first order"):
        torch.autograd.grad(penalty, leaf if by == "given" else factor)


def test_a_gradient_that_could_be_differentiated_may_be_written_to():
    world = make_world(2, 1, 1, dtype=torch.float32)
    batch = make_batch(world, 2, dtype=torch.float32)
    xs = [torch.ones(2, 8, device=DEVICE, requires_grad=True) for _ in range(2)]
    rows = [r.x for r in world.dispatch(xs, *batch.arguments[1:])]
    grads = torch.autograd.grad(sum((row**2).sum() for row in rows), xs, create_graph=True)
    want = [grad.detach() * 2 for grad in grads]
    for grad in grads:
        grad.mul_(2)
    assert all(torch.equal(*each) for each in zip(grads, want, strict=True))


def trained(world, batch, **form):
    """Dispatch tokens that need gradients; return them, and what was received."""
    xs = [torch.randn(len(x), 8, device=DEVICE, requires_grad=True) for x in batch.xs]
    return xs, world.dispatch(xs, *batch.arguments[1:], **form)


def test_views_take_no_gradients_of_experts_either():
    world = make_world(2, 1, 1, dtype=torch.float32)
    batch = make_batch(world, 2, dtype=torch.float32)
    received = world.dispatch(*batch.arguments, out="view")
    outs = [r.x.clone().requires_grad_() for r in received]
    with pytest.raises(ValueError, match=r"handles\[0\] must be of a dispatch with out='copy' for"):
        world.combine(outs, [r.handle for r in received])


def test_an_edit_of_what_gradients_need_is_seen():
    world = make_world(2, 1, 1, dtype=torch.float32)
    batch = make_batch(world, 2)
    weights = [w.to(DEVICE).requires_grad_() for w in batch.topk_weights]
    xs = [torch.zeros(2, 8, device=DEVICE) for _ in batch.xs]
    received = world.dispatch(xs, batch.arguments[1], weights)
    received[0].topk_idx.clamp_(min=0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        sum(r.topk_weights.sum() for r in received).backward()


def test_rows_that_did_not_come_are_zero_for_autograd():
    world = make_world(2, 1, 1, dtype=torch.float32)
    for pe in range(2):
        world.heap.region(pe, "rows", torch.uint8)[:] = 0xFF
    xs, received = trained(world, make_batch(world, 1), static_shapes=True)
    for r in received:
        assert (r.x[int(r.num_rows) :] == 0).all()
    ys = world.combine([r.x**2 for r in received], [r.handle for r in received])
    sum(y.sum() for y in ys).backward()
    assert all(x.grad.isfinite().all() for x in xs)


class Noting(TorchDispatchMode):
    """Note on which stream each operation ran, as `streams` has it by then."""

    def __init__(self, streams):
        super().__init__()
        self.streams, self.ran = streams, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.ran.append((function.overloadpacket.__name__, self.streams[-1]))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("repeats", [False, True])
def test_what_is_done_to_rows_is_done_on_the_stream_of_their_call(repeats, monkeypatch):
    """The stream is a stand-in: test_gpu.py has it on a GPU."""
    world = make_world(1, 1, 1, dtype=torch.float32)
    x, ids, weights = (values[0] for values in make_batch(world, 2).arguments)
    x = torch.ones(2, 8, device=DEVICE, requires_grad=True)
    (first,) = world.dispatch([x.detach()], [ids], [weights], static_shapes=True)
    streams, kept = ["caller's"], []

    @contextmanager
    def on(stream):
        streams.append(stream)
        yield
        streams.pop()

    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(autograd, "keep_until_used", lambda *given: kept.append(given))
    made = replace(first, handle=replace(first.handle, stream="the call's"))
    verbs = autograd.Verbs(dispatch=None, combine=None)
    with Noting(streams) as noted:
        given = [None] if repeats else [weights]
        (received,) = autograd.dispatch(verbs, lambda: [made], [x], given)
    ran = dict(noted.ran)
    assert ran["where"] == "the call's" and ran.get("clone") == ("the call's" if repeats else None)
    assert {name for name, stream in noted.ran if stream == "caller's"} <= {"empty", "detach"}
    assert streams == ["caller's"]
    ((tensors, made_on),) = kept
    assert made_on == "the call's" and [t.data_ptr() for t in tensors] == [
        t.data_ptr() for t in (received.x, received.topk_weights, received.topk_idx)
    ]


def test_a_repeat_without_gradients_forgets_those_of_the_first():
    world = make_world(2, 1, 1, dtype=torch.float32)
    batch = make_batch(world, 2)
    _, received = trained(world, batch)
    handles = [r.handle for r in received]
    again = world.dispatch(
        [x.detach() for x in (torch.ones(2, 8, device=DEVICE),) * 2], handles=handles
    )
    ys = world.combine([r.x for r in again], [r.handle for r in again])
    assert not ys[0].requires_grad


def test_sparse_gradients_and_other_sequences():
    world = make_world(2, 1, 1, dtype=torch.float32)
    batch = make_batch(world, 2)
    xs = deque(torch.ones(2, 8, device=DEVICE, requires_grad=True) for _ in batch.xs)
    received = world.dispatch(xs, *batch.arguments[1:])
    index = [torch.zeros(len(r.x), 8, dtype=torch.int64, device=DEVICE) for r in received]
    picked = [
        torch.gather(r.x, 0, i, sparse_grad=True) if len(i) else r.x
        for r, i in zip(received, index, strict=True)
    ]
    sum(p.sum() for p in picked).backward()
    sent = sum(x.grad.sum() for x in xs)
    assert sent == sum(8 * len(r.x) for r in received)


def test_a_handle_cannot_be_copied():
    world = make_world(1, 1, 1)
    (received,) = world.dispatch(*make_batch(world, 1).arguments)
    for make in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="a handle cannot be copied or pickled"):
            make(received)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float8_e4m3fn])
def test_a_token_that_cannot_be_summed_takes_no_gradients(dtype):
    world = make_world(1, 1, 1, hidden=8, dtype=torch.float64)
    x = torch.zeros(1, 8, device=DEVICE).to(dtype).requires_grad_()
    ids, weights = (
        torch.zeros(1, 1, dtype=torch.int64, device=DEVICE),
        torch.ones(1, 1, device=DEVICE),
    )
    with pytest.raises(ValueError, match=r"xs\[0\] must be torch.float32, .* to require gradients"):
        world.dispatch([x], [ids], [weights])
    with torch.no_grad():
        world.dispatch([x], [ids], [weights])


def train(rank):
    """Gradients in processes: of a layer, and errors where ranks do not agree on them."""
    rw = init(railwave.Topology(2, 2, 2), dtype=torch.float32, device="cpu")
    world = make_world(2, 2, 2, dtype=torch.float32, num_experts=8)
    moe = Moe(world, [4, 0, 3, 1])
    xs, weights, scale = moe.leaves()
    received = rw.dispatch(xs[rank], moe.ids[rank], weights[rank])
    out = moe.experts(received.x, received.topk_idx, received.topk_weights, scale[moe.homes[rank]])
    y = rw.combine(out, received.handle)
    (y * moe.ys[rank]).sum().backward()
    dist.all_reduce(scale.grad)
    grads = [xs[rank].grad, weights[rank].grad, scale.grad]
    dense = moe.dense()
    close(grads, [dense[rank], dense[4 + rank], dense[-1]])

    # All tokens go to rank 0: what the others combine depends on nothing, and yet they take part.
    x = torch.ones(3, 8, requires_grad=True)
    received = rw.dispatch(x, torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1))
    assert len(received.x) == (12 if rank == 0 else 0)
    out = torch.zeros(0, 8) if rank else received.x * 2
    y = rw.combine(out, received.handle)
    y.sum().backward()
    assert torch.equal(y, 2 * x) and torch.equal(x.grad, torch.full((3, 8), 2.0))

    def some():
        x = xs[rank].detach().requires_grad_(rank != 3)
        return rw.dispatch(x, moe.ids[rank], weights[rank].detach())

    assert all("gradients of x" in text for _, text in errors_of(some))
    handle = rw.dispatch(xs[rank].detach(), moe.ids[rank], weights[rank].detach()).handle

    def some_outs():
        return rw.combine(torch.zeros(handle.num_rows, 8).requires_grad_(rank == 0), handle)

    assert all("without gradients" in text for _, text in errors_of(some_outs))
    rw.combine(torch.zeros(handle.num_rows, 8), handle)

    def no_handle():
        out = torch.zeros(handle.num_rows, 8).requires_grad_()
        return rw.combine(out, received if rank == 0 else handle)

    said = errors_of(no_handle)
    assert said[0][0] == "TypeError" and said[1][0] == "PeerError", said
    again = rw.dispatch(xs[rank].detach(), handle=handle)
    assert len(again.x) == handle.num_rows
    said = errors_of(lambda: rw.dispatch(xs[rank][:, :4].detach() if rank else None, handle=handle))
    assert all(kind in ("TypeError", "PeerError") for kind, _ in said)
    dist.barrier()
    rw.close()


@pytest.mark.skipif(ON_GPU, reason="processes on a CPU")
def test_gradients_in_processes():
    run_all(train, 4)
