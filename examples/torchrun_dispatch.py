"""Dispatch and combine with one process per rank, on one host without a GPU.

    torchrun --nproc-per-node=8 examples/torchrun_dispatch.py

Eight ranks stand for 2 nodes of 4 GPUs. Each sends its tokens to experts, the experts scale them by
their rank, and each token comes back as the sum of its rows.
"""

import torch
import torch.distributed as dist

import railwave

NODES, TOKENS, HIDDEN, EXPERTS, TOP_K = 2, 16, 64, 16, 2


def main() -> None:
    torch.set_num_threads(1)  # one process a core is enough
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if ranks % NODES:
        raise SystemExit(f"this example needs a multiple of {NODES} processes, got {ranks}")
    topo = railwave.Topology(NODES, ranks // NODES, ranks // NODES)

    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(TOKENS, HIDDEN, generator=generator)
    topk_idx = torch.rand(TOKENS, EXPERTS, generator=generator).topk(TOP_K).indices
    topk_weights = torch.full((TOKENS, TOP_K), 1 / TOP_K)

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
        holds = torch.zeros(TOKENS, ranks).scatter_(1, topk_idx * ranks // EXPERTS, 1.0)
        scale = (holds * torch.arange(1, ranks + 1)).sum(dim=1, keepdim=True)
        error = (y - x * scale).abs().max().item()
        said = [(0, 0.0)] * ranks
        dist.all_gather_object(said, (len(received.x), error))
    if rank == 0:
        rows, errors = zip(*said, strict=True)
        print(
            f"{ranks} ranks as {NODES} nodes; rows received: {list(rows)}; largest error "
            f"{max(errors):.1e}"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
