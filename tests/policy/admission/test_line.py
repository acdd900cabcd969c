"""The order in which calls are sent: tenants share by tokens over all lines, and a tenant's calls take turns."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from plait.policy.admission.fair_shares import FairShares
from plait.policy.admission.line import LOOKED_ANEW, LOOKED_AT, Line
from plait.policy.costs.prefill_queue import Precedence
from plait.policy.order import KEPT, Rank
from tests.policy.admission.asked_calls import Asked, asked, new_line, new_lines, taken, tenants

# Within a tenant.


def test_one_tenant_is_served_first_come_first_served() -> None:
    calls = [asked(tokens=tokens) for tokens in (5, 500, 1)]
    line = new_line(*calls)
    assert line.work_s == pytest.approx(0.506)
    assert taken(line, 3) == calls
    assert (len(line), line.work_s) == (0, 0.0)


def test_calls_with_a_ttft_go_first_and_calls_for_throughput_last() -> None:
    ranks = [Rank.THROUGHPUT, Rank.PLAIN, Rank.LATENCY, Rank.THROUGHPUT, Rank.LATENCY, Rank.PLAIN]
    line = new_line(*(asked(tokens=10 + number, rank=rank) for number, rank in enumerate(ranks)))
    assert [call.tokens for call in taken(line, 6)] == [12, 14, 11, 15, 10, 13]


def test_a_rank_counts_only_among_the_tenants_own_calls() -> None:
    line = new_line(*(asked("a", rank=Rank.LATENCY) for _ in range(9)), *(asked("b") for _ in range(9)))
    assert tenants(taken(line, 6)) == {"a": 3, "b": 3}


def test_calls_with_more_in_the_cache_go_more_often_but_not_always() -> None:
    line = new_line(*(asked(cached=cached) for cached in (0.0, 0.95) for _ in range(LOOKED_AT // 2)))
    assert [call.cached for call in taken(line, 12)].count(0.95) == 11


@pytest.mark.parametrize(("cached", "turn"), [(0.0, 2), (0.49, 2), (0.5, 1), (1.0, 1), (1.5, 1)])
def test_the_cached_share_is_that_of_the_moment(cached: float, turn: int) -> None:
    """The second call goes first once half of it is in the cache: it is in a higher group than the first one."""
    first, second = asked(cached=0.45), asked()
    line = new_line(first, second)
    second.cached = cached
    assert taken(line, 2).index(second) == turn - 1


def test_the_latest_calls_are_not_looked_at_before_older_ones_have_gone() -> None:
    cached = asked(cached=1.0)
    line = new_line(*(asked() for _ in range(LOOKED_AT)), cached)
    assert taken(line, 2)[1] is cached


@pytest.mark.parametrize("place", [1, LOOKED_AT // 2, LOOKED_AT - 3])
def test_what_has_come_into_the_cache_is_seen_within_some_turns(place: int) -> None:
    calls = [asked() for _ in range(2 * LOOKED_AT)]
    line = new_line(*calls)
    taken(line, 1)
    calls[place].cached = 1.0
    assert calls[place] in taken(line, LOOKED_AT // LOOKED_ANEW + 1)


def test_what_has_gone_from_the_cache_is_not_taken_for_cached() -> None:
    calls = [asked(cached=0.95) for _ in range(LOOKED_AT)]
    line = new_line(*calls)
    taken(line, 1)
    for call in calls[: LOOKED_AT - 1]:
        call.cached = 0.0
    assert calls[-1] in taken(line, 2), "a call without anything in the cache may go before it, not two"


@given(st.floats(0, 0.99), st.lists(st.floats(0, 1), min_size=130, max_size=130))
def test_no_call_starves_whatever_comes_after_it(cached: float, others: list[float]) -> None:
    """The bound is that of the proof of `HitRatioGroups`, for the first call of a group."""
    first = asked(cached=cached)
    line = new_line(first)
    turns = 0
    while first in line:
        line.push(asked(cached=others[turns]))
        line.take()
        turns += 1
    assert turns <= -(-55 // (int(10 * cached) + 1)) + 55


# Among tenants.


def test_a_tenant_that_sends_twenty_times_more_gets_its_share() -> None:
    line = new_line(*(asked("greedy") for _ in range(200)), *(asked(name) for name in "bc" for _ in range(10)))
    assert tenants(taken(line, 30)) == {"greedy": 10, "b": 10, "c": 10}


def test_tokens_count_and_not_calls() -> None:
    line = new_line(*(call for _ in range(100) for call in (asked("long", 1_000), asked("short", 100))))
    served = Counter[str]()
    for call in taken(line, 44):
        served[call.tenant] += call.tokens
    assert abs(served["long"] - served["short"]) <= 1_000


def test_weights_are_shares() -> None:
    line = new_line(*(asked(name) for name in "ab" for _ in range(100)), weights={"a": 3.0})
    assert tenants(taken(line, 40)) == {"a": 30, "b": 10}


def test_nobody_saves_up_a_share() -> None:
    line = new_line(*(asked("a") for _ in range(50)))
    taken(line, 30)
    for _ in range(50):
        line.push(asked("late"))
    assert tenants(taken(line, 20)) == {"a": 10, "late": 10}


def test_what_a_call_did_not_need_is_given_back() -> None:
    shares, (line,) = new_lines(1)
    for name in "ab" * 10:
        line.push(asked(name))
    first = line.take().tenant
    shares.correct(first, -100)
    line.check()
    assert tenants(taken(line, 3))[first] == 2


def test_what_a_call_needed_more_counts() -> None:
    shares, (line,) = new_lines(1)
    for name in "ab" * 10:
        line.push(asked(name))
    first = line.take().tenant
    shares.correct(first, 200)
    assert tenants(taken(line, 3))[first] == 0
    assert tenants(taken(line, 2))[first] == 1


def test_a_tenant_that_is_served_at_one_engine_waits_its_turn_at_another() -> None:
    _, (here, there) = new_lines(2)
    for _ in range(3):
        here.push(asked("a"))
    for name in "ab" * 4:
        there.push(asked(name))
    assert tenants(taken(here, 3)) == {"a": 3}
    assert tenants(taken(there, 3)) == {"b": 3}
    assert tenants(taken(there, 4)) == {"a": 3, "b": 1}
    there.check()


def test_what_is_given_back_counts_in_each_line() -> None:
    shares, (here, there) = new_lines(2)
    for line in (here, there):
        for call in (asked("late", 1_000), asked("late"), *(asked("b") for _ in range(9))):
            line.push(call)
    assert [call.tenant for call in (*taken(here, 3), *taken(there, 2))] == ["late", "b", "b", "b", "b"]
    shares.correct("late", -950)
    for line in (here, there):
        line.check()
    assert [call.tenant for call in (*taken(there, 1), *taken(here, 1))] == ["late", "b"], "50 and 1,050 tokens"
    shares.correct("late", -1_000)
    assert [call.tenant for call in taken(here, 1)] == ["late"]


# Who leaves.


def test_a_call_that_is_removed_is_not_sent_and_not_charged() -> None:
    calls = [asked("a"), asked("a", 7), asked("b")]
    line = new_line(*calls)
    line.remove(calls[0])
    line.check()
    assert calls[0] not in line
    assert tenants(taken(line, 2)) == {"a": 1, "b": 1}


def test_a_tenant_that_left_the_line_keeps_no_place_in_it() -> None:
    shares, (line,) = new_lines(1)
    gone = asked("gone")
    for call in (gone, asked("b"), asked("b"), asked("b")):
        line.push(call)
    line.remove(gone)
    taken(line, 2)
    line.push(gone)
    assert shares.served("gone") == 200.0, "it begins where the others are that wait, not where the last one began"
    line.remove(gone)
    line.check()
    assert tenants(taken(line, 1)) == {"b": 1}


def test_the_latest_calls_come_first_when_another_engine_looks_for_work() -> None:
    calls = [asked("ab"[number % 2], rank=Rank(number % 3)) for number in range(6)]
    line = new_line(*calls)
    assert list(line) == calls
    assert list(line.latest(4)) == calls[:1:-1]
    line.remove(calls[5])
    assert list(line.latest(99)) == calls[4::-1]


# In the long run.


@given(st.lists(st.integers(1, 300), min_size=20, max_size=20), st.lists(st.integers(1, 300), min_size=20, max_size=20))
def test_two_backlogged_tenants_never_differ_by_more_than_two_calls(first: list[int], second: list[int]) -> None:
    line, served = new_line(), Counter[str]()
    for name, sizes in (("a", first), ("b", second)):
        for tokens in sizes:
            line.push(asked(name, tokens))
    while len(tenants(list(line))) == 2:
        call = line.take()
        served[call.tenant] += call.tokens
        assert abs(served["a"] - served["b"]) <= 600


WEIGHTS = st.fixed_dictionaries({name: st.sampled_from((0.25, 1.0, 2.0, 7.5)) for name in "abc"})


@given(WEIGHTS, st.lists(st.integers(1, 300), min_size=150, max_size=150), st.lists(st.booleans(), min_size=150))
def test_the_shares_of_backlogged_tenants_are_their_weights(
    weights: dict[str, float], sizes: list[int], which: list[bool]
) -> None:
    """No two differ by more than a longest call of each, divided by their weights (Goyal et al., theorem 1).

    They wait at two engines, which take calls in any order.
    """
    _, lines = new_lines(2, weights)
    served = Counter[str]()
    for number, tokens in enumerate(sizes):
        lines[number % 2].push(asked("abc"[number // 2 % 3], tokens))
    for other in which:
        line = lines[other]
        if any(len(tenants(list(one))) < 3 for one in lines):
            break
        call = line.take()
        served[call.tenant] += call.tokens
        for first, second in ("ab", "bc", "ca"):
            difference = abs(served[first] / weights[first] - served[second] / weights[second])
            assert difference <= 300 / weights[first] + 300 / weights[second] + 1e-6


class Oracle:
    """Start-time fair queueing by its definition: all virtual times, looked through at each step.

    Of a tenant, the lowest rank goes first, but the others keep a tenth.
    """

    def __init__(self, weights: dict[str, float]) -> None:
        self.weights = weights
        self.times = dict.fromkeys(weights, 0.0)
        self.lines = [list[Asked](), list[Asked](), list[Asked]()]
        self.latest = 0.0
        self.owed = defaultdict[tuple[int, str], dict[Rank, float]](dict)

    def waits(self, tenant: str) -> bool:
        return any(call.tenant == tenant for calls in self.lines for call in calls)

    def present(self) -> float:
        """Where a tenant begins: at the least time of those that wait, else where the call began that was sent last."""
        return min((self.times[tenant] for tenant in self.times if self.waits(tenant)), default=self.latest)

    def begin(self, tenant: str) -> None:
        """The tenant wants to be served: it brings nothing of the time in which it had no call."""
        if not self.waits(tenant):
            self.times[tenant] = max(self.times[tenant], self.present())

    def serve(self, tenant: str, tokens: int) -> None:
        self.begin(tenant)
        self.latest = max(self.latest, self.times[tenant])
        self.times[tenant] += tokens / self.weights[tenant]

    def correct(self, tenant: str, tokens: int) -> None:
        """The tenant gets tokens back, or pays for more. One that is not ahead of those that wait is as good as new."""
        time = max(0.0, self.times[tenant] + tokens / self.weights[tenant])
        self.times[tenant] = time if self.waits(tenant) or time > self.present() else 0.0

    def next(self, number: int) -> list[Asked]:
        """The calls of which one has to be taken: each tenant's that is furthest behind, the oldest of each group."""
        calls = self.lines[number]
        least = min(self.times[call.tenant] for call in calls)
        found = list[Asked]()
        for tenant in {call.tenant for call in calls if self.times[call.tenant] == least}:
            ranks = {call.rank: call.tokens for call in reversed(calls) if call.tenant == tenant}
            owed = [rank for rank in ranks if self.owed[number, tenant].get(rank, 0.0) >= ranks[rank]]
            rank = min(owed or ranks)
            of_class = [call for call in calls if (call.tenant, call.rank) == (tenant, rank)][:LOOKED_AT]
            groups = {min(9, int(10 * call.cached)): call for call in reversed(of_class)}
            found += groups.values()
        return found

    def take(self, number: int, taken: Asked) -> None:
        """A call of a line is sent."""
        self.serve(taken.tenant, taken.tokens)
        owed = self.owed[number, taken.tenant]
        ranks = {call.rank for call in self.lines[number] if call.tenant == taken.tenant}
        more = {rank: KEPT * taken.tokens * (rank > taken.rank) - taken.tokens * (rank is taken.rank) for rank in ranks}
        self.owed[number, taken.tenant] = {rank: max(0.0, owed.get(rank, 0.0) + more[rank]) for rank in ranks}
        self.leave(number, taken)

    def leave(self, number: int, call: Asked) -> None:
        """A call leaves a line. A tenant without calls there is owed nothing."""
        self.lines[number].remove(call)
        if all(one.tenant != call.tenant for one in self.lines[number]):
            self.owed.pop((number, call.tenant), None)


class Lines(RuleBasedStateMachine):
    """The lines of three engines and what they share."""

    @initialize(weights=WEIGHTS)
    def start(self, weights: dict[str, float]) -> None:
        self.shares, self.made = new_lines(3, weights)
        self.oracle = Oracle(weights)

    @rule(
        number=st.integers(0, 2),
        tenant=st.sampled_from("abc"),
        sizes=st.lists(st.integers(1, 500), min_size=1, max_size=20),
        rank=st.sampled_from(Rank),
        cached=st.floats(0, 1),
    )
    def push(self, number: int, tenant: str, sizes: list[int], rank: Rank, cached: float) -> None:
        for tokens in sizes:
            call = asked(tenant, tokens, rank, cached=cached)
            self.made[number].push(call)
            self.oracle.begin(tenant)
            self.oracle.lines[number].append(call)

    @precondition(lambda self: any(self.oracle.lines))
    @rule(number=st.integers(0, 2), times=st.integers(1, 9))
    def take(self, number: int, times: int) -> None:
        for _ in range(min(times, len(self.oracle.lines[number]))):
            allowed, call = self.oracle.next(number), self.made[number].take()
            assert call in allowed
            self.oracle.take(number, call)

    @rule(tenant=st.sampled_from("abc"), tokens=st.integers(1, 500))
    def send_at_once(self, tenant: str, tokens: int) -> None:
        self.shares.serve(tenant, tokens)
        self.oracle.serve(tenant, tokens)

    @precondition(lambda self: any(self.oracle.lines))
    @rule(number=st.integers(0, 2), which=st.integers(0, 99))
    def remove(self, number: int, which: int) -> None:
        if calls := self.oracle.lines[number]:
            call = calls[which % len(calls)]
            self.made[number].remove(call)
            self.oracle.leave(number, call)

    @precondition(lambda self: any(self.oracle.lines))
    @rule(number=st.integers(0, 2), which=st.integers(0, 99), precedence=st.sampled_from(Precedence))
    def change(self, number: int, which: int, precedence: Precedence) -> None:
        if calls := self.oracle.lines[number]:
            call = calls[which % len(calls)]
            self.made[number].change(call, call.rank, precedence)

    @rule(tenant=st.sampled_from("abc"), tokens=st.integers(-800, 400))
    def correct(self, tenant: str, tokens: int) -> None:
        if tokens < 0 or self.oracle.waits(tenant):
            self.shares.correct(tenant, tokens)
            self.oracle.correct(tenant, tokens)

    @rule(tenant=st.sampled_from("abc"), weight=st.sampled_from((0.5, 1.0, 3.0)))
    def change_weight(self, tenant: str, weight: float) -> None:
        self.oracle.weights[tenant] = weight

    @invariant()
    def the_lines_have_what_waits(self) -> None:
        for line, calls in zip(self.made, self.oracle.lines, strict=True):
            line.check()
            assert list(line) == calls
            assert list(line.latest(3)) == calls[:-4:-1]
            assert len(line) == len(calls)
            assert all(call in line for call in calls)


TestLines = Lines.TestCase


def test_a_lower_priority_goes_first_in_its_class() -> None:
    line = Line[Asked](FairShares(), lambda _: 0.0)
    made = [Asked("a", 100, priority=priority) for priority in (1, 0, -1, 0)]
    made.append(Asked("a", 100, Rank.LATENCY, priority=9))
    for ticket in made:
        line.push(ticket)
    line.check()
    assert [line.take() for _ in made] == [made[4], made[2], made[1], made[3], made[0]]
