"""The site builds without a warning, and what its pages name is there and runs."""

import ast
import importlib
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

import railwave
from railwave.cli import _parser
from railwave.discovery import Gpu, Nic, arrange

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(path for path in DOCS.rglob("*.md") if "_build" not in path.parts)
TEXTS = {str(page.relative_to(DOCS)): page.read_text(encoding="utf-8") for page in PAGES}
NOT_RUN = "# not run here: "
PARTS = ("sched", "workloads", "discovery", "plots")
MODULES = ("railwave", *(f"railwave.{part}" for part in PARTS))
ENVIRONMENT = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
ENVIRONMENT["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])


def blocks(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)


COMMANDS = [
    (page, re.sub(r"\s+#.*", "", line))
    for page, text in TEXTS.items()
    for block in blocks(text, "sh")
    for line in block.splitlines()
]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Build the site; a minute at most. What it needs is among the tested versions."""
    for package in ("sphinx", "myst_parser", "furo"):
        assert importlib.util.find_spec(package), f"no {package}: pip install '.[docs]'"
    out, began_s = tmp_path_factory.mktemp("site"), time.monotonic()
    build = (sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-E", "-b", "html")
    run = subprocess.run(
        [*build, "-d", out / "doctrees", DOCS, out / "html"],
        **{"env": ENVIRONMENT, "capture_output": True, "text": True, "timeout": 180},
    )
    assert (run.returncode, run.stderr) == (0, "")
    assert time.monotonic() - began_s < 60
    return out / "html"


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_is_documented(site, module):
    from sphinx.util.inventory import InventoryFile

    with open(site / "objects.inv", "rb") as file:
        inventory = InventoryFile.load(file, "", lambda base, name: name)
    documented = {name for kind, names in inventory.items() if kind[:3] == "py:" for name in names}
    names = importlib.import_module(module).__all__
    elsewhere = set() if module == "railwave" else set(railwave.__all__)
    missing = {name for name in names if f"{module}.{name}" not in documented} - elsewhere
    assert not missing, f"add to docs/api/: {missing}"


def test_docstrings_are_rendered_as_they_are_meant(site):
    page = re.sub(r"<[^>]+>", "", (site / "api" / "railwave.html").read_text(encoding="utf-8"))
    for text in ("G. rank = node * G + local", "Count the ranks: N * G."):
        assert text in page, text
    assert "`" not in page


def test_all_pages_and_pictures_are_on_the_site(site):
    for page, text in TEXTS.items():
        assert (site / page).with_suffix(".html").exists()
        for picture in re.findall(r"!\[[^\]]*\]\((\S+)\)", text):
            assert list(site.glob(f"_images/{Path(picture).name}")), picture


@pytest.mark.parametrize("page", TEXTS)
def test_relative_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", TEXTS[page]):
        path = link.partition("#")[0]
        if path and "://" not in link:
            assert ((DOCS / page).parent / path).exists(), link


@pytest.mark.parametrize("page", TEXTS)
def test_files_and_modules_that_are_named_exist(page):
    suffix = r"(?:py|md|json|jsonl|sh|sbatch|ipynb|svg|toml)"
    for path in re.findall(rf"`((?:\w[\w-]*/)+[\w.-]+\.{suffix})`", TEXTS[page]):
        assert (ROOT / path).exists(), path
    for path in re.findall(r"\{literalinclude\} (\S+)", TEXTS[page]):
        assert ((DOCS / page).parent / path).exists(), path
    for name in re.findall(r"-m (bench[\w.]*)", TEXTS[page]):
        assert (ROOT / name.replace(".", "/")).with_suffix(".py").exists(), name
    for name in re.findall(r"`railwave\.([a-z]\w*)[`(]", TEXTS[page]):
        module = importlib.util.find_spec(f"railwave.{name}")
        assert module or hasattr(railwave, name), name


def test_sections_that_are_named_are_in_results():
    results = (ROOT / "bench" / "RESULTS.md").read_text(encoding="utf-8")
    named = re.findall(r'\(`bench/RESULTS\.md`,\s"([^"]+)"\)', "\n".join(TEXTS.values()))
    assert named and all(name in results for name in named)


@pytest.mark.parametrize("page", TEXTS)
def test_python_runs_and_prints_what_it_says(page, monkeypatch, capsys):
    """Blocks of a page follow one another; a ```text block right after one is its output."""
    monkeypatch.chdir(ROOT)
    names = {}
    found = re.findall(
        r"^```python\n(.*?)^```$(?:\s*^```text\n(.*?)^```$)?", TEXTS[page], re.M | re.S
    )
    assert len(found) == len(blocks(TEXTS[page], "python"))
    for code, output in found:
        compiled = compile(code, page, "exec")
        if not code.startswith(NOT_RUN):
            exec(compiled, names)
            assert capsys.readouterr().out == output


def test_commands_are_all_known():
    starts = {re.sub(r"^(\w+=\S+ )+", "", command).split()[0] for _, command in COMMANDS}
    launch = {"docs/launch/torchrun_nodes.sh"}
    assert starts == {"railwave", "python", "torchrun", "sbatch", *launch}


@pytest.mark.parametrize("page, command", COMMANDS)
def test_commands_are_as_they_are_called(page, command):
    words = [word for word in shlex.split(command) if not re.match(r"[A-Z_]+=", word)]
    for word in words:
        assert not re.match(r"(docs|examples|bench)/", word) or (ROOT / word).exists(), word
    if "railwave" in words:
        args = _parser().parse_args(words[words.index("railwave") + 1 :])
        assert callable(args.command)


@pytest.mark.parametrize("page", TEXTS)
def test_options_that_are_named_exist(page):
    code = [*ROOT.glob("railwave/**/*.py"), *ROOT.glob("bench/*.py"), *DOCS.glob("launch/*")]
    known = "\n".join(path.read_text(encoding="utf-8") for path in code)
    known += "--help --shm-size --pid"  # of argparse, docker, py-spy
    for option in re.findall(r"`(--[a-z][a-z-]*)", TEXTS[page]):
        assert option in known, option


def messages():
    """Yield the text of every error in the package, with ... for what is filled in."""
    for path in ROOT.glob("railwave/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
            elif isinstance(node, ast.JoinedStr):
                parts = (p.value if isinstance(p, ast.Constant) else "..." for p in node.values)
                yield "".join(parts)


def test_error_messages_are_the_code_s():
    text = TEXTS["troubleshooting.md"]
    tables = re.findall(r"^\| message \| do \|\n\|---\|---\|\n((?:\|.*\n)+)", text, re.M)
    shown = [re.match(r"\| `([^`]+)`", row)[1] for table in tables for row in table.splitlines()]
    known = list(messages())
    assert len(shown) > 15
    for message in shown:
        parts = [re.escape(part.strip()) for part in message.split("...")]
        assert any(re.search(r".*".join(parts), text, re.S) for text in known), message


def test_pictures_are_as_drawn_now(tmp_path):
    """Their texts, numbers among them: matplotlib may place them otherwise elsewhere."""
    pytest.importorskip("matplotlib", reason="needs pip install '.[docs]'")
    run = (sys.executable, DOCS / "pictures.py", tmp_path)
    subprocess.run(run, env=ENVIRONMENT, check=True, timeout=120)
    drawn, kept = (
        {p.name: p for p in folder.iterdir()} for folder in (tmp_path, DOCS / "pictures")
    )
    assert drawn.keys() == kept.keys()
    for name in kept:
        texts = [
            re.findall(r"<text[^>]*>([^<]*)", p[name].read_text("utf-8")) for p in (drawn, kept)
        ]
        assert texts[0] == texts[1] and texts[0], name
        assert kept[name].stat().st_size < 60_000


def wrapper():
    spec = importlib.util.spec_from_file_location("with_rails", DOCS / "launch" / "with_rails.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_wrapper_gives_each_process_its_own_port():
    below = [("pci0000:00", f"0000:00:0{switch}.0", "device") for switch in range(2)]
    gpus = [Gpu(i, "H800", f"gpu{i}", 0, below[i], f"GPU-{i}a2b") for i in range(2)]
    kind = ("InfiniBand", "ACTIVE", 400.0)
    node = arrange(gpus, [Nic(f"mlx5_{i}", 1, f"n{i}", 0, *kind, below[1 - i]) for i in range(2)])
    mapping = wrapper().mapping
    name = "NVSHMEM_HCA_PE_MAPPING"
    assert [mapping(node, rank, 2, None)[name] for rank in (0, 1, 2)] == [
        *("mlx5_1:1:1", "mlx5_0:1:1", "mlx5_1:1:1")
    ]
    assert mapping(node, 0, 2, "1,0")[name] == mapping(node, 0, 2, "GPU-1")[name] == "mlx5_0:1:1"
    assert mapping(node, 0, 1, None) == {"NVSHMEM_REMOTE_TRANSPORT": "none"}
    assert mapping(arrange([], []), 0, 2, "") == {"NVSHMEM_REMOTE_TRANSPORT": "none"}


def test_the_launch_file_runs_on_one_host():
    given = {"NODES": "1", "GPUS_PER_NODE": "4", "PYTHON": sys.executable}
    run = subprocess.run(
        ["bash", DOCS / "launch" / "torchrun_nodes.sh"],
        **{"env": {**ENVIRONMENT, **given}, "capture_output": True, "text": True, "timeout": 120},
    )
    assert run.returncode == 0, run.stderr
    assert "4 ranks as 2 nodes; rows received: " in run.stdout


def test_the_batch_file_starts_the_launch_file_on_each_node(tmp_path):
    """With srun and scontrol that say what they are called with, as two nodes would."""
    tools = {
        "scontrol": "echo node0; echo node1",
        "srun": 'shift; for SLURM_NODEID in 0 1; do export SLURM_NODEID; "$@"; done',
        "python": 'printf "%s\\n" "$*"',
    }
    for name, body in tools.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "node[0-1]", "SLURM_JOB_ID": "7"}
    slurm |= {"SLURM_SUBMIT_DIR": str(ROOT), "PYTHON": str(tmp_path / "python")}
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    run = subprocess.run(
        ["bash", DOCS / "launch" / "slurm.sbatch", "mine.py", "a b"],
        **{"env": {**ENVIRONMENT, **slurm, "PATH": path}, "capture_output": True, "text": True},
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("-m railwave doctor --nodes 2\n") == 2
    started = [line for line in run.stdout.splitlines() if "torch.distributed.run" in line]
    assert [re.search(r"--node-rank=(\d)", line)[1] for line in started] == ["0", "1"]
    for line in started:
        assert "--nnodes=2" in line and "--master-addr=node0 --master-port=20007" in line
        assert line.endswith("docs/launch/with_rails.py mine.py a b")


def test_the_stages_of_a_trace_are_listed():
    text = TEXTS["timeline.md"].partition("### Words and stages")[2]
    kernels = "".join(path.read_text("utf-8") for path in ROOT.glob("railwave/kernels/*.py"))
    stages = set(re.findall(r"^def _(\w+)_kernel\(", kernels, re.M)) - {"occupy", "stamp"}  # alone
    firsts = " ".join(re.findall(r"^\| ([a-z_,; ]+) \|", text, re.M))
    assert len(stages) > 20 and stages <= set(re.split("[,; ]+", firsts))


def test_the_table_s_fields_are_listed():
    table = json.loads((ROOT / "examples" / "cost_table_paper.json").read_text("utf-8"))
    text = TEXTS["calibration.md"]
    for name in (*table, *table["scales"], *table["anchors"][0]):
        assert f"`{name}`" in text, name
    config = railwave.LocalWorld(
        railwave.Topology(2, 1, 1), num_experts=2, top_k=1, hidden=8, max_tokens_per_rank=1
    ).config
    fingerprint = importlib.import_module("railwave.cost_table").fingerprint(config, "none")
    assert all(name in text for name in fingerprint)
