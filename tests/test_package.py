"""What users get: a wheel that works by itself, and examples that run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

TINY = """
import torch, railwave
assert railwave.__file__.startswith({site!r}), railwave.__file__
world = railwave.LocalWorld(railwave.Topology(2, 1, 1), num_experts=2, top_k=1, hidden=2,
                            max_tokens_per_rank=1)
received = world.dispatch([torch.ones(1, 2)[:, :1].bfloat16()] * 2, [torch.tensor([[1]])] * 2,
                          [torch.ones(1, 1)] * 2)
print([len(r.x) for r in received])
import torch.distributed as dist
dist.init_process_group("gloo", init_method="file://{site}/group", rank=0, world_size=1)
with railwave.init(railwave.Topology(1, 1, 1), num_experts=2, top_k=1, hidden=2,
                   max_tokens_per_rank=1) as rw:
    x = torch.ones(1, 2).bfloat16()
    print(len(railwave.dispatch(x, torch.tensor([[1]]), torch.ones(1, 1)).x))
"""


def test_the_wheel_works_outside_the_checkout(tmp_path):
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    plain = ["--no-deps", "--no-build-isolation"]
    source = tmp_path / "source"
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    for name in files.stdout.split():
        if name.startswith(("railwave/", "pyproject", "README", "LICENSE")):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    subprocess.run([*pip, "wheel", *plain, "-w", tmp_path, source], check=True, timeout=120)
    (wheel,) = tmp_path.glob("railwave-*-py3-none-any.whl")
    site = tmp_path / "site"
    subprocess.run([*pip, "install", *plain, "--target", site, wheel], check=True, timeout=120)
    assert (site / "railwave" / "py.typed").exists()
    run = subprocess.run(
        [sys.executable, "-c", TINY.format(site=str(site))],
        env={**os.environ, "PYTHONPATH": str(site)},
        **{"cwd": tmp_path, "capture_output": True, "text": True, "timeout": 120},
    )
    assert (run.stdout, run.stderr) == ("[0, 2]\n1\n", "")


@pytest.mark.parametrize(
    "name, ranks, said",
    [
        ("torchrun_dispatch.py", 8, "8 ranks as 2 nodes; rows received: "),
        ("serve_static.py", 4, "4 ranks, 5 "),
        ("mixtral_ep.py", 4, "4 ranks, 20 steps; loss "),  # fails by itself above 1e-5
    ],
)
def test_the_torchrun_examples_run(name, ranks, said):
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    file, *arguments = name.split()
    run = subprocess.run(
        [*torchrun, f"--nproc-per-node={ranks}", ROOT / "examples" / file, *arguments],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        **{"capture_output": True, "text": True, "timeout": 300},
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith(said)
    assert float(run.stdout.split()[-1]) < 1e-4


CALLS = """
import torch
import railwave
x = torch.ones(1, 8)

rw = railwave.init(railwave.Topology(2, 2, 2), num_experts=8, top_k=1, hidden=8,
                   max_tokens_per_rank=1, deadline_s=1.0)
railwave.init(railwave.Topology(2, 2, 2), num_experts="8", top_k=1, hidden=8,
              max_tokens_per_rank=1)
railwave.init(railwave.Topology(2, 2, 2), num_experts=8)
received: int = rw.dispatch(x, x, x)
y: torch.Tensor = railwave.combine(rw.dispatch(x, x, x).x, rw.dispatch(x, x, x).handle)
railwave.combine(x, x)
"""


def test_a_type_checker_passes_right_calls_and_refuses_wrong_ones(tmp_path):
    calls = tmp_path / "calls.py"
    calls.write_text(CALLS)
    run = subprocess.run(
        [
            *(sys.executable, "-m", "mypy", "--strict", "--cache-dir", tmp_path / "cache"),
            *(ROOT / "examples" / "torchrun_dispatch.py", calls),
        ],
        **{"cwd": tmp_path, "capture_output": True, "text": True, "timeout": 300},
    )
    errors = {line.partition(": error:")[0] for line in run.stdout.splitlines() if "error:" in line}
    assert errors == {"calls.py:8", "calls.py:10", "calls.py:11", "calls.py:13"}, run.stdout
