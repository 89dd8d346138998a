"""Static shapes, bounded rows, views: the same bytes as without, or an error that loses nothing.

Letters: W ranks, T tokens, H hidden.
"""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import railwave
from heaps import DEVICE, ON_GPU, seeds
from processes import run_all
from railwave import ReceiveOverflowError, Topology, kernels
from railwave.config import PATHS
from railwave.reference import combine_ref
from test_processes import init
from worlds import Batch, bits_equal, bytes_equal, make_batch, make_outs, make_world

FORMS = [(static, out) for static in (False, True) for out in ("copy", "view")]


def check_received(world, received, batch):
    """Check what a dispatch of any form gave: the rows that came, and the shape."""
    for got, want in zip(received, batch.expected, strict=True):
        n = len(want.x)
        assert got.num_rows.shape == () and got.num_rows.dtype == torch.int32
        assert int(got.num_rows) == n
        rows = world.config.max_recv_rows if got.handle.static_shapes else n
        assert len(got.x) == len(got.topk_idx) == len(got.topk_weights) == rows
        for name in ("x", "topk_idx", "topk_weights"):
            assert bytes_equal(getattr(got, name)[:n], getattr(want, name)), name
        assert bytes_equal(got.num_tokens_per_expert, want.num_tokens_per_expert)


def filled(received, outs):
    """Return outputs as large as the rows of `received`: what `outs` holds, then NaN."""
    full = []
    for got, out in zip(received, outs, strict=True):
        more = len(got.x) - len(out)
        rest = torch.full((more, out.shape[1]), torch.nan, dtype=out.dtype)
        full.append(torch.cat([out, rest]).to(DEVICE))
    return full


@settings(max_examples=10)
@given(
    *(seeds, st.integers(1, 4), st.integers(1, 3), st.sampled_from([1, 2, 8])),
    *(st.sampled_from(PATHS), st.booleans(), st.sampled_from(["copy", "view"]), st.booleans()),
)
def test_every_form_gives_the_same_bytes(_, N, G, staging, path, static, out, pipeline):
    world = make_world(N, G, G, staging_records=staging, pipeline=pipeline)
    batch = make_batch(world, [i % 5 for i in range(N * G)])
    outs = make_outs(batch)
    received = world.dispatch(*batch.arguments, path=path, static_shapes=static, out=out)
    check_received(world, received, batch)
    ys = world.combine(filled(received, outs), [r.handle for r in received])
    for y, want in zip(
        ys, combine_ref(world.config.topo, outs, batch.expected, batch.num_tokens), strict=True
    ):
        assert bits_equal(y, want)


@pytest.mark.parametrize("dtype, hidden", [(torch.bfloat16, 7), (torch.float32, 8)])
def test_a_view_is_the_region_and_combine_takes_results_from_there(dtype, hidden):
    world = make_world(2, 2, 2, dtype=dtype, hidden=hidden)
    batch = make_batch(world, 4)
    outs = make_outs(batch)
    received = world.dispatch(*batch.arguments, out="view")
    check_received(world, received, batch)
    for pe, (got, out) in enumerate(zip(received, outs, strict=True)):
        assert got.x.data_ptr() == world.heap.region(pe, "rows", torch.uint8).data_ptr()
        got.x.copy_(out)
    ys = world.combine([r.x for r in received], [r.handle for r in received])
    wanted = combine_ref(world.config.topo, outs, batch.expected, batch.num_tokens)
    for y, want in zip(ys, wanted, strict=True):
        assert bits_equal(y, want)
    assert all(bytes_equal(r.x, out) for r, out in zip(received, outs, strict=True))


def test_a_repeat_hands_out_a_view_that_combine_takes_as_it_is():
    world = make_world(2, 2, 2)
    batch = make_batch(world, 4)
    outs = make_outs(batch)
    handles = [r.handle for r in world.dispatch(*batch.arguments)]
    received = world.dispatch(batch.arguments[0], handles=handles, out="view")
    for got, out in zip(received, outs, strict=True):
        got.x.copy_(out)
    launches, copy_in = [], world._exchanges[0].kernels.reduce.copy_in
    with pytest.MonkeyPatch.context() as patch:

        def watched(*args, **kwargs):
            launches.append(kwargs["most_rows"])
            copy_in(*args, **kwargs)

        patch.setattr(world._exchanges[0].kernels.reduce, "copy_in", watched)
        ys = world.combine([r.x for r in received], [r.handle for r in received])
    assert launches == [0] * 4
    wanted = combine_ref(world.config.topo, outs, batch.expected, batch.num_tokens)
    assert all(bits_equal(y, want) for y, want in zip(ys, wanted, strict=True))


def test_views_may_change_ranks_before_combine():
    world = make_world(2, 1, 1)
    to_both = torch.tensor([[0, 3, 0]] * 4)
    batch = make_batch(world, 4, topk=to_both)
    received = world.dispatch(*batch.arguments, out="view")
    for rank, r in enumerate(received):
        r.x.fill_(rank + 1)
    handles, swapped = [r.handle for r in received], [received[1].x, received[0].x]
    copies = [x.clone() for x in swapped]
    got = world.combine(swapped, handles)
    want = world.combine(copies, handles)
    assert all(bits_equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("path", ["native", "joint"])
@pytest.mark.parametrize("repeat", [False, True])
def test_a_view_may_be_dispatched_again(path, repeat):
    world = make_world(2, 2, 2, max_tokens_per_rank=16)
    batch = make_batch(world, 4)
    views = [r.x for r in world.dispatch(*batch.arguments, out="view")]
    tokens = [len(x) for x in views]
    other = make_batch(world, tokens)
    copies = [x.cpu().clone() for x in views]
    again = Batch(world, copies, other.topk_idxs, other.topk_weights)
    if repeat:
        handles = [r.handle for r in world.dispatch(*other.arguments, path=path, out="view")]
        for view, copy in zip(views, copies, strict=True):
            view.copy_(copy)
        received = world.dispatch(views, handles=handles)
    else:
        received = world.dispatch(views, *again.arguments[1:], path=path)
    assert all(bytes_equal(r.x, w.x) for r, w in zip(received, again.expected, strict=True))


def most_rows(batch):
    return max(len(r.x) for r in batch.expected)


@pytest.mark.parametrize("static, out", FORMS)
@pytest.mark.parametrize("nodes, gpus", [(1, 2), (3, 1), (2, 2)])
def test_rows_beyond_the_bound_are_an_error_and_nothing_is_lost(nodes, gpus, static, out):
    form = {"static_shapes": static, "out": out}
    world = make_world(nodes, gpus, gpus, max_recv_rows=5)
    to_all = torch.arange(world.config.num_experts)[None, :3].repeat(4, 1)
    batch = make_batch(world, 4, topk=to_all)
    most = most_rows(batch)
    assert most > 5
    with pytest.raises(
        ReceiveOverflowError,
        match=rf"would receive {most} rows.*max_recv_rows = 5"
        f"; raise max_recv_rows to {most}",
    ) as caught:
        world.dispatch(*batch.arguments, **form)
    assert caught.value.num_rows == most
    tokens = [2] + [1] * (world.config.topo.num_ranks - 1)
    batch = make_batch(world, tokens, topk=torch.tensor([[0, -1, -1], [0, 0, -1]]))
    received = world.dispatch(*batch.arguments, **form)
    check_received(world, received, batch)
    world.combine([r.x for r in received], [r.handle for r in received])


def test_rows_that_just_fit_do():
    world = make_world(2, 2, 2)
    batch = make_batch(world, 4)
    bound = most_rows(batch)
    torch.manual_seed(0)
    world = make_world(2, 2, 2, max_recv_rows=bound)
    received = world.dispatch(*batch.arguments, static_shapes=True)
    check_received(world, received, batch)
    assert world.config.max_recv_rows == bound
    assert make_world(2, 2, 2, max_recv_rows=10**6).config.max_recv_rows == 16
    size = railwave.workspace(
        Topology(2, 2, 2), num_experts=8, top_k=3, hidden=8, max_tokens_per_rank=4, max_recv_rows=3
    )
    assert size["rows"] == 3 * 4 * (4 + 4 + 4)


@pytest.mark.parametrize(
    "arguments, error, said",
    [
        ({"static_shapes": 1}, TypeError, "static_shapes must be True or False, got 1"),
        ({"out": "both"}, ValueError, "out must be 'copy' or 'view', got 'both'"),
        ({"static_shapes": True, "path": "auto"}, ValueError, "path must be named where static"),
    ],
)
def test_a_wrong_form_is_refused(arguments, error, said):
    world = make_world(1, 1, 1)
    batch = make_batch(world, 1)
    with pytest.raises(error, match=re.escape(said)):
        world.dispatch(*batch.arguments, **arguments)


@pytest.mark.parametrize(
    "arguments, error, said",
    [
        ({"max_recv_rows": 0}, ValueError, "max_recv_rows must be at least 1, got 0"),
        ({"max_recv_rows": 2.5}, TypeError, "max_recv_rows must be an int"),
        ({"num_sms": 0}, ValueError, "num_sms must be at least 1, got 0"),
        ({"pipeline": 1}, TypeError, "pipeline must be True or False, got 1"),
    ],
)
def test_wrong_limits_are_refused(arguments, error, said):
    with pytest.raises(error, match=re.escape(said)):
        make_world(1, 1, 1, **arguments)


def overflow_and_go_on(rank):
    """Too many rows, wrong ids, then a good call: on every rank alike, without a reset."""
    with init(max_recv_rows=6, num_sms=1, pipeline=False, device="cpu") as rw:
        batch = make_batch(rw, 4, topk=torch.tensor([[0, 2, 4]] * 4))
        mine = [values[rank] for values in batch.arguments]
        kept = rw.dispatch(*[values[:1] for values in mine], out="view").x
        for form in ({}, {"static_shapes": True}):
            with pytest.raises(ReceiveOverflowError, match="would receive 16 rows"):
                rw.dispatch(*mine, **form)
            wrong = mine[1].clone()
            wrong[0, 0] = 8 if rank == 2 else 0
            expected = ValueError if rank == 2 else railwave.PeerError
            with pytest.raises(expected, match=r"expert ids in \[0, 8\)"):
                rw.dispatch(mine[0], wrong, mine[2], **form)
            rw.check()
            few = [values[:1] for values in mine]
            received = rw.dispatch(*few, **form)
            assert int(received.num_rows) == (4 if rank in (0, 1, 2) else 0)
            y = rw.combine(received.x, received.handle)
            assert y.shape == few[0].shape
        told = railwave.PeerError if rank != 1 else ValueError
        with pytest.raises(told, match="stream must be None on a CPU"):
            rw.dispatch(*mine, stream=object() if rank == 1 else None)
        received = rw.dispatch(*few, out="view")
        apart = received.x[:, 2:].clone()
        odd = rw.combine(received.x[:, 2:], received.handle)  # a part of the region
        assert bits_equal(odd, rw.combine(apart, received.handle))
    kept.float().sum()  # its memory outlives the object


@pytest.mark.skipif(ON_GPU, reason="processes on a CPU")
def test_an_overflow_is_raised_on_every_rank_and_the_next_call_works():
    run_all(overflow_and_go_on, 4)


def launches(world, call):
    """Return what a call returns, and how many kernels it launched on each PE."""
    told = []
    kernels.tell_launches(lambda kernel, *_: told.append(kernel), interpret=not ON_GPU)
    try:
        result = call()
    finally:
        kernels.tell_launches(None, interpret=not ON_GPU)
    count, rest = divmod(len(told), world.config.topo.num_ranks)
    assert not rest
    return result, count


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("nodes", [1, 2, 4])
@pytest.mark.parametrize("path", ["native", "rail", "permutation", "joint"])
def test_launches(path, nodes, bounded):
    """The README's numbers: six and three a round; three and four a round, however many peers."""
    more = {"max_recv_rows": 8 * nodes - 1} if bounded else {}
    world = make_world(nodes, 2, 2, staging_records=2, paths=[path], **more)
    batch = make_batch(world, 3)  # of 4 that are declared, so that all rows fit
    form = {"path": path, "static_shapes": True}
    received, count = launches(world, lambda: world.dispatch(*batch.arguments, **form))
    rounds = world.config.rounds(path)
    assert count == 6 + 3 * len(rounds) + bounded
    handles = [one.handle for one in received]
    _, count = launches(world, lambda: world.combine([one.x for one in received], handles))
    assert count == 3 + 4 * len(rounds)
