"""Calls that come back to the same addresses become graphs."""

import contextlib
import logging

import pytest
import torch

from railwave import graphs
from railwave.graphs import Graphs


class Graph:
    """Stands for a CUDA graph; notes that it is made, and replayed."""

    def __init__(self, log, name):
        self.log, self.name = log, name
        log.append(("made", name))

    def replay(self):
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


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, TypeError])
def test_an_error_amid_a_capture_is_the_caller_s(error, monkeypatch):
    """It leaves launches in the middle, so that the capture cannot end; it is no reason to stop."""

    class CUDAGraph:
        def capture_begin(self, **how):
            pass

        def capture_end(self):
            raise RuntimeError("capturing stream has unjoined work")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", CUDAGraph)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(graphs, "_own_stream", lambda device: "captured")

    def launch_call(stream):
        if stream == "captured":
            raise error

    made = Graphs()
    made.launch("a", launch_call, "own")
    with pytest.raises(error):
        made.launch("a", launch_call, "own")
    assert not made._fails


def test_a_rehearsal_captures_and_replays_where_graphs_are_made(log):
    for most, happened in ((0, []), (1, [("made", "a"), ("replayed", "a")])):
        log.clear()
        Graphs(most).rehearse(lambda stream: log.append((stream, "a")))
        assert log == happened


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
