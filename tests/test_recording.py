"""Calls that are launched as they were before: real kernels, with the addresses of other tensors.

What a GPU is given, addresses, the interpreter is given as tensors at these addresses.
"""

import ctypes
from threading import Thread

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes
from triton.runtime.interpreter import InterpretedFunction

from railwave.arguments import check_call, check_out
from railwave.exchange import Exchange, combine, dispatch
from railwave.graphs import Graphs
from railwave.kernels import load, tell_launches
from railwave.recorded import Recorded, _combine_of, _dispatch_of, persistent
from railwave.recording import Recording, Tape, Turn
from railwave.turns import Turns
from worlds import bits_equal, bytes_equal, make_batch, make_world

CPU = torch.device("cpu")


class Stream:
    """Stands for one of a GPU's; notes what it waits for."""

    def __init__(self, number, log=None):
        self.cuda_stream, self.log = number, log

    def record_event(self, event):
        event.append(self.cuda_stream)
        return event

    def wait_event(self, event):
        self.log.append((self.cuda_stream, "waits for", event[-1]))


class AtAddresses:
    """An interpreted kernel that is launched as a compiled one: with addresses."""

    function = packed_metadata = None

    def __init__(self, kernel, tensors):
        self.kernel, self.tensors = kernel, tensors  # {argument: a tensor like the one it takes}

    def run(self, x, y, z, stream, function, metadata, about, enter, leave, *args):
        args = list(args)
        for i, like in self.tensors.items():
            if like.numel():
                args[i] = tensor_at(args[i], like)
        self.kernel(*args)


def tensor_at(address, like):
    pairs = zip(like.shape, like.stride(), strict=True)
    size = (1 + sum((n - 1) * stride for n, stride in pairs)) * like.itemsize
    memory = torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)
    return memory.view(like.dtype).as_strided(like.shape, like.stride())


def unseen(run):
    """Return what runs unnoticed by a tape: interpreted launches call torch, others do not."""

    def run_unseen(*args, **options):
        with _disable_current_modes():
            return run(*args, **options)

    return run_unseen


class UnseenTape(Tape):
    """A tape of interpreted launches."""

    def launched(self, kernel, grid, args, constants):
        tensors = {i: arg for i, arg in enumerate(args) if isinstance(arg, torch.Tensor)}
        super().launched(AtAddresses(unseen(kernel), tensors), grid, args, constants)


def run_taped(exchanges, stages, given, monkeypatch):
    """Run all PEs' stages in turn; return each one's tape and what it gives."""
    tapes = [UnseenTape(one, persistent(pe)) for pe, one in zip(exchanges, given, strict=True)]
    results, running = {}, dict(enumerate(stages))
    waits = {pe: list for pe in running}
    with monkeypatch.context() as patched:
        patched.setattr(InterpretedFunction, "run", unseen(InterpretedFunction.run))
        while running:
            for pe in [pe for pe in running if not exchanges[pe].late(waits[pe]())]:
                tell_launches(tapes[pe].launched, interpret=True)
                try:
                    with tapes[pe]:
                        waits[pe] = next(running[pe])
                except StopIteration as stop:
                    results[pe] = stop.value
                    del running[pe]
                finally:
                    tell_launches(None, interpret=True)
    return tapes, [results[pe] for pe in range(len(stages))]


def play_together(recordings, given):
    """Play one launch of every PE after another; return each PE's pieces of memory."""
    pieces, starts = [], []
    for recording, tensors in zip(recordings, given, strict=True):
        made = [torch.empty(like.shape, dtype=like.dtype) for like in recording.pieces]
        made[-1].fill_(0xFF)
        pieces.append(made)
        starts.append([tensor.data_ptr() for tensor in (*made, *tensors)])
    for launches in zip(*(recording._steps for recording in recordings), strict=True):
        for recording, launch, begin in zip(recordings, launches, starts, strict=True):
            mine = [one for one in recording._addresses if one[0] is launch.arguments]
            Recording([launch], mine, ()).play(begin, Stream(0))
    return pieces


def written(handle):
    """Yield what a dispatch writes of its handle's tables: the rest is anything."""
    node = handle.exchange.node
    yield from (handle.received, handle.num_records, handle.out_load, handle.in_load)
    yield handle.own_rows[: handle.num_tokens]
    for d, records in enumerate(handle.num_records.tolist()):
        yield handle.record_token[d, :records]
        if d != node:
            yield handle.proxy[d, :records]
            yield handle.slot[d, :records]
    for s, records in enumerate(handle.in_load[:, handle.exchange.local].tolist()):
        if s != node:
            yield handle.in_rows[s, :records]


def check_calls(batch, path, out):
    arguments = zip(batch.xs, batch.topk_idxs, batch.topk_weights, strict=True)
    form = {"path": path, "static_shapes": True, "out": out}
    return [check_call(batch.world.config, *one, **form) for one in arguments]


def given_of(calls):
    return [(call.x, call.topk_idx, call.topk_weights) for call in calls]


@pytest.mark.parametrize("nodes, path", [(2, "native"), (2, "joint"), (1, "joint")])
@pytest.mark.parametrize("out", ["copy", "view"])
def test_a_dispatch_and_its_combine_are_repeated_with_other_tensors(nodes, path, out, monkeypatch):
    torch.manual_seed(0)
    world = make_world(nodes, 2, 2, paths=[path])
    exchanges = world._exchanges
    monkeypatch.setattr(Exchange, "device_decides", lambda *_: True)
    remembered = [Recorded(pe, Turns(CPU), Graphs()) for pe in exchanges]

    first = check_calls(make_batch(world, 4), path, out)
    stages = [dispatch(pe, call) for pe, call in zip(exchanges, first, strict=True)]
    tapes, received = run_taped(exchanges, stages, given_of(first), monkeypatch)
    kept = [_dispatch_of(*one) for one in zip(tapes, received, exchanges, strict=True)]
    assert all(kept), [tape.refused for tape in tapes]

    def repeat(batch):
        calls = check_calls(batch, path, out)
        pieces = play_together([one.recording for one in kept], given_of(calls))
        for pe in exchanges:
            pe.advance()
        each = zip(remembered, kept, pieces, strict=True)
        return [one._received(*made) for one, *made in each]

    def same(batch):
        """Repeat the dispatch; return the handles, and those of an ordinary one."""
        again = repeat(batch)
        rows = [{n: getattr(r, n).clone() for n in ("x", "topk_idx", "num_rows")} for r in again]
        tables = [[table.clone() for table in written(one.handle)] for one in again]
        form = {"static_shapes": True, "out": "copy", "path": path}
        wanted = world.dispatch(batch.xs, batch.topk_idxs, batch.topk_weights, **form)
        for got, made, want in zip(rows, tables, wanted, strict=True):
            num_rows = int(want.num_rows)
            assert num_rows == int(got["num_rows"])
            assert bytes_equal(got["x"][:num_rows], want.x[:num_rows])
            assert bytes_equal(got["topk_idx"], want.topk_idx)
            assert all(map(torch.equal, made, written(want.handle)))
        return [one.handle for one in again], [one.handle for one in wanted]

    other = make_batch(world, 4)
    handles, _ = same(other)
    outs = [torch.randn(world.config.max_recv_rows, 8).bfloat16() for _ in exchanges]

    def combining(handles, outs):
        checked = [
            check_out(world.config, out, handle)[0]
            for out, handle in zip(outs, handles, strict=True)
        ]
        stages = [combine(*one) for one in zip(exchanges, checked, handles, strict=True)]
        given = [
            (out, handle.recorded.tables) for out, handle in zip(checked, handles, strict=True)
        ]
        return stages, given

    stages, given = combining(handles, outs)
    tapes, ys = run_taped(exchanges, stages, given, monkeypatch)
    combines = [_combine_of(*one) for one in zip(tapes, ys, strict=True)]
    assert all(combines), [tape.refused for tape in tapes]

    third = make_batch(world, 4)
    handles, ordinary = same(third)
    outs = [torch.randn(world.config.max_recv_rows, 8).bfloat16() for _ in exchanges]
    given = combining(handles, outs)[1]
    pieces = play_together([one.recording for one in combines], given)
    for pe in exchanges:
        pe.advance()
    wanted = world.combine(outs, ordinary)
    for one, made, want in zip(combines, pieces, wanted, strict=True):
        assert bits_equal(made[one.y], want)


def taped(run, *, given=(), kept=()):
    """Take down what `run(tape)` does, and what is made of it where it returns it."""
    tape = Tape(given, kept)
    with tape:
        made = run(tape)
    return tape, tape.recording([] if made is None else [made])


def launch(tape, *args):
    tape.launched("a kernel", (1, 1, 1), args, [7])


def test_an_address_is_that_of_the_memory_it_was_in():
    given, kept = torch.arange(6)[1:5], torch.zeros(3)

    def run(tape):
        table, out = torch.empty(2, 3, dtype=torch.int32), torch.empty(4)
        launch(tape, table, table[1], out.view(2, 2)[1], given[1:], kept[1:], 5)
        return out

    _, recording = taped(run, given=[given], kept=[kept])
    sizes = [(tuple(like.shape), like.dtype) for like in recording.pieces]
    assert sizes == [((4,), torch.float32), ((256,), torch.uint8)]
    assert all(like.untyped_storage().nbytes() <= 4 for like in recording.pieces)
    started = []
    recording._steps = [recording._steps[0]._replace(kernel=Started(started))]
    recording.play([1000, 2000, 3000], Stream(9))
    assert started == [(1, 1, 1, 9, 2000, 2012, 1008, 3008, kept[1:].data_ptr(), 5, 7)]


class Started:
    function = packed_metadata = None

    def __init__(self, started):
        self.started = started

    def run(self, x, y, z, stream, *rest):
        self.started.append((x, y, z, stream, *rest[5:]))


def fill(tape):
    torch.empty(3).zero_()


def make_zeros(tape):
    torch.zeros(3)


def copy(tape):
    launch(tape, torch.empty(1).clone())


def take_others(tape):
    launch(tape, OTHER)


@pytest.mark.parametrize(
    "run, why",
    [
        (fill, "aten.zero_"),
        (make_zeros, "aten.zero"),
        (copy, "aten.clone"),
        (take_others, "argument 0"),
    ],
)
def test_what_is_not_launches_alone_is_not_recorded(run, why):
    tape, recording = taped(run)
    assert recording is None
    assert why in tape.refused


OTHER = torch.zeros(2)


def test_tensors_in_one_another_are_not_recorded():
    both = torch.zeros(4, 2)
    tape, recording = taped(lambda tape: launch(tape, both), given=[both[:, 0], both[:, 1]])
    assert recording is None
    assert "in one another" in tape.refused


def test_launches_of_another_thread_are_not_this_calls():
    told, kernels = [], load(interpret=True)
    clock = torch.zeros(1, dtype=torch.int64)
    tell_launches(lambda *launch: told.append(launch), interpret=True)
    try:
        thread = Thread(target=kernels.wire.stamp, args=(clock,))
        thread.start()
        thread.join()
        assert clock.item() and not told
        kernels.wire.stamp(clock)
        assert len(told) == 1
    finally:
        tell_launches(None, interpret=True)
    kernels.wire.stamp(clock)
    assert len(told) == 1


def test_what_was_launched_beside_a_put_is_launched_there_again():
    own, other, somebodys = (Stream(number) for number in (1, 2, 3))
    here = [own, other, own]
    tape = Tape([], [], lambda: here.pop(0), own, other)
    launch(tape)
    tape.turned(Turn.FORK)
    launch(tape)
    tape.turned(Turn.JOIN)
    launch(tape)
    recording, log = tape.recording([]), []
    recording._steps = [
        step if isinstance(step, Turn) else step._replace(kernel=Started(log))
        for step in recording._steps
    ]
    forked, joined = [], []
    recording.play([0], Stream(8, log), Stream(9, log), (forked, joined))
    waits = [(9, "waits for", 8), (8, "waits for", 9)]
    assert log == [(1, 1, 1, 8, 7), waits[0], (1, 1, 1, 9, 7), waits[1], (1, 1, 1, 8, 7)]
    assert (forked, joined) == ([8], [9])

    class Ends:
        function = packed_metadata = None

        def run(self, *args):
            raise KeyboardInterrupt

    log.clear()
    recording._steps[2] = recording._steps[2]._replace(kernel=Ends())
    with pytest.raises(KeyboardInterrupt):
        recording.play([0], Stream(8, log), Stream(9, log), (forked, joined))
    assert log == [(1, 1, 1, 8, 7), *waits]  # its memory may be anybody's after that

    tape = Tape([], [], lambda: somebodys, own, other)
    launch(tape)
    assert tape.recording([]) is None and "stream" in tape.refused
