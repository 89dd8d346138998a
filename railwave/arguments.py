"""Check the arguments of dispatch and combine, before anything moves.

Letters: W ranks, E experts, K top-k, T tokens, H hidden.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from railwave.config import Config
from railwave.exchange.words import payload_bytes
from railwave.handle import STATIC, Call, Handle
from railwave.kernels.shape import bare_format, make_format

_FP4 = "float4_e2m1fn_x2"
_PARTS_OF_BYTES = {
    getattr(torch, name, None)
    for name in (*(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)), _FP4)
}
SUMMABLE = (torch.float32, torch.bfloat16, torch.float16)


def check_dispatch(
    config: Config,
    xs: Sequence[torch.Tensor],
    topk_idxs: Sequence[torch.Tensor] | None,
    topk_weights: Sequence[torch.Tensor] | None,
    handles: Sequence[Handle] | None,
    exchanges: Sequence[Any],
    extras: Sequence[Sequence[torch.Tensor]] | None,
    **form: Any,
) -> list[Call]:
    """Check all ranks' arguments to a dispatch and make them calls; `form` as of `check_call`.

    Raises:
        TypeError, ValueError: see `LocalWorld.dispatch`.
    """
    ranks = range(config.topo.num_ranks)
    _check_list(xs, "xs", len(ranks))
    more = [()] * len(ranks) if extras is None else extras
    _check_list(more, "extras", len(ranks))
    if handles is not None:
        check_unused(topk_idxs, topk_weights, ("topk_idxs", "topk_weights"), "handles")
        _check_list(handles, "handles", len(ranks))
        for rank in ranks:
            name, received = f"handles[{rank}]", f"received[{rank}]"
            check_handle(handles[rank], exchanges[rank], name=name, received=received)
        _check_one_dispatch(handles)
        calls = [
            check_repeat(
                *(config, xs[rank], handles[rank]), **form, extras=more[rank], name=f"xs[{rank}]"
            )
            for rank in ranks
        ]
    else:
        _check_list(topk_idxs, "topk_idxs", len(ranks))
        _check_list(topk_weights, "topk_weights", len(ranks))
        calls = [
            check_call(
                *(config, x, topk_idx, weights), **form, extras=more[rank], where=f"[{rank}]"
            )
            for rank, (x, topk_idx, weights) in enumerate(
                zip(xs, topk_idxs, topk_weights, strict=True)  # type: ignore[arg-type]
            )
        ]
        for rank, call in enumerate(calls):
            top_k = call.topk_idx.shape[1]  # type: ignore[union-attr]
            _check_same("topk_idxs", "top-k", rank, top_k, calls[0].topk_idx.shape[1])
    for rank, call in enumerate(calls):
        _check_same("xs", "dtype", rank, call.x.dtype, calls[0].x.dtype)
        _check_same("xs", "hidden size", rank, call.x.shape[1], calls[0].x.shape[1])
        _check_same("extras", "kind", rank, _kinds(*call.extras), _kinds(*calls[0].extras))
    return calls


def check_repeat(
    config: Config,
    x: torch.Tensor,
    handle: Handle,
    *,
    path: str | None = None,
    static_shapes: bool | None = None,
    out: str = "copy",
    extras: Sequence[torch.Tensor] = (),
    grads: str = "",
    name: str = "x",
) -> Call:
    """Check one rank's arguments to a dispatch that repeats the routing of a handle's."""
    if static_shapes is not None:
        _check_form(static_shapes, out, grads)
    for what, given, own in (
        ("path", path, handle.path),
        ("static_shapes", static_shapes, handle.static_shapes),
    ):
        if given is not None and given != own:
            raise ValueError(f"{what} must be left out, or the handle's {own!r}, got {given!r}")
    _check_form(handle.static_shapes, out, grads)
    _check_matrix(x, name, config)
    if x.shape[0] != handle.num_tokens:
        raise ValueError(
            f"{name} must have the {handle.num_tokens} tokens of the handle's dispatch, got "
            f"{x.shape[0]}"
        )
    given = _check_extras(config, extras, x, name)
    num_bytes = _check_payload(config, (x, *given), name)
    fmt = bare_format(num_bytes, handle.own_rows.shape[1])
    static = handle.static_shapes
    agreed = f"again {handle.epoch} {handle.path} {_kinds(x, *given)} {grads}"
    form = (fmt, _status(agreed, static), static, out == "view", handle, given)
    return Call(plain(x), None, None, handle.path, *form)


def check_call(
    config: Config,
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    path: str | None = None,
    *,
    static_shapes: bool | None = None,
    out: str = "copy",
    extras: Sequence[torch.Tensor] = (),
    grads: str = "",
    check_ids: bool = True,
    where: str = "",
) -> Call:
    """Check one rank's arguments.

    Args:
        path: None for joint.
        grads: what needs gradients, the same on all ranks.
        check_ids: look at topk_idx, for which the host waits for the device.
        where: follows the arguments' names in messages.
    """
    path = "joint" if path is None else path
    static_shapes = False if static_shapes is None else static_shapes
    _check_form(static_shapes, out, grads)
    if static_shapes and path == "auto":
        raise ValueError(
            "path must be named where static_shapes is True, got 'auto', which decides by what "
            "ranks send: dispatch once without static shapes and take handle.path"
        )
    if not isinstance(path, str) or path not in config.accepted_paths:
        hint = "; auto needs a cost_table" if path == "auto" else ""
        raise ValueError(
            f"path must be one of {', '.join(config.accepted_paths)}, got {path!r}{hint}"
        )
    x_name, idx_name, weights_name = (f"{n}{where}" for n in ("x", "topk_idx", "topk_weights"))
    if where:
        x_name, idx_name = f"xs{where}", f"topk_idxs{where}"
    _check_matrix(x, x_name, config)
    _check_matrix(topk_idx, idx_name, config)
    # Weights travel as float32, whatever they are.
    _check_matrix(topk_weights, weights_name, config, grads=(*SUMMABLE, torch.float64))
    num_tokens = x.shape[0]
    if num_tokens > config.max_tokens_per_rank:
        per_token = config.layout.size // config.max_tokens_per_rank
        raise ValueError(
            f"{x_name} must have at most max_tokens_per_rank = {config.max_tokens_per_rank} "
            f"tokens, got {num_tokens}; raise max_tokens_per_rank, at about {per_token} bytes of "
            f"heap per token and rank"
        )
    given = _check_extras(config, extras, x, x_name)
    num_bytes = _check_payload(config, (x, *given), x_name)
    if topk_idx.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{idx_name} must be int32 or int64, got {topk_idx.dtype}")
    top_k = topk_idx.shape[1]
    if topk_idx.shape[0] != num_tokens or not 1 <= top_k <= config.top_k:
        raise ValueError(
            f"{idx_name} must have shape ({num_tokens}, K) with K from 1 to top_k = "
            f"{config.top_k}, got {tuple(topk_idx.shape)}"
        )
    if not topk_weights.dtype.is_floating_point:
        raise TypeError(f"{weights_name} must be floating point, got {topk_weights.dtype}")
    if topk_weights.shape != topk_idx.shape:
        raise ValueError(
            f"{weights_name} must have the shape of {idx_name}, {tuple(topk_idx.shape)}, got "
            f"{tuple(topk_weights.shape)}"
        )
    if check_ids:
        _check_ids(config, topk_idx, idx_name)
    fmt = make_format(num_bytes, top_k, config.topo.gpus_per_node)
    agreed = f"{path} {_kinds(x, *given)} {topk_idx.dtype} {top_k} {grads}"
    status = _status(agreed, static_shapes)
    tensors = plain(x), plain(topk_idx), plain(topk_weights).float()
    return Call(*tensors, path, fmt, status, static_shapes, out == "view", None, given)


def _kinds(*parts: torch.Tensor) -> str:
    """Say what all ranks' tokens must agree on."""
    return " ".join(f"{part.dtype} {part.shape[1]}" for part in parts)


def _check_extras(
    config: Config, extras: Any, x: torch.Tensor, x_name: str
) -> tuple[torch.Tensor, ...]:
    name = f"extras{x_name.lstrip('xs')}"
    extras = () if extras is None else extras
    if isinstance(extras, torch.Tensor) or not isinstance(extras, Sequence):
        raise TypeError(f"{name} must be a sequence of tensors, got {type(extras).__name__}")
    for i, extra in enumerate(extras):
        given = extra.detach() if isinstance(extra, torch.Tensor) else extra
        _check_matrix(given, f"{name}[{i}]", config)
        if extra.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{name}[{i}] must not require gradients, none flow to it: pass its detach()"
            )
        if len(extra) != len(x) or not extra.shape[1]:
            raise ValueError(
                f"{name}[{i}] must have shape ({len(x)}, n) with n from 1, got {tuple(extra.shape)}"
            )
    return tuple(plain(extra) for extra in extras)


def _status(agreed: str, static_shapes: bool) -> int:
    """Return a number of what all ranks' calls must agree on."""
    return zlib.crc32(agreed.encode()) & (STATIC - 1) | STATIC * static_shapes


def _check_form(static_shapes: Any, out: Any, grads: str) -> None:
    if not isinstance(static_shapes, bool):
        raise TypeError(f"static_shapes must be True or False, got {static_shapes!r}")
    if out not in ("copy", "view"):
        raise ValueError(f"out must be 'copy' or 'view', got {out!r}")
    if out == "view" and grads:
        raise ValueError(
            f"out must be 'copy' for gradients of {grads}, got 'view': autograd keeps rows, which "
            "the next call would overwrite"
        )


def check_given(topk_idx: Any, topk_weights: Any) -> None:
    """Check that there is a routing, where there is no handle."""
    for name, value in (("topk_idx", topk_idx), ("topk_weights", topk_weights)):
        if value is None:
            raise TypeError(f"{name} must be given, unless a handle is")


def check_unused(topk_idx: Any, topk_weights: Any, names: Sequence[str], given: str) -> None:
    """Check that there is no routing beside a handle's."""
    for name, value in zip(names, (topk_idx, topk_weights), strict=True):
        if value is not None:
            raise TypeError(f"{name} must be left out where {given} is given: it has the routing")


def _check_one_dispatch(handles: Sequence[Handle]) -> None:
    for rank, handle in enumerate(handles):
        if handle.epoch != handles[0].epoch:
            raise ValueError(
                f"handles must be of one dispatch, got dispatch {handle.epoch} at rank "
                f"{rank} and {handles[0].epoch} at rank 0"
            )


def _check_ids(config: Config, topk_idx: torch.Tensor, name: str) -> None:
    bad = ((topk_idx < -1) | (topk_idx >= config.num_experts)).any(dim=1).nonzero()
    if len(bad):
        row = int(bad[0])
        raise ValueError(
            f"{name} must hold expert ids in [0, {config.num_experts}) or -1 for none, got "
            f"{topk_idx[row].tolist()} in row {row}"
        )


def check_combine(
    config: Config,
    outs: Sequence[torch.Tensor],
    handles: Sequence[Handle],
    exchanges: Sequence[Any],
    wire_dtype: Any = None,
    grads: str = "",
) -> list[torch.Tensor]:
    """Check all ranks' arguments to a combine; the handles must be of these exchanges.

    Raises:
        TypeError, ValueError: see `LocalWorld.combine`.
    """
    _check_list(outs, "outs", config.topo.num_ranks)
    _check_list(handles, "handles", config.topo.num_ranks)
    for rank, handle in enumerate(handles):
        check_handle(handle, exchanges[rank], name=f"handles[{rank}]", received=f"received[{rank}]")
        check_gradients(grads, handle, name=f"handles[{rank}]")
    _check_one_dispatch(handles)
    for rank, (out, handle) in enumerate(zip(outs, handles, strict=True)):
        check_out(config, out, handle, name=f"outs[{rank}]", wire_dtype=wire_dtype)
        _check_same("outs", "dtype", rank, out.dtype, outs[0].dtype)
        _check_same("outs", "hidden size", rank, out.shape[1], outs[0].shape[1])
    return [plain(out) for out in outs]


def check_handle(handle: Handle, exchange: Any, *, name: str, received: str) -> None:
    """Check that a handle is of the PE `exchange`; `received` is what a caller has it from."""
    if not isinstance(handle, Handle):
        raise TypeError(
            f"{name} must be a Handle, as in {received}.handle, got {type(handle).__name__}"
        )
    if handle.exchange is not exchange:
        raise ValueError(f"{name} must come from a dispatch of this object, at this rank")


def check_gradients(grads: str, handle: Handle, *, name: str) -> None:
    """Check that autograd may keep the rows of a handle's dispatch."""
    if grads and handle.view:
        raise ValueError(
            f"{name} must be of a dispatch with out='copy' for gradients, got one with 'view': "
            "autograd keeps rows, which this call overwrites"
        )


def check_out(
    config: Config, out: torch.Tensor, handle: Handle, *, name: str, wire_dtype: Any = None
) -> None:
    """Check one rank's expert outputs, and the dtype of their sums between nodes."""
    _check_matrix(out, name, config)
    if out.dtype not in SUMMABLE:
        raise TypeError(f"{name} must be float32, bfloat16 or float16, got {out.dtype}")
    if out.shape[0] != handle.num_rows:
        raise ValueError(
            f"{name} must have a row for each of the {handle.num_rows} received, got {out.shape[0]}"
        )
    _check_payload(config, (out,), name)
    if wire_dtype is not None:
        if wire_dtype not in SUMMABLE:
            raise TypeError(f"wire_dtype must be float32, bfloat16 or float16, got {wire_dtype!r}")
        num_bytes = out.shape[1] * wire_dtype.itemsize
        if num_bytes > config.payload_bytes:
            raise ValueError(
                f"wire_dtype must let a sum of {out.shape[1]} elements fit the declared "
                f"{config.payload_bytes} bytes, got {wire_dtype}: {num_bytes} bytes; declare a "
                "larger hidden or a wider dtype"
            )


def _check_list(values: Any, name: str, num_ranks: int) -> None:
    if isinstance(values, torch.Tensor) or not isinstance(values, Sequence):
        raise TypeError(f"{name} must be a list over ranks, got {type(values).__name__}")
    if len(values) != num_ranks:
        raise ValueError(f"{name} must have one entry per rank ({num_ranks}), got {len(values)}")


def _check_matrix(
    value: Any, name: str, config: Config, *, grads: Sequence[torch.dtype] = SUMMABLE
) -> None:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")
    if value.layout != torch.strided or value.is_nested or value.is_quantized:
        kind = "quantized" if value.is_quantized else f"layout {value.layout}"
        raise TypeError(f"{name} must be a dense tensor, got {kind}")
    if value.dim() != 2:
        raise ValueError(f"{name} must have 2 dimensions, got shape {tuple(value.shape)}")
    if value.device != config.device:
        raise ValueError(f"{name} must be on the device {config.device}, got {value.device}")
    if value.dtype in _PARTS_OF_BYTES:
        raise TypeError(f"{name} must have elements of whole bytes, got {value.dtype}")
    tangent = forward_ad.unpack_dual(value).tangent if value.is_floating_point() else None
    if tangent is not None:
        raise ValueError(f"{name} must not have a forward-mode tangent: pass {name}.detach()")
    if value.requires_grad and torch.is_grad_enabled() and value.dtype not in grads:
        raise ValueError(
            f"{name} must be {', '.join(str(dtype) for dtype in grads)} to require gradients, got "
            f"{value.dtype}: call it under torch.no_grad(), or pass {name}.detach()"
        )


def plain(value: torch.Tensor) -> torch.Tensor:
    """Detach; carry out a negation or conjugation that torch has only noted in a flag."""
    return value.detach().resolve_conj().resolve_neg()


def _check_payload(config: Config, parts: Sequence[torch.Tensor], name: str) -> int:
    """Return the bytes of a token."""
    x, *extras = parts
    num_bytes = payload_bytes(parts)
    if not x.shape[1] or num_bytes > config.payload_bytes:
        more = f" and {len(extras)} extra tensors, each from 16 bytes on" if extras else ""
        raise ValueError(
            f"{name} must have from 1 element to the declared {config.payload_bytes} bytes a row "
            f"(hidden {config.hidden} x {config.dtype}), got {x.shape[1]} x {x.dtype}{more} = "
            f"{num_bytes}; declare a larger hidden or a wider dtype"
        )
    return num_bytes


def _check_same(name: str, what: str, rank: int, value: Any, first: Any) -> None:
    if value != first:
        raise ValueError(
            f"{name} must have one {what} on all ranks, got {first} at rank 0 and {value} at "
            f"rank {rank}"
        )
