"""What `torch.compile` leaves as it is. Loaded by a compiled region only: it loads the compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


@torch.compiler.disable(
    reason="one graph holds calls of a Communicator with static_shapes=True, out='copy' and no "
    "stream (railwave)"
)
def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Break the graph and call a function as if nothing were compiled."""
    return function(*args, **kwargs)
