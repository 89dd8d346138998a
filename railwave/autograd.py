"""Gradients: the backward of a dispatch is a combine, that of a combine a dispatch.

With row r of token t on rank w, and y the sum over a token's rows:

    dispatch: x_r = x_t, w_rk = w_tk on one rank        dx_t = sum of dx_r, dw_tk = sum of dw_rk
    combine:  y_t = sum of v_r o_r + bias               do_r = v_r dy_t, dv_r = <dy_t, o_r>

All ranks take part in every backward phase, in the order of the forward ones turned round: so what
needs gradients must be the same on all ranks (calls are compared), and every rank's loss must
depend on what its combine returned. A rank that received no row still takes part: its combine leads
to the dispatch by the handle's `anchor`.

One `Function` serves all drivers: tensors are lists over the ranks that a driver runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import torch

from railwave.handle import Handle, Received
from railwave.turns import keep_until_used

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True)
class Verbs:
    """Dispatch and combine without gradients, of all ranks that a driver runs."""

    dispatch: Callable[[Tensors, Sequence[Handle]], list[Received]]  # repeats
    combine: Callable[[Tensors, Sequence[Handle]], list[torch.Tensor]]


def named(**tensors: Any) -> str:
    """Name those of the tensors that need a gradient, here and now; "" for none."""
    if not torch.is_grad_enabled():
        return ""
    needs = [n for n, t in tensors.items() if isinstance(t, torch.Tensor) and t.requires_grad]
    return " and ".join(needs)


def named_in_lists(**lists: Any) -> str:
    """Name those of the lists over ranks of which a tensor needs a gradient; "" for none."""
    return " and ".join(
        name
        for name, values in lists.items()
        if isinstance(values, Sequence) and any(named(value=v) for v in values)
    )


def dispatch(
    verbs: Verbs, run: Callable[[], list[Received]], xs: Tensors, topk_weights: Sequence[Any]
) -> list[Received]:
    """Run a dispatch so that gradients flow to xs and topk_weights.

    Args:
        run: the dispatch of these tensors, which need not be differentiable.
        topk_weights: None, each, where a handle's routing is repeated.
    """
    given = [weights for weights in topk_weights if weights is not None]
    made: list[Received] = []
    outputs = _Dispatch.apply(verbs, run, made, len(xs), *xs, *given)
    n = len(made)
    parts = [outputs[i * n : (i + 1) * n] for i in range(3)]
    return [
        replace(
            received,
            x=x,
            topk_weights=weights,
            handle=replace(received.handle, anchor=anchor),
        )
        for received, x, weights, anchor in zip(made, *parts, strict=True)
    ]


def combine(
    verbs: Verbs,
    run: Callable[[], list[torch.Tensor]],
    outs: Tensors,
    handles: Sequence[Handle],
    weights: Sequence[Any],
    biases: Sequence[Sequence[torch.Tensor]],
) -> list[torch.Tensor]:
    """Run a combine so that gradients flow to its tensors, and its handles' dispatch takes part.

    Args:
        weights: a tensor or None, each.
        biases: of each rank, up to two.
    """
    # What is no handle, the run refuses.
    anchors = [getattr(handle, "anchor", None) for handle in handles]
    flat = [(rank, bias) for rank, given in enumerate(biases) for bias in given]
    ranks = [rank for rank, _ in flat]
    inputs = (*outs, *anchors, *weights, *(bias for _, bias in flat))
    return list(_Combine.apply(verbs, run, handles, ranks, *inputs))


class _FirstOrder(torch.autograd.Function):
    """Hand a tensor on as one that depends on others, of which it has no gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, *others: torch.Tensor | None) -> torch.Tensor:
        return tensor.detach()  # not a view, which torch would not let a caller write to

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise RuntimeError(
            "gradients of dispatch and combine are first order: one of them, made with "
            "create_graph=True, was differentiated in turn"
        )


def _lead_to(inputs: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """Return an empty tensor that depends on a function's inputs, for its `first_order`."""
    with torch.enable_grad():
        return _FirstOrder.apply(torch.empty(0), *inputs)


def first_order(backward: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """Let what a backward pass returns raise where it is differentiated in turn.

    It depends on the function's inputs, to which `ctx.lead` leads, and on the gradients that came
    in. torch's `once_differentiable` leads to neither, so a derivative of more than this would lack
    a part and say nothing. `lead` is no saved tensor: to look at one makes a checkpoint run again.
    """

    @wraps(backward)
    def run(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        in_turn = torch.is_grad_enabled()
        with torch.no_grad():
            found = backward(ctx, *grads)
        if not in_turn:
            return found
        return tuple(f if f is None else _FirstOrder.apply(f, ctx.lead, *grads) for f in found)

    return run


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, verbs: Verbs, run: Any, made: list[Received], n: int, *inputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        made += run()
        ctx.verbs, ctx.handles = verbs, [received.handle for received in made]
        ctx.lead = _lead_to(inputs)
        ctx.dtypes = [tensor.dtype for tensor in inputs]
        ctx.widths = [received.x.shape[1] for received in made]
        ctx.set_materialize_grads(False)
        repeats = len(inputs) == n
        rows, weights = zip(*(_handed_out(received, repeats) for received in made), strict=True)
        if repeats:
            ctx.mark_non_differentiable(*weights)
        else:
            ctx.save_for_backward(*(received.topk_idx for received in made))  # an edit would show
        anchors = [torch.empty(0, device=received.x.device) for received in made]
        return (*rows, *weights, *anchors)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        handles, n, wanted = ctx.handles, len(ctx.handles), ctx.needs_input_grad[4:]
        found: list[torch.Tensor | None] = [None] * len(wanted)
        if any(wanted[:n]):
            of_xs = zip(grads[:n], handles, ctx.dtypes[:n], ctx.widths, strict=True)
            found[:n] = ctx.verbs.combine([_or_zeros(*each) for each in of_xs], handles)
        if any(wanted[n:]):
            triples = zip(grads[n : 2 * n], handles, ctx.saved_tensors, strict=True)
            rows = [_of_weights(*each) for each in triples]
            sums = ctx.verbs.combine(rows, [handle.by_token for handle in handles])
            found[n:] = [s.to(dtype) for s, dtype in zip(sums, ctx.dtypes[n:], strict=True)]
        return (None, None, None, None, *found)


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        verbs: Verbs,
        run: Any,
        handles: Sequence[Handle],
        bias_ranks: list[int],
        *inputs: torch.Tensor | None,
    ) -> tuple[torch.Tensor, ...]:
        n = len(handles)
        ctx.verbs, ctx.handles, ctx.bias_ranks = verbs, handles, bias_ranks
        ctx.lead = _lead_to(inputs)
        ctx.anchors = inputs[n : 2 * n]
        ctx.biases = [(bias.dim(), bias.dtype) for bias in inputs[3 * n :]]  # not what they hold
        weights = inputs[2 * n : 3 * n]
        weighed = [(out, w) for out, w in zip(inputs[:n], weights, strict=True) if w is not None]
        ctx.weighed = [w is not None for w in weights]
        ctx.save_for_backward(*(tensor for pair in weighed for tensor in pair))
        return tuple(run())

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        n, dys = len(ctx.handles), [_dense(grad) for grad in grads]
        found: list[torch.Tensor | None] = [None] * (3 * n)
        if any(ctx.needs_input_grad[4 : 4 + 3 * n]):
            saved = list(ctx.saved_tensors)
            for i, received in enumerate(ctx.verbs.dispatch(dys, ctx.handles)):
                rows = _rows_that_came(received)
                found[i] = rows
                if ctx.weighed[i]:
                    out, weights = saved.pop(0), saved.pop(0)
                    there = is_row(received.topk_idx, received.num_rows)
                    found[i], found[2 * n + i] = of_weighed(rows, out, weights, there)
            found[n : 2 * n] = [a if a is None else torch.zeros_like(a) for a in ctx.anchors]
        of_biases = [
            of_bias(dys[rank], *bias) if wanted else None
            for rank, bias, wanted in zip(
                ctx.bias_ranks, ctx.biases, ctx.needs_input_grad[4 + 3 * n :], strict=True
            )
        ]
        return (None, None, None, None, *found, *of_biases)


def _of_weights(grad: torch.Tensor | None, handle: Handle, ids: torch.Tensor) -> torch.Tensor:
    """Return the gradients of a rank's weights as (tokens, K), as weights arrived.

    The weight of an expert elsewhere is 0 here, whatever it was: no gradient leads there.
    """
    if handle.places is None:
        return torch.where(ids >= 0, _or_zeros(grad, handle, torch.float32, ids.shape[1]), 0)
    return rows_of_places(handle.places, handle.received, ids * 0.0 if grad is None else grad)


def rows_of_places(
    places: torch.Tensor, received: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """Bring values of rows by expert, (rows,), to (tokens, K): 0 for experts elsewhere.

    Args:
        places, received: of the `Handle`.
    """
    row = torch.arange(len(places), device=values.device)
    places = torch.where((row < received[0])[:, None], places, -1)
    places = torch.where(places < -1, -2 - places, places)  # of an expert that is named twice
    if not len(values):
        return torch.zeros_like(places, dtype=values.dtype)
    # After a phase that failed on a GPU they may be anything: an index must not leave the table.
    return torch.where(places >= 0, values[places.clamp(0, len(values) - 1)], 0)


def is_row(topk_idx: torch.Tensor, num_rows: torch.Tensor) -> torch.Tensor:
    """Say which rows are of a token: (rows,) bool.

    Args:
        topk_idx, num_rows: of the `Received`.
    """
    if topk_idx.dim() == 1:
        return topk_idx >= 0
    return torch.arange(topk_idx.shape[0], device=topk_idx.device) < num_rows


def of_weighed(
    rows: torch.Tensor, out: torch.Tensor, weights: torch.Tensor, there: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of results and of the weights that they were multiplied by.

    Args:
        rows: (rows, H), of the products.
        there: (rows,) bool, which rows are of a token: what others hold may be NaN.
    """
    d_out = torch.where(there[:, None], rows.float() * weights[:, None], 0).to(out.dtype)
    return d_out, torch.where(there, (rows.float() * out.float()).sum(dim=1), 0)


def of_bias(dy: torch.Tensor, dims: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the gradient of a bias of so many dimensions: of every token, or one for all."""
    return (dy if dims == 2 else dy.float().sum(dim=0)).to(dtype)


def _or_zeros(
    grad: torch.Tensor | None, handle: Handle, dtype: torch.dtype, width: int
) -> torch.Tensor:
    """Return the gradient of a rank's rows; zeros where its loss does not depend on them."""
    if grad is not None:
        return _dense(grad)
    device = handle.received.device
    return torch.zeros(handle.num_rows, width, dtype=dtype, device=device)


def _dense(grad: torch.Tensor) -> torch.Tensor:
    """Return a gradient as a phase takes it."""
    return grad if grad.layout == torch.strided else grad.to_dense()


def _handed_out(received: Received, repeats: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a rank's rows and weights as the caller gets them.

    What is done to them is done on the stream of the dispatch, which may come to it later than the
    current one: on that the caller, and a backward pass, use them.

    Args:
        repeats: the weights are those of an earlier dispatch, which has the gradients.
    """
    made_on = received.handle.stream  # None on a CPU
    with torch.cuda.stream(made_on):
        rows, weights = _rows_that_came(received), received.topk_weights
        if repeats:
            weights = weights.clone()
    keep_until_used((rows, weights, received.topk_idx), made_on)
    return rows, weights


def _rows_that_came(received: Received) -> torch.Tensor:
    if not received.handle.static_shapes:
        return received.x
    return rows_that_came(received.x, received.num_rows)


def rows_that_came(x: torch.Tensor, num_rows: torch.Tensor) -> torch.Tensor:
    """Return the rows, 0 where static shapes leave them undefined."""
    came = (torch.arange(x.shape[0], device=x.device) < num_rows)[:, None]
    if x.itemsize == 1:  # float8, of which inductor compiles no `where`
        return torch.where(came, x.view(torch.uint8), 0).view(x.dtype)
    return torch.where(came, x, 0)
