"""All tensor-parallel ranks decide alike, although each has its own clock: only the leading rank's counts."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.backends.sglang.fake_scheduler import Batch, Handed, Rank, Request, Setup

ITERATION_S = 0.01
TOKEN_S = 1e-4
"""Iterations take a constant and a time for each token. A step without a batch takes the constant."""
ENDING_STEPS = 2000
"""All requests end within this many steps after the last event."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request to make on each rank. Requests of one `family` have the same tokens."""

    family: int
    prompt_tokens: int
    output_tokens: int
    annotations: tuple[tuple[str, Any], ...]

    def request(self, rid: str) -> Request:
        prompt = range(self.family * 1000, self.family * 1000 + self.prompt_tokens)
        return Request(rid, prompt, self.output_tokens, SimpleNamespace(custom_params=dict(self.annotations)))


@dataclass(frozen=True, slots=True)
class Step:
    """What happens before a step: time passes, requests arrive, and one of the latest requests may be aborted."""

    arrivals: Sequence[Arrival] = ()
    abort: int | None = None
    pause_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Inaccuracy:
    """How a rank's clock differs from the true time."""

    offset_s: float = 0.0
    drift: float = 0.0
    jitter_s: float = 0.0
    seed: int = 0


class Clock:
    """A rank's monotonic clock. `true_s` is the true time."""

    def __init__(self, inaccuracy: Inaccuracy) -> None:
        self.true_s = 0.0
        self._inaccuracy = inaccuracy
        self._dice = random.Random(inaccuracy.seed)
        self._last_s = -float("inf")

    def __call__(self) -> float:
        error = self._inaccuracy
        jitter_s = self._dice.uniform(0.0, error.jitter_s)
        self._last_s = max(self._last_s, error.offset_s + self.true_s * (1 + error.drift) + jitter_s)
        return self._last_s


class Ranks:
    """Two ranks that get the same events. The second plans by its own ticks if `own_ticks`."""

    def __init__(self, setup: Setup, inaccuracies: Sequence[Inaccuracy], *, own_ticks: bool = False) -> None:
        self._clocks = [Clock(inaccuracy) for inaccuracy in inaccuracies]
        self.ranks = [Rank(setup, clock) for clock in self._clocks]
        self._own_ticks = own_ticks
        self._arrived = 0

    def run(self, steps: Sequence[Step]) -> Iterator[tuple[list[Handed], list[Handed]]]:
        """After each step, what both ranks handed to SGLang in it. Ends when all requests have ended."""
        for step in steps:
            yield self._step(step)
        for _ in range(ENDING_STEPS):
            if not any(rank.busy for rank in self.ranks):
                return
            yield self._step(Step())
        raise AssertionError("requests do not end")

    def _step(self, step: Step) -> tuple[list[Handed], list[Handed]]:
        self._advance(step.pause_s)
        first, second = self.ranks
        leading = first._poll_timeout_aborts()
        sent = (leading, second._poll_timeout_aborts() if self._own_ticks else leading)
        names = [f"r{self._arrived + number}" for number in range(len(step.arrivals))]
        self._arrived += len(names)
        aborts = [] if step.abort is None else [SimpleNamespace(rid=f"r{self._arrived - 1 - step.abort}")]
        batches: list[Batch | None] = []
        for rank, ticks in zip(self.ranks, sent, strict=True):
            rank.handed.clear()
            requests = [one.request(name) for one, name in zip(step.arrivals, names, strict=True)]
            batches.append(rank.begin_step([*ticks, *requests, *aborts]))
        self._advance(ITERATION_S + TOKEN_S * max(batch.computed_tokens if batch else 0 for batch in batches))
        for rank in self.ranks:
            rank.end_step()
        return list(first.handed), list(second.handed)

    def _advance(self, seconds: float) -> None:
        for clock in self._clocks:
            clock.true_s += seconds


def _milliseconds(least: float, most: float) -> st.SearchStrategy[float | None]:
    return st.none() | st.floats(least, most)


ANNOTATIONS = st.fixed_dictionaries(
    {},
    optional={
        "plait_ttft_ms": _milliseconds(1, 2000),
        "plait_tpot_ms": _milliseconds(5, 200),
        "plait_jct_ms": _milliseconds(10, 5000),
        "plait_age_ms": st.floats(0, 500),
        "plait_priority": st.integers(-1, 1),
        "plait_objective": st.sampled_from(("latency", "throughput")),
    },
)
ARRIVALS = st.builds(
    Arrival,
    family=st.integers(0, 3),
    prompt_tokens=st.integers(1, 600),
    output_tokens=st.integers(1, 60),
    annotations=ANNOTATIONS.map(lambda annotations: tuple(annotations.items())),
)
STEPS = st.builds(
    Step,
    arrivals=st.lists(ARRIVALS, max_size=3),
    abort=st.none() | st.integers(0, 5),
    pause_s=st.sampled_from((0.0, 0.0, 0.05, 1.0)),
)
SETUPS = st.builds(
    Setup,
    pages=st.integers(50, 150),
    chunk_tokens=st.sampled_from((64, 256)),
    max_running=st.integers(2, 8),
    mixes=st.booleans(),
    overlaps=st.booleans(),
)
INACCURACIES = st.builds(
    Inaccuracy,
    offset_s=st.floats(0, 1e6),
    drift=st.floats(-0.1, 0.1),
    jitter_s=st.floats(0, 0.05),
    seed=st.integers(0, 1000),
)


@settings(max_examples=30)
@given(SETUPS, st.tuples(INACCURACIES, INACCURACIES), st.lists(STEPS, min_size=1, max_size=25))
def test_ranks_decide_alike(setup: Setup, inaccuracies: tuple[Inaccuracy, Inaccuracy], steps: list[Step]) -> None:
    ranks = Ranks(setup, inaccuracies)
    for first, second in ranks.run(steps):
        assert first == second
        in_flight = [rank.plait.planner.facts.in_flight for rank in ranks.ranks if rank.plait.planner]
        assert in_flight[0] == in_flight[1]


DIFFERENT_CLOCKS = (Inaccuracy(7.0, 0.0, 0.002, 1), Inaccuracy(9e5, 0.05, 0.02, 2))


def _busy_steps() -> list[Step]:
    """Many requests, with and without objectives."""
    dice = random.Random(1)

    def annotations() -> dict[str, Any]:
        if dice.random() < 0.3:
            return {}
        return {"plait_ttft_ms": dice.uniform(50, 2000), "plait_tpot_ms": dice.uniform(15, 200)}

    def arrival() -> Arrival:
        prompt_tokens, output_tokens = dice.randint(1, 600), dice.randint(1, 60)
        return Arrival(dice.randrange(50), prompt_tokens, output_tokens, tuple(annotations().items()))

    return [
        Step([arrival() for _ in range(dice.choice((0, 0, 1, 2)))], dice.choice((None, None, None, 2)))
        for _ in range(200)
    ]


def test_a_busy_engine_pulls_every_lever_alike() -> None:
    ranks = Ranks(Setup(), DIFFERENT_CLOCKS)
    handed: list[Handed] = []
    for first, second in ranks.run(_busy_steps()):
        assert first == second
        handed += first
    assert any(one.preempted for one in handed)
    assert any(one.limits for one in handed)
    assert any(one.chunked for one in handed)
    assert any(set(one.queue) - set(one.shown) - set(one.preempted) for one in handed), "some calls were hidden"
    assert any(_number(one.shown) != sorted(_number(one.shown)) for one in handed), "some overtook others"
    assert len({one.chunk_tokens for one in handed}) > 1


def test_ranks_that_plan_by_their_own_clocks_differ() -> None:
    ranks = Ranks(Setup(), DIFFERENT_CLOCKS, own_ticks=True)
    assert any(
        [one.shown for one in first] != [one.shown for one in second] for first, second in ranks.run(_busy_steps())
    )


def _number(names: Sequence[str]) -> list[int]:
    return [int(name[1:]) for name in names]
