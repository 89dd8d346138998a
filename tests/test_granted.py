"""The path granted as a whole: what holds beside what tests of all paths check."""

import contextlib
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from railwave import config as config_module
from railwave.config import COMPILED, INTERPRETED, fitting
from railwave.exchange.pe import Exchange
from worlds import LastFirst, combine, dispatch, make_batch, make_outs, make_world, run


@pytest.fixture(params=["in turn", "at random", "last first"])
def order(request):
    """Return who goes on next."""
    return {"at random": random.Random(0), "last first": LastFirst()}.get(request.param)


@pytest.fixture
def small_chunks(monkeypatch):
    """Let a record be a chunk of `put`, so that slices are granted in many."""
    monkeypatch.setattr(config_module, "INTERPRETED", replace(INTERPRETED, chunk=1))


def test_slices_of_many_chunks_on_rails_of_two_gpus(small_chunks, order):
    world = make_world(
        *(3, 3, 2), rail_of_gpu=(0, 0, 1), max_tokens_per_rank=5, paths=("granted",), order=order
    )
    assert world.config.shape.CHUNKS > 4
    run(make_batch(world, [5, 0, 1, 5, 0, 3, 4, 0, 5]), "granted")


def test_ineligible_rails_and_all_to_one_node(small_chunks):
    eligible = torch.ones(3, 3, 2, dtype=torch.bool)
    eligible[0, 1, 0] = eligible[1, 0, 0] = False
    world = make_world(3, 2, 2, eligible=eligible, max_tokens_per_rank=6, order=LastFirst())
    batch = make_batch(world, 6)
    for topk_idx in batch.topk_idxs:
        topk_idx[:, 0] = 0  # everyone to node 0
    run(batch, "granted")


def test_paths_in_turn_and_several_open_handles():
    """Words only grow, whatever the path before; a combine follows its own dispatch's path."""
    order = random.Random(0)
    world = make_world(3, 2, 1, max_tokens_per_rank=3, staging_records=2, order=order)
    batch = make_batch(world, 3)
    outs = make_outs(batch)
    handles = {path: dispatch(batch, path) for path in ("granted", "joint", "native", "granted")}
    for path in ("joint", "granted", "native", "granted"):
        combine(batch, handles[path], outs)


class Stream:
    """A stream that runs what is launched there at once, or late: when it is waited for."""

    def __init__(self, late):
        self.late, self.launches = late, []

    def launch(self, launch):
        self.launches.append(launch)
        if not self.late:
            self.synchronize()

    def synchronize(self):
        while self.launches:
            self.launches.pop(0)()


@pytest.mark.parametrize("late", [False, True])
def test_what_is_packed_beside_the_put_is_put_wave_by_wave(late, monkeypatch):
    """As on a GPU, where a second stream packs and adds up what later waves need."""

    @contextlib.contextmanager
    def beside_put(pe, launch, then=None):
        pe.beside.launch(launch)
        yield
        pe.beside.synchronize()

    monkeypatch.setattr(Exchange, "beside_put", beside_put)
    world = make_world(4, 2, 1, max_tokens_per_rank=5, paths=("granted",))
    for pe in world._exchanges:
        pe.beside = Stream(late)
    assert len(world.config.packs(*world.config.rounds("granted"))) == 3
    run(make_batch(world, 5), "granted")


def test_what_arrives_is_taken_in_beside_the_put(monkeypatch):
    """As on a GPU, where `unpack` waits there meanwhile: here it runs when all has been put."""
    world = make_world(4, 2, 1, max_tokens_per_rank=5, paths=("granted",))
    kernels, kept, done = world._exchanges[0].kernels, [], []
    launched = []  # by whom what is launched behind a put
    run_unpack = kernels.unpack.unpack

    @contextlib.contextmanager
    def beside_put(pe, launch, then=None):
        launch()
        yield
        if then:
            launched.append(pe.pe)
            then()
        done.append(pe.pe)
        if len(done) == 8:  # all PEs have put
            for args, options in kept:
                run_unpack(*args, **options)
            done.clear()
            kept.clear()

    def keep(*args, **options):
        assert launched[-1] == options["me"] and options["programs"] == 1
        kept.append((args, options))

    monkeypatch.setattr(Exchange, "beside_put", beside_put)
    monkeypatch.setattr(Exchange, "programs_beside_granted", lambda pe, this: 1)
    monkeypatch.setattr(kernels.unpack, "unpack", keep)
    for pe in world._exchanges:
        pe.beside = SimpleNamespace(synchronize=lambda: None)
    run(make_batch(world, [5, 0, 4, 3, 1, 5, 2, 5]), "granted")
    assert sorted(launched) == list(range(8))  # in the dispatch alone


@pytest.mark.parametrize("sharing, peers", [(1, 3), (8, 3), (32, 3), (32, 7), (64, 1)])
def test_what_waits_beside_granted_leaves_it_room(sharing, peers, monkeypatch):
    """Of a GPU of 132 SMs, or of 78, and none where a launch of granted comes back."""
    for num_sms in (132, 78):
        tiles = fitting(COMPILED, num_sms, sharing)
        gpu = SimpleNamespace(multi_processor_count=num_sms)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, gpu=gpu: gpu)
        pe = SimpleNamespace(config=SimpleNamespace(tiles=tiles), device=0, beside=1, persists=True)
        this = SimpleNamespace(num_peers=peers)
        programs = Exchange.programs_beside_granted(pe, this)
        assert 0 <= programs * peers + 1 <= tiles.waiting
        assert programs * peers <= num_sms // 2
        assert (programs > 0) == (sharing * (peers + 1) <= num_sms)
        for name in ("beside", "persists"):
            without = SimpleNamespace(**{**vars(pe), name: 0})
            assert Exchange.programs_beside_granted(without, this) == 0


def test_staging_is_for_all_peers_and_tables_only_where_the_path_is_named():
    joint, granted = (make_world(4, 1, 1, paths=(path,)) for path in ("joint", "granted"))
    records = granted.config.proxy_records
    assert granted.config.layout.regions["send"].size == 3 * records * (
        joint.config.layout.regions["send"].size // 2 // joint.config.staging_records
    )
    assert [len(w._exchanges[0].grants[0]) for w in (joint, granted)] == [0, 4]
    assert make_world(1, 2, 2)._exchanges[0].grants.numel() == 0
