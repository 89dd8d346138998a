"""Serve an MoE layer with static shapes: one CUDA graph where there is a GPU, else plain calls.

    torchrun --nproc-per-node=4 examples/serve_static.py

Four ranks stand for 2 nodes of 2 GPUs; on one GPU run it under MPS, `python -m bench.mps torchrun
...`. Every step has other tokens and another routing, in the same tensors. Experts scale a row by
their number, so that each token's sum is known.
"""

import os

import torch
import torch.distributed as dist

import railwave

NODES, TOKENS, HIDDEN, EXPERTS, TOP_K, STEPS = 2, 16, 64, 8, 2, 5
TOLERANCE = 1e-5  # sums of float32, of the size of 10, in another order


def make_layer(x, topk_idx, topk_weights, first_expert):
    """Return a layer that waits for nothing: dispatch, experts, combine."""

    def layer():
        received = railwave.dispatch(x, topk_idx, topk_weights, static_shapes=True, out="view")
        # Rows that did not come have ids -1 and weights 0; x of them holds anything.
        number = received.topk_idx + first_expert + 1
        scale = (number * received.topk_weights).sum(dim=1, keepdim=True)
        there = torch.arange(len(received.x), device=x.device) < received.num_rows
        rows = torch.where(there[:, None], received.x, 0)
        return railwave.combine(rows * scale, received.handle)

    return layer


def main():
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if ranks % NODES or EXPERTS % ranks:
        raise SystemExit(f"this example needs 2, 4 or 8 processes, got {ranks}")
    topo = railwave.Topology(NODES, ranks // NODES, ranks // NODES)
    sizes = {"num_experts": EXPERTS, "top_k": TOP_K, "hidden": HIDDEN, "dtype": torch.float32}
    with railwave.init(topo, max_tokens_per_rank=TOKENS, deadline_s=60, **sizes) as rw:
        where = {"device": rw.config.device}
        x = torch.zeros(TOKENS, HIDDEN, **where)
        topk_idx = torch.zeros(TOKENS, TOP_K, dtype=torch.int64, **where)
        topk_weights = torch.full((TOKENS, TOP_K), 1 / TOP_K, **where)
        layer = make_layer(x, topk_idx, topk_weights, first_expert=rank * EXPERTS // ranks)
        y = layer()  # a call of each kind, before it is captured
        if on_gpu:
            torch.cuda.synchronize()
            dist.barrier()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                y = layer()

        generator, error = torch.Generator().manual_seed(rank), 0.0
        for _ in range(STEPS):
            x.copy_(torch.randn(x.shape, generator=generator))
            scores = torch.rand(TOKENS, EXPERTS, generator=generator)
            topk_idx.copy_(scores.topk(TOP_K).indices)
            if on_gpu:
                graph.replay()
            else:
                y = layer()
            want = x * ((topk_idx + 1) * topk_weights).sum(dim=1, keepdim=True)
            error = max(error, (y - want).abs().max().item())
        railwave.check()
        errors = [0.0] * ranks
        dist.all_gather_object(errors, error)
    if rank == 0:
        how = "replays of one graph" if on_gpu else "calls"
        print(f"{ranks} ranks, {STEPS} {how}; largest error {max(errors):.1e}")
    dist.destroy_process_group()
    if not max(errors) <= TOLERANCE:
        raise SystemExit(f"tokens differ from their sums by more than {TOLERANCE:.0e}")


if __name__ == "__main__":
    main()
