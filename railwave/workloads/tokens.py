"""Tokens whose routing reproduces recorded expert counts.

Shapes: T tokens, K top-k, E experts.
"""

from __future__ import annotations

import torch

from railwave._check import check_non_negative_int, check_positive_int
from railwave.workloads.routing import make_generator

MAX_COUNT = 2**53  # trace files hold counts as floats: exact up to here
_SWAP_ROUNDS_PER_COLUMN = 16  # on the real trace, which experts meet in a token settles by 4


def tokens_from_counts(counts_row: torch.Tensor, top_k: int, *, seed: int) -> torch.Tensor:
    """Draw tokens whose routing reproduces the counts exactly, experts distinct within a token.

    Args:
        counts_row: (E,) integers >= 0, tokens of one rank that go to each expert.
        top_k: K; divides the sum of the counts, and T = sum / K is at least each count.
        seed: the same seed gives the same tokens.

    Returns:
        (T, K) int64, expert ids.

    Raises:
        TypeError: counts_row, top_k or seed are not integers.
        ValueError: counts_row has a wrong shape or range, or no such tokens exist.

    Example:
        >>> tokens_from_counts(torch.tensor([0, 2, 2]), 2, seed=0).sort(dim=1).values.tolist()
        [[1, 2], [1, 2]]
    """
    top_k = check_positive_int(top_k, "top_k")
    generator = make_generator(seed)
    check_counts("counts_row", counts_row)
    if counts_row.dim() != 1:
        raise ValueError(f"counts_row must be of shape (experts,), got {tuple(counts_row.shape)}")
    counts_row = counts_row.cpu().to(torch.int64)
    total = int(counts_row.sum())
    if total % top_k:
        raise ValueError(f"counts_row must have a sum divisible by top_k ({top_k}), got {total}")
    num_tokens = total // top_k
    largest = int(counts_row.max()) if len(counts_row) else 0
    if largest > num_tokens:
        raise ValueError(
            f"counts_row must have no count above sum / top_k = {total} / {top_k} = {num_tokens}, "
            f"or a token would repeat an expert; got {largest}"
        )
    order = torch.randperm(len(counts_row), generator=generator, device="cpu")
    # Element j goes to token j mod T: an expert's run is at most T long, so meets no token twice.
    dealt = order.repeat_interleave(counts_row[order]).view(top_k, num_tokens).T
    shuffled = dealt[torch.randperm(num_tokens, generator=generator, device="cpu")]
    columns = torch.rand(num_tokens, top_k, generator=generator, device="cpu").argsort(dim=1)
    return _swap_pairs(shuffled.gather(1, columns), generator)


def subsample(topk_idx: torch.Tensor, num_tokens: int, *, seed: int) -> torch.Tensor:
    """Keep a random subset of the tokens, in their order.

    Args:
        topk_idx: (T, K).
        num_tokens: tokens to keep, at most T.
        seed: the same seed gives the same subset.

    Returns:
        (num_tokens, K), a copy, of topk_idx's dtype.

    Raises:
        TypeError: num_tokens or seed is not an integer.
        ValueError: num_tokens is negative or above T.

    Example:
        >>> subsample(torch.tensor([[3], [1], [2]]), 3, seed=0).tolist()
        [[3], [1], [2]]
    """
    num_tokens = check_non_negative_int(num_tokens, "num_tokens")
    generator = make_generator(seed)
    if num_tokens > len(topk_idx):
        raise ValueError(
            f"num_tokens must be at most the tokens given ({len(topk_idx)}), got {num_tokens}"
        )
    kept = torch.randperm(len(topk_idx), generator=generator, device="cpu")[:num_tokens]
    return topk_idx[kept.sort().values.to(topk_idx.device)]


def _swap_pairs(topk_idx: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Mix (T, K) experts among tokens by random swaps, each keeping both tokens distinct.

    Dealing leaves neighbours in the expert order together; a swap changes no count, and the swaps
    are symmetric, so many of them tend to the uniform draw over all routings with these counts.
    """
    num_tokens, top_k = topk_idx.shape
    num_pairs = num_tokens // 2
    tokens = topk_idx.clone()
    for _ in range(_SWAP_ROUNDS_PER_COLUMN * top_k):
        pairs = torch.randperm(num_tokens, generator=generator, device="cpu")[: 2 * num_pairs].view(
            2, num_pairs
        )
        columns = torch.randint(top_k, (2, num_pairs), generator=generator, device="cpu")
        swapped = tokens[pairs]
        taken = swapped.gather(2, columns[..., None])
        swapped.scatter_(2, columns[..., None], taken.flip(0))
        in_order = swapped.sort(dim=2).values
        distinct = (in_order[..., 1:] != in_order[..., :-1]).all(dim=2).all(dim=0)
        tokens[pairs[:, distinct]] = swapped[:, distinct]
    return tokens


def check_counts(name: str, counts: torch.Tensor) -> None:
    """Refuse counts that are not a tensor of integers in [0, 2**53]."""
    if not isinstance(counts, torch.Tensor):
        raise TypeError(f"{name} must be a tensor of integers, got {type(counts).__name__}")
    if counts.is_floating_point() or counts.is_complex():
        raise TypeError(f"{name} must be a tensor of integers, got {counts.dtype}")
    if counts.numel() and not (int(counts.min()) >= 0 and int(counts.max()) <= MAX_COUNT):
        raise ValueError(
            f"{name} must be in [0, 2**53], got {int(counts.min())} to {int(counts.max())}"
        )
