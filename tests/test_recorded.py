"""A rank whose calls with static shapes are repeated: whatever it calls, as without it.

A process stands for a rank with a GPU: its kernels are interpreted, at addresses, and its streams
are none. So nothing here waits for another rank.
"""

import numpy as np
import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction

import railwave
from processes import run_all
from railwave import kernels, recorded
from railwave.exchange import Exchange
from railwave.recorded import RecordedHandle
from test_recording import Stream, UnseenTape, unseen

STATIC = {"static_shapes": True}


def rank_that_repeats(**sizes):
    """Make a communicator of one rank that records interpreted calls as if they were compiled."""
    patch, stream, run = pytest.MonkeyPatch(), Stream(1), InterpretedFunction.run
    patch.setattr(Exchange, "device_decides", lambda self, static: bool(static))
    patch.setattr(Exchange, "stream", lambda self: stream)
    patch.setattr(recorded.Recorded, "_undisturbed", lambda self: True)
    patch.setattr(recorded, "Tape", UnseenTape)
    patch.setattr(torch.cuda, "current_stream", lambda device=None: stream)
    patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    patch.setattr(
        recorded, "tell_launches", lambda tell: kernels.tell_launches(tell, interpret=True)
    )
    patch.setattr(InterpretedFunction, "run", unseen(run))
    declared = {"num_experts": 2, "top_k": 1, "hidden": 8, "max_tokens_per_rank": 4}
    rw = railwave.Communicator(railwave.Topology(1, 1, 1), **{**declared, **sizes}, device="cpu")
    rw._turns.last = stream
    return rw


def batch(tokens=4):
    x = torch.randint(-8, 9, (tokens, 8)).bfloat16()
    return x, torch.randint(0, 2, (tokens, 1)), torch.ones(tokens, 1)


def repeated(rw, tokens=4, times=4, **form):
    """Dispatch and combine until both are repeated; return the last tokens and their `Received`."""
    for _ in range(times):
        x, ids, weights = batch(tokens)
        received = rw.dispatch(x, ids, weights, **STATIC, **form)
        y = rw.combine(received.x.clone(), received.handle)
        assert torch.equal(y, x)
    return x, received


def results(rank):
    """What a caller gets of a repeated call may be used as that of an ordinary one."""
    rw = rank_that_repeats()
    for tokens in (4, 0):
        _, received = repeated(rw, tokens, times=5)
        assert type(received.handle) is RecordedHandle
        y = rw.combine(received.x.clone(), received.handle)
        y += torch.ones_like(y, requires_grad=True)
        rw.combine(received.x.clone(), received.handle).detach_()
    assert rw._recorded.repeats["dispatch"] == 6 and rw._recorded.repeats["combine"] >= 4
    _, received = repeated(rw)
    out = received.x.clone().requires_grad_()
    y = rw.combine(out, received.handle)
    y += 1
    y.backward(torch.ones_like(y))
    assert (out.grad[:4] == 1).all()
    held = [tensor.untyped_storage().data_ptr() for tensor in received.handle.tensors()]
    assert received.handle.recorded.tables.untyped_storage().data_ptr() in held
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = received.handle.nothing
    rw.close()


def test_results_are_the_callers_own():
    run_all(results, 1, fresh=True)


def extras_beside(rank):
    """Scales beside rows of float8, as they came: where they lie is another place each time."""
    rw = rank_that_repeats(hidden=64)
    for out in ("copy", "view"):
        before = rw._recorded.repeats["dispatch"]
        for turn in range(6):
            bits = torch.randint(0, 255, (4, 20), dtype=torch.uint8)
            x, (_, ids, weights) = bits.view(torch.float8_e4m3fn), batch()
            scales = torch.rand(3, 8)[:, 4 * (turn % 2) : 4 + 4 * (turn % 2)].T  # rows at a stride
            odd = torch.randint(0, 99, (4, 1), dtype=torch.int16)
            received = rw.dispatch(x, ids, weights, **STATIC, out=out, extras=[scales, odd])
            assert type(received.extras) is tuple and received.x.dtype == x.dtype
            assert torch.equal(received.x.view(torch.uint8), bits)
            assert torch.equal(received.extras[0], scales)
            assert torch.equal(received.extras[1], odd)
            y = rw.combine(received.extras[0].float().contiguous(), received.handle)
            assert torch.equal(y, scales)
        assert rw._recorded.repeats["dispatch"] == before + 4
    more = {**STATIC, "extras": (scales.clone().requires_grad_(),)}
    with torch.no_grad():
        for _ in range(4):
            rw.dispatch(x, ids, weights, **more)
    with pytest.raises(ValueError, match=r"extras\[0\] must not require gradients"):
        rw.dispatch(x, ids, weights, **more)
    rw.reset()
    rw.close()


def test_extras_are_repeated_too():
    run_all(extras_beside, 1, fresh=True)


def other_calls(rank):
    """Handles of repeated calls, and calls that are none: as if nothing were recorded."""
    rw = rank_that_repeats()
    x, received = repeated(rw, times=6)
    first = received.handle
    again = rw.dispatch(2 * x, handle=first)  # rows lie closer together
    assert again.handle.recorded is None and again.handle.row_words != first.row_words
    for _ in range(3):
        assert torch.equal(rw.combine(again.x.clone(), again.handle), 2 * x)
    counts = rw._recorded.repeats.copy()
    assert torch.equal(rw.combine(received.x.clone(), first), x)  # which is still repeated
    assert rw._recorded.repeats["combine"] == counts["combine"] + 1
    view = rw.dispatch(x, handle=first, out="view")
    with pytest.raises(ValueError, match="out='copy' for gradients"):
        rw.combine(view.x.clone().requires_grad_(), view.handle)

    x, ids, weights = batch()
    for wrong in (0, {}, False, torch.zeros(1), torch.ones(4, 2), np.ones((4, 2))):
        with pytest.raises(TypeError, match="extras must be a sequence of tensors"):
            rw.dispatch(x, ids, weights, **STATIC, extras=wrong)
        rw.reset()
    for wrong in (x.to_sparse(), torch.nested.nested_tensor([x, x], layout=torch.strided)):
        with pytest.raises(TypeError, match="x must be a dense tensor"):
            rw.dispatch(wrong, ids, weights, **STATIC)
        rw.reset()
    repeated(rw, times=1)
    rw.close()


def test_what_is_not_repeated_is_as_before():
    run_all(other_calls, 1, fresh=True)


def compiled_calls(rank):
    rw = rank_that_repeats()

    @torch.compile(fullgraph=True, backend="eager")
    def layer(x, ids, weights):
        received = rw.dispatch(x, ids, weights, **STATIC)
        return rw.combine(received.x, received.handle)

    for _ in range(4):
        x, ids, weights = batch()
        assert torch.equal(layer(x, ids, weights), x)
    assert rw._recorded.repeats == {"dispatch": 0, "combine": 0}
    rw.close()


def test_an_operator_of_a_graph_makes_tables_of_their_own():
    run_all(compiled_calls, 1, fresh=True)


def many_kinds(rank):
    """Kinds that are used stay, and what one call's addresses forbade is tried again."""
    rw = rank_that_repeats()
    recorded.MOST_KINDS = 4
    repeated(rw)
    for tokens in (1, 2, 3, 1, 2, 3):
        x, ids, weights = batch(tokens)
        rw.dispatch(x, ids, weights, **STATIC)
        counts = rw._recorded.repeats["dispatch"]
        repeated(rw, times=1)
        assert rw._recorded.repeats["dispatch"] == counts + 1
    recorded.MOST_KINDS = 256

    both = torch.arange(4).view(4, 1)[:, :1].float()
    for turn in range(5):
        x = batch()[0]
        weights = torch.ones(4, 1) if turn > 1 else both
        ids = torch.zeros(4, 1, dtype=torch.int32)
        ids = ids if turn > 1 else both.view(torch.int32).zero_()  # the very same memory
        rw.dispatch(x, ids, weights, **STATIC)
    counts = rw._recorded.repeats["dispatch"]
    rw.dispatch(x, torch.zeros(4, 1, dtype=torch.int32), torch.ones(4, 1), **STATIC)
    assert rw._recorded.repeats["dispatch"] == counts + 1
    rw.close()


def test_kinds_that_are_used_stay_and_accidents_are_forgotten():
    run_all(many_kinds, 1, fresh=True)
