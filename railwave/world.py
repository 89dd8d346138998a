"""All PEs of a world in one process: for notebooks, tests and the demo.

Letters: N nodes, G GPUs a node, W = N * G ranks, E experts, K top-k, T tokens, H hidden.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from railwave import autograd, tracing
from railwave.arguments import biases, check_all_weights, check_combine, check_dispatch
from railwave.compiled_calls import uncompiled
from railwave.config import PATHS, Config
from railwave.cost_table import CostTable, table_for
from railwave.errors import ReceiveOverflowError
from railwave.exchange import (
    PLAIN,
    Exchange,
    Options,
    Stages,
    Wait,
    Waits,
    apart,
    combine,
    dispatch,
)
from railwave.handle import Handle, Received
from railwave.heap import LocalHeap
from railwave.topology import Topology
from railwave.traffic import Traffic, TrafficRecorder

TRANSPORT = "one process"  # of a cost table's fingerprint
DEADLINE_S = 10.0  # no kernel waits here: its words are there before it is launched

_RUNNING = threading.Lock()


class LocalWorld:
    """Run dispatch and combine of all W ranks in this process, on one device.

    The kernels and the stages are those of one process per rank; here they take turns. Arguments
    and results are lists over ranks. One thread at a time, whatever the number of worlds: Triton's
    interpreter is not thread-safe.

    Args:
        topo: the cluster.
        num_experts: E. Expert e lives on rank floor(e * W / E) unless `expert_to_rank` is given.
        top_k: the most experts per token, at most 255.
        hidden: H. With `dtype`, it declares the largest token: a call may use another hidden size
            and dtype as long as hidden * item size fits, and fewer experts per token.
        max_tokens_per_rank: the most tokens one rank dispatches at once.
        dtype: of the declared token.
        expert_to_rank: (E,) ints in [0, W), the rank of each expert.
        staging_records: records per staging buffer on wave paths; a longer slice takes several
            rounds of its wave. Default: the longest slice, at most 8192.
        paths: the paths that dispatch may take. native, rail and granted need staging for all peers
            at once, (N - 1) slices, the others two buffers.
        cost_table: a `CostTable` or its file, made for this configuration; with it, dispatch takes
            path="auto".
        max_recv_rows: the most rows that one rank receives at once: fewer need less memory, and
            static shapes are as large. Default: all tokens of all ranks, which always fit.
        num_sms: the most programs, and so multiprocessors of a GPU, that a launch which moves
            payload may hold (N - 1 at least on native and rail); what runs beside a put holds half
            as many more, or as many. Planning, microseconds long, is not bounded.
        pipeline: pack a round while the one before it is on the wire, and move and sum what stays
            on the node meanwhile; else in turn.
        nic_gbs: for experiments on one host: every rail of every node behaves as a NIC of that
            many GB/s (1e9 bytes/s), each direction. All ranks must share one GPU, or be on CPUs.
            None: none.
        order: which PE of those that can go on runs next; None goes round.
        device: cpu, where Triton interprets the kernels, or one GPU, which all ranks then share.

    Raises:
        TypeError, ValueError: an argument breaks a rule above.

    Attributes:
        traffic: what the last phase put on the rails, counted in the run; None before the first.

    Example:
        >>> topo = Topology(nodes=2, gpus_per_node=2, rails_per_node=2)
        >>> world = LocalWorld(topo, num_experts=4, top_k=1, hidden=2, max_tokens_per_rank=1,
        ...                    dtype=torch.float32)
        >>> xs = [torch.full((1, 2), float(rank)) for rank in range(4)]
        >>> to_expert_3 = [torch.tensor([[3]])] * 4
        >>> received = world.dispatch(xs, to_expert_3, [torch.ones(1, 1)] * 4)
        >>> [len(r.x) for r in received], received[3].x[:, 0].tolist()
        ([0, 0, 0, 4], [0.0, 1.0, 2.0, 3.0])
        >>> ys = world.combine([r.x * 10 for r in received], [r.handle for r in received])
        >>> [y[0, 0].item() for y in ys]
        [0.0, 10.0, 20.0, 30.0]
    """

    def __init__(
        self,
        topo: Topology,
        *,
        num_experts: int,
        top_k: int,
        hidden: int,
        max_tokens_per_rank: int,
        dtype: torch.dtype = torch.bfloat16,
        expert_to_rank: Any = None,
        staging_records: int | None = None,
        paths: Sequence[str] = PATHS,
        cost_table: CostTable | str | os.PathLike | None = None,
        max_recv_rows: int | None = None,
        num_sms: int | None = None,
        pipeline: bool = True,
        nic_gbs: float | None = None,
        order: random.Random | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.config = Config(
            topo=topo,
            num_experts=num_experts,
            top_k=top_k,
            hidden=hidden,
            max_tokens_per_rank=max_tokens_per_rank,
            dtype=dtype,
            expert_to_rank=expert_to_rank,
            staging_records=staging_records,
            paths=paths,
            max_recv_rows=max_recv_rows,
            num_sms=num_sms,
            pipeline=pipeline,
            nic_gbs=nic_gbs,
            device=device,
        )
        if order is not None and not callable(getattr(order, "choice", None)):
            raise TypeError(f"order must have a method choice, as random.Random, got {order!r}")
        self._order = order
        self._interrupted = False
        self.traffic: Traffic | None = None
        if cost_table is not None:
            table = table_for(cost_table, self.config, TRANSPORT)
            self.config = replace(self.config, cost_table=table)
        device = self.config.device
        # Else these tensors could not be used outside it.
        with torch.inference_mode(False), self.config.on_device():
            self.heap = LocalHeap(topo.num_ranks, self.config.layout, device=device)
            self._exchanges = [
                Exchange(self.config, self.heap, pe, device=device, deadline_s=DEADLINE_S)
                for pe in range(topo.num_ranks)
            ]

    def dispatch(
        self,
        xs: Sequence[torch.Tensor],
        topk_idxs: Sequence[torch.Tensor] | None = None,
        topk_weights: Sequence[torch.Tensor] | None = None,
        *,
        handles: Sequence[Handle] | None = None,
        extras: Sequence[Sequence[torch.Tensor]] | None = None,
        path: str | None = None,
        static_shapes: bool | None = None,
        out: str = "copy",
        expert_alignment: int | None = None,
        zero_padding: bool = False,
    ) -> list[Received]:
        """Send every token to the ranks of its experts.

        Args:
            xs: per rank, (T, H) tokens of one dtype; any strides, T may be 0 and differ.
            topk_idxs: per rank, (T, K) int32 or int64 expert ids; -1 selects nothing, a repeated
                id sends the token once.
            topk_weights: per rank, (T, K) floating point; carried as float32.
            handles: per rank, the handle of an earlier dispatch, whose routing, path and shapes
                this one repeats, without counting and planning; in place of topk_idxs and
                topk_weights. The rest of each `Received` is that of the earlier one.
            extras: per rank, more (T, n) tensors of any dtype to send beside x, scales of float8
                tokens for example; all of a token must fit what was declared, each from 16 bytes
                on. They are copied first, x too.
            path: native, rail, permutation, joint (the default), granted, or auto: as the cost
                table says for this traffic (`handle.path`, `handle.decision`). All give the same
                bytes.
            static_shapes: give max_recv_rows rows, whatever came; see `Received`.
            out: copy, or view: rows are not copied out of the region that they arrive in.
            expert_alignment: give a row per (token, local expert), grouped by expert; each group
                starts at a multiple of this number.
            zero_padding: set x of the rows that this leaves free, before `num_rows`, to 0, which is
                done anyhow where gradients are enabled.

        Returns:
            Per rank, a `Received`: a row per (token, rank), ordered by (source rank, token); or as
            `expert_alignment` says.

        Raises:
            TypeError, ValueError: an argument breaks a rule; nothing has moved then.
            ReceiveOverflowError: a rank would receive more than max_recv_rows rows; likewise.
        """
        if torch.compiler.is_compiling():
            form: dict[str, Any] = {"handles": handles, "extras": extras, "path": path, "out": out}
            form |= {"static_shapes": static_shapes, "expert_alignment": expert_alignment}
            form["zero_padding"] = zero_padding
            return uncompiled(self.dispatch, xs, topk_idxs, topk_weights, **form)
        grads = autograd.named_in_lists(xs=xs, topk_weights=topk_weights)
        form = {"path": path, "static_shapes": static_shapes, "out": out}
        form |= {"expert_alignment": expert_alignment, "zero_padding": zero_padding}
        form |= {"grads": grads}
        arguments = (xs, topk_idxs, topk_weights, handles)
        calls = check_dispatch(self.config, *arguments, self._exchanges, extras, **form)

        def run() -> list[Received]:
            pairs = zip(self._exchanges, calls, strict=True)
            return self._run([dispatch(pe, call) for pe, call in pairs])

        if not grads:
            return run()
        return autograd.dispatch(self._verbs, run, xs, topk_weights or [None] * len(calls))

    def combine(
        self,
        outs: Sequence[torch.Tensor],
        handles: Sequence[Handle],
        *,
        weights: Sequence[torch.Tensor] | None = None,
        bias: Sequence[Any] | None = None,
        wire_dtype: torch.dtype | None = None,
    ) -> list[torch.Tensor]:
        """Sum every token's rows at the rank that dispatched it, unweighted unless asked.

        Rows of one node are added in fp32 and rounded once to their dtype for the wire (not the
        owner's own node's); sums of nodes are added in fp32 and rounded once. Of rows by expert,
        those of a token on one rank are first added in fp32, by ascending k, and rounded once.

        Args:
            outs: per rank, (rows, H) results for the rows of its `Received`, in their order;
                float32, bfloat16 or float16, H free within what was declared.
            handles: per rank, the handle of that dispatch.
            weights: per rank, (rows,) float32, which rows are multiplied by first, in fp32:
                `topk_weights` of rows by expert, for example.
            bias: per rank, a tensor or two, (T, H) or (H,), float32, bfloat16 or float16, or None:
                added in fp32, in turn, before the result is rounded.
            wire_dtype: of the sums between nodes, which must fit the declared bytes; default: of
                outs.

        Returns:
            Per rank, (T, H) of the same dtype; zero for a token without an expert.

        Raises:
            TypeError, ValueError: an argument breaks a rule; nothing has moved then.
        """
        if torch.compiler.is_compiling():
            form = {"weights": weights, "bias": bias, "wire_dtype": wire_dtype}
            return uncompiled(self.combine, outs, handles, **form)
        listed = handles if isinstance(handles, Sequence) else ()
        anchors = [getattr(handle, "anchor", None) for handle in listed]
        grads = autograd.named_in_lists(outs=outs, handles=anchors, weights=weights)
        arguments = (outs, handles, self._exchanges, weights, bias, wire_dtype, grads)
        checked = check_combine(self.config, *arguments)

        def run() -> list[torch.Tensor]:
            plain_outs, options = zip(*checked, strict=True)
            return self._combine(plain_outs, handles, options)

        added = [biases(each) for each in bias or [None] * len(checked)]
        if not grads and not any(autograd.named_in_lists(bias=given) for given in added):
            return run()
        each_weights = weights or [None] * len(checked)
        return autograd.combine(self._verbs, run, outs, handles, each_weights, added)

    def combine_weights(
        self, topk_weights: Sequence[torch.Tensor], handles: Sequence[Handle]
    ) -> list[torch.Tensor]:
        """Bring the weights of a dispatch's `Received`, as they are now, back to their tokens.

        A phase of its own, as `combine`. No gradients flow through it.

        Args:
            topk_weights: per rank, float32, of the shape of its `Received`'s: (rows, K), 0 where an
                expert is elsewhere; or (rows,) by expert.
            handles: as of `combine`.

        Returns:
            Per rank, (T, K) float32; zero where topk_idx of the dispatch selects nothing.

        Raises:
            TypeError, ValueError: an argument breaks a rule; nothing has moved then.
        """
        if torch.compiler.is_compiling():
            return uncompiled(self.combine_weights, topk_weights, handles)
        rows = check_all_weights(self.config, topk_weights, handles, self._exchanges)
        return self._combine(rows, [handle.by_token for handle in handles])

    def _combine(
        self,
        outs: Sequence[torch.Tensor],
        handles: Sequence[Handle],
        options: Sequence[Options] | None = None,
    ) -> list[torch.Tensor]:
        # A view of another rank's rows, which that rank's combine overwrites.
        pairs = zip(self._exchanges, outs, strict=True)
        outs = [out.clone() if pe.others_rows(out) else out for pe, out in pairs]
        options = options or [PLAIN] * len(outs)
        pairs = zip(self._exchanges, options, strict=True)
        options = [apart(pe, more) for pe, more in pairs]
        each = zip(self._exchanges, outs, handles, options, strict=True)
        return self._run([combine(pe, *arguments) for pe, *arguments in each])

    @property
    def _verbs(self) -> autograd.Verbs:
        """What a backward pass runs."""

        def dispatch(xs: Any, handles: Any) -> list[Received]:
            zero_padding = handles[0].places is not None
            return self.dispatch(xs, handles=handles, zero_padding=zero_padding)

        return autograd.Verbs(dispatch, self._combine)

    def _run(self, stages: list[Stages]) -> list[Any]:
        """Run all PEs' stages to their end, each when the words that it waits for are there."""
        if not _RUNNING.acquire(blocking=False):
            raise RuntimeError(
                "another thread runs a dispatch or combine; Triton's interpreter takes one at a "
                "time"
            )
        try:
            with self.config.on_device(), tracing.world(self.heap):
                return self._run_alone(stages)
        finally:
            _RUNNING.release()

    def _run_alone(self, stages: list[Stages]) -> list[Any]:
        if self._interrupted:
            raise RuntimeError(
                "a dispatch or combine of this world was interrupted: make a new LocalWorld"
            )
        self._interrupted = True  # until the end is reached
        recorder = TrafficRecorder(self.config.topo)
        results: list[Any] = [None] * len(stages)
        waiting: dict[int, Waits] = {pe: list for pe in range(len(stages))}
        refused: ReceiveOverflowError | None = None
        blocked: dict[int, int] = {}  # since when a PE waits
        missing: dict[int, dict[tuple[str, int], int]] = {}  # and for what, see `Trace.wait`
        for exchange in self._exchanges:
            exchange.observer = recorder
        while waiting:
            ready = [pe for pe in waiting if self._ready(pe, waiting[pe]())]
            for pe in waiting.keys() - ready if tracing.taking() else ():
                now_ns, late = time.monotonic_ns(), self._exchanges[pe].late(waiting[pe]())
                blocked.setdefault(pe, now_ns)
                missing.setdefault(pe, {}).update((one[:2], now_ns) for one in late)
            if not ready:
                raise RuntimeError(f"railwave: no PE can go on; {self._missing(waiting)}")
            for pe in [self._order.choice(ready)] if self._order else ready:
                if pe in blocked:
                    tracing.waited(self._exchanges[pe], missing.pop(pe), blocked.pop(pe))
                try:
                    waiting[pe] = next(stages[pe])
                except StopIteration as stop:
                    results[pe] = stop.value
                    del waiting[pe]
                except ReceiveOverflowError as error:  # every PE comes to it
                    refused = error
                    del waiting[pe]
        for exchange in self._exchanges:
            assert exchange.failure() is None, f"a kernel waited in vain: {exchange.failure()}"
        self._interrupted = False
        if refused:
            raise refused
        self.traffic = recorder.traffic([e.put_words for e in self._exchanges])
        return results

    def _ready(self, pe: int, waits: list[Wait]) -> bool:
        return not self._exchanges[pe].late(waits)

    def _missing(self, waiting: dict[int, Waits]) -> str:
        return "; ".join(
            f"PE {pe} waits for {word} of PE {writer} to reach {mark}"
            for pe, waits in waiting.items()
            for word, writer, mark in self._exchanges[pe].late(waits())
        )
