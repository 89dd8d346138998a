"""Check the arguments of dispatch and combine, before anything moves.

Letters: W ranks, E experts, K top-k, T tokens, H hidden.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from railwave._check import check_bool
from railwave.autograd import rows_of_places
from railwave.config import Config
from railwave.exchange import Options
from railwave.exchange.words import payload_bytes
from railwave.handle import STATIC, Call, Handle
from railwave.kernels.shape import bare_format, make_format

_FP4 = "float4_e2m1fn_x2"
_PARTS_OF_BYTES = {
    getattr(torch, name, None)
    for name in (*(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)), _FP4)
}
MOST_ALIGNMENT = 2**16
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
        _check_handles(handles, exchanges)
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
    expert_alignment: int | None = None,
    zero_padding: bool = False,
    grads: str = "",
    name: str = "x",
) -> Call:
    """Check one rank's arguments to a dispatch that repeats the routing of a handle's."""
    if static_shapes is not None:
        _check_form(static_shapes, out, grads)
    alignment = handle.alignment
    for what, given, own in (
        ("path", path, handle.path),
        ("static_shapes", static_shapes, handle.static_shapes),
        ("expert_alignment", expert_alignment, alignment or None),
    ):
        if given is not None and given != own:
            raise ValueError(f"{what} must be left out, or the handle's {own!r}, got {given!r}")
    _check_form(handle.static_shapes, out, grads)
    zero_padding = _check_grouping(config, alignment or None, zero_padding, out, grads)
    _check_matrix(x, name, config)
    _check_differentiable(grads, x, name)
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
    return Call(plain(x), None, None, handle.path, *form, alignment, zero_padding)


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
    expert_alignment: int | None = None,
    zero_padding: bool = False,
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
    zero_padding = _check_grouping(config, expert_alignment, zero_padding, out, grads)
    if static_shapes and path == "auto":
        raise ValueError(
            "path must be named where static_shapes is True, got 'auto', which decides by what "
            "ranks send: dispatch once without static shapes and take handle.path"
        )
    if not isinstance(path, str) or path not in config.accepted_paths:
        hint = "" if config.cost_table else "; auto needs a cost_table"
        raise ValueError(
            f"path must be one of {', '.join(config.accepted_paths)}, got {path!r}{hint}"
        )
    x_name, idx_name, weights_name = (f"{n}{where}" for n in ("x", "topk_idx", "topk_weights"))
    if where:
        x_name, idx_name = f"xs{where}", f"topk_idxs{where}"
    _check_matrix(x, x_name, config)
    _check_differentiable(grads, x, x_name)
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
    form = (fmt, status, static_shapes, out == "view", None, given)
    return Call(*tensors, path, *form, expert_alignment or 0, zero_padding)


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
    check_bool(static_shapes, "static_shapes")
    if out not in ("copy", "view"):
        raise ValueError(f"out must be 'copy' or 'view', got {out!r}")
    if out == "view" and grads:
        raise ValueError(
            f"out must be 'copy' for gradients of {grads}, got 'view': autograd keeps rows, which "
            "the next call would overwrite"
        )


def _check_differentiable(grads: str, x: torch.Tensor, name: str) -> None:
    """Check that gradients of x, if some are needed, can be summed."""
    if grads.startswith("x") and x.dtype not in SUMMABLE:
        raise ValueError(
            f"{name} must be float32, bfloat16 or float16 to have gradients, got {x.dtype}: pass "
            f"{name}.detach()"
        )


def _check_grouping(
    config: Config, alignment: Any, zero_padding: Any, out: str, grads: str
) -> bool:
    """Check how rows are grouped by expert; return whether free rows are zeroed."""
    check_bool(zero_padding, "zero_padding")
    if alignment is None:
        if zero_padding:
            raise ValueError(
                "zero_padding must be False without expert_alignment, got True: rows have no gaps"
            )
        return False
    if not isinstance(alignment, int) or isinstance(alignment, bool):
        raise TypeError(f"expert_alignment must be an int or None, got {alignment!r}")
    if not 1 <= alignment <= MOST_ALIGNMENT:
        raise ValueError(
            f"expert_alignment must be from 1 to {MOST_ALIGNMENT} rows, got {alignment}"
        )
    ranks, most = range(config.topo.num_ranks), (config.max_recv_rows, config.top_k, alignment)
    rows = max(config.most_rows_by_expert(rank, *most) for rank in ranks)
    if rows >= 2**31:
        raise ValueError(
            f"expert_alignment must keep the most rows of a rank below 2**31, got {alignment}, "
            f"which makes {rows}; bound max_recv_rows"
        )
    if out == "view":
        raise ValueError(
            "out must be 'copy' with expert_alignment, got 'view': rows arrive one a token"
        )
    # An expert's gradient sums over all rows: 0 times what a free row holds must be 0.
    return zero_padding or bool(grads) or torch.is_grad_enabled()


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
    weights: Sequence[torch.Tensor] | None,
    bias: Sequence[Any] | None,
    wire_dtype: Any = None,
    grads: str = "",
) -> list[tuple[torch.Tensor, Options]]:
    """Check all ranks' arguments to a combine; the handles must be of these exchanges.

    Raises:
        TypeError, ValueError: see `LocalWorld.combine`.
    """
    _check_list(outs, "outs", config.topo.num_ranks)
    _check_handles(handles, exchanges)
    for rank, handle in enumerate(handles):
        check_gradients(grads, handle, name=f"handles[{rank}]")
    none = [None] * len(outs)
    for name, values in (("weights", weights), ("bias", bias)):
        if values is not None:
            _check_list(values, name, len(outs))
    each = zip(outs, handles, weights or none, bias or none, strict=True)
    checked = [
        check_out(config, out, handle, w, b, where=f"[{rank}]", wire_dtype=wire_dtype)
        for rank, (out, handle, w, b) in enumerate(each)
    ]
    for rank, out in enumerate(outs):
        _check_same("outs", "dtype", rank, out.dtype, outs[0].dtype)
        _check_same("outs", "hidden size", rank, out.shape[1], outs[0].shape[1])
    return checked


def check_all_weights(
    config: Config, topk_weights: Any, handles: Any, exchanges: Sequence[Any]
) -> list[torch.Tensor]:
    """Check all ranks' arguments to `combine_weights`; return what it combines."""
    _check_list(topk_weights, "topk_weights", config.topo.num_ranks)
    _check_handles(handles, exchanges)
    pairs = enumerate(zip(topk_weights, handles, strict=True))
    return [check_weights(config, w, handle, where=f"[{rank}]") for rank, (w, handle) in pairs]


def _check_handles(handles: Any, exchanges: Sequence[Any]) -> None:
    """Check that handles are of one dispatch of these exchanges."""
    _check_list(handles, "handles", len(exchanges))
    for rank, handle in enumerate(handles):
        name, received = f"handles[{rank}]", f"received[{rank}]"
        check_handle(handle, exchanges[rank], name=name, received=received)
    _check_one_dispatch(handles)


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
    config: Config,
    out: torch.Tensor,
    handle: Handle,
    weights: Any = None,
    bias: Any = None,
    *,
    where: str = "",
    wire_dtype: Any = None,
) -> tuple[torch.Tensor, Options]:
    """Check one rank's arguments to a combine; return them as the stages take them.

    Args:
        where: follows the arguments' names in messages.
    """
    name = f"outs{where}" if where else "out"
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
    if weights is not None:
        weights = _check_row_weights(config, weights, handle, f"weights{where}")
        if handle.exchange.in_rows(out):  # type: ignore[attr-defined]
            raise ValueError(
                f"weights{where} must be None where {name} is a view of rows, which a call that "
                "is refused would leave multiplied: multiply in place, or pass a copy"
            )
    given = _check_bias(config, bias, (handle.num_tokens, out.shape[1]), f"bias{where}")
    return plain(out), Options(weights, given, wire_dtype)


def _check_row_weights(config: Config, weights: Any, handle: Handle, name: str) -> torch.Tensor:
    _check_tensor(weights, name, config, dims=1)
    if weights.dtype != torch.float32:
        raise TypeError(f"{name} must be float32, got {weights.dtype}")
    if len(weights) != handle.num_rows:
        raise ValueError(
            f"{name} must have one for each of the {handle.num_rows} rows received, got "
            f"{len(weights)}"
        )
    return plain(weights).contiguous()


def check_weights(
    config: Config, topk_weights: Any, handle: Handle, *, where: str = ""
) -> torch.Tensor:
    """Check the weights of one rank's rows; return them a row a token, (tokens, K) float32."""
    name = f"topk_weights{where}"
    assert handle.topk_weights is not None
    shape = tuple(handle.topk_weights.shape)
    _check_tensor(topk_weights, name, config, dims=len(shape))
    if topk_weights.dtype != torch.float32:
        raise TypeError(f"{name} must be float32, got {topk_weights.dtype}")
    if tuple(topk_weights.shape) != shape:
        raise ValueError(
            f"{name} must have the shape of the weights received, {shape}, got "
            f"{tuple(topk_weights.shape)}"
        )
    if topk_weights.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name} must not require gradients, none flow: pass {name}.detach()")
    rows = plain(topk_weights)
    if handle.places is None:
        return rows
    return rows_of_places(handle.places, handle.received, rows)


def biases(bias: Any) -> tuple[Any, ...]:
    """Return what a caller gave as bias: none, a tensor, or two."""
    if bias is None:
        return ()
    one = isinstance(bias, (torch.Tensor, str)) or not isinstance(bias, Sequence)
    return (bias,) if one else (*bias,)


def _check_bias(
    config: Config, bias: Any, shape: tuple[int, int], of_rank: str
) -> tuple[torch.Tensor, ...]:
    """Check the biases; return them as (T, H)."""
    given = biases(bias)
    if len(given) > 2:
        raise ValueError(f"{of_rank} must be one tensor or two, got {len(given)}")
    for i, each in enumerate(given):
        name = f"{of_rank}[{i}]" if len(given) > 1 else of_rank
        _check_tensor(each, name, config, dims=None)
        if each.dtype not in SUMMABLE:
            raise TypeError(f"{name} must be float32, bfloat16 or float16, got {each.dtype}")
        if tuple(each.shape) not in (shape, shape[1:]):
            raise ValueError(
                f"{name} must have shape {shape} or {shape[1:]}, got {tuple(each.shape)}"
            )
    return tuple(plain(each).expand(shape) for each in given)


def _check_list(values: Any, name: str, num_ranks: int) -> None:
    if isinstance(values, torch.Tensor) or not isinstance(values, Sequence):
        raise TypeError(f"{name} must be a list over ranks, got {type(values).__name__}")
    if len(values) != num_ranks:
        raise ValueError(f"{name} must have one entry per rank ({num_ranks}), got {len(values)}")


def _check_matrix(
    value: Any, name: str, config: Config, *, grads: Sequence[torch.dtype] = SUMMABLE
) -> None:
    _check_tensor(value, name, config, dims=2, grads=grads)


def _check_tensor(
    value: Any,
    name: str,
    config: Config,
    *,
    dims: int | None,
    grads: Sequence[torch.dtype] = SUMMABLE,
) -> None:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")
    if value.layout != torch.strided or value.is_nested or value.is_quantized:
        kind = "quantized" if value.is_quantized else f"layout {value.layout}"
        raise TypeError(f"{name} must be a dense tensor, got {kind}")
    if dims is not None and value.dim() != dims:
        plural = "" if dims == 1 else "s"
        raise ValueError(
            f"{name} must have {dims} dimension{plural}, got shape {tuple(value.shape)}"
        )
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
        hint = "; declare a larger hidden or a wider dtype" if x.shape[1] else ""
        raise ValueError(
            f"{name} must have from 1 element to the declared {config.payload_bytes} bytes a row "
            f"(hidden {config.hidden} x {config.dtype}), got {x.shape[1]} x {x.dtype}{more} = "
            f"{num_bytes}{hint}"
        )
    return num_bytes


def _check_same(name: str, what: str, rank: int, value: Any, first: Any) -> None:
    if value != first:
        raise ValueError(
            f"{name} must have one {what} on all ranks, got {first} at rank 0 and {value} at "
            f"rank {rank}"
        )
