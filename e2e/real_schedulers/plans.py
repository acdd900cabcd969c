"""Schedulers whose plans tests make up."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from e2e.real_schedulers.built_engine import Clock
from plait.policy.scheduling.plan import EngineFacts, IterationWork, LocalCall, LocalScheduler, Plan


def forced(scheduler: str, **levers: int | str) -> dict[str, Any]:
    """The plugin's settings that pull levers over this scheduler's plans."""
    options = {"scheduler": scheduler, **levers}
    return {"scheduler": "e2e.own_schedulers.forced_levers:over", "scheduler_options": options}


def everything(waiting: list[LocalCall], running: list[LocalCall]) -> Plan:
    """A plan in which the engine chooses."""
    return Plan((), (), (*running, *waiting))


@dataclass
class Scripted:
    """Plans as a test says, and keeps what it was asked with."""

    script: Callable[[list[LocalCall], list[LocalCall], EngineFacts], Plan]
    seen: list[tuple[list[LocalCall], list[LocalCall]]] = field(default_factory=list)

    def plan(
        self, now_s: float, waiting: Sequence[LocalCall], running: Sequence[LocalCall], facts: EngineFacts
    ) -> Plan:
        del now_s
        self.seen.append((list(waiting), list(running)))
        return self.script(list(waiting), list(running), facts)


class Chaos:
    """Plans that no sane policy makes: any order, any chunks, any calls held back or preempted."""

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)

    def plan(
        self, now_s: float, waiting: Sequence[LocalCall], running: Sequence[LocalCall], facts: EngineFacts
    ) -> Plan:
        del now_s
        dice, calls = self._dice, [*running, *waiting]
        dice.shuffle(calls)
        victims = [call for call in running if dice.random() < 0.05]
        named = [call for call in calls if call not in victims and dice.random() < 0.8]
        cut = dice.randrange(len(named) + 1)
        picks = tuple((call, dice.randrange(1, facts.max_batch_tokens)) for call in named[:cut])
        budget = dice.choice((None, None, 1, 40, 10_000))
        return Plan(tuple(victims), picks, tuple(named[cut:]), budget)


class Watching:
    """Lets the engine choose. Keeps what is in flight at each plan: work, and seconds from the first plan on."""

    def __init__(self) -> None:
        self.seen: list[tuple[IterationWork, float] | None] = []
        self._first_s: float | None = None

    def plan(
        self, now_s: float, waiting: Sequence[LocalCall], running: Sequence[LocalCall], facts: EngineFacts
    ) -> Plan:
        if self._first_s is None:
            self._first_s = now_s
        flying = facts.in_flight
        self.seen.append(None if flying is None else (flying.work, flying.began_s - self._first_s))
        return everything(list(waiting), list(running))


def watched(build: Callable[[LocalScheduler], Any], policy: Watching) -> Any:
    """An engine whose iterations take a second."""
    clock, engine = Clock(), build(policy)

    def compute() -> None:
        clock.now_s += 1.0

    engine.follow_clock(clock)
    engine.before_result = compute
    return engine
