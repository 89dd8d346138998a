"""What travels beside x, and the dtype of sums between nodes.

Letters: N nodes, G GPUs a node, T tokens, H hidden.
"""

import doctest
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import railwave
from heaps import DEVICE, ON_GPU, seeds
from processes import run_all
from railwave.config import PATHS
from railwave.exchange import words
from railwave.reference import combine_ref, group_ref
from test_processes import errors_of, init
from worlds import Batch, bits_equal, bytes_equal, make_batch, make_outs, make_world, random_bits

FP8 = torch.float8_e4m3fn
KINDS = [
    (FP8, 16, [(torch.float32, 2)]),  # a scale for each 8 elements
    (FP8, 5, [(torch.int32, 1), (torch.float64, 1), (torch.uint8, 3)]),  # packed UE8M0, and more
    (torch.bfloat16, 3, [(torch.bfloat16, 1)]),
]


def test_the_examples_hold():
    assert doctest.testmod(words).failed == 0


@settings(max_examples=20)
@given(
    *(seeds, st.integers(1, 3), st.integers(1, 2), st.sampled_from([1, 8]), st.sampled_from(PATHS)),
    *(st.booleans(), st.sampled_from(["copy", "view"]), st.sampled_from(KINDS), st.booleans()),
)
def test_extras_arrive_beside_their_rows(_, N, G, staging, path, static, out, kind, again):
    dtype, hidden, extras = kind
    sizes = dict(hidden=96, dtype=torch.uint8, staging_records=staging)
    world = make_world(N, G, G, **sizes)
    tokens = [i % 4 for i in range(N * G)]
    batch = make_batch(world, tokens, hidden=hidden, dtype=dtype)
    # Each extra tensor as a batch of its own says what must arrive; at odd strides.
    others = [
        Batch(world, [random_bits(t, n, d) for t in tokens], batch.topk_idxs, batch.topk_weights)
        for d, n in extras
    ]
    given_extras = [
        [o.xs[rank].repeat_interleave(2, 1)[:, ::2].to(DEVICE) for o in others]
        for rank in range(N * G)
    ]
    form = {"path": path, "static_shapes": static, "out": out}
    if again:
        first = world.dispatch(*batch.arguments, path=path, static_shapes=static)
        form = {"handles": [r.handle for r in first], "out": out}
        received = world.dispatch(batch.arguments[0], extras=given_extras, **form)
    else:
        received = world.dispatch(*batch.arguments, extras=given_extras, **form)
    for rank, got in enumerate(received):
        n = len(batch.expected[rank].x)
        assert bytes_equal(got.x[:n], batch.expected[rank].x)
        assert len(got.extras) == len(extras)
        for extra, other in zip(got.extras, others, strict=True):
            assert bytes_equal(extra[:n], other.expected[rank].x)
            assert len(extra) == len(got.x)


def test_float8_rows_are_scaled_back_where_they_arrive():
    """A block of 4 elements has a scale: what experts make of a row is what its token was."""
    world = make_world(2, 1, 1, hidden=32, dtype=torch.uint8)
    tokens = [torch.randn(3, 8, device=DEVICE) * 100 for _ in range(2)]
    scales = [x.view(3, 2, 4).abs().amax(dim=2) / 448 for x in tokens]
    quantised = [
        (x.view(3, 2, 4) / s[:, :, None]).to(FP8).view(3, 8)
        for x, s in zip(tokens, scales, strict=True)
    ]
    ids = [torch.tensor([[3], [3], [0]], device=DEVICE)] * 2
    weights = [torch.ones(3, 1, device=DEVICE)] * 2
    received = world.dispatch(
        quantised, ids, weights, extras=[[s.T.contiguous().T] for s in scales]
    )
    rows = torch.cat([r.x.float().view(-1, 2, 4) * r.extras[0][:, :, None] for r in received])
    want = torch.cat([tokens[0][2:], tokens[1][2:], tokens[0][:2], tokens[1][:2]])
    assert torch.allclose(rows.view(-1, 8), want, rtol=2**-4, atol=1e-3)


@pytest.mark.parametrize("alignment", [None, 4])
def test_packed_exponents_at_odd_strides_scale_rows_exactly(alignment):
    """Four UE8M0 exponents an int32, of blocks of 4 elements; in a dispatch and its repeat."""
    world = make_world(2, 1, 1, hidden=64, dtype=torch.uint8)
    T, ids, weights = 3, torch.tensor([[0, 2], [3, -1], [1, 0]]), torch.ones(3, 2)
    form = {"expert_alignment": alignment}
    for _ in range(2):
        xs = [torch.randint(-8, 8, (T, 32)).to(FP8) for _ in range(2)]
        exponents = [torch.randint(112, 143, (T, 8), dtype=torch.uint8) for _ in range(2)]
        packed = [e.view(torch.int32).T.contiguous().T.to(DEVICE) for e in exponents]  # (T, 2)
        routing = (
            [[part.to(DEVICE)] * 2 for part in (ids, weights)] if "handles" not in form else ()
        )
        received = world.dispatch(
            *([x.to(DEVICE) for x in xs], *routing), extras=[[p] for p in packed], **form
        )
        form = {"handles": [r.handle for r in received]}
        pairs = zip(xs, exponents, strict=True)
        tokens = [scaled(x.float(), e) for x, e in pairs]
        wanted = Batch(world, tokens, [ids] * 2, [weights] * 2).expected
        for got, rows in zip(received, wanted, strict=True):
            rows = group_ref(rows, alignment) if alignment else rows
            there = (rows.topk_idx >= 0).reshape(len(rows.x), -1).any(dim=1)
            (extra,) = got.extras
            assert packed[0].stride(0) == 1 and extra.stride(0) > 2  # rows of one tensor
            back = scaled(got.x.float(), extra.view(torch.uint8)).cpu()
            assert torch.equal(back[there], rows.x[there])


def scaled(x, exponents):
    """Multiply blocks of 4 elements by powers of two, whose exponents are 127 too large."""
    scale = torch.ldexp(torch.ones(exponents.shape, device=x.device), exponents.int() - 127)
    return (x.view(len(x), -1, 4) * scale[:, :, None]).view(len(x), -1)


@pytest.mark.parametrize(
    "extras, error, said",
    [
        ([torch.zeros(2, 1)] * 2, TypeError, "extras[0] must be a sequence of tensors, got Tensor"),
        ([[torch.zeros(3, 1)]] * 2, ValueError, "extras[0][0] must have shape (2, n)"),
        (
            [[torch.zeros(2, 0)]] * 2,
            ValueError,
            "extras[0][0] must have shape (2, n) with n from 1",
        ),
        ([[1]] * 2, TypeError, "extras[0][0] must be a tensor, got int"),
        (
            [[torch.zeros(2, 99)]] * 2,
            ValueError,
            "and 1 extra tensors, each from 16 bytes on = 416",
        ),
        ([[torch.zeros(2, 1)], []], ValueError, "extras must have one kind on all ranks"),
        ([[]], ValueError, "extras must have one entry per rank (2), got 1"),
        ([[torch.zeros(2, 1).requires_grad_()]] * 2, ValueError, "[0][0] must not require"),
    ],
)
def test_wrong_extras_are_refused(extras, error, said):
    world = make_world(2, 1, 1, hidden=32)
    batch = make_batch(world, 2, hidden=8)
    there = [
        [e.to(DEVICE) if isinstance(e, torch.Tensor) else e for e in of]
        if isinstance(of, list)
        else of.to(DEVICE)
        for of in extras
    ]
    with pytest.raises(error, match=re.escape(said)):
        world.dispatch(*batch.arguments, extras=there)
    world.dispatch(*batch.arguments)


@settings(max_examples=15)
@given(
    *(seeds, st.integers(1, 3), st.integers(1, 2), st.sampled_from(PATHS)),
    *(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]) for _ in range(2)),
)
def test_sums_travel_in_the_dtype_that_was_asked_for(_, N, G, path, dtype, wire_dtype):
    world = make_world(N, G, G, dtype=torch.float32)
    batch = make_batch(world, 3, dtype=dtype)
    outs = make_outs(batch, dtype=dtype)
    handles = [r.handle for r in world.dispatch(*batch.arguments, path=path)]
    ys = world.combine([out.to(DEVICE) for out in outs], handles, wire_dtype=wire_dtype)
    wanted = combine_ref(
        *(world.config.topo, outs, batch.expected, batch.num_tokens), wire_dtype=wire_dtype
    )
    assert all(bits_equal(y, want) for y, want in zip(ys, wanted, strict=True))


@pytest.mark.parametrize("what", ["ids", "weights"])
def test_routing_that_came_as_extras_may_be_a_view(what):
    """Two levels: what a dispatch brought, in place, routes the next."""
    world = make_world(1, 2, 1, num_experts=2, top_k=1, hidden=32)
    tokens = [torch.rand(4, 4, device=DEVICE) for _ in range(2)]
    ids = [torch.tensor([[0], [1], [0], [1]], device=DEVICE)] * 2
    weights = [torch.rand(4, 1, device=DEVICE) for _ in range(2)]
    sent = [1 - i for i in ids] if what == "ids" else weights
    first = world.dispatch(tokens, ids, weights, extras=[[s] for s in sent], out="view")
    copies = [r.extras[0].clone() for r in first]
    routing = {"ids": ids, "weights": weights}
    xs = [r.x.clone() for r in first]
    got = world.dispatch(xs, *{**routing, what: [r.extras[0] for r in first]}.values())
    want = world.dispatch(xs, *{**routing, what: copies}.values())
    for a, b in zip(got, want, strict=True):
        for name in ("x", "topk_idx", "topk_weights"):
            assert bytes_equal(getattr(a, name), getattr(b, name)), name


def test_a_wrong_wire_dtype_is_refused():
    world = make_world(2, 1, 1, dtype=torch.bfloat16)
    batch = make_batch(world, 2)
    handles = [r.handle for r in world.dispatch(*batch.arguments)]
    outs = [out.to(DEVICE) for out in make_outs(batch)]
    with pytest.raises(TypeError, match="wire_dtype must be float32, bfloat16 or float16, got 3"):
        world.combine(outs, handles, wire_dtype=3)
    with pytest.raises(
        ValueError, match="wire_dtype must let a sum of 8 elements fit the declared"
    ):
        world.combine(outs, handles, wire_dtype=torch.float32)


def in_processes(rank):
    rw = init(railwave.Topology(2, 2, 2), hidden=32, device="cpu")
    batch = make_batch(rw, 3, hidden=8)
    x, ids, weights = [values[rank] for values in batch.arguments]
    scales = [torch.arange(3.0)[:, None] + 10 * r for r in range(4)]
    received = rw.dispatch(x, ids, weights, extras=[scales[rank]])
    other = Batch(rw, scales, batch.topk_idxs, batch.topk_weights)
    assert bytes_equal(received.extras[0], other.expected[rank].x)
    assert all(
        "extras 8 torch.bfloat16" in text
        for _, text in errors_of(lambda: rw.dispatch(x, ids, weights, extras=[x] * (rank == 1)))
    )
    outs = make_outs(batch, dtype=torch.bfloat16, hidden=8)
    y = rw.combine(outs[rank], received.handle, wire_dtype=torch.float32)
    arguments = (rw.config.topo, outs, batch.expected, batch.num_tokens)
    assert bits_equal(y, combine_ref(*arguments, wire_dtype=torch.float32)[rank])
    wire = torch.float32 if rank else None
    said = errors_of(lambda: rw.combine(outs[rank], received.handle, wire_dtype=wire))
    assert all("wire_dtype None" in text for _, text in said)
    rw.close()


@pytest.mark.skipif(ON_GPU, reason="processes on a CPU")
def test_extras_and_wire_dtype_in_processes():
    run_all(in_processes, 4)
