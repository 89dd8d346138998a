"""One rank of a cluster with emulated NICs: its calls, and how all ranks time them together.

On a GPU each (path, number in a sequence) is one CUDA graph of a dispatch and its combine, with
static shapes and rows as a view, captured once: what a case sends is written into the tensor that
the graph reads, which has room for what this rank sends in any case. On a CPU the same calls run
one by one, interpreted.

Letters: W ranks, T tokens of this rank, H hidden.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import railwave
from bench.emulated_cases import Cluster, Plan
from bench.sampling import barrier, gather, rest
from railwave.config import Round
from railwave.kernels.shape import make_format, padded
from railwave.stats import Put, Stats

STATIC = {"static_shapes": True, "out": "view"}
FAST_NIC_GBS = 1e6  # so fast that a slot takes a nanosecond: what is left is the data path's own
WARM_UPS = 5
LINE_UP_CYCLES = 20_000_000  # of a GPU: about 10 ms
NEVER = 2**62  # nanoseconds


@dataclass(frozen=True)
class Sizes:
    """What a world is made for."""

    tokens: int  # the most that a rank sends or receives in a call
    hidden: int
    deadline_s: float = 120.0

    def declared(self, on: Cluster) -> dict[str, Any]:
        """Return the arguments of a `Communicator`: an expert a rank, top-1, bfloat16."""
        return {
            **{"num_experts": on.topo.num_ranks, "top_k": 1, "hidden": self.hidden},
            **{"max_tokens_per_rank": self.tokens, "max_recv_rows": self.tokens},
            "paths": on.paths,
        }

    def wire_bytes(self, topo: railwave.Topology) -> tuple[int, int]:
        """Return the bytes of a record of dispatch and of a sum of combine."""
        there = make_format(2 * self.hidden, 1, topo.gpus_per_node).RECORD_WORDS * 4
        return there, padded(-(-2 * self.hidden // 4)) * 4


@dataclass(frozen=True)
class Times:
    """Hold one method's samples, of the slowest rank, in microseconds."""

    whole_us: list[float]  # from the first call to the last result
    # First put to last arrival of each dispatch and each combine: what lies between, pack and
    # unpack of later rounds, is in it; planning, first pack, copies and final sums are not.
    network_us: list[float]
    # From when the last rank begins the first call to the first put of any: before a byte leaves.
    before_us: list[float]
    # From the first put of any rank to the last rank's first one, of each phase, added up: how much
    # longer than the others' the packing of the busiest rank takes.
    late_us: list[float]
    most_out: int  # grants that a rank had out at once, at most; 0 on other paths than granted


@dataclass(frozen=True)
class Sample:
    """Hold a plan's calls that have been launched; to be read once the GPU has run them."""

    began: Any
    ended: Any
    stamped: list[torch.Tensor]  # of each call, see `Stamps.new`
    grants: torch.Tensor | None  # how many a rank had out at once, by rail

    def us(self) -> float:
        """Return the time from the first call to the last result."""
        if isinstance(self.began, float):
            return (self.ended - self.began) * 1e6
        return self.began.elapsed_time(self.ended) * 1e3

    def ends(self) -> list[Any]:
        """Return the stamps: (calls, call and 2 phases, 2 ends) nanoseconds.

        NEVER for the first put of a phase in which this rank has put nothing. One whose first
        rounds are empty begins with them all the same.
        """
        stamps = torch.stack(self.stamped).cpu()
        ns = stamps[..., 0].clone()
        ns[:, 1:, 0][(stamps[:, 1:, 0, 2:] == 0).all(dim=-1)] = NEVER
        return ns.tolist()

    def most_out(self) -> int:
        """Return the most grants that this rank had out at once; 0 on other paths."""
        return 0 if self.grants is None else int(self.grants.max())


class Stamps:
    """Launch stamps of the clock: where a call begins; in both of its phases before the first put,
    and after the last round's arrival.
    """

    def __init__(self, exchange: Any) -> None:
        self._exchange, self._put, self._saw = exchange, exchange.put, exchange.saw_arrival
        self._phase = 0
        self.into: torch.Tensor | None = None  # of `new`
        exchange.put, exchange.saw_arrival = self._stamped_put, self._stamped_arrival
        self._granted, exchange.put_granted = exchange.put_granted, self._stamped_granted

    def new(self) -> torch.Tensor:
        """Return a place for the stamps of one call: (call and 2 phases, 2 ends, 2 + N) int64.

        [..., 0] are stamps; a call's end is not stamped. [phase, 0, 2:] are words put to each node.
        """
        size = 3, 2, 2 + self._exchange.config.topo.nodes
        place = torch.zeros(size, dtype=torch.int64, device=self._exchange.device)
        self._exchange.kernels.wire.stamp(place[0, 0, :1])  # loads it while nobody waits
        return place

    def begin(self) -> None:
        """Stamp where a call begins."""
        self._phase = 0
        self._stamp(0)

    def end(self, handle: Any) -> None:
        """Keep what was put in both phases of a call, which has its handle."""
        for phase, put_words in enumerate(handle.put_words, start=1):
            self.into[phase, 0, 2:].copy_(put_words[:-1])

    def _stamp(self, end: int) -> None:
        if self.into is not None:
            self._exchange.kernels.wire.stamp(self.into[self._phase, end, :1])

    def _stamped_put(self, load: torch.Tensor, this: Round, **how: Any) -> None:
        self._phase = 1 if how["wait_packed"] else 2  # combine has nothing packed
        if this.step == 1:
            self._stamp(0)
        self._put(load, this, **how)

    def _stamped_granted(self, *loads: torch.Tensor, begin: bool, **how: Any) -> None:
        # A handle counts what its dispatch puts, then what its combine does.
        self._phase = 1 + int(self._exchange.put_words.storage_offset() > 0)
        if begin:
            self._stamp(0)
        self._granted(*loads, begin=begin, **how)

    def _stamped_arrival(self, load: torch.Tensor, this: Round) -> None:
        self._saw(load, this)
        if this.step == len(self._exchange.config.rounds(self._exchange.path)):
            self._stamp(1)


class Rank:
    """This rank's communicator, its prepared calls and its stamps. Collective throughout."""

    def __init__(
        self,
        on: Cluster,
        sizes: Sizes,
        sent: np.ndarray,
        device: torch.device,
        most_calls: dict[str, int],
    ) -> None:
        """Make the communicator and capture the calls.

        Args:
            sent: (W,), the most tokens that each rank sends in a call.
            most_calls: by path, calls of a sequence.
        """
        self.on, self.sizes, self.device = on, sizes, device
        self.on_gpu, self.rank = device.type == "cuda", dist.get_rank()
        self.warm_ups = WARM_UPS if self.on_gpu else 0  # interpreted times are no matter
        self.rw = railwave.Communicator(
            on.topo,
            **sizes.declared(on),
            nic_gbs=on.nic_gbs,
            device=device,
            deadline_s=sizes.deadline_s,
        )
        self.exchange = self.rw._exchange
        self.stamps = Stamps(self.exchange)
        draw = torch.Generator().manual_seed(self.rank)
        tokens, self.padded_tokens = int(sent[self.rank]), int(sent.sum())
        self.x = torch.randn(tokens, sizes.hidden, generator=draw).bfloat16().to(device)
        self.weights = torch.ones(tokens, 1, device=device)
        most = max(most_calls.values())
        if self.on_gpu:
            torch.cuda._sleep(1)  # loads it
        self.topk = torch.full((most, tokens, 1), -1, device=device)
        self.stamped = {
            (path, i): self.stamps.new() for path, n in most_calls.items() for i in range(n)
        }
        self._check()
        self._pool = None
        self.run = {call: self._prepared(*call) for call in self.stamped}
        self._pipelined = self.exchange.beside

    def _check(self) -> None:
        """Check on every path that each token comes back as it went: to the rank after this."""
        self.stamps.into = self.stamps.new()
        ids = torch.full_like(self.topk[0], (self.rank + 1) % self.on.topo.num_ranks)
        ids[len(ids) // 2 :] = -1
        want = self.x * (ids >= 0)
        for path in self.on.paths:
            barrier(self.device)  # what is used between calls is loaded by now, see bench.mps
            _, y = self._call(ids, path)
            self.rw.check()  # says who was waited for
            barrier(self.device)
            bad = [rank for rank, ok in enumerate(gather(torch.equal(y, want))) if not ok]
            if bad:
                raise RuntimeError(f"{path}: combine gave wrong sums at ranks {bad}")
        self.stamps.into = None

    def _call(self, ids: torch.Tensor, path: str) -> tuple[Any, torch.Tensor]:
        how = STATIC if self.on_gpu else {}
        received = self.rw.dispatch(self.x, ids, self.weights, path=path, **how)
        return received, self.rw.combine(received.x, received.handle)

    def _prepared(self, path: str, number: int, *, pipelined: bool = True) -> Callable[[], Any]:
        """Return what runs a dispatch and a combine of `topk[number]`, with stamps."""

        def run() -> None:
            self.stamps.into = self.stamped[path, number]
            self.stamps.begin()
            received, _ = self._call(self.topk[number], path)
            self.stamps.end(received.handle)
            self.stamps.into = None

        if not self.on_gpu:
            return run
        if not pipelined:
            self.exchange.beside = None  # as pipeline=False
        try:
            barrier(self.device)
            if pipelined:  # else its kernels have run, and a repeated call would go beside
                run()
            barrier(self.device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                run()
        finally:
            if not pipelined:
                self.exchange.beside = self._pipelined
        self._pool = graph.pool()  # calls follow one another: one's memory does for all
        return graph.replay

    def sequential(self, path: str) -> Callable[[], Any]:
        """Return what runs the first call of a path without packing beside a put."""
        return self._prepared(path, 0, pipelined=False)

    def tokens(self, call: np.ndarray) -> torch.Tensor:
        """Return (T, 1) expert ids, here ranks, of what this rank sends; -1 for the rest."""
        row = torch.from_numpy(call[self.rank].copy())
        ids = torch.arange(len(row)).repeat_interleave(row)
        most = int(call.sum(axis=0).max())
        if most > self.sizes.tokens:
            raise ValueError(
                f"--tokens must be at least {most}, the most rows that a rank receives, got "
                f"{self.sizes.tokens}"
            )
        rest = torch.full((len(self.x) - len(ids),), -1)
        return torch.cat([ids, rest]).view(-1, 1).to(self.device)

    def sample(
        self,
        plans: list[Plan],
        samples: int,
        rate: float,
        *,
        warm_ups: int | None = None,
        run: dict[str, Callable[[], Any]] | None = None,
    ) -> list[Times]:
        """Run the plans in turns, through NICs of a rate in GB/s; return all samples.

        Args:
            run: by method, what runs its first call in place of the prepared one.
        """
        self.exchange.set_nic_gbs(rate)
        routed = [[self.tokens(call) for call in plan.calls] for plan in plans]
        whole: list[list[float]] = [[] for _ in plans]
        ends: list[list[Any]] = [[] for _ in plans]
        most_out = [0] * len(plans)
        nothing = torch.full_like(self.topk[0], -1)
        warm_ups = self.warm_ups if warm_ups is None else warm_ups
        for turn in range(warm_ups + samples):
            barrier(self.device)
            if self.on_gpu:  # it waits until every rank has launched, however many share a core
                torch.cuda._sleep(LINE_UP_CYCLES)
            order = [(turn + k) % len(plans) for k in range(len(plans))]
            launched = [
                self._once(plans[i], routed[i], nothing, (run or {}).get(plans[i].method))
                for i in order
            ]
            if self.on_gpu:
                rest()
            for i, sample in zip(order, launched, strict=True):
                if turn >= warm_ups:
                    whole[i].append(sample.us())
                    ends[i].append(sample.ends())
                    most_out[i] = max(most_out[i], sample.most_out())
        self.rw.check()
        by_rank = gather((whole, ends, most_out))
        times = []
        for i in range(len(plans)):
            us, stamps, out = zip(*([part[i] for part in of] for of in by_rank), strict=True)
            parts = (_network_us(stamps), _before_us(stamps), _late_us(stamps))
            times.append(Times(list(map(max, zip(*us, strict=True))), *parts, max(out)))
        return times

    def _once(
        self, plan: Plan, routed: list[torch.Tensor], nothing: torch.Tensor, first: Any
    ) -> Sample:
        """Run a plan's calls once; on a GPU launch them, after an empty call whose end lines up.

        What a later plan of the path writes over is copied behind them.
        """
        runs = [self.run[plan.path, i] for i in range(len(routed))]
        if first:
            runs[0] = first
        if self.on_gpu:
            self.topk[0].copy_(nothing)
            self.run[plan.path, 0]()
        for i, ids in enumerate(routed):
            self.topk[i].copy_(ids)
        began = self._mark()
        for run in runs:
            run()
        ended = self._mark()
        stamped = [self.stamped[plan.path, i].clone() for i in range(len(routed))]
        row = self.exchange.kernels.granted.MOST_OUT.value
        grants = self.exchange.grants[row].clone() if plan.path == "granted" else None
        return Sample(began, ended, stamped, grants)

    def _mark(self) -> Any:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def shares(self, plan: Plan) -> dict[str, list[float]]:
        """Run a plan's calls once; return each NIC position's part of what was put and received."""
        rows: list[Put] = []
        for i, call in enumerate(plan.calls):
            self.topk[i].copy_(self.tokens(call))
            barrier(self.device)
            received, _ = self._call(self.topk[i], plan.path)
            rows += received.handle.stats().rows
        everybody = Stats.total(gather(Stats(tuple(rows))))
        # A record arrives on the rail that it left by: receiving is what combine puts back.
        return {
            way: list(everybody.rail_share(phase=phase).values())
            for way, phase in (("transmit", "dispatch"), ("receive", "combine"))
        }

    def close(self) -> None:
        """Give up graphs and communicator."""
        barrier(self.device)
        self.run.clear()
        self.rw.close()
        gc.collect()  # the stamps hold the exchange that holds them
        if self.on_gpu:
            torch.cuda.empty_cache()


def _network_us(by_rank: Iterable[Any]) -> list[float]:
    """Return, sample by sample, how long a phase is on the wire: first put to last arrival of any.

    Of phases that overlap, since a rank without records goes on, what they share counts once.

    Args:
        by_rank: (ranks, samples, calls, call and 2 phases, 2 ends) nanoseconds, see `Sample.ends`.

    Example: a call of two ranks; dispatch from 1,000 to 4,000, combine from 6,000 to 7,000 ns
        >>> one = [[500, 0], [1000, 3000], [6500, 7000]]
        >>> other = [[600, 0], [2000, 4000], [6000, 6900]]
        >>> _network_us([[[one]], [[other]]])
        [4.0]

    Example: the other rank has put all that it puts in dispatch, and goes on at 2,500 ns
        >>> other = [[600, 0], [2000, 2400], [NEVER, 6900]]
        >>> _network_us([[[one]], [[other]]])
        [2.5]
    """
    ns = np.array(by_rank)[..., 1:, :]
    first, last = ns[..., 0].min(axis=0), ns[..., 1].max(axis=0)
    samples = len(first)
    first, last = first.reshape(samples, -1), last.reshape(samples, -1)
    # Each rank's phases come one after another, so the last arrivals do, too.
    last_before = np.concatenate([first[:, :1], last[:, :-1]], axis=1)
    on_wire = last - np.maximum(first, last_before)
    return (np.where(first < NEVER, on_wire, 0).sum(axis=1) / 1e3).tolist()


def _before_us(by_rank: Iterable[Any]) -> list[float]:
    """Return, sample by sample, the last rank's begin of the first call to any rank's first put.

    Args: as of `_network_us`.

    Example: begun at 500 and 600, put from 1,000 ns on
        >>> one = [[500, 0], [1000, 3000], [6500, 7000]]
        >>> other = [[600, 0], [2000, 4000], [6000, 6900]]
        >>> _before_us([[[one]], [[other]]])
        [0.4]

    Example: nobody puts anything
        >>> nothing = [[500, 0], [NEVER, 3000], [NEVER, 7000]]
        >>> _before_us([[[nothing]], [[nothing]]])
        [0.0]
    """
    ns = np.array(by_rank)[:, :, 0, :2, 0]  # (ranks, samples, call and dispatch)
    first, begun = ns[..., 1].min(axis=0), ns[..., 0].max(axis=0)
    return (np.where(first < NEVER, first - begun, 0) / 1e3).tolist()


def _late_us(by_rank: Iterable[Any]) -> list[float]:
    """Return, sample by sample, any rank's first put to the last rank's first one, all phases.

    Args: as of `_network_us`.

    Example: dispatch put from 1,000 and 2,000 ns on, combine from 6,500 and 6,000 on
        >>> one = [[500, 0], [1000, 3000], [6500, 7000]]
        >>> other = [[600, 0], [2000, 4000], [6000, 6900]]
        >>> _late_us([[[one]], [[other]]])
        [1.5]
    """
    ns = np.array(by_rank)[..., 1:, 0]
    late = np.where(ns < NEVER, ns, -NEVER).max(axis=0) - ns.min(axis=0)
    return (np.maximum(late, 0).sum(axis=(1, 2)) / 1e3).tolist()
