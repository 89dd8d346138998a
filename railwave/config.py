"""What a world is made for: sizes checked once, and every number that follows from them.

Letters: N nodes, G GPUs a node, R rails, W = N * G ranks, E experts, K top-k, T tokens a rank.
"""

import logging
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Real
from typing import Any

import torch

from railwave._check import check_bool, check_device, check_index, check_positive_int
from railwave.heap import Layout
from railwave.kernels.shape import SLOT_BYTES, Shape, make_format, pow2
from railwave.topology import Topology

logger = logging.getLogger("railwave")

PATHS = ("native", "rail", "permutation", "joint", "granted")
BALANCED = ("rail", "joint", "granted")
WAVES = ("permutation", "joint")

DEFAULT_STAGING_RECORDS = 8192
RAIL_GBS = 25.0  # GB/s (1e9 bytes/s) of a rail that tiles are made for
MOST_COUNTING = 128  # programs of count that number records: about one a multiprocessor
MAX_TOP_K = 255  # `count` counts a token's experts on a GPU in a byte at most
LEAST_NIC_GBS, MOST_NIC_GBS = 1e-6, 1e6  # of an emulated NIC: a byte a millisecond at least
TEXT_WORDS = 64  # of an error that all ranks must hear, 8 bytes each


@dataclass(frozen=True)
class Tiles:
    """Tile sizes: launcher arguments set by mode; results never depend on them."""

    chunk: int  # the fewest records under one arrived word
    chunks: int  # the most arrived words of a round and peer: the same on all ranks
    block_m: int  # records or rows a tile
    tile_words: int  # 32-bit words a tile, over all its records or rows
    block_put: int  # words a tile of put, which moves chunks as they lie
    block_h: int  # elements a tile
    block_t: int  # tokens a step of count
    parts: int  # parts of the tokens in count, a program each
    block_n: int  # nodes a program of forward
    block_i: int  # slices a program of quota
    match: int  # records a program of match
    programs: int  # programs of a launch that moves payload, over all its peers
    warps: int  # of such a program
    sum_warps: int  # of one that adds rows
    waiting: int  # programs of a PE that may wait at once: a put's and those of what is beside it
    granted_bytes: int  # the fewest of what one grant lets go: 32 round trips of RAIL_GBS
    part_bytes: int  # of what is put before others are heard: a round trip, steps included
    patience_ns: int  # of a receiver with a sender that it has granted something

    def block_w(self, rows: int) -> int:
        """Return words of each row in a tile of `rows` rows, a power of two."""
        return max(16, self.tile_words // pow2(rows))

    def clipped(self, staging_records: int, max_tokens: int, nodes: int) -> "Tiles":
        """Return tiles no larger than what there is to move.

        But of two rows at least: triton 3.6 fails to compile hints about a tile of one.
        """
        return replace(
            self,
            chunk=min(self.chunk, max(2, pow2(staging_records))),
            block_m=min(self.block_m, max(2, pow2(max_tokens))),
            block_t=min(self.block_t, max(2, pow2(max_tokens))),
            parts=max(1, min(self.parts, MOST_COUNTING // nodes)),
        )


# The interpreter pays per operation and per launch (0.1 ms, 1 ms): few, large tiles.
INTERPRETED = Tiles(
    chunk=64,
    chunks=256,
    block_m=64,
    tile_words=1 << 16,
    block_put=8192,
    block_h=1024,
    block_t=128,
    parts=1,
    block_n=64,
    block_i=1024,
    match=1024,
    programs=1,
    warps=4,
    sum_warps=4,
    waiting=2,
    granted_bytes=0,
    part_bytes=0,
    patience_ns=1_000_000_000,
)
COMPILED = Tiles(
    chunk=2,
    chunks=256,
    block_m=8,
    tile_words=32768,
    block_put=8192,
    block_h=2048,
    block_t=1024,
    parts=4,
    block_n=1,
    block_i=8,
    match=128,
    programs=128,
    warps=8,
    sum_warps=8,
    waiting=192,
    granted_bytes=4_000_000,  # a round trip is 5 us
    part_bytes=1_500_000,  # 60 us: that, and the steps of who grants and who is granted
    patience_ns=50_000_000,
)


def fitting(tiles: Tiles, num_sms: int, sharing: int) -> Tiles:
    """Return tiles for PEs of which `sharing` share a GPU.

    No more programs wait at once than there are SMs, those of a put and of what is packed beside it
    together: 192 on 132 SMs, of 32 processes under MPS, kept kernels that they waited for from ever
    beginning, though two fit an SM. A program takes at most half of an SM's registers, one that
    adds rows with twice the threads.

    Example: of 132 SMs, 32 PEs may have 4 programs each.
    """
    if sharing == 1:
        return tiles
    programs = max(1, min(tiles.programs, num_sms // sharing))
    # Two rows at least, as in `clipped`; two programs of quota, since all of its programs wait.
    smaller = {"block_m": max(2, tiles.block_m // 2), "tile_words": tiles.tile_words // 2}
    others = {"block_t": 256, "block_i": 1 << 20}
    others |= {"programs": programs, "waiting": programs, "warps": tiles.warps // 2}
    return replace(tiles, **smaller, **others)


@dataclass(frozen=True)
class Round:
    """One step of a phase: some waves at once, and the slots they move."""

    step: int  # from 1
    wave: int  # the first; peers are nodes own + wave + i (sends) or own - wave - i (receives)
    num_peers: int
    first: int  # slots [first, first + records) of each slice
    records: int
    buffer: int  # in records: where the round's staging starts


@dataclass(frozen=True, eq=False)
class Config:
    """Sizes of a world, as declared. See `LocalWorld` for what they mean."""

    topo: Topology
    num_experts: int
    top_k: int
    hidden: int
    max_tokens_per_rank: int
    dtype: torch.dtype
    expert_to_rank: Any = None  # after construction: a tuple of E ranks
    staging_records: int | None = None  # after construction: an int
    paths: Sequence[str] = PATHS  # after construction: a tuple
    device: torch.device | str = "cpu"  # after construction: a torch.device
    tiles: Tiles | None = None  # default: by device
    remote: bool = False  # some PEs are reached by NVSHMEM alone
    max_recv_rows: int | None = None  # after construction: an int
    num_sms: int | None = None  # the most programs of a launch; None: as the tiles say
    pipeline: bool = True  # do meanwhile what need not wait for a round that is on the wire
    cost_table: Any = None  # a CostTable, which decides where path is "auto"
    nic_gbs: float | None = None  # of emulated NICs, 1e9 bytes/s each way; None: none

    def __post_init__(self) -> None:
        if not isinstance(self.topo, Topology):
            raise TypeError(f"topo must be a railwave.Topology, got {type(self.topo).__name__}")
        for name in ("num_experts", "top_k", "hidden", "max_tokens_per_rank"):
            object.__setattr__(self, name, check_positive_int(getattr(self, name), name))
        if self.top_k > MAX_TOP_K:
            raise ValueError(f"top_k must be at most {MAX_TOP_K}, got {self.top_k}")
        if not isinstance(self.dtype, torch.dtype):
            raise TypeError(f"dtype must be a torch.dtype, got {self.dtype!r}")
        object.__setattr__(self, "device", check_device(self.device))
        if self.tiles is None:
            tiles = INTERPRETED if self.device.type == "cpu" else COMPILED
            object.__setattr__(self, "tiles", tiles)
        object.__setattr__(self, "expert_to_rank", self._checked_expert_to_rank())
        object.__setattr__(self, "paths", self._checked_paths())
        self._warn_of_uneven_rails()
        entries = self.max_rows * self.topo.gpus_per_node
        if entries >= 2**31:
            raise ValueError(
                "max_tokens_per_rank x ranks x gpus_per_node must be below 2**31 (a record's entry "
                f"is an int32), got {self.max_tokens_per_rank} x {self.topo.num_ranks} x "
                f"{self.topo.gpus_per_node} = {entries}"
            )
        if self.staging_records is None:
            staging = max(1, min(self.proxy_records, DEFAULT_STAGING_RECORDS))
        else:
            staging = check_positive_int(self.staging_records, "staging_records")
            staging = max(1, min(staging, self.proxy_records))
        object.__setattr__(self, "staging_records", staging)
        rows = self.max_rows
        if self.max_recv_rows is not None:
            rows = min(rows, check_positive_int(self.max_recv_rows, "max_recv_rows"))
        object.__setattr__(self, "max_recv_rows", rows)
        check_bool(self.pipeline, "pipeline")
        if self.nic_gbs is not None:
            object.__setattr__(self, "nic_gbs", self._checked_nic_gbs())
            # A smaller chunk than a slot would cost more to reserve than to move.
            record = make_format(self.payload_bytes, self.top_k, self.topo.gpus_per_node)
            chunk = max(self.tiles.chunk, SLOT_BYTES // (4 * record.RECORD_WORDS))
            object.__setattr__(self, "tiles", replace(self.tiles, chunk=chunk))
        if self.num_sms is not None:
            programs = min(self.tiles.programs, check_positive_int(self.num_sms, "num_sms"))
            object.__setattr__(self, "tiles", replace(self.tiles, programs=programs))
        object.__setattr__(
            self, "tiles", self.tiles.clipped(staging, self.max_tokens_per_rank, self.topo.nodes)
        )

    def _checked_paths(self) -> tuple[str, ...]:
        try:
            paths = (self.paths,) if isinstance(self.paths, str) else tuple(self.paths)
        except TypeError:
            raise TypeError(f"paths must be a sequence of paths, got {self.paths!r}") from None
        for path in paths:
            if path not in PATHS:
                raise ValueError(f"paths must be of {', '.join(PATHS)}, got {path!r}")
        if not paths:
            raise ValueError("paths must name at least one path, got none")
        return paths

    def _checked_nic_gbs(self) -> float:
        rate = self.nic_gbs
        if isinstance(rate, bool) or not isinstance(rate, Real):
            raise TypeError(f"nic_gbs must be a number or None, got {rate!r}")
        if not (math.isfinite(rate) and LEAST_NIC_GBS <= rate <= MOST_NIC_GBS):
            raise ValueError(
                f"nic_gbs must be in [{LEAST_NIC_GBS:g}, {MOST_NIC_GBS:g}], got {rate!r}"
            )
        if self.remote:
            raise ValueError(f"nic_gbs must be None where NVSHMEM reaches PEs, got {rate!r}")
        return float(rate)

    def _warn_of_uneven_rails(self) -> None:
        gpus = self.topo.gpus_of_rail
        logger.info("GPUs of each rail: %s", gpus)
        if len({len(on_rail) for on_rail in gpus}) > 1:
            logger.warning("rails have different numbers of GPUs: %s", gpus)

    def _checked_expert_to_rank(self) -> tuple[int, ...]:
        ranks, experts = self.topo.num_ranks, self.num_experts
        if self.expert_to_rank is None:
            return tuple(e * ranks // experts for e in range(experts))
        given = self.expert_to_rank
        try:
            given = list(given.tolist() if isinstance(given, torch.Tensor) else given)
        except TypeError:
            raise TypeError(
                f"expert_to_rank must be a sequence of {experts} ranks, got {given!r}"
            ) from None
        if len(given) != experts:
            raise ValueError(
                f"expert_to_rank must have one rank per expert ({experts}), got {len(given)}"
            )
        return tuple(check_index(r, ranks, f"expert_to_rank[{e}]") for e, r in enumerate(given))

    def on_device(self) -> AbstractContextManager[Any]:
        """Make the device the current one: kernels are launched on that."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    @cached_property
    def proxy_records(self) -> int:
        """P: the most records one proxy carries of one slice."""
        return self.topo.max_proxy_records(self.max_tokens_per_rank)

    @cached_property
    def max_rows(self) -> int:
        """The most rows one rank can receive: every token of every rank."""
        return self.topo.num_ranks * self.max_tokens_per_rank

    @cached_property
    def payload_bytes(self) -> int:
        """The largest payload of a token, in bytes."""
        return self.hidden * self.dtype.itemsize

    @cached_property
    def expert_order(self) -> list[int]:
        """Expert ids sorted by (rank, id): a rank's local experts are a run of this list."""
        return sorted(range(self.num_experts), key=lambda e: (self.expert_to_rank[e], e))

    @cached_property
    def experts_per_rank(self) -> list[int]:
        """How many experts each rank has."""
        counts = [0] * self.topo.num_ranks
        for rank in self.expert_to_rank:
            counts[rank] += 1
        return counts

    def most_rows_by_expert(self, rank: int, max_rows: int, top_k: int, alignment: int) -> int:
        """Return the most rows of a rank's experts that come of max_rows tokens, and gaps."""
        num_experts = self.experts_per_rank[rank]
        most = max_rows * min(top_k, num_experts) + num_experts * (alignment - 1)
        return -(-most // alignment) * alignment

    def of_a_rail(self, num_bytes: int) -> int:
        """Return what passes a rail here in the time of so many bytes at RAIL_GBS."""
        return round(num_bytes * (self.nic_gbs or RAIL_GBS) / RAIL_GBS)

    @property
    def accepted_paths(self) -> tuple[str, ...]:
        """What a dispatch may be called with."""
        return (*self.paths, "auto") if self.cost_table else tuple(self.paths)

    @cached_property
    def rounds_per_wave(self) -> int:
        """Rounds that a slice of P records takes through the staging."""
        return max(1, -(-self.proxy_records // self.staging_records))

    def rounds(self, path: str) -> list[Round]:
        """List the rounds of a phase on `path`; every PE runs the same."""
        N, P, staging = self.topo.nodes, self.proxy_records, self.staging_records
        if N == 1:
            return []
        if path not in WAVES:
            return [Round(step=1, wave=1, num_peers=N - 1, first=0, records=P, buffer=0)]
        rounds = []
        for wave in range(1, N):
            for q in range(self.rounds_per_wave):
                i = len(rounds)
                rounds.append(Round(i + 1, wave, 1, q * staging, staging, i % 2 * staging))
        return rounds

    def packs(self, this: Round) -> list[Round]:
        """Divide a round of all peers, whose buffers they keep, into one a wave."""
        return [
            replace(this, step=k, wave=k, num_peers=1, buffer=(k - 1) * this.records)
            for k in range(1, this.num_peers + 1)
        ]

    @property
    def _rank_size(self) -> int:
        """Experts of every rank, if they are placed in order; else 0."""
        size = self.num_experts // self.topo.num_ranks
        in_order = size > 0 and all(e // size == r for e, r in enumerate(self.expert_to_rank))
        return size if in_order else 0

    @cached_property
    def shape(self) -> Shape:
        """The integers that kernels are compiled for."""
        topo, tiles = self.topo, self.tiles
        G, P = topo.gpus_per_node, self.proxy_records
        node_experts = max(
            sum(self.experts_per_rank[n * G : (n + 1) * G]) for n in range(topo.nodes)
        )
        chunks = min(-(-max(P, 1) // tiles.chunk), tiles.chunks)
        return Shape(
            N=topo.nodes,
            G=G,
            R=topo.rails_per_node,
            E=self.num_experts,
            T=self.max_tokens_per_rank,
            N_P=pow2(topo.nodes),
            G_P=pow2(G),
            R_P=pow2(topo.rails_per_node),
            RAIL_GPUS=topo.max_gpus_per_rail,
            RAIL_GPUS_P=pow2(topo.max_gpus_per_rail),
            NODE_EXPERTS=node_experts,
            RANK_EXPERTS=max(self.experts_per_rank),
            RANK_SIZE=self._rank_size,
            NOTIFY_WORDS=1 + topo.nodes + G + node_experts,
            MAX_ROWS=self.max_recv_rows,
            BOUNDED=self.max_recv_rows < self.max_rows,
            PROXY_RECORDS=P,
            MAX_STEPS=(topo.nodes - 1) * self.rounds_per_wave + 2,
            CHUNK=tiles.chunk,
            CHUNKS=chunks,
            CHUNKS_P=pow2(chunks),
            REMOTE=self.remote,
            EMULATED=self.nic_gbs is not None,
        )

    @cached_property
    def layout(self) -> Layout:
        """The regions of every PE's heap, in bytes."""
        topo, S = self.topo, self.shape
        W, G = topo.num_ranks, topo.gpus_per_node
        widest = make_format(self.payload_bytes, self.top_k, G)
        # Two buffers on wave paths; on others all peers may be in flight at once.
        staged = 2 * self.staging_records if set(self.paths) & set(WAVES) else 0
        if set(self.paths) - set(WAVES):
            staged = max(staged, (topo.nodes - 1) * self.proxy_records)
        staging = staged * widest.RECORD_WORDS * 4 if topo.nodes > 1 else 0
        words = {
            **dict.fromkeys(("notify", "grant", "given_up", "said", "reset"), W),
            "texts": W * TEXT_WORDS,
            **dict.fromkeys(("packed", "delivered"), G),
            **dict.fromkeys(("rows_in", "returned", "taken", "rows_read"), G),
            "arrived": topo.nodes * S.CHUNKS,
            "verdict": topo.nodes,
            **dict.fromkeys(("granted", "landed", "back"), W),
            **({"ports": 2} if S.EMULATED else {}),
        }
        return Layout.of(
            {
                **{name: num_words * 8 for name, num_words in words.items()},
                "messages": 2 * W * S.NOTIFY_WORDS * 4,
                "outbox": topo.nodes * S.NOTIFY_WORDS * 4,
                "send": staging,
                "recv": staging,
                "rows": self.max_recv_rows * widest.META * 4,
            }
        )
