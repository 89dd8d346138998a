"""A small made-up trace, for examples and tests.

Shape: E experts.
"""

from __future__ import annotations

import os

import numpy as np
import torch

from railwave._check import check_positive_int
from railwave.workloads.routing import distinct_experts, zipf_log_popularity
from railwave.workloads.trace import write_counts


def generate_trace(
    folder: str | os.PathLike,
    *,
    ranks: int = 8,
    layers: int = 3,
    micro_batches: int = 2,
    experts: int = 16,
    tokens: int = 128,
    top_k: int = 2,
    iteration: int = 1,
    seed: int = 0,
) -> None:
    """Write a small made-up trace: popular experts differ per layer, ranks differ mildly.

    With its defaults it writes the files of examples/trace. Each row sums to tokens * top_k, and no
    count exceeds tokens.

    Args:
        folder: where to write, as in `write_counts`.
        ranks, layers, micro_batches, experts: the shape of the counts.
        tokens: tokens of one rank in one micro-batch.
        top_k: distinct experts of a token, at most experts.
        iteration: I in the file names.
        seed: in [0, 2**32), the same seed gives the same files.

    Raises:
        TypeError: a size is not an integer.
        ValueError: a size is below 1 or top_k above experts; and those of `write_counts`.

    Example: generate_trace("trace", ranks=2, layers=1) writes two files of one line.
    """
    sizes = dict(ranks=ranks, layers=layers, micro_batches=micro_batches, experts=experts)
    for name, value in dict(sizes, tokens=tokens, top_k=top_k).items():
        check_positive_int(value, name)
    if top_k > experts:
        raise ValueError(f"top_k must be at most experts ({experts}), got {top_k}")
    # numpy promises that RandomState's numbers never change; torch promises nothing of its own.
    random = np.random.RandomState(seed)
    orders = [torch.from_numpy(random.permutation(experts)) for _ in range(layers)]
    counts = torch.zeros(ranks, layers, micro_batches, experts, dtype=torch.int64, device="cpu")
    for rank in range(ranks):
        for layer in range(layers):
            taste = torch.from_numpy(random.uniform(-0.25, 0.25, experts))
            log_popularity = zipf_log_popularity(orders[layer], 1.0) + taste
            for micro_batch in range(micro_batches):
                uniform = torch.from_numpy(random.random_sample((tokens, experts)))
                topk_idx = distinct_experts(uniform, log_popularity, top_k)
                row = torch.bincount(topk_idx.flatten(), minlength=experts)
                counts[rank, layer, micro_batch] = row
    write_counts(folder, iteration, counts)
