"""A peer to measure dispatch against: PyTorch's all_to_all_vdev_2d, which moves a row an expert.

Its users sort the rows by expert first: those permutes are part of it. It brings nothing back.

Letters: T tokens, H hidden, K top-k, E experts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

MAX_EXPERTS = 16  # of a rank
MAX_PES = 8  # beyond, its buffers and railwave's do not fit one GPU together
ALIGN = 8  # rows of an expert start at a multiple
# What it needs to run where PEs share a GPU; the first three are railwave's, too.
ENVIRONMENT = {
    "NVSHMEM_REMOTE_TRANSPORT": "none",
    "NVSHMEM_DISABLE_NVLS": "1",
    "NVSHMEM_IGNORE_CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "1",
    "NVSHMEM_DISABLE_NCCL": "1",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
}


def why_not(num_experts: int, num_pes: int) -> str:
    """Say why the peer is not measured; "" if it is.

    Example:
        >>> why_not(256, 8)
        '32 experts a rank, all_to_all_vdev_2d takes at most 16'
    """
    if num_experts // num_pes > MAX_EXPERTS:
        experts = num_experts // num_pes
        return f"{experts} experts a rank, all_to_all_vdev_2d takes at most {MAX_EXPERTS}"
    if num_pes > MAX_PES:
        return f"{num_pes} PEs, its buffers fit one GPU beside railwave's for at most {MAX_PES}"
    if not hasattr(torch.ops.symm_mem, "all_to_all_vdev_2d"):
        return f"torch {torch.__version__} has no all_to_all_vdev_2d"
    return ""


class Buffers:
    """Symmetric tensors of the peer, for all sizes: giving them back is collective, too.

    Args:
        rows: the most (token, expert) pairs that a rank sends; it receives twice as many at most.
        hidden: the largest H.
        experts: every E that there will be.
        device: with an index: with a bare "cuda", torch takes PEs to be on several devices.
    """

    def __init__(self, rows: int, hidden: int, experts: list[int], device: torch.device) -> None:
        import torch.distributed._symmetric_memory as symm_mem

        symm_mem.set_backend("NVSHMEM")
        self.rows = rows
        self.group = dist.group.WORLD.group_name

        def empty(*size: int, dtype: torch.dtype) -> torch.Tensor:
            made = symm_mem.empty(*size, dtype=dtype, device=device)
            symm_mem.rendezvous(made, group=self.group)
            return made

        self.inp = empty(rows * hidden, dtype=torch.bfloat16)
        self.out = empty(2 * rows * hidden, dtype=torch.bfloat16)
        #: by E: rows to each expert; rows from each rank to each own expert, and where they start
        self.splits = {
            n: (empty(n, dtype=torch.int64), empty(2, n, dtype=torch.int64)) for n in experts
        }


def make_dispatch(
    buffers: Buffers, x: torch.Tensor, topk_idx: torch.Tensor, num_experts: int
) -> Callable[[], None]:
    """Return the peer's dispatch of these tokens; check what one receives. Collective."""
    num_rows, hidden, top_k = topk_idx.numel(), x.shape[1], topk_idx.shape[1]
    inp = buffers.inp[: buffers.rows * hidden].view(-1, hidden)
    out = buffers.out[: 2 * buffers.rows * hidden].view(-1, hidden)
    splits, out_splits = buffers.splits[num_experts]
    ones = torch.ones(num_rows, dtype=torch.int64, device=x.device)
    flat = topk_idx.flatten()

    def permute() -> None:
        token = flat.argsort(stable=True) // top_k
        torch.index_select(x, 0, token, out=inp[:num_rows])
        splits.zero_().scatter_add_(0, flat, ones)

    def run() -> None:
        permute()
        torch.ops.symm_mem.all_to_all_vdev_2d(
            inp, out, splits, out_splits, buffers.group, major_align=ALIGN
        )

    permute()  # its kernels are loaded before another rank waits for this one, see bench/mps.py
    sent = [None] * dist.get_world_size()
    dist.all_gather_object(sent, splits.tolist())
    run()
    torch.cuda.synchronize()
    dist.barrier()
    each = num_experts // len(sent)
    start = dist.get_rank() * each
    due = sum(sum(of_rank[start : start + each]) for of_rank in sent)
    got = int(out_splits[0].sum())
    if got != due:
        raise RuntimeError(f"the peer got {got} rows, {due} were sent")
    return run
