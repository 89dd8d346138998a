"""Skewed routing: GPUs of a node own uneven numbers of tokens, and experts are unevenly popular.

Uneven owners make uneven rails, which RailBalance mends; uneven experts make uneven receivers.

Shapes: T tokens of a rank, K top-k, E experts, G GPUs a node.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real

import torch

from railwave._check import check_non_negative_int, check_positive_int


@dataclass(frozen=True)
class Routing:
    """Hold the routing of every rank; entry r of each list belongs to rank r."""

    topk_idx: list[torch.Tensor]  # each (T, K) int64, expert ids, distinct within a row
    topk_weights: list[torch.Tensor]  # each (T, K) float32, positive, rows sum to 1


def skewed_routing(
    num_ranks: int,
    num_tokens: int,
    num_experts: int,
    top_k: int,
    *,
    gpus_per_node: int,
    skew: float,
    seed: int,
) -> Routing:
    """Draw routing whose sources are uneven within a node and whose experts are uneven.

    GPU number p in a node's order owns floor(num_tokens * (p + 1) ** -skew) tokens. The order
    starts at local GPU (node mod G), so that nodes differ in their hot rail. The i-th most popular
    expert is drawn in proportion to (i + 1) ** -(skew / 2), which expert that is comes from the
    seed.

    Args:
        num_ranks: ranks, a multiple of gpus_per_node; rank = node * G + local.
        num_tokens: the most tokens that a rank owns, and what each owns with skew 0.
        num_experts: E.
        top_k: K, at most E.
        gpus_per_node: G.
        skew: finite, >= 0; 0 means equal owners and uniform experts.
        seed: the same seed gives the same routing.

    Returns:
        Routing with num_ranks entries a list.

    Raises:
        TypeError: a size or the seed is not an integer, or skew not a number.
        ValueError: a size is out of range, or skew is negative or not finite.

    Example:
        >>> routing = skewed_routing(4, 8, 16, 2, gpus_per_node=2, skew=1.0, seed=0)
        >>> [len(topk_idx) for topk_idx in routing.topk_idx]
        [8, 4, 4, 8]
    """
    skew = check_skew(skew, "skew")
    return draw_routing(
        num_ranks,
        num_tokens,
        num_experts,
        top_k,
        gpus_per_node=gpus_per_node,
        source_skew=skew,
        log_popularity=lambda order: zipf_log_popularity(order, skew / 2),
        seed=seed,
    )


def draw_routing(
    num_ranks: int,
    num_tokens: int,
    num_experts: int,
    top_k: int,
    *,
    gpus_per_node: int,
    source_skew: float,
    log_popularity: Callable[[torch.Tensor], torch.Tensor],
    seed: int,
) -> Routing:
    """Draw routing with source_skew as the skew of `skewed_routing`, and any popularity of experts.

    Args:
        log_popularity: turns a (E,) int64 permutation of the experts, drawn first of all from the
            seed, into their (E,) float64 log popularities.
        num_ranks, num_tokens, num_experts, top_k, gpus_per_node, seed: as `skewed_routing`.
    """
    num_ranks = check_positive_int(num_ranks, "num_ranks")
    num_tokens = check_non_negative_int(num_tokens, "num_tokens")
    num_experts = check_positive_int(num_experts, "num_experts")
    top_k = check_positive_int(top_k, "top_k")
    gpus_per_node = check_positive_int(gpus_per_node, "gpus_per_node")
    generator = make_generator(seed)
    if top_k > num_experts:
        raise ValueError(f"top_k must be at most num_experts ({num_experts}), got {top_k}")
    if num_ranks % gpus_per_node:
        raise ValueError(
            f"num_ranks must be a multiple of gpus_per_node ({gpus_per_node}), got {num_ranks}"
        )
    popularity = log_popularity(torch.randperm(num_experts, generator=generator, device="cpu"))
    topk_idx, topk_weights = [], []
    for rank in range(num_ranks):
        node, local = divmod(rank, gpus_per_node)
        position = (local - node) % gpus_per_node
        num_owned = int(num_tokens * float(position + 1) ** -source_skew)
        uniform = torch.rand(
            num_owned, num_experts, dtype=torch.float64, generator=generator, device="cpu"
        )
        topk_idx.append(distinct_experts(uniform, popularity, top_k))
        logits = torch.randn(num_owned, top_k, generator=generator, device="cpu")
        topk_weights.append(torch.softmax(logits, dim=1))
    return Routing(topk_idx, topk_weights)


def zipf_log_popularity(popularity_order: torch.Tensor, exponent: float) -> torch.Tensor:
    """Return log((i + 1) ** -exponent) for the expert at place i of the order.

    Logarithms, since the powers themselves underflow under a large exponent.

    Args:
        popularity_order: (E,) int64, a permutation of the experts, the most popular first.
        exponent: >= 0.

    Returns:
        (E,) float64, by expert.

    Example:
        >>> zipf_log_popularity(torch.tensor([1, 0]), 1.0).exp().tolist()
        [0.5, 1.0]
    """
    num_experts = len(popularity_order)
    log_popularity = torch.empty(num_experts, dtype=torch.float64, device="cpu")
    places = torch.arange(1, num_experts + 1, dtype=torch.float64, device="cpu")
    log_popularity[popularity_order] = -exponent * places.log()
    return log_popularity


def distinct_experts(
    uniform: torch.Tensor, log_popularity: torch.Tensor, top_k: int
) -> torch.Tensor:
    """Draw K distinct experts a token, one after another in proportion to popularity.

    Gumbel top-k: the K largest of log popularity + Gumbel noise are such a draw.

    Args:
        uniform: (T, E) float64 in [0, 1), the randomness.
        log_popularity: (E,) float64.
        top_k: K, at most E.

    Returns:
        (T, K) int64.

    Example:
        >>> distinct_experts(torch.tensor([[0.5, 0.9, 0.1]]), torch.zeros(3), 2).tolist()
        [[1, 0]]
    """
    gumbel = -torch.log(-torch.log(uniform))
    return torch.topk(log_popularity + gumbel, top_k, dim=1).indices


def make_generator(seed: int) -> torch.Generator:
    """Return a CPU generator started from seed."""
    seed = check_non_negative_int(seed, "seed")
    if seed >= 2**63:
        raise ValueError(f"seed must be below 2**63, got {seed}")
    return torch.Generator().manual_seed(seed)


def check_skew(value: float, name: str) -> float:
    """Return value, a finite number of at least 0."""
    if not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name} must be finite and at least 0, got {value}")
    return value
