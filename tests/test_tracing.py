"""Timelines: what is recorded, and that Chrome's and Perfetto's format is kept.

Letters: N nodes, G GPUs a node.
"""

import doctest
import errno
import gc
import json
import math
import os
import random
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

import railwave
from heaps import DEVICE, ON_GPU, WIRE
from processes import run_all
from railwave import timeline, trace_files, tracing
from railwave.config import PATHS
from test_processes import combine, dispatch, init
from worlds import make_batch, make_outs, make_world


def test_the_examples_hold():
    for module in (timeline, tracing):
        result = doctest.testmod(module)
        assert result.attempted and not result.failed


def check_events(events):
    """Check required fields, nesting and order in time, of every track."""
    assert events and {event["ph"] for event in events} <= {"X", "i", "M"}
    ends, began = {}, {}
    for event in events:
        assert isinstance(event["name"], str) and isinstance(event["args"], dict)
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name") and event["args"]["name"]
            continue
        track = event["pid"], event["tid"]
        assert event["ts"] >= began.get(track, 0.0)
        began[track] = event["ts"]
        if event["ph"] == "i":
            assert event["s"] == "t"
            continue
        assert event["dur"] >= 0
        end = event["ts"] + event["dur"]
        open_ends = [other for other in ends.get(track, []) if other > event["ts"] + 1e-6]
        assert all(end <= other + 1e-6 for other in open_ends)  # inside of what is open
        ends[track] = [*open_ends, end]
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in events if e["ph"] != "M"} == named


@pytest.mark.parametrize(
    "path",
    [
        p if p in ("native", "joint", "granted") else pytest.param(p, marks=pytest.mark.soak)
        for p in PATHS
    ],
)
def test_every_stage_and_round_of_every_pe_is_there(path, tmp_path):
    world = make_world(3, 2, 2, staging_records=2)
    batch = make_batch(world, 4)
    outs = [out.to(DEVICE) for out in make_outs(batch)]
    world.combine(outs, [r.handle for r in world.dispatch(*batch.arguments, path=path)])
    with railwave.trace(tmp_path / "out.json") as trace:
        received = world.dispatch(*batch.arguments, path=path)
        world.combine(outs, [r.handle for r in received])
    world.dispatch(*batch.arguments, path=path)  # which is not in it
    held = json.loads((tmp_path / "out.json").read_text())
    check_events(held["traceEvents"])
    assert held["traceEvents"] == trace.events() and held["otherData"]["lost_notes"] == 0
    first = min(event["ts"] for event in trace.events() if event["ph"] != "M")
    assert first == 0 and held["otherData"]["base_ns"] == min(s.began_ns for s in trace.spans)
    of_path = world.config.rounds(path)
    rounds, packs = len(of_path), of_path
    if path == "granted" and world._exchanges[0].beside:
        packs = world.config.packs(of_path[0])
    for pe in range(6):
        mine = [span for span in trace.spans if span.pe == pe and span.kind == "stage"]
        names = [span.name for span in mine]
        puts = names.count("put" if path != "granted" else path)
        assert names.count("unpack") == rounds
        # Interpreted, a launch of `granted` is a step: there are several.
        assert puts == 2 * rounds or (path == "granted" and puts > 2)
        assert names.count("count") == names.count("finish") == names.count("final") == 1
        told = {name: [s.details for s in mine if s.name == name] for name in set(names)}
        all_rounds = [{"wave": each.wave, "step": each.step} for each in of_path]
        assert told["unpack"] == told["give_back"] == all_rounds
        assert told.get("put", all_rounds * 2) == all_rounds * 2  # of a dispatch and its combine
        all_packs = [{"wave": each.wave, "step": each.step} for each in packs]
        assert told["pack"] == told["reduce"] == all_packs
    phases = [e["name"] for e in trace.events() if e.get("cat") == "phase" and e["pid"] == 0]
    assert phases == ["dispatch", "combine"]
    grants = [span for span in trace.spans if span.kind == "grant"]
    # Notify grants a dispatch's first round; native and rail have one round with two peers; granted
    # has two in each phase, which a busy one may hand back.
    most = {"native": 2, "rail": 2, "granted": 8}.get(path, rounds - 1 + rounds)
    assert 0 < len(grants) <= 6 * most
    summary = trace.summary()
    assert set(summary.stages) == {s.name for s in trace.spans if s.kind == "stage"}
    assert ("put" if path != "granted" else path) in str(summary)


def test_pes_that_wait_for_their_turn_are_shown():
    """And whom they wait for: packed comes from the own node, grants along the rail."""
    world = make_world(2, 2, 2, order=random.Random(1))
    batch = make_batch(world, 4)
    with railwave.trace() as trace:
        world.dispatch(*batch.arguments)
    check_events(trace.events())
    waits = [span for span in trace.spans if span.kind == "wait"]
    assert {span.name for span in waits} <= set(WIRE.WORDS) and waits
    for span in waits:
        whom = span.details["for rank"]
        if span.name in ("packed", "delivered"):
            assert whom // 2 == span.pe // 2
        if span.name in ("arrived", "grant"):
            assert whom != span.pe and whom % 2 == span.pe % 2
    assert set(trace.summary().waits) == {span.name for span in waits}


def test_two_worlds_in_one_trace_have_tracks_of_their_own():
    worlds = [make_world(2, 1, 1), make_world(1, 2, 1)]
    batches = [make_batch(world, 2) for world in worlds]
    with railwave.trace() as trace:
        for world, batch in zip(worlds, batches, strict=True):
            world.dispatch(*batch.arguments)
    check_events(trace.events())
    assert {(span.world, span.pe) for span in trace.spans} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert {event["pid"] for event in trace.events()} == {0, 1, 10_000, 10_001}
    assert not trace._notes and not trace._timed  # the worlds' memory is not kept


def test_stages_of_two_threads_are_of_the_world_of_each():
    """The first ends while the second still runs."""
    taken, heaps = tracing.Trace(), [torch.nn.Module(), torch.nn.Module()]
    inside, ended = threading.Event(), threading.Event()

    def stage(pe):
        with taken.around(True, "_put_kernel", {"me": pe}):
            pass

    def second():
        with tracing.world(heaps[1]):
            inside.set()
            assert ended.wait(30)
            stage(1)

    with ThreadPoolExecutor(1) as pool:
        with tracing.world(heaps[0]):
            later = pool.submit(second)
            assert inside.wait(30)
            stage(0)
        ended.set()
        later.result()
    assert [(span.pe, span.world) for span in taken.spans] == [(0, 0), (1, 1)]
    heaps.clear()
    gc.collect()
    assert not taken._worlds  # none is kept


def test_a_summary_tells_worlds_apart_and_who_waited_for_whom():
    waits = [(0, 0, 1, 5), (0, 2, 1, 1), (1, 0, 1, 2), (1, 0, 1, 2)]  # world, PE, for rank, us

    def summary(which):
        return timeline.Summary.of(
            [timeline.Span("wait", "put", pe, 0, 1000 * us, {"for rank": last}, world)
             for world, pe, last, us in which]
        )  # fmt: skip

    one, two = summary(waits[:2]), summary(waits)
    assert one.waited_for == {1: 6} and one.waits_between == {(0, 1): 5, (2, 1): 1}
    assert two.waited_for == {(0, 1): 6, (1, 1): 4}
    assert two.waits_between == {(0, 0, 1): 5, (1, 0, 1): 4, (0, 2, 1): 1}
    said = [" ".join(line.split()) for line in str(two).splitlines()]
    assert said[0] == "microseconds, summed over PEs" and str(summary([])) == ""
    assert said[3:] == [
        *("waited for rank us", "world 0: 1 6", "world 1: 1 4", "rank waited for us"),
        *("world 0: 0 for 1 5", "world 1: 0 for 1 4", "world 0: 2 for 1 1"),
    ]
    assert "0 for 1" not in str(summary(waits[:1]))  # all waits are of the one rank
    long = str(summary([(0, 0, 1, 1), (10**12, 1, 10, 10**6)])).splitlines()[1:]
    assert len({len(line) for line in long}) == 1 and f"world {10**12}: 1 for 10 " in long[-2]
    many = str(summary([(0, pe, 20, 1) for pe in range(13)])).splitlines()
    assert len(many) == 1 + 2 + 2 + 1 + 10 + 1 and many[-1].split() == ["3", "more", "3"]


def test_a_trace_says_nothing_before_it_is_whole(tmp_path):
    world = make_world(2, 1, 1)
    with railwave.trace() as trace:
        world.dispatch(*make_batch(world, 2).arguments)
        for asked in (trace.summary, trace.events, lambda: trace.write(tmp_path / "out.json")):
            with pytest.raises(RuntimeError, match="must be called after the trace's with"):
                asked()
    assert trace.summary().stages and trace.events() and not list(tmp_path.iterdir())


def test_nothing_is_granted_where_nothing_is_sent():
    world = make_world(3, 1, 1)
    batch = make_batch(world, 0)
    with railwave.trace() as trace:
        received = world.dispatch(*batch.arguments)
        world.combine([r.x for r in received], [r.handle for r in received])
    assert not [span for span in trace.spans if span.kind == "grant"]


def test_times_of_a_clock_that_counts_from_1970_keep_their_nanoseconds():
    zero = 1_764_000_000_000_000_001
    spans = [tracing.Span("stage", "put", 0, zero + 7 * i, zero + 7 * i + 7) for i in range(100)]
    events = [event for event in timeline.events(spans) if event["ph"] == "X"]
    check_events(timeline.events(spans))
    assert [event["ts"] for event in events if event["cat"] == "stage"][:3] == [0.0, 0.007, 0.014]


def test_a_start_that_fails_leaves_no_trace(monkeypatch):
    """Nor does an end: no kernel may write to memory that is given back."""
    world = make_world(2, 1, 1)
    batch = make_batch(world, 2)
    notes = [pe.state[WIRE.NOTES.value :][:1] for pe in world._exchanges]
    joined = tracing.Trace.join

    def second_fails(self, exchange):
        if self._notes:
            raise MemoryError("no room for notes")
        joined(self, exchange)

    with monkeypatch.context() as patch:
        patch.setattr(tracing.Trace, "join", second_fails)
        with pytest.raises(MemoryError), railwave.trace():
            pass
    assert not any(word.item() for word in notes)
    with monkeypatch.context() as patch:
        patch.setattr(tracing.Trace, "_read_notes", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError), railwave.trace():
            assert all(word.item() for word in notes)
            world.dispatch(*batch.arguments)
    assert not any(word.item() for word in notes)
    with railwave.trace() as trace:
        world.dispatch(*batch.arguments)
    assert trace.spans


def waiting(rank, folder, late, in_kernels):
    """Rank 3 comes late to a dispatch."""
    rw = init()
    if in_kernels:  # as on a GPU
        rw._on_gpu = rw._phases._on_gpu = True
        rw._phases.meeting.rehearse()
    batch = make_batch(rw, 4)
    outs = make_outs(batch)
    combine(rw, batch, dispatch(rw, batch, "joint"), outs)
    dist.barrier()
    with railwave.trace(f"{folder}/out.json") as trace:
        if rank == late:
            time.sleep(1.5)
        combine(rw, batch, dispatch(rw, batch, "joint"), outs)
    dist.barrier()
    check_events(trace.events())
    waits = [span for span in trace.spans if span.kind == "wait"]
    summary = trace.summary()
    rw.close()
    # A kernel notes the last word alone: of those by way of the late rank, not its own.
    if rank != late and (not in_kernels or rank % 2 == late % 2):
        longest = max(waits, key=lambda span: span.ended_ns - span.began_ns)
        assert longest.name == "notify" and longest.details == {"for rank": late}
        assert 1e9 < longest.ended_ns - longest.began_ns < 10e9
        assert next(iter(summary.waited_for)) == late and next(iter(summary.waits)) == "notify"
    return [span.name for span in trace.spans if span.kind == "grant"]


@pytest.mark.skipif(ON_GPU, reason="processes on a CPU")
@pytest.mark.parametrize("late, in_kernels", [(3, False), (1, False), (2, True)])
def test_every_process_writes_what_it_waited_for(late, in_kernels, tmp_path):
    grants = run_all(waiting, 4, str(tmp_path), late, in_kernels)
    assert all(len(of) == 1 for of in grants)
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == [f"out.rank{rank}.json" for rank in range(4)]
    railwave.merge_traces(files, tmp_path / "all.json")
    events = json.loads((tmp_path / "all.json").read_text())["traceEvents"]
    check_events(events)
    assert {event["pid"] for event in events} == {0, 1, 2, 3}
    assert len(events) == sum(len(json.loads(f.read_text())["traceEvents"]) for f in files)


def made_trace(file, pe, base_ns, lost=0, events=1, **clock):
    """Write a trace of one PE whose events begin at its base, 2.5 us and 5 us after it."""
    spans = [timeline.Span("wait", "put", pe, i * 2500, i * 2500 + 1000) for i in range(events)]
    about = {"lost_notes": lost, "base_ns": base_ns, "host": "h", "boot": "b", "clock": "c"}
    trace_files.write(file, timeline.events(spans), about | clock)
    return file


def test_merged_traces_have_the_times_and_losses_of_all(tmp_path):
    files = [
        made_trace(tmp_path / "a.json", 0, 9_000_000, lost=2, events=2),
        made_trace(tmp_path / "b.json", 1, 9_007_500, lost=3, events=2),
        made_trace(tmp_path / "c.json", 2, 0, events=0),  # nothing: it has no time
    ]
    railwave.merge_traces(files[:2], tmp_path / "ab.json")
    railwave.merge_traces([tmp_path / "ab.json", files[2]], tmp_path / "all.json")  # again
    for out in ("ab.json", "all.json"):
        held = json.loads((tmp_path / out).read_text())
        check_events(held["traceEvents"])
        times = [(e["pid"], e["ts"]) for e in held["traceEvents"] if e["ph"] == "X"]
        assert times == [(0, 0.0), (0, 2.5), (1, 7.5), (1, 10.0)]
        assert all(e["ts"] == 0 for e in held["traceEvents"] if e["ph"] == "M")
        clock = {"host": "h", "boot": "b", "clock": "c"}
        assert held["otherData"] == {"lost_notes": 5, "base_ns": 9_000_000, **clock}


def test_traces_of_clocks_that_do_not_agree_are_not_merged(tmp_path):
    first, out = made_trace(tmp_path / "a.json", 0, 0), tmp_path / "all.json"

    def merge(**clock):
        railwave.merge_traces([first, made_trace(tmp_path / "b.json", 1, 0, **clock)], out)

    for rule, clock in (
        ("of one kind of clock", {"clock": "d"}),
        ("of one machine, and one boot of it", {"boot": "other"}),
        ("of one machine, and one boot of it", {"boot": ""}),
        ("of one machine, and one boot of it", {"host": "i", "boot": "other"}),
    ):
        with pytest.raises(
            ValueError, match=rf"files must be {rule}, got .*b\.json of .* and .*a\."
        ):
            merge(**clock)
    assert not out.exists()
    merge(host="a container of h")
    first = made_trace(tmp_path / "a.json", 0, 0, boot="")
    with pytest.raises(ValueError, match="of one machine"):
        merge(boot="", host="i")
    merge(boot="")


def test_a_trace_says_where_its_times_are_from(tmp_path):
    world = make_world(1, 1, 1)
    with railwave.trace(tmp_path / "a.json") as trace:
        world.dispatch(*make_batch(world, 1).arguments)
    about = json.loads((tmp_path / "a.json").read_text())["otherData"]
    assert about.items() >= trace_files.clock_origin().items() and all(
        trace_files.clock_origin().values()
    )
    assert about["clock"] == ("the GPUs' timer" if ON_GPU else "the host's monotonic clock")
    assert about["base_ns"] == timeline.first_ns(trace.spans)


EVENT = {"name": "put", "ph": "X", "pid": 0, "tid": 1, "ts": 0.0, "dur": 1.0}


@pytest.mark.parametrize(
    "wrong, said",
    [
        ({"ts": "x"}, "ts must be a finite number, got 'x'"),
        ({"ts": None}, "ts must be a finite number, got None"),
        ({"ts": 10**400}, "must be a finite number, got 1000"),
        ({"pid": [0]}, r"pid must be an int, got \[0\]"),
        ({"pid": True}, "pid must be an int, got True"),
        ({"tid": "1"}, "tid must be an int, got '1'"),
        ({"ph": 5}, "ph must be a str, got 5"),
        ({"dur": "1"}, "dur must be a finite number, got '1'"),
        ({"dur": -5.0}, "dur must be at least 0, got -5.0"),
        ({"ts": math.nan}, "numbers must be finite, got NaN"),
        ({"args": {"x": math.inf}}, "numbers must be finite, got Infinity"),
    ],
)
def test_events_that_are_none_are_refused(wrong, said, tmp_path):
    file = made_trace(tmp_path / "bad.json", 0, 0)
    held = json.loads(file.read_text()) | {"traceEvents": [EVENT, EVENT | wrong]}
    file.write_text(json.dumps(held))
    with pytest.raises(ValueError, match=f"must be traces of railwave's, got .*bad.json: .*{said}"):
        railwave.merge_traces([file], tmp_path / "all.json")


@pytest.mark.parametrize(
    "wrong, said",
    [
        ({"base_ns": 10**400}, "base_ns must be of 64 bits, got 1000"),
        ({"base_ns": -(10**400)}, "base_ns must be of 64 bits, got -1000"),
        ({"lost": -5}, "lost_notes must be at least 0, got -5"),
    ],
)
def test_traces_of_impossible_numbers_are_refused(wrong, said, tmp_path):
    made_trace(tmp_path / "bad.json", 0, **{"base_ns": 0, **wrong})
    with pytest.raises(ValueError, match=f"must be traces of railwave's, got .*bad.json: {said}"):
        railwave.merge_traces([tmp_path / "bad.json"], tmp_path / "all.json")


def test_a_duration_is_read_only_where_events_have_one(tmp_path):
    file = made_trace(tmp_path / "a.json", 0, 0)
    held = json.loads(file.read_text())
    held["traceEvents"] = [EVENT | {"ph": "i", "dur": dur} for dur in ("x", None, [1])]
    file.write_text(json.dumps(held))
    railwave.merge_traces([file], tmp_path / "all.json")
    assert len(json.loads((tmp_path / "all.json").read_text())["traceEvents"]) == 3


def test_wrong_use_is_refused(tmp_path):
    with railwave.trace(), pytest.raises(RuntimeError, match="a trace is being taken already"):
        railwave.trace().__enter__()
    with railwave.trace():
        pass  # the one before has ended
    with pytest.raises(FileNotFoundError, match="file must be in an existing folder"):
        railwave.trace(tmp_path / "no" / "out.json").__enter__()
    out = tmp_path / "all.json"
    for text in ("{}", "[]", "", "7", "null", '{"otherData": {}, "traceEvents": [1]}'):
        bad = tmp_path / "bad.json"
        bad.write_text(text)
        with pytest.raises(ValueError, match=re.escape(f"must be traces of railwave's, got {bad}")):
            railwave.merge_traces([bad], out)
    a, b = made_trace(tmp_path / "a.json", 0, 0), made_trace(tmp_path / "b.json", 0, 0)
    with pytest.raises(ValueError, match="files must hold different PEs, got PE 0 in"):
        railwave.merge_traces([a, b], out)
    for again in (a, f"{tmp_path}/./a.json", f"{tmp_path}/../{tmp_path.name}/a.json"):
        with pytest.raises(ValueError, match=re.escape(f"different ones, got {a} and {again}")):
            railwave.merge_traces([a, b, again], out)
    with pytest.raises(
        ValueError, match=re.escape(f"files and out must be different ones, got {a}")
    ):
        railwave.merge_traces([a, b], f"{tmp_path}/./a.json")
    with pytest.raises(TypeError, match="files must be several files, got"):
        railwave.merge_traces(str(a), out)
    with pytest.raises(TypeError, match="files must be several files, got int 5"):
        railwave.merge_traces(5, out)
    with pytest.raises(ValueError, match="files must be one at least"):
        railwave.merge_traces([], out)
    with pytest.raises(FileNotFoundError):
        railwave.merge_traces([tmp_path / "no.json"], out)
    assert not out.exists()
    with pytest.raises(IsADirectoryError, match="out must be a file, got the directory"):
        railwave.merge_traces([tmp_path / "no.json"], tmp_path)  # before anything is read


def test_errors_name_the_file_that_was_asked_for(tmp_path, monkeypatch):
    world, out = make_world(1, 1, 1), tmp_path / "a.json"

    def no_room(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), f"{out}.part")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", no_room)
        with pytest.raises(OSError) as error, railwave.trace(out):
            world.dispatch(*make_batch(world, 1).arguments)
    assert str(error.value) == f"[Errno 28] No space left on device: '{out}'"
    assert not list(tmp_path.iterdir())


def test_an_error_inside_comes_before_those_of_the_end(tmp_path, monkeypatch):
    folder = tmp_path / "gone"
    folder.mkdir()
    with pytest.raises(ValueError, match="mine") as error, railwave.trace(folder / "a.json"):
        folder.rmdir()
        raise ValueError("mine")
    (note,) = error.value.__notes__
    assert note.startswith(f"the trace could not be written to {folder}/a.json: FileNotFound")
    assert not tracing.taking()
    monkeypatch.setattr(tracing.Trace, "leave_all", lambda self: 1 / 0)
    with pytest.raises(KeyboardInterrupt) as error, railwave.trace():
        raise KeyboardInterrupt
    assert error.value.__notes__[0].startswith("the trace could not be ended: ZeroDivisionError")
    assert not tracing.taking()


def test_a_trace_ends_with_an_error_inside_and_nothing_is_recorded_after(tmp_path):
    world = make_world(2, 1, 1)
    batch = make_batch(world, 2)
    with pytest.raises(ValueError, match="path must be one of"), railwave.trace() as trace:
        world.dispatch(*batch.arguments)
        world.dispatch(*batch.arguments, path="fast")
    count = len(trace.spans)
    world.dispatch(*batch.arguments)
    assert len(trace.spans) == count > 0
    assert all(pe.state[WIRE.NOTES.value] == 0 for pe in world._exchanges)


def test_notes_beyond_what_there_is_room_for_are_counted():
    world = make_world(2, 1, 1)
    batch = make_batch(world, 2)
    with railwave.trace() as trace:
        for notes in trace._notes.values():
            notes[0] = WIRE.MAX_NOTES.value
        received = world.dispatch(*batch.arguments)
        world.combine([r.x for r in received], [r.handle for r in received])
    assert trace.lost == 2 and not [span for span in trace.spans if span.kind == "grant"]
