"""Memory: ours against what a communicator holds, the paper's formulas against its Table 7."""

import doctest

import pytest
import torch
import torch.distributed as dist

import railwave
from processes import run_all
from railwave import _signature, memory
from railwave.memory import tables_bytes

GIB = 2**30
EXPERT = 3 * 7168 * 2048  # DeepSeek-V3's routed expert


def held(rank, sizes):
    """Return the bytes that a rank's communicator holds, and those that are stated."""
    topo = railwave.Topology(2, 2, 2)
    empty, sums = torch.empty, [0]

    def noted(*size, **options):
        made = empty(*size, **options)
        if made.dtype == torch.float32 and made.dim() == 2 and made.shape[1] == columns:
            sums.append(made.nbytes)
        return made

    with railwave.Communicator(topo, **sizes) as rw:
        heap = rw._heap.memory(rank).nbytes
        tables = tables_bytes(rw._exchange)
        columns = rw.config.payload_bytes // 2  # the widest results: of 16 bits
        x = torch.zeros(sizes["max_tokens_per_rank"], sizes["hidden"], dtype=sizes["dtype"])
        ids = torch.zeros(len(x), 1, dtype=torch.int64)
        received = rw.dispatch(x, ids, torch.ones(len(x), 1))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "empty", noted)
            rw.combine(torch.zeros(len(received.x), columns).bfloat16(), received.handle)
        with pytest.raises(ValueError, match="out must have from 1 element to"):
            more = torch.zeros(len(received.x), columns + 1).bfloat16()
            rw.combine(more, received.handle)
        dist.barrier()
        return heap + tables + max(sums), railwave.workspace_bytes(topo, **sizes)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"paths": ("joint",), "staging_records": 2, "dtype": torch.float32},
        {"nic_gbs": 3.0, "dtype": torch.bfloat16},
    ],
)
def test_the_workspace_is_what_a_communicator_holds(more):
    sizes = dict(num_experts=9, top_k=3, hidden=13, max_tokens_per_rank=5, dtype=torch.uint8)
    for got, stated in run_all(held, 4, {**sizes, **more}):
        assert got == stated


@pytest.mark.parametrize(
    "replicas, inference, one_layer, all_layers",
    [(1, 4.758, 4.922, 14.273), (2, 9.516, 9.844, 28.547), (4, 19.031, 19.688, 57.094)],
)
def test_the_paper_table_7(replicas, inference, one_layer, all_layers):
    def eplb(**training):
        return round(railwave.eplb_bytes(58, replicas, EXPERT, **training) / GIB, 3)

    assert eplb() == inference
    assert eplb(gradient_bytes=4, gradient_layers=1) == one_layer
    assert eplb(gradient_bytes=4) == all_layers
    assert round(railwave.paper_workspace_bytes(4, 8, 50176, 2 * 7168 + 32) / GIB, 3) == 4.111


@pytest.mark.parametrize("name", ["nodes", "gpus_per_node", "max_tokens_per_rank", "record_bytes"])
def test_sizes_are_positive(name):
    sizes = dict(nodes=4, gpus_per_node=8, max_tokens_per_rank=1, record_bytes=1)
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        railwave.paper_workspace_bytes(**{**sizes, name: 0})


@pytest.mark.parametrize("module", [memory, _signature])
def test_examples(module):
    result = doctest.testmod(module)
    assert result.attempted and not result.failed


@pytest.mark.parametrize("value, error", [(-4, ValueError), (1.5, TypeError), (True, TypeError)])
def test_gradient_bytes_are_none_or_positive(value, error):
    with pytest.raises(error, match="gradient_bytes must be"):
        railwave.eplb_bytes(58, 1, 100, gradient_bytes=value)
