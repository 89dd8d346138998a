"""Indices and offsets beyond 2**31 in every product that a kernel makes, without the memory.

Case D1. Four nodes of one GPU; every PE's heap is the same sparse one. Tables and regions are as
large as declared, but only the pages of a few records are ever touched.

Not here: products that need all records or tokens below them to be moved first (a chunk's start in
`put`, `local`, `finish`, `place`, `copy_in`, `own`, `final`) or a grid of 2**31 records (`match`).

Letters: N nodes, T tokens, P the most records of a proxy.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from heaps import KERNELS, WIRE, make_config, make_state, mark, sparse
from railwave.kernels.shape import make_format

pack, unpack = KERNELS.pack, KERNELS.unpack
combine, group, reduce = KERNELS.combine, KERNELS.group, KERNELS.reduce

T, P, PEERS = 2**30, 2**28, 3
FMT = make_format(payload_bytes=16, top_k=2, gpus_per_node=1)  # 16 words a record, 12 a row
LAST = 2**27 + 5  # a place whose first word is number 2**31 + 80
SIZES = {"programs": 2, "block_m": 2}


@pytest.fixture
def world():
    """A world of 4 nodes whose T and P are huge, in one sparse heap of 64 GiB."""
    config = make_config(4, 1, 1, tiles={"chunk": 2})
    shape = replace(config.shape, T=T, PROXY_RECORDS=P, CHUNK=2, CHUNKS=2, CHUNKS_P=2)
    heap = sparse(2**34)
    return SimpleNamespace(
        config=config,
        shape=shape,
        heap=heap,
        bases=torch.full((4,), heap.data_ptr()),
        words=heap[:4096].view(torch.int64),
        region=lambda offset, *shape, dtype=torch.int32: (
            heap[offset // 4 :].view(dtype)[: torch.Size(shape).numel()].view(shape)
        ),
    )


SEND, RECV = 2**20, 2**35 + 2**20  # byte offsets; words lie at 0, 1024, 2048, ...
WORD = {name: 512 * i for i, name in enumerate(WIRE.WORDS[: WIRE.CALL.value])}


def set_words(world, value):
    """Set every word that may be waited for."""
    for offset in WORD.values():
        world.words[offset // 8 :][:8] = value


def one_record(d, token, slot):
    """Return counts, record_token, proxy, slot of a rank's only record, to node d."""
    counts = torch.zeros(1 + 4 + 4 + 8, dtype=torch.int32)
    counts[1 + d] = 1
    record_token, proxies, slots = (sparse(4, T) for _ in range(3))
    record_token[d, 0], slots[d, 0] = token, slot
    return counts, record_token, proxies, slots


def far_tokens(token):
    """Return the tokens of a rank that has T of them; one is not zero."""
    words, topk_idx = sparse(T, FMT.X_WORDS), sparse(T, 2)
    weights = sparse(T, 2, dtype=torch.float32)
    words[token], topk_idx[token] = torch.tensor([1, 2, 3, 4]), torch.tensor([5, 6])
    weights[token] = torch.tensor([0.5, 0.25])
    return pack.Tokens(words, topk_idx, weights)


def test_case_d1_count(world):
    counts, record_token = torch.zeros(1 + 4 + 4 + 8, dtype=torch.int32), sparse(4, T)
    tables = world.config.tables
    KERNELS.count.count(
        *(torch.tensor([[0, 7], [7, 6]]), tables.expert_rank, tables.expert_pos),
        *(counts, record_token, torch.empty(2, 4).int(), world.bases, make_state()),
        tables.expert_start,
        **{"status": 0, "shape": world.shape, "block_t": 2, "parts": 1, "tell": False},
        **{"me": 0, "notify_off": 0, "word_off": 0, "outbox_off": 0},
    )
    assert counts[1:5].tolist() == [1, 0, 0, 2]
    assert record_token[3, :2].tolist() == [0, 1]


def test_case_d1_pack(world):
    token = T - 2
    counts, record_token, proxy, slot = one_record(3, token, LAST)
    row_index = sparse(T, 4)
    row_index[token] = torch.tensor([-1, -1, -1, 77])
    records = (counts[1:5], record_token, proxy, slot, row_index, far_tokens(token))
    pack.pack(
        *(world.bases, make_state(), *records),
        **{"me": 0, "send_off": SEND, "packed_off": WORD["packed"], "wave": 3, "num_peers": 1},
        **{"first": 0, "round_records": P, "shape": world.shape, "fmt": FMT},
        **{"block_w": 4, **SIZES},
    )
    send = world.region(SEND, 1, P, FMT.RECORD_WORDS)
    assert send[0, LAST, : FMT.X_WORDS].tolist() == [1, 2, 3, 4]
    assert send[0, LAST, FMT.IDS :][:2].tolist() == [5, 6]
    assert send[0, LAST, FMT.META :][:2].tolist() == [0, 77]


def test_case_d1_local(world):
    """One token, whose row is far, for all tokens before a far one would have to be looked at."""
    row = 2**29 + 3
    row_index, row_start, own_rows = (
        torch.full((1, 4), -1).int(),
        torch.zeros(4, 1).int(),
        sparse(1),
    )
    row_index[0, 3] = 3
    row_start[3] = row - 3
    tokens = pack.Tokens(
        torch.tensor([[1, 2, 3, 4]]).int(), torch.tensor([[5, 6]]), torch.ones(1, 2)
    )
    pack.local(
        *(own_rows, world.bases, make_state(), row_index, row_start, tokens),
        **{"me": 3, "rows_off": SEND, "delivered_off": WORD["delivered"], "tell": False},
        **{"shape": world.shape, "fmt": FMT, "block_w": 4, **SIZES},
    )
    assert own_rows[0].item() == row
    stored = world.region(SEND, row + 1, FMT.META)[row]
    assert stored[: FMT.X_WORDS].tolist() == [1, 2, 3, 4]
    assert stored[FMT.IDS :][:2].tolist() == [5, 6]


def test_case_d1_put(world):
    round_records = 2**27  # 8 GiB a peer
    send, recv = (
        world.region(offset, PEERS, round_records, FMT.RECORD_WORDS) for offset in (SEND, RECV)
    )
    first = P - 2
    send[:, :2] = torch.arange(PEERS * 2 * FMT.RECORD_WORDS).view(PEERS, 2, -1)
    put_words = torch.full((4,), 2**40)
    WIRE.put(
        *(world.bases, make_state(), put_words, torch.full((4, 1), P).int()),
        torch.zeros(1).int(),
        **{f"{name}_off": WORD[name] for name in ("arrived", "grant", "packed", "taken")},
        **{"me": 0, "send_off": SEND, "recv_off": RECV, "wave": 1, "num_peers": PEERS},
        **{"first": first, "round_records": round_records, "record_words": FMT.RECORD_WORDS},
        **{"step": 1, "wait_packed": False, "wait_grant": False, "tell_taken": False},
        **{"shape": world.shape, "programs": 2, "block_w": 16},
    )
    assert torch.equal(recv[:, :2], send[:, :2])
    assert put_words.tolist() == [2**40] + [2**40 + 2 * FMT.RECORD_WORDS] * PEERS


def test_case_d1_unpack(world):
    round_records, first, row = 2**27, P - 1, 2**29 + 3
    recv = world.region(SEND, PEERS, round_records, FMT.RECORD_WORDS)
    recv[:, 0] = torch.arange(PEERS * FMT.RECORD_WORDS).view(PEERS, -1)
    for peer in range(PEERS):
        recv[peer, 0, FMT.META :][:2] = torch.tensor([(0 - 1 - peer) % 4, peer])
    row_start = torch.full((4, 1), row).int()
    in_rows = sparse(4, P, 1)
    set_words(world, mark(world.config, 1))
    unpack.unpack(
        *(in_rows, world.bases, make_state(), torch.full((4, 1), P).int()),
        *(torch.zeros(1).int(), row_start),
        **{f"{name}_off": WORD[name] for name in ("arrived", "grant", "packed", "delivered")},
        **{"me": 0, "recv_off": SEND, "rows_off": RECV, "wave": 1, "num_peers": PEERS},
        **{"first": first, "round_records": round_records, "step": 1, "next_round": None},
        **{"shape": world.shape, "fmt": FMT, "programs": 2, "block_m": 2, "block_w": 4},
    )
    rows = world.region(RECV, row + PEERS, FMT.META)
    for peer in range(PEERS):
        assert torch.equal(rows[row + peer], recv[peer, 0, : FMT.META])
        assert in_rows[(0 - 1 - peer) % 4, first].item() == row + peer


ROW_BYTES = 16
HIDDEN = 3
SUM = torch.tensor([1.0, -2.0, 3.0])


def test_case_d1_own_and_take(world):
    token, row = T - 2, T - 5
    acc = sparse(T, HIDDEN, dtype=torch.float32)
    counts, record_token, proxy, slot = one_record(3, token, LAST)
    num_records = counts[1:5].contiguous()
    world.region(SEND, T, ROW_BYTES // 4, dtype=torch.float32)[row, :HIDDEN] = SUM
    set_words(world, mark(world.config, 1))
    sizes = {"shape": world.shape, "block_h": 4, **SIZES}
    read = {"rows_read_off": WORD["rows_read"], "tell": False}
    own = torch.empty(1, HIDDEN)
    reduce.own(
        *(own, world.bases, make_state(), torch.full((1, 1), row).int()),
        **{"me": 3, "rows_off": SEND, "row_bytes": ROW_BYTES, "rows_in_off": WORD["rows_in"]},
        **{"dtype": torch.float32, **read, **sizes},
    )
    assert torch.equal(own[0], SUM)
    acc[token] = SUM

    words = FMT.RECORD_WORDS
    returned = world.region(RECV, LAST + 1, words, dtype=torch.float32)
    returned[LAST, :HIDDEN] = 10 * SUM
    combine.take(
        *(acc, world.bases, make_state(), num_records, record_token, proxy, slot),
        **{"me": 0, "recv_off": RECV, "returned_off": WORD["returned"], "wave": 1, "first": 0},
        **{"round_records": P, "record_words": words, "step": 1, "wire_dtype": torch.float32},
        **{"num_peers": 1, **read, **sizes},
    )
    assert torch.equal(acc[token], 11 * SUM)


def test_case_d1_reduce(world):
    round_records, first, row, words = 2**27, P - 1, T - 5, FMT.RECORD_WORDS
    in_rows = sparse(4, P, 4)
    in_rows[:, first] = torch.tensor([row, -1, -1, -1])
    rows = world.region(RECV, T, ROW_BYTES // 4, dtype=torch.float32)
    rows[row, :HIDDEN] = SUM
    reduce.reduce(
        *(world.bases, make_state(), in_rows, torch.full((4, 1), P).int()),
        **{"me": 0, "rows_off": RECV, "row_bytes": ROW_BYTES, "send_off": SEND, "wave": 1},
        **{"num_peers": PEERS, "first": first, "round_records": round_records},
        **{"record_words": words, "hidden": HIDDEN, "dtype": torch.float32},
        **{"wire_dtype": torch.float32, "shape": world.shape, "block_h": 4, **SIZES},
    )
    send = world.region(SEND, PEERS, round_records, words, dtype=torch.float32)
    assert torch.equal(send[:, 0, :HIDDEN], SUM.expand(PEERS, HIDDEN))


PLACE = 2**29 + 3  # of rows by expert, of 4 words


def test_case_d1_spread(world):
    """A row that arrived far into the heap goes to a far place."""
    row = world.region(RECV, 1, FMT.META)
    row[0, : FMT.X_WORDS] = torch.tensor([1, 2, 3, 4])
    set_words(world, mark(world.config, 1))
    words, counts = sparse(PLACE + 3, 4), torch.tensor([PLACE + 3, 1, 0]).int()
    group.spread(
        *(words, world.bases, make_state(), torch.tensor([1, 0, 0]).int()),
        *(torch.tensor([[PLACE, -1]]).int(), counts, torch.tensor([PLACE, PLACE + 3, 0]).int()),
        **{"me": 0, "rows_off": RECV, "delivered_off": WORD["delivered"], "alignment": 3},
        **{"zero_padding": True, "shape": world.shape, "fmt": FMT, "block_w": 4, **SIZES},
    )
    assert words[PLACE:].tolist() == [[1, 2, 3, 4], [0] * 4, [0] * 4]


def test_case_d1_gather(world):
    words = sparse(PLACE + 1, 4)
    words.view(torch.float32)[PLACE, :3] = SUM
    weights = sparse(PLACE + 1, dtype=torch.float32)
    weights[PLACE] = 2.0
    group.gather(
        *(world.bases, make_state(), words, weights, torch.tensor([[-1, PLACE]]).int()),
        torch.tensor([1]).int(),
        **{"me": 0, "rows_off": RECV, "row_words": 4, "most_rows": 1, "hidden": HIDDEN},
        **{"dtype": torch.float32, "block_h": 4, **SIZES},
    )
    assert torch.equal(world.region(RECV, 1, 4, dtype=torch.float32)[0, :3], 2 * SUM)
