"""What communication costs in memory: ours, exactly, and the paper's two formulas.

Letters: N nodes, G GPUs a node, T tokens a rank, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from railwave._check import check_int, check_positive_int
from railwave._signature import with_arguments_of
from railwave.config import COMPILED, PATHS, Config
from railwave.exchange import Exchange
from railwave.topology import Topology

RESERVED_CHANNELS = 1024  # the paper's C_max


def workspace(
    topo: Topology,
    *,
    num_experts: int,
    top_k: int,
    hidden: int,
    max_tokens_per_rank: int,
    dtype: torch.dtype = torch.bfloat16,
    expert_to_rank: Any = None,
    staging_records: int | None = None,
    paths: Sequence[str] = PATHS,
    max_recv_rows: int | None = None,
    num_sms: int | None = None,
    pipeline: bool = True,
    nic_gbs: float | None = None,
) -> dict[str, int]:
    """Return the bytes that a GPU holds for a `Communicator` of these arguments, by what for.

    What calls return, and a handle, are the caller's.

    Returns:
        send, recv: staging on both ends of the rails; rows: where rows arrive, and where combine
        reads them; sums: combine's, fp32, at most: of 16-bit results as wide as was declared;
        words: signals, messages and guards; tables.

    Raises:
        TypeError, ValueError: see `Communicator`.

    Example:
        Staging does not grow with the number of nodes on wave paths; rows do, unless bounded.

        >>> sizes = dict(num_experts=256, top_k=8, hidden=7168, max_tokens_per_rank=50176)
        >>> sizes |= dict(paths=("joint",), max_recv_rows=200_000)
        >>> for nodes in (4, 16):
        ...     held = workspace(Topology(nodes, 8, 8), **sizes)
        ...     print({name: round(held[name] / 2**30, 2) for name in ("send", "recv", "rows")})
        {'send': 0.22, 'recv': 0.22, 'rows': 2.68}
        {'send': 0.22, 'recv': 0.22, 'rows': 2.68}
    """
    config = Config(
        topo=topo,
        num_experts=num_experts,
        top_k=top_k,
        hidden=hidden,
        max_tokens_per_rank=max_tokens_per_rank,
        dtype=dtype,
        expert_to_rank=expert_to_rank,
        staging_records=staging_records,
        paths=paths,
        max_recv_rows=max_recv_rows,
        num_sms=num_sms,
        pipeline=pipeline,
        nic_gbs=nic_gbs,
        tiles=COMPILED,
    )
    heap: Any = SimpleNamespace(layout=config.layout)
    pe = Exchange(config, heap, 0, device=torch.device("meta"), deadline_s=1)
    large = {name: config.layout.regions[name].size for name in ("send", "recv", "rows")}
    return {
        **large,
        "sums": config.max_tokens_per_rank * (config.payload_bytes // 2) * 4,
        "words": config.layout.size - sum(large.values()),
        "tables": tables_bytes(pe),
    }


@with_arguments_of(workspace)
def workspace_bytes(*args: Any, **sizes: Any) -> int:
    """Return the bytes that a GPU holds in all: the sum of `workspace`, whose arguments these are.

    Example:
        Wave paths need two buffers; the others one for all peers at once.

        >>> topo = Topology(4, 8, 8)
        >>> sizes = dict(num_experts=128, top_k=8, hidden=7168, max_tokens_per_rank=4096)
        >>> waves = workspace_bytes(topo, **sizes, paths=("permutation", "joint"))
        >>> round(waves / 2**30, 2), round(workspace_bytes(topo, **sizes) / 2**30, 2)
        (2.09, 2.2)
    """
    return sum(workspace(*args, **sizes).values())


def tables_bytes(exchange: Exchange) -> int:
    """Return the bytes of the tensors that a PE keeps beside its heap."""
    own = [value for value in vars(exchange).values() if isinstance(value, torch.Tensor)]
    return sum(tensor.nbytes for tensor in own)


def paper_workspace_bytes(
    nodes: int,
    gpus_per_node: int,
    max_tokens_per_rank: int,
    record_bytes: int,
    *,
    channels: int = RESERVED_CHANNELS,
) -> int:
    """Return the paper's estimate of what RailBalance adds to DeepEP, in bytes a GPU.

    Args:
        nodes, gpus_per_node: D and G.
        max_tokens_per_rank: T.
        record_bytes: of a record, in dispatch and in return alike: 2 * H + 32 in the paper.
        channels: C_max.

    Source: eq. (13).

    Example:
        >>> round(paper_workspace_bytes(4, 8, 50176, 2 * 7168 + 32) / 2**30, 3)
        4.111
    """
    D = check_positive_int(nodes, "nodes")
    G = check_positive_int(gpus_per_node, "gpus_per_node")
    T = check_positive_int(max_tokens_per_rank, "max_tokens_per_rank")
    size = check_positive_int(record_bytes, "record_bytes")
    C = check_positive_int(channels, "channels")
    return (D - 1) * (T + C) * 2 * size + 4 * (32 * C + 2 * C * D * G + D * G)


def eplb_bytes(
    layers: int,
    replicas: int,
    expert_params: int,
    *,
    weight_bytes: int = 2,
    gradient_bytes: int = 0,
    gradient_layers: int | None = None,
) -> int:
    """Return what redundant experts cost in bytes a GPU: the alternative to moving records.

    Args:
        layers: L, MoE layers.
        replicas: r, experts that each GPU keeps in addition, a layer.
        expert_params: P, parameters of an expert (of its shard on a GPU).
        weight_bytes: w, of a parameter.
        gradient_bytes: of a parameter's gradient; 0 for inference.
        gradient_layers: layers whose replica gradients are in memory at once; None for all.

    Source: eq. (14) and the paragraph after it.

    Example:
        DeepSeek-V3's experts, as in Table 7: inference, gradients of one layer, of all.

        >>> cases = {}, dict(gradient_bytes=4, gradient_layers=1), dict(gradient_bytes=4)
        >>> [round(eplb_bytes(58, 1, 3 * 7168 * 2048, **more) / 2**30, 3) for more in cases]
        [4.758, 4.922, 14.273]
    """
    L = check_positive_int(layers, "layers")
    r = check_positive_int(replicas, "replicas")
    P = check_positive_int(expert_params, "expert_params")
    w = check_positive_int(weight_bytes, "weight_bytes")
    g = check_int(gradient_bytes, "gradient_bytes")
    if g:
        check_positive_int(g, "gradient_bytes")
    live = L if gradient_layers is None else check_positive_int(gradient_layers, "gradient_layers")
    return r * P * (L * w + live * g)
