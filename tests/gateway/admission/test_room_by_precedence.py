"""When an engine is sent one more call, by what it serves before the call.

A pass takes 10 ms and 1 ms for each new token.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from plait.gateway.admission.room import OWN_S, Room
from plait.policy.admission.fair_shares import FairShares
from plait.policy.costs.engine_view import EngineView
from plait.policy.costs.prefill_queue import Precedence, Prefill
from tests.gateway.admission.test_room import AHEAD_S, new_engine, prefill, room_of, send
from tests.invariants import check


def of(precedence: Precedence, tokens: int = 490, tenant: str = "a", *, due_s: float = 60.0) -> Prefill:
    """A prompt of half a second."""
    is_on_time, is_small = precedence is Precedence.ON_TIME, precedence is Precedence.SMALL
    due_s = due_s if is_on_time else inf
    return replace(prefill(tokens), is_on_time=is_on_time, due_s=due_s, is_small=is_small, tenant=tenant)


def precedences(room: Room, engine: EngineView, tenant: str = "a", *, due_s: float = 60.0) -> list[Precedence]:
    """Those of the prompts of a tenant that there is room for; those on time are due at `due_s`."""

    def waits(precedence: Precedence) -> bool:
        due = due_s if precedence is Precedence.ON_TIME else -inf
        return room.waits_for(engine, tenant, 0.0, precedence, due_s=due) is not None

    return [precedence for precedence in Precedence if not waits(precedence)]


@pytest.mark.parametrize("precedence", [Precedence.ON_TIME, Precedence.SMALL])
@pytest.mark.parametrize("tenants", ["a", "ab"])
def test_what_is_served_first_waits_for_its_like_only(tenants: str, precedence: Precedence) -> None:
    several, rest = room_of(tenants), [of(Precedence.REST, 5_000) for _ in range(2)]
    others = {Precedence.ON_TIME, Precedence.SMALL} - {precedence}
    engine = new_engine(*rest)
    assert precedences(several, engine) == [Precedence.ON_TIME, Precedence.SMALL]
    send(engine, *(of(precedence) for _ in range(9)))
    assert precedences(several, engine) == list(others)
    check(engine.queue)


@pytest.mark.parametrize("tenants", ["a", "ab"])
def test_a_prompt_on_time_does_not_wait_for_those_that_are_due_later(tenants: str) -> None:
    room, tenant = room_of(tenants), tenants[-1]
    engine = new_engine(*(of(Precedence.ON_TIME, 3_000) for _ in range(2)))
    assert Precedence.ON_TIME not in precedences(room, engine, tenant)
    assert Precedence.ON_TIME in precedences(room, engine, tenant, due_s=59.0)


def test_beside_others_a_tenant_has_so_much_on_time_in_an_engine() -> None:
    engine = new_engine(of(Precedence.ON_TIME), of(Precedence.ON_TIME, 480, due_s=30.0))

    def waits_for(tenants: str, due_s: float = 60.0) -> str | None:
        return room_of(tenants, 4.0).waits_for(engine, tenants[0], 0.0, due_s=due_s)

    assert engine.drain_s(970) < OWN_S
    assert waits_for("ab") is None, "its turn has come, and nothing is left of the rest"
    send(engine, of(Precedence.ON_TIME, 100))
    assert [waits_for("ab"), waits_for("ab", 59.0), waits_for("ab", -inf)] == ["prompts", None, None]
    assert [waits_for("ba"), waits_for("a")] == [None, None]
    assert room_of("ab", 4.0).due_s(engine, "a", 0.0, due_s=60.0) == pytest.approx(30.0 - 0.49), (
        "when the first is late"
    )
    send(engine, of(Precedence.ON_TIME, 3_000))
    assert waits_for("ab", 1.0) == "prompts", "in all it has four seconds"


def test_a_prompt_on_time_does_not_wait_for_those_that_other_gateways_order() -> None:
    others = replace(of(Precedence.ON_TIME, 3_000), due_s=inf, tenant="", is_own=False)
    engine = new_engine(others)
    assert engine.queue.on_time_before(1.0) == 0
    assert Precedence.ON_TIME in precedences(room_of("ab"), engine, due_s=1.0)


def test_each_gateway_sends_its_part_of_a_tenants_prompts_on_time() -> None:
    engine, room = new_engine(of(Precedence.ON_TIME, 490)), room_of("ab", 4.0)
    assert room.waits_for(engine, "a", 0.0, due_s=60.0) is None
    engine.gateways = 3
    assert room.waits_for(engine, "a", 0.0, due_s=60.0) == "prompts"
    assert room.waits_for(engine, "b", 0.0, due_s=60.0) is None


def test_beside_others_the_rest_waits_for_the_rest_only() -> None:
    engine = new_engine(of(Precedence.ON_TIME), of(Precedence.SMALL))
    assert precedences(room_of("ab"), engine) == [Precedence.REST]
    send(engine, of(Precedence.REST))
    assert precedences(room_of("ab"), engine) == []


def greedy_room(tenants: str) -> Room:
    """The first of these tenants has more than its share, and calls that wait."""
    shares = FairShares()
    made = Room(AHEAD_S, shares)
    for tenant in tenants:
        made.active.came(tenant, 0.0)
    made.active.sent(tenants[0], 100, 0.0)
    shares.waits(tenants[0])
    return made


def test_of_a_tenant_over_its_share_nothing_passes_what_others_have_there() -> None:
    greedy, long = greedy_room("ab"), of(Precedence.REST, 5_000)
    engine = new_engine(long)
    assert precedences(greedy, engine) == [Precedence.ON_TIME], "it passes its own"
    assert precedences(greedy, engine, "b") == [Precedence.ON_TIME, Precedence.SMALL]
    send(engine, of(Precedence.SMALL, 1, "b"))
    assert precedences(greedy, engine) == []


def test_of_a_tenant_over_its_share_prompts_on_time_pass_only_the_one_that_is_computed() -> None:
    """Otherwise another tenant's next prompt would wait for both its late prompts and those on time."""
    greedy, engine = greedy_room("ab"), new_engine(of(Precedence.REST, 5_000), of(Precedence.REST, 5_000))
    assert greedy.waits_for(engine, "a", 0.0, Precedence.ON_TIME, due_s=60.0) == "tenant_share"
    assert greedy.waits_for(engine, "b", 0.0, Precedence.ON_TIME, due_s=60.0) is None


def test_for_a_tenant_over_its_share_everything_counts() -> None:
    engine = new_engine(of(Precedence.ON_TIME), of(Precedence.SMALL))
    assert precedences(greedy_room("ab"), engine) == []
    assert precedences(greedy_room("a"), engine) == list(Precedence), "it is alone"


def test_a_tenant_waits_for_its_share_if_others_would_be_sent_the_same_prompt() -> None:
    engine, greedy = new_engine(of(Precedence.ON_TIME), of(Precedence.SMALL)), greedy_room("ab")
    assert greedy.waits_for(engine, "a", 0.0) == "tenant_share"
    assert greedy.waits_for(engine, "b", 0.0) is None
    assert greedy.waits_for(engine, "a", 0.0, Precedence.SMALL) == "tenant_share"
    assert greedy.waits_for(engine, "b", 0.0, Precedence.SMALL) == "prompts"
    send(engine, *[of(Precedence.REST)] * 3)
    assert [greedy.waits_for(engine, tenant, 0.0) for tenant in "ab"] == ["prompts"] * 2


def test_what_is_late_makes_room_for_what_is_on_time() -> None:
    several, late = room_of("ab"), of(Precedence.ON_TIME, due_s=2.0)
    engine = new_engine(of(Precedence.REST, 5_000), late)
    assert several.waits_for(engine, "a", 0.0, Precedence.ON_TIME, due_s=3.0) == "prompts"
    assert several.due_s(engine, "a", 0.0) == 1.5
    assert several.waits_for(engine, "a", 1.5, Precedence.ON_TIME, due_s=3.0) is None
