"""Tenants below their shares of the caches wait for none that is above its own."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from plait.policy.sessions.known import Session
from plait.policy.sessions.session_gate import Turn
from tests.policy.sessions.gates import Gate


def thinking(gate: Gate, *names: str, tenant: str, now_s: float = 0.0) -> list[Turn]:
    """Sessions with 60 tokens each, which have had an answer."""
    turns = [gate.come(6 * name, name, now_s + place / 10, tenant=tenant) for place, name in enumerate(names)]
    for turn in turns:
        gate.end(turn, now_s + 0.9)
    return turns


def test_a_light_tenants_only_session_takes_the_room_of_the_youngest_that_thinks() -> None:
    gate = Gate(180)
    thinking(gate, "a", "b", "c", tenant="heavy")
    light = gate.come("llllll", "l", 0.91, tenant="light")
    assert gate.free(0.91) == [light]
    assert (gate.paused, gate.expired) == (1, 0)
    assert not gate.come("aaaaaa", "a", 0.92, tenant="heavy").is_held
    assert gate.come("cccccc", "c", 0.92, tenant="heavy").is_held
    assert gate.free(0.92) == []


def test_a_light_tenants_only_session_passes_while_no_other_one_thinks() -> None:
    gate = Gate(180)
    running = [gate.come(6 * name, name, place, tenant="heavy") for place, name in enumerate("abc")]
    light = gate.come("llllll", "l", 3.0, tenant="light")
    assert gate.free(3.0) == [light]
    gate.end(light, 4.0)
    assert not gate.come("lllllll", "l", 5.0, tenant="light").is_held, "the others are above their share"
    gate.end(running[0], 6.0)
    assert gate.come("aaaaaa", "a", 6.1, tenant="heavy").is_held, "it is the only one that can be paused"
    assert gate.paused == 1


def test_two_sessions_that_do_not_fit_together_do_not_pause_each_other() -> None:
    gate = Gate(100)
    thinking(gate, "a", tenant="one")
    other = gate.come("bbbbbb", "b", 0.91, tenant="other")
    assert gate.free(0.91) == []
    assert gate.free(100.0) == [other], "the first one has been idle for long"
    gate.end(other, 100.0)
    again = gate.come("aaaaaa", "a", 100.01, tenant="one")
    assert gate.free(100.01) == []
    assert again.is_held


def test_a_tenant_of_more_weight_may_have_more_before_others_are_owed_room() -> None:
    gate = Gate(240, weights={"heavy": 3.0})
    thinking(gate, "a", "b", "c", tenant="heavy")
    gate.end(gate.come("llllll", "l", 0.91, tenant="light"), 0.92)
    assert gate.come("mmmmmm", "m", 0.93, tenant="light").is_held
    gate.come("aaaaaaaaa", "a", 0.94, tenant="heavy")
    assert gate.free(0.94) == [], "the heavy one has 210 of its 180 tokens, but the light one would have 120 of its 60"


TENANTS = {name: "uvw"[place % 3] for place, name in enumerate("abcdefghi")}
WEIGHTS = {"u": 1.0, "v": 1.0, "w": 2.5}
KV_TOKENS = 300


class Tenants(RuleBasedStateMachine):
    """Sessions of three tenants, before a closed gate. The oracle adds up what each tenant has."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate(KV_TOKENS, weights=WEIGHTS)
        self.now_s = 0.0
        self.texts: dict[str, str] = {}
        live: Any = self.gate.live
        self._drop = live.drop
        live.drop = self.drops

    def levels(self) -> dict[str, float]:
        """The live tokens of each tenant for its weight."""
        tokens = Counter[str]()
        for session in self.gate.live:
            tokens[session.tenant] += sum(context.tokens for context in session.contexts)
        return {tenant: tokens[tenant] / weight for tenant, weight in WEIGHTS.items()}

    def fair_level(self) -> float:
        tenants = {session.tenant for session in self.gate.live} | {turn.asked.tenant for turn in self.gate.held}
        return KV_TOKENS / sum(WEIGHTS[tenant] for tenant in tenants)

    def drops(self, session: Session) -> None:
        """Whoever is within its share loses a session only if that is worth nothing, or nobody is above its own."""
        caches, levels, fair = self.gate.worth.caches, self.levels(), self.fair_level()
        assert caches is not None
        is_idle_for_long = self.now_s - session.ended_s > caches.worth_s(session.tokens)
        assert not session.calls
        assert levels[session.tenant] > fair or is_idle_for_long or max(levels.values()) <= fair
        self._drop(session)

    @rule(name=st.sampled_from([*TENANTS]), more=st.integers(0, 4))
    def comes(self, name: str, more: int) -> None:
        text = self.texts[name] = self.texts.get(name, 4 * name) + more * name
        self.gate.come(text, name, self.now_s, tenant=TENANTS[name])
        self.gate.free(self.now_s)

    @precondition(lambda self: self.gate.turns)
    @rule(number=st.integers(0, 30))
    def ends(self, number: int) -> None:
        turn = self.gate.turns[number % len(self.gate.turns)]
        if turn.is_held:
            self.gate.turns.remove(turn)
            self.gate.gone(turn, self.now_s)
            self.gate.free(self.now_s)
        else:
            self.gate.end(turn, self.now_s)

    @rule(seconds=st.sampled_from((0.01, 0.1, 1.0, 100.0)))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        self.gate.free(self.now_s)

    @invariant()
    def nobody_below_its_share_is_held_while_others_are_above_theirs(self) -> None:
        levels, held = self.levels(), list(self.gate.held)
        for tenant in {turn.asked.tenant for turn in held}:
            first = min((turn for turn in held if turn.asked.tenant == tenant), key=lambda one: one.session.born_s)
            fair, level = self.fair_level(), levels[tenant] + first.session.tokens / WEIGHTS[tenant]
            if not levels[tenant] or level <= fair:
                assert all(other <= max(level, fair) for other in levels.values())


TestTenants = Tenants.TestCase
