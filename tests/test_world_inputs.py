"""Whole worlds: any hidden size, dtype and layout, changing from call to call, on one heap."""

import pytest
import torch

from railwave.config import PATHS
from worlds import (
    Batch,
    combine,
    dispatch,
    make_batch,
    make_outs,
    make_world,
    random_values,
    run,
)

pytestmark = pytest.mark.usefixtures("poison_empty")

# Arguments of a dispatch (hidden, dtype, top-k) and of its combine (hidden, dtype).
CALLS = [
    ((2880, torch.float32, 3), (2880, torch.float32)),
    ((1, torch.uint8, 1), (1, torch.float16)),
    ((7, torch.bfloat16, 3), (100, torch.bfloat16)),
    ((100, torch.float16, 2), (7, torch.float16)),
    ((7, torch.float8_e4m3fn, 2), (7, torch.bfloat16)),
    ((1, torch.float32, 3), (1, torch.float32)),
    ((2880, torch.float8_e4m3fn, 1), (2880, torch.bfloat16)),
    ((100, torch.uint8, 3), (100, torch.float32)),
]


def test_case_c1_hidden_dtype_and_top_k_differ_per_call():
    world = make_world(2, 1, 1, hidden=2880, dtype=torch.float32)
    for i, ((hidden, dtype, top_k), (out_hidden, out_dtype)) in enumerate(CALLS):
        batch = make_batch(world, [3, 4], hidden=hidden, dtype=dtype, top_k=top_k)
        outs = make_outs(batch, hidden=out_hidden, dtype=out_dtype)
        combine(batch, dispatch(batch, PATHS[-1 - i % len(PATHS)]), outs)


def every_other_column(a):
    return torch.stack([a, a], dim=2).flatten(1)[:, ::2]


def transposed(a):
    return a.t().contiguous().t()


def split(a):
    return torch.cat([a, a], dim=1).split(a.shape[1], dim=1)[1]


def expanded(a):
    return a[:1].expand(a.shape)


def inner_slice(a):
    rows, columns = a.shape
    padded = a.new_zeros(rows + 2, columns + 3)
    padded[1:-1, 1:-2] = a
    return padded[1:-1, 1:-2]


LAYOUTS = [every_other_column, transposed, split, expanded, inner_slice]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_case_c3_any_strides(layout):
    world = make_world(2, 1, 1)
    plain = make_batch(world, 4)
    given = [[layout(tensor) for tensor in tensors] for tensors in plain.arguments]
    assert not all(tensor.is_contiguous() for tensors in given for tensor in tensors)
    batch = Batch(world, *given)
    outs = [layout(random_values(len(r.x), 7, torch.bfloat16)) for r in batch.expected]
    run(batch, "joint", outs=outs)


def test_results_are_the_callers_own():
    """What was received and summed survives the next dispatch and combine, and may be written."""
    world = make_world(2, 1, 1)
    batch = make_batch(world, 4)
    received = world.dispatch(*batch.arguments)
    ys = world.combine([r.x.fill_(1) for r in received], [r.handle for r in received])
    copies = [y.clone() for y in ys]
    run(make_batch(world, 4), "joint")
    assert all((r.x == 1).all() for r in received)
    assert all(torch.equal(y, copy) for y, copy in zip(ys, copies, strict=True))


def test_arguments_are_not_written():
    world = make_world(2, 1, 1)
    batch = make_batch(world, 4)
    before = [[tensor.clone() for tensor in tensors] for tensors in batch.arguments]
    run(batch, "joint")
    for tensors, copies in zip(batch.arguments, before, strict=True):
        for tensor, copy in zip(tensors, copies, strict=True):
            assert torch.equal(tensor.contiguous().view(torch.uint8), copy.view(torch.uint8))


def test_weights_travel_as_float32():
    world = make_world(2, 1, 1)
    for dtype in (torch.bfloat16, torch.float64):
        batch = make_batch(world, 4)
        dispatch(
            Batch(world, batch.xs, batch.topk_idxs, [w.to(dtype) for w in batch.topk_weights]),
            "rail",
        )


def test_flags_for_negation_are_carried_out():
    """torch may keep -x as a flag beside the memory of x; what travels is -x."""
    world = make_world(2, 1, 1, dtype=torch.float32)
    batch = make_batch(world, 2)
    plain = world.dispatch(
        [-x for x in batch.xs], batch.topk_idxs, [-w for w in batch.topk_weights]
    )
    flagged = [
        [torch._neg_view(a) for a in batch.xs],
        [torch._neg_view(w) for w in batch.topk_weights],
    ]
    got = world.dispatch(flagged[0], batch.topk_idxs, flagged[1])
    for a, b in zip(got, plain, strict=True):
        assert torch.equal(a.x, b.x) and torch.equal(a.topk_weights, b.topk_weights)


def test_a_world_made_in_inference_mode_works_outside():
    with torch.inference_mode():
        world = make_world(2, 1, 1)
    run(make_batch(world, 1), "joint")
