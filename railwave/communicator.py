"""One process per rank: this process runs one PE's stages, over shared or GPU memory.

Letters: N nodes, G GPUs a node, W = N * G ranks, E experts, K top-k, T tokens, H hidden.
"""

from __future__ import annotations

import itertools
import os
import zlib
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from railwave import autograd, compiled, compiled_calls
from railwave._check import check_bool
from railwave._version import __version__
from railwave.agreement import (
    check_capture,
    check_fit,
    check_group,
    check_same_config,
    checked_deadline,
    checked_wire,
    default_device,
    say_call,
)
from railwave.arguments import (
    biases,
    check_call,
    check_given,
    check_gradients,
    check_handle,
    check_out,
    check_repeat,
    check_unused,
    check_weights,
    plain,
)
from railwave.config import PATHS, Config, fitting
from railwave.cost_table import CostTable, table_for
from railwave.errors import PeerError
from railwave.exchange import Exchange, Options, combine, dispatch
from railwave.exchange.words import join_words
from railwave.graphs import MOST_GRAPHS, Graphs
from railwave.handle import STATIC, Handle, Received
from railwave.heap import NvshmemHeap, ShmHeap, together
from railwave.phases import Phases
from railwave.recorded import Recorded
from railwave.rehearsal import Rehearsal
from railwave.topology import Topology
from railwave.turns import Turns, one_at_a_time, record

_numbers = itertools.count()


class Communicator:
    """Dispatch and combine of this rank, together with the other ranks of a group.

    Every method but `close` is collective: all ranks call it, in the same order. What must be equal
    on all ranks: the arguments below but `group` and `graphs`; of a dispatch, path, hidden size,
    dtypes and top-k; of a combine, the dispatch, hidden size and dtype. Numbers of tokens and rows
    may differ.

    The arguments are those of `LocalWorld` but `order`, and

    Args:
        group: a torch.distributed group of topo.num_ranks ranks; None for the default one. Ranks
            are numbered as in the group.
        deadline_s: how long to wait for another rank, in seconds. Default: the environment's
            RAILWAVE_DEADLINE_S, or 300.
        cost_table: as of `LocalWorld`, the same on all ranks.
        device: where this rank's tensors live: the current GPU if there is one, else the CPU. GPUs
            share memory through NVSHMEM, CPUs through the host's shared memory.
        wire: how records reach other nodes on GPUs: "nvshmem" by its calls, None by plain stores
            where the memory is mapped (one GPU, NVLink), else by its calls.
        graphs: where a call with static shapes has its tensors at the addresses of an earlier one,
            as in a loop, replay a CUDA graph that is made for it; others are as without. On a GPU.
            False: launch each kernel by kernel.

    Raises:
        TypeError, ValueError: an argument breaks a rule, or differs from another rank's.
        PeerError: an argument of another rank breaks a rule.
        MemoryError, RuntimeError: symmetric memory cannot be had, or kernels do not compile; on all
            ranks.
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
        group: dist.ProcessGroup | None = None,
        deadline_s: float | None = None,
        device: torch.device | str | None = None,
        wire: str | None = None,
        graphs: bool = True,
    ) -> None:
        self._group, self._closed = group, False
        wrong: Exception | None = None
        try:
            self.deadline_s = checked_deadline(deadline_s)
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
                device=default_device() if device is None else device,
            )
            self._wire = checked_wire(wire, self.config.device, self.config.nic_gbs)
            check_bool(graphs, "graphs")
            check_group(group, topo)
        except (TypeError, ValueError, RuntimeError) as error:
            wrong = error
        if not dist.is_available() or not dist.is_initialized() or dist.get_rank(group) < 0:
            assert wrong
            raise wrong  # there is nobody to tell
        others = {"version": __version__}
        if wrong is None:
            others |= {"deadline_s": repr(self.deadline_s), "wire": repr(self._wire)}
            others["device"] = self.config.device.type
        config = self.config if wrong is None else None
        check_same_config(config, others, self._gather, dist.get_rank(group), wrong)
        self.rank = dist.get_rank(group)
        self._name = f"communicator {next(_numbers)}"
        compiled.runners[self._name] = self
        self._on_gpu = self.config.device.type == "cuda"
        self._turns = Turns(self.config.device)
        self._graphs = Graphs(MOST_GRAPHS if graphs else 0)
        # Neither the caller's inference mode, in which tensors could not be used outside it, nor
        # the caller's default device.
        with torch.inference_mode(False), self.config.device, self.config.on_device():
            self._heap = self._make_heap()
            try:
                self._take_table(cost_table)
                self._exchange = together(self._gather, "make tables", self._make_exchange)
                self._phases = Phases(self._exchange, self._heap, self.deadline_s)
                self._rehearsal = Rehearsal(self._exchange)
                self._recorded = Recorded(self._exchange, self._turns, self._graphs)
                if self._on_gpu:
                    self._phases.meeting.rehearse()
                    self._rehearsal.all_declared(self._gather)
                    together(self._gather, "rehearse graphs", self._rehearse_graphs)
            except BaseException:
                self.close()
                raise

    def _rehearse_graphs(self) -> None:
        """Replay a graph of two streams, as repeated calls have, and see that it does something."""
        pe, device = self._exchange, self.config.device
        stamp, clocks = pe.kernels.wire.stamp, torch.zeros(4, dtype=torch.int64, device=device)
        own, other = clocks[:1], clocks[2:3]  # 16 bytes apart: one variant of the kernel does

        def launch(_: torch.cuda.Stream | None) -> None:
            with pe.beside_put(lambda: stamp(other)) if pe.beside else nullcontext():
                stamp(own)

        def works() -> bool:
            torch.cuda.synchronize()
            return bool(own.all() and (other.all() or not pe.beside))

        launch(None)  # a kernel that is loaded amid a capture would end it
        torch.cuda.synchronize()
        clocks.zero_()
        self._graphs.rehearse(launch, torch.cuda.current_stream(device), works)

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _gather(self, value: Any) -> list[Any]:
        values = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(values, value, group=self._group)
        return values

    def _make_heap(self) -> ShmHeap | NvshmemHeap:
        config, ranks = self.config, self.config.topo.num_ranks
        if not self._on_gpu:
            return ShmHeap(self.rank, ranks, config.layout, gather=self._gather)
        gpu = torch.cuda.get_device_properties(config.device)
        gpus = self._gather((os.uname().nodename, str(gpu.uuid)))
        sharing = gpus.count(gpus[self.rank])
        if config.nic_gbs is not None and sharing < ranks:
            raise ValueError(
                "nic_gbs must be None where ranks have several GPUs, whose clocks differ, "
                f"got {config.nic_gbs}"
            )
        tiles = fitting(config.tiles, gpu.multi_processor_count, sharing)
        together(self._gather, "fit all ranks", lambda: check_fit(config, sharing, tiles.programs))
        node = self.rank // config.topo.gpus_per_node
        heap = NvshmemHeap(
            *(self.rank, ranks, config.layout),
            gather=self._gather,
            device=config.device,
            near=range(ranks)[node * config.topo.gpus_per_node :][: config.topo.gpus_per_node],
            map_all=self._wire is None,
        )
        self.config = replace(config, remote=heap.remote, tiles=tiles)
        return heap

    @property
    def transport(self) -> str:
        """How records reach other nodes, for a cost table's fingerprint."""
        name = "NVSHMEM" if self.config.remote else "mapped memory"
        name = name if self._on_gpu else "shared memory"
        rate = self.config.nic_gbs
        return name if rate is None else f"{name}, emulated NICs of {rate:g} GB/s"

    def _take_table(self, given: Any) -> None:
        """Take the cost table, if there is one: the same on all ranks."""
        wrong, table = None, None
        try:
            table = table_for(given, self.config, self.transport)
        except Exception as error:  # whatever it is, the others must hear
            wrong = error
        said = self._gather((str(wrong or ""), table and (table.scales, table.anchors)))
        if wrong:
            raise wrong
        bad = {rank: text for rank, (text, _) in enumerate(said) if text}
        if bad:
            raise PeerError(f"rank(s) called init wrongly: {bad}")
        if any(other != said[self.rank][1] for _, other in said):
            raise ValueError("cost_table must be the same on all ranks")
        if table:
            self.config = replace(self.config, cost_table=table)

    def _make_exchange(self) -> Exchange:
        return Exchange(
            self.config,
            self._heap,
            self.rank,
            device=self.config.device,
            deadline_s=self.deadline_s,
            compare_calls=True,
        )

    def dispatch(
        self,
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
        """Send this rank's tokens to the ranks of their experts.

        Args:
            x: (T, H) tokens of any dtype; any strides, T may be 0.
            topk_idx: (T, K) int32 or int64 expert ids; -1 selects nothing, a repeated id sends the
                token once.
            topk_weights: (T, K) floating point; carried as float32.
            handle: of an earlier dispatch, whose routing, path and shapes this one repeats, without
                counting and planning; in place of topk_idx and topk_weights. The rest of the
                `Received` is that of the earlier one.
            extras: more (T, n) tensors of any dtype to send beside x, scales of float8 tokens for
                example; all of a token must fit what was declared, each from 16 bytes on. They are
                copied first, x too.
            path: native, rail, permutation, joint (the default), granted, or auto: as the cost
                table says for this traffic (`handle.path`, `handle.decision`). All give the same
                bytes.
            static_shapes: give max_recv_rows rows, whatever came, and wait for nothing on a GPU: so
                this call and its combine can be captured in a CUDA graph. What is wrong with a call
                of any rank, the GPU finds: the next call raises it, or `check`.
            out: copy, or view: x of the result is the region that rows arrive in, valid until this
                rank's next dispatch or combine. `combine` copies nothing of it if it is given that
                view, with results in the place of the rows.
            expert_alignment: give a row per (token, local expert), grouped by expert; each group
                starts at a multiple of this number. Ranks may differ in it.
            zero_padding: set x of the rows that this leaves free, before `num_rows`, to 0, which is
                done anyhow where gradients are enabled.
            stream: run there, after what the current stream holds by now; let the caller's stream
                wait for it before the result is used. None: on the current stream.

        Returns:
            A `Received`: a row per (token, this rank), ordered by (source rank, token); or as
            `expert_alignment` says.

        Raises:
            TypeError, ValueError: an argument breaks a rule. Nothing has moved; the next call
                works.
            PeerError: another rank's argument breaks a rule, or the ranks' calls differ; likewise.
            ReceiveOverflowError: a rank would receive more than max_recv_rows rows; likewise, on
                every rank.
            PeerTimeoutError: another rank did not come in time; `reset` before going on.
            RuntimeError: a CUDA graph is being captured, without static shapes or for the first
                time; or another thread is in a call of this object.

        With static shapes on a GPU a wrong or differing call ends the phase on all ranks, and all
        need `reset` before they go on: the one that is wrong, too.
        """
        form: dict[str, Any] = {
            "handle": handle,
            "stream": stream,
            "extras": extras,
            "path": path,
            "static_shapes": static_shapes,
            "out": out,
            "expert_alignment": expert_alignment,
            "zero_padding": zero_padding,
        }
        if torch.compiler.is_compiling():
            return compiled_calls.dispatch(self, x, topk_idx, topk_weights, **form)
        form["grads"] = grads = autograd.named(x=x, topk_weights=topk_weights)
        if not grads:
            return self._dispatch(x, topk_idx, topk_weights, **form)

        def run() -> list[Received]:
            return [self._dispatch(x, topk_idx, topk_weights, **form)]

        return autograd.dispatch(self._verbs, run, [x], [topk_weights])[0]

    @one_at_a_time
    def _dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        *,
        handle: Handle | None = None,
        stream: torch.cuda.Stream | None = None,
        repeats: bool = True,
        **form: Any,
    ) -> Received:
        """Dispatch without gradients.

        Args:
            repeats: a call of a kind that was called before may be launched as that was.
            form: as of `check_call` and `check_repeat`.
        """
        self._check_usable()
        extras, grads = form.get("extras"), form.get("grads", "")
        extras = form["extras"] = () if extras is None else extras
        static_shapes = form.get("static_shapes") is True
        static = handle.static_shapes if isinstance(handle, Handle) else static_shapes
        decided_there = self._exchange.device_decides(static)
        given, kind = (x, topk_idx, topk_weights), None
        if repeats and decided_there and handle is None and stream is None:
            kind = self._recorded.kind_of_dispatch(given, **form)
            again = self._phases.repeat(self._recorded.dispatch, kind, given, extras)
            if again is not None:
                return again
        used = (x, topk_idx, topk_weights, *(extras if isinstance(extras, list | tuple) else ()))
        with self._turns.take(stream, used) as capturing:
            try:
                check_capture(capturing, decided_there)
                self._turns.check(stream)
                if handle is None:
                    check_given(topk_idx, topk_weights)
                    inputs = x, topk_idx, topk_weights
                    call = check_call(self.config, *inputs, **form, check_ids=not decided_there)
                else:
                    check_unused(topk_idx, topk_weights, ("topk_idx", "topk_weights"), "handle")
                    handle = self._check_handle(handle)
                    call = check_repeat(self.config, x, handle, **form)
                call = replace(call, joined=join_words(call.parts))
                if self._on_gpu:
                    with self.config.on_device():
                        self._rehearsal.dispatch(call, capturing=capturing)
            except Exception as error:
                if capturing:
                    raise
                return self._phases.refuse("dispatch", error, decided_there)
            if handle is not None:
                self._keep_beside(handle, capturing)
            # Kernels read these; they are made before, since only launches are repeated.
            if kind is not None:
                given = (call.joined, call.topk_idx, call.topk_weights)
            stages = dispatch(self._exchange, call)
            said = say_call(call, grads)
            run = partial(self._phases.run, stages, "dispatch", said, decided_there=decided_there)
            return self._recorded.take_down(kind, given, run)

    def combine(
        self,
        out: torch.Tensor,
        handle: Handle,
        *,
        weights: torch.Tensor | None = None,
        bias: torch.Tensor | Sequence[torch.Tensor] | None = None,
        wire_dtype: torch.dtype | None = None,
        stream: torch.cuda.Stream | None = None,
    ) -> torch.Tensor:
        """Sum the rows of each token that this rank dispatched, unweighted unless asked.

        In fp32, rounded once per sending node for the wire and once at the end. Waits for nothing
        if its dispatch had static shapes; then ranks do not compare their calls.

        Of rows by expert, those of a token on one rank are first added in fp32, by ascending k, and
        rounded once to their dtype.

        Args:
            out: (rows, H) results for the rows of the `Received`, in their order; float32,
                bfloat16 or float16, H free within what was declared.
            handle: of that dispatch; it may be used again. One that was captured in a graph holds
                something once the graph has been replayed.
            weights: (rows,) float32, which rows are multiplied by first, in fp32: `topk_weights` of
                rows by expert, for example. Ranks may differ in whether they give some.
            bias: one tensor or two, (T, H) or (H,), float32, bfloat16 or float16: added in fp32, in
                turn, before the result is rounded. Ranks may differ in it, too.
            wire_dtype: of the sums between nodes, which must fit the declared bytes; default: of
                out. The same on all ranks.
            stream: as of `dispatch`.

        Returns:
            (T, H) of the same dtype; zero for a token without an expert.

        Raises: as `dispatch`, and nothing of a wrong call is returned on any rank. After a dispatch
            with static shapes, on a GPU, a wrong call is raised on its rank alone, which has not
            taken part: it may call again, rightly, before the others' deadline.
        """
        if torch.compiler.is_compiling():
            form = {"weights": weights, "bias": bias, "wire_dtype": wire_dtype}
            return compiled_calls.combine(self, out, handle, **form, stream=stream)
        anchor, added = getattr(handle, "anchor", None), biases(bias)
        grads = autograd.named(out=out, handle=anchor, weights=weights) and "out"

        def run() -> list[torch.Tensor]:
            form: dict[str, Any] = {"weights": weights, "bias": bias, "wire_dtype": wire_dtype}
            return [self._combine(out, handle, **form, grads=grads, stream=stream)]

        if not grads and not any(autograd.named(bias=each) for each in added):
            return run()[0]
        return autograd.combine(self._verbs, run, [out], [handle], [weights], [added])[0]

    def combine_weights(
        self,
        topk_weights: torch.Tensor,
        handle: Handle,
        *,
        stream: torch.cuda.Stream | None = None,
    ) -> torch.Tensor:
        """Bring the weights of a `Received`, as they are now, back to their tokens.

        A phase of its own, as `combine`. No gradients flow through it.

        Args:
            topk_weights: float32, of the shape of the `Received`'s: (rows, K), 0 where an expert is
                elsewhere; or (rows,) by expert.
            handle, stream: as of `combine`.

        Returns:
            (T, K) float32; zero where topk_idx of the dispatch selects nothing.

        Raises: as `combine`.
        """
        if torch.compiler.is_compiling():
            return compiled_calls.combine_weights(self, topk_weights, handle, stream=stream)
        return self._combine(topk_weights, handle, stream=stream, of_weights=True)

    @one_at_a_time
    def _combine(
        self,
        out: torch.Tensor,
        handle: Handle,
        *,
        weights: torch.Tensor | None = None,
        bias: Any = None,
        wire_dtype: torch.dtype | None = None,
        grads: str = "",
        stream: torch.cuda.Stream | None = None,
        of_weights: bool = False,
        checked: bool = False,
    ) -> torch.Tensor:
        """Combine without gradients.

        Args:
            grads: what needs some.
            of_weights: out holds a `Received`'s weights, top-k a token, however small a token is.
            checked: out is as it must be.
        """
        self._check_usable()
        static_shapes = isinstance(handle, Handle) and handle.static_shapes
        decided_there = self._exchange.device_decides(static_shapes)
        kind, simple = None, weights is None and bias is None and not of_weights
        if decided_there and stream is None and simple:
            kind = self._recorded.kind_of_combine(out, handle, wire_dtype, grads, checked)
            if kind is not None:
                self._phases.watch.check_handle(handle)
            again = self._phases.repeat(self._recorded.combine, kind, out, handle)
            if again is not None:
                return again
        with self._turns.take(stream, (out, weights, *biases(bias))) as capturing:
            try:
                check_capture(capturing, decided_there)
                self._turns.check(stream)
                handle = self._check_handle(handle)
                check_gradients(grads, handle, name="handle")
                self._keep_beside(handle, capturing)
                if of_weights:
                    out, handle = check_weights(self.config, out, handle), handle.by_token
                    options = Options()
                elif checked:
                    out, options = plain(out), Options()
                else:
                    form = {"weights": weights, "bias": bias, "wire_dtype": wire_dtype}
                    out, options = check_out(self.config, out, handle, **form)
                if self._on_gpu:
                    with self.config.on_device():
                        self._rehearsal.combine(out, handle, options, capturing=capturing)
            except Exception as error:
                if capturing or decided_there:
                    raise
                return self._phases.refuse("combine", error)
            agreed = f"{handle.epoch} {handle.path} {out.dtype} {out.shape[1]} {wire_dtype} {grads}"
            status = zlib.crc32(agreed.encode()) & (STATIC - 1)
            said = f"combine of call {handle.epoch}, hidden {out.shape[1]} {out.dtype}"
            said += f", wire_dtype {wire_dtype}, with{'' if grads else 'out'} gradients"
            stages = combine(self._exchange, out, handle, options, status=status)
            run = partial(self._phases.run, stages, "combine", said, decided_there=decided_there)
            given = () if kind is None else (out, handle.recorded.tables)
            return self._recorded.take_down(kind, given, run)

    @property
    def _verbs(self) -> autograd.Verbs:
        """What a backward pass runs."""

        def dispatch(xs: Any, handles: Any) -> list[Received]:
            zero_padding = handles[0].places is not None
            return [self._dispatch(xs[0], handle=handles[0], zero_padding=zero_padding)]

        def combine(outs: Any, handles: Any) -> list[torch.Tensor]:
            return [self._combine(outs[0], handles[0], checked=True)]

        return autograd.Verbs(dispatch, combine)

    def _check_handle(self, handle: Handle) -> Handle:
        check_handle(handle, self._exchange, name="handle", received="received")
        self._phases.watch.check_handle(handle)
        return compiled.with_epoch(handle)

    def _keep_beside(self, handle: Handle, capturing: bool) -> None:
        """Keep what a handle holds in memory until the current stream has used it."""
        stream = self._exchange.stream()
        if not capturing and stream != handle.stream:
            record(handle.tensors(), stream)

    def check(self) -> None:
        """Wait for this rank's GPU; raise what went wrong in calls with static shapes.

        Not collective. The next call raises the same once the GPU has come so far. `reset` on all
        ranks before going on.

        Raises:
            PeerError: a rank's call was wrong, or calls differed.
            ReceiveOverflowError: a rank would have received more than max_recv_rows rows.
            PeerTimeoutError: another rank did not come in time.
        """
        self._check_open()
        self._phases.check()

    @one_at_a_time
    def reset(self) -> int:
        """Make the object usable after a `PeerTimeoutError` or an interrupt. All ranks call it.

        A rank that was late may have finished the call that others gave up, and hears so in its
        next one: go on from what all have finished.

        Returns:
            The number of the last call that all ranks finished, the same on all. Calls count from
            1, dispatch and combine alike (`PeerTimeoutError.call_number`, `Handle.epoch`), and go
            on above any number so far.

        Raises:
            PeerTimeoutError: a rank did not come in time; call it again when it is back.
        """
        self._check_open()
        return self._phases.reset()

    @one_at_a_time
    def close(self) -> None:
        """Give the shared memory back. Not collective; nothing works afterwards."""
        if not self._closed:
            self._closed = True
            self._graphs.clear()
            self._heap.close()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("this communicator is closed")

    def _check_usable(self) -> None:
        self._check_open()
        self._phases.check_usable()
