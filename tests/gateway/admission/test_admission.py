"""What waits before placement: by tenant, bounded, and never lost."""

from __future__ import annotations

from collections import Counter
from math import inf

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from plait.backends.errors import LimitError
from plait.gateway.admission.admission import Admission, Turns
from plait.gateway.admission.drain_rate import DrainRate
from plait.gateway.admission.tenant_limits import UNLIMITED, TenantLimits, TenantUse
from plait.policy.admission.fair_queue import Ticket


class Fleet:
    """Room for so many calls."""

    def __init__(self, room: int = 0) -> None:
        self.room = room

    def has_room(self, _model: str, _now_s: float) -> bool:
        return self.room > 0


def ticket(tenant: str = "a", tokens: int = 100, *, work_s: float = 1.0, throughput: bool = False) -> Ticket:
    return Ticket(tenant, "m", tokens, work_s, "", throughput)


def admission(fleet: Fleet, *, max_wait_s: float = 1e9, limits: TenantLimits = UNLIMITED) -> Admission:
    return Admission(fleet.has_room, max_wait_s, lambda _: limits)


def enter(made: Admission, one: Ticket, now_s: float) -> Turns:
    """A call arrives."""
    return Turns((one,)) if made.admits(one, now_s) else made.wait(one, now_s)


def test_while_there_is_room_nothing_waits() -> None:
    made = admission(Fleet(1))
    one = ticket()
    assert enter(made, one, 0.0).admitted == (one,)
    assert (made.waiting("m"), made.use("a").running) == (0, 1)
    made.left(one, None)
    made.check([])


def test_what_waits_goes_when_there_is_room_and_is_placed_one_by_one() -> None:
    fleet = Fleet()
    made, tickets = admission(fleet), [ticket() for _ in range(3)]
    assert [enter(made, one, 0.0).admitted for one in tickets] == [()] * 3
    fleet.room = 2
    assert made.poll("m", 1.0).admitted == (tickets[0],)
    assert made.poll("m", 1.0).admitted == (), "the first one takes its room first"
    fleet.room = 1
    assert made.placed(tickets[0], 1.0).admitted == (tickets[1],)
    fleet.room = 0
    assert made.placed(tickets[1], 1.0).admitted == ()
    made.check(tickets[:2])


def test_who_comes_later_does_not_overtake_the_queue() -> None:
    fleet = Fleet()
    made, first, second = admission(fleet), ticket(), ticket()
    enter(made, first, 0.0)
    fleet.room = 1
    assert enter(made, second, 0.0).admitted == (first,)
    assert made.waiting("m") == 1


def test_one_tenant_cannot_take_the_others_share() -> None:
    fleet, served = Fleet(), Counter[str]()
    made = admission(fleet)
    for name, calls in (("greedy", 400), ("b", 20), ("c", 20)):
        for _ in range(calls):
            enter(made, ticket(name), 0.0)
    fleet.room = 1
    turns = made.poll("m", 0.0)
    for number in range(60):
        (one,) = turns.admitted
        served[one.tenant] += 1
        made.left(one, 100)
        turns = made.poll("m", float(number))
    assert served == {"greedy": 20, "b": 20, "c": 20}


def test_beyond_the_bound_calls_are_refused_with_the_time_to_come_back() -> None:
    made = admission(Fleet(), max_wait_s=2.5)
    enter(made, ticket(), 0.0)
    enter(made, ticket(), 0.0)
    third = ticket()
    ((refused, error),) = enter(made, third, 0.0).shed
    assert refused is third
    assert error.message.startswith("2 calls of this tenant wait for this model, about 2 s")
    assert (error.status, error.retry_after_s, made.waiting("m")) == (429, 2.0, 2)
    assert enter(admission(Fleet(), max_wait_s=0.5), ticket(), 0.0).shed == (), "one call may always wait"


def test_calls_for_throughput_are_shed_first() -> None:
    made = admission(Fleet(), max_wait_s=2.5)
    batch = [ticket("b", throughput=True) for _ in range(2)]
    for one in batch:
        enter(made, one, 0.0)
    assert [one for one, _ in enter(made, ticket("a"), 2.0).shed] == [batch[1]]
    late = ticket("b", throughput=True)
    assert [one for one, _ in enter(made, late, 3.0).shed] == [late]


def test_a_tenant_within_its_share_loses_nothing_to_anothers_queue() -> None:
    made = admission(Fleet(), max_wait_s=10.0)
    for _ in range(30):
        enter(made, ticket("greedy"), 0.0)
    assert made.waiting("m") == 10
    for number in range(4):
        ((refused, _),) = enter(made, ticket("b"), float(number)).shed
        assert refused.tenant == "greedy"


def test_a_tenant_that_others_overtake_may_have_less_waiting() -> None:
    """All together leave within the bound, but the greedy tenant gets only a part of the rate."""
    fleet = Fleet()
    made = admission(fleet, max_wait_s=10.0)
    for _ in range(10):
        enter(made, ticket("greedy"), 0.0)
    fleet.room = 1
    now_s = 0.0
    for number in range(40):
        now_s += 0.5  # two calls a second leave, one of them a light tenant's
        enter(made, ticket("light"), now_s)
        for one in made.poll("m", now_s).admitted:
            made.left(one, None)
        if number % 2:
            enter(made, ticket("greedy"), now_s)
    assert made.waiting("m") <= 12


def test_a_tenant_at_its_limit_waits_while_others_go() -> None:
    fleet = Fleet(9)
    made = admission(fleet, limits=TenantLimits(max_running=1, max_waiting=1))
    first, second, other = ticket(), ticket(), ticket("b")
    assert enter(made, first, 0.0).admitted == (first,)
    assert enter(made, second, 0.0).admitted == ()
    with pytest.raises(LimitError, match="1 calls of this tenant wait already"):
        enter(made, ticket(), 0.0)
    assert enter(made, other, 0.0).admitted == (other,)
    assert made.placed(other, 0.0).admitted == ()
    made.left(first, None)
    assert made.poll("m", 1.0).admitted == (second,)


def test_a_call_whose_client_goes_leaves_the_queue() -> None:
    fleet = Fleet()
    made, one, two = admission(fleet), ticket(), ticket()
    enter(made, one, 0.0)
    enter(made, two, 0.0)
    made.give_up(one)
    fleet.room = 1
    assert made.poll("m", 1.0).admitted == (two,)
    made.left(two, None)  # before it was placed
    made.check([])
    assert made.poll("m", 1.0).admitted == ()


# Rates.


def test_a_rate_allows_a_burst_and_then_its_share() -> None:
    limits, use = TenantLimits(calls_per_s=2.0), TenantUse()
    for _ in range(20):
        use.check_rate(limits, 1, 0.0)
        use.enter(1)
    with pytest.raises(LimitError, match="2 calls a second") as caught:
        use.check_rate(limits, 1, 0.0)
    assert caught.value.retry_after_s == 1.0
    use.check_rate(limits, 1, 0.5)
    use.enter(1)
    with pytest.raises(LimitError):
        use.check_rate(limits, 1, 0.5)


def test_a_call_above_a_whole_burst_may_go_alone() -> None:
    limits, use = TenantLimits(tokens_per_s=10.0), TenantUse()
    use.check_rate(limits, 5_000, 0.0)
    use.enter(5_000)
    with pytest.raises(LimitError, match="10 tokens a second") as caught:
        use.check_rate(limits, 1, 1.0)
    assert caught.value.retry_after_s == pytest.approx(489.1)
    use.check_rate(limits, 1, 500.0)


def test_a_drain_rate_corrects_predicted_work() -> None:
    rate = DrainRate()
    assert rate.seconds(30.0) == 30.0
    for number in range(100):
        rate.left(3.0, number * 0.1)  # thirty seconds of work a second
    assert rate.seconds(30.0) == pytest.approx(1.0, rel=0.1)
    rate.pause()
    rate.left(3.0, 1_000.0)
    assert rate.seconds(30.0) == pytest.approx(1.0, rel=0.1)


class Machine(RuleBasedStateMachine):
    """Every call that entered is admitted once, shed once, given up, or still waits."""

    def __init__(self) -> None:
        super().__init__()
        self.fleet, self.now_s = Fleet(1), 0.0
        limits = TenantLimits(max_running=2, max_waiting=6, calls_per_s=inf)
        self.made = admission(self.fleet, max_wait_s=8.0, limits=limits)
        self.waiting, self.placing, self.running = list[Ticket](), list[Ticket](), list[Ticket]()

    def apply(self, admitted: tuple[Ticket, ...]) -> None:
        for one in admitted:
            self.waiting.remove(one)
            self.placing.append(one)

    @rule(tenant=st.sampled_from("abc"), throughput=st.booleans(), work_s=st.floats(0.1, 4))
    def enter(self, tenant: str, throughput: bool, work_s: float) -> None:
        one = ticket(tenant, throughput=throughput, work_s=work_s)
        try:
            turns = enter(self.made, one, self.now_s)
        except LimitError:
            return
        self.waiting.append(one)
        for victim, _ in turns.shed:
            self.waiting.remove(victim)
        self.apply(turns.admitted)

    @rule(room=st.integers(0, 2), pause_s=st.floats(0, 2))
    def poll(self, room: int, pause_s: float) -> None:
        self.fleet.room, self.now_s = room, self.now_s + pause_s
        self.apply(self.made.poll("m", self.now_s).admitted)

    @precondition(lambda self: self.placing)
    @rule()
    def placed(self) -> None:
        one = self.placing.pop(0)
        self.running.append(one)
        self.apply(self.made.placed(one, self.now_s).admitted)

    @precondition(lambda self: self.running or self.placing)
    @rule(tokens=st.none() | st.integers(0, 500))
    def leave(self, tokens: int | None) -> None:
        one = (self.running or self.placing).pop(0)
        self.made.left(one, tokens)

    @precondition(lambda self: self.waiting)
    @rule(which=st.integers(0, 9))
    def give_up(self, which: int) -> None:
        self.made.give_up(self.waiting.pop(which % len(self.waiting)))

    @invariant()
    def nothing_is_lost(self) -> None:
        self.made.check([*self.placing, *self.running])
        assert self.made.waiting("m") == len(self.waiting)


TestMachine = Machine.TestCase
