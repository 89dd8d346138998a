"""`railwave simulate`: every source of demand, what it writes, and how it refuses.

Letters: N nodes, G GPUs a node, R rails, W ranks.
"""

import doctest
import importlib.util
import json
import os
import subprocess
import sys

import numpy as np
import pytest

import railwave
from railwave.cli import write_json
from railwave.cli.simulate import _RECORD, _SOURCES
from railwave.sched import SCHEDULERS, Demand
from railwave.sim import Fabric
from railwave.simulation import compare_schedulers
from railwave.workloads import RECORD_BYTES, read_demand
from test_cli import EXAMPLE_TRACE, run

ROW = {
    *("scheduler", "time_us", "speedup", "ratio_to_bound", "algbw_gbs", "busbw_gbs", "plan_us"),
    *("rail_share", "rho_g", "fan_in"),
}
TRACE = ["--trace", EXAMPLE_TRACE, "--iteration=1", "--nodes=2", "--gpus=4"]
WORKLOADS = [name for name in _SOURCES if name not in ("trace", "demand")]


@pytest.fixture
def rows_of(tmp_path):
    """Run the command; return its JSON."""

    def rows_of(*argv):
        file = tmp_path / "rows.json"
        result = run("simulate", *argv, "--json", file)
        assert (result.code, result.err) == (0, "")
        return json.loads(file.read_text())

    return rows_of


def check_rows(report, rails):
    """Check the schema, and that the numbers fit one another."""
    assert set(report) == {"bound_us", "sent_bytes", "rows", "config"} and report["bound_us"] > 0
    (native,) = [row for row in report["rows"] if row["scheduler"] == "native"]
    for row in report["rows"]:
        assert set(row) == ROW
        assert row["speedup"] == pytest.approx(native["time_us"] / row["time_us"])
        assert row["ratio_to_bound"] == pytest.approx(row["time_us"] / report["bound_us"])
        assert row["ratio_to_bound"] >= 1 - 1e-9  # sums of float64 times
        assert len(row["rail_share"]) == rails and sum(row["rail_share"]) == pytest.approx(1)
        assert row["algbw_gbs"] == pytest.approx(native["algbw_gbs"] * row["speedup"])
        assert row["plan_us"] > 0 and row["rho_g"] >= 1
        ranks = report["config"]["nodes"] * report["config"]["gpus"]
        assert row["busbw_gbs"] == pytest.approx(row["algbw_gbs"] * (ranks - 1) / ranks)
    assert native["speedup"] == 1


def test_the_default_is_the_papers_extreme_replay_on_h800(rows_of):
    report = rows_of()
    check_rows(report, rails=8)
    assert [row["scheduler"] for row in report["rows"]] == list(SCHEDULERS)
    config = {"workload": "extreme", "preset": "h800", "nodes": 4, "gpus": 8, "rails": 8}
    config |= {"gbps": 200, "nvlink_gbps": 1600, "incast": "none", "seed": 0, "layer": 0}
    assert config.items() <= report["config"].items()
    assert report["config"]["version"] == railwave.__version__
    assert "tokens" not in report["config"]  # not read
    by_name = {row["scheduler"]: row for row in report["rows"]}
    assert by_name["joint"]["speedup"] > by_name["rail"]["speedup"] > 1
    assert by_name["native"]["rail_share"][0] > 0.5
    assert by_name["joint"]["rail_share"] == pytest.approx([1 / 8] * 8, abs=1e-4)


@pytest.mark.parametrize("preset, rails", [("h800", 8), ("h20", 4)])
@pytest.mark.parametrize("workload", WORKLOADS)
def test_every_workload(rows_of, workload, preset, rails):
    tokens = ["--tokens=64"] if "tokens" in _SOURCES[workload][1] else []
    report = rows_of("--workload", workload, "--preset", preset, "--incast=mild", *tokens)
    check_rows(report, rails)
    assert report["config"]["workload"] == workload


def test_trace_and_loads(rows_of, tmp_path):
    report = rows_of(*TRACE, "--layer=2", "--micro-batch=1")
    check_rows(report, rails=4)
    assert report["config"]["trace"] == str(EXAMPLE_TRACE)
    loads = tmp_path / "loads.csv"
    loads.write_text("1,1,1,1,1,1,1,1\n9,1,1,1,1,1,1,1\n")
    even, hot = (rows_of("--loads", loads, f"--layer={layer}") for layer in (0, 1))
    check_rows(hot, rails=8)
    native = [report["rows"][0]["rail_share"] for report in (even, hot)]
    assert native[0] == pytest.approx([1 / 8] * 8) and native[1][0] == pytest.approx(9 / 16)


def test_a_demand_of_ones_own_as_npy_and_csv(rows_of, tmp_path):
    matrix = np.array([[9, 0, 6, 2], [0, 9, 0, 0], [4, 0, 9, 0], [0, 0, 0, 9]])
    np.save(tmp_path / "demand.npy", matrix.astype(float))
    np.savetxt(tmp_path / "demand.csv", matrix, fmt="%d", delimiter=",", header="bytes")
    cluster = ["--nodes=2", "--gpus=2", "--gbps=8e-6", "--nvlink-gbps=8e6"]  # 1 byte/ms a rail
    reports = [rows_of("--demand", tmp_path / f"demand.{end}", *cluster) for end in ("npy", "csv")]
    for report in reports:
        check_rows(report, rails=2)
        assert report["bound_us"] == pytest.approx(4000)
        native, rail = report["rows"][:2]
        assert native["time_us"] == pytest.approx(8000) and native["rail_share"] == [1, 0]
        assert rail["time_us"] == pytest.approx(4000) and rail["rail_share"] == [0.5, 0.5]


def test_chosen_schedulers_and_their_knobs(rows_of):
    report = rows_of("--scheduler=joint,native", "--scheduler", "joint", "--rail-rule=destination")
    assert [row["scheduler"] for row in report["rows"]] == ["joint", "native"]
    alone = rows_of("--scheduler=joint", "--wave-latency-us=100", "--grant-latency-us=10")
    assert [row["scheduler"] for row in alone["rows"]] == ["joint"]
    # Three waves, two of them granted; native is counted without being a row.
    assert alone["rows"][0]["time_us"] == pytest.approx(report["rows"][0]["time_us"] + 320)
    assert alone["rows"][0]["speedup"] > 1


def test_prints_times_and_rails():
    result = run("simulate", "--scheduler=native,joint", "--incast=severe")
    lines = result.out.splitlines()
    assert all(len(line) <= 100 for line in lines) and "\x1b" not in result.out
    assert lines[1].startswith("4 x 8 GPUs, 8 rails of 200 Gb/s")
    times, rails = [line.split() for line in lines if line.startswith("native  ")]
    assert len(times) == 7 and times[2] == "1.00"
    assert len(rails) == 12 and sum(map(float, rails[2:10])) == pytest.approx(100, abs=0.5)


@pytest.mark.parametrize("gpus", [1, 9, 64])
def test_any_number_of_rails_fits_100_columns(gpus):
    counts = ["--experts=256", "--topk=1", "--tokens=4"]
    sizes = [f"--gpus={gpus}", f"--rails={gpus}", "--scheduler=native,rails_lpt"]
    result = run("simulate", "--workload=uniform", *sizes, *counts)
    assert result.code == 0, result.err
    assert all(len(line) <= 100 and "…" not in line for line in result.out.splitlines())


def test_nothing_to_send(rows_of, tmp_path):
    """Times are 0 and no ratio divides by one."""
    np.save(tmp_path / "demand.npy", np.zeros((4, 4)))
    report = rows_of("--demand", tmp_path / "demand.npy", "--nodes=2", "--gpus=2")
    assert report["bound_us"] == 0
    for row in report["rows"]:
        assert (row["time_us"], row["speedup"], row["ratio_to_bound"]) == (0, 1, 1)
        assert row["rail_share"] == [0, 0]
    if importlib.util.find_spec("matplotlib"):
        from railwave.plots import plot_comparison

        plot_comparison(report).savefig(tmp_path / "plot.png")


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    had_pyplot = "matplotlib.pyplot" in sys.modules
    for end, begins in (("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")):
        file = tmp_path / f"plot.{end}"
        result = run("simulate", "--scheduler=native,joint", "--plot", file)
        assert result.code == 0 and result.out.endswith(f"\nthe picture is in {file}\n")
        assert file.read_bytes().startswith(begins)
    assert ("matplotlib.pyplot" in sys.modules) == had_pyplot


def test_the_figure_shows_the_numbers():
    pytest.importorskip("matplotlib")
    from railwave.plots import plot_comparison

    demand = Demand.of([[0, 0, 8, 0]] + [[0] * 4] * 3, railwave.Topology(2, 2, 2))
    comparison = compare_schedulers(demand, Fabric(1e3), schedulers=["native", "joint"])
    figure = plot_comparison(comparison.to_json(), title="mine")
    times, shares = figure.axes
    assert [bar.get_width() for bar in times.patches] == pytest.approx([8, 4])
    assert [label.get_text() for label in times.get_yticklabels()] == ["native", "joint"]
    heights = [-bar.get_height() for bar in shares.patches]
    assert heights == pytest.approx([heights[0], 0, heights[0] / 2, heights[0] / 2])
    with pytest.raises(ValueError, match="at least one row, got none"):
        plot_comparison({"bound_us": 1.0, "rows": []})


def test_a_plot_without_matplotlib_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.delitem(sys.modules, "railwave.plots", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib.axes", None)
    result = run("simulate", "--plot", tmp_path / "plot.png")
    message = "railwave: error: --plot needs matplotlib: pip install 'railwave[notebook]'\n"
    assert (result.code, result.out, result.err) == (2, "", message)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'railwave\[notebook\]'"):
        import railwave.plots  # noqa: F401


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--workload=fly"], "argument --workload: invalid choice: 'fly'"),
        (["--scheduler=joint,fly"], "--scheduler must be of native, rail, permutation, joint"),
        (["--workload=ring", *TRACE], "may be given, got --workload and --trace"),
        (["--demand=x.npy", *TRACE], "may be given, got --trace and --demand"),
        (["--demand=x.npy", "--loads=x.csv"], "--loads must go with one of ring, moderate"),
        (["--hot-share=0.5"], "--hot-share must go with one of hot, got --workload extreme"),
        (["--tokens=3", *TRACE], "--tokens must go with one of uniform, zipf, hot, got --trace"),
        (["--demand=x.txt"], "a demand must be a .npy or .csv file, got 'x.txt'"),
        (["--demand=no.npy"], "no.npy"),
        (["--trace=no-folder", "--iteration=1"], "got 'no-folder'"),
        (["--trace", EXAMPLE_TRACE], "--iteration must be given with --trace, one of [1]"),
        ([*TRACE, "--nodes=4"], "topo must have the 8 ranks of the trace"),
        (["--nodes=8"], "nodes must be 4 for 'extreme' (the paper's Table 8), got 8; ring"),
        (["--workload=r28", "--hot-rails=9"], "hot_rails must be in [1, 8], got 9"),
        (["--layer=45"], "--layer must be in [0, 45), got 45"),
        (["--gbps=0"], "--gbps must be in [1e-06, 1e+09] Gb/s, got 0.0"),
        (["--nvlink-gbps=inf"], "--nvlink-gbps must be in [1e-06, 1e+09] Gb/s, got inf"),
        (["--wave-latency-us=-1"], "--wave-latency-us must be in [0, 1e+12] us, got -1.0"),
        (["--gpus=0"], "gpus_per_node must be at least 1, got 0"),
        (["--incast=some"], "argument --incast: invalid incast value: 'some'"),
        (["--chunk-bytes=0"], "chunk_bytes must be at least 1, got 0"),
        (["--record-bytes=0"], "record_bytes must be at least 1, got 0"),
        (["--json=no/such/folder/x.json"], "--json must be in an existing folder"),
        (["--plot=no/such/folder/x.png"], "--plot must be in an existing folder"),
        (["--plot=x.jpg"], "--plot must end in .png, .svg, .pdf, got 'x.jpg'"),
        (["--seed=-1"], "seed must be at least 0, got -1"),
    ],
)
def test_a_mistake_is_one_line_and_code_2(argv, message):
    result = run("simulate", *argv)
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("railwave: error: ") and message in result.err
    assert result.err.count("\n") == 1


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.npy", b"text", "must be a .npy file of numbers"),
        ("a.npy", np.zeros((4, 3)), "must be of shape (4, 4), the ranks of 2 x 2 GPUs, got (4, 3)"),
        ("a.npy", np.full((4, 4), 0.5), "row 0, column 0: must be a whole number in [0, 2**53)"),
        ("a.npy", np.full((4, 4), np.nan), "row 0, column 0: must be a whole number"),
        ("a.npy", np.full((4, 4), np.inf), "row 0, column 0: must be a whole number"),
        ("a.npy", -np.eye(4, dtype=int), "row 0, column 0: must be a whole number"),
        ("a.npy", np.full((4, 4), 2**52), "must have a sum below 2**53"),
        ("a.npy", np.full((4, 4), "x"), "must be numbers, got <U1"),
        ("a.csv", b"0,1\n2", "line 2: rows must have the same number of ranks, got 1 and 2"),
        ("a.csv", b"0,x", "line 1, field 2: must be a whole number in [0, 2**53), got 'x'"),
        ("a.csv", b"", "must be of shape (4, 4), the ranks of 2 x 2 GPUs, got (0,)"),
    ],
)
def test_a_bad_demand_file_is_named_with_the_rule(tmp_path, name, content, message):
    file = tmp_path / name
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        np.save(file, content)
    result = run("simulate", "--demand", file, "--nodes=2", "--gpus=2")
    assert result.code == 2 and str(file) in result.err and message in result.err


def test_read_demand_example(tmp_path):
    file = tmp_path / "demand.csv"
    file.write_text("0,8\n3,0\n")
    demand = read_demand(file, railwave.Topology(2, 1, 1))
    assert demand.between_nodes.tolist() == [[0, 8], [3, 0]]


def test_compare_schedulers_example():
    demand = Demand.of([[0, 0, 8, 0]] + [[0] * 4] * 3, railwave.Topology(2, 2, 2))
    steps = []
    comparison = compare_schedulers(
        demand, Fabric(1e6), schedulers=["joint"], progress=lambda *step: steps.append(step)
    )
    (joint,) = comparison.rows
    assert (comparison.bound_us, joint.time_us, joint.speedup) == pytest.approx((4, 4, 2))
    assert joint.rail_share == (0.5, 0.5) and steps == [(0, "native"), (1, "joint")]
    with pytest.raises(ValueError, match=r"schedulers must be of .*, got 'fly'"):
        compare_schedulers(demand, Fabric(1.0), schedulers=["fly"])


def test_records_are_the_papers():
    assert _RECORD["record_bytes"] == RECORD_BYTES


@pytest.mark.parametrize("name", ["simulation", "cli.options"])
def test_examples(name):
    result = doctest.testmod(importlib.import_module(f"railwave.{name}"))
    assert result.attempted > 0 and result.failed == 0


def test_what_a_run_assumes_is_said(tmp_path):
    windows = "native and rail send in the 3 window(s) of the workload"
    assert windows in run("simulate", "--scheduler=joint").out
    uniform = ("simulate", "--workload=uniform", "--tokens=4", "--scheduler=native")
    said = run(*uniform, "--nodes=8", "--gpus=1", "--incast=4.0").out
    assert windows not in said and "incast a = 4.0" in said
    assert "here up to 7 send at once" in said
    assert "at once" not in run(*uniform, "--incast=severe").out
    assert "4 of 8 rails have no GPU" in run(*uniform, "--gpus=4", "--rails=8").out
    file = tmp_path / "run.json"
    by_map = run(*uniform, "--gpus=4", "--rails=1,1,0,3", "--json", file)
    assert "4 x 4 GPUs, 4 rails" in by_map.out and "1 of 4 rails have no GPU" in by_map.out
    config = json.loads(file.read_text())["config"]
    assert config["rails"] == 4 and config["rail_of_gpu"] == [1, 1, 0, 3]
    alone = run(*uniform, "--nodes=1").out.splitlines()
    assert len(alone) == 3 and alone[2].startswith("nothing is sent between nodes: ")


def test_fan_in_is_of_what_sends_at_once(rows_of):
    fan_in = {row["scheduler"]: row["fan_in"] for row in rows_of()["rows"]}
    assert fan_in == {
        **dict.fromkeys(("native", "rail", "rails_lpt", "rate"), 3),
        **dict.fromkeys(("permutation", "joint", "granted", "fast"), 1),
    }


@pytest.mark.parametrize("name", SCHEDULERS)
def test_what_is_no_demand_is_refused(name):
    with pytest.raises(TypeError, match=r"demand must be a railwave\.sched\.Demand, got ndarray"):
        SCHEDULERS[name](np.zeros((2, 2)))


def test_wrong_names_and_numbers_are_refused():
    demand = Demand.of(np.zeros((2, 2), int), railwave.Topology(2, 1, 1))
    with pytest.raises(TypeError, match="schedulers must be a sequence of names, got 'native'"):
        compare_schedulers(demand, Fabric(1.0), schedulers="native")
    with pytest.raises(ValueError, match=r"options must be of .*, got 'jiont'"):
        compare_schedulers(demand, Fabric(1.0), options={"jiont": {}})
    with pytest.raises(TypeError, match="incast must be a number, got 'severe'"):
        Fabric(1.0, incast="severe")


@pytest.mark.parametrize(
    "argv, said",
    [
        (["--gbps=1e-310"], "--gbps must be in"),
        (["--incast=1e308"], "--incast"),
        (["--wave-latency-us=1e308"], "--wave-latency-us must be in"),
        (["--workload=n28", f"--record-bytes={10**30}"], "record_bytes must be below"),
        (["--workload=uniform", f"--chunk-bytes={10**30}"], "chunk_bytes must be below"),
        (["--workload=uniform", "--tokens=1000000000000000000"], "more memory than there is"),
        (["--json=out.png", "--plot=out.png"], "--json must be another file than --plot"),
        (["--demand=d.npy", "--json=d.npy"], "--json must be another file than --demand"),
    ],
)
def test_what_would_hang_overflow_or_overwrite_is_refused(argv, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save("d.npy", np.zeros((4, 4), int))
    before = (tmp_path / "d.npy").read_bytes()
    result = run("simulate", *argv)
    assert result.code == 2 and said in result.err and result.out == ""
    assert (tmp_path / "d.npy").read_bytes() == before


@pytest.mark.parametrize(
    "content", [b"PK\x03\x04", b"", b"\x93NUMPY\x01\x00\x0a\x00{'descr': ", b"\xff" * 40]
)
def test_a_damaged_npy_is_named(content, tmp_path):
    file = tmp_path / "demand.npy"
    file.write_bytes(content)
    result = run("simulate", "--demand", file, "--nodes=2", "--gpus=2")
    assert result.code == 2 and f"{file}: must be a .npy file of numbers" in result.err


def test_a_very_large_demand_is_sprayed_in_larger_chunks(tmp_path):
    matrix = np.zeros((4, 4), np.int64)
    matrix[0, 2] = matrix[2, 0] = 2**51
    np.save(tmp_path / "demand.npy", matrix)
    result = run("simulate", "--demand", tmp_path / "demand.npy", "--nodes=2", "--gpus=2")
    assert (result.code, result.err) == (0, "")


@pytest.mark.parametrize(
    "matrix, said",
    [
        ([[0, 2**53], [0, 0]], r"whole numbers of bytes in \[0, 2\*\*53\), got 9007199254740992"),
        ([[0, 2**52], [2**52, 0]], r"a sum below 2\*\*53 bytes"),
        ([[0, np.inf], [0, 0]], r"got inf at \(0, 1\)"),
        ([[0, np.nan], [0, 0]], r"got nan at \(0, 1\)"),
        ([[0, -1], [0, 0]], r"got -1 at \(0, 1\)"),
        ([[0, 0.5], [0, 0]], r"got 0.5 at \(0, 1\)"),
    ],
)
def test_a_demand_whose_sums_would_not_be_exact_is_refused(matrix, said):
    with pytest.raises(ValueError, match=f"matrix must .*{said}"):
        Demand.of(matrix, railwave.Topology(2, 1, 1))


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib")
def test_a_dollar_in_a_files_name_is_no_formula(tmp_path):
    file = tmp_path / "a$b_{$.csv"
    file.write_text("0,1\n2,0\n")
    argv = ("--demand", file, "--nodes=2", "--gpus=1", "--plot", tmp_path / "p.png")
    assert run("simulate", *argv).code == 0


def test_a_reader_that_has_enough_is_no_error():
    command = f"{sys.executable} -m railwave simulate --scheduler=native; echo $? >&2"
    ended = subprocess.run(
        ["bash", "-c", f"({command}) | true"], capture_output=True, text=True, timeout=60
    )
    assert ended.stderr.split() == ["141"]


def test_another_programs_part_is_not_removed(tmp_path):
    part = tmp_path / f"x.json.{os.getpid()}.part"
    part.write_text("another's")
    with pytest.raises(FileExistsError):
        write_json(str(tmp_path / "x.json"), {})
    assert part.read_text() == "another's"
