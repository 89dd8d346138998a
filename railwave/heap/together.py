"""Steps that all PEs take together, so that a fault of one is an error of all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Gather = Callable[[Any], list[Any]]  # one object per PE in, all PEs' objects out: collective
_Result = TypeVar("_Result")


def together(gather: Gather, what: str, step: Callable[[], _Result]) -> _Result:
    """Take a local step and return its result. Collective.

    Raises:
        RuntimeError: the step failed, here or elsewhere; on every PE, with each one's reason.

    Example:
        >>> together(lambda said: [said], "add", lambda: 1 + 1)
        2
    """
    result, error, cause = None, "", None
    try:
        result = step()
    except Exception as caught:
        error, cause = f"{type(caught).__name__}: {caught}", caught
    failed = {pe: text for pe, text in enumerate(gather(error)) if text}
    if failed:
        raise RuntimeError(f"could not {what}; by rank: {failed}") from cause
    return result  # type: ignore[return-value]
