"""What a dispatch gives back: the rows, and how to return results for them.

Letters: T tokens, H hidden, K top-k, N nodes, G GPUs a node, P the most records of a proxy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from railwave.kernels.shape import Format
from railwave.sched import Decision
from railwave.stats import Stats, stats_of

STATIC = 1 << 30  # a bit of a dispatch's status: with static shapes


@dataclass(frozen=True, eq=False)
class Handle:
    """One PE's memory of a dispatch, in tensors of its own: it outlives the staging.

    Pass it to `combine`, once or several times, in any order with other handles.
    """

    path: str  # native, rail, permutation, joint or granted; its combine follows the same path
    num_tokens: int  # T of this rank's dispatch
    num_rows: int  # rows of the `Received`: those that came, or with static shapes the most
    max_rows: int  # tokens that came, or with static shapes the most: rows where they arrived
    row_words: int  # 32-bit words from one row to the next, where they arrived
    received: torch.Tensor  # (1 + experts,) int32, rows that came, then slots of each local expert
    record_token: torch.Tensor  # (N, T_max) int32, token of each record, per destination node
    num_records: torch.Tensor  # (N,) int32, records to each node
    proxy: torch.Tensor  # (N, T_max) int32, local GPU that sent each record
    slot: torch.Tensor  # (N, T_max) int32, its place among what that GPU sent to the node
    own_rows: torch.Tensor  # (T_max, ENTRIES) int32, each token's own-node rows: row * G + GPU
    in_rows: torch.Tensor  # (N, P, ENTRIES) int32, entries of the records that arrived here
    out_load: torch.Tensor  # (N, G) int32, records each PE of this node put to each node
    in_load: torch.Tensor  # (N, G) int32, records each PE of each node put to this node
    quota: torch.Tensor  # (N, R) int32, records of this node that each rail carried to each node
    rail_records: torch.Tensor  # (N, R) int32, the same by the owners' rails
    # (2, N + 1) int64, 32-bit words that dispatch and the latest combine put to each node, counted
    # by the wire kernels; then those of a record, or of a sum, 0 before there was a combine.
    put_words: torch.Tensor
    exchange: Any  # the PE that made it
    epoch: int  # the number of its dispatch among that PE's phases
    static_shapes: bool = False  # shapes say nothing of what came; no call waits for the device
    view: bool = False  # rows were handed out where they arrived
    serial: int = 0  # how many phases the host had launched by then
    stream: Any = None  # of a GPU, on which its tensors were made
    decision: Decision | None = None  # where path was "auto": why this path
    # What its `Received` holds beside x, for a dispatch that repeats this one.
    topk_idx: torch.Tensor | None = None
    topk_weights: torch.Tensor | None = None
    counts: torch.Tensor | None = None  # (1 + experts,) int32, rows and those of each expert
    # Of rows by expert, from `kernels.group.place`; None for a row a token.
    places: torch.Tensor | None = None  # (max_rows, K) int32, where each expert of a token has it
    offsets: torch.Tensor | None = None  # (1 + experts,) int32, where groups start
    alignment: int = 0  # at multiples of it; 0 for a row a token
    host_counts: tuple[int, ...] | None = None  # rows of each expert; None with static shapes
    # With gradients, a tensor without elements: its gradient function is the dispatch's, so that a
    # combine leads there on every rank, whatever the rank received.
    anchor: torch.Tensor | None = None
    # (1,) int64: the epoch, for graphs of `torch.compile`, whose handles have 0; None on a GPU.
    epoch_tensor: torch.Tensor | None = None
    recorded: Any = None  # where its tables are, if its dispatch repeated one, see `recorded`

    def __reduce__(self) -> Any:
        raise TypeError("a handle cannot be copied or pickled: it belongs to the object it is from")

    def stats(self) -> Stats:
        """Say what this rank's dispatch put on its rail to each node, and its latest combine.

        As planned, and as the wire kernels counted; "latest combine" is also that of a backward
        pass or of `combine_weights`, and one that `torch.compile` has in a graph is left out. Waits
        for the device.

        Returns:
            `Stats`: rows, `rail_share`, `to_dict`, `to_pandas`. Those of all ranks together are
            `Stats.total`.

        Example:
            >>> from railwave import LocalWorld, Topology
            >>> sizes = dict(num_experts=2, top_k=1, hidden=8, max_tokens_per_rank=3)
            >>> world = LocalWorld(Topology(2, 1, 1), **sizes)
            >>> xs, ids = [torch.ones(3, 8).bfloat16()] * 2, [torch.ones(3, 1).long()] * 2
            >>> first = world.dispatch(xs, ids, [torch.ones(3, 1)] * 2)[0].handle
            >>> [(p.source, p.destination, p.planned_records, p.put_bytes) for p in
            ...  first.stats().rows]
            [(0, 1, 3, 192)]
        """
        return stats_of(self)

    @property
    def by_token(self) -> Handle:
        """The same dispatch with a row a token, which is how they arrived."""
        form = {"num_rows": self.max_rows, "alignment": 0, "places": None, "offsets": None}
        return replace(self, **form)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield what the handle holds on the device."""
        return (value for value in vars(self).values() if isinstance(value, torch.Tensor))


@dataclass(frozen=True, eq=False)
class Received:
    """What one rank receives: a row per (token, rank), ordered by (source rank, token).

    With static shapes there are max_recv_rows rows, of which the first `num_rows` came; the others
    have ids -1 and weights 0, and x of them is undefined, NaN perhaps, unless autograd needs it.

    With `expert_alignment` a row per (token, local expert): a group for each expert, in their
    order, which starts at a multiple of that; within it as above. The rows that are left free
    between groups have expert -1 and weight 0, and no combine reads them; x of them is undefined
    unless `zero_padding` was asked for. With static shapes there are as many rows as could come:
    max_recv_rows * min(top-k, local experts), and alignment - 1 for each local expert.

    Attributes:
        x: (rows, H), dtype as dispatched; the caller's own, or with out="view" the region that rows
            arrive in: rows with a stride, valid until this rank's next dispatch or combine. Not
            for training: autograd keeps what experts read, and would find other rows there.
        topk_idx: (rows, K), dtype as dispatched; local expert ids, -1 for experts elsewhere.
        topk_weights: (rows, K) float32; 0 where topk_idx is -1. By expert, both are (rows,): the
            row's expert, and its weight; for an expert that a token names twice, their sum.
        num_rows: () int32 on the device, the rows that came; by expert, where the last group ends.
        num_tokens_per_expert: (local experts,) int32; a repeated id counts each time. By expert:
            the rows of each, where it counts once.
        handle: what `combine` needs, and a dispatch that repeats this one: its `Received` has these
            same topk_idx and topk_weights, so leave them as they are.
        extras: (rows, n) of each extra tensor, dtype as dispatched. With extras, these and x are
            views of one tensor, rows at a stride: for autograd an edit of one is an edit of all.
        expert_offsets: by expert, (1 + local experts,) int32: where each group starts, and where
            the last one ends. Else None.
        rows_per_expert: by expert, num_tokens_per_expert on the host. None otherwise, and with
            static shapes.
    """

    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor
    num_rows: torch.Tensor
    num_tokens_per_expert: torch.Tensor
    handle: Handle
    extras: tuple[torch.Tensor, ...] = ()
    expert_offsets: torch.Tensor | None = None
    rows_per_expert: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Call:
    """One rank's checked arguments to a dispatch."""

    x: torch.Tensor  # (T, H)
    topk_idx: torch.Tensor | None  # (T, K) int32 or int64; None with `again`
    topk_weights: torch.Tensor | None  # (T, K) float32; likewise
    path: str  # or "auto"
    fmt: Format
    status: int  # what all ranks' calls must agree on, as a number; negative for a wrong call
    static_shapes: bool = False
    view: bool = False  # rows are handed out where they arrive
    again: Handle | None = None  # of the dispatch whose routing this one repeats
    extras: tuple[torch.Tensor, ...] = ()  # (T, n) each
    alignment: int = 0  # of rows by expert; 0 for a row a token
    zero_padding: bool = False
    joined: torch.Tensor | None = None  # x and extras as words, where they are already

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        """What a record carries of a token."""
        return (self.x, *self.extras)
