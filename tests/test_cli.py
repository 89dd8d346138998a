"""The command line: what it measures, what it prints, and how it refuses.

Letters: N nodes, G GPUs a node, R rails; s source, d destination node. Runs are tiny, since an
interpreted PE takes about 0.15 s a phase.
"""

import contextlib
import io
import json
import logging
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import railwave
from railwave import report as report_module
from railwave.cases import demo_case, replay_case
from railwave.cli import main, write_json
from railwave.config import BALANCED
from railwave.report import PathReport, Report, run_paths, same_bits
from railwave.sched import quota_ref
from railwave.table import print_report
from railwave.workloads import read_counts, skewed_routing

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE_TRACE = ROOT / "examples" / "trace"
PATHS = ("native", "rail", "permutation", "joint", "granted")
N, G, TOKENS, EXPERTS, TOP_K, SEED = 3, 2, 12, 12, 3, 5
TINY = ["demo", "--nodes=2", "--gpus=1", "--tokens=2", "--hidden=2", "--experts=2", "--topk=2"]
KEYS = {
    *("verified", "rail_share", "rail_share_before", "quota_spread", "rho_g", "kappa"),
    *("max_fan_in", "relocated", "put_bytes", "hot_node", "seconds"),
}


def find_real_trace():
    places = [os.environ.get("RAILWAVE_TRACE"), ROOT.parent / "shared" / "data" / "smartmoe"]
    for place in places:
        if place and (Path(place) / "table_iter501_rank0.log").is_file():
            return Path(place)
    return None


REAL_TRACE = find_real_trace()


def run(*argv):
    """Run the command line; return its code and what it wrote."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(arg) for arg in argv])
    return SimpleNamespace(code=code, out=out.getvalue(), err=err.getvalue())


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    file = tmp_path_factory.mktemp("demo") / "report.json"
    sizes = [f"--nodes={N}", f"--gpus={G}", f"--tokens={TOKENS}", f"--experts={EXPERTS}"]
    sizes += [f"--topk={TOP_K}", f"--seed={SEED}", "--hidden=7"]
    result = run("demo", *sizes, "--json", file, "-v")
    result.report = json.loads(file.read_text())
    return result


@pytest.fixture(scope="module")
def records():
    """Count the demo's records from its routing alone: (N, R, N), source, rail, destination."""
    routing = skewed_routing(N * G, TOKENS, EXPERTS, TOP_K, gpus_per_node=G, skew=1.0, seed=SEED)
    counts = torch.zeros(N, G, N, dtype=torch.int64)
    for rank, topk_idx in enumerate(routing.topk_idx):
        for token in topk_idx.tolist():
            for d in {expert * N * G // EXPERTS // G for expert in token} - {rank // G}:
                counts[rank // G, rank % G, d] += 1
    return counts


def test_demo_verifies_every_path(demo):
    assert demo.code == 0
    assert tuple(demo.report["paths"]) == PATHS
    for path in demo.report["paths"].values():
        assert set(path) == KEYS
        assert path["verified"] is True
        assert sum(path["rail_share"]) == pytest.approx(1)
        assert sum(path["rail_share_before"]) == pytest.approx(1)


def test_demo_says_what_it_ran(demo):
    config = {"nodes": N, "gpus": G, "rails": G, "tokens": TOKENS, "hidden": 7, "experts": EXPERTS}
    config |= {"topk": TOP_K, "skew": 1.0, "seed": SEED, "version": railwave.__version__}
    assert demo.report["config"] == config


def test_demo_measures_the_rails_that_the_routing_implies(demo, records):
    by_rail = records.sum(dim=2)
    hot = int(by_rail.max(dim=1).values.argmax())
    quotas = torch.stack([quota_ref(records[s], torch.ones(N, G).bool(), s) for s in range(N)])
    for name, path in demo.report["paths"].items():
        sent = quotas.sum(dim=2) if name in BALANCED else by_rail
        total = int(by_rail[hot].sum())
        assert path["hot_node"] == hot
        assert path["rail_share_before"] == pytest.approx((by_rail[hot] / total).tolist())
        assert path["rail_share"] == pytest.approx((sent[hot] / total).tolist())
        assert path["rho_g"] == pytest.approx(int(sent.max()) * N * G / int(sent.sum()))
        moved = int((records - quotas).clamp(min=0).sum())
        assert path["relocated"] == (moved if name in BALANCED else 0)
    assert moved > 0


def test_balanced_slices_are_even_to_within_a_record(demo, records):
    for name in BALANCED:
        path = demo.report["paths"][name]
        assert path["quota_spread"] <= 1
        sent = [share * int(records[path["hot_node"]].sum()) for share in path["rail_share"]]
        assert max(sent) - min(sent) <= N - 1 + 1e-6  # a record a slice
    uneven = records.max(dim=1).values - records.min(dim=1).values
    for name in ("native", "permutation"):
        assert demo.report["paths"][name]["quota_spread"] == int(uneven.max()) > 1


def test_windows_and_fan_in_are_those_of_the_path(demo, records):
    demand = records.sum(dim=1)
    together = demand.sum(dim=0)
    waves = [[int(demand[s, (s + k) % N]) for s in range(N)] for k in range(1, N)]
    for name, path in demo.report["paths"].items():
        if name in ("permutation", "joint"):
            kappa = max(max(wave) * N / sum(wave) for wave in waves)
            assert path["max_fan_in"] == 1
        else:
            kappa = int(together.max()) * N / int(together.sum())
            assert path["max_fan_in"] > 1 or name == "granted"
        assert path["kappa"] == pytest.approx(kappa)


def test_all_paths_put_the_same_bytes(demo):
    assert len({path["put_bytes"] for path in demo.report["paths"].values()}) == 1
    assert demo.report["paths"]["joint"]["put_bytes"] > 0


def test_demo_prints_a_row_per_path(demo):
    lines = demo.out.splitlines()
    for name in PATHS:
        (row,) = [line for line in lines if line.startswith(f"{name} ")]
        assert "yes" in row and "->" in row and "%" in row
        before, after = row.split("%")[:2]
        even = len({mark for mark in after if mark in "▁▂▃▄▅▆▇█"}) == 1
        assert even == (name in BALANCED), row
        assert len({mark for mark in before if mark in "▁▂▃▄▅▆▇█"}) > 1
    assert any(line.startswith("Verified bit for bit") for line in lines)
    assert all(len(line) <= 100 for line in lines)
    assert "\x1b" not in demo.out


def test_verbose_logs_to_stderr_and_leaves_no_handler(demo):
    rails, *paths = [line.split(":")[1].strip() for line in demo.err.splitlines()]
    assert (rails, paths) == ("GPUs of each rail", list(PATHS))
    handlers = logging.getLogger("railwave").handlers
    assert not any(isinstance(handler, logging.StreamHandler) for handler in handlers)


def test_one_rail_and_chosen_paths(tmp_path):
    sizes = ["--nodes=2", "--gpus=2", "--rails=1", "--tokens=3", "--hidden=2", "--experts=6"]
    file = tmp_path / "report.json"
    result = run("demo", *sizes, "--path", "joint,native", "--path", "joint", "--json", file)
    report = json.loads(file.read_text())
    assert (result.code, list(report["paths"])) == (0, ["joint", "native"])
    assert result.err == ""
    for path in report["paths"].values():
        assert path["rail_share"] == path["rail_share_before"] == [1.0]
        assert (path["quota_spread"], path["relocated"]) == (0, 0)


def test_nothing_to_send(tmp_path):
    file = tmp_path / "report.json"
    result = run(*TINY, "--nodes=1", "--path=joint", "--json", file)
    (path,) = json.loads(file.read_text())["paths"].values()
    assert result.code == 0
    assert path["verified"] and path["rail_share"] == [0.0] and path["put_bytes"] == 0
    assert (path["max_fan_in"], path["rho_g"], path["kappa"]) == (0, 1.0, 1.0)


# What is wrong is said


def flip_lowest_bit(tensor):
    tensor.view(torch.int16)[0, 0] ^= 1


def test_a_flipped_bit_of_combine_is_not_verified(monkeypatch, tmp_path):
    combine = railwave.LocalWorld.combine

    def corrupted(world, outs, handles):
        ys = combine(world, outs, handles)
        flip_lowest_bit(ys[1])
        return ys

    monkeypatch.setattr(railwave.LocalWorld, "combine", corrupted)
    result = run(*TINY, "--skew=0", "--path=joint", "--json", tmp_path / "report.json")
    assert result.code == 1
    assert "NOT VERIFIED: joint (combine: y of rank 1)" in result.out
    assert "Verified" not in result.out
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["paths"]["joint"]["verified"] is False


def test_a_flipped_bit_of_dispatch_is_not_verified(monkeypatch):
    dispatch = railwave.LocalWorld.dispatch

    def corrupted(world, *args, **kwargs):
        received = dispatch(world, *args, **kwargs)
        flip_lowest_bit(received[0].x)
        return received

    monkeypatch.setattr(railwave.LocalWorld, "dispatch", corrupted)
    result = run(*TINY, "--skew=0", "--path=joint")
    assert result.code == 1
    assert "NOT VERIFIED: joint (dispatch: x of rank 0)" in result.out


def test_same_bits_tells_bits_not_values():
    nan, zero = torch.tensor([float("nan"), 1.0]), torch.tensor([0.0])
    assert same_bits(nan, nan.clone())
    assert not same_bits(zero, -zero)
    assert not same_bits(zero, zero.double())
    assert not same_bits(zero, zero[:0])


@pytest.mark.parametrize(
    "argv, message",
    [
        ([], "required: COMMAND"),
        (["fly"], "invalid choice: 'fly'"),
        (["demo", "--nodes=two"], "argument --nodes: invalid int value: 'two'"),
        (["demo", "--nodes=0"], "nodes must be at least 1, got 0"),
        (["demo", "--rails=0"], "rails_per_node must be at least 1, got 0"),
        (["demo", "--hidden=-1"], "hidden must be at least 1, got -1"),
        (["demo", "--topk=65"], "top_k must be at most num_experts (64), got 65"),
        (["demo", "--skew=nan"], "skew must be finite"),
        (["demo", "--path=joint,fast"], "--path must be of native, rail, permutation, joint"),
        (["demo", "--json=no/such/folder/x.json"], "--json must be in an existing folder"),
        (["demo", "--json=."], "--json must be a file, got the directory '.'"),
        (["demo", "--gpus=1", "--tokens=1", f"--hidden={10**15}"], "more memory than there is"),
        (["replay", "no-folder", "--iteration=1", "--layer=0"], "got 'no-folder'"),
        (["replay", EXAMPLE_TRACE, "--iteration=2", "--layer=0"], "iteration must be one of [1]"),
        (["replay", EXAMPLE_TRACE, "--iteration=1", "--layer=7"], "layer must be one of"),
        (
            ["replay", EXAMPLE_TRACE, "--iteration=1", "--layer=0", "--nodes=3", "--gpus=4"],
            "nodes * gpus must be the 8 ranks of the trace, got 3 * 4 = 12",
        ),
        (
            ["replay", EXAMPLE_TRACE, "--iteration=1", "--layer=0", "--nodes=2", "--tokens=few"],
            "argument --tokens: invalid number of tokens value: 'few'",
        ),
    ],
)
def test_a_mistake_is_one_line_and_code_2_before_anything_runs(monkeypatch, argv, message):
    monkeypatch.setattr(report_module, "run_paths", lambda *_: pytest.fail("it ran"))
    result = run(*argv)
    assert result.code == 2
    assert result.err.startswith("railwave: error: ") and message in result.err
    assert result.err.count("\n") == 1 and result.err.endswith("\n")
    assert result.out == ""


def test_a_fault_of_ours_keeps_its_traceback(monkeypatch):
    def stuck(*_, **__):
        raise RuntimeError("railwave: no PE can go on")

    monkeypatch.setattr(report_module, "run_paths", stuck)
    with pytest.raises(RuntimeError, match="no PE can go on"):
        run(*TINY)


@pytest.mark.parametrize("argv", [["--help"], ["demo", "--help"], ["replay", "--help"]])
def test_help(capsys, argv):
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == 0
    assert capsys.readouterr().out.startswith("usage: railwave")


def test_version(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"railwave {railwave.__version__}\n"


# The report's file and table


def test_json_is_written_whole_or_not_at_all(tmp_path):
    file, link = tmp_path / "report.json", tmp_path / "link.json"
    file.write_text("old")
    file.chmod(0o640)
    link.symlink_to(file)
    with pytest.raises(TypeError):
        write_json(str(link), {"a": object()})
    assert file.read_text() == "old"
    write_json(str(link), {"a": 1})
    assert link.is_symlink() and json.loads(file.read_text()) == {"a": 1}
    assert file.stat().st_mode & 0o777 == 0o640
    assert sorted(tmp_path.iterdir()) == [link, file]


def test_json_into_a_pipe_leaves_the_pipe(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_json(str(pipe), {"a": 1})
        assert json.loads(os.read(reader, 1000)) == {"a": 1}
    finally:
        os.close(reader)
    assert pipe.is_fifo()


@pytest.mark.parametrize("rails", [1, 8, 9, 16, 17, 64])
def test_table_fits_100_columns(capsys, rails):
    share = tuple(2 * (r + 1) / rails / (rails + 1) for r in range(rails))
    path = PathReport(
        path="permutation",
        mismatch="",
        hot_node=63,
        rail_share_before=(1.0,) + (0.0,) * (rails - 1),
        rail_share=share,
        quota_spread=99_999,
        rho_g=64.25,
        kappa=64.25,
        max_fan_in=63,
        relocated=9_999_999,
        put_bytes=10**12,
        num_rows=10**8,
        seconds=1.0,
    )
    case = SimpleNamespace(num_tokens=[10**7])
    print_report(Report(case, (path,)), seconds=100.0)
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 100 for line in lines)
    (row,) = [line for line in lines if line.startswith("permutation ")]
    for value in ("yes", "->", "99,999", "64.25", "63", "9,999,999"):
        assert value in row
    assert "…" not in row


def test_progress_is_told_before_each_phase():
    topo = railwave.Topology(2, 1, 1)
    case = demo_case(topo, num_tokens=1, hidden=1, num_experts=2, top_k=1, skew=0.0, seed=0)
    steps = []
    report = run_paths(case, ["rail", "joint"], lambda done, name: steps.append((done, name)))
    names = ["rail: dispatch", "rail: combine", "joint: dispatch", "joint: combine"]
    assert steps == list(enumerate(names))
    assert report.verified and report.num_rows == 2


def test_paths_side_by_side_give_the_same_report():
    topo = railwave.Topology(2, 1, 1)
    case = demo_case(topo, num_tokens=2, hidden=3, num_experts=2, top_k=1, skew=0.0, seed=0)
    steps = []
    apart = run_paths(case, ["joint", "native"], lambda done, name: steps.append(done), processes=2)
    together = run_paths(case, ["joint", "native"], lambda done, name: None)
    assert steps == [2, 4]
    for one, other in zip(apart.paths, together.paths, strict=True):
        assert one.verified and replace(one, seconds=0.0) == replace(other, seconds=0.0)


# Replay


def test_replay_case_reproduces_the_counts():
    counts = read_counts(EXAMPLE_TRACE, 1, 2, micro_batch=1)
    sizes = {"hidden": 3, "top_k": 2, "seed": 4}
    case = replay_case(railwave.Topology(2, 4, 2), counts, num_tokens=0, **sizes)
    for topk_idx, row in zip(case.routing.topk_idx, counts, strict=True):
        assert torch.equal(torch.bincount(topk_idx.flatten(), minlength=len(row)), row)
        assert (topk_idx[:, 0] != topk_idx[:, 1]).all()
    few = replay_case(railwave.Topology(2, 4, 2), counts, num_tokens=5, **sizes)
    assert few.num_tokens == [5] * 8 and few.hidden == 3
    assert not torch.equal(few.routing.topk_idx[0], few.routing.topk_idx[1])
    again = replay_case(railwave.Topology(2, 4, 2), counts, num_tokens=5, **sizes)
    assert all(map(torch.equal, few.routing.topk_idx, again.routing.topk_idx))
    assert all(map(torch.equal, few.xs, again.xs))


def test_replay_of_the_example_trace(tmp_path):
    file = tmp_path / "report.json"
    asked = ["--iteration=1", "--layer=1", "--micro-batch=1", "--nodes=2", "--tokens=6"]
    result = run("replay", EXAMPLE_TRACE, *asked, "--hidden=4", "--path=joint", "--json", file)
    assert result.code == 0, result.err
    assert (
        "counts of 8 ranks x 16 experts reproduced exactly; 48 of the 1,024 tokens run"
        in result.out
    )
    report = json.loads(file.read_text())
    joint = report["paths"]["joint"]
    assert joint["verified"] and joint["max_fan_in"] == 1 and joint["quota_spread"] <= 1
    assert len(joint["rail_share"]) == 4
    config = report["config"]
    assert (config["iteration"], config["layer"], config["micro_batch"]) == (1, 1, 1)
    assert config["folder"] == str(EXAMPLE_TRACE)


@pytest.mark.skipif(
    REAL_TRACE is None, reason="no SmartMoE trace in RAILWAVE_TRACE or ../shared/data/smartmoe"
)
def test_replay_of_the_real_trace(tmp_path):
    file = tmp_path / "report.json"
    asked = ["--iteration=501", "--layer=12", "--tokens=4", "--hidden=2", "--path=joint"]
    result = run("replay", REAL_TRACE, *asked, "--json", file)
    assert result.code == 0, result.err
    assert "counts of 16 ranks x 32 experts reproduced exactly; 64 of the 32,768" in result.out
    joint = json.loads(file.read_text())["paths"]["joint"]
    assert joint["verified"] and joint["max_fan_in"] == 1 and joint["quota_spread"] <= 1
