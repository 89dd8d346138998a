"""What one PE has, and the pieces of a stage that dispatch and combine share.

Letters: N nodes, G GPUs a node, R rails, E experts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch

from railwave import tracing
from railwave.config import Config, Round
from railwave.errors import ReceiveOverflowError
from railwave.handle import STATIC
from railwave.heap import LocalHeap, NvshmemHeap, ShmHeap
from railwave.kernels import load
from railwave.recording import Tape, Turn

NOTIFY_REGIONS = {"notify": "messages", "word": "notify", "outbox": "outbox"}


@dataclass(frozen=True)
class Wait:
    """Words that must reach `mark` before the next stage: `word[index]` of the waiting PE."""

    word: str  # the region of the words
    index: slice | list[int]  # into the region
    mark: int


Late = tuple[str, int, int]  # word, its writer, the mark that it has not reached


@dataclass(frozen=True)
class News:
    """Any word of some regions must go on from what it was, or a time pass."""

    seen: dict[str, torch.Tensor]  # by region
    until_ns: float
    missing: Late  # one that there is no news of


@dataclass(frozen=True)
class Failure:
    """Why a phase failed: a wait past its deadline, a wrong call, or rows that do not fit."""

    word: str  # of `kernels.wire.WORDS`: "call" and "overflow" are none
    pe: int  # whose word or call it is
    seen: int
    expected: int
    epoch: int  # of the phase

    @property
    def static_there(self) -> bool:
        """Whether the other rank's call alone is one with static shapes."""
        return self.seen >= STATIC > self.expected


# A stage yields what the next one waits for, to be worked out by who wants to know: it reads tables
# that are on the device.
Waits = Callable[[], list[Wait | News]]
Stages = Generator[Waits, None, Any]


class Observer(Protocol):
    """What a phase may be watched by."""

    def put(self, pe: int, peer: int, *, rail: int, wave: int) -> None: ...

    def arrived(self, pe: int, peer: int, *, rail: int) -> None: ...


class CallsDiffer(Exception):
    """Ranks called with arguments that do not fit together; nothing has moved. For the driver."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure)
        self.failure = failure


class Exchange:
    """One PE: its part of the heap, its tables and its kernels.

    Args:
        config: sizes.
        heap: symmetric memory that reaches every PE.
        pe: this PE's number.
        device: where its tensors live; on a CPU the kernels are interpreted.
        deadline_s: how long a wait may take, in seconds.
        compare_calls: no driver sees all PEs' arguments, so a phase must compare them.
    """

    def __init__(
        self,
        config: Config,
        heap: LocalHeap | ShmHeap | NvshmemHeap,
        pe: int,
        *,
        device: torch.device,
        deadline_s: float,
        compare_calls: bool = False,
    ) -> None:
        self.config, self.heap, self.pe, self.device = config, heap, pe, device
        self.kernels = load(interpret=device.type == "cpu")
        self.compare_calls = compare_calls
        self.observer: Observer | None = None
        self.tape: Tape | None = None  # that takes the phase that runs down
        self.epoch = 0  # the host's mirror of the device's counter
        self.serial = 0  # phases launched, or captured
        self.node, self.local = divmod(pe, config.topo.gpus_per_node)
        self.rail = config.topo.rail_of_gpu[self.local]
        wire = self.kernels.wire
        self.state = torch.zeros(wire.STATE_WORDS, dtype=torch.int64, device=device)
        self.state[wire.DEADLINE_NS.value] = int(deadline_s * 1e9)
        if config.nic_gbs is not None:
            self.set_nic_gbs(config.nic_gbs)
        tracing.join(self)
        self._make_tables()
        S = config.shape
        self.counts = self.ints(1 + S.N + S.N * S.G + S.E)
        self.row_index = self.ints(S.T, S.N * S.G)
        self.put_words: torch.Tensor | None = None  # of the phase that runs: (N + 1,) of a handle
        # What the path granted knows, and whether a launch of it runs to the end: where a launch of
        # another PE could not run beside it, or the host listens to others, it comes back.
        granted = self.kernels.granted
        lanes = granted.lanes(S) if "granted" in config.paths and S.N > 1 else 0
        rows = granted.ROWS.value
        self.grants = torch.zeros(rows, lanes, dtype=torch.int64, device=device)
        self.persists = device.type == "cuda" and not isinstance(heap, LocalHeap)
        self.path = "none"  # of the phase that runs, or ran last; "auto" until it is chosen
        # A stream for what runs beside a put; None: one after the other.
        self.beside: torch.cuda.Stream | None = None
        self.events: tuple[torch.cuda.Event | None, ...] = (None, None)  # of a fork, and of a join
        if config.pipeline and device.type == "cuda":
            self.beside = torch.cuda.Stream(device)
            # Made once: to make one takes the host longer than to launch a kernel.
            self.events = (torch.cuda.Event(), torch.cuda.Event())
        # One window of all pairs, for path="auto".
        all_pairs = 1 - torch.eye(S.N, dtype=torch.int8, device="cpu")
        self.all_pairs = all_pairs[None].to(device)
        self.descriptors = torch.zeros(3, dtype=torch.float64, device=device)

    def _make_tables(self) -> None:
        """Bring the expert map and the rails to the device."""
        config, topo, S = self.config, self.config.topo, self.config.shape
        starts = [0]
        for num_experts in config.experts_per_rank:
            starts.append(starts[-1] + num_experts)
        position = {e: pos for pos, e in enumerate(config.expert_order)}
        rails = [list(gpus) + [-1] * (S.RAIL_GPUS - len(gpus)) for gpus in topo.gpus_of_rail]
        ints = {"dtype": torch.int32, "device": self.device}
        self.expert_rank = torch.tensor(config.expert_to_rank, **ints)
        self.expert_pos = torch.tensor([position[e] for e in range(config.num_experts)], **ints)
        self.expert_start = torch.tensor(starts, **ints)
        self.rail_of_gpu = torch.tensor(topo.rail_of_gpu, **ints)
        self.rail_gpus = torch.tensor(rails, **ints)
        self.rail_mates = self.rail_gpus[self.rail].clone()
        self.eligible = topo.eligible_rails[self.node].to(**ints)

    def set_nic_gbs(self, rate: float) -> None:
        """Let what is put from now on pass this PE's emulated NIC at another rate."""
        port = self.kernels.port
        self.state[port.NIC_RATE.value] = max(1, round(rate * 1e6))
        self.state[port.NIC_GPU.value] = self.config.topo.gpus_of_rail[self.rail][0]

    def advance(self) -> None:
        """Count a phase, whose first kernel is launched."""
        self.epoch += 1
        self.serial += 1

    def epoch_tensor(self, static_shapes: bool) -> torch.Tensor | None:
        """Return the epoch, (1,) int64, for `torch.compile` on a CPU; else None."""
        if not (static_shapes and self.compare_calls) or self.device_decides(static_shapes):
            return None
        return torch.tensor([self.epoch], device=self.device)

    def ints(self, *size: int) -> torch.Tensor:
        """Return a zeroed int32 tensor on the device."""
        return torch.zeros(size, dtype=torch.int32, device=self.device)

    def empty(self, *size: int) -> torch.Tensor:
        """Return an int32 tensor on the device, for a kernel to write."""
        return torch.empty(size, dtype=torch.int32, device=self.device)

    def rows(
        self, num_rows: int, hidden: int, dtype: torch.dtype, *, row_words: int, start: int = 0
    ) -> torch.Tensor:
        """View the region of rows as (num_rows, hidden) of a dtype, each from word `start` on."""
        region = self.heap.region(self.pe, "rows", torch.uint8).view(dtype)
        size = dtype.itemsize
        shape, strides = (num_rows, hidden), (row_words * 4 // size, 1)
        return region.as_strided(shape, strides, region.storage_offset() + start * 4 // size)

    @cached_property
    def _rows_at(self) -> list[int]:
        """Where rows arrive: of every PE whose memory the host sees."""
        everywhere = isinstance(self.heap, LocalHeap)
        pes = range(self.config.topo.num_ranks) if everywhere else (self.pe,)
        return [self.heap.region(pe, "rows", torch.uint8).data_ptr() for pe in pes]

    def in_rows(self, tensor: torch.Tensor) -> bool:
        """Say whether a tensor lies where rows arrive."""
        first, size = tensor.data_ptr(), self.heap.layout.regions["rows"].size
        return any(0 <= first - start < size for start in self._rows_at)

    def others_rows(self, tensor: torch.Tensor) -> bool:
        """Say whether a tensor lies there, but not from this PE's first row on."""
        own = self.heap.region(self.pe, "rows", torch.uint8).data_ptr()
        return self.in_rows(tensor) and tensor.data_ptr() != own

    def notify_args(self) -> dict[str, Any]:
        """Return the arguments of a launcher that tells all ranks."""
        layout = self.heap.layout
        offsets = {f"{k}_off": layout[v] for k, v in NOTIFY_REGIONS.items()}
        return {"me": self.pe, **offsets}

    def tiles(self) -> dict[str, Any]:
        """Return the arguments that a launcher of tiles takes."""
        tiles = self.config.tiles
        return {
            "shape": self.config.shape,
            "programs": tiles.programs,
            "block_m": tiles.block_m,
            "warps": tiles.warps,
        }

    def new_put_words(self) -> torch.Tensor:
        """Return counters of a dispatch and its combine, (2, N + 1), which a kernel starts."""
        return torch.empty(2, self.config.topo.nodes + 1, dtype=torch.int64, device=self.device)

    def programs(self, this: Round) -> int:
        """Return the programs per peer of a round's launches."""
        return max(1, self.config.tiles.programs // this.num_peers)

    def programs_at_once(self) -> tuple[int, int]:
        """Return the programs of a put to one peer and of a pack beside it, which wait at once.

        0 of the pack: there is no room for it.
        """
        tiles = self.config.tiles
        pack = max(1, min(tiles.programs // 2, tiles.waiting // 3))
        put = max(1, min(tiles.programs, tiles.waiting - pack))
        return (put, pack) if put + pack <= tiles.waiting else (tiles.programs, 0)

    def programs_beside_granted(self, this: Round) -> int:
        """Return the programs per peer of an unpack that waits beside the one program of granted.

        At most half of the GPU's, so that they never keep that one from beginning. 0: there is no
        room, or a launch of granted does not run to the end.
        """
        if not (self.beside and self.persists):
            return 0
        tiles = self.config.tiles
        half = torch.cuda.get_device_properties(self.device).multi_processor_count // 2
        return min(tiles.programs, tiles.waiting - 1, half) // this.num_peers

    def round_args(self, this: Round) -> dict[str, int]:
        """Return the arguments that a launcher of one round takes."""
        return {
            "me": self.pe,
            "wave": this.wave,
            "num_peers": this.num_peers,
            "first": this.first,
            "round_records": this.records,
        }

    def all_wait(self, word: str, step: int) -> Waits:
        """Wait for every word of a region: one a PE of the node, or one a rank for notify."""
        return lambda: [Wait(word, slice(None), self.mark(step))]

    def rail_wait(self, word: str, step: int) -> Waits:
        """Wait for a word of the PE with the own local index at every node."""
        mates = slice(self.local, None, self.config.topo.gpus_per_node)
        return lambda: [Wait(word, mates, self.mark(step))]

    def words(self, name: str) -> torch.Tensor:
        """View the words of a region of this PE."""
        return self.heap.region(self.pe, name, torch.int64)

    def late(self, waits: list[Wait | News]) -> list[Late]:
        """List the words that have not come."""
        late = []
        for wait in waits:
            if isinstance(wait, News):
                same = all(torch.equal(self.words(name), seen) for name, seen in wait.seen.items())
                late += [wait.missing] if same and time.monotonic_ns() < wait.until_ns else []
                continue
            words = self.words(wait.word)
            behind = torch.zeros_like(words, dtype=torch.bool)
            behind[wait.index] = words[wait.index] < wait.mark
            for index in behind.nonzero().flatten().tolist():
                late.append((wait.word, self._writer(wait.word, index), wait.mark))
        return late

    def _writer(self, word: str, index: int) -> int:
        S = self.config.shape
        if word in ("notify", "grant", "said", "reset", "granted", "landed", "back"):
            return index
        if word == "arrived":
            return index // S.CHUNKS * S.G + self.local
        return self.node * S.G + index

    def mark(self, step: int) -> int:
        """Return the value of this phase's words for a step."""
        return self.epoch * self.config.shape.MAX_STEPS + step

    def put_waits(
        self, send_load: torch.Tensor, this: Round, *, packed: bool, grant: bool
    ) -> list[Wait]:
        """List what this PE's puts of a round wait for."""
        waits = [Wait("packed", slice(None), self.mark(this.step))] if packed else []
        if grant:
            G = self.config.topo.gpus_per_node
            mates = self.config.topo.gpus_of_rail[self.rail]
            waits += [
                Wait("grant", [d * G + g for g in mates], self.mark(this.step))
                for d, _ in self._peers(send_load, this, direction=1)
            ]
        return waits

    def arrived_waits(
        self, recv_load: torch.Tensor, this: Round, *, taken: bool = False
    ) -> list[Wait]:
        """List the chunks of a round that this PE will receive, and taken of the round before."""
        S = self.config.shape
        waits = [Wait("taken", slice(None), self.mark(this.step - 1))] if taken else []
        for s, num_records in self._peers(recv_load, this, direction=-1):
            chunks = slice(s * S.CHUNKS, s * S.CHUNKS + S.num_chunks(num_records))
            waits.append(Wait("arrived", chunks, self.mark(this.step)))
        return waits

    def put(
        self,
        send_load: torch.Tensor,
        this: Round,
        *,
        record_words: int,
        wait_packed: bool,
        wait_grant: bool,
        tell_taken: bool,
        programs: int | None = None,
    ) -> None:
        """Put this PE's records of a round on the wire; `programs`: for each peer."""
        layout, G = self.heap.layout, self.config.topo.gpus_per_node
        if self.observer:
            for d, _ in self._peers(send_load, this, direction=1):
                peer = d * G + self.local
                self.observer.put(self.pe, peer, rail=self.rail, wave=this.wave)
        start = this.buffer * record_words * 4
        self.kernels.wire.put(
            *(self.heap.bases, self.state, self.put_words, send_load, self.rail_mates),
            send_off=layout["send"] + start,
            recv_off=layout["recv"] + start,
            arrived_off=layout["arrived"],
            grant_off=layout["grant"],
            packed_off=layout["packed"],
            taken_off=layout["taken"],
            step=this.step,
            **self.round_args(this),
            record_words=record_words,
            wait_packed=wait_packed,
            wait_grant=wait_grant,
            tell_taken=tell_taken,
            port_off=layout["ports"] if self.config.shape.EMULATED else 0,
            shape=self.config.shape,
            programs=programs or self.programs(this),
            block_w=self.config.tiles.block_put,
            warps=self.config.tiles.warps,
        )

    def put_granted(
        self,
        send_load: torch.Tensor,
        recv_load: torch.Tensor,
        *,
        record_words: int,
        packs: int,
        begin: bool,
        most_steps: int,
    ) -> None:
        """Put this PE's records as they are granted, and grant others theirs; or go on with it."""
        layout, tiles = self.heap.layout, self.config.tiles
        words = ("arrived", "granted", "landed", "back", "packed")
        self.kernels.granted.granted(
            *(self.grants, self.heap.bases, self.state, self.put_words, send_load, recv_load),
            self.rail_mates,
            me=self.pe,
            send_off=layout["send"],
            recv_off=layout["recv"],
            **{f"{name}_off": layout[name] for name in words},
            port_off=layout["ports"] if self.config.shape.EMULATED else 0,
            begin=begin,
            packs=packs,
            most_steps=most_steps,
            record_words=record_words,
            least_bytes=self.config.of_a_rail(tiles.granted_bytes),
            part_bytes=self.config.of_a_rail(tiles.part_bytes),
            patience_ns=tiles.patience_ns,
            shape=self.config.shape,
            block_w=tiles.block_put,
        )

    def forward(self) -> None:
        """Pass what came along the own rail on to the node."""
        layout = self.heap.layout
        self.kernels.notify.forward(
            *(self.heap.bases, self.state),
            me=self.pe,
            notify_off=layout["messages"],
            word_off=layout["notify"],
            programs=self.config.tiles.programs,
            block_n=self.config.tiles.block_n,
            shape=self.config.shape,
        )

    def plan(self, *, balanced: bool) -> Any:
        """Plan what leaves and what arrives, from all ranks' messages; return the tables."""
        layout, tiles, S = self.heap.layout, self.config.tiles, self.config.shape
        plan = self.kernels.quota.PlanTables.empty(S, self.device)
        self.kernels.quota.quota(
            *(self.heap.bases, self.state, self.rail_of_gpu, self.rail_gpus, self.eligible),
            *(self.expert_start, plan),
            me=self.pe,
            notify_off=layout["messages"],
            word_off=layout["notify"],
            verdict_off=layout["verdict"],
            balanced=balanced,
            block_i=tiles.block_i,
            warps=tiles.warps,
            shape=S,
        )
        return plan

    def verdict_wait(self) -> Waits:
        """Wait for every node's verdict."""
        return lambda: [Wait("verdict", slice(None), self.epoch << 32)]

    def hear_verdict(self) -> None:
        """End the phase if rows do not fit on some rank."""
        self.kernels.verdict.verdict(
            *(self.heap.bases, self.state),
            me=self.pe,
            verdict_off=self.heap.layout["verdict"],
            shape=self.config.shape,
        )

    def begin(self, status: int) -> None:
        """Begin a phase that counts nothing: tell all ranks the status of this one's call."""
        self.kernels.notify.notify(
            *(self.heap.bases, self.state, self.counts, self.expert_start),
            **self.notify_args(),
            status=status,
            shape=self.config.shape,
        )
        self.advance()

    def hear_status(
        self,
        *,
        host_hears: bool = True,
        put_words: torch.Tensor | None = None,
        record_words: int = 0,
    ) -> Stages:
        """Hear the status of every rank's call and compare it with the own one.

        Args:
            put_words, record_words: see `kernels.match`; where a phase has no other kernel for it.

        Raises:
            CallsDiffer: see `check_plan`.
        """
        yield self.rail_wait("notify", 0)
        self.forward()
        yield self.all_wait("notify", 0)
        layout = self.heap.layout
        self.kernels.verdict.heard(
            *(self.heap.bases, self.state, put_words),
            me=self.pe,
            notify_off=layout["messages"],
            word_off=layout["notify"],
            record_words=record_words,
            shape=self.config.shape,
        )
        if host_hears:
            self.check_plan()

    def device_decides(self, static_shapes: bool) -> bool:
        """Say whether the host must not wait to hear how a phase goes."""
        return static_shapes and self.compare_calls and self.device.type == "cuda"

    @contextmanager
    def beside_put(
        self, launch: Callable[[], None] | None, then: Callable[[], None] | None = None
    ) -> Iterator[None]:
        """Launch something beside the put that is inside; what follows waits for both.

        Args:
            launch: what needs nothing of the put. None: nothing is launched so.
            then: what waits for what the put moves. It is launched behind it, and goes on even if
                all is one stream.
        """
        if launch is None:
            yield
            return
        assert self.beside
        own = torch.cuda.current_stream(self.device)
        if self.tape:
            self.tape.turned(Turn.FORK)
        self.beside.wait_event(own.record_event(self.events[0]))
        try:
            with torch.cuda.stream(self.beside):
                launch()
            yield
            if then:
                with torch.cuda.stream(self.beside):
                    then()
        finally:  # after an error, too: memory that is given back then may be used at once
            if self.tape:
                self.tape.turned(Turn.JOIN)
            own.wait_event(self.beside.record_event(self.events[1]))

    def start_at(self, epoch: int) -> None:
        """Go on after a failure, beyond every epoch in flight: the same on all PEs."""
        wire = self.kernels.wire
        self.epoch = epoch
        self.state[wire.EPOCH.value] = epoch
        self.state[wire.NOTIFIES.value] = epoch  # any number that all agree on
        self.state[wire.FAILED.value : self.kernels.port.NIC_RATE.value] = 0
        self.counts.zero_()  # an interrupted phase may have left slots

    @contextmanager
    def cut_short(self) -> Iterator[None]:
        """Run stages as if the phase had failed: every kernel runs, nothing waits or is told."""
        wire, state, epoch = self.kernels.wire, self.state.clone(), self.epoch
        self.state[wire.FAILED.value], self.state[wire.NOTES.value] = 1, 0
        try:
            with tracing.paused():
                yield
        finally:
            self.state.copy_(state)
            self.counts.zero_()  # an interrupt may have come between count and notify
            self.epoch = epoch

    def check_plan(self) -> int:
        """Wait for the device; return the rows that this PE will receive.

        Raises:
            CallsDiffer: on every rank, at the same stage, when a call differs or is wrong.
            ReceiveOverflowError: likewise, when rows do not fit somewhere.
        """
        wire = self.kernels.wire
        state = self.state.tolist()
        failure = self._failure_in(state)
        if failure and failure.word in ("call", "overflow"):
            self.state[wire.FAILED.value : wire.CLOCK_NS.value] = 0  # all are told, and go on
            raise CallsDiffer(failure) if failure.word == "call" else self.overflow(failure)
        return 0 if failure else state[wire.ROWS.value]

    def overflow(self, failure: Failure, *, after: str = "") -> ReceiveOverflowError:
        """Say that rows do not fit, and what to do; `after`: before going on."""
        node = failure.pe // self.config.topo.gpus_per_node
        return ReceiveOverflowError(
            f"nothing moved: a rank of node {node} would receive {failure.seen} rows, more than "
            f"max_recv_rows = {failure.expected}; raise max_recv_rows to {failure.seen} or more "
            f"(always enough: {self.config.max_rows}){after and '; ' + after}",
            num_rows=failure.seen,
        )

    def failure(self) -> Failure | None:
        """Wait for the device; return why the first phase failed that did, since the last reset."""
        return self._failure_in(self.state.tolist())

    def _failure_in(self, state: list[int]) -> Failure | None:
        wire = self.kernels.wire
        failed, word, *record = state[wire.FAILED.value : wire.CLOCK_NS.value]
        return Failure(wire.WORDS[word], *record) if failed else None

    def stream(self) -> torch.cuda.Stream | None:
        """Return the GPU's current stream."""
        return torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None

    def saw_arrival(self, recv_load: torch.Tensor, this: Round) -> None:
        """Tell the observer that all of a round has arrived here."""
        if self.observer and self.path != "granted":  # of which it was told chunk by chunk
            for s, _ in self._peers(recv_load, this, direction=-1):
                peer = s * self.config.topo.gpus_per_node + self.local
                self.observer.arrived(peer, self.pe, rail=self.rail)

    def _peers(self, load: torch.Tensor, this: Round, *, direction: int) -> list[tuple[int, int]]:
        """List (node, records) that this PE sends (direction 1) or receives (-1) in a round."""
        N, records = self.config.topo.nodes, load[:, self.local].tolist()
        peers = []
        for i in range(this.num_peers):
            node = (self.node + direction * (this.wave + i)) % N
            in_round = min(records[node] - this.first, this.records)
            if in_round > 0:
                peers.append((node, in_round))
        return peers
