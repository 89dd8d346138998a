"""The verbs inside `torch.compile`: no graph break with static shapes, the same results.

Letters: T tokens, K top-k, H hidden.
"""

import shutil

import pytest
import torch

import railwave
from processes import run_all
from test_processes import init
from worlds import bits_equal, bytes_equal, make_batch, make_world

# What makes code of graphs needs a compiler of C++ on a CPU.
BACKENDS = ["aot_eager", *(["inductor"] if shutil.which("g++") else [])]


def moe(rw, x, ids, weights, experts, alignment, shared):
    """One layer on this rank: its experts are matrices."""
    received = rw.dispatch(x, ids, weights, static_shapes=True, expert_alignment=alignment)
    picked = experts[received.topk_idx.clamp(0, 1)]  # of rows that did not come, anything
    if alignment:
        out = torch.tanh((received.x[:, None] @ picked)[:, 0])
        given = {"weights": received.topk_weights, "bias": (shared, x)}
    else:
        each = torch.tanh((received.x[:, None, None] @ picked)[:, :, 0])
        out = (each * received.topk_weights[:, :, None]).sum(dim=1)
        given = {"bias": shared}
    return rw.combine(out, received.handle, **given)


def layer(rank, ranks, backend, **more):
    sizes = {"num_experts": 2 * ranks, "top_k": 2, "hidden": 8, "dtype": torch.float32}
    rw = init(railwave.Topology(ranks, 1, 1), **sizes, max_recv_rows=8)
    device = rw.config.device
    compiled = torch.compile(moe, backend=backend, fullgraph=True, **more)
    for alignment in (None, 4):
        batch = make_batch(rw, [3, 4][:ranks], hidden=8)
        ids, weights = (values[rank] for values in batch.arguments[1:])
        leaves = [
            torch.randn(len(ids), 8, device=device),
            weights,
            torch.randn(2, 8, 8, device=device) / 3,
            torch.randn(8, device=device),
        ]
        runs = []
        for function in (moe, compiled):
            for leaf in leaves:
                leaf.grad = None
                leaf.requires_grad_()
            x, w, experts, shared = leaves
            y = function(rw, x, ids, w, experts, alignment, shared)
            (y * torch.arange(8, device=device)).sum().backward()
            with torch.no_grad():
                served = function(rw, x, ids, w, experts, alignment, shared)
            runs.append([y.detach(), served, *(leaf.grad for leaf in leaves)])
        for got, want in zip(*runs, strict=True):
            if backend == "aot_eager":
                assert bytes_equal(got, want), alignment
            else:  # which makes other kernels of the experts
                assert torch.allclose(got, want, rtol=1e-5, atol=1e-5), alignment
    rw.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_layer_is_one_graph_with_the_same_results(backend):
    run_all(layer, 2, 2, backend, timeout_s=240)


def others(rank):
    """Repeats and extras in a graph; what cannot be in one breaks it, and is right, too."""
    rw = init(railwave.Topology(2, 1, 1), hidden=16, dtype=torch.float32)
    batch = make_batch(rw, 3, hidden=8)
    _, ids, weights = (values[rank] for values in batch.arguments)
    x = torch.randn(3, 8, device=ids.device)
    scale = x[:, :2].half()

    def twice(x, scale):
        form = {"extras": [scale], "static_shapes": True}
        first = rw.dispatch(x, ids, weights, **form)
        again = rw.dispatch(x * 2, handle=first.handle)
        return first.num_rows, first.x, first.extras[0], again.x, again.num_tokens_per_expert

    n, *got = torch.compile(twice, backend="aot_eager", fullgraph=True)(x, scale)
    m, *want = twice(x, scale)
    assert n == m and torch.equal(got[-1], want[-1])
    for a, b in zip(got[:-1], want[:-1], strict=True):
        assert bytes_equal(a[:n], b[:n])

    def dynamic(x):
        received = rw.dispatch(x * 1, ids, weights)
        return rw.combine(received.x * 2, received.handle) + 1

    assert bytes_equal(torch.compile(dynamic, backend="aot_eager")(x), dynamic(x))

    def late(x):
        return rw.dispatch(x, ids, weights, static_shapes=True).x

    compiled = torch.compile(late, backend="aot_eager", fullgraph=True)
    wrong = x.new_zeros(99, 8) if rank else x
    with pytest.raises(ValueError if rank else railwave.PeerError, match="max_tokens_per_rank"):
        compiled(wrong)
    compiled(x)
    rw.close()


def test_what_a_graph_holds_and_what_breaks_it():
    run_all(others, 2, timeout_s=240)


def test_a_local_world_breaks_a_graph():
    world = make_world(2, 1, 1, dtype=torch.float32)
    batch = make_batch(world, 3)

    def forth_and_back(xs):
        received = world.dispatch([x * 1 for x in xs], *batch.arguments[1:])
        return world.combine([r.x * 2 for r in received], [r.handle for r in received])

    xs = batch.arguments[0]
    each = zip(
        torch.compile(forth_and_back, backend="aot_eager")(xs), forth_and_back(xs), strict=True
    )
    assert all(bits_equal(got, want) for got, want in each)


def test_the_operators_are_what_torch_asks_of_them():
    """Schema, fake results and gradients by torch's own check, on one rank."""
    run_all(checked, 1, timeout_s=240)


def checked(rank):
    rw = init(railwave.Topology(1, 1, 1), hidden=8, dtype=torch.float32)
    batch = make_batch(rw, 3, hidden=8)
    _, ids, weights = (values[rank] for values in batch.arguments)
    x = torch.randn(3, 8, device=ids.device, requires_grad=True)
    weights = weights.clone().requires_grad_()
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    for alignment in (0, 4):
        arguments = (x, ids, weights, [], rw._number, "joint", alignment, alignment > 0)
        torch.library.opcheck(torch.ops.railwave.dispatch.default, arguments, test_utils=tests)
        rows, *tables = torch.ops.railwave.dispatch(*arguments)
        tables = [table.detach() for table in tables]
        rows = rows.detach().nan_to_num().requires_grad_()
        given = [torch.ones(len(rows), requires_grad=True), [torch.ones(8, requires_grad=True)]]
        form = (rw._number, "joint", 3, 16, alignment, None, False)
        arguments = (rows, *given, tables, *form)
        torch.library.opcheck(torch.ops.railwave.combine.default, arguments, test_utils=tests)
        arguments = (x.detach(), tables, rw._number, "joint", 16, alignment, alignment > 0)
        torch.library.opcheck(torch.ops.railwave.repeat.default, arguments, test_utils=tests[::2])
    rw.close()
