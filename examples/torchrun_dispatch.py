"""Dispatch and combine with one process per rank: on a host without a GPU, or on GPUs.

    torchrun --nproc-per-node=8 examples/torchrun_dispatch.py

On one host, eight ranks stand for 2 nodes of 4 GPUs; on several, each host is a node. Every rank
sends its tokens to experts, the experts scale them by their rank, and each token comes back as the
sum of its rows. docs/launch/ has files that start it on several hosts.
"""

import os

import torch
import torch.distributed as dist

import railwave

NODES, TOKENS, HIDDEN, EXPERTS, TOP_K = 2, 16, 64, 16, 2


def main() -> None:
    torch.set_num_threads(1)  # one process a core is enough
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    local = int(os.environ.get("LOCAL_RANK", rank))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", local % torch.cuda.device_count())
        torch.cuda.set_device(device)
    topo = topology(ranks)

    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(TOKENS, HIDDEN, generator=generator).to(device)
    topk_idx = torch.rand(TOKENS, EXPERTS, generator=generator).topk(TOP_K).indices.to(device)
    topk_weights = torch.full((TOKENS, TOP_K), 1 / TOP_K, device=device)

    with railwave.init(
        topo,
        num_experts=EXPERTS,
        top_k=TOP_K,
        hidden=HIDDEN,
        max_tokens_per_rank=TOKENS,
        dtype=torch.float32,
        deadline_s=60,
    ):
        received = railwave.dispatch(x, topk_idx, topk_weights, path="joint")
        y = railwave.combine(received.x * (rank + 1), received.handle)

        # A token has a row on every rank that holds one of its experts.
        holds = torch.zeros(TOKENS, ranks, device=device)
        holds.scatter_(1, topk_idx * ranks // EXPERTS, 1.0)
        numbers = torch.arange(1, ranks + 1, device=device)
        scale = (holds * numbers).sum(dim=1, keepdim=True)
        error = (y - x * scale).abs().max().item()
        said = [(0, 0.0)] * ranks
        dist.all_gather_object(said, (len(received.x), error))
    if rank == 0:
        rows, errors = zip(*said, strict=True)
        print(
            f"{ranks} ranks as {topo.nodes} nodes; rows received: {list(rows)}; largest error "
            f"{max(errors):.1e}"
        )
    dist.destroy_process_group()


def topology(ranks: int) -> railwave.Topology:
    """Take each host as a node, or divide one host into NODES."""
    if int(os.environ.get("LOCAL_WORLD_SIZE", ranks)) < ranks:
        return railwave.Topology.discover()
    if ranks % NODES:
        raise SystemExit(f"this example needs a multiple of {NODES} processes, got {ranks}")
    return railwave.Topology(NODES, ranks // NODES, ranks // NODES)


if __name__ == "__main__":
    main()
