"""`railwave topo` and `railwave doctor`: what they print and judge."""

import doctest
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from railwave import doctor, table
from railwave.discovery import discover
from railwave.doctor import ERROR, OK, WARNING, Machine, examine
from railwave.heap import shm
from test_cli import run
from test_discovery import Tree, h800, switch

ROOT = Path(__file__).parents[1]
NO_GPU = pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="there is a GPU")


@pytest.fixture
def tree(tmp_path):
    return Tree(tmp_path / "sys")


@pytest.fixture
def gpus(tree, monkeypatch):
    """Return an H800 node whose software is in place."""
    h800(tree)
    for module in ("nvshmem", "nvshmem.core", "cuda", "cuda.core"):
        monkeypatch.setitem(sys.modules, module, SimpleNamespace())
    software = {"cuda_build": "13.0", "driver": "580.65", "nvlinks": (18,) * 8}
    return Machine(discover(tree.root), num_gpus=8, **software)


def found(machine, name):
    """Return the findings of a name as (status, text with mend)."""
    findings = [f for f in examine(machine).findings if f.name == name]
    assert all(f.mend or f.status == OK for f in findings)
    return [(f.status, f"{f.found} -> {f.mend}") for f in findings]


def only(machine, name):
    (one,) = found(machine, name)
    return one


# topo


def test_topo_prints_the_map_and_what_to_export(tree, tmp_path):
    h800(tree)
    file = tmp_path / "node.json"
    result = run("topo", "--sysfs", tree.root, "--json", file)
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    (row,) = [line for line in lines if line.startswith("3 ")]
    assert row.split()[3:] == [
        "0000:24:00.0",
        "0",
        "3",
        *["NODE", "NODE", "PIX", "PIX*"],
        *["SYS"] * 4,
    ]
    (row,) = [line for line in lines if line.startswith("P3 ")]
    assert row.split()[1:] == [
        "mlx5_3:1",
        "0000:26:00.0",
        "0",
        "InfiniBand",
        "ACTIVE",
        *["400", "3", "3"],
    ]
    assert "warning" not in result.out
    exports = dict(line[7:].split("=", 1) for line in lines if line.startswith("export "))
    node = discover(tree.root)
    assert exports == node.environment()
    assert all(len(line) <= 100 for line in lines if not line.startswith("export "))
    report = json.loads(file.read_text())
    assert report["rail_of_gpu"] == list(range(8)) and report["environment"] == exports
    assert report["distance"][0][0] == {"link": "PIX", "hops": 4}
    assert report["ports"][0]["name"] == "mlx5_0"
    page = (ROOT / "docs" / "nics.md").read_text("utf-8")
    assert "\n".join(line.rstrip() for line in lines) in page
    fields = [*report, *report["ports"][0]]
    assert all(f"`{name}`" in page for name in fields)


def test_the_copy_of_sysfs_that_the_page_makes_is_whole(tree, tmp_path):
    h800(tree)
    page = (ROOT / "docs" / "nics.md").read_text("utf-8")
    (command,) = re.findall(r"^```bash\n(mkdir .*?)^```$", page, re.M | re.S)
    copy = tmp_path / "copy"
    command = command.replace("/tmp/copy", str(copy)).replace("/sys ", f"{tree.root} ")
    subprocess.run(["bash", "-ec", command], check=True)
    assert discover(copy) == discover(tree.root)


@pytest.mark.parametrize("ports, width", [(20, 80), (8, 80), (20, 100), (3, 80)])
def test_topo_shows_ports_in_blocks_that_fit(tree, monkeypatch, ports, width):
    """All distances of all GPUs are there, whole."""
    for g in range(12):
        tree.gpu(*switch(g // 4, g % 4, "00.0"), numa=g // 4)
    for i in range(ports):
        tree.nic(f"mlx5_{i}", *switch(i % 3, 4 + i // 3, "00.0"), numa=i % 3)
    monkeypatch.setattr(table, "WIDTH", width)
    out = run("topo", "--sysfs", tree.root).out
    node = discover(tree.root)
    blocks = out.partition("\nport ")[0].split("\n\n")
    got = set()
    for block in blocks:
        head, _, *rows = block.splitlines()
        assert max(map(len, [head, *rows])) <= width
        names = [name for name in head.split() if re.fullmatch(r"P\d+", name)]
        for line in rows:
            gpu, *cells = line.split()
            got |= {(int(gpu), *pair) for pair in zip(names, cells[-len(names) :], strict=True)}
    want = {
        (gpu, f"P{port}", far.link + "*" * (node.used[node.rail_of_gpu[gpu]] == port))
        for gpu, row in enumerate(node.distance)
        for port, far in enumerate(row)
    }
    assert got == want


def test_topo_says_what_is_uneven_and_returns_0(tree):
    h800(tree, ports=[["ACTIVE"]] * 7 + [["DOWN"]])
    result = run("topo", "--sysfs", tree.root)
    assert result.code == 0 and "warning: not active, left out: mlx5_7:1" in result.out
    assert "mlx5_7" not in result.out.partition("export")[2]


def test_topo_gives_each_process_its_own_where_it_must(tree):
    for g in range(2):
        tree.gpu(*switch(g, 0, "00.0"), numa=-1)
        tree.nic(f"mlx5_{1 - g}", *switch(g, 2, "00.0"))
    out = run("topo", "--sysfs", tree.root).out
    assert "# the process of GPU 0:\nexport NVSHMEM_ENABLE_NIC_PE_MAPPING=1\n" in out
    assert "=mlx5_1:1:1\n# the process of GPU 1:" in out


def test_topo_without_nics_or_gpus(tree):
    said = run("topo", "--sysfs", tree.root).out
    assert "0 GPUs, 0 ports, 0 rails" in said and "no GPU: nothing to export, as expected" in said
    tree.gpu(*switch(0, 0, "00.0"))
    out = run("topo", "--sysfs", tree.root).out
    assert "1 GPU, 0 ports, 1 rail\n" in out
    assert "warning: no active NIC port" in out and "export NVSHMEM_REMOTE_TRANSPORT=none" in out


def test_topo_compares_what_nodes_wrote(tmp_path):
    files = []
    slow = ["400 Gb/sec (4X NDR)"] * 7 + ["200 Gb/sec (4X HDR)"]
    down = [["ACTIVE"]] * 7 + [["DOWN"]]
    for name, of_nic in (("a", {}), ("b", {}), ("slow", {"rate": slow}), ("down", {"ports": down})):
        tree, file = Tree(tmp_path / name), str(tmp_path / f"{name}.json")
        h800(tree, **of_nic)
        assert run("topo", "--sysfs", tree.root, "--json", file).code == 0
        files.append(file)
    a, b, slow, down = files
    result = run("topo", "--compare", a, b)
    assert (result.code, result.out) == (0, f"the same map: {a}, {b}\n")
    result = run("topo", "--compare", a, b, slow)
    said = f"warning: rail 7 has 200 Gb/s on {slow} and 400 on {a}: the slowest sets the pace\n"
    assert result.code == 0 and result.out.startswith(said)
    result = run("topo", "--compare", a, down)
    assert result.code == 1 and "all nodes must have the same map, got" in result.out
    (tmp_path / "no.json").write_text('{"ports": []}')
    for argv, text in (
        ([a], "two or more"),
        ([a, a], "files of --compare must be different ones"),
        ([a, f"{tmp_path}/./a.json"], "must be different ones, got"),
        ([a, b, "--json", tmp_path / "out.json"], "--json must be left out with --compare, got"),
        ([a, b, "--sysfs", "/sys"], "--sysfs must be left out with --compare, got '/sys'"),
        ([a, tmp_path / "no.json"], "must name files that railwave topo --json wrote"),
        ([a, "no/such"], "no/such"),
    ):
        result = run("topo", "--compare", *argv)
        assert result.code == 2 and text in result.err


def test_topo_compares_nodes_without_a_port(tmp_path):
    """And says why they have none; nodes without GPUs have no map."""
    bare, down = Tree(tmp_path / "bare"), Tree(tmp_path / "down")
    h800(down, ports=[["DOWN"]] * 8)
    for name, tree in (("a", down), ("b", down), ("none", bare)):
        assert run("topo", "--sysfs", tree.root, "--json", tmp_path / f"{name}.json").code == 0
    a, b, none = (str(tmp_path / f"{name}.json") for name in ("a", "b", "none"))
    result = run("topo", "--compare", a, b)
    first, *others, last = result.out.splitlines()
    assert result.code == 0 and last == f"the same map: {a}, {b}"
    assert first == "warning: no rail has a port: these nodes reach no other"
    node = discover(down.root)
    assert others == [f"warning: {file}: {text}" for file in (a, b) for text in node.warnings]
    result = run("topo", "--compare", none, a)
    assert result.code == 2 and f"got '{none}': gpus must be one at least, got none" in result.err


@pytest.mark.parametrize(
    "change, said",
    [
        ({"used": [0]}, "num_rails must be that of used ports, 1, got 2"),
        ({"used": [0, 0]}, "each another port in used, got [0, 1] and [0, 0]"),
        ({"used": [0, -1]}, "used[1] must be in [0, 2), got -1"),
        ({"used": [0, True]}, "used[1] must be an int, got bool True"),
        ({"rail_of_gpu": [99, 1]}, "rail_of_gpu[0] must be in [0, 2), got 99"),
        ({"rail_of_gpu": [-1, 1]}, "rail_of_gpu[0] must be in [0, 2), got -1"),
        ({"rail_of_gpu": [0.5, 1]}, "rail_of_gpu[0] must be an int, got float 0.5"),
        ({"rail_of_gpu": []}, "rail_of_gpu must give 2 GPUs all of 2 rails, "),
        ({"rail_of_gpu": [1, 1]}, "rail_of_gpu must give 2 GPUs all of 2 rails, "),
        ({"gpus": "abc"}, "gpus must be a list, got 'abc'"),
        ({"num_rails": "8"}, "num_rails must be an int, got '8'"),
        ({"num_rails": True}, "num_rails must be an int, got True"),
        ({"ports": [5, 5]}, "ports[0] must hold an object, got 5"),
        ({"warnings": [5]}, "warnings must be texts, got [5]"),
        ({"rate_gbits": "fast"}, "ports[1].rate_gbits must be a finite number, got 'fast'"),
        ({"rate_gbits": float("nan")}, "ports[1].rate_gbits must be a finite number, got nan"),
        ({"rate_gbits": 10**400}, "rate_gbits must be a finite number"),
        ({"rate_gbits": -1}, "ports[1].rate_gbits must be at least 0, got -1"),
        ({"name": [1]}, "ports[1].name must be a str, got [1]"),
        ("[" * 100_000, "recursion"),
        ("null", "the file must hold an object, got None"),
    ],
)
def test_topo_compares_no_files_that_are_none(tree, tmp_path, change, said):
    for g in range(2):
        tree.gpu(*switch(g, 0, "00.0"))
        tree.nic(f"mlx5_{g}", *switch(g, 2, "00.0"))
    good, bad = discover(tree.root).to_json(), discover(tree.root).to_json()
    if isinstance(change, dict):
        (bad["ports"][1] if change.keys() <= bad["ports"][1].keys() else bad).update(change)
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    a.write_text(json.dumps(good))
    b.write_text(change if isinstance(change, str) else json.dumps(bad))
    for files in ((a, b), (b, a)):
        result = run("topo", "--compare", *files)
        assert (result.code, result.out) == (2, "") and said in result.err
        assert f"must name files that railwave topo --json wrote, got '{b}': " in result.err


@pytest.mark.parametrize("command", ["topo", "doctor"])
def test_mistakes_are_named(command, tmp_path):
    for argv, said in (
        (["--sysfs", "no/such"], "sysfs must be a folder, got 'no/such'"),
        (["--json", "no/such/file"], "--json must be in an existing folder"),
        (["--json", "-"], "--json must be a file, got '-': /dev/stdout is the output"),
        (["--quick"], "--quick"),
    ):
        result = run(command, *argv)
        assert result.code == 2 and said in result.err and result.out == ""


# doctor


@NO_GPU
def test_doctor_on_a_cpu_says_that_dispatch_will_run(tmp_path):
    file = tmp_path / "found.json"
    result = run("doctor", "--json", file)
    assert (result.code, result.err) == (0, "")
    assert result.out.splitlines()[-1] == "dispatch will run, on a CPU, over shared memory"
    report = json.loads(file.read_text())
    assert report["runs"] is True and report["wire"] in report["verdict"]
    names = {finding["name"] for finding in report["findings"]}
    assert {"python", "torch", "triton", "numpy", "shared memory", "NVSHMEM", "NICs"} <= names
    assert all(finding["status"] != ERROR for finding in report["findings"])


def test_doctor_without_room_in_shared_memory_returns_1(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(shm, "free_bytes", lambda: 1 << 20)
    result = run("doctor")
    assert result.code == 1 and "--shm-size=1g" in result.out
    assert result.out.splitlines()[-1] == "dispatch will NOT run: mend shared memory"


def test_gpus_do_without_shared_memory(gpus, monkeypatch):
    monkeypatch.setattr(shm, "free_bytes", lambda: 0)
    status, text = only(gpus, "shared memory")
    assert status == OK and "0 MiB free" in text and "GPUs do not use it" in text


def test_a_node_of_gpus_that_is_whole(gpus):
    diagnosis = examine(gpus)
    assert [f for f in diagnosis.findings if f.status != OK] == []
    verdict = "dispatch will run, on 8 GPU(s), over mapped memory; between nodes by NVSHMEM over "
    assert diagnosis.verdict == verdict + "InfiniBand"
    assert "mapped memory" in only(gpus, "wire within a node")[1]
    assert "NVSHMEM over InfiniBand: mlx5_0:1, " in only(gpus, "wire between nodes")[1]


def test_roce_is_named(tree):
    tree.gpu(*switch(0, 0, "00.0"))
    tree.nic("mlx5_0", *switch(0, 2, "00.0"), layer="Ethernet")
    machine = Machine(discover(tree.root), num_gpus=1)
    assert "NVSHMEM over RoCE: mlx5_0:1" in only(machine, "wire between nodes")[1]


def test_without_a_nic_no_wire_between_nodes_is_possible(tree, gpus):
    tree = Tree(tree.root.parent / "bare")
    tree.gpu(*switch(0, 0, "00.0"))
    machine = replace(gpus, node=discover(tree.root), num_gpus=1)
    status, text = only(machine, "wire between nodes")
    assert status == OK and "none possible" in text and "no documented transport over TCP" in text
    assert found(machine, "NICs")[1][0] == WARNING and examine(machine).runs
    off = replace(gpus, environment={"NVSHMEM_REMOTE_TRANSPORT": "none"})
    assert "while NVSHMEM_REMOTE_TRANSPORT is none" in only(off, "wire between nodes")[1]


def test_several_nodes_need_a_wire_between_them(tree, gpus, monkeypatch):
    bare = Tree(tree.root.parent / "bare")
    bare.gpu(*switch(0, 0, "00.0"))
    off = {"NVSHMEM_REMOTE_TRANSPORT": "none"}
    for machine, said in (
        (replace(gpus, node=discover(bare.root), num_gpus=1), "-> several nodes need a port"),
        (replace(gpus, environment=off), "-> unset NVSHMEM_REMOTE_TRANSPORT"),
        (replace(gpus, num_gpus=0), "-> run on one node"),
    ):
        assert only(machine, "wire between nodes")[0] == OK and examine(machine).runs
        status, text = only(replace(machine, nodes=2), "wire between nodes")
        assert status == ERROR and "; the job has 2 nodes" in text and said in text
        assert "mend wire between nodes" in examine(replace(machine, nodes=2)).verdict
    assert examine(replace(gpus, nodes=2)).runs


@NO_GPU
def test_doctor_is_told_of_nodes_or_asks_the_environment(monkeypatch):
    assert run("doctor", "--nodes=2").code == 1 and run("doctor", "--nodes=1").code == 0
    result = run("doctor", "--nodes=0")
    assert result.code == 2 and "--nodes must be" in result.err
    monkeypatch.setenv("WORLD_SIZE", "16")
    assert run("doctor").code == 0
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert run("doctor").code == 1 and run("doctor", "--nodes=1").code == 0


def test_a_link_layer_that_cannot_be_read_is_not_a_variable(tree):
    tree.gpu(*switch(0, 0, "00.0"))
    tree.nic("mlx5_0", *switch(0, 2, "00.0"))
    (tree.root / "class/infiniband/mlx5_0/ports/1/link_layer").unlink()
    machine = Machine(discover(tree.root), num_gpus=1, nodes=2)
    status, text = only(machine, "wire between nodes")
    assert status == WARNING and "NVSHMEM over an unknown link layer: mlx5_0:1 -> see link" in text


def test_gpus_that_cuda_hides_are_not_listed(gpus):
    shown = replace(gpus, num_gpus=2, environment={"CUDA_VISIBLE_DEVICES": "6,4"})
    _, text = only(shown, "NICs")
    assert "of 8 GPUs CUDA shows 2: GPU 6 rail 6, GPU 4 rail 4 ->" in text
    assert "over InfiniBand: mlx5_4:1, mlx5_6:1 ->" in only(shown, "wire between nodes")[1]


@pytest.mark.parametrize("devices", ["", "99"])
def test_gpus_that_are_all_hidden_have_no_wire(gpus, devices):
    hidden = replace(gpus, environment={"CUDA_VISIBLE_DEVICES": devices})
    status, text = only(hidden, "wire between nodes")
    assert status == OK and "none possible: CUDA_VISIBLE_DEVICES shows none of the GPUs" in text
    assert only(replace(hidden, nodes=2), "wire between nodes")[0] == ERROR
    assert "of 8 GPUs CUDA shows 0: no port is used ->" in only(hidden, "NICs")[1]
    assert examine(hidden).verdict.endswith("over mapped memory")


def test_gpus_that_only_torch_finds_have_no_wire(tree):
    tree.nic("mlx5_0", *switch(0, 2, "00.0"))
    machine = Machine(discover(tree.root), num_gpus=8, nodes=2)
    status, text = only(machine, "wire between nodes")
    assert status == ERROR and "discovery finds no GPU, so no port is given out" in text
    assert "1 of 1 ports are active; discovery finds no GPU ->" in only(machine, "NICs")[1]


def test_devices_that_discovery_refuses(gpus):
    for devices, said in (("MIG-1", "numbers, or UUIDs"), ("GPU-1a", "numbers where NVML")):
        environment = {"CUDA_VISIBLE_DEVICES": devices}
        status, text = only(replace(gpus, environment=environment), "environment")
        assert status == ERROR and said in text
        on_cpu = replace(gpus, num_gpus=0, environment=environment)
        assert only(on_cpu, "environment")[0] == WARNING
    assert (
        "not known" in only(replace(gpus, environment={"CUDA_VISIBLE_DEVICES": "MIG-1"}), "NICs")[1]
    )


def test_an_order_of_gpus_that_is_not_that_of_discovery(gpus):
    first, *others = gpus.node.gpus
    node = replace(gpus.node, gpus=(replace(first, name="H20", uuid="GPU-a"), *others))
    mixed = replace(gpus, node=node)
    status, text = only(mixed, "environment")
    assert status == WARNING and "(H20, NVIDIA 0x2324)" in text
    assert "-> export CUDA_DEVICE_ORDER=PCI_BUS_ID" in text
    by_place = replace(mixed, environment={"CUDA_DEVICE_ORDER": "PCI_BUS_ID"})
    assert only(by_place, "environment")[0] == only(gpus, "environment")[0] == OK


def test_another_machine_shows_all_its_gpus(tree, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1")
    tree.gpu(*switch(0, 0, "00.0"))
    assert "CUDA_VISIBLE_DEVICES" not in doctor.look(tree.root).environment
    monkeypatch.setattr(doctor.machine, "is_own_sysfs", lambda sysfs: True)
    assert doctor.look(tree.root).environment["CUDA_VISIBLE_DEVICES"] == "MIG-1"


def test_gpus_that_torch_does_not_find(gpus):
    cpu_build = replace(gpus, num_gpus=0, cuda_build=None)
    status, text = only(cpu_build, "torch's GPUs")
    assert status == WARNING and "the node has 8" in text and "CUDA build to use" in text
    status, text = only(replace(gpus, num_gpus=0), "torch's GPUs")
    assert status == WARNING and "CUDA_VISIBLE_DEVICES" in text


def test_drivers(gpus):
    assert only(replace(gpus, driver="575.10"), "driver")[0] == WARNING
    assert only(replace(gpus, driver="575.10", cuda_build="12.9"), "driver")[0] == OK
    assert only(replace(gpus, driver="470.82", cuda_build="12.9"), "driver")[0] == WARNING
    for unknown in ("", "x"):
        assert "nvidia-ml-py" in only(replace(gpus, driver=unknown), "driver")[1]


def test_versions_are_held_against_what_the_package_allows(gpus, monkeypatch):
    versions = {"torch": "2.10.1+cu128", "triton": "3.10.0", "numpy": None}

    def version(name):
        if versions.get(name, "1.0") is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions.get(name, "1.0")

    monkeypatch.setattr(importlib.metadata, "version", version)
    rules = ["torch>=2.11", "triton>=3.6", "numpy", 'triton-x>=9; extra == "x"']
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: rules)
    status, text = only(gpus, "torch")
    assert status == ERROR and "2.10.1+cu128, but torch>=2.11 is needed" in text
    assert only(gpus, "triton") == (OK, "3.10.0 (triton>=3.6) -> ")
    assert only(gpus, "numpy") == (ERROR, "not installed -> pip install 'numpy'")
    assert not examine(gpus).runs

    def gone(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", gone)
    assert only(gpus, "railwave")[0] == WARNING and only(gpus, "torch")[0] == OK


@NO_GPU
def test_a_triton_that_cannot_be_imported_is_an_error_on_a_cpu(tmp_path):
    """Its version is there, but not its library; the interpreter needs it too."""
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton/__init__.py").write_text("raise OSError('no libtriton.so')\n")
    path = os.pathsep.join([str(tmp_path), str(Path(doctor.__file__).parents[2])])
    result = subprocess.run(
        [sys.executable, "-m", "railwave", "doctor"],
        **{"env": {**os.environ, "PYTHONPATH": path}, "capture_output": True, "text": True},
    )
    assert (result.returncode, result.stderr) == (1, "")
    assert "cannot be imported: no libtriton.so" in result.stdout
    assert result.stdout.splitlines()[-1] == "dispatch will NOT run: mend triton"


def bitcode_gives(monkeypatch, result):
    def device_library(arch):
        if isinstance(result, Exception):
            raise result
        return str(result)

    wire = SimpleNamespace(nvshmem=SimpleNamespace(device_library=device_library))
    monkeypatch.setattr(doctor.software, "load", lambda interpret: SimpleNamespace(wire=wire))


@pytest.mark.parametrize("error", [ImportError("none here"), RuntimeError("triton 3.6 cannot")])
def test_bitcode_that_cannot_be_used(gpus, monkeypatch, error):
    bitcode_gives(monkeypatch, error)
    assert only(gpus, "NVSHMEM")[0] == ERROR and str(error) in only(gpus, "NVSHMEM")[1]
    assert only(replace(gpus, num_gpus=0), "NVSHMEM")[0] == OK


def test_bitcode_without_its_library(gpus, monkeypatch, tmp_path):
    bitcode_gives(monkeypatch, tmp_path / "libnvshmem_device.bc")
    assert only(gpus, "NVSHMEM")[0] == ERROR
    (tmp_path / "libnvshmem_host.so.3").touch()
    assert only(gpus, "NVSHMEM")[0] == OK


def test_new_bitcode_and_an_old_triton(gpus, monkeypatch):
    """As `device_library` itself judges them."""
    nvshmem = doctor.software.load(interpret=False).wire.nvshmem
    monkeypatch.setattr(nvshmem, "_version_of", lambda package: "3.8.0")
    monkeypatch.setattr(nvshmem.triton, "__version__", "3.6.0")
    status, text = only(gpus, "NVSHMEM")
    assert status == ERROR and "needs triton 3.7" in text


def test_python_bindings_that_are_missing(gpus, monkeypatch):
    assert only(gpus, "nvshmem4py")[0] == OK
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    status, text = only(gpus, "nvshmem4py")
    assert status == ERROR and "cuda.core" in text and "railwave[nvshmem]" in text


def test_files_that_killed_processes_left(gpus, monkeypatch, tmp_path):
    monkeypatch.setattr(shm, "FOLDER", str(tmp_path))
    path = f"{tmp_path}/railwave-{os.getuid()}-{'0' * 32}-0"
    os.close(shm._make(path, 10))
    room, left = found(gpus, "shared memory")
    assert room[0] == OK and left[0] == WARNING and left[1].endswith("-> railwave clean")
    assert Path(path).exists() and examine(gpus).runs
    monkeypatch.setattr(shm, "FOLDER", f"{tmp_path}/none")
    assert only(gpus, "shared memory")[0] == OK
    assert only(replace(gpus, num_gpus=0), "shared memory")[0] == ERROR


def test_mps(gpus, tmp_path):
    place = {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)}
    assert "only ranks that share" in only(replace(gpus, environment=place), "MPS")[1]
    shared = replace(gpus, environment={**place, "LOCAL_WORLD_SIZE": "32"})
    status, text = only(shared, "MPS")
    assert status == WARNING and "32 ranks share 8" in text and "mps-control -d" in text
    (tmp_path / "control").touch()
    assert only(shared, "MPS")[0] == OK
    number = tmp_path / "nvidia-cuda-mps-control.pid"
    number.write_text(f"{os.getpid()}\n")
    assert only(shared, "MPS")[0] == OK
    number.write_text("999999999\n")
    assert only(shared, "MPS")[0] == WARNING


def test_nvlink(gpus):
    assert only(replace(gpus, nvlinks=None), "NVLink")[0] == WARNING
    assert only(replace(gpus, nvlinks=(18, 0) * 4), "NVLink")[0] == WARNING
    status, text = only(replace(gpus, apart=((0, 7),)), "NVLink")
    assert status == ERROR and "0-7" in text
    assert found(replace(gpus, num_gpus=1), "NVLink") == []


MAPPING = {"NVSHMEM_HCA_PE_MAPPING": "mlx5_0:1:8"}
ON = {"NVSHMEM_ENABLE_NIC_PE_MAPPING": "1"}
LIST = {"NVSHMEM_HCA_LIST": "mlx5_0:1"}


@pytest.mark.parametrize(
    "environment, said",
    [
        ({}, []),
        ({**MAPPING, **ON}, []),
        ({"NVSHMEM_HCA_PE_MAPPING": "mlx5_0:1:1, mlx5_1:1:1 ,", **ON}, []),
        (MAPPING, ["NVSHMEM_HCA_PE_MAPPING has no effect without"]),
        ({**MAPPING, "NVSHMEM_ENABLE_NIC_PE_MAPPING": "0"}, ["NVSHMEM_HCA_PE_MAPPING has no"]),
        (LIST, ["NVSHMEM_HCA_LIST has no effect without"]),
        ({**MAPPING, **ON, **LIST}, ["NVSHMEM_HCA_LIST is set, so NVSHMEM ignores"]),
        ({**MAPPING, **LIST}, ["NVSHMEM_HCA_LIST is set", "has no effect without"]),
        ({"NVSHMEM_HCA_PE_MAPPING": "mlx5_0:1:1,mlx5_9:1:1", **ON}, ["not active: mlx5_9:1 "]),
        (
            {"NVSHMEM_HCA_LIST": "mlx5_0,mlx5_9:1", **ON},
            ["LIST names ports that are not active: mlx5_9:1"],
        ),
        ({"NVSHMEM_HCA_LIST": "^mlx5_9:1", **ON}, []),
        ({"NVSHMEM_HCA_PE_MAPPING": "mlx5_8:1:1", **ON}, ["no GPU's rail: mlx5_8:1 "]),
    ],
)
def test_variables_that_undo_one_another(tree, gpus, environment, said):
    tree.nic("mlx5_8", "pci0000:a0", "0000:a0:01.0", layer="Ethernet")
    gpus = replace(gpus, node=discover(tree.root))
    results = found(replace(gpus, environment=environment), "environment")
    if not said:
        assert [status for status, _ in results] == [OK]
        return
    assert len(results) == len(said)
    for (status, text), part in zip(results, said, strict=True):
        assert status == WARNING and part in text


def test_nvml_says_driver_and_links(monkeypatch):
    class Error(Exception):
        pass

    def links(handle, link):
        if link >= handle:
            raise Error
        return 1

    fake = SimpleNamespace(
        NVMLError=Error,
        NVML_NVLINK_MAX_LINKS=36,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlSystemGetDriverVersion=lambda: b"580.65.06",
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: 18 * index,
        nvmlDeviceGetNvLinkState=links,
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    assert doctor.machine._ask_nvml() == ("580.65.06", (0, 18))

    def fails():
        raise Error

    fake.nvmlShutdown = fails
    assert doctor.machine._ask_nvml() == ("580.65.06", (0, 18))
    fake.nvmlInit = fails
    assert doctor.machine._ask_nvml() == ("", None)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert doctor.machine._ask_nvml() == ("", None)


@pytest.mark.parametrize("name", ["environment", "machine", "software"])
def test_examples_in_docstrings(name):
    result = doctest.testmod(getattr(doctor, name))
    assert result.attempted > 0 and result.failed == 0
