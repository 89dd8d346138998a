"""One process per rank: the same bits as in one process, and every mistake told to every rank.

Letters: W ranks, E experts, K top-k, T tokens, H hidden. Every rank draws all ranks' arguments from
one seed, so each knows what it must receive.
"""

import gc
import os
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

import railwave
from processes import run_all, start_server
from railwave.config import PATHS
from railwave.heap import shm
from railwave.reference import combine_ref
from worlds import bits_equal, bytes_equal, make_batch, make_outs, make_world

DECLARED = dict(num_experts=8, top_k=3, hidden=8, max_tokens_per_rank=4, deadline_s=20)
TOPO = railwave.Topology(2, 2, 2)


def init(topo=TOPO, **arguments):
    return railwave.Communicator(topo, **{**DECLARED, **arguments})


def dispatch(rw, batch, path):
    """Dispatch this rank's part of a batch and check it; return the handle."""
    mine = [values[rw.rank] for values in batch.arguments]
    received, want = rw.dispatch(*mine, path=path), batch.expected[rw.rank]
    for name in ("x", "topk_idx", "topk_weights", "num_tokens_per_expert"):
        assert bytes_equal(getattr(received, name), getattr(want, name)), (path, name)
    return received.handle


def combine(rw, batch, handle, outs):
    """Combine this rank's part of a batch and check it; return the sums."""
    y = rw.combine(outs[rw.rank].to(rw.config.device), handle)
    want = combine_ref(rw.config.topo, outs, batch.expected, batch.num_tokens)
    assert bits_equal(y, want[rw.rank]), handle.path
    return y


def phases(rw, tokens, path="joint", **kind):
    """Dispatch and combine a fresh batch, checked; return what was called and got."""
    batch = make_batch(rw, tokens, **kind)
    outs = make_outs(batch, dtype=torch.float32, hidden=3)
    return batch, outs, combine(rw, batch, dispatch(rw, batch, path), outs)


def errors_of(call):
    """Return (type name, message) of what a call raises on every rank, lists over ranks."""
    try:
        call()
        mine = ("", "")
    except Exception as error:
        mine = (type(error).__name__, str(error))
    everybody = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, mine)
    return everybody


def every_path(world, make_call):
    """Draw a batch and run it on every path, and again; return what `make_call` returns."""
    torch.manual_seed(0)
    batch = make_batch(world, [4, 0, 3, 4])
    outs = make_outs(batch)
    return [make_call(batch, outs, path) for path in (*PATHS, "joint", "native")]


def all_paths(rank):
    with init() as rw:

        def call(batch, outs, path):
            received = rw.dispatch(*[values[rank] for values in batch.arguments], path=path)
            y = rw.combine(outs[rank], received.handle)
            return received.x, received.topk_idx, received.topk_weights, y

        return every_path(rw, call)


def test_every_path_gives_the_bits_of_local_world_twice():
    by_rank = run_all(all_paths, 4)
    world = make_world(2, 2, 2, num_experts=8)

    def call(batch, outs, path):
        received = world.dispatch(*batch.arguments, path=path)
        ys = world.combine(outs, [r.handle for r in received])
        return [(r.x, r.topk_idx, r.topk_weights, y) for r, y in zip(received, ys, strict=True)]

    expected = every_path(world, call)
    for i, by_path in enumerate(expected):
        for rank, want in enumerate(by_path):
            for other in (by_rank[rank][i], expected[0][rank]):
                assert all(bytes_equal(*pair) for pair in zip(want, other, strict=True))


def kinds(rank):
    with init() as rw:
        phases(rw, [0, 0, 0, 0])  # A1: nobody has a token
        phases(rw, [1, 0, 0, 0], "native")
        phases(rw, 4, "rail", dtype=torch.uint8, hidden=13)
        phases(rw, [2, 4, 0, 1], "permutation", dtype=torch.float32, hidden=1, top_k=1)
        phases(rw, 3, "joint", ids=torch.int32, dtype=torch.float16, hidden=7)
        # D2: one expert gets everything.
        phases(rw, 4, "joint", topk=torch.zeros(4, 1))


def test_token_counts_dtypes_hidden_sizes_and_paths_may_change_with_every_call():
    run_all(kinds, 4)


def handles(rank):
    with init() as rw:
        first, second = make_batch(rw, 4), make_batch(rw, [3, 0, 4, 1])
        outs_1, outs_2 = make_outs(first), make_outs(second)
        handle_1, handle_2 = dispatch(rw, first, "native"), dispatch(rw, second, "joint")
        combine(rw, second, handle_2, outs_2)
        combine(rw, first, handle_1, outs_1)
        combine(rw, second, handle_2, outs_2)


def across(rank):
    """The rank that dispatched is not the rank that combines first: handles of all are alike."""
    with init() as rw:
        batch = make_batch(rw, 4)
        outs, mine = make_outs(batch), [values[rank] for values in batch.arguments]
        handle = dispatch(rw, batch, "joint")
        # One rank combines while the others dispatch.
        call = (
            (lambda: rw.combine(outs[rank], handle)) if rank == 2 else (lambda: rw.dispatch(*mine))
        )
        said = errors_of(call)
        combine(rw, batch, handle, outs)
        return said


def test_a_combine_that_meets_a_dispatch_is_an_error_on_every_rank():
    for kind, text in run_all(across, 4)[0]:
        assert kind == "PeerError" and "must agree on all ranks" in text
        assert re.search(r"dispatch on .* by ranks \[0, 1, 3\]; combine of .* by ranks \[2\]", text)


def test_two_handles_may_be_open_and_used_in_any_order():
    run_all(handles, 4)


def subgroups(rank):
    pairs = [dist.new_group([0, 1]), dist.new_group([3, 2])]
    topo = railwave.Topology(2, 1, 1)
    mine = rank // 2
    with init() as whole, init(topo, group=pairs[mine], hidden=8 + mine) as part:
        assert part.rank == dist.get_rank(pairs[mine])
        phases(part, 2)
        torch.manual_seed(1)  # the two groups have drawn differently
        phases(whole, 4)
        if mine:
            phases(part, [0, 3], "native")
        torch.manual_seed(2)
        phases(whole, [1, 0, 2, 4], "rail")
        return whole.rank


def test_communicators_of_several_groups_exist_side_by_side():
    assert run_all(subgroups, 4) == [0, 1, 2, 3]


def verbs(rank):
    arguments = torch.ones(1, 8).bfloat16(), torch.tensor([[rank]]), torch.ones(1, 1)
    with pytest.raises(RuntimeError, match=r"railwave.init\(\.\.\.\) first, on all ranks"):
        railwave.dispatch(*arguments)
    rw = railwave.init(TOPO, **DECLARED)
    received = railwave.dispatch(*arguments, path="native")
    y = railwave.combine(received.x, received.handle)
    assert torch.equal(y, arguments[0])
    railwave.finalize()
    railwave.finalize()
    for call in (lambda: railwave.dispatch(*arguments), railwave.init):
        with pytest.raises((RuntimeError, TypeError)):
            call()
    rw.close()
    for call in (
        lambda: rw.dispatch(*arguments),
        lambda: rw.combine(received.x, received.handle),
        rw.reset,
    ):
        with pytest.raises(RuntimeError, match="this communicator is closed"):
            call()
    with init() as again:
        assert torch.equal(again.dispatch(*arguments).x, received.x)
    with pytest.raises(RuntimeError, match="closed"):
        again.reset()


def test_the_module_verbs_work_between_init_and_finalize_and_a_closed_object_refuses():
    run_all(verbs, 4)


def default_device(rank):
    """A caller's default device concerns none of ours."""
    with torch.device("meta"), init() as rw, torch.device("cpu"):
        batch = make_batch(rw, 2)
        mine = [values[rank] for values in batch.arguments]
        with torch.device("meta"):
            handle = rw.dispatch(*mine).handle
            rw.reset()
        combine(rw, batch, handle, make_outs(batch))


def test_the_default_device_is_not_used():
    run_all(default_device, 4)


def collected(rank):
    """I1: one rank drops its object; no collective call hides in that."""
    rw = init()
    with init() as other:
        if rank == 0:
            del rw
            gc.collect()
        phases(other, 2)


def test_case_i1_garbage_collection_on_one_rank_holds_nobody_up():
    run_all(collected, 4)


def explicit(rank):
    """I2: after init, ranks may use their group in any order; no call of ours does."""
    with init() as rw:
        batch = make_batch(rw, 4)
        for name in ("all_gather_object", "barrier", "all_gather", "broadcast", "new_group"):
            setattr(dist, name, None)
        outs = make_outs(batch)
        combine(rw, batch, dispatch(rw, batch, "joint"), outs)
        with pytest.raises(railwave.PeerError):
            rw.dispatch(*[values[rank] for values in batch.arguments], path=PATHS[rank // 2])
        rw.reset()
        combine(rw, batch, dispatch(rw, batch, "native"), outs)


def test_case_i2_only_init_is_a_collective_of_the_group():
    run_all(explicit, 4)


def interrupted(rank):
    """A traceback may hold a view of shared memory while `with` closes it."""
    kept = []
    with pytest.raises(KeyboardInterrupt), init() as rw:
        view = rw._heap.region(rank, "notify", torch.int64)
        kept.append(view)
        raise KeyboardInterrupt


def test_closing_never_hides_the_error_that_led_to_it():
    run_all(interrupted, 4)


def bad_inits(rank):
    """Break a rule on one rank alone."""
    said = [errors_of(lambda: init(hidden=0 if rank == 1 else 8))]
    said.append(errors_of(lambda: init(deadline_s="x" if rank == 0 else 5)))
    said.append(errors_of(lambda: init((2, 2, 2) if rank == 3 else TOPO)))
    said.append(errors_of(lambda: init(railwave.Topology(2, 1, 1) if rank == 2 else TOPO)))
    with init() as rw:
        phases(rw, 1)
    return said


def test_a_bad_argument_of_one_rank_at_init_is_an_error_on_every_rank():
    said = run_all(bad_inits, 4)[0]
    whose = (1, "ValueError", "hidden"), (0, "TypeError", "deadline_s"), (3, "TypeError", "topo")
    for errors, (bad, kind, name) in zip(said, (*whose, (2, "ValueError", "group")), strict=True):
        for rank, (got, text) in enumerate(errors):
            assert got == (kind if rank == bad else "PeerError")
            assert f"{name} must" in text
            assert rank == bad or text.startswith(f"rank(s) called init wrongly: {{{bad}: ")


def wrong_inits(rank):
    said = [errors_of(lambda: init(hidden=8 + 8 * (rank == 2)))]
    said.append(errors_of(lambda: init(deadline_s=5 + rank)))
    said.append(errors_of(lambda: init(dtype=torch.float32 if rank else torch.bfloat16)))
    said.append(errors_of(lambda: init(railwave.Topology(4, 1, 1) if rank == 3 else TOPO)))
    said.append(errors_of(lambda: init(expert_to_rank=[0] * 8 if rank == 1 else None)))
    said.append(errors_of(lambda: init(railwave.Topology(2, 1, 1))))
    with init() as rw:  # nothing is in the way of a right one
        phases(rw, 1)
    return said


def test_a_configuration_that_differs_is_an_error_on_every_rank_that_shows_both():
    said = run_all(wrong_inits, 4)[0]
    shown = {0: ("hidden", "8", "16"), 1: ("deadline_s", "5.0", r"\d\.0"), 4: ("expert_to_rank",)}
    shown |= {2: ("dtype", "torch.bfloat16", "torch.float32"), 3: ("topo", "nodes=2", "nodes=4")}
    for i, words in shown.items():
        for rank, (kind, text) in enumerate(said[i]):
            assert kind == "ValueError" and text.startswith(f"{words[0]} must be the same"), text
            assert f"at rank {rank}" in text
            assert all(re.search(word, text) for word in words), text
    for kind, text in said[5]:
        assert kind == "ValueError"
        assert text.startswith("group must have topo.num_ranks = 2 ranks (2 nodes x 1 GPUs), got 4")


def test_torch_distributed_must_be_initialised():
    with pytest.raises(RuntimeError, match=r'initialised first.*init_process_group\("gloo"\)'):
        init()


def test_topo_must_be_a_topology():
    with pytest.raises(TypeError, match=r"topo must be a railwave\.Topology, got tuple"):
        init((2, 2, 2))


def wrong_calls(rank):
    """Make one mistake after the other, on rank 1 alone; return every rank's errors."""
    said = {}
    with init() as rw:
        bits = dict(x=torch.ones(2, 4), topk_idx=torch.zeros(2, 3).long(), weights=torch.ones(2, 3))

        def wrong(name, *, path="joint", **changes):
            right = dict(path="joint", **bits)
            call = {**right, "path": path, **changes} if rank == 1 else right
            said[name] = errors_of(
                lambda: rw.dispatch(call["x"], call["topk_idx"], call["weights"], path=call["path"])
            )

        wrong("id", topk_idx=torch.tensor([[0, 1, 2], [3, 8, 0]]))
        many = {"x": torch.ones(5, 4), "topk_idx": torch.zeros(5, 3).long()}
        wrong("tokens", **many, weights=torch.ones(5, 3))  # D3
        wrong("path", path="fast")
        wrong("path array", path=torch.tensor([1, 2]))
        wrong("fp4", x=torch.empty(2, 8, dtype=torch.float4_e2m1fn_x2))
        wrong("surrogate", path=Surrogate())
        wrong("type", x=[1.0])
        wrong("dtype", x=torch.ones(2, 8).double())
        wrong("other dtype", x=torch.ones(2, 4).half())
        wrong("other path", path="native")
        said["bad path"] = errors_of(lambda: rw.dispatch(*bits.values(), path="fast"))

        batch = make_batch(rw, 4)
        outs, handle = make_outs(batch), dispatch(rw, batch, "joint")
        mine = outs[rank]
        said["rows"] = errors_of(
            lambda: rw.combine(torch.cat([mine, mine]) if rank == 1 else mine, handle)
        )
        said["sum dtype"] = errors_of(
            lambda: rw.combine(mine.to(torch.int32) if rank == 1 else mine, handle)
        )
        said["hidden"] = errors_of(lambda: rw.combine(mine[:, :3] if rank == 1 else mine, handle))
        second = dispatch(rw, batch, "joint")
        said["handle"] = errors_of(lambda: rw.combine(mine, second if rank == 1 else handle))
        said["no handle"] = errors_of(lambda: rw.combine(mine, None if rank == 1 else handle))
        with init() as other:
            foreign = dispatch(other, batch, "native")
            said["foreign handle"] = errors_of(
                lambda: rw.combine(mine, foreign if rank == 1 else handle)
            )
        combine(rw, batch, handle, outs)
        phases(rw, 4, "native")
    return said


class Surrogate:
    def __repr__(self):
        return "\udc80"


# What rank 1, which is wrong, raises; and what it says, which the others repeat.
WRONG = {
    "id": ("ValueError", r"expert ids in \[0, 8\) or -1 for none, got \[3, 8, 0\] in row 1"),
    "tokens": ("ValueError", r"at most max_tokens_per_rank = 4 tokens, got 5; raise max_tokens_pe"),
    "path": (
        "ValueError",
        "path must be one of native, rail, permutation, joint, granted, got 'fast'",
    ),
    "path array": ("ValueError", r"path must be one of native, .*, got tensor\(\[1, 2\]\)"),
    "fp4": ("TypeError", r"x must have elements of whole bytes, got torch.float4_e2m1fn_x2"),
    "surrogate": ("ValueError", "path must be one of"),
    "type": ("TypeError", "x must be a tensor, got list"),
    "dtype": ("ValueError", "to the declared 16 bytes a row"),
    "rows": ("ValueError", "out must have a row for each of the"),
    "no handle": ("TypeError", "handle must be a Handle, as in received.handle, got NoneType"),
    "foreign handle": ("ValueError", "handle must come from a dispatch of this object"),
    "sum dtype": ("TypeError", "out must be float32, bfloat16 or float16, got torch.int32"),
}
# What no rank alone is wrong about: all say what every rank called.
DIFFER = {
    "other dtype": ("torch.float16", "torch.float32"),
    "other path": (r"path native, .* by ranks \[1\]", r"path joint, .* by ranks \[0, 2, 3\]"),
    "hidden": ("hidden 3", "hidden 8"),
    "handle": (r"combine of call \d+, hidden 8",),
}


def test_case_d3_a_wrong_call_of_one_rank_is_an_error_on_all_and_the_next_call_works():
    said = run_all(wrong_calls, 4)[0]
    for name, (kind, text) in WRONG.items():
        for rank, (got_kind, got) in enumerate(said[name]):
            assert re.search(text, got), (name, rank, got)
            assert got_kind == (kind if rank == 1 else "PeerError"), (name, rank, got)
            assert rank == 1 or ("nothing moved" in got and "{1: " in got), (name, rank, got)
    for name, texts in DIFFER.items():
        for kind, got in said[name]:
            assert kind == "PeerError" and "must agree on all ranks" in got, (name, got)
            assert all(re.search(text, got) for text in texts), (name, got)
    assert {kind for kind, _ in said["bad path"]} == {"ValueError"}


def resources():
    """Return (open files, resident kB) of this process."""
    with open("/proc/self/status", encoding="ascii") as file:
        resident = re.search(r"VmRSS:\s+(\d+)", file.read())
    return len(os.listdir("/proc/self/fd")), int(resident[1])


def cycles(rank, folder, number):
    shm.FOLDER = folder
    init().close()
    gc.collect()
    before = resources()
    for _ in range(number):
        init().close()
    with open("/proc/self/maps", encoding="ascii") as maps:
        assert "railwave-" not in maps.read()  # nor any mapping of a heap that is closed
    with init():
        dist.barrier()
        assert os.listdir(folder) == []  # a kill from here on leaves nothing either
    return before, resources()


@pytest.mark.parametrize("number", [20, pytest.param(50, marks=pytest.mark.soak)])
def test_cycles_of_init_and_close_leave_nothing(number, shm_folder):
    for before, after in run_all(cycles, 4, shm_folder, number):
        assert after[0] <= before[0]
        assert after[1] < before[1] + 4096
    assert os.listdir(shm_folder) == []


def many_phases(rank, number):
    sizes = []
    with init() as rw:
        batch = make_batch(rw, 4)
        mine = [values[rank] for values in batch.arguments]
        for _ in range(number // 2):
            received = rw.dispatch(*mine)
            rw.combine(received.x, received.handle)
            sizes.append(resources())
    return sizes


@pytest.mark.parametrize("number", [24, pytest.param(1000, marks=pytest.mark.soak)])
def test_memory_and_open_files_stay_flat_over_phases(number):
    for sizes in run_all(many_phases, 4, number, timeout_s=1200):
        assert sizes[-1][0] == sizes[2][0]
        assert sizes[-1][1] < sizes[4][1] + 1024


def job(rank, seed):
    torch.manual_seed(seed)
    with init() as rw:
        for path in ("native", "joint"):
            phases(rw, 4, path)


def test_two_jobs_at_once_do_not_meet():
    start_server()  # not by two threads at once
    with ThreadPoolExecutor() as threads:
        jobs = [threads.submit(run_all, job, 4, seed) for seed in (1, 2)]
    for each in jobs:
        each.result()
