"""A rank whose calls with static shapes are repeated: whatever it calls, as without it.

A process stands for a rank with a GPU: its kernels are interpreted, at addresses, and its streams
are none. So nothing here waits for another rank.
"""

import contextlib
import signal
from threading import Event, Thread

import numpy as np
import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction

import railwave
from processes import run_all
from railwave import graphs, kernels, recorded
from railwave.exchange import Exchange
from railwave.recorded import RecordedHandle
from test_recording import Stream, UnseenTape, unseen

STATIC = {"static_shapes": True}


class Captured:
    """Stands for a graph: what it was captured of is launched when it is replayed."""

    def __init__(self, launch):
        self._launch, self.used = launch, 0

    def replay(self, stream):
        self._launch(Stream(2))


def rank_that_repeats(**sizes):
    """Make a communicator of one rank that records interpreted calls as if they were compiled."""
    patch, stream, run = pytest.MonkeyPatch(), Stream(1), InterpretedFunction.run
    stream.device = torch.device("cpu")
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
    patch.setattr(graphs, "capture", Captured)
    declared = {"num_experts": 2, "top_k": 1, "hidden": 8, "max_tokens_per_rank": 4}
    declared["device"] = "cpu"
    rw = railwave.Communicator(railwave.Topology(1, 1, 1), **{**declared, **sizes})
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


class SameMemory:
    """Stands for torch, whose memory comes back in a loop: each call's n-th tensor lies anew."""

    def __init__(self):
        self.made, self.number = {}, 0

    def __getattr__(self, name):
        return getattr(torch, name)

    def empty_like(self, like, *, memory_format):
        self.number += 1
        new = torch.empty_like(like, memory_format=memory_format)
        return self.made.setdefault((self.number, like.shape, like.dtype), new)


def same_memory(rank):
    """Calls at addresses that came before are graphs, whatever is in that memory now."""
    rw, memory, play = rank_that_repeats(), SameMemory(), recorded.Recorded._play

    def play_again(self, *given):
        memory.number = 0
        return play(self, *given)

    x, ids, weights = batch()
    out = torch.empty_like(x)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorded, "torch", memory)
        patch.setattr(recorded.Recorded, "_play", play_again)
        for _ in range(10):
            for tensor, new in zip((x, ids, weights), batch(), strict=True):
                tensor.copy_(new)
            received = rw.dispatch(x, ids, weights, **STATIC)
            assert torch.equal(received.x, x)
            out.copy_(received.x)
            assert torch.equal(rw.combine(out, received.handle), x)
    repeats = rw._recorded.repeats
    assert repeats == {"dispatch": 8, "combine": 6}
    assert rw._graphs.launched == 8 - 1 + 6 - 1
    rw.close()


def test_calls_in_the_same_memory_are_graphs():
    run_all(same_memory, 1, fresh=True)


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


def ordinary_uses(rank):
    """What is handed out may be written to as new tensors may; other dtypes and rows are read."""
    rw = rank_that_repeats()
    scale = torch.full((8,), 2.0, requires_grad=True)
    for _ in range(5):
        x, ids, weights = batch()
        with torch.no_grad():
            received = rw.dispatch(x, ids, weights.bfloat16(), **STATIC)
        received.x.mul_(scale.bfloat16())
        assert torch.equal(received.x.detach(), 2 * x)
        received.x.detach_()
        with torch.inference_mode():
            inside = rw.dispatch(x, ids, weights, **STATIC, out="view")
        assert inside.x.is_inference()
        with pytest.raises(RuntimeError, match="nference tensor"):
            inside.x.zero_()
        wide = torch.randint(-8, 9, (4, 9)).bfloat16()[:, 1:]  # rows do not start at words
        assert torch.equal(rw.dispatch(wide, ids, weights, **STATIC).x, wide)
    assert rw._recorded.repeats["dispatch"] == 3 * 3
    rw.close()


def test_what_is_handed_out_may_be_used_as_if_it_were_new():
    run_all(ordinary_uses, 1, fresh=True)


def gradients(rank):
    rw = rank_that_repeats()
    for _ in range(6):
        x, ids, weights = batch()
        x.requires_grad_()
        received = rw.dispatch(x, ids, weights, **STATIC)
        y = rw.combine(received.x * 3, received.handle)
        y.backward(torch.ones_like(y))
        assert torch.equal(y, 3 * x) and (x.grad == 3).all()
    assert rw._recorded.repeats["dispatch"] == 4
    rw.close()


def test_gradients_flow_through_repeated_calls():
    run_all(gradients, 1, fresh=True)


def nothing_kept(rank):
    """A call leaves no tensor of its own behind: CUDA graphs of torch.compile would find it."""
    rw = railwave.Communicator(
        railwave.Topology(1, 1, 1), num_experts=2, top_k=1, hidden=8, max_tokens_per_rank=4
    )

    def kept():
        return {n: v.data_ptr() for n, v in vars(rw._exchange).items() if hasattr(v, "data_ptr")}

    before = kept()
    received = rw.dispatch(*batch())
    rw.combine(received.x.clone(), received.handle)
    assert kept() == before and "state" in before
    rw.close()


def test_a_call_leaves_no_tensor_behind():
    run_all(nothing_kept, 1)


def kinds(rank):
    """Whatever a launch may follow from makes another kind; what it may not follow from, none."""
    rw = rank_that_repeats()
    x, ids, weights = batch()
    form = {**STATIC, "out": "copy", "grads": ""}

    def of(x=x, ids=ids, weights=weights, **other):
        return rw._recorded.kind_of_dispatch((x, ids, weights), **{**form, **other})

    wide = torch.zeros(4, 16).bfloat16()
    others = [
        *(of(x[:3]), of(x.half()), of(wide[:, :8]), of(wide.view(-1)[4:36].view(4, 8))),
        *(of(x.clone().requires_grad_()), of(ids=ids.int()), of(weights=weights.double())),
        *(of(out="view"), of(path="native"), of(grads="x"), of(zero_padding=True)),
        of(extras=[weights]),
    ]
    with torch.inference_mode():
        others.append(of())
    assert None not in others and len({of(), *others}) == 1 + len(others)
    assert of() == of(x.clone(), ids.clone(), weights.clone())
    rows = rw._exchange.heap.region(0, "rows", torch.bfloat16)[:32].view(4, 8)
    for none in (of(rows), of(x.to_sparse()), of([x]), of(path=5), of(static_shapes=False)):
        assert none is None
    assert of(expert_alignment=1) is None and of(extras=torch.zeros(4, 1)) is None
    assert torch.func.vmap(lambda row: torch.ones(()) * (of(row) is None))(x[None]).all()

    _, received = repeated(rw)
    handle, out = received.handle, received.x

    def combine(out=out, handle=handle, words=(None, "", False)):
        return rw._recorded.kind_of_combine(out, handle, *words)

    others = [combine(words=(torch.float32, "", False)), combine(words=(None, "out", False))]
    others += [combine(words=(None, "", True)), combine(out.float()), combine(out[:, :4])]
    assert None not in others and len({combine(), *others}) == 1 + len(others)
    assert combine(handle=object()) is None
    rw._turns.last = Stream(2)  # which the handle's dispatch did not run on
    assert combine() is None
    rw.close()


def test_kinds_are_told_apart():
    run_all(kinds, 1, fresh=True)


def undisturbed(rank):
    """A call is an ordinary one where anything else but launches would happen."""
    real = recorded.Recorded._undisturbed
    rw = rank_that_repeats()
    quiet = {
        "torch._C._cuda_getCurrentRawStream": lambda index: 1,
        "torch.cuda.current_device": lambda: None,
        "torch.cuda.is_current_stream_capturing": lambda: False,
        "railwave.recorded.launches_hooked": lambda: False,
    }
    disturbed = {
        "torch._C._cuda_getCurrentRawStream": lambda index: 2,
        "torch.cuda.current_device": lambda: 1,
        "torch.cuda.is_current_stream_capturing": lambda: True,
        "railwave.recorded.launches_hooked": lambda: True,
        "railwave.tracing.taking": lambda: True,
        "torch.autograd.forward_ad._current_level": 0,
    }
    for name in (None, *disturbed):
        with pytest.MonkeyPatch.context() as patch:
            for other, value in quiet.items():
                patch.setattr(other, value, raising=False)
            if name:
                patch.setattr(name, disturbed[name])
            assert real(rw._recorded) == (name is None), name
    rw._turns.last = None
    assert not real(rw._recorded)
    rw.close()


def test_what_disturbs_a_repeat_is_seen():
    run_all(undisturbed, 1, fresh=True)


def two_threads(rank):
    """A call while another thread is in one is refused, and does nothing."""
    rw = rank_that_repeats()
    inside, leave = Event(), Event()
    usable = rw._check_usable

    def slowly():
        inside.set()
        assert leave.wait(60)
        usable()

    rw._check_usable = slowly
    x, ids, weights = batch()
    got = []
    other = Thread(target=lambda: got.append(rw.dispatch(x, ids, weights, **STATIC)))
    other.start()
    assert inside.wait(60)
    calls = [lambda: rw.dispatch(x, ids, weights), lambda: rw.combine(x, None), rw.reset, rw.close]
    for call in calls:
        with pytest.raises(RuntimeError, match="another thread, or a call around this one, is in"):
            call()
    leave.set()
    other.join()
    assert torch.equal(got[0].x, x)
    assert torch.equal(rw.combine(got[0].x, got[0].handle), x)

    def interrupt(*_):
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, interrupt)
    rw._check_usable = lambda: None
    rw._exchange.device_decides = lambda static: 1 // 0  # ends a dispatch early
    for turn in range(1000):  # wherever an interrupt comes, no call is left behind
        try:
            signal.setitimer(signal.ITIMER_REAL, 2e-5 + 1e-6 * (turn % 50))
            while True:
                with contextlib.suppress(ZeroDivisionError):
                    rw.dispatch(x, ids, weights)
        except KeyboardInterrupt:
            pass
    assert not rw._turns.running
    rw.close()


def test_one_thread_at_a_time_is_let_in():
    run_all(two_threads, 1, fresh=True)


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
