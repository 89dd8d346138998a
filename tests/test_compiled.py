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
MADE = shutil.which("g++")
BACKENDS = [pytest.param("aot_eager", marks=[pytest.mark.soak] if MADE else [])]
BACKENDS += ["inductor"] if MADE else []


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
            torch.compiler.cudagraph_mark_step_begin()
            y = function(rw, x, ids, w, experts, alignment, shared)
            (y * torch.arange(8, device=device)).sum().backward()
            kept = [y.detach().clone()]  # a graph's next replay writes there, and to gradients
            kept += [leaf.grad.clone() for leaf in leaves]
            torch.compiler.cudagraph_mark_step_begin()
            with torch.no_grad():
                served = function(rw, x, ids, w, experts, alignment, shared)
            runs.append([*kept, served.clone()])
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

    def scaled(x8, scales):
        form = {"extras": [scales], "static_shapes": True, "path": "granted"}
        received = rw.dispatch(x8, ids, weights, **form, expert_alignment=4)
        exponents = received.extras[0].view(torch.uint8).int()  # of blocks of 4 elements
        blocks = torch.ldexp(received.x.float().view(-1, 2, 4), exponents[:, :2, None] - 127)
        out, given = blocks.view(-1, 8).bfloat16(), {"weights": received.topk_weights}
        return rw.combine(out, received.handle, **given, wire_dtype=torch.float32)

    exponents = torch.randint(120, 134, (3, 8), dtype=torch.uint8, device=x.device)
    packed = exponents.view(torch.int32).T.contiguous().T
    want = scaled(x.to(torch.float8_e4m3fn), packed)
    assert want.any() and want.isfinite().all()
    for backend in ("aot_eager", "inductor") if MADE else ("aot_eager",):
        compiled = torch.compile(scaled, backend=backend, fullgraph=True)
        assert bytes_equal(compiled(x.to(torch.float8_e4m3fn), packed), want), backend

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


def hostile(rank):
    """A compiled call that eager code refuses, on rank 1 alone, is heard of on rank 0, at once."""
    rw = init(railwave.Topology(2, 1, 1), hidden=16, dtype=torch.float32)
    batch = make_batch(rw, 3, hidden=8)
    _, ids, weights = (values[rank] for values in batch.arguments)
    x = torch.randn(3, 8, device=ids.device)
    static = {"static_shapes": True}
    plain = rw.dispatch(x, ids, weights, **static)
    grouped = rw.dispatch(x, ids, weights, **static, expert_alignment=2)
    view = rw.dispatch(x, ids, weights, **static, out="view")
    of_view = view.x.clone()

    def repeat(tokens, handle, **form):
        return rw.dispatch(tokens, handle=handle, **form).x * 1

    def fresh(x=x, ids=ids, weights=weights, **form):
        return rw.dispatch(x, ids, weights, **static, **form).x * 1

    def back(out=plain.x, handle=plain.handle, **form):
        return rw.combine(out * 1, handle, **form)

    needs = torch.ones(3, 1, device=x.device, requires_grad=True)
    rows, one = len(plain.x), torch.ones(1, device=x.device, requires_grad=True)
    wrong_dispatches = [
        (lambda: repeat(x[:1], plain.handle), ValueError, "must have the 3 tokens"),
        (lambda: repeat(x, plain.handle, path="native"), ValueError, "path must be left out"),
        (lambda: repeat(x, plain.handle, static_shapes=False), ValueError, "static_shapes must be"),
        (lambda: repeat(x, plain.handle, expert_alignment=2), ValueError, "expert_alignment must"),
        (lambda: repeat(x, grouped.handle, expert_alignment=3), ValueError, "the handle's 2"),
        (lambda: repeat(x, plain.handle, topk_idx=ids), TypeError, "topk_idx must be left out"),
        (lambda: repeat(x, "handle"), TypeError, "handle must be a Handle"),
        (lambda: fresh(expert_alignment=0), ValueError, "expert_alignment must be from 1"),
        (lambda: fresh(expert_alignment=True), TypeError, "expert_alignment must be an int"),
        (lambda: fresh(expert_alignment=2, zero_padding=1), TypeError, "zero_padding must be True"),
        (lambda: fresh(path=""), ValueError, "path must be one of"),
        (lambda: fresh(extras=[needs]), ValueError, "must not require gradients"),
        (lambda: repeat(x[0], plain.handle), ValueError, "x must have 2 dimensions"),
        (lambda: fresh(path=5), ValueError, "path must be one of"),
        (lambda: fresh(x=x[0]), ValueError, "x must have 2 dimensions"),
        (lambda: fresh(ids=ids[0]), ValueError, "topk_idx must have 2 dimensions"),
        (lambda: fresh(weights=[1.0]), TypeError, "topk_weights must be a tensor, got list"),
        (lambda: fresh(extras=[x[0]]), ValueError, r"extras\[0\] must have 2 dimensions"),
        (lambda: fresh(extras=[x, 1]), TypeError, r"extras\[1\] must be a tensor, got int"),
        (lambda: fresh(extras=x), TypeError, "extras must be a sequence of tensors, got Tensor"),
        (lambda: fresh(expert_alignment=2**70), ValueError, "expert_alignment must be from 1"),
        (lambda: fresh(ids=ids.to("meta")), ValueError, "topk_idx must be on the device"),
        (lambda: fresh(weights=weights.to("meta")), ValueError, "topk_weights must be on the dev"),
        (lambda: fresh(extras=[x.to("meta")]), ValueError, r"extras\[0\] must be on the device"),
    ]
    wrong_combines = [
        (lambda: back(handle=None), TypeError, "handle must be a Handle"),
        (lambda: back(plain.x[0]), ValueError, "out must have 2 dimensions"),
        (lambda: back(weights=[1.0] * rows), TypeError, "weights must be a tensor, got list"),
        (lambda: back(bias="xyz"), TypeError, "bias must be a tensor, got str"),
        (lambda: back(weights=torch.ones(rows, device="meta")), ValueError, "must be on the dev"),
        (lambda: back(bias=x[0].to("meta")), ValueError, "bias must be on the device"),
        (lambda: back(wire_dtype=3), TypeError, "wire_dtype must be float32, bfloat16 or float16"),
        (lambda: back(of_view * one, view.handle), ValueError, "of a dispatch with out='copy'"),
        (
            lambda: back(of_view, view.handle, weights=one.expand(rows)),
            *(ValueError, "of a dispatch with out='copy'"),
        ),
    ]
    for right, calls in ((fresh, wrong_dispatches), (back, wrong_combines)):
        for call, error, said in calls:
            torch._dynamo.reset()
            with pytest.raises(error if rank else railwave.PeerError, match=said):
                torch.compile(call, backend="aot_eager")() if rank else right()

    def pair():  # of tokens that differ: equal calls of a graph are one
        return [rw.dispatch(tokens, ids, weights, **static) for tokens in (x, x * 2)]

    def mixed(repeats):
        made = pair()
        handle = made[rank].handle
        got = repeat(x, handle) if repeats else back(handle=handle)
        return got, [received.x for received in made]  # what a graph does not give is not called

    for repeats in (False, True):
        torch._dynamo.reset()
        with pytest.raises(railwave.PeerError, match="call"):
            torch.compile(mixed, backend="aot_eager")(repeats)
    handle = torch.compile(pair, backend="aot_eager")()[rank].handle  # used outside its graph
    with pytest.raises(railwave.PeerError, match="of call"):
        back(handle=handle)
    assert torch.equal(*(back(handle=of) for of in (pair()[0].handle, plain.handle)))
    with torch.no_grad():
        scaled = torch.compile(lambda: back(of_view * one, view.handle), backend="aot_eager")()
    assert torch.equal(scaled, back(of_view, view.handle))
    got = torch.compile(lambda: fresh(extras=None), backend="aot_eager")()
    assert got.shape == plain.x.shape
    brought = torch.compile(
        lambda: rw.combine_weights(grouped.topk_weights * 1, grouped.handle), backend="aot_eager"
    )()
    assert torch.equal(brought, rw.combine_weights(grouped.topk_weights, grouped.handle))
    rw.close()


def test_what_is_refused_is_refused_in_a_graph():
    run_all(hostile, 2, timeout_s=240)


def weights_back(rank):
    """In one graph: by token and by expert, of a layer whose weights need gradients."""
    rw = init(railwave.Topology(2, 1, 1), hidden=8, dtype=torch.float32)
    batch = make_batch(rw, [3, 4], hidden=8)
    x, ids, weights = (values[rank] for values in batch.arguments)
    first = torch.arange(len(ids), device=ids.device)[:, None]
    ids = (first + torch.arange(ids.shape[1], device=ids.device)) % rw.config.num_experts

    def doubled(weights, alignment):
        form = {"static_shapes": True, "expert_alignment": alignment}
        received = rw.dispatch(x, ids, weights, **form)
        return rw.combine_weights(received.topk_weights.detach() * 2, received.handle)

    for alignment in (None, 4):
        given = weights.clone().requires_grad_(alignment is None)
        compiled = torch.compile(doubled, backend="aot_eager", fullgraph=True)
        for call in (doubled, compiled):
            assert torch.equal(call(given, alignment), 2 * weights), (alignment, call)
    handle = rw.dispatch(x, ids, weights, static_shapes=True).handle
    elsewhere = handle.topk_weights.to("meta")
    with pytest.raises(ValueError, match="topk_weights must be on the device cpu, got meta"):
        torch.compile(lambda: rw.combine_weights(elsewhere, handle), backend="aot_eager")()
    rw.close()


def test_weights_come_back_in_one_graph():
    run_all(weights_back, 2, timeout_s=240)


def several(rank):
    """Two communicators, any number of tokens, gradients through a repeat."""
    topo, ranks = railwave.Topology(2, 1, 1), 2
    both = [init(topo, hidden=8, dtype=torch.float32) for _ in range(ranks)]

    def forth_and_back(rw, x, ids, weights):
        first = rw.dispatch(x.detach(), ids, weights, static_shapes=True)
        rows = rw.dispatch(x, handle=first.handle).x
        return rw.combine(rows * rows, first.handle)

    for dynamic in (None, True):
        torch._dynamo.reset()
        compiled = torch.compile(
            forth_and_back, backend="aot_eager", fullgraph=True, dynamic=dynamic
        )
        for rw, tokens in [(both[0], [3, 1]), (both[1], [2, 4]), (both[0], [1, 3])]:
            batch = make_batch(rw, tokens, hidden=8)
            _, ids, weights = (values[rank] for values in batch.arguments)
            x = torch.randn(len(ids), 8, device=ids.device)
            grads = []
            for function in (forth_and_back, compiled):
                leaf = x.clone().requires_grad_()
                function(rw, leaf, ids, weights).sum().backward()
                grads.append(leaf.grad)
            assert bytes_equal(*grads)
    # What needs gradients is compared, as in eager calls.
    call = torch.compile(forth_and_back, backend="aot_eager")
    with pytest.raises(railwave.PeerError, match="gradients"):
        call(both[0], x.requires_grad_(rank == 0), ids, weights)
    for rw in both:
        rw.close()


def test_graphs_of_two_communicators_and_of_any_number_of_tokens():
    run_all(several, 2, timeout_s=240)


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
        arguments = (x, ids, weights, [], rw._name, "joint", alignment, alignment > 0, "x")
        torch.library.opcheck(torch.ops.railwave.dispatch.default, arguments, test_utils=tests)
        rows, *tables = torch.ops.railwave.dispatch(*arguments)
        tables = [table.detach() for table in tables]
        rows = rows.detach().nan_to_num().requires_grad_()
        given = [torch.ones(len(rows), requires_grad=True), [torch.ones(8, requires_grad=True)]]
        form = (rw._name, "joint", 3, 16, alignment, None, False, [])
        arguments = (rows, *given, tables, *form)
        torch.library.opcheck(torch.ops.railwave.combine.default, arguments, test_utils=tests)
        form = (rw._name, "joint", 3, 16, alignment, alignment > 0, "x")
        arguments = (x, tables, *form)
        torch.library.opcheck(torch.ops.railwave.repeat.default, arguments, test_utils=tests)
    rw.close()
