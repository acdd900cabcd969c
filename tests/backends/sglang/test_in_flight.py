"""The batch that SGLang computes while the next one is planned."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from plait.policy.scheduling.plan import InFlight, IterationWork
from tests.backends.sglang.fake_scheduler import Rank, Request, Setup

CHUNKS = [IterationWork.of([256], [number * 256]) for number in range(4)]


class Engine:
    """A rank that computes one long prompt, a chunk a step. Each step's batch takes a second."""

    def __init__(self, *, overlaps: bool) -> None:
        self.now_s = 0.0
        self.rank = Rank(replace(Setup(), overlaps=overlaps), lambda: self.now_s)
        self._sent: list[Any] = [Request("a", range(1000), 20, SimpleNamespace(custom_params=None))]

    def receive(self) -> None:
        """The beginning of a step, and the whole step of an engine that is paused."""
        sent, self._sent = self._sent, []
        self.rank.process_input_requests([*self.rank._poll_timeout_aborts(), *sent])

    def step(self) -> InFlight | None:
        """Returns what is in flight at the step's plan."""
        sent, self._sent = self._sent, []
        self.rank.begin_step([*self.rank._poll_timeout_aborts(), *sent])
        assert self.rank.plait.planner is not None
        in_flight = self.rank.plait.planner.facts.in_flight
        self.now_s += float(not self.rank._overlaps or len(self.rank.result_queue) > 1)
        self.rank.end_step()
        return in_flight


def test_nothing_is_in_flight_without_overlap() -> None:
    engine = Engine(overlaps=False)
    assert [engine.step() for _ in range(4)] == [None] * 4


def test_each_begins_when_the_one_before_has_ended() -> None:
    engine = Engine(overlaps=True)
    assert [engine.step() for _ in range(4)] == [None, *[InFlight(CHUNKS[n], float(n)) for n in range(3)]]


def test_what_was_in_flight_has_not_begun_anew_after_a_pause() -> None:
    """A pause in place leaves the result of the last batch where it is."""
    engine = Engine(overlaps=True)
    for _ in range(2):
        engine.step()
    for _ in range(3):
        engine.receive()
        engine.now_s += 5.0
    assert engine.step() == InFlight(CHUNKS[1], 1.0)


def test_a_batch_without_tokens_is_not_in_flight() -> None:
    """Data-parallel ranks with shared attention run empty batches beside each other's."""
    engine = Engine(overlaps=True)
    engine.receive()
    mode = SimpleNamespace(is_decode=lambda: False)
    engine.rank.plait.begins(SimpleNamespace(reqs=[], extend_lens=None, prefix_lens=None, forward_mode=mode))
    assert engine.step() is None
