"""Bad input is refused with the argument's name, the rule and the value, before anything moves."""

import threading
from types import SimpleNamespace

import pytest
import torch

from railwave import Communicator, LocalWorld, Topology
from railwave.agreement import check_fit
from railwave.config import COMPILED, Config, fitting
from railwave.exchange import Exchange
from worlds import Batch, dispatch, make_batch, make_outs, make_world, run


@pytest.fixture(scope="module")
def world():
    return make_world(2, 1, 1, num_experts=4, top_k=2, hidden=4, max_tokens_per_rank=3)


@pytest.fixture(scope="module")
def other():
    world = make_world(2, 1, 1, num_experts=4, top_k=2, hidden=4, max_tokens_per_rank=3)
    batch = make_batch(world, 3)
    return dispatch(batch, "joint")


@pytest.fixture(scope="module")
def batch(world):
    return make_batch(world, 3)


@pytest.fixture(scope="module")
def handles(world, batch):
    dispatch(batch, "joint")
    return dispatch(batch, "joint")


def snapshot(world):
    memory = [world.heap.memory(pe).clone() for pe in range(world.config.topo.num_ranks)]
    return memory + [exchange.state.clone() for exchange in world._exchanges]


def refused(world, call, error, message):
    """Check that `call` raises and changes no byte of any PE."""
    before = snapshot(world)
    with pytest.raises(error) as caught:
        call()
    assert type(caught.value) is error
    assert message in str(caught.value)
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(world), strict=True))


def ones(*shape, dtype=torch.bfloat16):
    return torch.ones(shape, dtype=dtype)


def ids(*rows, dtype=torch.int64):
    return torch.tensor(rows, dtype=dtype)


# What rank 1 passes instead of its x, topk_idx or topk_weights.
BAD_AT_RANK_1 = [
    ("x", [[1.0]], TypeError, "xs[1] must be a tensor, got list"),
    ("x", ones(3, 4).to_sparse(), TypeError, "xs[1] must be a dense tensor, got layout"),
    ("x", torch.quantize_per_tensor(torch.ones(3, 4), 1.0, 0, torch.qint8), TypeError, "quantized"),
    ("x", ones(3), ValueError, "xs[1] must have 2 dimensions, got shape (3,)"),
    ("x", ones(4, 4), ValueError, "xs[1] must have at most max_tokens_per_rank = 3 tokens, got 4"),
    ("x", ones(3, 5), ValueError, "declared 8 bytes a row (hidden 4 x torch.bfloat16), got 5"),
    ("x", ones(3, 0), ValueError, "xs[1] must have from 1 element"),
    ("x", ones(3, 3), ValueError, "xs must have one hidden size on all ranks, got 4 at rank 0"),
    ("x", ones(3, 4, dtype=torch.float16), ValueError, "xs must have one dtype on all ranks"),
    ("x", ones(3, 4).double().requires_grad_(), ValueError, "xs[1] must be torch.float32"),
    ("x", ones(2, 4), ValueError, "topk_idxs[1] must have shape (2, K) with K from 1 to top_k = 2"),
    ("topk_idx", None, TypeError, "topk_idxs[1] must be a tensor, got NoneType"),
    ("topk_idx", ids(0, 1, 2), ValueError, "topk_idxs[1] must have 2 dimensions"),
    ("topk_idx", ids([0], [1]), ValueError, "topk_idxs[1] must have shape (3, K)"),
    ("topk_idx", ones(3, 3).long(), ValueError, "got (3, 3)"),
    ("topk_idx", ones(3, 0).long(), ValueError, "got (3, 0)"),
    (
        "topk_idx",
        ids([0, 1], [2, 4], [5, 6]),
        ValueError,
        "in [0, 4) or -1 for none, got [2, 4] in",
    ),
    ("topk_idx", ids([0, 9], [2, 3], [1, 1]), ValueError, "got [0, 9] in row 0"),
    ("topk_idx", ids([0, 1], [2, 3], [-7, 1]), ValueError, "got [-7, 1] in row 2"),
    *(
        ("topk_idx", ones(3, 2, dtype=dtype), TypeError, f"must be int32 or int64, got {dtype}")
        for dtype in (torch.int16, torch.uint8, torch.float32, torch.bool)
    ),
    ("topk_weights", ones(3, 2).int(), TypeError, "topk_weights[1] must be floating point, got"),
    ("topk_weights", ones(3, 1), ValueError, "topk_weights[1] must have the shape of topk_idxs[1]"),
]


@pytest.mark.parametrize(("name", "value", "error", "message"), BAD_AT_RANK_1)
def test_dispatch_refuses(world, batch, name, value, error, message):
    arguments = {"x": batch.xs, "topk_idx": batch.topk_idxs, "topk_weights": batch.topk_weights}
    arguments[name] = [arguments[name][0], value]
    refused(world, lambda: world.dispatch(*arguments.values()), error, message)


def test_dispatch_refuses_lists_and_paths(world, batch):
    xs, topk_idxs, weights = batch.arguments

    def no(error, message, *args, **kwargs):
        refused(world, lambda: world.dispatch(*args, **kwargs), error, message)

    path = "path must be one of native, rail, permutation, joint, granted, got "
    no(ValueError, path + "'fast'", *batch.arguments, path="fast")
    no(ValueError, path + "3", *batch.arguments, path=3)
    no(TypeError, "xs must be a list over ranks, got Tensor", torch.stack(xs), topk_idxs, weights)
    no(TypeError, "topk_weights must be a list over ranks, got NoneType", xs, topk_idxs, None)
    no(ValueError, "topk_idxs must have one entry per rank (2), got 1", xs, topk_idxs[:1], weights)
    narrow = [topk_idxs[0], topk_idxs[1][:, :1]], [weights[0], weights[1][:, :1]]
    no(ValueError, "topk_idxs must have one top-k on all ranks, got 2 at rank 0", xs, *narrow)


def test_case_d3_too_many_tokens_says_what_to_raise_and_what_it_costs(world, batch):
    with pytest.raises(ValueError, match=r"raise max_tokens_per_rank, at about \d+ bytes of heap"):
        world.dispatch([ones(4, 4)] * 2, [ones(4, 2).long()] * 2, [ones(4, 2)] * 2)


def test_combine_refuses(world, batch, handles, other):
    outs = make_outs(batch)

    def no(error, message, outs=outs, handles=handles):
        refused(world, lambda: world.combine(outs, handles), error, message)

    def second(out):
        return [outs[0], out]

    rows = len(outs[1])
    no(TypeError, "outs must be a list over ranks, got Tensor", outs=outs[0])
    no(ValueError, "outs must have one entry per rank (2), got 3", outs=[*outs, outs[0]])
    no(TypeError, "outs[1] must be a tensor, got NoneType", outs=second(None))
    no(ValueError, f"outs[1] must have a row for each of the {rows}", outs=second(outs[1][1:]))
    no(TypeError, "outs[1] must be float32, bfloat16 or float16", outs=second(outs[1].double()))
    no(
        ValueError,
        "outs[1] must have from 1 element to the declared 8",
        outs=second(outs[1].float()),
    )
    no(ValueError, "outs must have one dtype on all ranks", outs=second(outs[1].half()))
    no(ValueError, "outs must have one hidden size", outs=second(outs[1][:, :3]))
    no(
        TypeError,
        "handles[0] must be a Handle, as in received[0].handle, got str",
        handles=["a", "b"],
    )
    no(ValueError, "handles must have one entry per rank (2), got 1", handles=handles[:1])
    no(ValueError, "handles[0] must come from a dispatch of this object", handles=other)
    no(ValueError, "handles[0] must come from a dispatch of this object", handles=handles[::-1])


def test_handles_of_two_dispatches_are_refused_and_the_next_call_works(world, batch, handles):
    newer = dispatch(batch, "joint")
    mixed = [handles[0], newer[1]]
    refused(
        world,
        lambda: world.combine(make_outs(batch), mixed),
        ValueError,
        f"handles must be of one dispatch, got dispatch {newer[1].epoch} at rank 1",
    )
    run(batch, "native")


def test_no_gradient_is_asked_for_under_no_grad(world, batch):
    xs = [x.clone().requires_grad_() for x in batch.xs]
    with torch.no_grad():
        dispatch(Batch(world, xs, batch.topk_idxs, batch.topk_weights), "joint")


SIZES = {"num_experts": 4, "top_k": 1, "hidden": 4, "max_tokens_per_rank": 2}
BAD_SIZES = [
    ({"topo": (2, 1, 1)}, TypeError, "topo must be a railwave.Topology, got tuple"),
    *(({name: 0}, ValueError, f"{name} must be at least 1, got 0") for name in SIZES),
    ({"hidden": 4.0}, TypeError, "hidden must be an int, got float 4.0"),
    ({"top_k": True}, TypeError, "top_k must be an int, got bool True"),
    ({"dtype": "bfloat16"}, TypeError, "dtype must be a torch.dtype, got 'bfloat16'"),
    ({"staging_records": 0}, ValueError, "staging_records must be at least 1, got 0"),
    ({"expert_to_rank": [0, 1]}, ValueError, "expert_to_rank must have one rank per expert (4)"),
    ({"expert_to_rank": [0, 1, 2, 0]}, ValueError, "expert_to_rank[2] must be in [0, 2), got 2"),
    ({"expert_to_rank": 3}, TypeError, "expert_to_rank must be"),
    ({"expert_to_rank": [0.0] * 4}, TypeError, "expert_to_rank[0] must be an int"),
]


@pytest.mark.parametrize(("bad", "error", "message"), BAD_SIZES)
def test_world_refuses(bad, error, message):
    arguments = {"topo": Topology(2, 1, 1), **SIZES, **bad}
    with pytest.raises(error) as caught:
        LocalWorld(arguments.pop("topo"), **arguments)
    assert message in str(caught.value)


def test_an_interrupted_world_says_so():
    class Once:
        def __init__(self):
            self.left = 1

        def choice(self, ready):
            if not self.left:
                raise KeyboardInterrupt
            self.left -= 1
            return ready[0]

    world = LocalWorld(
        *(Topology(2, 1, 1),),
        **{"num_experts": 2, "top_k": 1, "hidden": 4, "max_tokens_per_rank": 1},
        order=Once(),
    )
    call = ([ones(1, 4)] * 2, [ids([0])] * 2, [torch.ones(1, 1)] * 2)
    with pytest.raises(KeyboardInterrupt):
        world.dispatch(*call)
    with pytest.raises(RuntimeError, match="was interrupted: make a new LocalWorld"):
        world.dispatch(*call)


def test_a_world_refuses_paths_that_it_was_not_made_for(caplog):
    sizes = {"num_experts": 2, "top_k": 1, "hidden": 4, "max_tokens_per_rank": 8}
    waves = LocalWorld(Topology(3, 1, 1), **sizes, staging_records=2, paths=("joint",))
    every = LocalWorld(Topology(3, 1, 1), **sizes, staging_records=2)
    assert waves.config.layout.size < every.config.layout.size
    with pytest.raises(ValueError, match="path must be one of joint, got 'native'"):
        waves.dispatch([ones(1, 4)] * 3, [ids([0])] * 3, [torch.ones(1, 1)] * 3, path="native")
    with pytest.raises(ValueError, match=r"paths must be of native, .* got 'waves'"):
        LocalWorld(Topology(3, 1, 1), **sizes, paths=("waves",))


def test_case_k1_uneven_rails_are_warned_of(caplog):
    sizes = {"num_experts": 2, "top_k": 1, "hidden": 4, "max_tokens_per_rank": 1}
    LocalWorld(Topology(1, 3, 2), **sizes)
    assert "rails have different numbers of GPUs: ((0, 1), (2,))" in caplog.text
    caplog.clear()
    LocalWorld(Topology(1, 4, 2), **sizes)
    assert not caplog.text


def test_order_must_choose():
    sizes = {"num_experts": 2, "top_k": 1, "hidden": 4, "max_tokens_per_rank": 1}
    with pytest.raises(TypeError, match="order must have a method choice"):
        LocalWorld(Topology(1, 1, 1), **sizes, order=5)


def test_case_n5_a_second_thread_is_refused():
    class Meddler:
        refused = None

        def choice(self, ready):
            if self.refused is None:
                self.refused = ""
                thread = threading.Thread(target=self.meddle)
                thread.start()
                thread.join()
            return ready[0]

        def meddle(self):
            try:
                world.dispatch(*call)
            except RuntimeError as error:
                self.refused = str(error)

    meddler = Meddler()
    sizes = {"num_experts": 1, "top_k": 1, "hidden": 4, "max_tokens_per_rank": 1}
    world = LocalWorld(Topology(1, 1, 1), **sizes, order=meddler)
    call = ([ones(1, 4)], [ids([0])], [torch.ones(1, 1)])
    assert len(world.dispatch(*call)[0].x) == 1
    assert "another thread runs" in meddler.refused


SMALL = dict(num_experts=8, top_k=1, hidden=4, max_tokens_per_rank=1, dtype=torch.float32)


@pytest.mark.parametrize("device, error", [(3, TypeError), ("mps", ValueError), ("x", ValueError)])
def test_a_device_is_a_cpu_or_a_cuda_device(device, error):
    with pytest.raises(error, match="device must be"):
        LocalWorld(Topology(2, 1, 1), **SMALL, device=device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="device must be cpu where torch finds no GPU, got 'cuda'"):
        LocalWorld(Topology(2, 1, 1), **SMALL, device="cuda")


@pytest.mark.parametrize("sharing", [1, 2, 8, 32, 64, 128])
def test_a_put_and_a_pack_beside_it_wait_on_no_more_programs_than_there_are_sms(sharing):
    """Each as wide as a launch may be; where there is no room the put has all to itself."""
    tiles = fitting(COMPILED, 132, sharing)
    pe = SimpleNamespace(config=Config(Topology(4, 1, 1), **SMALL, tiles=tiles))
    put, pack = Exchange.programs_at_once(pe)
    most = 192 if sharing == 1 else 132 // sharing
    assert put >= 1 and put + pack <= most
    assert (pack == 0) == (sharing == 128)


def test_waiting_programs_leave_room_on_a_shared_gpu():
    assert fitting(COMPILED, 132, 1) == COMPILED
    assert [fitting(COMPILED, 132, n).programs for n in (2, 8, 32, 200)] == [66, 16, 4, 1]
    topo = Topology(8, 1, 1)
    check_fit(Config(topo=topo, **SMALL), sharing=8, programs=16)
    check_fit(Config(topo=topo, **SMALL), sharing=1, programs=1)
    check_fit(Config(topo=topo, paths=("joint",), **SMALL), sharing=8, programs=1)
    with pytest.raises(ValueError, match=r"paths must be without native, rail where 32 ranks"):
        check_fit(Config(topo=topo, **SMALL), sharing=32, programs=4)
    check_fit(Config(topo=topo, paths=("granted",), **SMALL), sharing=32, programs=4)
    with pytest.raises(ValueError, match=r"paths must be without granted where 32 ranks"):
        topo = Topology(8, 2, 1)
        check_fit(Config(topo=topo, paths=("granted",), **SMALL), sharing=32, programs=4)


@pytest.mark.parametrize("wire", ["tcp", "nvshmem", 1])
def test_a_wire_is_none_on_a_cpu(wire):
    with pytest.raises(ValueError, match="wire must be None"):
        Communicator(Topology(2, 1, 1), **SMALL, device="cpu", wire=wire)


def test_graphs_are_made_or_not():
    with pytest.raises(TypeError, match="graphs must be True or False, got 1"):
        Communicator(Topology(2, 1, 1), **SMALL, device="cpu", graphs=1)


def test_more_experts_of_a_token_than_a_byte_counts_are_refused():
    sizes = dict(num_experts=300, hidden=2, max_tokens_per_rank=1)
    with pytest.raises(ValueError, match="top_k must be at most 255, got 256"):
        LocalWorld(Topology(1, 1, 1), top_k=256, **sizes)
