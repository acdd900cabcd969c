"""Preble's five workloads, by the lengths and the sharing in its table 1. Their texts are not at hand.

`preble_published.py` has the sets, the order and the rates of the generators that are published with its code.

Each is a function of a number of calls, their mean rate in calls a second (infinite: all at once) and a seed. It gives
sessions: a session's first call comes by itself, each later one when the one before it has its answer. All but the
embodied agents' have one call.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import exp, log, sqrt
from typing import Final

from benchmarks.filling.workloads import EMPTY, FIRST_UNIQUE_ID, Coming, Lengths, extended, video
from plait.lab.simulation.simulate import Prompt, SimulatedCall
from plait.lab.simulation.workload import poisson_arrivals

Session = Sequence[SimulatedCall]
"""Only the time of the first call's arrival counts."""
Sessions = Callable[[int, float, int], list[Session]]

SYSTEM_ID: Final = FIRST_UNIQUE_ID - 1


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and standard deviation of a number of tokens, and the least of them."""

    mean: float
    deviation: float
    least: int = 1

    def normal(self, dice: random.Random) -> int:
        """Drawn as if normal."""
        return max(self.least, round(dice.gauss(self.mean, self.deviation)))

    def skewed(self, dice: random.Random) -> int:
        """Drawn as if log-normal."""
        sigma = sqrt(log(1 + (self.deviation / self.mean) ** 2))
        return max(self.least, round(exp(dice.gauss(log(self.mean) - sigma**2 / 2, sigma))))


TOOL_SYSTEM, TOOL, TOOL_QUESTION, TOOL_ANSWER = 165, Spread(1_395, 700, 100), Spread(275, 100, 20), Spread(43, 16)
TOOLS, ASKED_A_TOOL = 300, Spread(39, 64)
"""The tools of a run, which do not fit into the caches of two A6000, and how often each is asked beside the others."""

DEMONSTRATION, GAME, OBSERVATION, ACTION = 300, Spread(1_735, 200, 500), Spread(6, 3), Spread(16, 13)
STEPS: Final = 48
"""A game's calls: each has all that was seen and done before."""

EXAMPLES, PROBLEM, PROGRAM = 850, Spread(3_020, 1_600, 200), Spread(190, 343)
SAMPLES: Final = 10
"""So many programs are asked for at once for each problem. The paper does not say how many."""
LONGEST_PROGRAM: Final = 1_500

VIDEO_QA: Final = Coming(9_750, 9, Lengths((60, 170), (2, 8), 4))
LONG_DOCUMENTS: Final = Coming(22_100, 18, Lengths((500, 2_200), (4, 60), 16))


def tool_use(calls: int, rate: float, seed: int) -> list[Session]:
    """Questions to 300 tools: few are asked often, most seldom."""
    dice = random.Random(f"tool use {seed}")
    system = extended(EMPTY, SYSTEM_ID, TOOL_SYSTEM)
    tools = [extended(system, number, TOOL.normal(dice)) for number in range(TOOLS)]
    asked = dice.choices(tools, [ASKED_A_TOOL.skewed(dice) for _ in tools], k=calls)
    return [
        [_call(arrives_s, tool, number, TOOL_QUESTION.normal(dice), TOOL_ANSWER.normal(dice))]
        for number, (arrives_s, tool) in enumerate(zip(poisson_arrivals(calls, rate, seed), asked, strict=True))
    ]


def embodied(calls: int, rate: float, seed: int) -> list[Session]:
    """Games of 48 steps, one after the other. The last game may be cut short."""
    dice = random.Random(f"embodied {seed}")
    begins_s = poisson_arrivals(-(-calls // STEPS), rate / STEPS, seed)
    demonstration = extended(EMPTY, SYSTEM_ID, DEMONSTRATION)
    sessions: list[Session] = [
        list(game(extended(demonstration, number, GAME.normal(dice)), number, arrives_s, dice))
        for number, arrives_s in enumerate(begins_s)
    ]
    sessions[-1] = sessions[-1][: calls - STEPS * (len(sessions) - 1)]
    return sessions


def game(prompt: Prompt, number: int, arrives_s: float, dice: random.Random) -> Iterator[SimulatedCall]:
    """The calls of the game that begins with `prompt`."""
    for step in range(STEPS):
        answer_id = FIRST_UNIQUE_ID + (number * STEPS + step) * 2
        answer_tokens = ACTION.skewed(dice)
        yield SimulatedCall(arrives_s, prompt, answer_tokens, prefix=f"game {number}")
        prompt = extended(prompt, answer_id, answer_tokens)
        prompt = extended(prompt, answer_id + 1, OBSERVATION.normal(dice))


def programming(calls: int, rate: float, seed: int) -> list[Session]:
    """Problems behind the same examples; for each, several programs at once, with long answers."""
    dice = random.Random(f"programming {seed}")
    examples = extended(EMPTY, SYSTEM_ID, EXAMPLES)
    sessions: list[Session] = []
    for number, arrives_s in enumerate(poisson_arrivals(-(-calls // SAMPLES), rate / SAMPLES, seed)):
        problem = extended(examples, number, PROBLEM.skewed(dice))
        for _ in range(SAMPLES):
            answer_tokens = min(LONGEST_PROGRAM, PROGRAM.skewed(dice))
            sessions.append([SimulatedCall(arrives_s, problem, answer_tokens, prefix=f"problem {number}")])
    return sessions[:calls]


def documents(document: Coming, calls: int, rate: float, seed: int) -> list[Session]:
    """Questions to documents that come and go."""
    sessions: list[Session] = [[call] for call in video(calls, rate, seed, document)]
    return sessions


def azure_mix(times_s: Sequence[float], calls: int, rate: float, seed: int) -> list[Session]:
    """Tool use and questions to videos by turns of chance, at Azure's times of arrival, stretched to the rate."""
    dice = random.Random(f"mix {seed}")
    apart = replace(VIDEO_QA, first_id=1 << 20)
    kinds = {"tools": iter(tool_use(calls, rate, seed)), "video": iter(documents(apart, calls, rate, seed))}
    first = dice.randrange(len(times_s) - calls)
    begins_s, ends_s = times_s[first], times_s[first + calls - 1]
    stretch = calls / rate / (ends_s - begins_s)
    sessions: list[Session] = []
    for time_s in times_s[first : first + calls]:
        (call,) = next(kinds[dice.choice(("tools", "video"))])
        sessions.append([replace(call, arrives_s=stretch * (time_s - begins_s))])
    return sessions


WORKLOADS: Final[Mapping[str, Sessions]] = {
    "tool use": tool_use,
    "embodied agents": embodied,
    "programming": programming,
    "video": partial(documents, VIDEO_QA),
    "long documents": partial(documents, LONG_DOCUMENTS),
}


def _call(arrives_s: float, shared: Prompt, number: int, question_tokens: int, answer_tokens: int) -> SimulatedCall:
    prompt = extended(shared, FIRST_UNIQUE_ID + number, question_tokens)
    return SimulatedCall(arrives_s, prompt, answer_tokens)
