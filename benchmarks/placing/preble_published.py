"""Preble's five workloads as the generators published with its code make them. `preble_workloads.py` has our own ones.

A run has a fixed set of tools, problems, videos or documents. How often each is asked is fixed before, all calls are
shuffled, and they come at Poisson times. Games are all alive from the beginning and share nothing. Sets and rates are
those of the published configurations, for a pair of engines: twice as many on four. The texts are not at hand, so
lengths are drawn as the paper's table 1 has them. Runs have a fifth to a half of the published calls: the first call
on each of a set, which nobody can have cached, weighs more.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache, partial
from itertools import count, islice
from typing import Final

from benchmarks.filling.workloads import EMPTY, FIRST_UNIQUE_ID, extended
from benchmarks.placing.preble_workloads import (
    DEMONSTRATION,
    GAME,
    SYSTEM_ID,
    TOOL,
    TOOL_ANSWER,
    TOOL_QUESTION,
    TOOL_SYSTEM,
    Spread,
    game,
)
from plait.lab.simulation.simulate import CallRecord, SimulatedCall, Simulation
from plait.lab.simulation.workload import poisson_arrivals

PAIR: Final = 2
"""The engines that sizes and rates are given for."""
WARM_UP: Final = 0.4
"""The part of the calls, from the first on, that fills the caches and is in no time or share."""


class Asked(StrEnum):
    """How often each of a set is asked."""

    EQUALLY = "equally"
    BY_LENGTH = "by length"
    BY_CHANCE = "by chance"
    """By a number that differs from one to the other as much as it is large: solutions of a problem, or questions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedSet:
    """A workload of single calls on a fixed set. Its sizes are for a pair of engines, lengths are in tokens."""

    number: int
    """The size of the set: tools, problems, videos or documents."""
    calls: int
    """The calls of a run."""
    loads: Sequence[float]
    """Calls a second."""
    system: int
    """What all prompts begin with."""
    own: Spread
    """What the calls on one of the set share after that."""
    longest: int
    """The most of `own`."""
    asked: Asked
    """How often each of the set is asked."""
    question: Spread
    """What a call has alone."""
    answer: Spread
    """What the engine generates."""
    longest_answer: int
    """The most of `answer`."""

    def shuffled(self, engines: int, load: float, seed: int) -> list[SimulatedCall]:
        """The calls, in the order of arrival."""
        dice = random.Random(f"published set of {self.number} {seed}")
        pairs = engines / PAIR
        number, calls = round(pairs * self.number), round(pairs * self.calls)
        system = extended(EMPTY, SYSTEM_ID, self.system)
        lengths = [min(self.longest, self.own.skewed(dice)) for _ in range(number)]
        shared = [extended(system, one, tokens) for one, tokens in enumerate(lengths)]
        order = _shared_out(calls, self._weights(lengths, dice))
        dice.shuffle(order)
        return [
            SimulatedCall(
                at_s,
                extended(shared[one], FIRST_UNIQUE_ID + place, self.question.normal(dice)),
                min(self.longest_answer, self.answer.skewed(dice)),
                prefix=f"prefix {one}",
            )
            for place, (at_s, one) in enumerate(zip(poisson_arrivals(calls, pairs * load, seed), order, strict=True))
        ]

    def _weights(self, lengths: Sequence[int], dice: random.Random) -> Sequence[float]:
        if self.asked is Asked.BY_LENGTH:
            return lengths
        if self.asked is Asked.BY_CHANCE:
            return [Spread(1_000, 1_000).skewed(dice) for _ in lengths]
        return [1.0] * len(lengths)


def _shared_out(calls: int, weights: Sequence[float]) -> list[int]:
    """So many numbers below that of the weights, each as often as its weight says."""
    whole, up_to = sum(weights), 0.0
    order: list[int] = []
    for number, weight in enumerate(weights):
        up_to += calls * weight / whole
        order += [number] * (round(up_to) - len(order))
    return order


SETS: Final[Mapping[str, PublishedSet]] = {
    "tool use": PublishedSet(
        number=200,
        calls=600,
        loads=(9, 12, 15, 18),
        system=TOOL_SYSTEM,
        own=TOOL,
        longest=4_096,
        asked=Asked.EQUALLY,
        question=TOOL_QUESTION,
        answer=TOOL_ANSWER,
        longest_answer=512,
    ),
    "programming": PublishedSet(
        number=160,
        calls=480,
        loads=(3, 4, 5, 6),
        system=2_400,
        own=Spread(1_440, 1_600, 100),
        longest=8_000,
        asked=Asked.BY_CHANCE,
        question=Spread(30, 2, 20),
        answer=Spread(190, 343),
        longest_answer=512,
    ),
    "video": PublishedSet(
        number=150,
        calls=360,
        loads=(2, 3, 4, 5),
        system=16,
        own=Spread(9_750, 5_976, 500),
        longest=8_192,
        asked=Asked.BY_LENGTH,
        question=Spread(115, 20, 40),
        answer=Spread(4, 1.5),
        longest_answer=16,
    ),
    "long documents": PublishedSet(
        number=24,
        calls=216,
        loads=(0.5, 0.7, 1.0, 1.2),
        system=13,
        own=Spread(22_100, 6_105, 4_000),
        longest=32_000,
        asked=Asked.BY_CHANCE,
        question=Spread(60, 15, 30),
        answer=Spread(16, 9.9),
        longest_answer=45,
    ),
}
"""Those of one call each, by the names that our own workloads have.

Each tool is asked equally often, each video by its length, of which 8,192 tokens are kept. Problems and documents are
asked as often as their data sets have solutions and questions, which differ much: drawn with a deviation that is as
large as the mean. Every prompt ends with tokens of its own. All examples of the programs are 2,400 tokens.
"""

GAMES: Final = "embodied agents"
GAMES_ALIVE: Final = 100
"""The games that are there at a time, by engine. At 15 calls a second on two engines, a game has 13 s between steps."""
GAME_STEPS: Final = 18
GAME_CALLS: Final = 800
GAME_LOADS: Final = (8.0, 12.0, 16.0, 20.0)

LOADS: Final[Mapping[str, Sequence[float]]] = {
    "tool use": SETS["tool use"].loads,
    GAMES: GAME_LOADS,
    **{name: one.loads for name, one in SETS.items() if name != "tool use"},
}
"""All five workloads, in the paper's order, and the calls a second of a pair of engines."""


def come(simulation: Simulation, workload: str, engines: int, load: float, seed: int) -> float:
    """Run a workload on so many engines; returns when the calls begin that count, in seconds."""
    if workload != GAMES:
        calls = _calls(workload, engines, load, seed)
        simulation.run(calls)
        return calls[round(WARM_UP * len(calls))].arrives_s
    pairs = engines / PAIR
    ticks_s = poisson_arrivals(round(pairs * GAME_CALLS), pairs * load, seed)
    play(simulation, GAMES_ALIVE * engines, ticks_s, seed)
    return ticks_s[round(WARM_UP * len(ticks_s))]


@lru_cache(maxsize=1)
def _calls(workload: str, engines: int, load: float, seed: int) -> Sequence[SimulatedCall]:
    """The same for each policy."""
    return SETS[workload].shuffled(engines, load, seed)


def published_game(number: int, seed: int) -> Iterator[SimulatedCall]:
    """The calls of a game: its prompts begin with the game's own name, so games share nothing."""
    dice = random.Random(f"game {number} {seed}")
    prompt = extended(EMPTY, number, DEMONSTRATION + GAME.normal(dice))
    return islice(game(prompt, number, 0.0, dice), GAME_STEPS)


def play(simulation: Simulation, alive: int, ticks_s: Sequence[float], seed: int) -> None:
    """Run games in a closed loop: at each tick, one that has its answer takes its next step, by chance.

    A game that ends is followed by another one, so `alive` are there. Those of the beginning have some steps behind
    them. A tick that finds no game with an answer is made up for once there is one.
    """
    games, dice = _Games(simulation, alive, seed), random.Random(f"games {seed}")
    for tick_s, chance in zip(ticks_s, iter(dice.random, None), strict=False):
        simulation.at(tick_s, partial(games.step, chance))
    simulation.run()


class _Games:
    def __init__(self, simulation: Simulation, alive: int, seed: int) -> None:
        self._simulation = simulation
        self._coming = (published_game(number, seed) for number in count())
        dice = random.Random(f"begun games {seed}")
        begun = (dice.randrange(GAME_STEPS) for _ in range(alive))
        self._answered: list[Iterator[SimulatedCall]] = [
            islice(coming, steps, None) for coming, steps in zip(self._coming, begun, strict=False)
        ]
        self._missed: list[float] = []
        """The chances of ticks that found no game with an answer."""

    def step(self, chance: float, now_s: float) -> None:
        """One of the games with an answer goes on: the `chance`, below 1, says which."""
        if not self._answered:
            self._missed.append(chance)
            return
        going = self._answered.pop(int(chance * len(self._answered)))
        call = next(going, None)
        if call is None:
            going = next(self._coming)
            call = next(going)
        ended = partial(self._ended, going)
        self._simulation.send(replace(call, arrives_s=now_s), ended, ended)

    def _ended(self, going: Iterator[SimulatedCall], record: CallRecord) -> None:
        self._answered.append(going)
        if self._missed:
            self.step(self._missed.pop(), record.finished_s)
