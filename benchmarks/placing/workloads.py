"""The workloads that placement policies are compared on: calls in an open loop, and agents in a closed one.

All but the agents are functions of a number of calls, their mean rate in calls a second (infinite: all at once) and a
seed. Prompts are token ids without texts.
"""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from itertools import chain, islice
from math import inf
from pathlib import Path
from typing import Any, Final

from benchmarks.filling.workloads import (
    EMPTY,
    FIRST_UNIQUE_ID,
    VIDEO,
    VIDEO_LENGTHS,
    Coming,
    Lengths,
    Workload,
    burst,
    documents,
    extended,
    mooncake,
    of_blocks,
    tools,
    video,
)
from plait.lab.simulation.simulate import SimulatedCall
from plait.lab.simulation.workload import poisson_arrivals

AZURE_FILE: Final = "AzureLLMInferenceTrace_conv.csv"
AGENTS_FILE: Final = "agent_sessions.jsonl"

LOOGLE: Final = Coming(24_000, 18, VIDEO_LENGTHS)
MIXED_IDS: Final = 1_000
"""In the mix, documents have token ids from here on, and tool lists smaller ones."""
CHAT_LENGTHS: Final = Lengths((50, 1_500), (20, 600), 180)
AZURE_ANSWER_TOKENS: Final = 400
"""Longer answers of the trace are cut, as in Mooncake's."""

AGENT_STARTS_S: Final = 60.0
"""The first sessions begin within this time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentShape:
    """What is taken of a trace's sessions. Prompts and answers are divided by `scale`.

    A session ends before a context of more than `context_tokens`, and after so many `turns`. The time between an answer
    and the next turn is at most `think_s`.
    """

    scale: int = 8
    context_tokens: int = 16_000
    turns: int = 20
    think_s: float = 60.0


SMALL_AGENTS: Final = AgentShape()
"""An eighth of the trace's tokens, whose KV an engine of 7B could not hold."""


def loogle(calls: int, rate: float, seed: int) -> list[SimulatedCall]:
    """Documents of 24,000 tokens that come and go: each is asked 18 times while 40 others come. Answers of about 40."""
    return video(calls, rate, seed, LOOGLE)


def azure(traces: Path, calls: int, rate: float, seed: int) -> list[SimulatedCall]:
    """Tool lists, asked at the times of Azure's conversations, with answers as long as theirs."""
    times_s, answers = azure_times(traces), _azure_answers(traces)
    first = random.Random(f"azure {seed}").randrange(len(times_s) - calls)
    times_s = [time_s - times_s[first] for time_s in times_s[first : first + calls]]
    stretch = calls / rate / times_s[-1] if rate < inf else 0.0
    asked = tools(calls, inf, seed)
    return [
        replace(call, arrives_s=stretch * time_s, output_tokens=tokens)
        for call, time_s, tokens in zip(asked, times_s, answers[first:], strict=False)
    ]


def mix(calls: int, rate: float, seed: int) -> list[SimulatedCall]:
    """Half the calls are of tool lists, a fifth of videos, the others chats that share a short system prompt."""
    dice = random.Random(f"mix {seed}")
    kinds = dice.choices(("tools", "video", "chat"), (5, 2, 3), k=calls)
    drawn = {
        "tools": iter(tools(calls, inf, seed)),
        "video": iter(video(calls, inf, seed, replace(VIDEO, first_id=MIXED_IDS))),
        "chat": _chats(dice),
    }
    arrivals_s = poisson_arrivals(calls, rate, seed)
    return [replace(next(drawn[kind]), arrives_s=at_s) for kind, at_s in zip(kinds, arrivals_s, strict=True)]


def chat(calls: int, rate: float, seed: int) -> list[SimulatedCall]:
    """Chats that share a system prompt of 100 tokens, with questions of 50 to 1,500 and answers of about 180."""
    drawn = islice(_chats(random.Random(f"chat {seed}")), calls)
    return [
        replace(call, arrives_s=at_s) for call, at_s in zip(drawn, poisson_arrivals(calls, rate, seed), strict=True)
    ]


def _chats(dice: random.Random) -> Iterator[SimulatedCall]:
    system, number = extended(EMPTY, 999, 100), 1 << 28
    while True:
        number += 1
        prompt = extended(system, number, CHAT_LENGTHS.draw_question(dice))
        yield SimulatedCall(0.0, prompt, CHAT_LENGTHS.draw_answer(dice), prefix="chat")


def open_loops(traces: Path) -> dict[str, Workload]:
    """The workloads in an open loop, by name."""
    return {
        "tools": tools,
        "documents": documents,
        "video": video,
        "loogle": loogle,
        "mooncake": partial(mooncake, traces),
        "azure": partial(azure, traces),
        "burst": burst,
        "mix": mix,
    }


@dataclass(frozen=True, slots=True)
class Turn:
    """One call of an agent: how long it thinks before, and its call but for its time."""

    think_s: float
    call: SimulatedCall


def agents(traces: Path, seed: int, shape: AgentShape = SMALL_AGENTS) -> Iterator[Sequence[Turn]]:
    """Sessions of coding agents without an end, in an order by the seed."""
    with (traces / AGENTS_FILE).open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    dice, number = random.Random(f"agents {seed}"), 0
    while True:
        for row in dice.sample(rows, len(rows)):
            number += 1
            turns = list(islice(_turns(row, number, shape), shape.turns))
            if len(turns) > 1:
                yield turns


def _turns(row: Mapping[str, Any], number: int, shape: AgentShape) -> Iterator[Turn]:
    """A session's calls. Token ids are those of its blocks, apart from other sessions'."""
    block_tokens, first_id = row["block_tokens"] // shape.scale, FIRST_UNIQUE_ID + (number << 20)
    for request in row["requests"]:
        if request["type"] != "n":
            continue
        tokens = request["in"] // shape.scale
        if tokens > shape.context_tokens:
            return
        blocks = chain.from_iterable(range(first_id + begin, first_id + end + 1) for begin, end in request["blocks"])
        prompt = of_blocks(blocks, block_tokens, tokens)
        if not prompt.tokens:
            continue
        answer_tokens = max(1, request["out"] // shape.scale)
        call = SimulatedCall(0.0, prompt, answer_tokens, prefix=f"session {number}")
        yield Turn(min(request.get("think_s", 0.0), shape.think_s), call)


def azure_times(traces: Path) -> list[float]:
    """When Azure's conversations came, in seconds from the first."""
    times = [datetime.fromisoformat(row["TIMESTAMP"][:26]) for row in _azure(traces)]
    return [(time - times[0]).total_seconds() for time in times]


def _azure_answers(traces: Path) -> list[int]:
    """The tokens of their answers."""
    return [min(AZURE_ANSWER_TOKENS, max(1, int(row["GeneratedTokens"]))) for row in _azure(traces)]


def _azure(traces: Path) -> list[dict[str, str]]:
    with (traces / AZURE_FILE).open(encoding="utf-8") as lines:
        return list(csv.DictReader(lines))
