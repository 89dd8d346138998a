"""Launch a call with static shapes as it was launched before: other addresses, nothing else.

On a GPU such a call is the same kernels each time, since all that differs is read on the device; to
make its tables one by one and work out every launch anew takes the host longer than the kernels
run. So a call of a kind is taken down once (`Tape`): its launches, and for each address among their
arguments whose memory it is. From then on (`Recording`) all tables are parts of one piece of
memory, and a launch has its arguments but for the addresses.

A call is taken down only if all it does is launch kernels of this library, on its own stream or on
the one beside it, make tensors without values and view tensors; any other is never repeated so.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

GRAIN = 256  # bytes that tables start at multiples of, as torch's own memory does
_MAKE = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty.default,
}


class View(NamedTuple):
    """A tensor in one of a call's pieces of memory (see `Recording.play`)."""

    piece: int
    start: int  # in bytes
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def of(self, piece: torch.Tensor) -> torch.Tensor:
        """View a piece, which is contiguous, so.

        Example:
            >>> View(0, 4, (2,), (1,), torch.int32).of(torch.arange(3, dtype=torch.int32)).tolist()
            [1, 2]
        """
        elements = piece if piece.dtype is self.dtype else piece.view(self.dtype)
        if elements.shape == self.size and elements.stride() == self.stride:
            return elements  # a view of a view would take the host 2 us more
        return elements.as_strided(self.size, self.stride, self.start // self.dtype.itemsize)


class _Launch(NamedTuple):
    kernel: Any
    grid: tuple[int, int, int]
    arguments: list[Any]  # addresses as integers
    beside: bool  # on the other stream


class Turn(Enum):
    """What a stream waits for: all that the other holds by then."""

    FORK = "the one beside for the call's own"
    JOIN = "the call's own for the one beside"


class Recording:
    """The launches of a call, to be repeated with other memory.

    A call's memory is in pieces: what it makes for its caller, one for all its tables, and then
    what it is given. Those that are made anew are like `pieces`, which hold one element each.
    """

    def __init__(
        self,
        steps: list[_Launch | Turn],
        addresses: list[tuple[list[Any], int, int, int]],
        pieces: tuple[torch.Tensor, ...],
    ) -> None:
        self.pieces = pieces
        self._steps, self._addresses = steps, addresses

    def play(
        self, starts: Sequence[int], own: Any, other: Any = None, events: Any = (None, None)
    ) -> None:
        """Launch it all, given where each piece of memory starts.

        Args:
            own, other: the call's stream and the one beside it.
            events: for a fork and for a join; None: a new one each time.
        """
        for arguments, i, piece, offset in self._addresses:
            arguments[i] = starts[piece] + offset
        streams, forked = (own.cuda_stream, other and other.cuda_stream), False
        try:
            for step in self._steps:
                if step is Turn.FORK:
                    forked = True
                    other.wait_event(own.record_event(events[0]))
                elif step is Turn.JOIN:
                    own.wait_event(other.record_event(events[1]))
                    forked = False
                else:
                    kernel, grid, arguments, beside = step
                    loaded = kernel.function, kernel.packed_metadata
                    kernel.run(*grid, streams[beside], *loaded, None, None, None, *arguments)
        finally:  # memory that is given back after an error may be used at once
            if forked:
                own.wait_event(other.record_event(events[1]))


class Tape(TorchDispatchMode):
    """Take down what a call does.

    Args:
        given: tensors of the call's caller, whose addresses differ from call to call.
        kept: tensors that outlive all calls.
        current: gives the stream that a kernel is launched on.
        own, other: the call's stream and the one beside it.
    """

    def __init__(
        self,
        given: Sequence[torch.Tensor],
        kept: Iterable[torch.Tensor],
        current: Callable[[], Any] = lambda: None,
        own: Any = None,
        other: Any = None,
    ) -> None:
        super().__init__()
        self.refused = ""  # what cannot be repeated, if there is something
        self._given, self._current, self._own, self._other = list(given), current, own, other
        self._kept = [range(*_extent(tensor)) for tensor in kept]
        self._made: list[torch.Tensor] = []
        self._steps: list[_Launch | Turn] = []
        self._addresses: list[tuple[list[Any], int, torch.Tensor]] = []
        self._places: list[tuple[range, int, int]] = []  # extent, piece, where in it that starts
        self._pieces: list[torch.Tensor] = []
        self._tables = 0  # the piece of tables

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _MAKE:
            self._made.append(result)
        elif not _is_view(func):
            self.refused = self.refused or str(func)
        return result

    def launched(
        self, kernel: Any, grid: tuple[int, int, int], args: Sequence[Any], constants: Sequence[Any]
    ) -> None:
        """Take a launch down (`kernels.tell_launches`)."""
        here = self._current()
        beside = here != self._own
        if beside and (self._other is None or here != self._other):
            self.refused = self.refused or "a launch on a stream of somebody else's"
        arguments = [*args, *constants]
        self._steps.append(_Launch(kernel, grid, arguments, beside))
        for i, arg in enumerate(args):
            if isinstance(arg, torch.Tensor):
                arguments[i] = arg.data_ptr()
                self._addresses.append((arguments, i, arg))

    def turned(self, turn: Turn) -> None:
        """Take down that a stream waits for the other."""
        self._steps.append(turn)

    def recording(self, apart: Sequence[torch.Tensor]) -> Recording | None:
        """Return what was taken down; None if it cannot be repeated.

        Args:
            apart: tensors that the call made for its caller.
        """
        own = set(map(_memory, apart))
        self._pieces = [tensor for tensor in self._made if _memory(tensor) in own]
        pieces, tables = self._pieces, [one for one in self._made if _memory(one) not in own]
        self._tables, table_bytes = len(pieces), 0
        self._places = [(range(*_extent(tensor)), i, 0) for i, tensor in enumerate(pieces)]
        for tensor in tables:
            extent = range(*_extent(tensor))
            self._places.append((extent, self._tables, table_bytes))
            table_bytes += -(-len(extent) // GRAIN) * GRAIN
        for i, tensor in enumerate(self._given):
            self._places.append((range(*_extent(tensor)), self._tables + 1 + i, 0))
        addresses = []
        for arguments, i, tensor in self._addresses:
            place = self._place(tensor)
            if place is not None:
                addresses.append((arguments, i, *place))
            elif tensor.numel() and not any(tensor.data_ptr() in kept for kept in self._kept):
                self.refused = self.refused or f"memory of argument {i} of a launch is unknown"
        if self._overlap():
            self.refused = self.refused or "tensors that lie in one another"
        if self.refused:
            return None
        made = [_like(tensor.shape, tensor.dtype, tensor.device) for tensor in pieces]
        device = self._made[0].device if self._made else torch.device("cpu")
        made.append(_like((table_bytes,), torch.uint8, device))
        return Recording(self._steps, addresses, tuple(made))

    def piece_of(self, tensor: torch.Tensor) -> int:
        """Say which piece of the `recording` a tensor is that was made for the caller."""
        memory = _memory(tensor)
        return next(i for i, piece in enumerate(self._pieces) if _memory(piece) == memory)

    def view_of(self, tensor: torch.Tensor) -> View | None:
        """Say where a tensor is in the memory of the `recording`; None: in none of its pieces."""
        place = self._place(tensor) if tensor.numel() else (self._tables, 0)
        return place and View(*place, tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def _place(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        if not tensor.numel():
            return None
        address = tensor.data_ptr()
        for extent, piece, start in self._places:
            if address in extent:
                return piece, start + address - extent.start
        return None

    def _overlap(self) -> bool:
        extents = sorted((extent.start, extent.stop) for extent, *_ in self._places if extent)
        return any(stop > start for (_, stop), (start, _) in itertools.pairwise(extents))


def _like(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor of one element, expanded: what `torch.empty_like` is to make.

    It takes the host 1.6 us for the 2.4 of `torch.empty` (2-core CPU, torch 2.13).
    """
    return torch.empty((), dtype=dtype, device=device).expand(tuple(shape))


def _is_view(func: Any) -> bool:
    """Say whether an operator gives views of what it is given, and writes nothing."""
    schema = func._schema
    aliases = [one.alias_info for one in (*schema.arguments, *schema.returns)]
    writes = any(alias is not None and alias.is_write for alias in aliases)
    views = [value.alias_info is not None for value in schema.returns]
    return not writes and bool(views) and all(views)


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of a tensor's first byte and behind its last one."""
    if not tensor.numel():
        return 0, 0
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    elements = 1 + sum((size - 1) * stride for size, stride in pairs)
    return tensor.data_ptr(), tensor.data_ptr() + elements * tensor.itemsize


def _memory(tensor: torch.Tensor) -> Any:
    """Return what a tensor shares with its views: its storage's address; if empty, what it is.

    Not its identity: an operator's caller gets another object.
    """
    if tensor.numel():
        return tensor.untyped_storage().data_ptr()
    return tuple(tensor.shape), tensor.dtype
