"""Back-to-back phases with random delays inside them: no wrong byte, no hang.

Case E1: nothing separates one phase from the next, and a slow rank may still copy what a fast one
would overwrite. A delay comes between any two stages, and between a put and what follows it.
"""

import random
import time

import pytest
import torch

import railwave
from processes import run_all
from railwave import communicator
from railwave.config import PATHS
from railwave.exchange import Exchange
from test_processes import combine, dispatch, init
from worlds import make_batch, make_outs


def delayed(rank, delay_s):
    """Sleep at random places of this process's phases."""
    draw = random.Random(rank)

    def nap():
        if draw.random() < 0.3:
            time.sleep(draw.expovariate(1 / delay_s))

    put = Exchange.put

    def slow_put(*args, **kwargs):
        nap()
        put(*args, **kwargs)
        nap()

    Exchange.put = slow_put
    for verb in ("dispatch", "combine"):
        setattr(communicator, verb, slow_stages(getattr(communicator, verb), nap))


def slow_stages(stages, nap):
    def slow(*args, **kwargs):
        going = stages(*args, **kwargs)
        while True:
            nap()
            try:
                waits = next(going)
            except StopIteration as stop:
                return stop.value
            nap()
            yield waits

    return slow


def back_to_back(rank, num_phases, nodes, delay_s):
    """Run phases on data drawn before each; every rank draws all and checks its own part."""
    delayed(rank, delay_s)
    gpus = torch.distributed.get_world_size() // nodes
    draw = random.Random(0)
    topo = railwave.Topology(nodes, gpus, gpus)
    with init(topo, num_experts=2 * topo.num_ranks, staging_records=2, deadline_s=120) as rw:
        handles = []  # up to two open at once
        for _ in range(num_phases):
            if len(handles) == 2 or (handles and draw.random() < 0.4):
                combine(rw, *handles.pop(draw.randrange(len(handles))))
                continue
            tokens = [draw.randint(0, 4) for _ in range(topo.num_ranks)]
            batch = make_batch(rw, tokens, top_k=draw.randint(1, 3))
            outs = make_outs(batch)
            handles.append((batch, dispatch(rw, batch, draw.choice(PATHS)), outs))


def test_case_e1_phases_back_to_back_with_random_delays():
    run_all(back_to_back, 4, 20, 2, 0.01)


@pytest.mark.soak
@pytest.mark.parametrize("num_ranks, nodes", [(4, 2), (4, 4), (8, 2)])
def test_300_phases_back_to_back_with_random_delays(num_ranks, nodes):
    run_all(back_to_back, num_ranks, 300, nodes, 0.02, timeout_s=3600)
