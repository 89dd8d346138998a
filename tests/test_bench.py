"""Benchmarks run; what they measure is no matter of a test."""

import doctest
import json
import os
import stat

import pytest
import torch

from bench import floor, kernels, mps, run, sampling, vdev


def test_the_kernels_are_measured_one_json_line_each(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "PUT_BYTES", 1 << 10)
    sizes = ["--nodes", "2", "--gpus", "2", "--tokens", "4", "--hidden", "8", "--top-k", "2"]
    sizes += ["--plan-nodes", "3"]
    out = tmp_path / "results.jsonl"
    once = ["--repeats", "1", "--samples", "2", "--device", "cpu", "--out", str(out)]
    assert run.main(["kernels", *sizes, *once]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert out.read_text().splitlines() == lines
    results = {result["kernel"]: result for result in map(json.loads, lines)}
    assert list(results) == [
        *(
            "count",
            "quota",
            "match",
            "count+quota+match",
            "pack",
            "put",
            "unpack",
            "finish",
            "put 0 MiB",
        )
    ]
    for result in results.values():
        assert 0 < result["min_us"] <= result["median_us"] <= result["p90_us"]
    assert results["put"]["bytes"] > 0 and results["put"]["nodes"] == 2
    assert results["quota"]["nodes"] == 3


def test_one_process_a_gpu_is_measured_against_its_peers_also_without_gpus(capsys):
    sizes = ["--gpus", "2", "--tokens", "8", "--hidden", "16", "--experts", "4"]
    once = ["--top-k", "2", "--samples", "2", "--device", "cpu", "--time-limit", "100"]
    assert run.main(["multigpu", *sizes, *once]) == 0
    results = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [r["left_out"] for r in results if "left_out" in r] == ["vdev_2d", "copies", "graphs"]
    timed = [r for r in results if "left_out" not in r]
    forms = [
        *(("dispatch", "copy"), ("combine", "copy"), ("dispatch", "all_to_all_single")),
        *(("dispatch", "all_to_all_single, x alone"), ("combine", "all_to_all_single")),
    ]
    assert [(r["layout"], r["phase"], r["form"]) for r in timed] == [
        (layout, *form) for layout in ("nodes", "node") for form in forms
    ]
    for result in timed:
        assert 0 < result["min_us"] <= result["median_us"] <= result["p95_us"]
        assert 0 < result["bytes"] <= result["tokens"] * 16 * 2


def test_processes_that_take_too_long_are_ended_and_said_to(capsys):
    sizes = ["--gpus", "2", "--tokens", "8", "--hidden", "16", "--device", "cpu"]
    with pytest.raises(RuntimeError, match="nodes node: the time limit is past"):
        run.main(["multigpu", *sizes, "--time-limit", "0.5"])
    assert "left_out" in capsys.readouterr().out


def test_the_exchange_is_measured_by_a_process_a_pe(tmp_path):
    out = tmp_path / "results.jsonl"
    sizes = ["--pes", "2", "--tokens", "8", "--hidden", "16", "--experts", "4", "--paths", "joint"]
    once = ["--samples", "2", "--device", "cpu", "--out", str(out)]
    assert run.main(["exchange", *sizes, *once]) == 0
    peer, *results = map(json.loads, out.read_text().splitlines())
    assert peer["form"] == "all_to_all_vdev_2d" and peer["skipped"] == "no GPU"
    phases = ["dispatch", "combine", "both", "forward", "backward", "both", "dispatch"]
    assert [result["phase"] for result in results] == phases
    for result in results:
        assert 0 < result["min_us"] <= result["median_us"] <= result["p95_us"] <= result["p99_us"]
        assert result["samples"] == 2 and (result["pes"], result["nodes"]) == (2, 2)


@pytest.mark.parametrize("module", [floor, vdev, sampling])
def test_the_numbers_of_a_docstring_are_right(module):
    result = doctest.testmod(module)
    assert result.attempted and not result.failed


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_that_is_not_there_is_refused_and_no_file_touched(capsys, tmp_path):
    out = tmp_path / "results.jsonl"
    out.write_text("earlier")
    with pytest.raises(SystemExit):
        run.main(["kernels", "--out", str(out)])
    assert "--device must be cpu where torch finds no GPU" in capsys.readouterr().err
    assert out.read_text() == "earlier"


@pytest.fixture
def control(tmp_path, monkeypatch):
    """Put a program in the daemon's place that notes its calls."""
    program = tmp_path / "nvidia-cuda-mps-control"
    program.write_text(f'#!/bin/sh\necho "$@" $(cat < /dev/stdin) >> {tmp_path}/calls\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    return tmp_path / "calls"


def test_the_daemon_is_private_and_always_stopped(control):
    with pytest.raises(KeyboardInterrupt), mps.mps_daemon():
        folder = os.environ["CUDA_MPS_PIPE_DIRECTORY"]
        assert os.path.isdir(folder)
        assert control.read_text().split() == ["-d"]
        raise KeyboardInterrupt
    assert control.read_text().split() == ["-d", "quit"]
    assert not os.path.exists(folder) and "CUDA_MPS_PIPE_DIRECTORY" not in os.environ


def test_a_command_runs_under_the_daemon_and_gives_its_exit_code(control, monkeypatch, capsys):
    monkeypatch.setattr(
        "sys.argv", ["mps", "sh", "-c", 'test -d "$CUDA_MPS_LOG_DIRECTORY" && exit 7']
    )
    assert mps.main() == 7
    assert control.read_text().split() == ["-d", "quit"]
    monkeypatch.setattr("sys.argv", ["mps"])
    assert mps.main() == 2 and "usage" in capsys.readouterr().err


def test_a_machine_without_mps_says_so(monkeypatch):
    monkeypatch.setattr(mps, "_places", lambda: ["/nowhere"])
    with (
        pytest.raises(FileNotFoundError, match="nvidia-cuda-mps-control is in none of"),
        mps.mps_daemon(),
    ):
        pass
