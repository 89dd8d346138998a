"""The bytes that a dispatch and a combine must move: from the counts of a routing alone.

Letters: T tokens, H hidden, K top-k, G GPUs a node.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass

import torch

from railwave.kernels.shape import make_format, padded
from railwave.topology import Topology


@dataclass(frozen=True)
class Counts:
    """What one rank sends, or the sums over ranks."""

    tokens: int
    own_tokens: int  # tokens with a row on the own node
    own_rows: int  # rows on the own node
    far_records: int  # (token, other node) pairs
    far_rows: int  # rows on other nodes

    @classmethod
    def total(cls, counts: Iterable[Counts]) -> Counts:
        """Add up.

        Example:
            >>> Counts.total([Counts(1, 1, 2, 0, 0), Counts(3, 0, 0, 3, 4)])
            Counts(tokens=4, own_tokens=1, own_rows=2, far_records=3, far_rows=4)
        """
        return cls(*(sum(column) for column in zip(*map(astuple, counts), strict=True)))


def counts_of(ranks: torch.Tensor, topo: Topology, rank: int) -> Counts:
    """Count what a rank's tokens become.

    Args:
        ranks: (T, K) the rank of each token's experts.
        rank: the rank that holds the tokens.

    Example: of two nodes of two ranks, rank 0 sends a token to ranks 0, 1 and 3, another to 2 and 3
        >>> counts_of(torch.tensor([[0, 1, 3], [2, 3, 3]]), Topology(2, 2, 2), 0)
        Counts(tokens=2, own_tokens=1, own_rows=2, far_records=2, far_rows=3)
    """
    rows = torch.zeros(len(ranks), topo.num_ranks, dtype=torch.bool, device=ranks.device)
    rows.scatter_(1, ranks.long(), True)
    by_node = rows.view(len(ranks), topo.nodes, topo.gpus_per_node).sum(dim=2)
    records = (by_node > 0).sum(dim=0).tolist()
    num_rows = by_node.sum(dim=0).tolist()
    node = rank // topo.gpus_per_node
    own_tokens, own_rows = records[node], num_rows[node]
    far = (sum(records) - own_tokens, sum(num_rows) - own_rows)
    return Counts(len(ranks), own_tokens, own_rows, *far)


def floor_bytes(
    counts: Counts, *, payload_bytes: int, top_k: int, gpus_per_node: int, copied: bool
) -> dict[str, dict[str, int]]:
    """Return the bytes that each stage must read and write, `{phase: {stage: bytes}}`.

    A record and a row are as `Format` lays them out: payload, ids and weights, and a record's
    entries, each padded to 16 bytes. Planning, words and tables of indices are left out.

    Dispatch: pack reads a token for each of its records, and writes the record; put reads and
    writes records; unpack reads records and writes their rows; local reads each token with rows on
    its node once, and writes them; finish reads rows and writes them out.

    Combine, whose rows and sums are payload alone: copy_in reads and writes rows; own reads rows of
    the own node's tokens and writes fp32 accumulators, of every token; reduce reads the other rows
    and writes a sum a record; put reads and writes sums; take reads sums, and reads and writes
    accumulators; final reads accumulators and writes the result.

    Args:
        payload_bytes: H times 2: of a bfloat16 token.
        copied: the rows are copied out and back in; False for a view, which is handed back.

    Example: a token of H = 8 with a row here, and a record of two rows on another node of 2 GPUs.
        Payload 16 bytes, accumulator 32; ids 16, weights 16: a row is 48; entries 16: a record 64.
        >>> counts = Counts(tokens=1, own_tokens=1, own_rows=1, far_records=1, far_rows=2)
        >>> floor = floor_bytes(counts, payload_bytes=16, top_k=3, gpus_per_node=2, copied=True)
        >>> floor["dispatch"]  # 16 + 64, 64 + 64, 64 + 2 * 48, 16 + 48, 3 * (48 + 48)
        {'pack': 80, 'put': 128, 'unpack': 160, 'local': 64, 'finish': 288}
        >>> floor["combine"]  # 3 * 32, 16 + 32, 2 * 16 + 16, 16 + 16, 16 + 2 * 32, 32 + 16
        {'copy_in': 96, 'own': 48, 'reduce': 48, 'put': 32, 'take': 80, 'final': 48}
    """
    fmt = make_format(payload_bytes, top_k, gpus_per_node)
    record, row, acc = 4 * fmt.RECORD_WORDS, 4 * fmt.META, 2 * payload_bytes
    value = 4 * padded(fmt.X_WORDS)  # a row or a sum of combine
    c, rows = counts, counts.own_rows + counts.far_rows
    dispatch = {
        "pack": c.far_records * (payload_bytes + record),
        "put": c.far_records * 2 * record,
        "unpack": c.far_records * record + c.far_rows * row,
        "local": c.own_tokens * payload_bytes + c.own_rows * row,
        "finish": copied * rows * 2 * row,
    }
    combine = {
        "copy_in": copied * rows * 2 * value,
        "own": c.own_rows * value + c.tokens * acc,
        "reduce": c.far_rows * value + c.far_records * value,
        "put": c.far_records * 2 * value,
        "take": c.far_records * (value + 2 * acc),
        "final": c.tokens * (acc + payload_bytes),
    }
    return {"dispatch": dispatch, "combine": combine}
