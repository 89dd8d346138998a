"""Calls that come back to the same addresses become graphs."""

import contextlib
import gc
import logging
import sys
from enum import Enum
from types import ModuleType, SimpleNamespace

import pytest
import torch

from railwave import graphs
from railwave.graphs import Graphs


class Graph:
    """Stands for a CUDA graph; notes that it is made, and replayed."""

    def __init__(self, log, name):
        self.log, self.name, self.used = log, name, 0
        log.append(("made", name))

    def replay(self, stream):
        assert stream == "own"
        self.log.append(("replayed", self.name))


@pytest.fixture
def log(monkeypatch):
    """What happens; a call is launched by a function that notes its stream and name."""
    notes = []

    def capture(launch):
        launch("captured")
        return Graph(notes, notes.pop()[1])

    monkeypatch.setattr(graphs, "capture", capture)
    return notes


def launch(made, log, name):
    """Launch the call of a name; return what happened."""
    log.clear()
    made.launch(name, lambda stream: log.append((stream, name)), "own")
    return list(log)


def test_a_call_that_comes_again_is_one_launch_from_then_on(log):
    made = Graphs()
    assert launch(made, log, "a") == [("own", "a")]
    assert launch(made, log, "b") == [("own", "b")]
    assert launch(made, log, "a") == [("made", "a"), ("replayed", "a")]
    assert launch(made, log, "a") == [("replayed", "a")]
    assert made.launched == 2
    made.clear()
    assert launch(made, log, "a") == [("own", "a")]


def test_of_a_loop_longer_than_what_is_kept_some_calls_are_graphs(log, monkeypatch):
    monkeypatch.setattr(graphs, "UNUSED", 20)
    made, loop = Graphs(3), "abcde"
    for _ in range(10):
        happened = [launch(made, log, name) for name in loop]
    assert happened == [[("replayed", name)] for name in "abc"] + [[("own", n)] for n in "de"]
    for _ in range(21):  # the loop is over; another takes its graphs' places
        launch(made, log, "f")
    assert launch(made, log, "f") == [("replayed", "f")]
    assert launch(made, log, "a") == [("own", "a")] and launch(made, log, "c") == [
        ("replayed", "c")
    ]


def test_what_came_long_ago_is_forgotten(log, monkeypatch):
    monkeypatch.setattr(graphs, "MOST_SEEN", 2)
    made = Graphs()
    for name in "abc":
        launch(made, log, name)
    assert launch(made, log, "a") == [("own", "a")]
    assert launch(made, log, "c") == [("made", "c"), ("replayed", "c")]


class Result(Enum):
    """Stands for the driver's errors."""

    CUDA_SUCCESS = 0
    REFUSED = 1


class Driver(ModuleType):
    """Stands for `cuda.bindings.driver`: notes what it is told, and refuses some of it."""

    CUresult = Result
    CUstream = int
    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL="thread")

    def __init__(self, refuses=()):
        super().__init__("cuda.bindings.driver")
        self.told, self.refuses = [], refuses

    def __getattr__(self, name):
        if not name.startswith(("cuStream", "cuGraph")):
            raise AttributeError(name)

        def told(*args):
            self.told.append((name, *args))
            gives = name in ("cuStreamEndCapture", "cuGraphInstantiate")
            if name in self.refuses:
                return (Result.REFUSED, *([None] if gives else []))
            return (Result.CUDA_SUCCESS, *([f"of {name}"] if gives else []))

        return told


@pytest.fixture
def driver(monkeypatch, request):
    made = Driver(getattr(request, "param", ()))
    for name in ("cuda", "cuda.bindings"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules["cuda.bindings"], "driver", made, raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(graphs, "_own_stream", lambda device: SimpleNamespace(cuda_stream=5))
    return made


OWN = SimpleNamespace(cuda_stream=7)
CAPTURED = [
    ("cuStreamBeginCapture", 5, "thread"),
    ("cuStreamEndCapture", 5),
    ("cuGraphInstantiate", "of cuStreamEndCapture", 0),
    ("cuGraphDestroy", "of cuStreamEndCapture"),
]


def test_what_the_driver_is_told(driver):
    """The graph is launched on the call's stream, and given back with the object."""
    made, streams = Graphs(), []
    made.launch("a", streams.append, OWN)
    made.launch("a", streams.append, OWN)
    assert streams[0] is OWN and streams[1].cuda_stream == 5
    assert driver.told == [*CAPTURED, ("cuGraphLaunch", "of cuGraphInstantiate", 7)]
    made.clear()
    gc.collect()
    assert driver.told[-1] == ("cuGraphExecDestroy", "of cuGraphInstantiate")


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, TypeError])
def test_an_error_amid_a_capture_is_the_caller_s(error, driver):
    """It is no reason to stop; the capture is ended, and what it holds is given back."""

    def launch_call(stream):
        if stream is not OWN:
            raise error

    made = Graphs()
    made.launch("a", launch_call, OWN)
    with pytest.raises(error):
        made.launch("a", launch_call, OWN)
    assert driver.told == [*CAPTURED[:2], CAPTURED[3]]
    assert not made._fails


@pytest.mark.parametrize(
    "driver",
    [
        ("cuStreamBeginCapture",),
        ("cuStreamEndCapture",),
        ("cuGraphInstantiate",),
        ("cuGraphLaunch",),
    ],
    indirect=True,
)
def test_what_the_driver_refuses_is_launched_kernel_by_kernel(driver, caplog):
    made, streams = Graphs(), []
    with caplog.at_level(logging.WARNING, logger="railwave"):
        for _ in range(3):
            made.launch("a", streams.append, OWN)
    assert [stream for stream in streams if stream is OWN] == [OWN] * 3
    assert made.launched == 0 and caplog.text.count("kernel by kernel: a graph cannot be") == 1
    assert driver.told.count(CAPTURED[0]) == 1


def test_a_rehearsal_captures_and_replays_where_graphs_are_made(log):
    for most, happened in ((0, []), (1, [("made", "a"), ("replayed", "a")])):
        log.clear()
        made = Graphs(most)
        made.rehearse(lambda stream: log.append((stream, "a")), "own", lambda: True)
        assert log == happened and not made._fails


def test_where_a_graph_does_nothing_none_is_made(log, caplog):
    made = Graphs()
    with caplog.at_level(logging.WARNING, logger="railwave"):
        made.rehearse(lambda stream: log.append((stream, "a")), "own", lambda: False)
    assert "kernel by kernel: the graph of a rehearsal did nothing" in caplog.text
    assert [launch(made, log, "a") for _ in range(3)] == [[("own", "a")]] * 3


def test_none_is_made_where_none_is_to_be_kept(log):
    made = Graphs(0)
    assert [launch(made, log, "a") for _ in range(3)] == [[("own", "a")]] * 3


def test_where_nothing_can_be_captured_calls_are_launched_as_before(log, monkeypatch, caplog):
    def refuse(launch):
        raise RuntimeError("no memory")

    monkeypatch.setattr(graphs, "capture", refuse)
    made = Graphs()
    assert launch(made, log, "a") == [("own", "a")]
    with caplog.at_level(logging.WARNING, logger="railwave"):
        assert launch(made, log, "a") == [("own", "a")]
    assert "kernel by kernel: no memory" in caplog.text
    assert launch(made, log, "a") == [("own", "a")] and made.launched == 0
