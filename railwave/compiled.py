"""The two verbs as operators of torch, for `torch.compile`: static shapes, no graph break.

An operator takes tensors and numbers only, so a communicator is known by its name, and what a
combine needs of a dispatch travels as the tensors that `Handle` holds, the number of its call among
them, which ranks compare. On a GPU there is no such tensor, since one on the host would keep a
graph from being captured: that a handle is the same call's on all ranks, the program says there.
Gradients are those of `railwave.autograd`. A call that has no static shapes breaks the graph and
runs as it is.

An operator is a phase of all ranks. Compilers keep the order of what depends on one another, so
phases of a backward pass that do not are chained by `after`.

Letters: T tokens, H hidden, K top-k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.library import custom_op, register_autograd

from railwave.autograd import is_row, of_bias, of_weighed, rows_of_places, rows_that_came
from railwave.config import Config
from railwave.exchange.words import payload_bytes
from railwave.handle import Handle, Received
from railwave.kernels.shape import make_format

# What runs an operator, by name: a `Communicator`, as long as somebody holds it.
runners: WeakValueDictionary[str, Any] = WeakValueDictionary()

# The fields of a `Handle` that the operators pass on, those of rows by expert last.
TABLES = (
    *("received", "record_token", "num_records", "proxy", "slot", "own_rows", "in_rows"),
    *("out_load", "in_load", "quota", "rail_records", "counts", "topk_idx", "topk_weights"),
    *("put_words", "epoch_tensor"),
)
PLACE_TABLES = ("places", "offsets")


def dispatch(
    world: str,
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
    grads: str,
) -> Received:
    """Dispatch inside a compiled region, with static shapes.

    Args:
        world, config, exchange: of the communicator.
        grads: what needs gradients, the same on all ranks.

        The others as `Communicator.dispatch`.
    """
    alignment, path = expert_alignment or 0, path or "joint"
    trained = torch.is_grad_enabled()
    form = (world, path, alignment, zero_padding or (trained and alignment > 0), grads)
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
        alignment=alignment,
        **tables,
    )
    if trained:
        rows = rows_that_came(rows, tables["counts"][0])
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


def repeat(world: str, x: torch.Tensor, handle: Handle, zero_padding: bool, grads: str) -> Received:
    """Repeat the dispatch of a handle inside a compiled region.

    Args:
        x: (T, H); handle, zero_padding: as `Communicator.dispatch`.
        grads: what needs gradients, the same on all ranks.
    """
    trained = torch.is_grad_enabled()
    zero_padding = zero_padding or (trained and handle.alignment > 0)
    form = (world, handle.path, handle.num_tokens, handle.row_words, handle.alignment)
    form += (zero_padding, grads)
    rows = torch.ops.railwave.repeat(x, _tables(handle), *form)
    counts, ends = handle.counts, handle.exchange.config.experts_per_rank[handle.exchange.pe] + 1
    if trained:
        rows = rows_that_came(rows, counts[0])
    return Received(
        x=rows,
        topk_idx=handle.topk_idx,
        topk_weights=handle.topk_weights,
        num_rows=counts[0],
        num_tokens_per_expert=counts[1:ends],
        handle=handle,
        expert_offsets=handle.offsets[:ends] if handle.alignment else None,
    )


def combine(
    world: str,
    out: torch.Tensor,
    handle: Handle,
    *,
    weights: torch.Tensor | None,
    bias: Sequence[torch.Tensor],
    wire_dtype: torch.dtype | None,
) -> torch.Tensor:
    """Combine inside a compiled region: (T, H).

    Args:
        bias: none, one or two; the others as `Communicator.combine`.
    """
    form = (world, handle.path, handle.num_tokens, handle.row_words, handle.alignment)
    tables = _tables(handle)
    return torch.ops.railwave.combine(
        out, weights, list(bias), tables, *form, wire_dtype=wire_dtype, of_gradients=False, after=[]
    )


def combine_weights(world: str, topk_weights: torch.Tensor, handle: Handle) -> torch.Tensor:
    """Bring weights of rows back inside a compiled region: (T, K).

    Args:
        topk_weights: of the shape of the handle's.
    """
    rows, tables = topk_weights.detach(), _tables(handle)
    if handle.alignment:
        rows = rows_of_places(handle.places, handle.received, rows)
        tables = tables[: -len(PLACE_TABLES)]
    form = (world, handle.path, handle.num_tokens, handle.row_words, 0)
    more = {"wire_dtype": None, "of_gradients": True, "after": []}
    return torch.ops.railwave.combine(rows.contiguous(), None, [], tables, *form, **more)


@custom_op("railwave::dispatch", mutates_args=())
def _dispatch(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    extras: list[torch.Tensor],
    world: str,
    path: str,
    alignment: int,
    zero_padding: bool,
    grads: str,
) -> list[torch.Tensor]:
    """Return the rows of x and of extras, then what `TABLES` names."""
    received = _runner(world)._dispatch(
        *(x, topk_idx, topk_weights),
        extras=extras,
        path=path,
        static_shapes=True,
        expert_alignment=alignment or None,
        zero_padding=zero_padding,
        grads=grads,
        repeats=False,  # whose tables share memory, as those of an operator must not
    )
    return _no_views([received.x, *received.extras, *_tables(received.handle)])


@_dispatch.register_fake
def _(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    extras: list[torch.Tensor],
    world: str,
    path: str,
    alignment: int,
    zero_padding: bool,
    grads: str,
) -> list[torch.Tensor]:
    runner = _runner(world)
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
        **{"put_words": (2, S.N + 1), "epoch_tensor": (1,)},
    }
    dtypes = {"topk_idx": topk_idx.dtype, "topk_weights": torch.float32}
    dtypes |= dict.fromkeys(("put_words", "epoch_tensor"), torch.int64)
    names = (*TABLES, *PLACE_TABLES) if alignment else TABLES
    return [
        *(part.new_empty(given, part.shape[1]) for part in (x, *extras)),
        *(x.new_empty(sizes[name], dtype=dtypes.get(name, torch.int32)) for name in names),
    ]


@custom_op("railwave::repeat", mutates_args=())
def _repeat(
    x: torch.Tensor,
    tables: list[torch.Tensor],
    world: str,
    path: str,
    num_tokens: int,
    row_words: int,
    alignment: int,
    zero_padding: bool,
    grads: str,
) -> torch.Tensor:
    """Return the rows of x, sent as the dispatch of these tables sent its own."""
    runner = _runner(world)
    handle = _handle(runner, tables, path, num_tokens, row_words, alignment)
    form = {"zero_padding": zero_padding, "grads": grads}
    return runner._dispatch(x, handle=handle, **form).x.contiguous()


@_repeat.register_fake
def _(
    x: torch.Tensor,
    tables: list[torch.Tensor],
    world: str,
    path: str,
    num_tokens: int,
    row_words: int,
    alignment: int,
    zero_padding: bool,
    grads: str,
) -> torch.Tensor:
    return x.new_empty(_named(tables, alignment)["topk_idx"].shape[0], x.shape[1])


@custom_op("railwave::combine", mutates_args=())
def _combine(
    out: torch.Tensor,
    weights: torch.Tensor | None,
    bias: list[torch.Tensor],
    tables: list[torch.Tensor],
    world: str,
    path: str,
    num_tokens: int,
    row_words: int,
    alignment: int,
    wire_dtype: torch.dtype | None,
    of_gradients: bool,
    after: list[torch.Tensor],
) -> torch.Tensor:
    """Return the sums; `of_gradients`: out is of any size."""
    runner = _runner(world)
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
    world: str,
    path: str,
    num_tokens: int,
    row_words: int,
    alignment: int,
    wire_dtype: torch.dtype | None,
    of_gradients: bool,
    after: list[torch.Tensor],
) -> torch.Tensor:
    return out.new_empty(num_tokens, out.shape[1])


def _dispatch_context(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    x, _, weights, extras, world, path, alignment, *_ = inputs
    ctx.save_for_backward(*output[1 + len(extras) :])
    ctx.form, ctx.num_extras, ctx.weights_dtype = (
        (world, path, alignment),
        len(extras),
        weights.dtype,
    )
    num_bytes = payload_bytes((x, *extras))
    config = _runner(world).config
    fmt = make_format(num_bytes, weights.shape[1], config.topo.gpus_per_node)
    ctx.num_tokens, ctx.row_words = x.shape[0], fmt.META


def _dispatch_backward(ctx: Any, grads: list[torch.Tensor | None]) -> tuple[Any, ...]:
    tables, alignment = list(ctx.saved_tensors), ctx.form[2]
    dx = dw = None
    if grads[0] is not None and ctx.needs_input_grad[0]:
        dx = _bring_back(grads[0], tables, ctx, alignment)
    of_weights = grads[1 + ctx.num_extras + TABLES.index("topk_weights")]
    if of_weights is not None and ctx.needs_input_grad[2]:
        named = _named(tables, alignment)
        if alignment:
            rows = rows_of_places(named["places"], named["received"], of_weights)
            tables = tables[: -len(PLACE_TABLES)]
        else:
            rows = torch.where(named["topk_idx"] >= 0, of_weights, 0)
        after = [] if dx is None else [dx]
        dw = _bring_back(rows, tables, ctx, 0, after).to(ctx.weights_dtype)
    return dx, None, dw, [None] * ctx.num_extras, *[None] * 5


def _bring_back(
    rows: torch.Tensor,
    tables: list[torch.Tensor],
    ctx: Any,
    alignment: int,
    after: Sequence[torch.Tensor] = (),
) -> torch.Tensor:
    """Sum gradients of rows at their tokens; `after`: of the phase before, not read."""
    world, path, _ = ctx.form
    form = (world, path, ctx.num_tokens, ctx.row_words, alignment)
    more = {"wire_dtype": None, "of_gradients": True, "after": list(after)}
    return torch.ops.railwave.combine(rows.contiguous(), None, [], tables, *form, **more)


register_autograd("railwave::dispatch", _dispatch_backward, setup_context=_dispatch_context)


def _repeat_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, tables, world, path, num_tokens, row_words, alignment, *_ = inputs
    ctx.save_for_backward(*tables)
    ctx.form, ctx.num_tokens, ctx.row_words = (world, path, alignment), num_tokens, row_words


def _repeat_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    tables = list(ctx.saved_tensors)
    dx = _bring_back(grad, tables, ctx, ctx.form[2]) if ctx.needs_input_grad[0] else None
    return dx, [None] * len(tables), *[None] * 7


register_autograd("railwave::repeat", _repeat_backward, setup_context=_repeat_context)


def _combine_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    out, weights, bias, tables, world, path, num_tokens, row_words, alignment, *_ = inputs
    ctx.form, ctx.weighed = (world, path, num_tokens, row_words, alignment), weights is not None
    ctx.biases = [(each.dim(), each.dtype) for each in bias]
    ctx.num_tables, ctx.num_after = len(tables), len(inputs[-1])
    ctx.save_for_backward(*tables, *((out, weights) if ctx.weighed else ()))


def _combine_backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    alignment, saved = ctx.form[-1], list(ctx.saved_tensors)
    tables, weighed = saved[: ctx.num_tables], saved[ctx.num_tables :]
    d_out = d_weights = None
    if any(ctx.needs_input_grad[:2]):
        form = (*ctx.form, alignment > 0, "")
        named = _named(tables, alignment)
        num_rows = named["counts"][0]
        rows = torch.ops.railwave.repeat(dy.contiguous(), tables, *form)
        d_out = rows = rows_that_came(rows, num_rows)
        if ctx.weighed:
            d_out, d_weights = of_weighed(rows, *weighed, is_row(named["topk_idx"], num_rows))
    wanted = zip(ctx.biases, ctx.needs_input_grad[2], strict=True)
    d_bias = [of_bias(dy, *bias) if wants else None for bias, wants in wanted]
    return d_out, d_weights, d_bias, [None] * ctx.num_tables, *[None] * 7, [None] * ctx.num_after


register_autograd("railwave::combine", _combine_backward, setup_context=_combine_context)


def _runner(world: str) -> Any:
    """Return the communicator of a name."""
    runner = runners.get(world)
    if runner is None:
        raise RuntimeError(
            "the communicator of this compiled call is gone: keep it, and compile anew"
        )
    return runner


def _tables(handle: Handle) -> list[torch.Tensor]:
    names = TABLES if handle.places is None else (*TABLES, *PLACE_TABLES)
    none = handle.put_words.new_empty(1)  # in the place of a number, not read
    return [none if getattr(handle, name) is None else getattr(handle, name) for name in names]


def _named(tables: Sequence[torch.Tensor], alignment: int) -> dict[str, torch.Tensor]:
    names = (*TABLES, *PLACE_TABLES) if alignment else TABLES
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
    named["put_words"] = named["put_words"].clone()  # which a combine counts in
    handle = Handle(
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
        alignment=alignment,
        **named,
    )
    return with_epoch(handle)


def with_epoch(handle: Handle) -> Handle:
    """Return a handle of a graph with the number of its call, where it holds that."""
    if handle.epoch or handle.epoch_tensor is None or handle.exchange.device_decides(True):
        return handle
    return replace(handle, epoch=int(handle.epoch_tensor))


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
