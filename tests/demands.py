"""Demands and topologies for the tests of schedulers and of the simulator."""

import itertools

import numpy as np
import torch
from hypothesis import strategies as st

from railwave.sched import Demand
from railwave.topology import Topology

# Table 8: the destinations of the source nodes (0, 1, 2, 3), wave by wave.
TABLE_8 = {
    "ring": [(1, 2, 3, 0)],
    "moderate": [(1, 0, 0, 2), (2, 3, 1, 0), (3, 2, 3, 1)],
    "extreme": [(1, 0, 0, 0), (3, 3, 3, 2), (2, 2, 1, 1)],
    "permutation": [(1, 2, 3, 0), (2, 3, 0, 1), (3, 0, 1, 2)],
}


def windows_of(name):
    """Return a schedule of Table 8 as sets of (source, destination)."""
    return [set(enumerate(destinations)) for destinations in TABLE_8[name]]


def equal_pairs(topo, pair_bytes):
    """Return a demand with the same bytes for every pair, evenly over its GPUs."""
    N, G = topo.nodes, topo.gpus_per_node
    per_gpu, rest = divmod(pair_bytes, G)
    assert rest == 0
    away = ~np.eye(N, dtype=bool)
    owned = np.broadcast_to(away[:, None, :], (N, G, N)) * per_gpu
    bound = np.broadcast_to(away[:, :, None], (N, N, G)) * per_gpu
    return Demand(owned, bound, topo)


def random_demand(topo, seed, high, unit=1):
    """Return a demand of random multiples of `unit` below high * unit from GPU to node."""
    rng = np.random.default_rng(seed)
    N, G = topo.nodes, topo.gpus_per_node
    owned = rng.integers(0, high, (N, G, N)) * ~np.eye(N, dtype=bool)[:, None, :]
    total = owned.sum(axis=1)
    bound = np.repeat(total[:, :, None] // G, G, axis=2)
    bound[:, :, 0] += total - bound.sum(axis=2)
    return Demand(owned * unit, bound * unit, topo)


def relabelled(demand, label):
    """Return the demand after node s has become node label[s]."""
    label, topo = np.asarray(label), demand.topo
    owned, bound = np.zeros_like(demand.owned), np.zeros_like(demand.bound)
    owned[np.ix_(label, range(topo.gpus_per_node), label)] = demand.owned
    bound[np.ix_(label, label, range(topo.gpus_per_node))] = demand.bound
    eligible = torch.zeros_like(topo.eligible_rails)
    at = torch.as_tensor(label)
    eligible[at[:, None], at[None, :]] = topo.eligible_rails
    renamed = Topology(
        topo.nodes,
        topo.gpus_per_node,
        topo.rails_per_node,
        rail_of_gpu=topo.rail_of_gpu,
        eligible_rails=eligible,
    )
    return Demand(owned, bound, renamed)


@st.composite
def topologies(draw, even=False, max_nodes=5):
    """Draw a cluster; unless even, GPUs share rails and rails are not eligible for some pairs."""
    nodes, gpus = draw(st.integers(1, max_nodes)), draw(st.integers(1, 4))
    if even:
        return Topology(nodes, gpus, gpus)
    rails = draw(st.integers(1, 4))
    rail_of_gpu = draw(st.lists(st.integers(0, rails - 1), min_size=gpus, max_size=gpus))
    used = sorted(set(rail_of_gpu))
    eligible = torch.zeros(nodes, nodes, rails, dtype=torch.bool)
    for s, d in itertools.combinations(range(nodes), 2):
        for rail in draw(st.sets(st.sampled_from(used), min_size=1)):
            eligible[s, d, rail] = eligible[d, s, rail] = True
    return Topology(nodes, gpus, rails, rail_of_gpu=rail_of_gpu, eligible_rails=eligible)


@st.composite
def demands(draw, even=False, unit=1, max_nodes=5):
    """Draw a demand of multiples of `unit` from rank to rank."""
    topo = draw(topologies(even=even, max_nodes=max_nodes))
    seed, high = draw(st.integers(0, 2**32 - 1)), draw(st.sampled_from([1, 2, 5, 1000]))
    kept = draw(st.sampled_from([0.2, 0.6, 1.0]))
    rng = np.random.default_rng(seed)
    shape = (topo.num_ranks, topo.num_ranks)
    return Demand.of(rng.integers(0, high + 1, shape) * (rng.random(shape) < kept) * unit, topo)
