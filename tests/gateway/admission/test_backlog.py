"""What waits for one model: how long it takes, and which call is given up if that is too long."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.gateway.admission.backlog import Backlog, Waiting
from plait.policy.admission.conversations import Conversations
from plait.policy.admission.fair_shares import FairShares
from plait.policy.order import Rank
from plait.policy.types import Call
from tests.invariants import check

CALL = Call("c", "m", 100, 64, [])


def waiting(tenant: str = "a", work_s: float = 1.0, rank: Rank = Rank.PLAIN, session: str = "") -> Waiting:
    return Waiting(tenant, 100, CALL, rank=rank, work_s=work_s, session=session)


def batch(tenant: str = "b", work_s: float = 1.0) -> Waiting:
    return waiting(tenant, work_s, Rank.THROUGHPUT)


def new_backlog(*calls: Waiting, weights: Mapping[str, float] | None = None, engines: int = 1) -> Backlog:
    backlog = Backlog(FairShares(weights), Conversations(), engines)
    for call in calls:
        backlog.add(call)
        check(backlog)
    return backlog


def given_up(backlog: Backlog, tenant: str, most_s: float) -> list[Waiting]:
    """The calls that are given up as a call of the tenant has come."""
    found = []
    while (call := backlog.excess(tenant, most_s)) is not None:
        backlog.remove(call)
        check(backlog)
        found.append(call)
    return found


# How long it takes.


def test_nothing_waits_at_first() -> None:
    backlog = new_backlog()
    assert (backlog.length, backlog.work_s, backlog.wait_s, backlog.waiting("a")) == (0, 0.0, 0.0, 0)
    assert backlog.excess("a", 0.0) is None


@pytest.mark.parametrize(("engines", "wait_s"), [(1, 8.0), (4, 2.0), (0, 8.0)])
def test_before_calls_have_left_each_engine_does_a_second_of_work_in_a_second(engines: int, wait_s: float) -> None:
    backlog = new_backlog(*(waiting(work_s=2.0) for _ in range(4)), engines=engines)
    assert (backlog.wait_s, backlog.tenant_wait_s("a")) == (wait_s, wait_s)


def test_before_the_rate_of_a_tenant_is_known_it_has_its_share_of_the_whole() -> None:
    backlog = new_backlog(waiting("a", 6.0), waiting("b", 2.0), weights={"a": 3.0}, engines=2)
    assert backlog.wait_s == 4.0
    assert (backlog.tenant_wait_s("a"), backlog.tenant_wait_s("b")) == (4.0, 4.0)
    gone = waiting("c", 1.0)
    backlog.add(gone)
    assert (backlog.tenant_wait_s("a"), backlog.tenant_wait_s("c")) == (5.0, 2.5)
    backlog.remove(gone)
    assert (backlog.tenant_wait_s("a"), backlog.tenant_wait_s("c")) == (4.0, 0.0)


def test_the_wait_follows_what_is_sent() -> None:
    calls = [waiting(work_s=2.0) for _ in range(21)]
    backlog = new_backlog(*calls)
    for number, call in enumerate(calls[:11]):
        backlog.sent(call, number * 0.5)
    assert (backlog.length, backlog.wait_s) == (10, 5.0), "four seconds of work a second"
    check(backlog)


@pytest.mark.parametrize("others", [(), (waiting("other"),)], ids=["alone", "beside another tenant"])
def test_the_time_in_which_nothing_waits_is_no_slow_rate(others: tuple[Waiting, ...]) -> None:
    backlog = new_backlog(*others)
    for begin_s in (0.0, 1_000.0):
        calls = [waiting(work_s=2.0) for _ in range(11)]
        for call in calls:
            backlog.add(call)
        for number, call in enumerate(calls):
            backlog.sent(call, begin_s + number * 0.5)  # four seconds of work a second
    backlog.add(waiting(work_s=8.0))
    assert backlog.tenant_wait_s("a") == 2.0
    assert others or backlog.wait_s == 2.0


# What a waiting call can expect.


def test_a_call_knows_its_place_among_those_of_its_tenant() -> None:
    calls = [waiting("a", 1.0), waiting("a", 2.0), waiting("a", 3.0)]
    backlog = new_backlog(calls[0], waiting("b", 6.0), *calls[1:])
    assert [backlog.outlook(call)[0] for call in calls] == [1, 2, 3]
    assert [backlog.outlook(call)[1] for call in calls] == [2.0, 6.0, 12.0], "with half of the engine"
    backlog.remove(calls[0])
    assert [backlog.outlook(call) for call in calls[1:]] == [(1, 4.0), (2, 10.0)]
    backlog.remove(calls[2])
    assert backlog.outlook(calls[1]) == (1, 4.0), "one that leaves behind it changes nothing"


# Who is given up.


def test_calls_for_throughput_are_given_up_first_and_the_latest_of_the_heaviest_tenant() -> None:
    calls = [waiting("a", 9.0), waiting("a", 9.0), batch(), batch(), batch(), waiting("c"), waiting("c")]
    assert given_up(new_backlog(*calls), "c", 18.0) == [calls[4], calls[3], calls[1]]


def test_it_is_the_heaviest_tenants_call_and_not_the_latest_to_come() -> None:
    calls = [waiting("a", 9.0), waiting("a", 9.0), waiting("b"), waiting("b")]
    assert given_up(new_backlog(*calls), "b", 11.0) == [calls[1]]


def test_of_a_tenant_the_conversation_with_most_waiting_calls_gives_up_its_latest() -> None:
    calls = [waiting(session=session) for session in ("busy", "quiet", "busy", "busy", "quiet")]
    assert given_up(new_backlog(*calls), "a", 3.0) == [calls[3], calls[4]]


def test_weights_count_for_who_is_heaviest() -> None:
    calls = [*(waiting("a", 1.0) for _ in range(4)), *(waiting("b", 0.4) for _ in range(2))]
    assert given_up(new_backlog(*calls, weights={"a": 10.0}), "a", 4.5) == [calls[5]]


def test_a_tenant_gives_up_its_calls_for_throughput_before_others() -> None:
    calls = [batch("a"), waiting("a"), batch("a"), waiting("a")]
    assert given_up(new_backlog(*calls), "a", 2.0) == [calls[2], calls[0]]


def test_one_call_of_each_tenant_may_always_wait() -> None:
    calls = [waiting("a", 5.0), batch("b", 5.0), waiting("c", 5.0)]
    assert given_up(new_backlog(*calls), "a", 0.5) == []
    more = [*calls, waiting("a"), batch("b"), waiting("c")]
    assert {call.tenant for call in given_up(new_backlog(*more), "a", 0.5)} == {"a", "b", "c"}


def test_a_tenants_only_call_waits_however_heavy_it_is() -> None:
    only, others = waiting("a", 9.0), [waiting("b") for _ in range(3)]
    assert given_up(new_backlog(only, *others), "a", 0.5) == others[:0:-1]
    only = batch("a")
    assert given_up(new_backlog(only, *others), "a", 0.5) == others[:0:-1]


def test_a_tenant_within_its_share_loses_nothing_to_anothers_queue() -> None:
    backlog = new_backlog(*(waiting("greedy") for _ in range(30)))
    assert len(given_up(backlog, "greedy", 10.0)) == 20
    for _ in range(4):
        backlog.add(waiting("b"))
        assert [call.tenant for call in given_up(backlog, "b", 10.0)] == ["greedy"]


def test_a_tenant_that_others_overtake_may_have_less_waiting() -> None:
    """All together leave within the bound, but the greedy tenant gets only a part of the rate."""
    greedy = [waiting("greedy") for _ in range(10)]
    backlog, now_s = new_backlog(*greedy), 0.0
    for _ in range(20):  # two calls a second leave, one of them a light tenant's
        now_s += 1.0
        light = waiting("light")
        backlog.add(light)
        backlog.sent(light, now_s - 0.5)
        backlog.sent(greedy.pop(0), now_s)
        for _ in range(2):
            greedy.append(waiting("greedy"))
            backlog.add(greedy[-1])
        for call in given_up(backlog, "greedy", 10.0):
            greedy.remove(call)
    assert backlog.length == 10
    assert backlog.wait_s == pytest.approx(5.0, rel=0.2)


# At random.


@dataclass
class Oracle:
    """All calls that wait, in the order in which they came."""

    weights: dict[str, float]
    calls: list[Waiting] = field(default_factory=list)

    def of(self, tenant: str) -> list[Waiting]:
        return [call for call in self.calls if call.tenant == tenant]

    def latest(self, tenant: str) -> Waiting:
        calls = self.of(tenant)
        return ([call for call in calls if call.rank is Rank.THROUGHPUT] or calls)[-1]

    def heaviest(self) -> list[Waiting]:
        """The calls of which one is given up if all wait too long."""
        several = [tenant for tenant in self.weights if len(self.of(tenant)) > 1]
        several = [name for name in several if self.latest(name).rank is Rank.THROUGHPUT] or several
        loads = {name: sum(call.work_s for call in self.of(name)) / self.weights[name] for name in several}
        return [self.latest(name) for name in several if loads[name] > max(loads.values()) - 1e-9]


WEIGHTS = st.fixed_dictionaries({name: st.sampled_from((0.25, 1.0, 7.5)) for name in "abc"})
EVENTS = st.tuples(
    st.sampled_from(("add", "add", "add", "remove", "sent", "excess")),
    st.sampled_from("abc"),
    st.sampled_from((0.1, 1.0, 1.0, 30.0)),
    st.sampled_from(Rank),
    st.integers(0, 99),
)


@given(WEIGHTS, st.lists(EVENTS, max_size=60), st.integers(0, 3), st.sampled_from((0.5, 5.0, 20.0)))
def test_the_sums_are_those_of_what_waits_and_the_call_given_up_is_the_latest_of_who_has_most(
    weights: dict[str, float], events: list[tuple[str, str, float, Rank, int]], engines: int, most_s: float
) -> None:
    backlog, oracle, now_s = new_backlog(weights=weights, engines=engines), Oracle(weights), 0.0
    for what, tenant, work_s, rank, which in events:
        now_s += which / 10
        if what == "add":
            oracle.calls.append(waiting(tenant, work_s, rank))
            backlog.add(oracle.calls[-1])
        elif what == "excess":
            check_excess(backlog, oracle, tenant, most_s)
        elif oracle.calls:
            call = oracle.calls.pop(which % len(oracle.calls))
            backlog.remove(call) if what == "remove" else backlog.sent(call, now_s)
        check(backlog)
        assert backlog.length == len(oracle.calls)
        assert backlog.work_s == pytest.approx(sum(call.work_s for call in oracle.calls))
        assert all(backlog.waiting(name) == len(oracle.of(name)) for name in weights)


def check_excess(backlog: Backlog, oracle: Oracle, tenant: str, most_s: float) -> None:
    """All that is too much goes, call by call."""
    while (call := backlog.excess(tenant, most_s)) is not None:
        own_wait_s = backlog.tenant_wait_s(tenant) if backlog.waiting(tenant) > 1 else 0.0
        assert call in ([oracle.latest(tenant)] if own_wait_s > most_s else oracle.heaviest())
        assert own_wait_s > most_s or backlog.wait_s > most_s
        backlog.remove(call)
        oracle.calls.remove(call)
    assert backlog.wait_s <= most_s or all(len(oracle.of(name)) <= 1 for name in oracle.weights)
    assert backlog.waiting(tenant) <= 1 or backlog.tenant_wait_s(tenant) <= most_s
