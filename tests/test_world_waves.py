"""Whole worlds: who puts what to whom and when, in any order of ready PEs, and a report if stuck.

Results, quotas, bytes and windows are checked by each run: see worlds.py.
"""

import contextlib
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from heaps import DEVICE, ON_GPU
from railwave.config import PATHS, WAVES
from railwave.exchange import Exchange
from worlds import LastFirst, combine, dispatch, make_batch, make_outs, make_world, run

pytestmark = pytest.mark.usefixtures("poison_empty")


def all_pairs(world, T):
    """Make a batch in which every rank sends all its tokens to every node."""
    topo, E = world.config.topo, world.config.num_experts
    topk = torch.arange(topo.nodes) * E // topo.nodes
    return make_batch(world, T, topk=topk.expand(T, -1))


def test_windows_are_the_permutations_of_eq_10():
    world = make_world(4, 1, 1, top_k=4)
    dispatch(all_pairs(world, 2), "joint")
    shifts = [{(d - s) % 4 for s, d in window} for window in world.traffic.windows]
    assert shifts == [{1}, {2}, {3}]
    assert [len(window) for window in world.traffic.windows] == [4, 4, 4]


def test_native_has_incast_and_joint_has_none():
    world = make_world(3, 1, 1)
    batch = all_pairs(world, 2)
    for path, fan_in in (("native", 2), ("joint", 1)):
        handles = dispatch(batch, path)
        assert world.traffic.max_fan_in == fan_in
        combine(batch, handles, make_outs(batch))
        assert world.traffic.max_fan_in == fan_in


@pytest.mark.parametrize("path", WAVES)
@pytest.mark.parametrize("order", [random.Random(1), LastFirst()], ids=["random", "last"])
def test_one_sender_a_rail_in_any_order(path, order):
    """Three nodes, two GPUs on one rail, two rounds a slice."""
    world = make_world(3, 2, 1, staging_records=2, order=order)
    run(make_batch(world, [4, 0, 4, 3, 1, 4]), path)


@pytest.mark.parametrize("path, late", [*((path, False) for path in PATHS), ("joint", True)])
@pytest.mark.parametrize("staging", [1, 5], ids=["rounds", "one"])
def test_what_is_launched_beside_a_put_gives_the_same_bytes(path, late, staging, monkeypatch):
    """As on a GPU: the own node's rows beside the last put, its sums beside the first one.

    late: all of it runs after the put.
    """
    beside, seen = [False], []

    @contextlib.contextmanager
    def beside_put(pe, launch, then=None):
        if late:
            yield
        beside[0] = True
        if launch:
            launch()
        beside[0] = False
        if not late:
            yield

    monkeypatch.setattr(Exchange, "beside_put", beside_put)
    world = make_world(
        *(3, 2, 1), max_tokens_per_rank=5, staging_records=staging, order=random.Random(0)
    )
    for pe in world._exchanges:
        pe.beside = SimpleNamespace(synchronize=lambda: None)
    kernels = world._exchanges[0].kernels
    for module, name in ((kernels.pack, "local"), (kernels.reduce, "own")):
        launch = getattr(module, name)

        def watched(*args, launch=launch, name=name, **options):
            seen.append((name, beside[0]))
            launch(*args, **options)

        monkeypatch.setattr(module, name, watched)
    run(make_batch(world, [5, 0, 4, 3, 1, 5]), path)
    assert set(seen) == {("local", True), ("own", True)} and len(seen) == 2 * 6


class Stream:
    """A stream that only keeps a log of what it waits for."""

    def __init__(self, name, log):
        self.name, self.log = name, log

    def record_event(self, event):
        return self.name

    def wait_event(self, name):
        self.log.append(f"{self.name} waits for {name}")

    def synchronize(self):
        pass


@pytest.mark.skipif(ON_GPU, reason="streams are those of the GPU there")
@pytest.mark.parametrize("stops", [False, True])
def test_what_waits_for_a_put_is_launched_behind_it(stops, monkeypatch):
    """So that the put begins even where all is in one queue; after an error not at all."""
    log = []
    (pe,) = make_world(1, 1, 1)._exchanges
    pe.beside = Stream("beside", log)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("own", log))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    with (
        contextlib.suppress(KeyboardInterrupt),
        pe.beside_put(lambda: log.append("pack"), lambda: log.append("unpack")),
    ):
        log.append("put")
        if stops:
            raise KeyboardInterrupt
    fork, join = "beside waits for own", "own waits for beside"
    assert log == [fork, "pack", "put", *([] if stops else ["unpack"]), join]


@pytest.mark.skipif(ON_GPU, reason="streams are those of the GPU there")
@pytest.mark.parametrize("path", ["joint", "granted"])
@pytest.mark.parametrize("stopped_by", ["", "put", "local"])
def test_what_follows_waits_for_what_was_launched_beside_a_put(path, stopped_by, monkeypatch):
    """After an error, too: the call's memory is given back then, and may be used at once."""
    log = []
    own = Stream("own", log)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: own)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    world = make_world(2, 1, 1, paths=(path,))
    for pe in world._exchanges:
        pe.beside = Stream(f"beside {pe.pe}", log)
    kernels = world._exchanges[0].kernels
    put = (kernels.granted, "granted") if path == "granted" else (kernels.wire, "put")
    for name, place in {"put": put, "local": (kernels.pack, "local")}.items():
        original = getattr(*place)

        def watched(*args, name=name, launch=original, **options):
            log.append(name)
            if name == stopped_by:
                raise KeyboardInterrupt
            launch(*args, **options)

        monkeypatch.setattr(*place, watched)
    with pytest.raises(KeyboardInterrupt) if stopped_by else contextlib.nullcontext():
        world.dispatch(*make_batch(world, 2).arguments, path=path)
    for pe in range(1 if stopped_by else 2):
        fork, join = f"beside {pe} waits for own", f"own waits for beside {pe}"
        assert [said for said in log if said in (fork, join)] == [fork, join]
        assert "local" in log[log.index(fork) : log.index(join)]


@pytest.mark.parametrize("pipeline", [True, False])
def test_a_put_with_nothing_beside_it_has_all_programs(pipeline, monkeypatch):
    """As on a GPU that is shared; with a pack beside it, it leaves room for that."""
    world = make_world(2, 1, 1, staging_records=1)
    tiles = replace(world.config.tiles, programs=4, waiting=4)
    object.__setattr__(world.config, "tiles", tiles)
    wire = world._exchanges[0].kernels.wire
    seen, put = [], wire.put

    @contextlib.contextmanager
    def beside_put(pe, launch, then=None):
        if launch:
            launch()
        yield

    def watched(*args, programs, **options):
        seen.append(programs)
        put(*args, programs=programs, **options)

    monkeypatch.setattr(Exchange, "beside_put", beside_put)
    monkeypatch.setattr(wire, "put", watched)
    for pe in world._exchanges:
        pe.beside = pipeline
    dispatch(make_batch(world, 4), "joint")
    assert seen == [3 if pipeline else 4] * 6 + [4] * 2


class OneSlow(random.Random):
    """Let PE `slow` run only when no other can."""

    slow = 0

    def choice(self, ready):
        return next((pe for pe in ready if pe != self.slow), self.slow)


def test_one_slow_rank():
    """Rail 0 carries nothing: nobody waits for payload of an owner on it, and it may fall behind.

    Its mate carries its records, one a round, so that both buffers are used again and again.
    """
    eligible = torch.tensor([False, True]).expand(2, 2, 2)
    order = OneSlow()
    world = make_world(
        2, 2, 2, eligible=eligible, staging_records=1, max_tokens_per_rank=3, order=order
    )
    for order.slow in (0, 1):
        batch = make_batch(world, [3, 0, 3, 0], topk=torch.tensor([[0, 4, 7]] * 3))
        run(batch, "joint")


def test_put_bytes_by_hand():
    """One token of rank 0 to both GPUs of node 1 is one record: 16 + 4 + 4 + 4 words."""
    world = make_world(2, 2, 2, hidden=32, num_experts=4)
    none = torch.zeros(0, 3, dtype=torch.int64, device=DEVICE)
    ids = [torch.tensor([[2, 3, 2]], device=DEVICE), none, none, none]
    xs = [torch.ones(len(i), 32, dtype=torch.bfloat16, device=DEVICE) for i in ids]
    received = world.dispatch(xs, ids, [i.float() for i in ids], path="native")
    assert world.traffic.put_bytes.tolist() == [[[0, 0], [28 * 4, 0]], [[0, 0], [0, 0]]]
    assert world.traffic.rail_bytes().tolist() == [[112, 0], [0, 0]]
    ys = world.combine([r.x for r in received], [r.handle for r in received])
    assert world.traffic.put_bytes.tolist() == [[[0, 0], [0, 0]], [[64, 0], [0, 0]]]
    assert (ys[0] == 2).all()


def test_missing_word_is_named():
    """PE 1 never says that it has delivered: its node-mate and it wait for that word."""
    world = make_world(2, 2, 2)
    exchange = world._exchanges[1]
    unpack = exchange.kernels.unpack
    mute = {"delivered_off": world.heap.layout["texts"]}  # it says so elsewhere
    silent = {"unpack": lambda *args, **kwargs: unpack.unpack(*args, **{**kwargs, **mute})}
    parts = {**vars(exchange.kernels), "unpack": SimpleNamespace(**{**vars(unpack), **silent})}
    exchange.kernels = SimpleNamespace(**parts)
    batch = make_batch(world, 4)
    with pytest.raises(
        RuntimeError, match=r"no PE can go on; PE 0 waits for delivered.*PE 1 waits"
    ):
        world.dispatch(*batch.arguments)
