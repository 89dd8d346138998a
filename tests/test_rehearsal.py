"""A rehearsal runs a phase's kernels and changes nothing that anybody could see."""

import pytest
import torch

from railwave.arguments import check_call
from railwave.config import PATHS
from railwave.rehearsal import Rehearsal
from worlds import check_guards, make_batch, make_world, run


@pytest.fixture
def world():
    return make_world(3, 2, 2, num_experts=8, staging_records=2)


def memories(world):
    """Return a copy of every PE's heap but its own rows, which a combine may fill."""
    copies = []
    for pe in range(world.config.topo.num_ranks):
        copy = world.heap.memory(pe).clone()
        rows = world.heap.layout.regions["rows"]
        copy[rows.offset : rows.offset + rows.size] = 0
        copies.append(copy)
    return copies


@pytest.mark.parametrize(
    "path",
    [
        p if p in ("native", "joint", "granted") else pytest.param(p, marks=pytest.mark.soak)
        for p in PATHS
    ],
)
def test_nothing_is_waited_for_moved_or_told(world, path):
    batch = make_batch(world, 4)
    run(batch, path)
    before, pe = memories(world), world._exchanges[1]
    state, epoch = pe.state.clone(), pe.epoch
    pe.compare_calls = True
    pe.observer = None
    calls = [check_call(world.config, *(v[1] for v in batch.arguments), path)]
    calls.append(check_call(world.config, *(v[1][:0] for v in batch.arguments), path))
    for call in calls:
        rehearsal = Rehearsal(pe)
        handle = rehearsal.dispatch(call)
        assert handle.num_rows == 0
        rehearsal.combine(torch.zeros(0, 8, dtype=torch.bfloat16), handle)
        assert rehearsal.dispatch(call) is None  # once is enough
    assert torch.equal(pe.state, state) and pe.epoch == epoch
    assert all(map(torch.equal, memories(world), before))
    check_guards(world)
    pe.compare_calls = False
    run(make_batch(world, [4, 0, 3, 1, 2, 4]), path)


def test_a_rank_that_cannot_compile_is_an_error_on_all(world):
    rehearsal = Rehearsal(world._exchanges[0])
    rehearsal._declared = lambda paths: None
    answers = iter([["host"] * 6, ["", "", "RuntimeError: no ptxas", "", "", ""]])
    with pytest.raises(RuntimeError, match=r"by rank: \{2: 'RuntimeError: no ptxas'\}"):
        rehearsal.all_declared(lambda _: next(answers))


def test_one_rank_a_path_goes_first(world):
    gone = []
    for rank, first in ((0, "native"), (3, "joint"), (4, "granted"), (5, None)):
        rehearsal = Rehearsal(world._exchanges[rank])
        rehearsal._declared = lambda paths: gone.append(tuple(paths))
        rehearsal.all_declared(lambda said: ["host"] * 6 if said else [""] * 6)
        assert gone[-2:] == [(first,) if first else (), PATHS]
