"""Calls with static shapes on a GPU, launched as one of their kind was before: see `recording`."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from railwave import tracing
from railwave.exchange import Exchange
from railwave.exchange.words import are_words, join_words
from railwave.graphs import Graphs
from railwave.handle import Handle, Received
from railwave.kernels import launches_hooked, tell_launches
from railwave.recording import Recording, Tape, View
from railwave.turns import Turns

MOST_KINDS = 256  # that are remembered; then the one that was not used for longest is forgotten
MOST_TRIES = 4  # to take a kind down: what is refused may lie in one call's addresses
_ANEW = ("epoch", "serial", "stream", "recorded")  # fields that differ from handle to handle
_SHARED = ("topk_idx", "topk_weights", "counts")  # that a handle keeps of what its caller has
_PLAIN = frozenset((str, bool, type(None), torch.dtype))
_NOTHING = {"expert_offsets": None, "rows_per_expert": None}  # of rows a token
_DENSE: dict[str, Any] = {"memory_format": torch.contiguous_format}
_ADDRESS = torch.Tensor.data_ptr

_numbers = itertools.count()


class _Dispatch(NamedTuple):
    number: int
    recording: Recording
    fields: dict[str, Any]  # of its handles, alike in all
    tables: dict[str, View]  # of its handles, in the piece for tables
    whole: dict[str, int]  # of its `Received`, and counts: pieces
    parts: dict[str, View]  # of its `Received`: of pieces
    rows: list[View]  # x and extras: of pieces, unless they are views of the region
    arriving: list[torch.Tensor]  # x and extras, if they are such views


class _Combine(NamedTuple):
    recording: Recording
    y: int  # the piece that the sums are


class Memory(NamedTuple):
    """What a repeated dispatch made for its handle."""

    of: _Dispatch
    tables: torch.Tensor


class RecordedHandle(Handle):
    """A handle whose tables are views of one tensor, made when they are asked for."""

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield what the handle holds on the device: its tables, too, asked for or not."""
        yield from super().tensors()
        if self.recorded is not None:
            yield self.recorded.tables

    def __getattr__(self, name: str) -> Any:
        memory = self.__dict__.get("recorded")
        view = memory and memory.of.tables.get(name)
        if view is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        table = self.__dict__[name] = view.of(memory.tables)
        return table


class Recorded:
    """The kinds of calls that one rank remembers.

    A kind is what a call's launches follow from, beside addresses: shapes, strides, dtypes and
    alignment of what is given, and every other argument. The first call of a kind is an ordinary
    one, as is the second, in which launches are taken down; from the third on they are repeated.
    Of kinds that are many the last used are remembered.
    """

    def __init__(self, exchange: Exchange, turns: Turns, graphs: Graphs) -> None:
        self.repeats = {"dispatch": 0, "combine": 0}  # calls that were launched so
        self._exchange, self._turns, self._device = exchange, turns, exchange.device
        self._graphs = graphs
        # By kind `_Dispatch` or `_Combine`, or how often it was called; the last used one last.
        self._kinds: OrderedDict[Any, Any] = OrderedDict()
        region = exchange.heap.region(exchange.pe, "rows", torch.uint8)
        self._rows = range(region.data_ptr(), region.data_ptr() + region.numel())

    def kind_of_dispatch(self, given: Sequence[Any], **form: Any) -> Any:
        """Return what a dispatch's launches follow from; None: it is not to be recorded.

        Args:
            given: x, topk_idx and topk_weights.
            form: all other arguments.
        """
        extras = form.get("extras", ())
        if type(extras) not in (tuple, list):
            return None
        if any(getattr(extra, "requires_grad", True) for extra in extras):
            return None  # which is refused where gradients are on
        if form.get("static_shapes") is not True:
            return None
        if form.get("expert_alignment") is not None:
            return None  # sets values in new tensors
        words = [form.get(name) for name in ("path", "out", "zero_padding", "grads")]
        return self._kind(words, (*given, *extras), there=False)

    def kind_of_combine(self, out: Any, handle: Any, *words: Any) -> Any:
        """Return the same of a combine of a repeated dispatch.

        Args:
            words: all other arguments.
        """
        memory = getattr(handle, "recorded", None)
        if memory is None or handle.exchange is not self._exchange:
            return None
        if handle.stream != self._turns.last:
            return None
        return self._kind(words, (out,), there=True, number=memory.of.number)

    def _kind(
        self, words: Sequence[Any], given: Sequence[Any], *, there: bool, number: int = -1
    ) -> Any:
        """Return a hashable kind; `there`: what is given may be what a dispatch handed out."""
        if not _PLAIN.issuperset(map(type, words)):
            return None
        kind: list[Any] = [number, torch.is_inference_mode_enabled(), *words]
        device, rows = self._device, self._rows
        for tensor in given:
            if type(tensor) is not torch.Tensor or tensor.device != device or tensor.is_nested:
                return None
            if tensor.layout is not torch.strided or tensor.is_neg() or tensor.is_complex():
                return None
            try:
                address = tensor.data_ptr()
            except RuntimeError:  # of a transform of functions, which an ordinary call refuses
                return None
            arrived = address in rows
            if arrived and not (there and address == rows.start):
                return None
            kind += (tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad)
            kind += (address % 16, arrived)
        return tuple(kind)

    def dispatch(
        self, kind: Any, given: Sequence[torch.Tensor], extras: Sequence[torch.Tensor]
    ) -> Received | None:
        """Repeat a dispatch; None where it must be an ordinary one."""
        kept = self._kept(kind)
        if kept is None:
            return None
        x, topk_idx, weights = given
        words = x if are_words(x) and not extras else join_words([x.detach(), *extras])
        if weights.dtype is not torch.float32:
            weights = weights.detach().float()
        pieces = self._play(kept.recording, (words, topk_idx, weights), kept.fields["path"])
        self.repeats["dispatch"] += 1
        return self._received(kept, pieces)

    def _received(self, kept: _Dispatch, pieces: list[torch.Tensor]) -> Received:
        """Return what a repeated dispatch hands out, which is in these pieces of memory."""
        pe, handle = self._exchange, RecordedHandle.__new__(RecordedHandle)
        made = {name: pieces[i] for name, i in kept.whole.items()}
        anew = {"epoch": pe.epoch, "serial": pe.serial, "stream": self._turns.last}
        vars(handle).update(kept.fields, **made, **anew, recorded=Memory(kept, pieces[-1]))
        for name, view in kept.parts.items():
            made[name] = view.of(pieces[view.piece])
        del made["counts"]
        rows = kept.arriving or [view.of(pieces[view.piece]) for view in kept.rows]
        x, *extras = (part.detach() for part in rows)  # may be written to, as new tensors may
        # Not by its constructor, which sets the fields of what is frozen one by one.
        received = Received.__new__(Received)
        vars(received).update(_NOTHING, **made, x=x, handle=handle, extras=tuple(extras))
        return received

    def combine(self, kind: Any, out: torch.Tensor, handle: Any) -> torch.Tensor | None:
        """Repeat a combine; None where it must be an ordinary one."""
        kept = self._kept(kind)
        if kept is None:
            return None
        pieces = self._play(kept.recording, (out, handle.recorded.tables), handle.path)
        self.repeats["combine"] += 1
        return pieces[kept.y]

    def _kept(self, kind: Any) -> Any:
        kept = self._kinds.get(kind)
        if kept is None or type(kept) is int or not self._undisturbed():
            return None
        self._kinds.move_to_end(kind)
        return kept

    def _undisturbed(self) -> bool:
        """Say whether a call is nothing but its launches, on the stream of the call before."""
        index, last = self._device.index, self._turns.last
        return (
            last is not None
            and torch._C._cuda_getCurrentRawStream(index) == last.cuda_stream
            and torch.cuda.current_device() == index
            and not tracing.taking()
            and not launches_hooked()
            and forward_ad._current_level < 0
            and not torch.cuda.is_current_stream_capturing()
        )

    def _play(
        self, recording: Recording, given: Sequence[torch.Tensor], path: str
    ) -> list[torch.Tensor]:
        pe, pieces = self._exchange, [torch.empty_like(like, **_DENSE) for like in recording.pieces]
        starts = (*map(_ADDRESS, pieces), *map(_ADDRESS, given))

        def play(stream: Any) -> None:
            recording.play(starts, stream, pe.beside, pe.events)

        self._graphs.launch((recording, starts), play, self._turns.last)
        pe.path = path
        pe.advance()
        return pieces

    def take_down(self, kind: Any, given: Sequence[torch.Tensor], run: Callable[[], Any]) -> Any:
        """Run an ordinary call; take its launches down if it is not the first of its kind."""
        calls = self._kinds.get(kind, 0)
        if kind is None or not isinstance(calls, int) or calls > MOST_TRIES:
            return run()
        if not calls or not self._undisturbed():
            self._remember(kind, max(1, calls))
            return run()
        pe, current = self._exchange, partial(torch.cuda.current_stream, self._device)
        tape = Tape(given, persistent(pe), current, self._turns.last, pe.beside)
        try:
            pe.tape = tape
            tell_launches(tape.launched)
            with tape:
                result = run()
        finally:
            tell_launches(None)
            pe.tape = None
        if isinstance(result, Received):
            made: Any = _dispatch_of(tape, result, pe)
        else:
            made = _combine_of(tape, result)
        self._remember(kind, calls + 1 if made is None else made)
        return result

    def _remember(self, kind: Any, what: Any) -> None:
        self._kinds.pop(kind, None)
        if len(self._kinds) >= MOST_KINDS:
            self._kinds.popitem(last=False)
        self._kinds[kind] = what


def persistent(exchange: Exchange) -> list[torch.Tensor]:
    """List the tensors of a PE that all its calls use."""
    own = [value for name, value in vars(exchange).items() if name != "put_words"]
    return [one for one in (*own, exchange.heap.bases) if isinstance(one, torch.Tensor)]


def _dispatch_of(tape: Tape, received: Received, exchange: Exchange) -> _Dispatch | None:
    """Return what repeats a dispatch that was taken down; None: it cannot be."""
    handle, rows = received.handle, (received.x, *received.extras)
    assert handle.topk_idx is not None
    whole = {name: getattr(handle, name) for name in _SHARED}
    parts = {name: getattr(received, name) for name in ("num_rows", "num_tokens_per_expert")}
    recording = tape.recording([*whole.values(), *(() if handle.view else rows)])
    if recording is None:
        return None
    tensors = {name: v for name, v in vars(handle).items() if isinstance(v, torch.Tensor)}
    views = {name: tape.view_of(v) for name, v in (tensors | whole | parts).items()}
    tables = {name: view for name, view in views.items() if name in tensors.keys() - whole.keys()}
    made = [] if handle.view else [tape.view_of(part) for part in rows]
    last = len(recording.pieces) - 1
    if None in (*views.values(), *made) or any(view.piece != last for view in tables.values()):
        return None
    fields = {n: v for n, v in vars(handle).items() if n not in tensors and n not in _ANEW}
    arriving = [_arriving(part, exchange) for part in rows] if handle.view else []
    pieces = {name: tape.piece_of(value) for name, value in whole.items()}
    return _Dispatch(
        *(next(_numbers), recording, fields, tables, pieces),
        *({name: views[name] for name in parts}, made, arriving),
    )


def _arriving(part: torch.Tensor, exchange: Exchange) -> torch.Tensor:
    """View the region of rows where a part of what arrives is."""
    region = exchange.heap.region(exchange.pe, "rows", torch.uint8).view(part.dtype)
    return region.as_strided(part.shape, part.stride(), part.storage_offset())


def _combine_of(tape: Tape, y: torch.Tensor) -> _Combine | None:
    """Return what repeats a combine that was taken down; None: it cannot be."""
    recording = tape.recording([y])
    return recording and _Combine(recording, tape.piece_of(y))
