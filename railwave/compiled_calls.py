"""What `torch.compile` finds where a layer calls a verb: an operator, if a graph may hold the call.

Else the graph ends there, and the call runs as if nothing were compiled: it is right, too, or says
itself what is wrong with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from railwave import autograd, compiled
from railwave.arguments import MOST_ALIGNMENT, biases
from railwave.handle import Handle, Received


def dispatch(rw: Any, x: Any, topk_idx: Any, topk_weights: Any, **form: Any) -> Received:
    """Dispatch where `torch.compile` looks on: as an operator if shapes are static."""
    handle, path, alignment = form["handle"], form["path"], form["expert_alignment"]
    extras = () if form["extras"] is None else form["extras"]
    grads = autograd.named(x=x, topk_weights=topk_weights)
    fits = form["out"] == "copy" and form["stream"] is None
    fits = fits and type(form["zero_padding"]) is bool and _are_matrices(x)
    fits = fits and isinstance(extras, (list, tuple)) and _are_matrices(*extras)
    fits = fits and _are_beside(x, *extras)
    if handle is None:
        fits = fits and form["static_shapes"] is True
        fits = fits and _are_matrices(topk_idx, topk_weights)
        fits = fits and _are_beside(x, topk_idx, topk_weights)
        fits = fits and (path is None or (type(path) is str and path != ""))
        if alignment is not None:
            fits = fits and type(alignment) is int and 0 < alignment <= MOST_ALIGNMENT
        fits = fits and not any(extra.requires_grad for extra in extras)
    else:
        repeats = _handle_fits(
            *(handle, rw._exchange),
            topk_idx=(topk_idx, None),
            topk_weights=(topk_weights, None),
            path=(path, None, getattr(handle, "path", None)),
            static_shapes=(form["static_shapes"], None, True),
            expert_alignment=(alignment, None, getattr(handle, "alignment", 0) or None),
        )
        fits = fits and not extras and repeats
    if not fits:
        return uncompiled(rw.dispatch, x, topk_idx, topk_weights, **form)
    if handle is not None:
        return compiled.repeat(rw._name, x, handle, form["zero_padding"], grads)
    return compiled.dispatch(
        *(rw._name, rw.config, rw._exchange, x, topk_idx, topk_weights),
        extras=extras,
        path=path,
        expert_alignment=alignment,
        zero_padding=form["zero_padding"],
        grads=grads,
    )


def combine(rw: Any, out: Any, handle: Any, **form: Any) -> torch.Tensor:
    """Combine where `torch.compile` looks on: as an operator after static shapes."""
    weights, added, wire_dtype = form["weights"], biases(form["bias"]), form["wire_dtype"]
    tensors = added if weights is None else (weights, *added)
    grads = autograd.named(out=out, weights=weights)
    fits = form["stream"] is None and _are_matrices(out)
    fits = fits and all(isinstance(each, torch.Tensor) for each in tensors)
    fits = fits and _are_beside(out, *tensors)
    fits = fits and (wire_dtype is None or isinstance(wire_dtype, torch.dtype))
    view = bool(grads) and getattr(handle, "view", False)
    if not fits or not _handle_fits(handle, rw._exchange, view=(view, False)):
        return uncompiled(rw.combine, out, handle, **form)
    given = {"weights": weights, "bias": added, "wire_dtype": wire_dtype}
    return compiled.combine(rw._name, out, handle, **given)


def combine_weights(rw: Any, topk_weights: Any, handle: Any, *, stream: Any) -> torch.Tensor:
    """Bring weights back where `torch.compile` looks on: as an operator after static shapes."""
    if (
        stream is None
        and _handle_fits(handle, rw._exchange)
        and _are_weights_of(handle, topk_weights)
    ):
        return compiled.combine_weights(rw._name, topk_weights, handle)
    return uncompiled(rw.combine_weights, topk_weights, handle, stream=stream)


def _handle_fits(handle: Any, exchange: Any, **given: tuple[Any, ...]) -> bool:
    """Say whether a graph may hold a call with this handle.

    Otherwise the call itself says what is wrong.

    Args:
        given: of each argument that must be left out, or as of the handle: (value, what it may be).
    """
    if not isinstance(handle, Handle) or handle.exchange is not exchange:
        return False
    return handle.static_shapes and all(value in allowed for value, *allowed in given.values())


def _are_matrices(*values: Any) -> bool:
    """Say whether these are tensors of two dimensions, as an operator takes them."""
    return all(isinstance(value, torch.Tensor) and value.dim() == 2 for value in values)


def _are_beside(tensor: torch.Tensor, *others: torch.Tensor) -> bool:
    """Say whether tensors are on one device: of others torch may run an operator's fake alone."""
    return all(other.device == tensor.device for other in others)


def _are_weights_of(handle: Handle, weights: Any) -> bool:
    """Say whether these are weights as the handle's dispatch handed out, without gradients."""
    if not isinstance(weights, torch.Tensor) or weights.dtype != torch.float32:
        return False
    given, trained = handle.topk_weights, weights.requires_grad and torch.is_grad_enabled()
    return weights.shape == given.shape and weights.device == given.device and not trained


def uncompiled(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Break a graph that is being made, and call a function as if nothing were compiled."""
    from railwave._uncompiled import call

    return call(function, *args, **kwargs)
