"""Expert loads of many layers: a made-up stand-in for the paper's, and how its bins compare.

Letters: L layers, E experts.
"""

from __future__ import annotations

from numbers import Real
from typing import Any

import numpy as np
import torch

from railwave._check import check_non_negative_int, check_positive_int
from railwave.workloads.records import apportion, check_records

# Native's transmitted share at each of four NIC positions, Moderate on H20 (Figure 8).
FIGURE_8_SHARES = (0.5412, 0.2433, 0.1485, 0.0669)


def standin_loads(
    *,
    seed: int,
    layers: int = 45,
    experts: int = 128,
    lowest: float = 3.0,
    highest: float = 12.0,
    records: int = 32_768,
) -> torch.Tensor:
    """Make up expert loads with a chosen spread of max/mean over the layers.

    Not the paper's loads, which are not published: only their number of experts and layers and the
    range of max/mean in its Figure 2(b). A layer's loads are lognormal over experts, as softmax
    makes of normal logits, with the sigma that reaches the layer's max/mean; the layers' values
    are evenly spaced from lowest to highest, in an order that comes from the seed. Nothing is
    fitted to Figure 8: see `bin_shares`.

    Args:
        seed: in [0, 2**32); the same seed gives the same loads.
        layers: L.
        experts: E.
        lowest, highest: max/mean of the flattest and of the steepest layer,
            1 <= lowest <= highest < E. One layer has lowest.
        records: sum of a layer. By default what a node of the paper sends at 56 MiB a GPU (A.3);
            the sum of its replayed layers is not published.

    Returns:
        (L, E) int64; rows sum to records, and their max/mean is as asked up to whole records.

    Raises:
        TypeError, ValueError: a size or a bound is not such a number.

    Source: section 4.1 (layers), A.6 (experts), Figure 2(b) (3 to 12).

    Example:
        >>> loads = standin_loads(seed=0, layers=3, experts=64, lowest=2, highest=4)
        >>> loads.sum(dim=1).tolist()
        [32768, 32768, 32768]
        >>> sorted((loads.max(dim=1).values / 512).tolist())
        [2.0, 3.0, 4.0]
    """
    layers = check_positive_int(layers, "layers")
    experts = check_positive_int(experts, "experts")
    records = check_positive_int(records, "records")
    if check_non_negative_int(seed, "seed") >= 2**32:
        raise ValueError(f"seed must be below 2**32, got {seed}")
    for name, bound in (("lowest", lowest), ("highest", highest)):
        if isinstance(bound, bool) or not isinstance(bound, Real):
            raise TypeError(f"{name} must be a number, got {bound!r}")
    if not 1 <= lowest <= highest < experts:
        raise ValueError(
            f"lowest and highest must be 1 <= lowest <= highest < experts ({experts}), "
            f"got {lowest} and {highest}"
        )
    # numpy promises that RandomState's numbers never change.
    random = np.random.RandomState(seed)
    peaks = random.permutation(np.linspace(lowest, highest, layers))
    rows = []
    for peak in peaks:
        logits = random.standard_normal(experts)
        rows.append(apportion(records, _with_peak(logits - logits.max(), peak)))
    return torch.stack(rows)


def bin_shares(loads: Any, *, bins: int = 4) -> torch.Tensor:
    """Share of each bin of sorted experts, all layers together.

    Each layer is sorted, the largest first, and cut in bins of as many experts. With four bins
    this is what native sends by each NIC position of `preset("h20")` in `replay`, to be set beside
    FIGURE_8_SHARES. The stand-in's shares for seed 0 are 0.60, 0.22, 0.12 and 0.06.

    Args:
        loads: (L, E) integers >= 0, not all 0.
        bins: dividing E.

    Returns:
        (bins,) float64, not increasing, with sum 1.

    Raises:
        TypeError, ValueError: loads are not such integers, or bins does not divide E.

    Source: A.6, Figure 8.

    Example:
        >>> bin_shares([[1, 4, 3, 0], [0, 0, 2, 0]], bins=2).tolist()
        [0.9, 0.1]
    """
    table = check_records(loads, None, "loads", ndim=2)
    bins = check_positive_int(bins, "bins")
    if table.shape[1] % bins:
        raise ValueError(f"bins must divide the number of experts ({table.shape[1]}), got {bins}")
    total = int(table.sum())
    if total == 0:
        raise ValueError("loads must not be all 0: there is nothing to share")
    ordered = table.sort(dim=1, descending=True).values
    return ordered.view(len(table), bins, -1).sum(dim=(0, 2)).double() / total


def _with_peak(logits: np.ndarray, peak: float) -> np.ndarray:
    """Return exp(sigma * logits) with max/mean of peak; the largest logit is 0, all others below.

    max/mean is E over the sum, so it grows with sigma: from 1 at 0 towards E.
    """
    low, high = 0.0, 1.0
    while len(logits) / np.exp(high * logits).sum() < peak:
        low, high = high, 2 * high
    for _ in range(60):  # past the last bit of float64
        middle = (low + high) / 2
        if len(logits) / np.exp(middle * logits).sum() < peak:
            low = middle
        else:
            high = middle
    return np.exp(high * logits)
