"""The frozen test asks about what the table does not hold, and reports whatever comes out."""

import doctest
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench import frozen
from railwave import CostTable, Topology
from railwave.config import PATHS, Config
from railwave.cost_table import Point, fingerprint
from railwave.retention import CONTROL
from railwave.sched import Anchor, Scales

ROOT = Path(__file__).parents[1]


def table(anchors=(), points=(), *, nodes=4, gpus=2, hidden=512):
    empty = CostTable({"hidden": str(hidden)}, Scales(rails=gpus), anchors, points)
    topo = Topology(nodes, gpus, gpus)
    config = Config(topo, dtype=torch.bfloat16, **frozen.sizes(empty, topo))
    here = fingerprint(config, "shared memory")
    return CostTable(here, Scales(rails=gpus), anchors, points), config


def test_the_examples_hold():
    assert doctest.testmod(frozen).failed == 0


def test_requests_are_new_to_the_table_and_lie_near_between_and_beyond_its_points():
    samples = {path: (1.0,) * 5 for path in (*PATHS, CONTROL)}
    # The even corner of a payload that is asked for: it is left out.
    known = Point(0.6, 1.0, 1.0, samples, "")
    anchors = (Anchor(0.5, 1, 1, "native"), Anchor(1, 1, 1, "permutation"))
    made, config = table(anchors, (known,))
    asked = list(frozen.requests(config, made))
    places = {(r.payload_mib, r.rho, r.kappa) for r in asked}
    assert len(places) == len(asked)
    assert not places & {(a.payload_mib, a.rho, a.kappa) for a in (*anchors, known)}
    paths = [
        made.select(payload_bytes=r.payload_mib * (1 << 20), rho=r.rho, kappa=r.kappa).path
        for r in asked
    ]
    assert {"native", "permutation", "joint"} == set(paths)
    assert min(places)[0] == pytest.approx(0.5 / 1.5, rel=0.01)
    assert max(places)[0] == pytest.approx(1.5, rel=0.01)
    corners = {(round(r.rho, 1), round(r.kappa, 1)) for r in asked}
    assert {(1, 1), (1, 3), (2, 1), (2, 3), (1.5, 2)} <= corners
    assert any(r.rho > 1 and p == "native" for r, p in zip(asked, paths, strict=True))


def test_a_table_without_anything_has_no_requests():
    with pytest.raises(ValueError, match="--table must hold an anchor or a point"):
        table()


def test_switches_are_told_from_what_stays_joint():
    ratios = [("joint", 0.9), ("native", 0.8), ("native", 1.25), ("permutation", 1.0)]
    found = frozen.summary([{"path": path, "ratio": ratio} for path, ratio in ratios])
    assert (found["requests"], found["switches"], found["helped"]) == (4, 3, 1)
    assert found["ratio_switches"] == {"mean": 1.0, "min": 0.8, "max": 1.25}
    assert found["ratio_all"]["max"] == 1.25
    assert frozen.summary([])["ratio_switches"] is None


def test_the_recorded_results_are_what_their_table_decides():
    results = ROOT / "bench" / "results"
    table = CostTable.load(results / "calibrate-h200.json")
    *asked, last = map(json.loads, (results / "frozen-h200.jsonl").read_text().splitlines())
    known = {(p.payload_mib, p.rho, p.kappa) for p in table.points}
    for one in asked:
        assert (one["payload_mib"], one["rho"], one["kappa"]) not in known
        traffic = {"rho": one["rho"], "kappa": one["kappa"]}
        decision = table.select(payload_bytes=one["payload_mib"] * (1 << 20), **traffic)
        assert (one["path"], one["anchor"]) == (decision.path, decision.anchor)
    found = frozen.summary(asked)
    assert found.items() <= last.items() and (found["switches"], found["helped"]) == (6, 6)


def test_ranks_of_torchrun_measure_it_one_json_line_a_request(tmp_path):
    payload = 40 * 16 / (1 << 20)
    made, _ = table((Anchor(payload, 1, 1, "native"),), nodes=2, gpus=1, hidden=8)
    made.save(tmp_path / "table.json")
    out = tmp_path / "results.jsonl"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    command = ["-m", "bench.frozen", f"--table={tmp_path}/table.json", "--nodes=2"]
    options = ["--samples=2", "--device=cpu", f"--out={out}"]
    ran = subprocess.run(
        [*torchrun, *command, *options],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()
    assert out.read_text().splitlines() == lines
    *results, last = map(json.loads, lines)
    assert [result["path"] for result in results] == ["joint", "native", "native", "joint"]
    for result in results:
        assert result["ratio"] == result["joint_us"] / result["chosen_us"] > 0
        assert result["anchor"] == (0 if result["path"] == "native" else None)
        assert result["machine"] and result["reason"]
    assert (last["requests"], last["switches"]) == (4, 2)
    assert 0 <= last["helped"] <= 2 and last["ratio_switches"]["min"] > 0
