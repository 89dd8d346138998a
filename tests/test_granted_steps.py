"""The simulator of granted chunks takes steps of the protocol's model, and ends where it ends.

`railwave.sim.granted` has time, `test_granted_model.Model` has none. What the sender and the
receiver of each node do on a simulated rail, each in its own order (they share nothing), is
replayed in the model: a word is read once it is there, and written once what it held has been read,
since the simulator reads every value. Every step must be one that the model allows, with the same
outcome.

Letters: N nodes; s a sending, d a receiving node; words are by s * N + d.
"""

from collections import deque
from random import Random

import numpy as np
import pytest

from railwave.sim import Fabric
from railwave.sim.granted import _Rail
from test_granted_model import NOBODY, Model


class Recorded(_Rail):
    """Note what each receiver, then each sender does: (step, pair, what it knows by then)."""

    def __init__(self, *args):
        super().__init__(*args)
        self.N = len(self.owed)
        self.steps = [[] for _ in range(2 * self.N)]

    def receives(self, step, s, d, seen=None):
        self.steps[d].append((step, s * self.N + d, seen))

    def sends(self, step, s, d):
        seen = tuple(NOBODY if to is None else to for to in (self.serving[s], self.held[s]))
        self.steps[self.N + s].append((step, s * self.N + d, seen))

    def _count_left(self, d, s, change):
        if change < 0:
            is_open = {peer for peer in range(self.N) if self.open[d] >> peer & 1}
            self.receives("grant", s, d, (self.out[d], self.near[d], list(self.left[d]), is_open))
        super()._count_left(d, s, change)

    def _handed_back(self, s, d):
        self.receives("read closed", s, d)
        super()._handed_back(s, d)

    def _opened(self, s, waiting):
        for d in range(self.N):
            if waiting >> d & 1:
                self.receives("read open", s, d)
        super()._opened(s, waiting)

    def _receiver_near(self, s, d):
        self.receives("read near", s, d)
        super()._receiver_near(s, d)

    def _arrived(self, s, d):
        self.receives("read landed", s, d)
        super()._arrived(s, d)

    def _granted(self, s, d):
        super()._granted(s, d)
        self.sends("answer", s, d)

    def _sender_near(self, s, d):
        super()._sender_near(s, d)
        self.sends("near", s, d)

    def _sent(self, s, d):
        super()._sent(s, d)
        self.sends("end", s, d)


class Replay:
    """Take the steps of a recorded run in the model, each of the nodes' halves in its own order."""

    def __init__(self, model, steps, random):
        self.model, self.random = model, random
        self.steps = [deque(of_half) for of_half in steps]
        self.state, self.num_words = model.all_there(), 0

    def run(self):
        while any(self.steps):
            order = [half for half, left in enumerate(self.steps) if left]
            self.random.shuffle(order)
            moved = False
            for half in order:
                after = self.after(half % self.model.N, *self.steps[half][0])
                if after is not None:
                    self.go(after)
                    self.steps[half].popleft()
                    moved = True
            assert moved, f"the model cannot follow: {[left[:1] for left in map(list, self.steps)]}"
        assert list(self.model.steps(self.state)) == [], "nothing is left to do"
        self.model.check_end(self.state)

    def go(self, after):
        assert after in list(self.model.steps(self.state)), "a step that the model allows"
        self.model.check(after)
        for before, now in ((self.state.grant, after.grant), (self.state.back, after.back)):
            self.num_words += sum(a != b for a, b in zip(before, now, strict=True))
        self.state = after

    def after(self, node, step, p, seen):
        """Return the model's state after a step; None if it must wait for another's."""
        if step == "grant":
            return self.granted(node, p, seen)
        if step.startswith("read"):
            return self.read(node, step, p)
        return self.sent(node, step, p, seen)

    def granted(self, d, p, seen):
        """A receiver needs no other node to grant; what it knows must be what the model's knows."""
        model, state = self.model, self.state
        into = range(d, model.N**2, model.N)
        near = sum(state.landed_read[q] % 2 for q in into)
        left = [model.left(state, q) for q in into]
        is_open = {s for s, q in enumerate(into) if left[s] and state.back_read[q] % 2 == 0}
        knows = (sum(model.out(state, q) for q in into), near, left, is_open)
        assert seen == knows, "what the receiver knows"
        (after,) = [a for a in model.receiver_steps(state, d) if a.grant != state.grant] or [None]
        assert after and after.grant[p] == state.grant[p] + 1, "the sender whose turn it is"
        return after

    def read(self, d, step, p):
        state = self.state
        word, was = "landed", state.landed_read[p]
        if step in ("read closed", "read open"):
            word, was = "back", state.back_read[p]
        even = step in ("read open", "read landed")
        want = was + 1 + ((was + 1) % 2 == even)  # the next even value, or odd one
        there = getattr(state, word)[p]
        assert there <= want, f"{word} holds {there} where {want} is read"
        if there < want:
            return None
        read = f"{word}_read"
        (after,) = [
            a
            for a in self.model.receiver_steps(state, d)
            if getattr(a, read)[p] != getattr(state, read)[p]
        ]
        return after

    def sent(self, s, step, p, seen):
        """Let a sender answer or go on, once all that it writes over has been read."""
        state, model = self.state, self.model
        if step == "answer":
            if state.grant_read[p] == state.grant[p]:
                return None
            after = model.answer(state, s, p)
        else:
            assert state.serving[s] == p % model.N, "the chunk under way"
            grants = state.grant_read
            (after,) = [a for a in model.sender_steps(state, s) if a.grant_read == grants]
            assert after.landed[p] % 2 == (step == "near")
        for q in model.from_[s]:
            unread = (
                state.landed_read[q] < state.landed[q] < after.landed[q],
                state.back_read[q] < state.back[q] < after.back[q],
            )
            if any(unread):
                return None
        does = (after.serving[s], after.held[s])
        assert does == seen, "what the sender has under way and holds"
        return after


def drawn(seed, nodes):
    """Draw bytes and chunks of up to 4 a pair, half of the pairs with none."""
    draw = np.random.default_rng(seed)
    chunk = draw.integers(1, 5, (nodes, nodes))
    slices = draw.integers(0, 4 * chunk + 1) * draw.integers(0, 2, (nodes, nodes))
    np.fill_diagonal(slices, 0)
    return slices, chunk


def replayed(slices, chunk, fabric, outstanding, *, rail=Recorded, model=Model, seed=0):
    """Run a rail and replay it; return both."""
    recorded = rail(slices, chunk, fabric, outstanding)
    run = recorded.run()
    replay = Replay(
        model((-(-slices // chunk)).tolist(), outstanding), recorded.steps, Random(seed)
    )
    replay.run()
    return run, replay


# With two outstanding and no round trip, no chunk is ever near its end: that is one outstanding.
ROUND_TRIPS_S = [(1, 0.0), (1, 0.5), (1, 40.0), (2, 0.01), (2, 0.5), (2, 3.0), (2, 40.0)]


@pytest.mark.parametrize("outstanding, round_trip_s", ROUND_TRIPS_S)
@pytest.mark.parametrize("nodes", [2, 3, 4, 5])
def test_the_simulator_takes_steps_of_the_model(nodes, outstanding, round_trip_s):
    handed_back = 0
    for seed in range(20):
        slices, chunk = drawn(seed, nodes)
        fabric = Fabric(1.0, grant_latency_s=round_trip_s, incast=0.5 * (seed % 2))
        run, replay = replayed(slices, chunk, fabric, outstanding, seed=seed)
        assert run.num_words == replay.num_words
        assert run.num_chunks == sum(replay.state.begun) == sum(replay.model.chunks)
        handed_back += sum(replay.state.back)
    assert handed_back or nodes == 2


class AnotherTurn(Recorded):
    def _choose(self, d):
        return (self.open[d] & -self.open[d]).bit_length() - 1


class OneTooMany(Recorded):
    def _receiver_near(self, s, d):
        super()._receiver_near(s, d)
        self.near[d] += 1


class HandsBackToTheEnd(Recorded):
    def _sender_near(self, s, d):
        super()._sender_near(s, d)
        self.taking[s] = False


class OpensWhileItHolds(Recorded):
    def _sent(self, s, d):
        super()._sent(s, d)
        self._open_up(s)


class NoTurns(Model):
    def choice(self, state, d):
        return next((p for p in self.into[d] if self.left(state, p)), None)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"rail": AnotherTurn}, "the sender whose turn it is"),
        ({"rail": OneTooMany}, "what the receiver knows"),
        ({"rail": HandsBackToTheEnd}, "what the sender has under way and holds"),
        ({"rail": OpensWhileItHolds}, "the model cannot follow"),
        ({"model": NoTurns}, "the sender whose turn it is"),
    ],
)
def test_a_simulator_of_another_protocol_is_found(change, words):
    with pytest.raises(AssertionError, match=words):
        for seed in range(20):
            replayed(*drawn(seed, 4), Fabric(1.0, grant_latency_s=0.5), 2, **change)
