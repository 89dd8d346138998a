"""Emulated NICs: slots of a port follow one another, phases last as long as their bytes need."""

import time
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import railwave
from heaps import DEVICE, KERNELS, WIRE, make_config
from processes import run_all
from railwave import LocalWorld, Topology
from railwave.agreement import checked_wire
from railwave.config import PATHS, Config
from railwave.heap import LocalHeap
from worlds import bits_equal, bytes_equal, make_batch, make_outs, make_world

PORT = KERNELS.port
BYTES_MS = 1_000_000  # a byte a nanosecond


def test_take_example():
    assert PORT.take_ref(70, 50, 20) == (70, 90)
    assert PORT.take_ref(70, 80, 20) == (80, 100)


class Ports:
    """The heaps of a cluster with NICs, and the state of a PE of each rail."""

    def __init__(self, topo):
        sizes = {"num_experts": 8, "top_k": 1, "hidden": 8, "max_tokens_per_rank": 2}
        self.config = Config(topo, dtype=torch.bfloat16, nic_gbs=1.0, **sizes)
        device = torch.get_default_device()
        self.heap = LocalHeap(topo.num_ranks, self.config.layout, device=device)
        self.states = []
        for gpus in topo.gpus_of_rail:
            state = torch.zeros(WIRE.STATE_WORDS, dtype=torch.int64)
            state[PORT.NIC_RATE.value], state[PORT.NIC_GPU.value] = BYTES_MS, gpus[0]
            self.states.append(state)

    def occupy(self, from_pe, to_pe, num_bytes, programs, count):
        """Return (programs * count, 2): when each slot was asked for, and when it has passed."""
        slots = torch.full((programs, count, 2), -1)
        topo = self.config.topo
        PORT.occupy(
            *(slots, self.heap.bases, self.states[topo.rail_of_gpu[topo.local_of(from_pe)]]),
            port_off=self.config.layout["ports"],
            from_pe=from_pe,
            to_pe=to_pe,
            num_bytes=num_bytes,
            programs=programs,
            shape=self.config.shape,
        )
        return slots.view(-1, 2).tolist()

    def words(self, pe):
        return self.heap.region(pe, "ports", torch.int64).tolist()


def check_slots(slots):
    """Check (asked, passed, length) of one port: in turn, none before it was asked for."""
    spans = sorted((passed - length, passed) for _, passed, length in slots)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
    assert all(passed - length >= asked for asked, passed, length in slots)


takings = st.lists(
    st.tuples(
        *(st.integers(0, 2), st.integers(0, 1), st.integers(1, 5000)),
        *(st.integers(1, 3), st.integers(1, 3)),
    ),
    min_size=1,
    max_size=4,
)


@given(takings)
@settings(max_examples=15)
def test_slots_of_a_port_never_overlap_and_never_begin_before_they_are_asked_for(takings):
    """Three nodes of two GPUs that share a NIC: all send to node 0 or round."""
    ports, arrived, sent = Ports(Topology(3, 2, 1)), {}, {}
    began_ns = time.monotonic_ns()
    for source, hop, num_bytes, programs, count in takings:
        to = (source + 1 + hop) % 3
        pes = 2 * source + hop, 2 * to + hop
        for asked, passed in ports.occupy(*pes, num_bytes, programs, count):
            arrived.setdefault(to, []).append((asked, passed, num_bytes))
            sent[source] = sent.get(source, 0) + num_bytes
    for node in range(3):
        assert ports.words(2 * node + 1) == [0, 0]  # the first GPU of the rail has them
        out_ns, in_ns = ports.words(2 * node)
        slots = arrived.get(node, [])
        check_slots(slots)
        assert in_ns == max((passed for _, passed, _ in slots), default=0)
        assert (out_ns > 0) == (node in sent)
        if node in sent and torch.get_default_device().type != "cuda":
            assert out_ns >= began_ns + sent[node]


@pytest.mark.parametrize("topo", [Topology(3, 2, 2), Topology(3, 2, 1)], ids=["a NIC", "shared"])
def test_all_paths_give_the_same_bits_through_nics(topo):
    shape = topo.nodes, topo.gpus_per_node, topo.rails_per_node
    worlds = [make_world(*shape, hidden=40, nic_gbs=rate) for rate in (None, 0.001)]
    batch = make_batch(worlds[0], [4, 0, 3, 4, 1, 2])
    outs, found = make_outs(batch), []
    for world in worlds:
        for path in PATHS:
            received = world.dispatch(*batch.arguments, path=path)
            ys = world.combine(
                [o.to(world.config.device) for o in outs], [r.handle for r in received]
            )
            found.append(([r.x for r in received], ys))
    for xs, ys in found:
        assert all(bytes_equal(a, b) for a, b in zip(xs, found[0][0], strict=True))
        assert all(bits_equal(a, b) for a, b in zip(ys, found[0][1], strict=True))


def test_a_chunk_of_several_slots_arrives_whole():
    """Records of 80 KiB: two slots each, and five slots a program at least."""
    sizes = {"num_experts": 2, "top_k": 1, "hidden": 40_000, "max_tokens_per_rank": 4}
    world = LocalWorld(Topology(2, 1, 1), **sizes, nic_gbs=0.1, device=DEVICE)
    assert world.config.tiles.chunk >= 1 and world.config.shape.EMULATED
    xs = [torch.randn(4, 40_000).bfloat16() for _ in range(2)]
    began_s = time.perf_counter()
    away = [torch.full((4, 1), 1 - rank) for rank in range(2)]
    received = world.dispatch(xs, away, [torch.ones(4, 1)] * 2, path="joint")
    assert torch.equal(received[0].x, xs[1]) and torch.equal(received[1].x, xs[0])
    assert time.perf_counter() - began_s >= 2 * 4 * 80_000 / 0.1e9  # here PEs take turns


def through_slow_nics(rank):
    """Time dispatches of 32 records to node 0, at two rates; then take slots beside the others."""
    topo = Topology(4, 1, 1)
    sizes = {"num_experts": 4, "top_k": 1, "hidden": 64, "max_tokens_per_rank": 32}
    with railwave.Communicator(topo, **sizes, nic_gbs=1e-4, device="cpu") as rw:
        assert rw.transport == "shared memory, emulated NICs of 0.0001 GB/s"
        x, weights = torch.full((32, 64), float(rank)).bfloat16(), torch.ones(32, 1)
        to_node_0 = torch.full((32, 1), 0 if rank else -1)
        seconds = {}
        for rate in (1e-4, 4e-4):
            rw._exchange.set_nic_gbs(rate)
            rw._gather(None)
            began_s = time.perf_counter()
            received = rw.dispatch(x, to_node_0, weights, path="native")
            seconds[rate] = max(rw._gather(time.perf_counter() - began_s))
        rw.reset()
        assert rw._exchange.state[PORT.NIC_RATE.value] == 400
        port_off = rw._exchange.heap.layout["ports"]
        slots = torch.zeros(1, 40, 2, dtype=torch.int64)
        for to in (0, 1):
            rw._gather(None)
            rw._exchange.kernels.port.occupy(
                *(slots[:, 20 * to :][:, :20], rw._exchange.heap.bases, rw._exchange.state),
                **{"port_off": port_off, "from_pe": rank, "to_pe": to, "num_bytes": 40},
                **{"programs": 1, "shape": rw.config.shape},
            )
        return received.x[:, 0].tolist(), seconds, slots[0].tolist()


def test_processes_share_ports_in_time():
    by_rank = run_all(through_slow_nics, 4)
    assert by_rank[0][0] == [float(rank) for rank in (1, 2, 3) for _ in range(32)]
    record_bytes = 128 + 16 + 16 + 16
    for rate, seconds in by_rank[0][1].items():
        assert seconds >= 3 * 32 * record_bytes / (rate * 1e9)
    for to in (0, 1):  # 40 bytes at 400 bytes/ms
        rows = [row for _, _, slots in by_rank for row in slots[20 * to : 20 * to + 20]]
        check_slots([(*row, 100_000) for row in rows])


@pytest.mark.parametrize(
    "rate, error, text",
    [
        ("1", TypeError, "nic_gbs must be a number or None, got '1'"),
        (True, TypeError, "nic_gbs must be a number or None"),
        (0.0, ValueError, "nic_gbs must be in"),
        (float("nan"), ValueError, "nic_gbs must be in"),
    ],
)
def test_a_wrong_rate_is_refused(rate, error, text):
    sizes = {"num_experts": 2, "top_k": 1, "hidden": 8, "max_tokens_per_rank": 2}
    with pytest.raises(error, match=text):
        LocalWorld(Topology(2, 1, 1), **sizes, nic_gbs=rate)


def differing_rates(rank):
    """Return the error of ranks whose NICs differ."""
    sizes = {"num_experts": 2, "top_k": 1, "hidden": 8, "max_tokens_per_rank": 2}
    with pytest.raises(ValueError) as error:
        railwave.Communicator(Topology(2, 1, 1), **sizes, nic_gbs=1.0 + rank, device="cpu")
    return str(error.value)


def test_all_ranks_have_the_same_nics():
    for text in run_all(differing_rates, 2):
        assert "nic_gbs must be the same on all ranks, got " in text


def test_nics_need_mapped_memory():
    sizes = {"num_experts": 2, "top_k": 1, "hidden": 8, "max_tokens_per_rank": 2}
    config = {"topo": Topology(2, 1, 1), "dtype": torch.bfloat16, **sizes}
    with pytest.raises(ValueError, match="nic_gbs must be None where NVSHMEM reaches PEs"):
        Config(**config, nic_gbs=1.0, remote=True)
    assert "ports" not in make_config(2, 1, 1).layout.regions
    with pytest.raises(ValueError, match="wire must be None where NICs are emulated"):
        checked_wire("nvshmem", torch.device("cuda"), 1.0)
