"""Tenants share a queue by tokens, whatever they send."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from plait.policy.admission.fair_queue import FairQueue, Ticket


def ticket(tenant: str, tokens: int = 100, *, session: str = "", throughput: bool = False) -> Ticket:
    return Ticket(tenant, "m", tokens, tokens / 1000, session, throughput)


def popped(queue: FairQueue, calls: int) -> list[Ticket]:
    found = [queue.pop() for _ in range(calls)]
    queue.check()
    return [one for one in found if one is not None]


def test_one_tenant_is_served_first_come_first_served() -> None:
    queue = FairQueue()
    tickets = [ticket("a", tokens) for tokens in (5, 500, 1)]
    for one in tickets:
        queue.push(one)
    assert popped(queue, 4) == tickets


def test_a_tenant_that_sends_twenty_times_more_gets_its_share() -> None:
    queue = FairQueue()
    for _ in range(200):
        queue.push(ticket("greedy"))
    for name in ("b", "c"):
        for _ in range(10):
            queue.push(ticket(name))
    assert Counter(one.tenant for one in popped(queue, 30)) == {"greedy": 10, "b": 10, "c": 10}


def test_tokens_count_and_not_calls() -> None:
    queue = FairQueue()
    for _ in range(100):
        queue.push(ticket("long", 1_000))
        queue.push(ticket("short", 100))
    served = Counter[str]()
    for one in popped(queue, 44):
        served[one.tenant] += one.tokens
    assert abs(served["long"] - served["short"]) <= 1_000


def test_weights_are_shares() -> None:
    queue = FairQueue({"a": 3.0})
    for _ in range(100):
        queue.push(ticket("a"))
        queue.push(ticket("b"))
    assert Counter(one.tenant for one in popped(queue, 40)) == {"a": 30, "b": 10}


def test_nobody_saves_up_a_share() -> None:
    queue = FairQueue()
    for _ in range(50):
        queue.push(ticket("a"))
    popped(queue, 30)
    for _ in range(50):
        queue.push(ticket("late"))
    assert Counter(one.tenant for one in popped(queue, 20)) == {"a": 10, "late": 10}


def test_throughput_goes_last_and_sessions_take_turns() -> None:
    queue = FairQueue()
    for number in range(3):
        queue.push(ticket("a", 10 + number, session="s"))
    queue.push(ticket("a", 20, throughput=True))
    queue.push(ticket("a", 30, session="t"))
    assert [one.tokens for one in popped(queue, 5)] == [10, 30, 11, 12, 20]


def test_what_a_call_did_not_need_is_given_back() -> None:
    queue = FairQueue()
    for _ in range(10):
        queue.push(ticket("a"))
        queue.push(ticket("b"))
    first = popped(queue, 1)[0].tenant
    queue.charge(first, -100)
    assert Counter(one.tenant for one in popped(queue, 3))[first] == 2


def test_calls_for_throughput_are_given_up_first_and_the_latest_of_the_heaviest_tenant() -> None:
    queue = FairQueue()
    assert queue.victim() is None
    tickets = [ticket("a", 9_000), ticket("b", throughput=True), ticket("b", throughput=True, session="s"), ticket("c")]
    for one in tickets:
        queue.push(one)
    assert queue.victim() is tickets[2]
    assert (queue.remove(tickets[2]), queue.remove(tickets[2])) == (True, False)
    queue.remove(tickets[1])
    assert queue.victim() is tickets[0], "the heaviest tenant's, not the latest to come"
    queue.check()


def test_weights_count_for_who_is_heaviest() -> None:
    queue, light = FairQueue({"a": 10.0}), ticket("b", 200)
    queue.push(ticket("a", 1_000))
    queue.push(light)
    assert queue.victim() is light


CALLS = st.builds(
    ticket,
    st.sampled_from("abc"),
    st.integers(1, 500),
    session=st.sampled_from(("", "s", "t")),
    throughput=st.booleans(),
)


@given(st.lists(st.tuples(st.sampled_from(("push", "push", "pop", "remove", "charge")), CALLS), max_size=80))
def test_every_call_leaves_once_and_backlogged_tenants_stay_within_a_call(steps: list[tuple[str, Ticket]]) -> None:
    queue, waiting, left = FairQueue(), list[Ticket](), list[Ticket]()
    for what, one in steps:
        if what == "push":
            queue.push(one)
            waiting.append(one)
        elif what == "pop":
            found = queue.pop()
            assert (found is None) == (not waiting)
            if found is not None:
                waiting.remove(found)
                left.append(found)
        elif what == "remove" and waiting:
            gone = waiting.pop(len(waiting) // 2)
            assert queue.remove(gone)
        elif what == "charge":
            queue.charge(one.tenant, one.tokens - 250)
        queue.check()
        assert len(queue) == len(waiting)
    assert len(popped(queue, len(waiting))) == len(waiting)


@given(st.lists(st.integers(1, 300), min_size=20, max_size=20), st.lists(st.integers(1, 300), min_size=20, max_size=20))
def test_two_backlogged_tenants_never_differ_by_more_than_two_calls(first: list[int], second: list[int]) -> None:
    queue, served = FairQueue(), Counter[str]()
    for name, sizes in (("a", first), ("b", second)):
        for tokens in sizes:
            queue.push(ticket(name, tokens))
    while queue.waiting("a") and queue.waiting("b"):
        one = queue.pop()
        assert one is not None
        served[one.tenant] += one.tokens
        assert abs(served["a"] - served["b"]) <= 600


WEIGHTS = st.fixed_dictionaries({name: st.sampled_from((0.25, 1.0, 2.0, 7.5)) for name in "abc"})


class Oracle:
    """Start-time fair queueing by its definition: all virtual times, looked through at each step."""

    def __init__(self, weights: dict[str, float]) -> None:
        self.weights = weights
        self.times = dict.fromkeys(weights, 0.0)
        self.waiting = Counter[str]()
        self.now = 0.0

    def push(self, name: str) -> None:
        if not self.waiting[name]:
            self.times[name] = max(self.times[name], self.now)
        self.waiting[name] += 1

    def first(self) -> set[str]:
        """The tenants of which one has to be served next."""
        waiting = [name for name, calls in self.waiting.items() if calls]
        least = min((self.times[name] for name in waiting), default=0.0)
        return {name for name in waiting if self.times[name] == least}

    def serve(self, name: str, tokens: int) -> None:
        self.now = max(self.now, self.times[name])
        self.times[name] += tokens / self.weights[name]
        self.waiting[name] -= 1


@given(WEIGHTS, st.lists(st.one_of(st.none(), CALLS), max_size=80))
def test_the_tenant_that_is_furthest_behind_its_weight_is_served(
    weights: dict[str, float], steps: list[Ticket | None]
) -> None:
    queue, oracle = FairQueue(weights), Oracle(weights)
    for one in steps:
        if one is not None:
            queue.push(one)
            oracle.push(one.tenant)
            continue
        first, found = oracle.first(), queue.pop()
        if found is None:
            assert not first
        else:
            assert found.tenant in first
            oracle.serve(found.tenant, found.tokens)


@given(WEIGHTS, st.lists(st.integers(1, 300), min_size=150, max_size=150))
def test_the_shares_of_backlogged_tenants_are_their_weights(weights: dict[str, float], sizes: list[int]) -> None:
    """No two differ by more than a longest call of each, divided by their weights (Goyal et al., theorem 1)."""
    queue, served = FairQueue(weights), Counter[str]()
    for number, tokens in enumerate(sizes):
        queue.push(ticket("abc"[number % 3], tokens))
    while all(map(queue.waiting, "abc")):
        one = queue.pop()
        assert one is not None
        served[one.tenant] += one.tokens
        for first, second in ("ab", "bc", "ca"):
            difference = abs(served[first] / weights[first] - served[second] / weights[second])
            assert difference <= 300 / weights[first] + 300 / weights[second] + 1e-6


def test_a_share_is_the_weight_among_those_that_wait() -> None:
    weights = {"a": 3.0}
    queue = FairQueue(weights)
    assert (queue.share("a"), queue.share("b")) == (1.0, 1.0)
    for name in "ab":
        queue.push(ticket(name))
    assert (queue.share("a"), queue.share("b"), queue.share("c")) == (0.75, 0.25, 0.2)
    weights["a"] = 1.0
    assert queue.share("a") == 0.5, "weights may change at any time"
