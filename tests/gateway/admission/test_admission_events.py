"""Whatever happens, each call is sent once, given up once, or still waits; and the books agree."""

from __future__ import annotations

from collections import Counter
from math import inf

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from plait.backends.errors import PlaitError
from plait.gateway.admission.backlog import Waiting
from plait.gateway.admission.room import RESERVED_S
from plait.gateway.admission.tenants import TenantLimits
from plait.policy.costs.engine_view import sent_calls
from plait.policy.types import Objective
from tests.gateway.admission.waiting_fleet import WaitingFleet

SESSIONS = {64: "", 700: "s", 3_000: "", 9_000: "t"}
"""The conversations of calls, by their tokens."""


class Machine(RuleBasedStateMachine):
    """Calls of three tenants on three engines, which go away and come back."""

    def __init__(self) -> None:
        super().__init__()
        limits = TenantLimits(max_running=12, max_waiting=8)
        self.fleet = WaitingFleet("x", "y", "z", limits=limits, max_wait_s=30.0)
        self.fleet.router.engines["z"].view.slots = 2
        self.gone = 0

    @rule(
        tenant=st.sampled_from("abc"),
        tokens=st.sampled_from((64, 700, 3_000, 9_000)),
        prefix=st.none() | st.integers(0, 3),
        ttft_s=st.none() | st.just(2.0),
        objective=st.sampled_from((None, *Objective)),
    )
    def enter(
        self, tenant: str, tokens: int, prefix: int | None, ttft_s: float | None, objective: Objective | None
    ) -> None:
        try:
            self.fleet.enter(
                tenant, tokens, prefix=prefix, ttft_s=ttft_s, objective=objective, session=SESSIONS[tokens]
            )
        except PlaitError:
            self.fleet.settle()

    @rule(seconds=st.floats(0, 5))
    def time_passes(self, seconds: float) -> None:
        self.fleet.pass_time(seconds)

    @precondition(lambda self: any(call.is_sent for call in self.fleet.entered))
    @rule(which=st.integers(0, 9), ends=st.booleans(), output_tokens=st.integers(1, 40))
    def answer(self, which: int, ends: bool, output_tokens: int) -> None:
        running = [call for call in self.fleet.entered if call.is_sent]
        call = running[which % len(running)]
        assert call.booking is not None
        if call.booking.first_token_s is None:
            self.fleet.first_byte(call)
        if ends:
            self.fleet.end(call, output_tokens)

    @precondition(lambda self: self.fleet.entered)
    @rule(which=st.integers(0, 9))
    def client_goes(self, which: int) -> None:
        self.fleet.go(self.fleet.entered[which % len(self.fleet.entered)])
        self.gone += 1

    @rule(name=st.sampled_from("xyz"), comes=st.booleans())
    def engine_goes_or_comes(self, name: str, comes: bool) -> None:
        if comes:
            self.fleet.router.health.answered(name, {"m": None})
        else:
            self.fleet.router.health.unreachable(name)
        self.fleet.settle()

    @rule(name=st.sampled_from("xyz"), draining=st.booleans())
    def drain(self, name: str, draining: bool) -> None:
        self.fleet.router.health.drain(name, draining=draining)
        self.fleet.settle()

    @invariant()
    def nobody_waits_beside_an_idle_engine(self) -> None:
        fleet = self.fleet
        taking = [engine for engine in fleet.router.engines.values() if engine.takes_calls]
        for call in fleet.entered:
            if call.booking is not None and not call.is_sent and call.error is None:
                engine = fleet.router.engines[call.booking.placement.engine_id]
                assert engine in taking or not taking
                if not engine.view.queue.sent and sent_calls(engine.view) < engine.view.slots:  # kept for others
                    due_s = fleet.admission.queue.lines.room.due_s(engine.view, call.tenant, fleet.now_s)
                    assert fleet.now_s < due_s <= fleet.now_s + RESERVED_S
                else:
                    assert engine.view.queue.sent or sent_calls(engine.view) == engine.view.slots > 0

    @invariant()
    def the_room_counts_what_was_sent(self) -> None:
        sent = Counter[tuple[str, str]]()
        for call in self.fleet.entered:
            if call.is_sent:
                sent[self.fleet.engine_of(call) or "", call.tenant] += 1
        assert dict(self.fleet.admission.queue.lines.room.sent) == dict(sent)

    @invariant()
    def each_wait_follows_the_one_before(self) -> None:
        """So a call's waits take as long as it waits."""
        for call in self.fleet.entered:
            assert call.is_sent or call.waits
            times = [wait.since_s for wait in call.waits or ()]
            assert times[:1] == ([call.call.arrived_s] if times else [])
            assert times == sorted(set(times))
            waited_s = call.waited_until_s(self.fleet.now_s) - call.call.arrived_s if times else 0.0
            found = call.waited_for(self.fleet.now_s) or {}
            assert sum(found.values()) == pytest.approx(waited_s, abs=0.01)

    @invariant()
    def slots_are_kept(self) -> None:
        assert sent_calls(self.fleet.router.engines["z"].view) <= 2

    def teardown(self) -> None:
        while self.fleet.entered:
            self.fleet.go(self.fleet.entered[0])
        assert not any(engine.view.outstanding for engine in self.fleet.router.engines.values())


class Programs(Machine):
    """Calls of programs, too, which wait for their tenants' rates; these change."""

    def __init__(self) -> None:
        super().__init__()
        self.fleet.limits = TenantLimits(calls_per_s=0.5, max_running=12, max_waiting=8)

    @rule(tenant=st.sampled_from("abc"), tokens=st.sampled_from((64, 700, 3_000)), calls=st.integers(1, 8))
    def begin(self, tenant: str, tokens: int, calls: int) -> None:
        for _ in range(calls):
            try:
                self.fleet.enter(tenant, tokens, passes=True)
            except PlaitError:
                self.fleet.settle()

    @rule(per_s=st.sampled_from((0.2, 0.5, 5.0, inf)))
    def change_limits(self, per_s: float) -> None:
        self.fleet.limits = TenantLimits(calls_per_s=per_s, max_running=12, max_waiting=8)
        self.fleet.admission.limits_changed(self.fleet.now_s)
        self.fleet.settle()

    @invariant()
    def nobody_waits_longer_than_the_rates_ask(self) -> None:
        """What waits passes in its time at the rate. The turn of one that is gone is for later ones."""
        paced, rate = [call for call in self.fleet.entered if is_paced(call)], self.fleet.limits.calls_per_s
        for call in paced:
            _, left_s = self.fleet.admission.outlook(call, self.fleet.now_s)
            assert left_s <= (len(self.fleet.entered) + self.gone) / rate + 1e-6


def is_paced(call: Waiting) -> bool:
    return not call.is_sent and call.error is None and call.waits is not None and call.waits[-1].why == "rate"


TestMachine = Machine.TestCase
TestPrograms = Programs.TestCase
