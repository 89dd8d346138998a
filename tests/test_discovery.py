"""Discovery on made-up sysfs trees: H800, H20, and odd ones; and agreement between nodes.

Letters: G GPUs, P ports, R rails.
"""

import doctest
import io
import logging
import os
import socket
import sys
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from processes import run_all
from railwave import PeerError, PortCounters, Stats, Topology, discovery, port_counters, topology
from railwave.discovery import LINKS, Gpu, Nic, Said, arrange, discover, joined
from railwave.stats import Put

IB, ETH = "InfiniBand", "Ethernet"


class Tree:
    """A sysfs with the links that the kernel makes."""

    def __init__(self, root):
        self.root = root
        for folder in ("bus/pci/devices", "devices"):
            (root / folder).mkdir(parents=True)

    def device(self, *path, numa, **files):
        """Make a PCI device below bridges, such as ("pci0000:00", "0000:00:01.0")."""
        place = self.root.joinpath("devices", *path)
        place.mkdir(parents=True)
        for name, text in {"numa_node": numa, **files}.items():
            (place / name).write_text(f"{text}\n")
        link = self.root / "bus/pci/devices" / path[-1]
        link.symlink_to(os.path.relpath(place, link.parent))
        return place

    def gpu(self, *path, numa=0, kind="0x030200"):
        return self.device(*path, numa=numa, vendor="0x10de", device="0x2324", **{"class": kind})

    def nic(self, name, *path, numa=0, ports=("ACTIVE",), layer=IB, rate="400 Gb/sec (4X NDR)"):
        """Make a NIC with ports of these states; without a path a virtual one."""
        device = self.root / "devices" / "virtual" / "net"
        if path:
            device = self.device(*path, numa=numa, vendor="0x15b3", **{"class": "0x020700"})
        place = device / "infiniband" / name
        for number, state in enumerate(ports, 1):
            port = place / "ports" / str(number)
            port.mkdir(parents=True)
            (port / "state").write_text(f"{4 if state == 'ACTIVE' else 1}: {state}\n")
            (port / "link_layer").write_text(f"{layer}\n")
            (port / "rate").write_text(f"{rate}\n")
        if path:
            (place / "device").symlink_to("../..")
        (self.root / "class/infiniband").mkdir(parents=True, exist_ok=True)
        link = self.root / "class/infiniband" / name
        link.symlink_to(os.path.relpath(place, link.parent))


def switch(number, downstream, device):
    """Return the path of a device behind a downstream port of the switch under a root complex."""
    top = 0x10 * (number + 1)
    root = (f"pci0000:{top:02x}", f"0000:{top:02x}:01.0", f"0000:{top + 1:02x}:00.0")
    return (
        *root,
        f"0000:{top + 2:02x}:0{downstream}.0",
        f"0000:{top + 3 + downstream:02x}:{device}",
    )


@pytest.fixture
def tree(tmp_path):
    return Tree(tmp_path / "sys")


def eight_gpus(tree):
    """Add 8 GPUs, pairs under 4 switches, 2 switches a NUMA node."""
    for g in range(8):
        tree.gpu(*switch(g // 2, g % 2, "00.0"), numa=g // 4)


def h800(tree, **of_nic):
    """Make 8 GPUs and 8 single-port NICs, in pairs under 4 switches."""
    eight_gpus(tree)
    for i in range(8):
        how = {name: values[i] for name, values in of_nic.items()}
        tree.nic(f"mlx5_{i}", *switch(i // 2, 2 + i % 2, "00.0"), numa=i // 4, **how)


def links(node):
    return [[distance.link for distance in row] for row in node.distance]


def test_h800_has_a_nic_for_each_gpu(tree):
    h800(tree)
    node = discover(tree.root)
    assert [(gpu.index, gpu.numa) for gpu in node.gpus] == [(g, g // 4) for g in range(8)]
    assert node.gpus[1].pci == "0000:14:00.0" and node.gpus[1].name == "NVIDIA 0x2324"
    port = node.ports[3]
    assert (port.name, port.port, port.pci, port.numa) == ("mlx5_3", 1, "0000:26:00.0", 0)
    assert (port.link_layer, port.state, port.rate_gbits) == (IB, "ACTIVE", 400.0)
    assert node.rail_of_gpu == tuple(range(8)) and node.used == tuple(range(8))
    assert node.warnings == () and node.num_rails == 8
    assert links(node)[0] == ["PIX"] * 2 + ["NODE"] * 2 + ["SYS"] * 4
    assert [distance.hops for distance in node.distance[0]] == [4] * 2 + [10] * 2 + [11] * 4
    assert node.environment() == {
        "NVSHMEM_ENABLE_NIC_PE_MAPPING": "1",
        "NVSHMEM_HCA_PE_MAPPING": ",".join(f"mlx5_{i}:1:1" for i in range(8)),
    }
    assert node.environment(gpu=3)["NVSHMEM_HCA_PE_MAPPING"] == "mlx5_3:1:1"
    assert node.environment(nodes=1) == {"NVSHMEM_REMOTE_TRANSPORT": "none"}
    topo = Topology.discover(4, sysfs=tree.root)
    assert topo == Topology(4, 8, 8)
    assert Topology.discover(sysfs=tree.root).nodes == 1


@pytest.mark.parametrize("functions", [True, False])
def test_h20_has_two_ports_a_nic(tree, functions):
    """Dual-port NICs as the mlx5 driver shows them, a function a port, and as one device."""
    eight_gpus(tree)
    for i in range(4):
        if functions:
            for f in range(2):
                path = switch(i, 2, f"00.{f}")
                tree.nic(f"mlx5_{2 * i + f}", *path, numa=i // 2, rate="200 Gb/sec (4X HDR)")
        else:
            tree.nic(f"mlx5_{i}", *switch(i, 2, "00.0"), numa=i // 2, ports=["ACTIVE"] * 2)
    node = discover(tree.root)
    assert node.rail_of_gpu == tuple(range(8)) and node.warnings == ()
    mapping = node.environment()["NVSHMEM_HCA_PE_MAPPING"]
    assert mapping.startswith("mlx5_0:1:1,mlx5_1:1:1," if functions else "mlx5_0:1:1,mlx5_0:2:1,")


def test_fewer_nics_than_gpus_share_them_evenly_and_in_order(tree):
    eight_gpus(tree)
    for i in range(4):  # two a socket, on root ports of their own
        name = f"mlx5_{i}"
        tree.nic(name, f"pci0000:{0xA0 + i:02x}", f"0000:{0xA0 + i:02x}:01.0", numa=i // 2)
    node = discover(tree.root)
    assert links(node)[0] == ["NODE", "NODE", "SYS", "SYS"]
    assert node.rail_of_gpu == (0, 0, 1, 1, 2, 2, 3, 3) and node.warnings == ()
    mapping = "mlx5_0:1:2,mlx5_1:1:2,mlx5_2:1:2,mlx5_3:1:2"
    assert node.environment()["NVSHMEM_HCA_PE_MAPPING"] == mapping


def test_more_nics_than_gpus_takes_cards_before_their_second_ports(tree):
    for g in range(2):
        tree.gpu(*switch(0, g, "00.0"))
    for i in range(2):
        for f in range(2):
            tree.nic(f"mlx5_{2 * i + f}", *switch(0, 2 + i, f"00.{f}"))
    tree.nic("mlx5_10", "pci0000:a0", "0000:a0:01.0")  # storage, farther away
    node = discover(tree.root)
    assert [port.name for port in node.ports][-2:] == ["mlx5_3", "mlx5_10"]
    assert [node.ports[port].name for port in node.used] == ["mlx5_0", "mlx5_2"]
    assert node.rail_of_gpu == (0, 1) and node.num_rails == 2 and node.warnings == ()


def test_a_downed_port_is_left_out(tree):
    h800(tree, ports=[["DOWN" if i == 2 else "ACTIVE"] for i in range(8)])
    node = discover(tree.root)
    down, lost, uneven = node.warnings
    assert down.startswith("not active, left out: mlx5_2:1;")
    said = "were all ports active, there would be 8 rails, not 7; GPUs 2, 3 share mlx5_3:1"
    assert lost == said
    assert uneven.startswith("rails have different numbers of GPUs: mlx5_0:1 1, mlx5_1:1 1, mlx5_3")
    assert node.rail_of_gpu == (0, 1, 2, 2, 3, 4, 5, 6)
    assert "mlx5_2" not in node.environment()["NVSHMEM_HCA_PE_MAPPING"]
    assert "mlx5_3:1:2" in node.environment()["NVSHMEM_HCA_PE_MAPPING"]


def test_a_downed_port_that_no_gpu_would_use_takes_nothing(tree):
    h800(tree)
    tree.nic("mlx5_8", "pci0000:a0", "0000:a0:01.0", ports=["DOWN"])
    (down,) = discover(tree.root).warnings
    assert down.startswith("not active, left out: mlx5_8:1;")


NDR, HDR, SLOW = "400 Gb/sec (4X NDR)", "200 Gb/sec (4X HDR)", "25 Gb/sec (1X EDR)"


@pytest.mark.parametrize(
    "ethernet, used, why", [(2, IB, "nearer"), (4, IB, "as good as the other"), (6, ETH, "nearer")]
)
def test_of_mixed_link_layers_the_nearer_is_used(tree, ethernet, used, why):
    h800(tree, layer=[ETH] * ethernet + [IB] * (8 - ethernet))
    node = discover(tree.root)
    assert {node.ports[port].link_layer for port in node.used} == {used}
    assert f"mixed: {used} is used, {why}" in node.warnings[0]
    assert len(node.used) == max(ethernet, 8 - ethernet)


@pytest.mark.parametrize(
    "near, rates, used, why",
    [
        (ETH, (SLOW, NDR), ETH, "nearer to the GPUs"),
        (None, (NDR, SLOW), ETH, "faster"),
        (None, (SLOW, NDR), IB, "faster"),
        (None, (SLOW, SLOW), ETH, "in more ports"),
    ],
)
def test_mixed_link_layers_by_distance_then_rate_then_number(tree, near, rates, used, why):
    """One GPU, three Ethernet ports and two of InfiniBand, under its switch or under another."""
    tree.gpu(*switch(0, 0, "00.0"))
    for i in range(5):
        layer, rate = (ETH, rates[0]) if i < 3 else (IB, rates[1])
        where = 0 if near in (None, layer) else 1
        tree.nic(f"mlx5_{i}", *switch(where, 1 + i, "00.0"), layer=layer, rate=rate)
    node = discover(tree.root)
    assert [node.ports[port].link_layer for port in node.used] == [used]
    left = ("mlx5_0:1, mlx5_1:1, mlx5_2:1", "mlx5_3:1, mlx5_4:1")[used == ETH]
    said = f"link layers are mixed: {used} is used, {why}; left out: {left}"
    assert node.warnings == (said,)


def test_a_much_faster_port_that_is_as_near_but_not_used_is_told(tree):
    """Eight GPUs under one switch: eight ports at 100 Gb/s give more than one at 400."""
    for g in range(8):
        tree.gpu(*switch(0, g, "00.0"))
        tree.nic(f"mlx5_{g}", *switch(1, g, "00.0"), layer=ETH, rate="100 Gb/sec (4X EDR)")
    tree.nic("mlx5_8", *switch(1, 8, "00.0"), rate=NDR)
    mixed, faster = discover(tree.root).warnings
    assert "Ethernet is used, faster; left out: mlx5_8:1" in mixed
    start = (
        "as near and much faster, but not used, Gb/s: mlx5_8:1 400 (GPU 0 uses mlx5_0:1 100; GPU 1"
    )
    assert faster.startswith(start)


def test_of_ports_as_near_the_faster_are_used(tree):
    for g in range(2):
        tree.gpu(*switch(0, g, "00.0"))
    for i, rate in enumerate((SLOW, HDR, NDR, NDR)):
        tree.nic(f"mlx5_{i}", *switch(0, 2 + i, "00.0"), rate=rate)
    node = discover(tree.root)
    assert [node.ports[port].name for port in node.used] == ["mlx5_2", "mlx5_3"]
    assert node.warnings == () and node.rail_of_gpu == (0, 1)


def test_a_faster_port_is_not_left_for_a_slower(tree):
    """As much with both of 200 Gb/s as with one of 400, so all may be used; the fast one is."""
    for g in range(2):
        tree.gpu(*switch(0, g, "00.0"))
    for i, rate in enumerate((HDR, HDR, NDR)):
        tree.nic(f"mlx5_{i}", *switch(0, 2 + i, "00.0"), rate=rate)
    node = discover(tree.root)
    assert [node.ports[port].name for port in node.used] == ["mlx5_0", "mlx5_2"]


def test_different_rates_are_told(tree):
    h800(tree, rate=[NDR] * 7 + [HDR])
    (warning,) = discover(tree.root).warnings
    assert "different rates" in warning and "mlx5_7:1 200;" in warning


def test_a_port_too_slow_to_help_is_left_out(tree):
    """Two GPUs get more of one port at 400 Gb/s than of that and one at 2.5."""
    h800(tree, rate=[NDR] * 7 + ["2.5 Gb/sec (1X SDR)"])
    node = discover(tree.root)
    assert node.rail_of_gpu == (0, 1, 2, 3, 4, 5, 6, 6)
    slow, uneven = node.warnings
    assert slow == "so slow that GPUs share faster ports, left out, Gb/s: mlx5_7:1 2.5"
    assert "different numbers of GPUs" in uneven


def test_a_slow_port_that_is_the_nearest_of_another_gpu_is_not_left_out(tree):
    """GPUs 0 and 1 are as near to both and share the faster; GPU 2 is under the switch of one."""
    for g in range(3):
        tree.gpu(*switch(g, 0, "00.0"))
    tree.nic("mlx5_0", *switch(3, 2, "00.0"), rate=NDR)
    tree.nic("mlx5_1", *switch(2, 2, "00.0"), rate="100 Gb/sec (4X EDR)")
    node = discover(tree.root)
    assert node.rail_of_gpu == (0, 0, 1)
    assert not any("left out" in text for text in node.warnings)


@pytest.mark.parametrize("rates", [(NDR, "?"), ("?", "?"), (NDR, SLOW, "?")])
def test_a_port_of_unknown_rate_is_not_called_slow(tree, rates):
    for g in range(2):
        tree.gpu(*switch(0, g, "00.0"))
    for i, rate in enumerate(rates):
        tree.nic(f"mlx5_{i}", *switch(0, 2 + i, "00.0"), rate=rate)
    node = discover(tree.root)
    assert [node.ports[port].name for port in node.used] == ["mlx5_0", f"mlx5_{len(rates) - 1}"]


@pytest.mark.parametrize(
    "state, said",
    [
        ("", "state not readable, left out: mlx5_2:1; see the files"),
        (
            "INIT",
            "not yet active (INIT), left out: mlx5_2:1; InfiniBand waits for a subnet manager",
        ),
        ("DOWN", "not active, left out: mlx5_2:1; see ibstat, and the cables"),
    ],
)
def test_why_a_port_is_left_out(tree, state, said):
    h800(tree, ports=[[state if i == 2 else "ACTIVE"] for i in range(8)])
    if not state:
        (tree.root / "class/infiniband/mlx5_2/ports/1/state").unlink()
    assert discover(tree.root).warnings[0].startswith(said)


def test_a_nearest_port_on_another_numa_node_is_told(tree):
    eight_gpus(tree)
    for i in range(2):
        tree.nic(f"mlx5_{i}", *switch(i, 2, "00.0"), numa=0)
    node = discover(tree.root)
    assert Counter(node.rail_of_gpu) == {0: 4, 1: 4}
    (far,) = [text for text in node.warnings if "NUMA" in text]
    assert all(f"GPU {g} (" in far for g in range(4, 8)) and "GPU 3" not in far


def test_rails_out_of_order_need_a_mapping_a_process(tree):
    for g in range(2):
        tree.gpu(*switch(g, 0, "00.0"))
        tree.nic(f"mlx5_{1 - g}", *switch(g, 2, "00.0"))
    node = discover(tree.root)
    assert node.rail_of_gpu == (1, 0) and "in each process" in node.warnings[0]
    with pytest.raises(ValueError, match="gpu must be given"):
        node.environment()
    assert node.environment(gpu=0)["NVSHMEM_HCA_PE_MAPPING"] == "mlx5_1:1:1"
    assert len(node.to_json()["environment_of_gpu"]) == 2
    with pytest.raises(ValueError, match=r"gpu must be in \[0, 2\), got 2"):
        node.environment(gpu=2)


@pytest.mark.parametrize("all_down", [True, False])
def test_without_a_port_each_gpu_is_a_rail(tree, all_down):
    eight_gpus(tree)
    if all_down:
        tree.nic("mlx5_0", *switch(0, 2, "00.0"), ports=["DOWN"])
    else:
        assert not (tree.root / "class").exists()
    node = discover(tree.root)
    assert node.used == () and node.num_rails == 8 and node.rail_of_gpu == tuple(range(8))
    assert "no active NIC port" in node.warnings[-1]
    assert node.environment() == {"NVSHMEM_REMOTE_TRANSPORT": "none"}
    assert Topology.discover(2, sysfs=tree.root) == Topology(2, 8, 8)


def test_a_virtual_nic_is_used_only_where_no_other_is(tree):
    tree.gpu(*switch(0, 0, "00.0"))
    tree.nic("rxe0", layer=ETH)
    node = discover(tree.root)
    assert node.ports[0].pci == "" and node.ports[0].numa == -1
    assert (node.distance[0][0].link, node.distance[0][0].hops) == ("SYS", -1)
    assert node.environment()["NVSHMEM_HCA_PE_MAPPING"] == "rxe0:1:1"
    tree.nic("mlx5_0", "pci0000:a0", "0000:a0:01.0", numa=1)
    node = discover(tree.root)
    assert [node.ports[port].name for port in node.used] == ["mlx5_0"]
    assert node.warnings[0] == "virtual, left out: rxe0:1"


def test_classes_of_distance(tree):
    root = ("pci0000:00", "0000:00:01.0", "0000:01:00.0")
    tree.gpu(*root, "0000:02:00.0", "0000:03:00.0")
    tree.nic("same", *root, "0000:02:01.0", "0000:04:00.0")
    below = ("0000:02:02.0", "0000:05:00.0", "0000:06:00.0", "0000:07:00.0")
    tree.nic("cascade", *root, *below)
    tree.nic("bridge", "pci0000:00", "0000:00:02.0", "0000:08:00.0")
    tree.nic("socket", "pci0000:80", "0000:80:01.0", "0000:81:00.0")
    tree.nic("unknown", "pci0000:90", "0000:90:01.0", "0000:91:00.0", numa=-1)
    tree.nic("other", "pci0000:c0", "0000:c0:01.0", "0000:c1:00.0", numa=1)
    node = discover(tree.root)
    kinds = {port.name: far.link for port, far in zip(node.ports, node.distance[0], strict=True)}
    want = {"same": "PIX", "cascade": "PXB", "bridge": "PHB", "socket": "NODE", "other": "SYS"}
    assert kinds == {**want, "unknown": "NODE"}


def test_other_devices_of_nvidia_are_no_gpus(tree):
    tree.gpu(*switch(0, 0, "00.0"), kind="0x030000")
    tree.gpu(*switch(0, 1, "00.0"), kind="0x068000")  # NVSwitch
    assert len(discover(tree.root).gpus) == 1


def test_an_empty_tree_has_nothing(tree):
    node = discover(tree.root)
    assert node.gpus == node.ports == node.rail_of_gpu == ()
    instead = r"none was found in .*sys: make a Topology\(nodes, gpus_per_node, rails_per_node\)"
    with pytest.raises(ValueError, match=f"sysfs must show a GPU .*, but {instead} instead"):
        Topology.discover(sysfs=tree.root)
    with pytest.raises(ValueError, match="sysfs must be a folder, got '/no/such'"):
        discover("/no/such")


class NvmlError(Exception):
    pass


def fake_nvml(names, fails=""):
    def call(name, result):
        def function(*args):
            if fails == name:
                raise NvmlError(name)
            return result(*args)

        return function

    calls = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: len(names),
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetPciInfo": lambda i: SimpleNamespace(busId=f"0000000{i}:1A:00.0".encode()),
        "nvmlDeviceGetName": lambda index: names[index],
        "nvmlDeviceGetUUID": lambda index: f"GPU-{index}0bb-1122".encode(),
    }
    fake = {name: call(name, result) for name, result in calls.items()}
    return SimpleNamespace(NVMLError=NvmlError, **fake)


def test_nvml_names_gpus_where_it_can(monkeypatch, tree):
    tree.gpu("pci0000:10", "0000:10:01.0", "0000:1a:00.0", numa=1)
    monkeypatch.setattr(discovery.system, "SYSFS", str(tree.root))
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(["NVIDIA H800", b"NVIDIA H20"]))
    found = [(gpu.name, gpu.pci, gpu.numa) for gpu in discover(str(tree.root)).gpus]
    assert found == [("NVIDIA H800", "0000:1a:00.0", 1), ("NVIDIA H20", "0001:1a:00.0", -1)]
    for fails in ("nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetName"):
        monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(["NVIDIA H800"], fails))
        assert [gpu.name for gpu in discover(str(tree.root)).gpus] == ["NVIDIA 0x2324"]
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(["NVIDIA H800"], "nvmlDeviceGetUUID"))
    assert [(gpu.name, gpu.uuid) for gpu in discover(str(tree.root)).gpus] == [("NVIDIA H800", "")]
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(["NVIDIA H800"], "nvmlShutdown"))
    assert [gpu.name for gpu in discover(f"{tree.root}/").gpus] == ["NVIDIA H800"]
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert [gpu.name for gpu in discover(str(tree.root)).gpus] == ["NVIDIA 0x2324"]


def test_a_gpu_that_nvml_cannot_name_is_left_out(monkeypatch, tree):
    monkeypatch.setattr(discovery.system, "SYSFS", str(tree.root))
    for g in range(3):
        tree.gpu(f"pci000{g}:10", f"000{g}:10:01.0", f"000{g}:1a:00.0")
    nvml = fake_nvml(["A", "lost", "C"])

    def name(index):
        if index == 1:
            raise NvmlError("GPU is lost")
        return "H800"

    nvml.nvmlDeviceGetName = name
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    node = discover(tree.root)
    found = [(gpu.index, gpu.pci) for gpu in node.gpus]
    assert found == [(0, "0000:1a:00.0"), (1, "0002:1a:00.0")]
    assert node.warnings[0].startswith(
        "NVML does not say what its GPU 1 is, left out: GPU is lost;"
    )


# Evenness


@st.composite
def devices(draw):
    """Return GPUs and ports at random places of a tree."""
    gpus, ports = [], []
    sizes = draw(st.tuples(st.integers(1, 10), st.integers(1, 8)))
    for i in range(sum(sizes)):
        root = draw(st.integers(0, 3))
        bridges = draw(st.lists(st.integers(0, 1), max_size=4))
        names = ["".join(map(str, bridges[: n + 1])) for n in range(len(bridges))]
        path = (f"pci0000:{root:02x}", *(f"bridge {root} {name}" for name in names), f"device {i}")
        if i < sizes[0]:
            gpus.append(Gpu(i, "H800", f"gpu {i}", root // 2, path))
        else:
            state = draw(st.sampled_from(["ACTIVE"] * 3 + ["DOWN"]))
            ports.append(Nic(f"mlx5_{i}", 1, f"nic {i}", root // 2, IB, state, 400.0, path))
    return gpus, ports


@settings(max_examples=150, deadline=None)
@given(devices())
def test_each_gpu_has_a_nearest_port_and_loads_are_even(drawn):
    gpus, ports = drawn
    node = arrange(gpus, ports)
    active = [i for i, port in enumerate(ports) if port.state == "ACTIVE"]
    if not active:
        assert node.used == () and node.num_rails == len(gpus)
        return
    load = Counter(node.used[rail] for rail in node.rail_of_gpu)
    assert set(load) == set(node.used) <= set(active)
    for gpu, rail in enumerate(node.rail_of_gpu):
        rank = [LINKS.index(node.distance[gpu][port].link) for port in active]
        own = node.used[rail]
        assert LINKS.index(node.distance[gpu][own].link) == min(rank)
        near = [port for port, r in zip(active, rank, strict=True) if r == min(rank)]
        assert load[own] - min(load[port] for port in near) <= 1
    if node.in_order:
        entries = node.environment()["NVSHMEM_HCA_PE_MAPPING"].split(",")
        handed_out = [e.split(":")[0] for e in entries for _ in range(int(e.split(":")[2]))]
        assert handed_out == [ports[node.used[rail]].name for rail in node.rail_of_gpu]


# Agreement between nodes


def said(host, rails, ranks, num_rails=8):
    return [Said(host, len(rails), num_rails, rails)] * ranks


def test_nodes_that_agree_are_counted():
    eight = tuple(range(8))
    assert joined(said("a", eight, 8) + said("b", eight, 8)) == (2, eight)
    assert joined(said("a", (1, 0), 4)) == (1, (1, 0, 1, 0))  # GPUs are shared
    assert joined(said("a", (2, 2, 5), 2)) == (1, (0, 0))  # rails that no rank uses
    assert joined(said("a", (), 3) + said("b", (), 3)) == (2, (0, 1, 2))
    each_its_own = [*said("a", (5,), 1), *said("a", (3,), 1)]
    assert joined(each_its_own) == (1, (1, 0))


def test_gpus_that_cuda_hides_are_left_out(tree, monkeypatch):
    h800(tree)
    node = discover(tree.root)
    assert discovery.visible_rails(node, None) == tuple(range(8))
    assert discovery.visible_rails(node, " 6, 4,8,1") == (6, 4)
    for none in (
        "",
        " ",
        ",0",
        "-1",
        "99",
        "0,0",
        "1,0,1",
        "9" * 5000,
        "NoDevFiles",
        "void",
        "none",
    ):
        assert discovery.visible_gpus(node, none) == ()
    for first in ("0", "0,", "0,,1", "0,x", "0,-1,1", "0,GPU-1a2b", "+0", "00", "0 1", "0,\u0661"):
        assert discovery.visible_gpus(node, first) == (0,)
    for wrong in ("MIG-1a2b", "x", "all", "\u0661,0"):
        with pytest.raises(ValueError, match=f"must be numbers, or UUIDs such as .*'{wrong}'"):
            discovery.visible_rails(node, wrong)
    with pytest.raises(ValueError, match=r"NVML does not say the GPUs' UUIDs .*'GPU-1a2b'"):
        discovery.visible_rails(node, "GPU-1a2b")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,4,5")
    assert Topology.discover(sysfs=tree.root).gpus_per_node == 8  # of another machine
    monkeypatch.setattr(discovery.system, "SYSFS", str(tree.root))
    for way in (str(tree.root), f"{tree.root}/", tree.root / "bus" / ".."):
        assert Topology.discover(sysfs=way) == Topology(1, 3, 3, rail_of_gpu=(2, 0, 1))


@pytest.mark.parametrize(
    "devices, gpus",
    [
        ("GPU-20bb,GPU-00bb-11", (2, 0)),
        (" GPU-3 , GPU-10bb ", (3, 1)),
        ("GPU-2,GPU-9,GPU-0", (2,)),  # none from one that there is not
        ("GPU-2,GPU-,GPU-0", (2,)),  # or that could be several
        ("GPU-2,GPU-20", ()),  # twice
        ("GPU-2,", (2,)),
        ("GPU-2,,GPU-0", (2,)),
        ("GPU-2,0", (2,)),
        ("GPU-20BB", ()),
    ],
)
def test_gpus_may_be_shown_by_uuid(tree, monkeypatch, devices, gpus):
    """GPUs whose ports are the other way round; NVML knows UUIDs, sysfs does not."""
    for i in range(4):
        tree.gpu(f"pci000{i}:10", f"000{i}:10:01.0", f"000{i}:1a:00.0")
        tree.nic(f"mlx5_{3 - i}", f"pci000{i}:10", f"000{i}:10:01.0", f"000{i}:1b:00.0")
    monkeypatch.setattr(discovery.system, "SYSFS", str(tree.root))
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(["NVIDIA H800"] * 4))
    node = discover(str(tree.root))
    assert discovery.visible_gpus(node, devices) == gpus
    assert discovery.visible_rails(node, devices) == tuple(3 - gpu for gpu in gpus)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
    if gpus:  # rails that no GPU of the job uses are left out
        place = {gpu: len(gpus) - 1 - i for i, gpu in enumerate(sorted(gpus))}
        found = Topology.discover(sysfs=str(tree.root))
        assert found.rail_of_gpu == tuple(place[gpu] for gpu in gpus)


@pytest.mark.parametrize(
    "other",
    [
        said("b", (1, 0), 2),
        said("b", (0, 1), 1),
        said("b", (0, 1, 2), 2),
        said("b", (0, 1), 2, num_rails=7),
    ],
)
def test_nodes_that_differ_are_named_with_both_maps(other):
    with pytest.raises(ValueError, match=r"same map, got \{.*\} on b and \{.*\} on a") as error:
        joined(said("a", (0, 1), 2) + other)
    assert str(error.value).count("rail_of_gpu") == 2


def port(index, *, name=None, place=None, rate=400.0, layer=IB):
    pci = f"0000:{index if place is None else place:02x}:00.0"
    return Nic(name or f"mlx5_{index}", 1, pci, 0, layer, "ACTIVE", rate)


def two_ranks(host, *ports):
    return [Said(host, 2, 2, (0, 1), ports)] * 2


def test_a_rail_is_the_same_port_on_all_nodes(tmp_path):
    """2 GPUs and 4 NICs that are all as near; another of them is down on each node."""
    maps = []
    for host, down in (("a", 0), ("b", 1)):
        tree = Tree(tmp_path / host)
        for g in range(2):
            tree.gpu(*switch(0, g, "00.0"))
        for i in range(4):
            tree.nic(
                f"mlx5_{i}", *switch(0, 2 + i, "00.0"), ports=["DOWN" if i == down else "ACTIVE"]
            )
        maps += [replace(topology._say(tree.root), host=host)] * 2
    said = r"rail 0 must be the same port .* got mlx5_0:1 \(.*\) on b and mlx5_1:1 \(.*\) on a"
    with pytest.raises(ValueError, match=said):
        joined(maps)
    assert joined(maps[:2] * 2) == (1, (0, 1, 0, 1)) and discovery.differences(maps[:2]) == []


def test_nodes_that_agree_may_differ_in_names_places_and_rates():
    a = two_ranks("a", port(0), port(1))
    for other, texts in (
        ((port(0), port(1)), []),
        ((port(0, name="ib0"), port(1)), ["rail 0 is ib0:1 (0000:00:00.0) on b and mlx5_0:1 ("]),
        ((port(0), port(1, place=9)), ["rail 1 is mlx5_1:1 (0000:09:00.0) on b and mlx5_1:1 ("]),
        ((port(0), port(1, rate=100.0)), ["rail 1 has 100 Gb/s on b and 400 on a: the slowest"]),
        ((port(0), port(1, rate=0.0)), []),  # unknown
    ):
        both = a + two_ranks("b", *other)
        assert joined(both) == (2, (0, 1))
        for text, part in zip(discovery.differences(both), texts, strict=True):
            assert text.startswith(part)
    unused = [Said("a", 2, 2, (0,), (port(0), port(1))), Said("b", 2, 2, (0,), (port(0), port(7)))]
    assert joined(unused) == (2, (0,)) and discovery.differences(unused) == []


def test_nodes_of_two_link_layers_do_not_agree():
    ethernet = two_ranks("b", port(0, layer=ETH), port(1, layer=ETH))
    with pytest.raises(ValueError, match=r"'link layer': 'Ethernet'.* on b and .*'InfiniBand'"):
        joined(two_ranks("a", port(0), port(1)) + ethernet)
    with pytest.raises(ValueError, match=r"'link layer': ''.* on b"):
        joined(two_ranks("a", port(0), port(1)) + two_ranks("b"))


def test_ranks_of_a_host_follow_one_another():
    with pytest.raises(ValueError, match=r"follow one another, got \[0, 2\] on a"):
        joined([*said("a", (0,), 1), *said("b", (0,), 1), *said("a", (0,), 1)])


def discover_together(rank, trees, hosts):
    """Return the topology, or the error, and what was logged."""
    socket.gethostname = lambda: hosts[rank]
    log = io.StringIO()
    topology.logger.addHandler(logging.StreamHandler(log))
    try:
        topo = Topology.discover(sysfs=trees[rank])
    except (ValueError, PeerError) as error:
        return f"{type(error).__name__}: {error}"
    assert dist.get_world_size() == len(hosts)
    return (topo, log.getvalue()) if log.getvalue() else topo


def test_ranks_discover_together(tmp_path):
    """Two ranks on each of two hosts: alike, different, and one without a sysfs."""
    alike, other = Tree(tmp_path / "alike"), Tree(tmp_path / "other")
    for tree in (alike, other):
        for g in range(2):
            tree.gpu(*switch(g, 0, "00.0"))
            nic = 1 - g if tree is other else g
            tree.nic(f"mlx5_{nic}", *switch(g, 2, "00.0"))
    a, b, none = str(alike.root), str(other.root), str(tmp_path / "none")
    hosts = ["one", "one", "two", "two"]
    assert run_all(discover_together, 4, [a] * 4, hosts) == [Topology(2, 2, 2)] * 4
    for text in run_all(discover_together, 4, [a, a, b, b], hosts):
        assert text.startswith("ValueError") and "on two and" in text and "on one;" in text
    slow = Tree(tmp_path / "slow")
    for g in range(2):
        slow.gpu(*switch(g, 0, "00.0"))
        slow.nic(f"mlx5_{g}", *switch(g, 2, "00.0"), rate="100 Gb/sec (4X EDR)")
    c = str(slow.root)
    (topo, log), *others = run_all(discover_together, 4, [a, a, c, c], hosts)
    assert [topo, *others] == [Topology(2, 2, 2)] * 4  # told once
    assert "rail 0 has 100 Gb/s on two and 400 on one" in log and len(log.splitlines()) == 2
    *others, own = run_all(discover_together, 4, [a, a, a, none], hosts)
    assert own.startswith("ValueError: sysfs must be a folder")
    assert all(text.startswith("PeerError: rank(s) could not look") for text in others)


def test_the_number_of_nodes_must_be_that_of_hosts(tree, tmp_path):
    h800(tree)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        assert Topology.discover(sysfs=tree.root) == Topology(1, 1, 1)
        with pytest.raises(ValueError, match=r"nodes must be the number of hosts.*\(1\), got 2"):
            Topology.discover(2, sysfs=tree.root)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("name", ["agree", "node", "spread", "system"])
def test_examples_in_docstrings(name):
    result = doctest.testmod(getattr(discovery, name))
    assert result.attempted > 0 and result.failed == 0


def count(tree, label, sent, received):
    """Set the counters of a port, in words."""
    name, _, port = label.partition(":")
    folder = tree.root / "class/infiniband" / name / "ports" / port / "counters"
    folder.mkdir(exist_ok=True)
    (folder / "port_xmit_data").write_text(f"{sent}\n")
    (folder / "port_rcv_data").write_text(f"{received}\n")


def test_port_counters_stand_beside_what_was_put(tree, monkeypatch):
    """Two GPUs with a NIC each; a third port counts nothing."""
    for number in range(2):
        tree.gpu(*switch(number, 0, "00.0"))
        tree.nic(f"mlx5_{number}", *switch(number, 1, "00.0"))
        count(tree, f"mlx5_{number}:1", 1000 * number, 7)
    tree.nic("mlx5_2", *switch(2, 0, "00.0"))
    with PortCounters(tree.root) as ports:
        count(tree, "mlx5_0:1", 100, 7)
        count(tree, "mlx5_1:1", 1025, 8)
    found = [(row.port, row.rail, row.sent_bytes, row.received_bytes) for row in ports.rows()]
    assert found == [("mlx5_0:1", 0, 400, 0), ("mlx5_1:1", 1, 100, 4)]
    assert [row.put_bytes for row in ports.rows()] == [None, None]
    put = [
        Put("dispatch", node, rail, rail, 1, 1, 1, 64, 64 * (1 + rail))
        for node, rail in [(0, 0), (0, 1), (1, 1)]
    ]
    stats = Stats(tuple(put))
    with pytest.raises(ValueError, match=r"source must be given, .* of the nodes \[0, 1\]"):
        ports.rows(stats)
    assert ports.to_dict([stats], source=0)["put_bytes"] == [64, 128]
    assert list(ports.to_pandas(stats, source=1)["port"]) == ["mlx5_0:1", "mlx5_1:1"]
    assert ports.to_dict(stats, source=1)["put_bytes"] == [None, 128]  # no word of rail 0
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")  # whose rail the job then calls 0
    one = Stats((Put("dispatch", 0, 0, 0, 1, 1, 1, 64, 64),))
    assert ports.to_dict(one)["put_bytes"] == [None, 64]
    assert doctest.testmod(port_counters).failed == 0


def test_counters_settle_before_the_second_reading(tree, monkeypatch):
    """The driver brings them up to date while the reader waits."""
    tree.nic("mlx5_0", *switch(0, 1, "00.0"))
    count(tree, "mlx5_0:1", 0, 0)
    monkeypatch.setattr(
        port_counters.time, "sleep", lambda s: count(tree, "mlx5_0:1", int(10 * s), 1)
    )
    with PortCounters(tree.root, settle_s=2.5) as ports:
        pass
    assert [(row.sent_bytes, row.received_bytes) for row in ports.rows()] == [(100, 4)]


def test_a_node_without_counters_has_no_rows(tmp_path):
    with PortCounters(tmp_path) as ports:
        pass
    assert ports.rows() == [] and next(iter(ports.to_pandas())) == "port"
    with pytest.raises(ValueError, match="sysfs must be a folder"):
        PortCounters(tmp_path / "no")


def test_counters_that_go_back_say_nothing(tree):
    tree.nic("mlx5_0", *switch(0, 1, "00.0"))
    tree.nic("mlx5_1", *switch(1, 1, "00.0"))
    count(tree, "mlx5_0:1", 100, 5)
    count(tree, "mlx5_1:1", "1_000", 5)  # no counter
    with PortCounters(tree.root) as ports:
        count(tree, "mlx5_0:1", 7, 6)
        assert ports.rows() == []
    (row,) = ports.rows()
    assert (row.port, row.sent_bytes, row.received_bytes) == ("mlx5_0:1", None, 4)
    with ports:
        assert ports.rows() == []  # of the `with` before no longer
    with pytest.raises(TypeError, match=r"stats must be of handles .*, got int"):
        ports.rows([5])
    one = Stats((Put("dispatch", 0, 0, 0, 1, 1, 1, 64, 64),))
    with pytest.raises(ValueError, match=r"source must be one of .*, \[0\], got 9"):
        ports.rows(one, source=9)


def test_odd_entries_of_sysfs_are_left_out(tree):
    """What another driver, or a bad disk, leaves there must not hide the rest."""
    tree.gpu(*switch(0, 0, "00.0"))
    tree.nic("mlx5_0", *switch(0, 1, "00.0"))
    device = tree.root / "class/infiniband/mlx5_0"
    for name in ("foo", ".x", "\u00b2", "01", "0"):
        (device / "ports" / name).mkdir()
    loop = tree.root / "class/infiniband/loop"
    loop.symlink_to("loop")
    tree.nic("a,b:c", *switch(1, 1, "00.0"))
    (device / "ports/1/rate").write_text("4" * 400)
    (tree.root / "bus/pci/devices" / switch(0, 1, "00.0")[-1] / "numa_node").write_text("1" * 5000)
    node = discover(tree.root)
    assert [port.label for port in node.ports] == ["mlx5_0:1"]
    assert node.rail_of_gpu == (0,) and node.ports[0].rate_text == "?"
    (device / "ports/1/link_layer").write_text("\x1b[31mEther\nnet\u202e\n")
    assert discover(tree.root).ports[0].link_layer == "[31mEthernet"
    (device / "ports/1/link_layer").unlink()
    assert discover(tree.root).ports[0].link_layer == "unknown"
    (device / "ports/1/state").write_bytes(b"4: ACT\xff")
    assert discover(tree.root).ports[0].state == "UNKNOWN"
    for bad in (None, 5, "", b"/sys"):
        with pytest.raises(ValueError, match="sysfs must be a folder"):
            discover(bad)
