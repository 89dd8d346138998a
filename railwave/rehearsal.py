"""Run every kernel once before anybody waits for it, on GPUs.

A kernel is compiled and loaded at its first launch, which takes seconds, and loading may wait until
kernels that run have ended. So that this never happens while a peer waits, a phase is run for
nothing first, once for each kind of call: as if it had failed, so that no kernel waits for a word,
moves a record or tells anybody (`Exchange.cut_short`).
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from railwave.arguments import SUMMABLE, check_call
from railwave.exchange import PLAIN, Exchange, Options, Stages, combine, dispatch, refuse
from railwave.exchange.words import as_words, words_of
from railwave.handle import Call, Handle
from railwave.heap import Gather, together


class Rehearsal:
    """What this PE has rehearsed."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._kinds: set[Any] = set()  # Triton has a variant of a kernel for each

    def all_declared(self, gather: Gather) -> None:
        """Rehearse calls as declared, on every path. Collective.

        On each host one rank a path goes first; the others find what it compiled.

        Raises:
            RuntimeError: a kernel does not compile or load, on some rank; on all.
        """
        config = self._exchange.config
        # The first call that is taken down (`recorded`) would import it, in seconds, mid-phase.
        importlib.import_module("torch._dynamo")
        hosts = gather(os.uname().nodename)
        place = hosts[: self._exchange.pe].count(hosts[self._exchange.pe])
        for paths in (config.paths[place : place + 1], config.accepted_paths):
            together(gather, "compile and load kernels", partial(self._declared, paths))

    def _declared(self, paths: Iterable[str]) -> None:
        config, device = self._exchange.config, self._exchange.device
        tokens, dtype = min(8, config.max_tokens_per_rank), config.dtype
        x = torch.zeros(tokens, config.hidden, dtype=dtype, device=device)
        topk_idx = torch.zeros(tokens, config.top_k, dtype=torch.int64, device=device)
        weights = torch.zeros(tokens, config.top_k, device=device)
        dtype = dtype if dtype in SUMMABLE else torch.bfloat16
        out = torch.zeros(0, config.payload_bytes // dtype.itemsize, dtype=dtype, device=device)
        for path in paths:
            handle = self.dispatch(check_call(config, x, topk_idx, weights, path))
            if handle and out.shape[1]:
                self.combine(out, handle)
        self._run(refuse(self._exchange))
        torch.cuda.synchronize(device)

    def dispatch(self, call: Call, *, capturing: bool = False) -> Handle | None:
        """Rehearse a kind of dispatch that has not been; return a handle, for a rehearsal.

        Raises:
            RuntimeError: it has not been, and a graph is captured.
        """
        if call.path == "auto":
            for path in self._exchange.config.paths:
                self.dispatch(replace(call, path=path))
        kind = (call.path, call.fmt, call.view, _aligned(words_of(call)))
        places = call.again and call.again.places
        kind += (call.alignment > 0, call.zero_padding and call.alignment > 1)
        kind += (places is not None and places.shape[1],)
        if call.again is None:
            ids = call.topk_idx
            kind += (ids.dtype, ids.is_contiguous(), _aligned(ids), _aligned(call.topk_weights))
        if kind in self._kinds:
            return None
        _check_not_capturing(capturing)
        handle = self._run(dispatch(self._exchange, call)).handle
        self._kinds.add(kind)
        return handle

    def combine(
        self,
        out: torch.Tensor,
        handle: Handle,
        options: Options = PLAIN,
        *,
        capturing: bool = False,
    ) -> None:
        """Rehearse a kind of combine that has not been; raises as `dispatch`."""
        kind = (
            handle.path,
            out.dtype,
            out.shape[1],
            (handle.own_rows.shape[1], handle.row_words),
            handle.static_shapes,
            options.wire_dtype,
            _aligned(as_words(out)),
            handle.places is None or handle.places.shape[1],
            options.weights is None or _aligned(options.weights),
            tuple((each.dtype, each.data_ptr() % 16) for each in options.bias),
        )
        if kind not in self._kinds:
            _check_not_capturing(capturing)
            self._run(combine(self._exchange, out, handle, options))
            self._kinds.add(kind)

    def _run(self, stages: Stages) -> Any:
        with self._exchange.cut_short():
            try:
                while True:
                    next(stages)
            except StopIteration as stop:
                return stop.value


def _check_not_capturing(capturing: bool) -> None:
    if capturing:
        raise RuntimeError(
            "a call of a new kind cannot be captured in a CUDA graph, since its kernels must be "
            "loaded first: make the same call once before"
        )


def _aligned(tensor: torch.Tensor) -> tuple[bool, bool]:
    """Say what Triton knows of a tensor's place, and of that of its rows."""
    return tensor.data_ptr() % 16 == 0, tensor.stride(0) * tensor.itemsize % 16 == 0
