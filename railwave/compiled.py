"""The two verbs as operators of torch, for `torch.compile`: static shapes, no graph break.

An operator takes tensors and numbers only, so a communicator is known by its number, and what a
combine needs of a dispatch travels as the tensors that `Handle` holds. Gradients are those of
`railwave.autograd`. A call that has no static shapes breaks the graph and runs as it is.

Letters: T tokens, H hidden, K top-k.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.library import custom_op, register_autograd

from railwave.autograd import rows_of_places
from railwave.config import Config
from railwave.exchange.words import payload_bytes
from railwave.handle import Handle, Received
from railwave.kernels.shape import make_format

# What runs an operator, by number: a `Communicator`, as long as somebody holds it.
runners: WeakValueDictionary[int, Any] = WeakValueDictionary()

# The fields of a `Handle` that the operators pass on, those of rows by expert last.
TABLES = (
    *("received", "record_token", "num_records", "proxy", "slot", "own_rows", "in_rows"),
    *("out_load", "in_load", "quota", "rail_records", "counts", "topk_idx", "topk_weights"),
)
GROUP_TABLES = ("places", "offsets")


def uncompiled(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Break a graph that is being made, and call a function as if nothing were compiled."""
    from railwave._uncompiled import call

    return call(function, *args, **kwargs)


def dispatch(
    number: int,
    config: Config,
    exchange: Any,
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    extras: Sequence[torch.Tensor],
    path: str | None,
    expert_alignment: int | None,
    zero_padding: bool,
) -> Received:
    """Dispatch inside a compiled region, with static shapes.

    Args:
        number, config, exchange: of the communicator.

        The others as `Communicator.dispatch`.
    """
    alignment, path = expert_alignment or 0, path or "joint"
    trained = torch.is_grad_enabled()
    form = (number, path, alignment, zero_padding or (trained and alignment > 0))
    outputs = torch.ops.railwave.dispatch(x, topk_idx, topk_weights, list(extras), *form)
    rows, others = outputs[0], outputs[1 : 1 + len(extras)]
    tables = _named(outputs[1 + len(extras) :], alignment)
    num_experts = config.experts_per_rank[exchange.pe]
    num_bytes = payload_bytes((x, *extras))
    handle = Handle(
        path=path,
        num_tokens=x.shape[0],
        num_rows=rows.shape[0],
        max_rows=config.max_recv_rows,
        row_words=make_format(num_bytes, topk_idx.shape[1], config.topo.gpus_per_node).META,
        exchange=exchange,
        epoch=0,
        static_shapes=True,
        alignment=alignment or 1,
        **tables,
    )
    if trained:
        rows = _rows_that_came(rows, tables["counts"])
    return Received(
        x=rows,
        topk_idx=tables["topk_idx"],
        topk_weights=tables["topk_weights"],
        num_rows=tables["counts"][0],
        num_tokens_per_expert=tables["counts"][1 : 1 + num_experts],
        handle=handle,
        extras=tuple(others),
        expert_offsets=tables["offsets"][: 1 + num_experts] if alignment else None,
    )


def repeat(number: int, x: torch.Tensor, handle: Handle, zero_padding: bool) -> Received:
    """Repeat the dispatch of a handle inside a compiled region."""
    by_expert = handle.places is not None
    rows = torch.ops.railwave.repeat(
        *(x, _tables(handle), number, handle.path, handle.row_words),
        *(handle.alignment if by_expert else 0, zero_padding),
    )
    counts, ends = handle.counts, handle.exchange.config.experts_per_rank[handle.exchange.pe] + 1
    return Received(
        x=rows,
        topk_idx=handle.topk_idx,
        topk_weights=handle.topk_weights,
        num_rows=counts[0],
        num_tokens_per_expert=counts[1:ends],
        handle=handle,
        expert_offsets=handle.offsets[:ends] if by_expert else None,
    )


def combine(
    number: int,
    out: torch.Tensor,
    handle: Handle,
    *,
    weights: torch.Tensor | None,
    bias: Sequence[torch.Tensor],
    wire_dtype: torch.dtype | None,
) -> torch.Tensor:
    """Combine inside a compiled region; the arguments as `Communicator.combine`."""
    by_expert = handle.places is not None
    return torch.ops.railwave.combine(
        *(out, weights, list(bias), _tables(handle), number, handle.path, handle.num_tokens),
        *(handle.row_words, handle.alignment if by_expert else 0, wire_dtype, False),
    )


@custom_op("railwave::dispatch", mutates_args=())
def _dispatch(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    extras: list[torch.Tensor],
    number: int,
    path: str,
    alignment: int,
    zero_padding: bool,
) -> list[torch.Tensor]:
    """Return the rows of x and of extras, then what `TABLES` names."""
    received = _runner(number)._dispatch(
        *(x, topk_idx, topk_weights),
        extras=extras,
        path=path,
        static_shapes=True,
        expert_alignment=alignment or None,
        zero_padding=zero_padding,
    )
    return _no_views([received.x, *received.extras, *_tables(received.handle)])


@_dispatch.register_fake
def _(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    extras: list[torch.Tensor],
    number: int,
    path: str,
    alignment: int,
    zero_padding: bool,
) -> list[torch.Tensor]:
    runner = _runner(number)
    config, K = runner.config, topk_idx.shape[1]
    S, rows = config.shape, config.max_recv_rows
    entries, counts = min(K, S.G), (1 + S.RANK_EXPERTS,)
    given = rows
    if alignment:
        given = config.most_rows_by_expert(runner.rank, rows, K, alignment)
    of_row = (given,) if alignment else (given, K)
    sizes = {
        **{"received": counts, "num_records": (S.N,), "counts": counts, "offsets": counts},
        **dict.fromkeys(("record_token", "proxy", "slot"), (S.N, S.T)),
        **{"own_rows": (S.T, entries), "in_rows": (S.N, S.PROXY_RECORDS, entries)},
        **dict.fromkeys(("out_load", "in_load"), (S.N, S.G)),
        **dict.fromkeys(("quota", "rail_records"), (S.N, S.R)),
        **{"topk_idx": of_row, "topk_weights": of_row, "places": (rows, K)},
    }
    dtypes = {"topk_idx": topk_idx.dtype, "topk_weights": torch.float32}
    names = (*TABLES, *GROUP_TABLES) if alignment else TABLES
    return [
        *(part.new_empty(given, part.shape[1]) for part in (x, *extras)),
        *(x.new_empty(sizes[name], dtype=dtypes.get(name, torch.int32)) for name in names),
    ]


@custom_op("railwave::repeat", mutates_args=())
def _repeat(
    x: torch.Tensor,
    tables: list[torch.Tensor],
    number: int,
    path: str,
    row_words: int,
    alignment: int,
    zero_padding: bool,
) -> torch.Tensor:
    """Return the rows of x, sent as the dispatch of these tables sent its own."""
    runner = _runner(number)
    handle = _handle(runner, tables, path, x.shape[0], row_words, alignment)
    return runner._dispatch(x, handle=handle, zero_padding=zero_padding).x.contiguous()


@_repeat.register_fake
def _(
    x: torch.Tensor,
    tables: list[torch.Tensor],
    number: int,
    path: str,
    row_words: int,
    alignment: int,
    zero_padding: bool,
) -> torch.Tensor:
    return x.new_empty(_named(tables, alignment)["topk_idx"].shape[0], x.shape[1])


@custom_op("railwave::combine", mutates_args=())
def _combine(
    out: torch.Tensor,
    weights: torch.Tensor | None,
    bias: list[torch.Tensor],
    tables: list[torch.Tensor],
    number: int,
    path: str,
    num_tokens: int,
    row_words: int,
    alignment: int,
    wire_dtype: torch.dtype | None,
    of_gradients: bool,
) -> torch.Tensor:
    """Return the sums; `of_gradients`: out is of any size."""
    runner = _runner(number)
    handle = _handle(runner, tables, path, num_tokens, row_words, alignment)
    if of_gradients:
        return runner._combine(out, handle, checked=True)
    return runner._combine(out, handle, weights=weights, bias=bias, wire_dtype=wire_dtype)


@_combine.register_fake
def _(
    out: torch.Tensor,
    weights: torch.Tensor | None,
    bias: list[torch.Tensor],
    tables: list[torch.Tensor],
    number: int,
    path: str,
    num_tokens: int,
    row_words: int,
    alignment: int,
    wire_dtype: torch.dtype | None,
    of_gradients: bool,
) -> torch.Tensor:
    return out.new_empty(num_tokens, out.shape[1])


def _dispatch_context(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    x, _, weights, extras, number, path, alignment, _ = inputs
    ctx.save_for_backward(*output[1 + len(extras) :])
    ctx.form, ctx.num_extras, ctx.weights_dtype = (
        (number, path, alignment),
        len(extras),
        weights.dtype,
    )
    num_bytes = payload_bytes((x, *extras))
    config = _runner(number).config
    fmt = make_format(num_bytes, weights.shape[1], config.topo.gpus_per_node)
    ctx.num_tokens, ctx.row_words = x.shape[0], fmt.META


def _dispatch_backward(ctx: Any, grads: list[torch.Tensor | None]) -> tuple[Any, ...]:
    (number, path, alignment), tables = ctx.form, list(ctx.saved_tensors)
    size = (number, path, ctx.num_tokens, ctx.row_words)
    dx = dw = None
    if grads[0] is not None and ctx.needs_input_grad[0]:
        dx = torch.ops.railwave.combine(
            *(grads[0].contiguous(), None, [], tables, *size, alignment, None, True)
        )
    of_weights = grads[1 + ctx.num_extras + TABLES.index("topk_weights")]
    if of_weights is not None and ctx.needs_input_grad[2]:
        named = _named(tables, alignment)
        if alignment:
            rows = rows_of_places(named["places"], named["received"], of_weights)
            tables = tables[: -len(GROUP_TABLES)]
        else:
            rows = torch.where(named["topk_idx"] >= 0, of_weights, 0)
        dw = torch.ops.railwave.combine(
            *(rows.contiguous(), None, [], tables, *size, 0, None, True)
        ).to(ctx.weights_dtype)
    return dx, None, dw, [None] * ctx.num_extras, None, None, None, None


register_autograd("railwave::dispatch", _dispatch_backward, setup_context=_dispatch_context)


def _combine_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    out, weights, bias, tables, number, path, _, row_words, alignment, _, _ = inputs
    ctx.form, ctx.weighed = (number, path, row_words, alignment), weights is not None
    ctx.biases = [(each.dim(), each.dtype) for each in bias]
    ctx.num_tables = len(tables)
    ctx.save_for_backward(*tables, *((out, weights) if ctx.weighed else ()))


def _combine_backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    (number, path, row_words, alignment), saved = ctx.form, list(ctx.saved_tensors)
    tables, weighed = saved[: ctx.num_tables], saved[ctx.num_tables :]
    d_out = d_weights = None
    if any(ctx.needs_input_grad[:2]):
        form = (number, path, row_words, alignment, alignment > 0)
        rows = torch.ops.railwave.repeat(dy.contiguous(), tables, *form)
        named = _named(tables, alignment)
        d_out = rows = _rows_that_came(rows, named["counts"])
        if ctx.weighed:
            out, weights = weighed
            d_out = (rows.float() * weights[:, None]).to(out.dtype)
            d_weights = (rows.float() * out.float()).sum(dim=1)
            if alignment:
                real = named["topk_idx"] >= 0
            else:
                real = torch.arange(len(d_weights), device=rows.device) < named["counts"][0]
            d_weights = torch.where(real, d_weights, 0)
    d_bias = [(dy if dims == 2 else dy.float().sum(dim=0)).to(dtype) for dims, dtype in ctx.biases]
    return d_out, d_weights, d_bias, [None] * ctx.num_tables, *[None] * 7


register_autograd("railwave::combine", _combine_backward, setup_context=_combine_context)


def _runner(number: int) -> Any:
    """Return the communicator of a number."""
    runner = runners.get(number)
    if runner is None:
        raise RuntimeError(
            "the communicator of this compiled call is gone: keep it, and compile anew"
        )
    return runner


def _tables(handle: Handle) -> list[torch.Tensor]:
    names = TABLES if handle.places is None else (*TABLES, *GROUP_TABLES)
    return [getattr(handle, name) for name in names]


def _named(tables: Sequence[torch.Tensor], alignment: int) -> dict[str, torch.Tensor]:
    names = (*TABLES, *GROUP_TABLES) if alignment else TABLES
    return dict(zip(names, tables, strict=True))


def _handle(
    runner: Any,
    tables: list[torch.Tensor],
    path: str,
    num_tokens: int,
    row_words: int,
    alignment: int,
) -> Handle:
    """Put a handle together again."""
    named, exchange = _named(tables, alignment), runner._exchange
    return Handle(
        path=path,
        num_tokens=num_tokens,
        num_rows=named["topk_idx"].shape[0],
        max_rows=runner.config.max_recv_rows,
        row_words=row_words,
        exchange=exchange,
        epoch=0,
        static_shapes=True,
        serial=exchange.serial,
        stream=exchange.stream(),
        alignment=alignment or 1,
        **named,
    )


def _rows_that_came(rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return the rows, 0 where static shapes leave them undefined."""
    row = torch.arange(rows.shape[0], device=rows.device)
    return torch.where((row < counts[0])[:, None], rows, 0)


def _no_views(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copy what shares memory with another: an operator's results must not."""
    seen: set[int] = set()
    apart = []
    for tensor in tensors:
        memory = tensor.untyped_storage().data_ptr()
        again = memory in seen and tensor.numel() > 0
        apart.append(tensor.clone() if again or not tensor.is_contiguous() else tensor)
        seen.add(memory)
    return [t.contiguous() for t in apart]
