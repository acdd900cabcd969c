"""A fleet in virtual time that answers online calls, and lines of batches as the gateway's feeder sends them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache, partial
from math import inf
from typing import Final, Protocol

from plait.backends.profiles import load_profile
from plait.gateway.fleet.router import Router
from plait.gateway.guests.batches.feeder import LOOK_S, Feeder, SentLine
from plait.lab.embedded.engine import Engine, EngineSettings
from plait.lab.embedded.hash_chain import HashChain
from plait.lab.simulation.simulate import CallRecord, Prompt, SimulatedCall, Simulation
from plait.lab.simulation.workload import poisson_arrivals, stream
from plait.policy.batches.line_order import LinesLeft
from plait.policy.prefix.block_hash import TREE_BLOCK_TOKENS, root_hash
from plait.policy.types import CHARACTERS_PER_TOKEN, Objective

MODEL: Final = "demo"
PROFILE: Final = "a6000-mistral-7b"
ENGINES: Final = 4
BLOCK_TOKENS: Final = 16
KV_TOKENS: Final = 120_000
SLOTS: Final = 256

APPLICATIONS: Final = 12
"""Online calls are chats of so many applications, each with a system prompt of its own."""
SYSTEM_TOKENS: Final = (300, 1200)
MESSAGE_TOKENS: Final = (180.0, 0.9)
"""Lengths of about a log-normal distribution: the median, and the sigma of the logarithm."""
ANSWER_TOKENS: Final = (120.0, 0.7)
MOST_ANSWER_TOKENS: Final = 1000
LINE_SYSTEM_TOKENS: Final = 150
LINE_ANSWER_TOKENS: Final = (100.0, 0.5)

Tokens = Sequence[int]
Line = Callable[[float], SimulatedCall]
"""The call of a line that is sent at a time."""


def prompt_of(*parts: Tokens) -> Prompt:
    """A prompt of these tokens."""
    tokens = [token for part in parts for token in part]
    root = root_hash(MODEL)
    return Prompt(len(tokens), HashChain(BLOCK_TOKENS, root, tokens), HashChain(TREE_BLOCK_TOKENS, root, tokens))


def words(draw: random.Random, count: int) -> Tokens:
    """So many tokens that no other prompt has."""
    return draw.choices(range(32_000), k=count)


def length(draw: random.Random, around: tuple[float, float], most: int) -> int:
    median, sigma = around
    return max(1, min(most, round(median * draw.lognormvariate(0.0, sigma))))


def online_calls(count: int, per_s: float, seed: int) -> list[SimulatedCall]:
    """Chats at a rate; infinite: all at once."""
    draw = stream("online", seed)
    systems = [words(draw, draw.randint(*SYSTEM_TOKENS)) for _ in range(APPLICATIONS)]
    popular = [1 / rank for rank in range(1, APPLICATIONS + 1)]
    times_s = [0.0] * count if per_s == inf else poisson_arrivals(count, per_s, seed)
    return [
        SimulatedCall(
            at_s,
            prompt_of(draw.choices(systems, popular)[0], words(draw, length(draw, MESSAGE_TOKENS, 4000))),
            length(draw, ANSWER_TOKENS, MOST_ANSWER_TOKENS),
            tenant="online",
            output_limit=MOST_ANSWER_TOKENS,
        )
        for at_s in times_s
    ]


def endless_lines(tokens: int, seed: int) -> Callable[[int], Line]:
    """Lines with prompts of so many tokens, which begin alike, by number."""
    draw = stream("lines", seed)
    system = words(draw, LINE_SYSTEM_TOKENS)

    @cache
    def line(_number: int) -> Line:
        prompt = prompt_of(system, words(draw, tokens - LINE_SYSTEM_TOKENS))
        return partial(line_call, prompt, length(draw, LINE_ANSWER_TOKENS, MOST_ANSWER_TOKENS))

    return line


def line_call(prompt: Prompt, output_tokens: int, now_s: float) -> SimulatedCall:
    return SimulatedCall(
        now_s, prompt, output_tokens, tenant="batch", objective=Objective.THROUGHPUT, is_line=True,
        output_limit=MOST_ANSWER_TOKENS,
    )  # fmt: skip


class Fleet:
    """Equal engines behind one gateway. `scheduler` is the engines'."""

    def __init__(self, scheduler: str = "slo") -> None:
        costs = load_profile(PROFILE).cost_model()
        self.names = [f"engine-{number}" for number in range(ENGINES)]
        router = Router("plait", gateway_id="gateway")
        engines = {}
        for name in self.names:
            settings = EngineSettings(
                name=name, model=MODEL, kv_tokens=KV_TOKENS, max_running_calls=SLOTS, scheduler=scheduler
            )
            engines[name] = Engine(settings, costs)
            router.add_engine(name, costs)
        self.simulation = Simulation(router, engines, MODEL)
        self.feeder = Feeder(router, self.simulation.admissions[0])


class Parts(Protocol):
    """Lines that are left. As `LinesLeft`."""

    def next(self, engine: str, /) -> int | None:
        """The number of the engine's next line."""

    def take(self, engine: str, /) -> int:
        """The same, and it is left no more."""


class Endless:
    """Lines in turn for all engines, without an end."""

    def __init__(self) -> None:
        self._number = 0

    def next(self, _engine: str) -> int | None:
        return self._number

    def take(self, _engine: str) -> int:
        self._number += 1
        return self._number - 1


class Lines:
    """Sends lines from `begins_s` on, until `ends_s`, as the feeder lets them; `at_once`: at most so many run.

    `line` returns the call of a number.
    """

    def __init__(
        self,
        fleet: Fleet,
        left: Parts,
        line: Callable[[int], Line],
        *,
        begins_s: float = 0.0,
        ends_s: float = inf,
        at_once: float = inf,
    ) -> None:
        self.records: list[CallRecord] = []
        """Those that have ended, in this order."""
        self._fleet = fleet
        self._left = left
        self._line = line
        self._ends_s = ends_s
        self._at_once = at_once
        self._running = 0
        fleet.simulation.at(begins_s, self._look)

    def _look(self, now_s: float) -> None:
        self._send(now_s)
        if now_s < self._ends_s and any(self._left.next(engine) is not None for engine in self._fleet.names):
            self._fleet.simulation.at(now_s + LOOK_S, self._look)

    def _send(self, now_s: float) -> None:
        feeder = self._fleet.feeder
        while now_s < self._ends_s and self._running < self._at_once:
            engine = feeder.engine_for(MODEL, partial(self._tokens, now_s), now_s)
            if engine is None:
                return
            sent = feeder.sent(engine, self._tokens(now_s, engine) or 0.0, now_s)
            self._running += 1
            line = self._line(self._left.take(engine))
            self._fleet.simulation.send(line(now_s), partial(self._ended, sent), prefer=engine)

    def _tokens(self, now_s: float, engine: str) -> float | None:
        number = self._left.next(engine)
        if number is None:
            return None
        shared = self._left.shared_bytes(engine, number) if isinstance(self._left, LinesLeft) else 0
        return self._line(number)(now_s).prompt.tokens - shared / CHARACTERS_PER_TOKEN

    def _ended(self, sent: SentLine, record: CallRecord) -> None:
        self.records.append(record)
        self._running -= 1
        self._fleet.feeder.ended(sent)
        self._send(record.finished_s)
