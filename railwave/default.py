"""The default communicator: `railwave.init` makes it, the module's verbs use it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from railwave._signature import with_arguments_of
from railwave.communicator import Communicator
from railwave.handle import Handle, Received

_default: Communicator | None = None


@with_arguments_of(Communicator)
def init(*args: object, **kwargs: object) -> Communicator:
    """Make a `Communicator`, whose arguments these are, and the default of the verbs below.

    All ranks call it. It replaces an earlier default without closing it.
    """
    global _default
    _default = Communicator(*args, **kwargs)  # type: ignore[arg-type]
    return _default


def dispatch(
    x: torch.Tensor,
    topk_idx: torch.Tensor | None = None,
    topk_weights: torch.Tensor | None = None,
    *,
    handle: Handle | None = None,
    extras: Sequence[torch.Tensor] = (),
    path: str | None = None,
    static_shapes: bool | None = None,
    out: str = "copy",
    expert_alignment: int | None = None,
    zero_padding: bool = False,
    stream: torch.cuda.Stream | None = None,
) -> Received:
    """Send tokens to the ranks of their experts: `Communicator.dispatch` of the default one."""
    return _current().dispatch(
        *(x, topk_idx, topk_weights),
        handle=handle,
        extras=extras,
        path=path,
        static_shapes=static_shapes,
        out=out,
        expert_alignment=expert_alignment,
        zero_padding=zero_padding,
        stream=stream,
    )


def combine(
    out: torch.Tensor,
    handle: Handle,
    *,
    weights: torch.Tensor | None = None,
    bias: torch.Tensor | Sequence[torch.Tensor] | None = None,
    wire_dtype: torch.dtype | None = None,
    stream: torch.cuda.Stream | None = None,
) -> torch.Tensor:
    """Sum every token's rows: `Communicator.combine` of the default one."""
    form = {"weights": weights, "bias": bias, "wire_dtype": wire_dtype, "stream": stream}
    return _current().combine(out, handle, **form)  # type: ignore[arg-type]


def combine_weights(
    topk_weights: torch.Tensor, handle: Handle, *, stream: torch.cuda.Stream | None = None
) -> torch.Tensor:
    """Bring weights back: `Communicator.combine_weights` of the default one."""
    return _current().combine_weights(topk_weights, handle, stream=stream)


def check() -> None:
    """Raise what went wrong in calls with static shapes: `Communicator.check` of the default."""
    _current().check()


def reset() -> int:
    """Go on after a `PeerTimeoutError`: `Communicator.reset` of the default one."""
    return _current().reset()


def finalize() -> None:
    """Close the default communicator, if there is one."""
    global _default
    if _default is not None:
        _default.close()
        _default = None


def _current() -> Communicator:
    if _default is None:
        raise RuntimeError("call railwave.init(...) first, on all ranks")
    return _default
