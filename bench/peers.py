"""What dispatch and combine are held against on several GPUs: collectives of torch, plain copies.

`AllToAll` and `Vdev2d` are written as the best that a user of plain torch would do around them.

Letters: W ranks, E experts, T tokens, K top-k, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

MAX_VDEV_EXPERTS = 16  # a rank, of all_to_all_vdev_2d


@dataclass(frozen=True)
class Sent:
    """What a combine must know of a dispatch over `AllToAll`."""

    place: torch.Tensor  # (T, W) int64, row of each token among those sent; num_rows for none
    num_out: list[int]  # rows to each rank
    num_in: list[int]  # rows from each rank


class AllToAll:
    """Move one row per (token, destination rank) with `all_to_all_single`.

    Received rows are ordered by (source rank, token), as railwave's are.
    """

    def __init__(self, group: dist.ProcessGroup, num_experts: int) -> None:
        self.group, self.ranks = group, dist.get_world_size(group)
        self.rank_experts = num_experts // self.ranks

    def dispatch(
        self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor | None
    ) -> tuple[torch.Tensor, Sent]:
        """Send rows, and their expert ids and weights (None: the rows alone)."""
        goes = torch.zeros(self.ranks, len(x), dtype=torch.bool, device=x.device)
        goes.scatter_(0, (topk_idx // self.rank_experts).t(), True)
        counts = torch.empty(2, self.ranks, dtype=torch.int64, device=x.device)
        torch.sum(goes, dim=1, out=counts[0])
        dist.all_to_all_single(counts[1], counts[0], group=self.group)
        end = goes.flatten().cumsum(0).view(goes.shape)
        place = torch.where(goes, end - 1, end[-1, -1]).t()
        num_out, num_in = counts.tolist()  # the only wait for the device
        token = goes.nonzero_static(size=sum(num_out))[:, 1]
        sent = Sent(place.contiguous(), num_out, num_in)
        rows = self._exchange(x.index_select(0, token), sent)
        if topk_weights is not None:
            ids_weights = torch.cat([topk_idx.int(), topk_weights.view(torch.int32)], dim=1)
            self._exchange(ids_weights.index_select(0, token), sent)
        return rows, sent

    def _exchange(self, rows: torch.Tensor, sent: Sent) -> torch.Tensor:
        got = rows.new_empty(sum(sent.num_in), rows.shape[1])
        dist.all_to_all_single(got, rows, sent.num_in, sent.num_out, group=self.group)
        return got

    def combine(self, out: torch.Tensor, sent: Sent) -> torch.Tensor:
        """Return every token's sum, added in fp32 and rounded once."""
        num_rows = sum(sent.num_out)
        rows = out.new_empty(num_rows + 1, out.shape[1])  # the last stands for none: never read
        back = rows[:num_rows]
        dist.all_to_all_single(back, out, sent.num_out, sent.num_in, group=self.group)
        # A gather and a sum in one kernel; index_add_ would need fp32 copies of all rows.
        return torch.nn.functional.embedding_bag(sent.place, rows, mode="sum", padding_idx=num_rows)


class Vdev2d:
    """Move one row per (token, expert) with torch's all_to_all_vdev_2d; it has no combine.

    Experts above 16 a rank, which it does not take, are put together: the rows stay the same.
    """

    def __init__(self, x: torch.Tensor, topk_idx: torch.Tensor, num_experts: int) -> None:
        import torch.distributed._symmetric_memory as symm_mem

        self.group = dist.group.WORLD.group_name
        ranks, rank_experts = dist.get_world_size(), num_experts // dist.get_world_size()
        together = -(-rank_experts // MAX_VDEV_EXPERTS)
        splits = -(-rank_experts // together)  # a rank
        local = topk_idx % rank_experts // together
        self.x, self.top_k = x, topk_idx.shape[1]
        self.split = (topk_idx // rank_experts * splits + local).flatten()
        self.ones = torch.ones_like(self.split)
        counts = torch.bincount(self.split, minlength=ranks * splits)
        by_rank = [torch.empty(0)] * ranks
        dist.all_gather_object(by_rank, counts.cpu())
        self.num_in = torch.stack(by_rank).sum(0).view(ranks, splits).sum(1).tolist()

        def empty(*size: int, dtype: torch.dtype) -> torch.Tensor:
            tensor = symm_mem.empty(*size, dtype=dtype, device=x.device)
            symm_mem.rendezvous(tensor, self.group)
            return tensor

        self.inp = empty(len(self.split), x.shape[1], dtype=x.dtype)
        self.out = empty(max(self.num_in), x.shape[1], dtype=x.dtype)
        self.in_splits = empty(ranks * splits, dtype=torch.int64)
        self.out_splits = empty(2, ranks * splits, dtype=torch.int64)  # and offsets
        self.dispatch()
        got = int(self.out_splits[0].sum())
        assert got == self.num_in[dist.get_rank()], (got, self.num_in)

    @property
    def remote_rows(self) -> int:
        """Return the rows that this rank sends to others."""
        splits = len(self.in_splits) // dist.get_world_size()
        return int((self.split // splits != dist.get_rank()).sum())

    def dispatch(self) -> None:
        """Put the rows in order of their experts, count them, send them."""
        order = self.split.argsort(stable=True)
        torch.index_select(self.x, 0, order // self.top_k, out=self.inp)
        self.in_splits.zero_().scatter_add_(0, self.split, self.ones)
        self.exchange()

    def exchange(self) -> None:
        """Send rows that are in order, and counted."""
        torch.ops.symm_mem.all_to_all_vdev_2d(
            self.inp, self.out, self.in_splits, self.out_splits, self.group, major_align=1
        )


class RingCopy:
    """Copy between GPUs, each to the next and all at once: from one process, with `copy_`."""

    def __init__(self, gpus: int, num_bytes: int) -> None:
        words = (max(1, num_bytes // 4),)
        devices = [torch.device("cuda", gpu) for gpu in range(gpus)]
        self.src = [torch.zeros(words, dtype=torch.int32, device=device) for device in devices]
        self.dst = [torch.zeros_like(src) for src in self.src]
        # A copy waits for the current stream of both ends: two a GPU, or the copies take turns.
        self.send = [torch.cuda.Stream(device) for device in devices]
        self.recv = [torch.cuda.Stream(device) for device in devices]
        for device in devices:
            torch.cuda.synchronize(device)

    def time_us(self) -> float:
        """Copy once; return the time of the slowest GPU."""
        gpus, times = len(self.src), []
        for gpu in range(gpus):
            to = (gpu + 1) % gpus
            with torch.cuda.stream(self.recv[to]), torch.cuda.stream(self.send[gpu]):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                self.dst[to].copy_(self.src[gpu], non_blocking=True)
                end.record()
                times.append((start, end))
        for _, end in times:
            end.synchronize()
        return max(start.elapsed_time(end) for start, end in times) * 1e3
