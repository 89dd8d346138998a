"""Whole records shared out without loss, and their bytes.

A record is one row of hidden values on its way to another node. Shapes: S rows, P parts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from railwave._check import check_counts, check_non_negative_int, check_positive_int

# BF16 rows of hidden size 7168: the paper's records (A.2, A.3), without its metadata.
RECORD_BYTES = 2 * 7168
MAX_RECORDS = 2**53  # sums stay below, and so exact in float64


def deal(counts: Any, parts: int) -> torch.Tensor:
    """Share each count out over parts in whole numbers, as one goes round a table with cards.

    The counts are dealt one after another without starting again: record number k of all goes to
    part k mod P. So the parts of one count differ by at most one, and so do the sums of the parts.

    Args:
        counts: (S,) integers >= 0, records.
        parts: P, at least 1.

    Returns:
        (S, P) int64; row sums are the counts.

    Raises:
        TypeError, ValueError: counts are not such integers, or parts is not a positive int.

    Source: the integer quotient and remainder of A.6; which parts get the remainder is ours.

    Example:
        Cards 0 to 3 go to parts 0, 1, 2, 0; cards 4 and 5 to parts 1, 2.

        >>> deal([4, 2], 3).tolist()
        [[2, 1, 1], [0, 1, 1]]
    """
    cards = check_records(counts, None, "counts")
    parts = check_positive_int(parts, "parts")
    end = cards.cumsum(dim=0)[:, None]
    part = torch.arange(parts, device="cpu")
    # Of the numbers below x, ceil((x - p) / P) are p modulo P.
    return (end - part + parts - 1) // parts - (end - cards[:, None] - part + parts - 1) // parts


def apportion(total: int, weights: Any) -> torch.Tensor:
    """Share a total out in proportion to weights, in whole numbers, by largest remainder.

    Args:
        total: records, in [0, 2**53).
        weights: (P,) finite numbers >= 0, not all 0; only their ratios count.

    Returns:
        (P,) int64 with sum total, each within one of its exact share; ties go to the first.

    Raises:
        TypeError, ValueError: total is not such an int, or weights are not such numbers.

    Example:
        The exact shares of 10 are 3.33, 3.33 and 3.33; the first has the odd one.

        >>> apportion(10, [1, 1, 1]).tolist()
        [4, 3, 3]
    """
    total = check_non_negative_int(total, "total")
    if total >= MAX_RECORDS:
        raise ValueError(f"total must be below 2**53, got {total}")
    share = np.asarray(weights)
    if share.dtype.kind not in "iuf":
        raise TypeError(f"weights must be numbers, got {share.dtype}")
    share = share.astype(np.float64)
    if share.ndim != 1 or not (np.isfinite(share).all() and (share >= 0).all() and share.any()):
        raise ValueError(
            f"weights must be of shape (parts,), finite, >= 0 and not all 0, got {weights!r}"
        )
    share = share / share.max()
    exact = total * (share / share.sum())
    floor = np.floor(exact).astype(np.int64)
    order = np.argsort(floor - exact, kind="stable")
    order = order[share[order] > 0]
    while (missing := total - int(floor.sum())) > 0:
        floor[order[:missing]] += 1
    if missing < 0:  # float64 has rounded shares of nearly 2**53 up
        floor[np.argsort(-floor, kind="stable")[:-missing]] -= 1
    return torch.from_numpy(floor)


def in_bytes(records: torch.Tensor, record_bytes: int) -> np.ndarray:
    """Turn numbers of records into bytes, as an int64 array whose sums cannot overflow.

    Raises:
        TypeError: record_bytes is not an int.
        ValueError: record_bytes is below 1, or all the bytes together are 2**53 or more.

    Example:
        >>> in_bytes(torch.tensor([2, 0]), 14336).tolist()
        [28672, 0]
    """
    record_bytes = check_positive_int(record_bytes, "record_bytes", below=MAX_RECORDS)
    total = float(records.sum(dtype=torch.float64))  # may round, but does not wrap
    if total * record_bytes >= MAX_RECORDS:
        raise ValueError(
            f"records x record_bytes must be below 2**53, got {total:.4g} x {record_bytes}"
        )
    return records.numpy() * record_bytes


def check_records(value: Any, shape: tuple[int, ...] | None, name: str, *, ndim: int = 1):
    """Return value as an int64 tensor, as `check_counts` does, whose sum is below 2**53."""
    records = check_counts(value, shape, name, ndim=ndim)
    total = float(records.sum(dtype=torch.float64))
    if total >= MAX_RECORDS:
        raise ValueError(f"{name} must have a sum below 2**53, got {total:.4g}")
    return records
