"""The compile-time integers that kernels share: one frozen value a world, one a call.

Kernels take them as `S: tl.constexpr` and `F: tl.constexpr` and read their fields. Powers of two
that bound a tile axis end in `_P`. N nodes, G GPUs a node, W = N * G ranks, R rails, E experts,
K top-k, T tokens.
"""

from dataclasses import dataclass

import torch

# The most bytes that pass an emulated NIC at once, see `port`: flows take turns as often as that.
SLOT_BYTES = 1 << 16


@dataclass(frozen=True)
class Shape:
    """Sizes that are fixed when a world is made."""

    N: int
    G: int
    R: int
    E: int
    T: int  # the most tokens a rank may dispatch
    N_P: int
    G_P: int
    R_P: int
    RAIL_GPUS: int  # the most GPUs of one rail
    RAIL_GPUS_P: int
    NODE_EXPERTS: int  # the most experts of one node
    RANK_EXPERTS: int  # the most experts of one rank
    RANK_SIZE: int  # expert e is on rank e // RANK_SIZE, or 0: the map says where
    NOTIFY_WORDS: int  # int32 words of a notify message
    MAX_ROWS: int  # the most rows a rank may receive
    BOUNDED: bool  # more rows than MAX_ROWS could come: ranks agree first that they do not
    PROXY_RECORDS: int  # the most records one proxy carries of one slice
    MAX_STEPS: int  # marks per epoch: above every step of a phase
    CHUNK: int  # the fewest records under one arrived word
    CHUNKS: int  # the most arrived words per sending node
    CHUNKS_P: int
    REMOTE: bool  # some PEs are not mapped here: NVSHMEM reaches them
    EMULATED: bool  # puts pass emulated NICs, see `port`

    def num_chunks(self, num_records: int) -> int:
        """Return the chunks of a round of records: what `wire.chunks_of` says in a kernel."""
        return min(-(-num_records // self.CHUNK), self.CHUNKS)


@dataclass(frozen=True)
class Format:
    """How one call's records and rows lie in memory, in 32-bit words.

    A record is `[payload | expert ids | weights | source rank, entries]`, each segment padded to 16
    bytes; a row is its first part, payload, ids and weights. An entry says where the record has a
    row: `row * G + local GPU`, by ascending GPU, -1 when there are no more.

    With K = 0 records and rows are payload alone: both ends know the rest from an earlier dispatch.
    """

    K: int
    K_P: int
    X_WORDS: int  # words of a token's payload; the segment is padded with zeros
    IDS: int  # where the expert ids start (= payload words)
    WEIGHTS: int
    META: int  # where source rank and entries start (= words of a row)
    ENTRIES: int  # the most rows of a record: min(K, G)
    ENTRIES_P: int
    RECORD_WORDS: int


def padded(words: int) -> int:
    """Round up to 16 bytes.

    Example:
        >>> padded(5)
        8
    """
    return -(-words // 4) * 4


def pow2(n: int) -> int:
    """Return the smallest power of two that is at least n and 1.

    Example:
        >>> [pow2(n) for n in (0, 1, 5, 8)]
        [1, 1, 8, 8]
    """
    return 1 << max(n - 1, 0).bit_length()


def make_format(payload_bytes: int, top_k: int, gpus_per_node: int) -> Format:
    """Lay out a record of one call.

    Args:
        payload_bytes: bytes of one token's x.
        top_k: expert ids per token.
        gpus_per_node: G.

    Example:
        >>> make_format(payload_bytes=14, top_k=2, gpus_per_node=2)
        Format(K=2, K_P=2, X_WORDS=4, IDS=4, WEIGHTS=8, META=12, ENTRIES=2, ENTRIES_P=2, \
RECORD_WORDS=16)
    """
    x_words = -(-payload_bytes // 4)
    ids = padded(x_words)
    weights = ids + padded(top_k)
    meta = weights + padded(top_k)
    entries = min(top_k, gpus_per_node)
    return Format(
        K=top_k,
        K_P=pow2(top_k),
        X_WORDS=x_words,
        IDS=ids,
        WEIGHTS=weights,
        META=meta,
        ENTRIES=entries,
        ENTRIES_P=pow2(entries),
        RECORD_WORDS=meta + padded(1 + entries),
    )


def bare_format(payload_bytes: int, entries: int) -> Format:
    """Lay out records of payload alone, of a call that repeats an earlier one's routing.

    Args:
        payload_bytes: bytes of one token's x.
        entries: of each record, in the tables that both ends hold.

    Example:
        >>> bare_format(14, 2)
        Format(K=0, K_P=1, X_WORDS=4, IDS=4, WEIGHTS=4, META=4, ENTRIES=2, ENTRIES_P=2, \
RECORD_WORDS=4)
    """
    x_words = -(-payload_bytes // 4)
    row = padded(x_words)
    return Format(0, 1, x_words, row, row, row, entries, pow2(entries), row)


def row_align(words: torch.Tensor) -> int:
    """Return how many bytes divide the address of every row of words: 16 or 4, for copies."""
    starts = words.data_ptr(), words.stride(0) * 4
    return 16 if all(start % 16 == 0 for start in starts) else 4
