"""Search every state of the protocol in `docs/granted.md`, on one rail, for small demands.

No time: a word that was written is read at any later moment, words of one writer in any order, and
a node takes its steps at any moment. So whatever a network and 3 or 4 nodes can do happens here.

Letters: N nodes; s a sending, d a receiving node; words are by s * N + d.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pytest

NOBODY = -1


class State(NamedTuple):
    """Hold the words, what their readers have read of them, and what each node remembers."""

    # Words: of d at s, chunks granted; of s at d, twice the chunks landed, 1 less once the last
    # one is near its end; of s at d, twice the grants handed back, 1 less until s opens again, -1
    # before it has packed what is for d.
    grant: tuple[int, ...]
    landed: tuple[int, ...]
    back: tuple[int, ...]
    grant_read: tuple[int, ...]
    landed_read: tuple[int, ...]
    back_read: tuple[int, ...]
    # Senders: chunks begun by pair; by s the receiver of the chunk under way, of the grant held.
    begun: tuple[int, ...]
    serving: tuple[int, ...]
    held: tuple[int, ...]
    # Receivers: by d who is next in turn; by pair whether d goes on without what it granted s.
    turn: tuple[int, ...]
    aside: tuple[bool, ...]
    # A node that takes no steps, and whether one has ever been.
    away: int = NOBODY
    has_failed: bool = False


def put(values, index, value):
    return (*values[:index], value, *values[index + 1 :])


class Model:
    """Say what can happen next, by the rules of `docs/granted.md`.

    Args:
        chunks: (N, N) how many chunks s has for d.
        outstanding: grants that may be out at a receiver and with a sender, 1 or 2.
        fault: "none"; "dead", one node stops at any moment; "late", and goes on at any moment.
    """

    def __init__(self, chunks: list[list[int]], outstanding: int, fault: str = "none") -> None:
        self.N, self.outstanding, self.fault = len(chunks), outstanding, fault
        self.chunks = [n for row in chunks for n in row]
        self.nodes = range(self.N)
        self.pairs = [p for p, n in enumerate(self.chunks) if n]
        self.into = [[p for p in self.pairs if p % self.N == d] for d in self.nodes]
        self.from_ = [[p for p in self.pairs if p // self.N == s] for s in self.nodes]

    def start(self) -> State:
        """Nobody has packed anything: every sender is closed, at -1."""
        closed = tuple(-1 if n else 0 for n in self.chunks)
        return self.all_there()._replace(back=closed, back_read=closed)

    def all_there(self) -> State:
        none = (0,) * self.N**2
        idle = (NOBODY,) * self.N
        turn = tuple((d - 1) % self.N for d in self.nodes)
        return State(
            none, none, none, none, none, none, none, idle, idle, turn, (False,) * len(none)
        )

    # What a receiver makes of what it has read

    def out(self, state: State, p: int) -> int:
        """Count the grants of a pair that are neither used up nor handed back."""
        handed_back = (state.back_read[p] + 1) // 2
        return state.grant[p] - state.landed_read[p] // 2 - handed_back

    def left(self, state: State, p: int) -> int:
        """Count the chunks that are not granted, or were and the grant came back."""
        return self.chunks[p] - state.grant[p] + (state.back_read[p] + 1) // 2

    def may_give(self, state: State, d: int) -> bool:
        counted = [p for p in self.into[d] if not state.aside[p]]
        out = sum(self.out(state, p) for p in counted)
        near = sum(state.landed_read[p] % 2 for p in counted)
        return out < (self.outstanding if near >= out else 1)

    def choice(self, state: State, d: int) -> int | None:
        """Return the open pair with the most chunks left; of equals, the next in turn."""
        is_open = [
            p
            for p in self.into[d]
            if self.left(state, p) and state.back_read[p] % 2 == 0 and not state.aside[p]
        ]
        place = {p: (state.turn[d] - p // self.N) % self.N for p in is_open}
        return min(is_open, key=lambda p: (-self.left(state, p), place[p]), default=None)

    # What a sender does

    def is_taking(self, state: State, s: int) -> bool:
        """Take a grant while idle; with two outstanding, one more while a chunk ends."""
        d = state.serving[s]
        near = d != NOBODY and state.landed[s * self.N + d] % 2 == 1
        return d == NOBODY or (near and state.held[s] == NOBODY)

    def begin(self, state: State, s: int, d: int) -> State:
        p = s * self.N + d
        begun = put(state.begun, p, state.begun[p] + 1)
        return state._replace(begun=begun, serving=put(state.serving, s, d))

    def open_up(self, state: State, s: int) -> State:
        """Tell every receiver whose grant came back that s takes grants again."""
        back = state.back
        for p in self.from_[s]:
            back = put(back, p, back[p] + back[p] % 2 if back[p] > 0 else back[p])
        return state._replace(back=back)

    # Steps

    def steps(self, state: State) -> Iterator[State]:
        for d in self.nodes:
            if d != state.away:
                yield from self.receiver_steps(state, d)
        for s in self.nodes:
            if s != state.away:
                yield from self.sender_steps(state, s)
        if self.fault != "none" and not state.has_failed:
            for node in self.nodes:
                yield state._replace(away=node, has_failed=True)

    def receiver_steps(self, state: State, d: int) -> Iterator[State]:
        for p in self.into[d]:
            here = put(state.aside, p, False)  # a word from s: it is there
            if state.landed_read[p] < state.landed[p]:
                read = put(state.landed_read, p, state.landed[p])
                yield state._replace(landed_read=read, aside=here)
            if state.back_read[p] < state.back[p]:
                yield state._replace(back_read=put(state.back_read, p, state.back[p]), aside=here)
            if p // self.N == state.away and self.out(state, p) and not state.aside[p]:
                yield state._replace(aside=put(state.aside, p, True))  # patience has run out
        p = self.choice(state, d)
        if p is not None and self.may_give(state, d):
            grant = put(state.grant, p, state.grant[p] + 1)
            turn = put(state.turn, d, (p // self.N - 1) % self.N)
            yield state._replace(grant=grant, turn=turn)

    def sender_steps(self, state: State, s: int) -> Iterator[State]:
        for p in self.from_[s]:
            if state.back[p] < 0 and self.is_taking(state, s):
                yield state._replace(back=put(state.back, p, 0))  # what is for d is packed
        for p in self.from_[s]:
            if state.grant_read[p] < state.grant[p]:
                yield self.answer(state, s, p)
        d = state.serving[s]
        if d == NOBODY:
            return
        p = s * self.N + d
        if self.outstanding == 2 and state.landed[p] % 2 == 0:
            near = put(state.landed, p, 2 * state.begun[p] - 1)
            yield self.open_up(state._replace(landed=near), s)
        else:
            yield self.end(state._replace(landed=put(state.landed, p, 2 * state.begun[p])), s)

    def answer(self, state: State, s: int, p: int) -> State:
        """Read one grant: begin, hold it, or hand it back."""
        read = put(state.grant_read, p, state.grant_read[p] + 1)
        state, d = state._replace(grant_read=read), p % self.N
        if not self.is_taking(state, s):
            value = state.back[p] + 1 + state.back[p] % 2  # odd: closed
            return state._replace(back=put(state.back, p, value))
        if state.serving[s] == NOBODY:
            return self.begin(state, s, d)
        return state._replace(held=put(state.held, s, d))

    def end(self, state: State, s: int) -> State:
        held = state.held[s]
        if held != NOBODY:
            return self.begin(state._replace(held=put(state.held, s, NOBODY)), s, held)
        return self.open_up(state._replace(serving=put(state.serving, s, NOBODY)), s)

    # What must hold

    def check(self, state: State) -> None:
        """Check every state: the bound of senders in flight, and no chunk sent twice."""
        for p in self.pairs:
            assert state.begun[p] <= self.chunks[p], "a chunk is sent once"
            handed_back = (state.back[p] + 1) // 2
            assert state.begun[p] + handed_back <= state.grant_read[p], "by a grant"
            assert 0 <= self.left(state, p) <= self.chunks[p]
        # Of one that was set aside, a word may still be read, or it comes back: then its grants
        # count again, beside what was granted meanwhile.
        late = self.fault == "late" and state.has_failed
        for d in self.nodes:
            there = [p for p in self.into[d] if p // self.N != state.away]
            in_flight = sum(state.serving[p // self.N] == d for p in there)
            out = sum(self.out(state, p) for p in there)
            most = self.outstanding * (1 + late)
            assert in_flight <= out <= most, "senders in flight, grants out"

    def check_end(self, state: State) -> None:
        """Check a state in which no node that is there can take a step."""
        for p in self.pairs:
            if state.away not in divmod(p, self.N):
                landed = state.landed_read[p]
                assert landed == 2 * self.chunks[p], f"pair {divmod(p, self.N)} has all its chunks"


def search(model: Model) -> int:
    """Visit every state that can be reached; return how many there are."""
    start = model.start()
    seen, stack = {start}, [start]
    while stack:
        state = stack.pop()
        model.check(state)
        following = list(model.steps(state))
        if all(after.away != state.away for after in following):
            model.check_end(state)
        if model.fault == "late" and state.away != NOBODY:
            following.append(state._replace(away=NOBODY))
        for after in following:
            if after not in seen:
                seen.add(after)
                stack.append(after)
    return len(seen)


def table(nodes: int, *slices: tuple[int, int, int]) -> list[list[int]]:
    """Return (N, N) chunks from (source, destination, chunks)."""
    chunks = np.zeros((nodes, nodes), dtype=int)
    for s, d, n in slices:
        chunks[s, d] = n
    return chunks.tolist()


DEMANDS = {
    "3 in a ring": table(3, (0, 1, 1), (1, 2, 1), (2, 0, 1)),
    "3, two of a pair": table(3, (0, 1, 2), (2, 1, 1), (0, 2, 1)),
    "3 to one of 4": table(4, (1, 0, 2), (2, 0, 1), (3, 0, 1)),
    "one of 4 to 3": table(4, (0, 1, 1), (0, 2, 1), (0, 3, 1)),
    "2 to 2": table(4, (0, 2, 1), (0, 3, 1), (1, 2, 1), (1, 3, 1)),
}


LONG = [("2 to 2", fault, 2) for fault in ("dead", "late")]  # most states by far: `make soak`
CASES = [
    pytest.param(*case, marks=[pytest.mark.soak] if case in LONG else [])
    for case in itertools.product(DEMANDS, ("none", "dead", "late"), (1, 2))
]


@pytest.mark.parametrize("demand, fault, outstanding", CASES)
def test_whatever_happens_the_others_get_all_their_chunks(demand, fault, outstanding):
    """Any node may stop at any moment, and any receiver give it up at any moment after that."""
    assert search(Model(DEMANDS[demand], outstanding, fault)) > 10


@pytest.mark.parametrize("outstanding", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_every_demand_of_single_chunks_on_3_nodes(outstanding):
    """All 64, of which with two outstanding those of up to 4 pairs."""
    pairs = list(itertools.permutations(range(3), 2))
    for num_pairs in range(1, 7 if outstanding == 1 else 5):
        for some in itertools.combinations(pairs, num_pairs):
            search(Model(table(3, *((*pair, 1) for pair in some)), outstanding))


@pytest.mark.parametrize("outstanding", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_more_chunks_on_4_nodes(outstanding):
    for demand in (
        table(4, (0, 1, 2), (0, 2, 1), (0, 3, 1)),
        table(4, (0, 2, 2), (0, 3, 1), (1, 2, 1), (1, 3, 2)),
        table(4, (0, 1, 1), (1, 2, 1), (2, 3, 1), (3, 0, 1), (0, 2, 1)),
    ):
        search(Model(demand, outstanding))


class NeverOpens(Model):
    def open_up(self, state, s):
        return state


class GivesAtWill(Model):
    def may_give(self, state, d):
        return True


class NeverGivesUp(Model):
    def receiver_steps(self, state, d):
        return (after for after in super().receiver_steps(state, d) if not any(after.aside))


class ForgetsHandBacks(Model):
    def left(self, state, p):
        return self.chunks[p] - state.grant[p]


@pytest.mark.parametrize(
    "broken, fault, words",
    [
        (NeverOpens, "none", "has all its chunks"),
        (GivesAtWill, "none", "senders in flight, grants out"),
        (NeverGivesUp, "dead", "has all its chunks"),
        (ForgetsHandBacks, "none", "has all its chunks"),
    ],
)
def test_a_broken_protocol_is_found(broken, fault, words):
    with pytest.raises(AssertionError, match=words):
        for name in ("2 to 2", "3 to one of 4"):
            search(broken(DEMANDS[name], 1, fault))
