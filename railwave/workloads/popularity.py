"""Routing whose experts and whose sources are uneven independently of each other.

Shapes: T tokens of a rank, K top-k, E experts, G GPUs a node.
"""

from __future__ import annotations

import math
from numbers import Real

import torch

from railwave._check import check_positive_int
from railwave.workloads.routing import (
    Routing,
    check_skew,
    draw_routing,
    zipf_log_popularity,
)


def zipf_routing(
    num_ranks: int,
    num_tokens: int,
    num_experts: int,
    top_k: int,
    *,
    gpus_per_node: int,
    expert_skew: float,
    source_skew: float = 0.0,
    seed: int,
) -> Routing:
    """Draw routing with Zipf experts: the i-th most popular in proportion to (i + 1) ** -skew.

    Which expert that is comes from the seed alone. `skewed_routing(skew=x)` is
    `zipf_routing(expert_skew=x / 2, source_skew=x)`.

    Args:
        num_ranks: ranks, a multiple of gpus_per_node; rank = node * G + local.
        num_tokens: the most tokens that a rank owns, and what each owns with source_skew 0.
        num_experts: E.
        top_k: K, at most E; drawn without repeats, in the order of the columns.
        gpus_per_node: G.
        expert_skew: finite, >= 0; 0 means uniform experts.
        source_skew: finite, >= 0; 0 means equal owners, else see `skewed_routing`.
        seed: the same seed gives the same routing.

    Returns:
        Routing with num_ranks entries a list.

    Raises:
        TypeError, ValueError: as `skewed_routing`.

    Example:
        With source_skew 1 the second GPU of a node owns half as much as the first.

        >>> sizes = dict(gpus_per_node=2, seed=0)
        >>> routing = zipf_routing(4, 8, 16, 2, expert_skew=0, source_skew=1, **sizes)
        >>> [len(topk_idx) for topk_idx in routing.topk_idx]
        [8, 4, 4, 8]
        >>> routing = zipf_routing(4, 8, 16, 2, expert_skew=1, **sizes)
        >>> [len(topk_idx) for topk_idx in routing.topk_idx]
        [8, 8, 8, 8]
    """
    expert_skew = check_skew(expert_skew, "expert_skew")
    return draw_routing(
        num_ranks,
        num_tokens,
        num_experts,
        top_k,
        gpus_per_node=gpus_per_node,
        source_skew=check_skew(source_skew, "source_skew"),
        log_popularity=lambda order: zipf_log_popularity(order, expert_skew),
        seed=seed,
    )


def hot_routing(
    num_ranks: int,
    num_tokens: int,
    num_experts: int,
    top_k: int,
    *,
    gpus_per_node: int,
    hot_share: float,
    hot_experts: int = 1,
    source_skew: float = 0.0,
    seed: int,
) -> Routing:
    """Draw routing with a few hot experts, the others being equal.

    Args:
        hot_share: in (0, 1), the chance that the first expert of a token is one of the hot. With K
            above 1 their share of all choices differs, as a token meets an expert once.
        hot_experts: in [1, E), how many are hot, equally; which ones comes from the seed alone.
        num_ranks, num_tokens, num_experts, top_k, gpus_per_node, source_skew, seed: as
            `zipf_routing`.

    Returns:
        Routing with num_ranks entries a list.

    Raises:
        TypeError, ValueError: as `zipf_routing`, or hot_share or hot_experts out of range.

    Example:
        With one in a million against it, all 100 tokens choose the hot expert.

        >>> routing = hot_routing(1, 100, 8, 1, gpus_per_node=1, hot_share=1 - 1e-6, seed=0)
        >>> len(routing.topk_idx[0].unique())
        1
    """
    num_experts = check_positive_int(num_experts, "num_experts")
    hot_experts = check_positive_int(hot_experts, "hot_experts")
    if hot_experts >= num_experts:
        raise ValueError(
            f"hot_experts must be below num_experts ({num_experts}), got {hot_experts}"
        )
    if isinstance(hot_share, bool) or not isinstance(hot_share, Real):
        raise TypeError(f"hot_share must be a number, got {hot_share!r}")
    if not 0 < hot_share < 1:
        raise ValueError(f"hot_share must be above 0 and below 1, got {hot_share}")

    def log_popularity(order: torch.Tensor) -> torch.Tensor:
        others = math.log((1 - hot_share) / (num_experts - hot_experts))
        popularity = torch.full((num_experts,), others, dtype=torch.float64, device="cpu")
        popularity[order[:hot_experts]] = math.log(hot_share / hot_experts)
        return popularity

    return draw_routing(
        num_ranks,
        num_tokens,
        num_experts,
        top_k,
        gpus_per_node=gpus_per_node,
        source_skew=check_skew(source_skew, "source_skew"),
        log_popularity=log_popularity,
        seed=seed,
    )
