"""Rows by expert, weights, biases; and every combination of what a call may ask for.

Letters: N nodes, G GPUs a node, W ranks, E experts, K top-k, T tokens, H hidden.
"""

import re
import weakref
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import railwave
from heaps import (
    DEVICE,
    KERNELS,
    ON_GPU,
    seeds,
)
from processes import run_all
from railwave import autograd
from railwave.arguments import check_call
from railwave.config import PATHS, Config
from railwave.reference import combine_ref, gather_ref, group_ref
from test_processes import init
from worlds import (
    Batch,
    bits_equal,
    bytes_equal,
    make_batch,
    make_outs,
    make_world,
    random_bits,
    random_values,
)

FP8 = torch.float8_e4m3fn
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SMALL = {"top_k": 1, "hidden": 8, "dtype": torch.float32, "max_tokens_per_rank": 4}
group = KERNELS.group


def check_rows(received, wanted, case):
    """Check one rank's rows a token against `dispatch_ref`'s."""
    n = len(wanted.x)
    assert bytes_equal(received.x[:n], wanted.x), case
    assert received.topk_idx[:n].tolist() == wanted.topk_idx.tolist(), case
    assert torch.equal(received.topk_weights[:n].cpu(), wanted.topk_weights), case
    assert (received.topk_idx[n:] == -1).all() and (received.topk_weights[n:] == 0).all(), case
    assert received.num_rows.item() == n, case
    assert torch.equal(received.num_tokens_per_expert.cpu(), wanted.num_tokens_per_expert), case


def check_grouped(received, wanted, case, *, zeros):
    """Check one rank's rows by expert against `group_ref`'s; `zeros`: free rows must be so."""
    n = wanted.offsets[-1]
    assert received.topk_idx[:n].tolist() == wanted.topk_idx.tolist(), case
    sure = (wanted.topk_idx >= 0) | zeros
    assert bytes_equal(received.x[:n].cpu()[sure], wanted.x[sure]), case
    assert torch.equal(received.topk_weights[:n].cpu(), wanted.topk_weights), case
    assert (received.topk_idx[n:] == -1).all() and (received.topk_weights[n:] == 0).all(), case
    assert received.num_rows.item() == n, case
    assert received.num_tokens_per_expert.tolist() == wanted.rows_per_expert, case
    assert received.expert_offsets.tolist() == wanted.offsets, case
    static = received.handle.static_shapes
    assert received.rows_per_expert == (None if static else tuple(wanted.rows_per_expert)), case
    assert len(received.x) == n or static, case


# Every dtype on one path, every path with one dtype; all of them in `make soak` and on a GPU.
FEW = [("joint", dtype) for dtype in [*DTYPES, FP8]]
FEW += [("native", torch.float16), ("rail", torch.float32), ("permutation", torch.bfloat16)]
FEW += [("granted", FP8)]
ALL = [
    pytest.param(*both, marks=[] if both in FEW else [pytest.mark.soak])
    for both in product(PATHS, [*DTYPES, FP8])
]


@pytest.mark.parametrize("path, dtype", ALL)
@pytest.mark.usefixtures("poison_empty")
def test_every_combination_gives_the_bits_of_the_reference(dtype, path):
    """Rows a token or by expert, repeated or not, static or not: dispatch, and combine back.

    On 2 nodes of 2 GPUs, a rail each, one rank without tokens; a wave has 2 rounds of 2 records.
    """
    world = make_world(2, 2, 2, hidden=40, dtype=torch.uint8, staging_records=2)
    batch = make_batch(world, [3, 0, 4, 2], hidden=6, dtype=dtype)
    fp8, tokens, routing = dtype == FP8, batch.num_tokens, batch.arguments[1:]
    for alignment, static in product([None, 4], [False, True]):
        form = {"path": path, "static_shapes": static, "expert_alignment": alignment}
        for again in (False, True):
            case = f"alignment {alignment}, static {static}, again {again}"
            parts = [[random_bits(t, 6, dtype) for t in tokens]]
            parts += [[torch.rand(t, 2) for t in tokens]] if fp8 else []
            given = [[part[rank].to(DEVICE) for part in parts] for rank in range(4)]
            more = {"extras": [extras for _, *extras in given]} if fp8 else {}
            zeros = alignment is not None and again == static
            with torch.no_grad():  # with gradients rows are zeroed anyhow
                received = world.dispatch(
                    *([x for x, *_ in given], *(() if again else routing)),
                    **{**form, **more, "zero_padding": zeros},
                )
                form = {"handles": [r.handle for r in received]}
                check_combination(batch, parts, received, alignment, zeros, case)


def check_combination(batch, parts, received, alignment, zeros, case):
    """Check what was received of x and extras, and what a combine makes of it."""
    outs, rows, weights, x = [], [], [] if alignment else None, parts[0]
    routing = batch.topk_idxs, batch.topk_weights
    came = [Batch(batch.world, part, *routing).expected for part in parts]
    for rank, got in enumerate(received):
        wanted = came[0][rank]
        dense, of_row = [[i] for i in range(len(wanted.x))], None
        if alignment:
            grouped = group_ref(wanted, alignment)
            check_grouped(got, grouped, case, zeros=zeros)
            weights.append(got.topk_weights)
            dense, of_row = grouped.places, grouped.topk_weights
        else:
            check_rows(got, wanted, case)
        there = sorted(row for places in dense for row in places)
        for extra, others in zip(got.extras, came[1:], strict=True):
            other = group_ref(others[rank], alignment) if alignment else others[rank]
            assert bytes_equal(extra.cpu()[there], other.x[there]), case
        out = torch.full((len(got.x), 6), torch.nan)
        out = out.to(torch.bfloat16 if x[0].dtype == FP8 else x[0].dtype)
        out[there] = random_values(len(there), 6, out.dtype)
        outs.append(out.to(DEVICE))
        rows.append(gather_ref(out, of_row, dense))
    ys = batch.world.combine(outs, [r.handle for r in received], weights=weights)
    wanted = combine_ref(batch.world.config.topo, rows, came[0], batch.num_tokens)
    for y, want in zip(ys, wanted, strict=True):
        assert bits_equal(y, want), case


@settings(max_examples=8)
@given(
    *(seeds, st.integers(1, 2), st.integers(1, 2), st.sampled_from(DTYPES), st.integers(0, 2)),
    *(st.booleans(), st.booleans(), st.data()),
)
def test_weights_and_biases(_, N, G, dtype, num_biases, by_expert, weighed, data):
    world = make_world(N, G, G, dtype=torch.float32)
    batch = make_batch(world, [i % 4 for i in range(N * G)], dtype=dtype)
    alignment = data.draw(st.integers(1, 5)) if by_expert else None
    received = world.dispatch(*batch.arguments, expert_alignment=alignment)
    outs = [random_values(len(r.x), 5, dtype) for r in received]
    weights = [torch.randn(len(out)) for out in outs] if weighed else None
    bias = [
        [random_values(t, 5, data.draw(st.sampled_from(DTYPES))) for _ in range(num_biases)]
        for t in batch.num_tokens
    ]
    if num_biases == 1:
        bias = [[each[0][0] if len(each[0]) else each[0]] for each in bias]
    given_bias = [
        [b.to(DEVICE) for b in each] if len(each) != 1 else each[0].to(DEVICE) for each in bias
    ]
    ys = world.combine(
        *([out.to(DEVICE) for out in outs], [r.handle for r in received]),
        weights=[w.to(DEVICE) for w in weights] if weighed else None,
        bias=given_bias if num_biases else None,
    )
    if by_expert:
        places = [group_ref(rows, alignment).places for rows in batch.expected]
    else:
        places = [[[i] for i in range(len(out))] for out in outs]
    each = zip(outs, weights or [None] * len(outs), places, strict=True)
    rows = [gather_ref(*of_rank) if by_expert or weighed else of_rank[0] for of_rank in each]
    sizes = batch.expected, batch.num_tokens
    wanted = combine_ref(world.config.topo, rows, *sizes, bias=bias)
    assert all(bits_equal(y, want) for y, want in zip(ys, wanted, strict=True))


@settings(max_examples=6)
@given(seeds, st.integers(1, 3), st.integers(1, 2), st.sampled_from([None, 1, 3]), st.booleans())
def test_weights_come_back_to_their_tokens(_, N, G, alignment, static):
    """As they arrived; of an expert that a token names twice, by expert, the sum at both."""
    world = make_world(N, G, G, hidden=1, dtype=torch.uint8)
    batch = make_batch(world, 3)
    form = {"expert_alignment": alignment, "static_shapes": static}
    received = world.dispatch(*batch.arguments, **form)
    handles = [r.handle for r in received]
    if not static:
        back = world.combine_weights([r.topk_weights for r in received], handles)
    else:  # what rows beyond those that came hold does not matter
        spoilt = [r.topk_weights.clone() for r in received]
        for weights, r in zip(spoilt, received, strict=True):
            weights[int(r.num_rows) :] = torch.nan
        back = world.combine_weights(spoilt, handles)
    for got, ids, weights in zip(back, batch.topk_idxs, batch.topk_weights, strict=True):
        want = torch.where(ids >= 0, weights, 0)
        if alignment:
            same = ids[:, :, None] == ids[:, None, :]
            want = torch.where(ids >= 0, (same * want[:, None, :]).sum(dim=2), 0)
        assert torch.allclose(got.cpu(), want, rtol=1e-6, atol=0)


def moe(grouped, x, ids, weights, expert_weights, world, alignment, static):
    """One layer's loss of all ranks, by rows a token or by expert."""
    form = {"expert_alignment": alignment, "static_shapes": static}
    received = world.dispatch(x, ids, weights, **form)
    outs = []
    for rank, r in enumerate(received):
        first = sum(world.config.experts_per_rank[:rank])
        if alignment:
            experts = expert_weights[first + r.topk_idx.clamp(min=0)]
            outs.append(torch.tanh((r.x[:, None] @ experts)[:, 0]))
        else:
            experts = expert_weights[first + r.topk_idx.clamp(min=0)]
            each = torch.tanh((r.x[:, None, None] @ experts)[:, :, 0])
            outs.append((each * r.topk_weights[:, :, None]).sum(dim=1))
    handles = [r.handle for r in received]
    given_weights = [r.topk_weights for r in received] if alignment else None
    bias = [grouped["shared"], None] + [[grouped["shared"], x_] for x_ in x[2:]]
    return world.combine(outs, handles, weights=given_weights, bias=bias)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("alignment", [1, 4])
def test_gradients_by_expert_are_those_of_a_dense_model(alignment, static):
    """Of tokens, weights (applied in combine), experts and biases, and -1 and repeats among ids."""
    world = make_world(2, 2, 2, hidden=8, dtype=torch.float32)
    batch = make_batch(world, [4, 0, 3, 2], hidden=8)
    xs = [torch.randn(t, 8, device=DEVICE) for t in batch.num_tokens]
    ids, weights = batch.arguments[1:]
    experts = torch.randn(8, 8, 8, device=DEVICE) / 3
    shared = torch.randn(8, device=DEVICE)
    leaves = [*xs, *weights, experts, shared]
    grads = []
    for dense in (False, True):
        for leaf in leaves:
            leaf.grad = None
            leaf.requires_grad_()
        if dense:
            ys = []
            for rank, (x, i, w) in enumerate(zip(xs, ids, weights, strict=True)):
                each = torch.tanh((x[:, None, None] @ experts[i.clamp(min=0)])[:, :, 0])
                y = (each * torch.where(i >= 0, w, 0)[:, :, None]).sum(dim=1)
                ys.append(y + (0 if rank == 1 else shared) + (x if rank >= 2 else 0))
        else:
            ys = moe({"shared": shared}, xs, ids, weights, experts, world, alignment, static)
        sum((y * torch.arange(1, 9, device=DEVICE)).sum() for y in ys).backward()
        grads.append([leaf.grad.clone() for leaf in leaves])
    for got, want in zip(*grads, strict=True):
        assert torch.allclose(
            got, want, rtol=0, atol=1e-5 * want.abs().max().item() if len(want) else 0
        )


@pytest.mark.parametrize(
    "form, error, said",
    [
        ({"expert_alignment": 0}, ValueError, "expert_alignment must be from 1 to 65536 rows, got"),
        ({"expert_alignment": True}, TypeError, "expert_alignment must be an int or None, got Tru"),
        ({"zero_padding": True}, ValueError, "zero_padding must be False without expert_alignment"),
        ({"zero_padding": 1}, TypeError, "zero_padding must be True or False, got 1"),
        (
            {"expert_alignment": 4, "out": "view"},
            ValueError,
            "out must be 'copy' with expert_align",
        ),
    ],
)
def test_wrong_grouping_is_refused(form, error, said):
    world = make_world(2, 1, 1)
    batch = make_batch(world, 2)
    with pytest.raises(error, match=re.escape(said)):
        world.dispatch(*batch.arguments, **form)
    received = world.dispatch(*batch.arguments)
    with pytest.raises(ValueError, match="expert_alignment must be left out, or the handle's None"):
        world.dispatch(batch.arguments[0], handles=[r.handle for r in received], expert_alignment=2)


@pytest.mark.parametrize(
    "form, error, said",
    [
        ({"weights": [1, 2]}, TypeError, "weights[0] must be a tensor, got int"),
        ({"weights": [torch.ones(1, 1)] * 2}, ValueError, "weights[0] must have 1 dimension, got"),
        ({"weights": [torch.ones(99)] * 2}, ValueError, "weights[0] must have one for each of the"),
        ({"weights": [torch.ones(2).half()] * 2}, TypeError, "weights[0] must be float32, got"),
        ({"weights": torch.ones(2)}, TypeError, "weights must be a list over ranks, got Tensor"),
        ({"bias": [torch.ones(3)] * 2}, ValueError, "bias[0] must have shape (2, 8) or (8,), got"),
        ({"bias": [torch.ones(8).int()] * 2}, TypeError, "bias[0] must be float32, bfloat16 or"),
        ({"bias": [[torch.ones(8)] * 3] * 2}, ValueError, "bias[0] must be one tensor or two, got"),
        ({"bias": [None, "xyz"]}, TypeError, "bias[1] must be a tensor, got str"),
        ({"bias": [[torch.ones(8), torch.ones(3)]] * 2}, ValueError, "bias[0][1] must have shape"),
        ({"bias": [None]}, ValueError, "bias must have one entry per rank (2), got 1"),
    ],
)
def test_wrong_weights_and_biases_are_refused(form, error, said):
    world = make_world(2, 1, 1)
    batch = make_batch(world, 2)
    received = world.dispatch(*batch.arguments)
    outs, handles = make_outs(batch), [r.handle for r in received]
    outs = [out.to(DEVICE) for out in outs]
    there = {
        name: [v.to(DEVICE) if isinstance(v, torch.Tensor) else v for v in value]
        if isinstance(value, list) and not isinstance(value[0], list)
        else [[b.to(DEVICE) for b in each] for each in value]
        if isinstance(value, list)
        else value.to(DEVICE)
        for name, value in form.items()
    }
    with pytest.raises(error, match=re.escape(said)):
        world.combine(outs, handles, **there)
    world.combine(outs, handles)


@pytest.mark.parametrize(
    "change, error, said",
    [
        (lambda w: w.double(), TypeError, "topk_weights[0] must be float32, got"),
        (
            lambda w: w[:1],
            ValueError,
            "topk_weights[0] must have the shape of the weights received",
        ),
        (lambda w: w.clone().requires_grad_(), ValueError, "topk_weights[0] must not require"),
        (lambda w: None, TypeError, "topk_weights[0] must be a tensor, got NoneType"),
    ],
)
def test_wrong_weights_to_bring_back_are_refused(change, error, said):
    world = make_world(2, 1, 1)
    batch = make_batch(world, 3, topk=torch.zeros(3, 2))
    received = world.dispatch(*batch.arguments)
    handles = [r.handle for r in received]
    with pytest.raises(error, match=re.escape(said)):
        world.combine_weights([change(r.topk_weights) for r in received], handles)


@pytest.mark.parametrize("by_expert", [False, True])
@pytest.mark.parametrize("own", [False, True])
def test_weights_and_biases_may_be_views_of_rows_that_arrived(by_expert, own):
    """Of this rank's or of another's: they are read before the rows are written over."""
    world = make_world(2, 1, 1, num_experts=2, hidden=64, dtype=torch.float32)
    ids = [torch.tensor([[0, 1]] * 4, device=DEVICE)] * 2
    xs = [torch.rand(4, 64, device=DEVICE) for _ in range(2)]
    form = {"expert_alignment": 1} if by_expert else {}
    first = world.dispatch(xs, ids, [torch.ones(4, 2, device=DEVICE)] * 2, **form)
    views = world.dispatch(xs, ids, [torch.ones(4, 2, device=DEVICE)] * 2, out="view")
    pick = (lambda rank: rank) if own else (lambda rank: 1 - rank)
    weights = [views[pick(rank)].x[0, :8] for rank in range(2)]
    bias = [views[pick(rank)].x[:4] for rank in range(2)]
    outs, handles = [torch.rand(8, 64, device=DEVICE) for _ in range(2)], [r.handle for r in first]
    copies = {"weights": [w.clone() for w in weights], "bias": [b.clone() for b in bias]}
    got = world.combine(outs, handles, weights=weights, bias=bias)
    want = world.combine(outs, handles, **copies)
    assert all(bits_equal(a, b) for a, b in zip(got, want, strict=True))


def test_weights_are_not_multiplied_into_a_view():
    world = make_world(2, 1, 1)
    batch = make_batch(world, 2)
    received = world.dispatch(*batch.arguments, out="view")
    outs, handles = [r.x for r in received], [r.handle for r in received]
    weights = [torch.ones(len(out), device=DEVICE) for out in outs]
    with pytest.raises(ValueError, match=r"weights\[0\] must be None where outs\[0\] is a view"):
        world.combine(outs, handles, weights=weights)
    world.combine(outs, handles)


def test_biases_are_not_kept_and_only_those_that_need_gradients_have_some(monkeypatch):
    world = make_world(2, 1, 1, dtype=torch.float32)
    batch = make_batch(world, 2)
    received = world.dispatch(*batch.arguments)
    leaves = [torch.ones(2, 8, device=DEVICE, requires_grad=True) for _ in range(2)]
    given = [[leaf * 2, leaf.detach().clone()] for leaf in leaves]
    kept = [weakref.ref(bias) for of_rank in given for bias in of_rank]
    outs = [torch.zeros(len(r.x), 8, device=DEVICE) for r in received]
    ys = world.combine(outs, [r.handle for r in received], bias=given)
    del given
    assert not any(bias() is not None for bias in kept)
    made = []
    monkeypatch.setattr(autograd, "of_bias", lambda dy, *form: made.append(form) or dy)
    sum(y.sum() for y in ys).backward()
    assert made == [(2, torch.float32)] * 2
    assert all(torch.equal(leaf.grad, torch.full_like(leaf, 2)) for leaf in leaves)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("alignment", [None, 4])
@pytest.mark.parametrize("leaves", ["experts", "all"])
@pytest.mark.usefixtures("poison_empty")
def test_what_rows_without_a_token_hold_reaches_no_gradient(static, alignment, leaves):
    """x, weights and results of theirs may be NaN; experts' gradients sum over all rows."""
    world = make_world(2, 1, 1, hidden=8, dtype=torch.float32)
    batch = make_batch(world, 3, hidden=8, topk=torch.tensor([[0, 1], [2, 0], [3, -1]]))
    xs = [torch.randn(3, 8, device=DEVICE) for _ in range(2)]
    ids, weights = batch.arguments[1:]
    experts = torch.eye(8, device=DEVICE).requires_grad_()
    if leaves == "all":
        for leaf in (*xs, *weights):
            leaf.requires_grad_()
    elif static:
        pytest.skip("x of rows that did not come is the caller's to mask, then")
    form = {"static_shapes": static, "expert_alignment": alignment}
    received = world.dispatch(xs, ids, weights, **form)
    factors = []
    for r in received:
        factor = r.topk_weights if alignment else r.topk_weights.sum(dim=1)
        factors.append(factor / factor.detach())  # NaN where a row is of no token
    outs, handles = [r.x @ experts for r in received], [r.handle for r in received]
    sum(y.sum() for y in world.combine(outs, handles, weights=factors)).backward()
    assert experts.grad.isfinite().all() and experts.grad.any()
    for leaf in (*xs, *weights):
        assert leaf.grad is None or leaf.grad.isfinite().all()


def test_gradients_of_float8_tokens_are_refused_before_anything_moves():
    world = make_world(2, 1, 1, hidden=8, dtype=torch.float32)
    batch = make_batch(world, 3, hidden=8)
    xs = [torch.randn(3, 8, device=DEVICE, requires_grad=True).to(FP8) for _ in range(2)]
    with pytest.raises(ValueError, match=r"xs\[0\] must be torch.float32, torch.bfloat16"):
        world.dispatch(xs, *batch.arguments[1:])
    world.dispatch([x.detach() for x in xs], *batch.arguments[1:])


def test_more_rows_than_an_int32_counts_are_refused():
    config = Config(topo=railwave.Topology(2, 1, 1), num_experts=100_000, **SMALL)
    call = torch.ones(2, 8), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1)
    with pytest.raises(ValueError, match=r"expert_alignment must keep the most rows .* below 2"):
        check_call(config, *call, expert_alignment=2**16)
    check_call(config, *call, expert_alignment=2)


def layer(rank, alignment):
    """Rows by expert through processes: weights applied, a bias, gradients, a repeat."""
    rw = init(railwave.Topology(2, 2, 2), hidden=8, dtype=torch.float32)
    batch = make_batch(rw, [3, 0, 2, 4], hidden=8, dtype=torch.float32)
    x, ids, weights = (values[rank] for values in batch.arguments)
    x = torch.randn(x.shape).to(x.device).requires_grad_()
    received = rw.dispatch(x, ids, weights, expert_alignment=alignment if rank else None)
    again = rw.dispatch(x.detach(), handle=received.handle)
    real = received.topk_idx >= 0 if rank else torch.full((len(again.x),), True)
    assert torch.equal(again.x[real], received.x.detach()[real])
    given_weights = received.topk_weights if rank else received.topk_weights.sum(dim=1)
    bias = torch.ones(8, device=x.device)
    y = rw.combine(received.x * 2, received.handle, weights=given_weights, bias=bias)
    total = torch.where(ids >= 0, weights, 0).sum(dim=1, keepdim=True)
    assert torch.allclose(y, 1 + 2 * x * total, rtol=1e-5, atol=1e-6)
    y.sum().backward()
    assert torch.allclose(x.grad, (2 * total).expand_as(x), rtol=1e-5, atol=1e-6)
    back = rw.combine_weights(received.topk_weights.detach(), received.handle)
    assert back.shape == ids.shape
    with pytest.raises(railwave.PeerError if rank else ValueError, match=r"rank 0|topk_weights"):
        rw.combine_weights(
            received.topk_weights.detach()[: -1 if not rank else None], received.handle
        )
    rw.close()


@pytest.mark.skipif(ON_GPU, reason="processes on a CPU")
def test_processes_may_differ_in_how_their_rows_lie():
    run_all(layer, 4, 4)
