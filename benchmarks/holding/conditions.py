"""The conditions that agents' sessions are run under, and what is wanted of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import Final

from benchmarks.holding.closed_loop import Chat, Condition
from benchmarks.placing.workloads import AgentShape

LONG: Final = AgentShape(scale=1, context_tokens=100_000, turns=20, think_s=120.0)
MEDIUM: Final = AgentShape(scale=4, context_tokens=25_000, turns=20, think_s=120.0)
SHORT: Final = AgentShape(scale=4, context_tokens=15_000, turns=20, think_s=120.0)

FULL: Final = 1.9
"""The contexts of the sessions that are there at a time, over the KV of all engines."""

B: Final = Condition(engines=2, kv_tokens=480_000, sessions=64, at_a_time=32, shape=LONG)
A: Final = Condition(engines=4, kv_tokens=178_000, sessions=48, at_a_time=24, shape=LONG)
ONE_BESIDE: Final = replace(A, engines=2, sessions=26, at_a_time=13, other_tenant=26, is_fair=True)
"""One of the sessions is of another tenant, which has no further one."""

DEMANDS: Final = (0.5, 0.95, 1.3, FULL)
"""Times the KV."""

LIGHT_CHAT, MUCH_CHAT = Chat(per_s=0.5), Chat(per_s=3.0)
"""8 % and a third of the tokens of all prompts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Ratios to the same run without holding: mean and p99 of the sessions, and the mean TTFT of chat beside them.

    `mean_over_cap` and `chat_over_cap` are the same over runs with a cap on the sessions that are there. At most such a
    part of the sessions takes more than a tenth longer (`slower`). `other` is the mean of the other tenant's sessions.
    None of its turns waits for more seconds than `other_wait_s`, with holding.
    """

    mean: float = inf
    p99: float = inf
    slower: float = inf
    chat: float = inf
    mean_over_cap: float = inf
    chat_over_cap: float = inf
    other: float = inf
    other_wait_s: float = inf


BESIDE_CHAT: Final = Wanted(chat=0.25, mean_over_cap=1.05, chat_over_cap=1.1)
"""A cap that knows contexts beforehand is no system, but one that learns them may be a twentieth or a tenth behind."""


def full_conditions() -> dict[str, tuple[Condition, Wanted]]:
    """Fleets that are too small, or just large enough."""
    return {
        "B 1.9": (B, Wanted(mean=0.60, p99=0.65, slower=0.05)),
        "B 1.3": (_at(B, 1.3), Wanted(mean=0.72)),
        "B 2.5": (_at(B, 2.5), Wanted(mean=0.62)),
        "B 0.95": (_at(B, 0.95), Wanted(mean=1.015)),
        "B 0.5": (_at(B, 0.5), Wanted(mean=1.002)),
        "A 1.9": (A, Wanted(mean=0.85)),
        "A 0.95": (_at(A, 0.95), Wanted(mean=1.015)),
        "A 0.5": (_at(A, 0.5), Wanted(mean=1.002)),
        "B 1.9, nobody is named": (replace(B, named=False), Wanted(mean=0.60)),
        "A 1.9, chat beside": (replace(A, chat=LIGHT_CHAT), BESIDE_CHAT),
        "A 1.9, much chat beside": (replace(A, chat=MUCH_CHAT), Wanted(mean=1.05, chat=0.5)),
        "A 1.9, two tenants": (replace(A, other_tenant=4, is_fair=True), Wanted(other=0.75)),
        "A 1.9, one agent beside twelve": (ONE_BESIDE, Wanted(other_wait_s=10.0)),
    }


def demand_conditions() -> dict[str, tuple[Condition, Wanted]]:
    """Chat beside agents, by the KV that the agents' contexts would take."""
    known = full_conditions()
    conditions = {chat_beside(share): replace(_at(A, share), chat=LIGHT_CHAT) for share in DEMANDS}
    return {name: known.get(name, (condition, Wanted())) for name, condition in conditions.items()}


def chat_beside(share: float) -> str:
    """The name of the condition with this KV demand."""
    return f"A {share}, chat beside"


def wrong_conditions() -> dict[str, tuple[Condition, Wanted]]:
    """The gate takes the engines' caches for smaller or larger than they are. Wanted: over the right capacity."""
    return {f"B 1.9, told {told}": (replace(B, told=told), Wanted(mean=1.06)) for told in (0.9, 1.1)}


def shared_conditions() -> dict[str, tuple[Condition, Wanted]]:
    """Several gateways have the sessions. Wanted: over one gateway, which holds sessions, too."""
    return {"B 1.9, three gateways": (replace(B, gateways=3), Wanted(mean=1.15))}


def cheap_conditions() -> dict[str, tuple[Condition, Wanted]]:
    """Fleets for which computing contexts again is cheap, and all think times and sizes between."""
    return {name: (condition, Wanted(mean=1.05)) for name, condition in _cheap()}


def _at(condition: Condition, share: float) -> Condition:
    return replace(condition, kv_tokens=round(condition.kv_tokens * FULL / share))


def _cheap() -> Iterator[tuple[str, Condition]]:
    yield (
        "30,000 tokens an engine",
        Condition(engines=2, kv_tokens=30_000, sessions=60, at_a_time=10, shape=SHORT, thinks_s=(4, 12)),
    )
    yield "110,000 tokens an engine", Condition(engines=4, kv_tokens=110_000, sessions=32, at_a_time=8, shape=LONG)
    for profile, shape, context_tokens in (
        ("h100-llama-70b-tp2", LONG, 57_000),
        ("a6000-mistral-7b", MEDIUM, 14_250),
    ):
        for think_s in (5.0, 11.0, 60.0):
            for share in (1.0, 1.5, 2.5):
                condition = Condition(
                    engines=2,
                    kv_tokens=round(16 * context_tokens / (2 * share)),
                    sessions=32,
                    at_a_time=16,
                    shape=shape,
                    profile=profile,
                    thinks_s=(0.5 * think_s, 1.5 * think_s),
                )
                yield f"{profile}, thinks {think_s:g} s, {share}", condition


GROUPS: Final[Mapping[str, dict[str, tuple[Condition, Wanted]]]] = {
    "full": full_conditions(),
    "demand": demand_conditions(),
    "shared": shared_conditions(),
    "wrong": wrong_conditions(),
    "cheap": cheap_conditions(),
}
CHEAP_MEAN: Final = 1.01
"""Geometric mean of the cheap conditions' means."""
