"""Make what `railwave demo` and `railwave replay` run: a cluster and the tokens of its ranks.

Letters: T tokens, E experts, K top-k, H hidden, W ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from railwave._check import check_non_negative_int, check_positive_int
from railwave.topology import Topology
from railwave.workloads import Routing, skewed_routing, subsample, tokens_from_counts
from railwave.world import LocalWorld


@dataclass(frozen=True, eq=False)
class Case:
    """Hold what is run."""

    topo: Topology
    routing: Routing
    xs: list[torch.Tensor]  # per rank, (T, H) bfloat16
    num_experts: int
    note: str = ""  # what a reader should know of its origin

    @property
    def num_tokens(self) -> list[int]:
        """List T of every rank."""
        return [len(x) for x in self.xs]

    @property
    def top_k(self) -> int:
        """Return K."""
        return self.routing.topk_idx[0].shape[1]

    @property
    def hidden(self) -> int:
        """Return H."""
        return self.xs[0].shape[1]

    def world(self) -> LocalWorld:
        """Make the world that the case needs, and no larger."""
        return LocalWorld(
            self.topo,
            num_experts=self.num_experts,
            top_k=self.top_k,
            hidden=self.hidden,
            max_tokens_per_rank=max(1, *self.num_tokens),
            dtype=self.xs[0].dtype,
        )


def demo_case(
    topo: Topology,
    *,
    num_tokens: int,
    hidden: int,
    num_experts: int,
    top_k: int,
    skew: float,
    seed: int,
) -> Case:
    """Make up tokens whose owners and experts are uneven; see `skewed_routing`.

    Raises:
        TypeError, ValueError: a size is out of range.
    """
    routing = skewed_routing(
        *(topo.num_ranks, num_tokens, num_experts, top_k),
        gpus_per_node=topo.gpus_per_node,
        skew=skew,
        seed=seed,
    )
    xs = _random_tokens([len(topk_idx) for topk_idx in routing.topk_idx], hidden, seed=seed)
    return Case(topo, routing, xs, num_experts)


def replay_case(
    topo: Topology,
    counts: torch.Tensor,
    *,
    num_tokens: int,
    hidden: int,
    top_k: int,
    seed: int,
) -> Case:
    """Draw tokens whose routing reproduces the counts exactly, and keep some of each rank.

    Args:
        topo: the cluster.
        counts: (W, E) int64, tokens that each rank sends to each expert.
        num_tokens: the most tokens to keep of a rank, at random; 0 keeps all.
        hidden: H.
        top_k: K, distinct experts of a token.
        seed: the same seed gives the same case.

    Raises:
        TypeError, ValueError: a size is out of range, the counts are not of W ranks, or no tokens
            have these counts.
    """
    num_ranks, num_experts = counts.shape
    if num_ranks != topo.num_ranks:
        raise ValueError(
            f"nodes * gpus must be the {num_ranks} ranks of the trace, got {topo.nodes} * "
            f"{topo.gpus_per_node} = {topo.num_ranks}"
        )
    num_tokens = check_non_negative_int(num_tokens, "tokens")
    seed = check_non_negative_int(seed, "seed")
    # Ranks differ in their seeds, and the ranks of one seed from those of every other.
    seeds = [seed * num_ranks + rank for rank in range(num_ranks)]
    drawn = [
        tokens_from_counts(row, top_k, seed=rank_seed)
        for row, rank_seed in zip(counts, seeds, strict=True)
    ]
    again = torch.stack([torch.bincount(t.flatten(), minlength=num_experts) for t in drawn])
    if not torch.equal(again, counts):
        raise RuntimeError("the drawn routing does not reproduce the counts")
    kept = [
        subsample(t, min(num_tokens or len(t), len(t)), seed=rank_seed)
        for t, rank_seed in zip(drawn, seeds, strict=True)
    ]
    generator = torch.Generator().manual_seed(seed)
    weights = [
        torch.softmax(torch.randn(t.shape, generator=generator, device="cpu"), dim=1) for t in kept
    ]
    xs = _random_tokens([len(t) for t in kept], hidden, seed=seed)
    note = (
        f"counts of {num_ranks} ranks x {num_experts} experts reproduced exactly; "
        f"{sum(map(len, kept)):,} of the {sum(map(len, drawn)):,} tokens run"
    )
    return Case(topo, Routing(kept, weights), xs, num_experts, note)


def _random_tokens(num_tokens: list[int], hidden: int, *, seed: int) -> list[torch.Tensor]:
    """Draw (T, H) bfloat16 tokens per rank, standard normal."""
    hidden = check_positive_int(hidden, "hidden")
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(t, hidden, generator=generator, device="cpu").bfloat16() for t in num_tokens
    ]
