"""Calibration: the points it measures, what it keeps, and that it goes on where it stopped."""

import argparse
import contextlib
import doctest
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from processes import run_all
from railwave import CostTable, Topology, calibrate
from railwave.agreement import default_device
from railwave.cli import calibrate as cli
from railwave.cli import options
from railwave.cli.options import topology
from railwave.config import PATHS, Config
from railwave.cost_table import fingerprint
from railwave.retention import CONTROL
from railwave.sched import Scales, plan
from test_cli import run
from test_processes import init


def config(nodes=4, gpus=2, rails=2, **sizes):
    declared = dict(num_experts=nodes * gpus, top_k=1, hidden=512, max_tokens_per_rank=4096)
    return Config(Topology(nodes, gpus, rails), dtype=torch.bfloat16, **{**declared, **sizes})


def test_the_examples_hold():
    assert doctest.testmod(calibrate).failed == 0


@pytest.mark.parametrize("one_rail", [False, True])
@pytest.mark.parametrize("one_receiver", [False, True])
def test_a_point_is_the_corner_that_was_asked_for(one_rail, one_receiver):
    here = config()
    point = calibrate.traffic(here, 0.75, one_rail=one_rail, one_receiver=one_receiver)
    assert point.payload_mib == pytest.approx(0.75, rel=0.01)
    assert point.rho == pytest.approx(2.0 if one_rail else 1.0, rel=0.01)
    assert point.kappa == pytest.approx(3.0 if one_receiver else 1.0, rel=0.01)
    assert point.relocated == one_rail
    assert (point.records.sum(dim=1) <= here.max_tokens_per_rank).all()
    away = point.records.view(4, 2, 4)
    assert not away[range(4), :, range(4)].any()  # nothing stays on its node
    moved = [bool(plan(away[node], here.topo, node=node).relocated.any()) for node in range(4)]
    assert any(moved) == point.relocated


def test_points_that_are_the_same_come_once():
    assert len({p.name for p in calibrate.points(config(), [0.25, 0.5])}) == 8
    assert len(list(calibrate.points(config(rails=1), [0.25]))) < 4
    assert len(list(calibrate.points(config(nodes=2, gpus=1, rails=1), [0.25]))) == 1


@pytest.mark.parametrize("payload_mib", [1e-9, 100.0])
def test_a_payload_that_no_rank_can_send_is_refused(payload_mib):
    with pytest.raises(ValueError, match=r"payload_mib must give a rank 1 to .* got "):
        calibrate.traffic(config(), payload_mib, one_rail=True, one_receiver=False)
    with pytest.raises(ValueError, match="topo must have at least 2 nodes to calibrate, got 1"):
        calibrate.traffic(config(nodes=1), 0.1, one_rail=True, one_receiver=False)


@pytest.mark.parametrize(
    "tokens, staging, rounds",
    [
        (8192, None, "1"),
        (8193, None, "2 of 8192 records"),
        (16384, None, "2 of 8192 records"),
        (16384, 16384, "1"),
        (4, 1 << 20, "1"),
        (64, 16, "4 of 16 records"),
    ],
)
def test_a_table_is_of_the_rounds_that_a_slice_takes(tokens, staging, rounds):
    here = config(max_tokens_per_rank=tokens, staging_records=staging)
    assert fingerprint(here, "wire")["rounds_per_wave"] == rounds
    more = config(max_tokens_per_rank=tokens, staging_records=staging, num_experts=64, top_k=8)
    assert fingerprint(more, "wire") == fingerprint(here, "wire")


@pytest.mark.parametrize(
    "argv, rounds",
    [
        (["--payloads=64"], "1"),  # 4,682 tokens a GPU, 37,450 where all are on one rail
        (["--payloads=1", "--max-tokens=16384", "--staging-records=8192"], "2 of 8192 records"),
    ],
)
def test_the_command_measures_whole_slices_or_what_it_is_told(argv, rounds):
    parser = argparse.ArgumentParser()
    cli.add_command(parser.add_subparsers())
    args = parser.parse_args(["calibrate", "--nodes=4", "--gpus=8", *argv])
    topo = topology(args.nodes, args.gpus, args.rails)
    sizes = cli._sizes(args, topo, cli._payloads(args))
    here = Config(topo, **sizes)
    assert fingerprint(here, "wire")["rounds_per_wave"] == rounds


def measured(native):
    paths = {path: (100.0,) * 5 for path in (*PATHS, CONTROL)}
    return {**paths, "native": (native,) * 5, "rail": (native,) * 5}


def test_every_point_is_kept_with_its_samples_and_good_ones_become_anchors(tmp_path, monkeypatch):
    times = iter([50.0, 99.0, 60.0, 200.0])
    monkeypatch.setattr(calibrate, "measure", lambda *_: measured(next(times)))
    file, seen = tmp_path / "table.json", []
    rw = SimpleNamespace(config=config())
    empty = CostTable({"rails": "2"}, Scales(rails=2))

    def progress(done, name):
        seen.append(name)
        if done == 2 and not file.with_suffix(".stop").exists():
            file.with_suffix(".stop").touch()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate.calibrate(rw, empty, [0.5], samples=5, save=file, progress=progress)
    half = CostTable.load(file)
    assert len(half.points) == 2 and [a.path for a in half.anchors] == ["native"]
    table = calibrate.calibrate(rw, half, [0.5], samples=5, save=file, progress=progress)
    assert CostTable.load(file) == table and len(table.points) == 4
    assert [anchor.path for anchor in table.anchors] == ["native", "native"]
    assert table.points[:2] == half.points and len(set(seen)) == 4
    assert table.points[1].samples_us == measured(99.0)
    assert "less than 1.05" in table.points[1].verdict
    assert calibrate.calibrate(rw, table, [0.5], samples=5) == table  # nothing is left to measure


def test_a_point_with_fewer_samples_than_asked_for_is_measured_again(monkeypatch):
    asked = []

    def measure(rw, point, samples):
        asked.append((point.place, samples))
        native = (200.0 if samples == 6 else 50.0,) * samples
        return {path: (100.0,) * samples for path in (*PATHS, CONTROL)} | dict(
            native=native, rail=native
        )

    monkeypatch.setattr(calibrate, "measure", measure)
    rw = SimpleNamespace(config=config())
    table = calibrate.calibrate(rw, CostTable({}, Scales(rails=2)), [0.25], samples=5)
    assert len(table.points) == 4 and table.anchors
    (one, *_), asked[:] = table.points, []
    longer = replace(one, samples_us={p: (*us, 1.0) for p, us in one.samples_us.items()})
    table = replace(table, points=(longer, *table.points[1:]))
    again = calibrate.calibrate(rw, table, [0.25], samples=6)
    kept = (one.payload_mib, one.rho, one.kappa)
    assert len(asked) == 3 and kept not in dict(asked) and {n for _, n in asked} == {6}
    assert len(again.points) == 4 and again.points[0] == longer
    places = {(a.payload_mib, a.rho, a.kappa) for a in again.anchors}
    assert places <= {kept}  # the others' anchors went with their samples


@pytest.mark.parametrize(
    "samples, rails, said",
    [
        (4, 2, "samples must be at least 5, got 4"),
        (5, 3, "table's scales.rails must be 2 here, got 3"),
    ],
)
def test_what_would_be_measured_in_vain_is_refused_before(samples, rails, said, monkeypatch):
    monkeypatch.setattr(calibrate, "measure", None)  # nothing is
    rw, table = SimpleNamespace(config=config()), CostTable({}, Scales(rails=rails))
    with pytest.raises(ValueError, match=f"^{said}$"):
        calibrate.calibrate(rw, table, [0.25], samples=samples)


def test_points_are_told_apart_exactly():
    two = [16.0, 16.0 + 1 / 1024]  # a token apart
    made = list(calibrate.points(config(max_tokens_per_rank=1 << 16), two))
    assert len({point.name for point in made}) < len({point.place for point in made}) == 8


def measure_here(rank):
    rw = init(Topology(2, 1, 1), num_experts=2, top_k=1, max_tokens_per_rank=8)
    (point,) = calibrate.points(rw.config, [8 * rw.config.payload_bytes / (1 << 20)])
    samples = calibrate.measure(rw, point, 2)
    rw.close()
    return point.payload_mib, samples


def test_all_ranks_hold_the_slowest_ranks_times_of_every_path():
    one, other = run_all(measure_here, 2)
    assert one == other
    payload_mib, samples = one
    assert payload_mib > 0 and set(samples) == {*PATHS, CONTROL}
    assert all(len(times) == 2 and min(times) > 0 for times in samples.values())


def test_paths_take_turns_and_five_warm_ups_of_each_are_not_kept(monkeypatch):
    log = []

    def timed(rw, call, path):
        return lambda: log.append(path) or float(len(log))

    monkeypatch.setattr(calibrate, "_timed", timed)
    monkeypatch.setattr(calibrate, "tokens", lambda *_: ())
    slowest = 7.0  # another rank's, later than this one's
    rw = SimpleNamespace(
        _gather=lambda us: None if us is None else [us, us + slowest], check=lambda: None
    )
    samples = calibrate.measure(rw, None, 6)
    names = [*PATHS, CONTROL]
    paths = [*PATHS, "joint"]
    turns = [log[i : i + len(paths)] for i in range(0, len(log), len(paths))]
    assert [sorted(turn) for turn in turns] == [sorted(paths)] * (5 + 6)
    assert turns[0] == paths and turns[1] == [*paths[1:], paths[0]]  # each is first in turn
    for i, name in enumerate(names):
        places = [t * len(names) + (i - t) % len(names) + 1 for t in range(5, 11)]
        assert samples[name] == tuple(place + slowest for place in places)


def test_on_a_gpu_the_second_replay_of_a_graph_is_timed(monkeypatch):
    log = []

    class Event:
        def __init__(self, *, enable_timing):
            assert enable_timing

        def record(self, stream):
            log.append(f"record on {stream}")

        def synchronize(self):
            log.append("synchronize")

        def elapsed_time(self, other):
            return 1.5 if other is not self else 0.0  # milliseconds

    class Graph:
        def replay(self):
            log.append("replay")

    @contextmanager
    def capturing(graph, *, capture_error_mode):
        log.append("capture")
        yield
        log.append("captured")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capturing)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"the stream of {device}")
    received = SimpleNamespace(x=None, handle=None)
    rw = SimpleNamespace(
        config=SimpleNamespace(device=torch.device("cuda", 1)),
        dispatch=lambda *_, path, **form: log.append(f"dispatch {path} {form}") or received,
        combine=lambda *_: log.append("combine"),
        _gather=lambda value: log.append("gather"),
    )
    timed = calibrate._timed(rw, (), "rail")
    phases = ["dispatch rail {'static_shapes': True, 'out': 'view'}", "combine"]
    assert log == [*phases, "gather", "capture", *phases, "captured"]
    log.clear()
    assert timed() == 1500.0
    record = "record on the stream of cuda:1"
    assert log == ["replay", record, "replay", record, "synchronize"]


def test_the_command_makes_a_table_that_it_reads_again(tmp_path):
    file = tmp_path / "table.json"
    argv = ["--nodes=2", "--gpus=1", "--hidden=8", "--dtype=float32", "--payloads=0.0001"]
    argv += ["--quick", "--out", file]
    command = [sys.executable, "-m", "railwave", "calibrate", *map(str, argv)]
    made = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert made.returncode == 0, made.stderr
    table = CostTable.load(file)
    (point,) = table.points
    assert table.fingerprint["transport"] == "shared memory"
    assert table.fingerprint["dtype"] == "torch.float32"
    assert {len(times) for times in point.samples_us.values()} == {5}
    assert "of 1 point(s)" in made.stdout and "nothing to do" not in made.stdout
    result = run("calibrate", *argv)
    assert result.code == 2 and "--out must be a new file without --resume" in result.err


def on_disk(file, samples_us, argv, **changed):
    """Write what the command with these arguments would have measured."""
    parser = argparse.ArgumentParser()
    cli.add_command(parser.add_subparsers())
    args = parser.parse_args(["calibrate", *argv])
    topo, payloads = topology(args.nodes, args.gpus, args.rails), cli._payloads(args)
    sizes = cli._sizes(args, topo, payloads)
    here = Config(topo, device=default_device(), **sizes)
    table = CostTable(
        fingerprint(here, "shared memory") | changed, Scales(rails=topo.rails_per_node)
    )
    for point in calibrate.points(here, payloads):
        table = calibrate._with(here, table, point, samples_us)
    table.save(file)
    return table


SMALL = ["--nodes=4", "--gpus=2", "--hidden=8", "--payloads=0.0001,0.0002"]


@pytest.fixture
def no_ranks(monkeypatch):
    started = []
    monkeypatch.setattr(cli, "_run_to_its_end", lambda command, _: started.append(command) or 0)
    return started


def test_a_finished_table_is_shown_at_once(tmp_path, no_ranks):
    """No rank is started; each point's row has the best path's time beside joint's."""
    file = tmp_path / "table.json"
    argv = [*SMALL, "--rails=0,0", "--samples=5", "--resume", f"--out={file}"]
    table = on_disk(file, measured(50.0) | {"rail": (40.0,) * 5}, argv)
    assert table.fingerprint["rail_of_gpu"] == "[0, 0]"
    held = file.read_bytes()
    result = run("calibrate", *argv)
    assert result.code == 0 and no_ranks == [] and file.read_bytes() == held
    assert "nothing to do: every point has 5 samples or more" in result.out
    assert len(table.points) == len(re.findall(r"0\.10.*rail 0\.04.*2\.500", result.out)) > 2
    assert run("calibrate", *argv, "--samples=6").code == 0 and len(no_ranks) == 1
    assert run("calibrate", *argv, "--payloads=0.0001,0.0003").code == 0 and len(no_ranks) == 2
    assert {"--rails=0,0", "--resume", "--samples=5"} <= set(no_ranks[-1])


def test_an_anchors_row_has_its_own_path(tmp_path, no_ranks):
    """The fastest is too noisy; the anchor is of another."""
    file = tmp_path / "table.json"
    noisy = {"rail": (10.0, 10.0, 10.0, 90.0, 90.0), "permutation": (80.0,) * 5}
    argv = [*SMALL, "--samples=5", "--resume", f"--out={file}"]
    table = on_disk(file, measured(99.0) | noisy, argv)
    assert {anchor.path for anchor in table.anchors} == {"permutation"}
    rows = run("calibrate", *argv).out
    assert len(table.anchors) == len(re.findall(r"permutation.*1\.250", rows)) > 0
    assert "10.000" in rows  # where it was rejected: joint beside the fastest
    last = [row.split("│")[-2].strip() for row in rows.splitlines() if row.startswith("│")]
    anchors = {(a.payload_mib, a.rho, a.kappa) for a in table.anchors}
    for point in table.points:
        kept = (point.payload_mib, point.rho, point.kappa) in anchors
        told = f"anchor: permutation; {point.verdict}" if kept else f"rejected: {point.verdict}"
        assert told in " ".join(last)


def test_a_table_of_another_configuration_is_refused_before_ranks_start(tmp_path, no_ranks):
    file = tmp_path / "table.json"
    argv = [*SMALL, "--resume", f"--out={file}"]
    on_disk(file, measured(50.0), argv, torch="0.1")
    result = run("calibrate", *argv)
    assert result.code == 2 and "must be of this configuration" in result.err and no_ranks == []
    assert result.err.splitlines()[1:] == [f"torch: here '{torch.__version__}', table '0.1'"]
    file.write_text("{")
    assert "must be a JSON cost table" in run("calibrate", *argv).err and no_ranks == []
    file.write_text("")  # an empty file holds nothing to go on with
    assert run("calibrate", *argv).code == 0 and len(no_ranks) == 1


@pytest.mark.parametrize("rails, rail_of_gpu", [("2", (0, 0, 1, 1)), ("1,0,0,3", (1, 0, 0, 3))])
def test_rails_are_a_number_or_the_rail_of_each_gpu(rails, rail_of_gpu):
    parser = argparse.ArgumentParser()
    options.add_rails(parser)
    topo = topology(2, 4, parser.parse_args(["--rails", rails]).rails)
    assert topo.rail_of_gpu == rail_of_gpu and topo.rails_per_node == max(rail_of_gpu) + 1
    assert doctest.testmod(options).failed == 0


def marked(mark):
    """List the processes whose environment holds a mark, but those that have ended."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark.encode() in (folder / "environ").read_bytes():
                found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return found


def wait_until(true, timeout_s=60.0):
    until = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < until, "it did not become true in time"
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_ends_torchrun_and_every_rank(tmp_path, number):
    mark = f"RAILWAVE_TEST_MARK={tmp_path}"
    command = [sys.executable, "-m", "railwave", "calibrate", "--nodes=2", "--gpus=1"]
    sizes = ["--hidden=8", "--payloads=0.0001", "--samples=100000", f"--out={tmp_path}/table.json"]
    started = subprocess.Popen(
        [*command, *sizes],
        env={**os.environ, "RAILWAVE_TEST_MARK": str(tmp_path)},
        # Where the tests run in the background SIGINT is ignored, also by what they start.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: len(marked(mark)) == 4)  # this one, torchrun and two ranks
        time.sleep(1)
        started.send_signal(number)
        killed = number == signal.SIGKILL  # torchrun outlives the command, but not for long
        assert started.wait(timeout=60) == (-number if killed else 128 + number)
        if killed:
            wait_until(lambda: marked(mark) == [])
        assert marked(mark) == []
    finally:
        if started.poll() is None:
            started.terminate()
            started.wait(timeout=60)


def test_torchruns_own_exit_code_is_handed_on_and_an_ignored_signal_stays_ignored():
    ends = "import os, signal; os.kill(os.getppid(), signal.SIGHUP); raise SystemExit(7)"
    interrupted = signal.getsignal(signal.SIGINT)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert cli._run_to_its_end([sys.executable, "-c", ends], dict(os.environ)) == 7
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert signal.getsignal(signal.SIGINT) is interrupted


@pytest.mark.parametrize("missing", cli.TORCHRUN)
def test_half_of_torchruns_environment_is_refused_by_name(monkeypatch, missing):
    for name in ("RANK", *cli.TORCHRUN):
        monkeypatch.setenv(name, "0")
    monkeypatch.delenv(missing)
    result = run("calibrate")
    assert result.code == 2 and result.out == ""
    assert result.err.startswith(f"railwave: error: {missing} must be set where RANK is ('0')")
    assert result.err.count("\n") == 1


@pytest.mark.parametrize(
    "argv, said",
    [
        (["--payloads=a"], "--payloads must be numbers in"),
        (["--payloads=-1"], "--payloads must be numbers in"),
        (["--samples=2"], "--samples must be at least 5, got 2"),
        (["--out=/none/t.json"], "--out must be in an existing folder"),
        (["--hidden=0"], "--hidden must be at least 1, got 0"),
        (["--nodes=1"], "topo must have at least 2 nodes to calibrate, got 1"),
        (["--payloads=1e-9"], "payload_mib must give a rank 1 to"),
        (["--max-tokens=0"], "--max-tokens must be at least 1, got 0"),
        (["--max-tokens=1"], "payload_mib must give a rank 1 to max_tokens_per_rank = 1 tokens"),
        (["--staging-records=0"], "--staging-records must be at least 1, got 0"),
        (["--rails=0"], "rails_per_node must be at least 1"),
        (["--rails=0,x"], "argument --rails: must be a number, or the rail of each GPU such as"),
        (["--rails=0,,1"], "0,0,1,1, got '0,,1'"),
        (["--rails=0,0,1"], "the rail of each of the 2 GPUs of a node, got 3 of them: 0,0,1"),
        (["--rails=0,-1"], "--rails must be numbers from 0 on, got 0,-1"),
    ],
)
def test_mistakes_are_named_before_anything_runs(argv, said):
    result = run("calibrate", *argv)
    assert result.code == 2 and said in result.err and result.out == ""
