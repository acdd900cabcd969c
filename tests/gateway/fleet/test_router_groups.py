"""Objectives, applications and task groups through the router: what is outstanding and reserved after each event."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from plait.backends.protocol.cache_state import CacheState, KvState
from plait.gateway.fleet.booking import Booking, BookingState, CallUsage
from plait.gateway.fleet.health import HealthState
from plait.gateway.fleet.router import Router
from plait.policy.cost_model import CostModel, LongAttention, PiecewiseLinear
from plait.policy.placement.policies import POLICIES
from plait.policy.prefix.block_hash import chain, root_hash
from plait.policy.types import Call, Objective, PlacementReason, TaskGroup

# 10 ms a pass and 1 ms a new token; attention is free.
COSTS = CostModel(PiecewiseLinear(((0, 0.010),), 0.001), 0.0, 0.0, 0.0, LongAttention())
WINDOW_S = 10.0


def new_router(*engines: str, policy: str = "e2", kv_tokens: int | None = None) -> Router:
    """All engines up and serving model m."""
    router = Router(policy, window_s=WINDOW_S)
    for engine in engines:
        router.add_engine(engine, COSTS, kv_tokens=kv_tokens)
        router.health.answered(engine, {"m": None})
    return router


def call(
    text: str,
    objective: Objective | None = None,
    *,
    application: str | None = None,
    group: str | None = None,
    calls: int = 1,
) -> Call:
    """A prompt of a tree block for each letter and one token more."""
    hashes = list(chain([ord(letter) for letter in text], 1, root_hash("m")))
    task_group = None if group is None else TaskGroup(group, calls)
    return Call(text, "m", 64 * len(text) + 1, 64, hashes, None, objective, application=application, group=task_group)


def place(router: Router, one: Call, now_s: float = 0.0) -> Booking:
    return router.book(one, router.select(one), now_s)


def end(router: Router, booking: Booking) -> None:
    router.settle(booking, CallUsage(booking.call.prompt_tokens, 10, 0), 1.0)


# What is outstanding.


def test_a_calls_work_is_outstanding_until_it_has_been_done() -> None:
    router = new_router("a")
    work = router.engines["a"].view.work
    booking = place(router, call("four", Objective.LATENCY, application="x"))
    latency = work.backlogs[Objective.LATENCY]
    assert (latency.calls, round(latency.prefill_s, 3), round(latency.decode_s, 3)) == (1, 0.267, 128 * 0.011)
    assert (work.kv_tokens, work.applications) == (257 + 128, {"x": 1})
    router.first_token(booking, 1.0)
    assert (latency.calls, latency.prefill_s) == (1, 0.0)
    end(router, booking)
    assert (work.calls, latency.total_s, work.kv_tokens, work.applications) == (0, 0.0, 0.0, {})


def test_latency_and_throughput_work_are_kept_apart() -> None:
    router = new_router("a", "b")
    chosen: dict[Objective, list[str]] = {objective: [] for objective in Objective}
    for number in range(6):
        objective = list(Objective)[number % 2]
        chosen[objective].append(place(router, call(f"{number}", objective)).placement.engine_id)
    assert chosen == {Objective.LATENCY: ["a"] * 3, Objective.THROUGHPUT: ["b"] * 3}


def test_how_large_a_cache_is_comes_from_its_reports() -> None:
    router = new_router("a", kv_tokens=1_000)
    view = router.engines["a"].view
    assert view.room_tokens == 1_000
    state = CacheState(
        kind="embedded", engine="a", epoch="1", cursor=1, model="m", block_tokens=16, granularity_tokens=64,
        snapshot=True, stored=[], removed=[], kv=KvState(100, 40, 10),
    )  # fmt: skip
    router.report("a", state, 0.0)
    place(router, call("q"))
    assert view.room_tokens == 1_600 - (65 + 128)
    router.no_reports("a")
    assert view.room_tokens == 1_000 - (65 + 128)


# A group's way.


def test_a_group_of_sixteen_spreads_by_room_and_uses_its_places_up() -> None:
    router = new_router("a", "b")
    for engine, kv_tokens in (("a", 10), ("b", 6)):
        router.engines[engine].view.kv_tokens = kv_tokens * (65 + 128)
    bookings = [place(router, call(f"{number:x}", group="g", calls=16)) for number in range(16)]
    assert Counter(booking.placement.engine_id for booking in bookings) == {"a": 10, "b": 6}
    assert {booking.placement.reason for booking in bookings} == {PlacementReason.GROUP}
    reservation = router.reservations.of(bookings[0].call)
    assert reservation is not None
    assert (dict(reservation.places), reservation.running) == ({}, 16)
    for booking in bookings:
        end(router, booking)
    assert len(router.reservations) == 0


def test_selecting_reserves_nothing() -> None:
    router = new_router("a", "b")
    first = router.select(call("x", group="g", calls=4))
    assert router.select(call("x", group="g", calls=4)) == first
    assert len(router.reservations) == 0


def test_calls_that_share_a_prefix_take_places_on_one_engine() -> None:
    router = new_router("a", "b")
    engines = {"s": set[str](), "t": set[str]()}
    for text in ("ssssss1", "tttttt1", "tttttt2", "ssssss2", "ssssss3", "tttttt3"):
        engines[text[0]].add(place(router, call(text, group="g", calls=6)).placement.engine_id)
    assert sorted(map(sorted, engines.values())) == [["a"], ["b"]]


def test_new_calls_of_a_group_extend_its_reservation() -> None:
    router = new_router("a", "b")
    for number, calls in enumerate((2, 2, 6)):
        one = call(f"{number}", group="g", calls=calls)
        place(router, one)
        reservation = router.reservations.of(one)
        assert reservation is not None
        assert sum(reservation.places.values()) == calls - number - 1


def test_when_an_engine_is_lost_the_rest_of_the_group_is_allocated_anew() -> None:
    router = new_router("a", "b", "c")
    one = call("x", group="g", calls=40)
    place(router, one)
    reservation = router.reservations.of(one)
    assert reservation is not None
    assert reservation.places.keys() == {"a", "b", "c"}
    router.health.unreachable("c")
    rest = [place(router, call(f"x{number}", group="g", calls=40)).placement for number in range(39)]
    assert {placement.engine_id for placement in rest} == {"a", "b"}
    assert {placement.reason for placement in rest} == {PlacementReason.GROUP}


def test_a_call_that_avoids_an_engine_leaves_its_groups_places_alone() -> None:
    router = new_router("a", "b")
    first = place(router, call("x", group="g", calls=2))
    router.release(first, 1.0, delivered=False)
    before = router.reservations.of(first.call)
    placement = router.select(first.call, avoid={first.placement.engine_id})
    assert placement.engine_id != first.placement.engine_id
    assert placement.reason is not PlacementReason.GROUP
    assert router.reservations.of(first.call) == before


def test_a_groups_places_come_out_even_when_calls_continue_others() -> None:
    """Four calls of two steps: whoever comes between the steps of another asks for a place too many."""
    router = new_router("a", "b")
    for number in range(4):
        first = place(router, call(f"{number}", group="g", calls=4))
        end(router, first)
        if number:
            one = call(f"{number}+", group="g", calls=4)
            earlier = router.book(one, router.select(one, prefer=first.placement.engine_id), 1.0)
            reservation = router.reservations.of(one)
            assert reservation is not None
            assert sum(reservation.places.values()) + reservation.running <= 4
            end(router, earlier)
    for left in (3, 2, 1, 0):
        one = call("last", group="g", calls=left + 1)
        last = router.book(one, router.select(one, prefer="a"), 2.0)
        reservation = router.reservations.of(one)
        assert reservation is not None
        assert sum(reservation.places.values()) == left
        end(router, last)
    assert len(router.reservations) == 0


def test_a_plain_policy_has_no_groups() -> None:
    router = new_router("a", "b", policy="round_robin")
    bookings = [place(router, call("x", group="g", calls=4)) for _ in range(4)]
    assert [booking.placement.engine_id for booking in bookings] == ["a", "b", "a", "b"]
    for booking in bookings:
        end(router, booking)
    assert len(router.reservations) == 0


# Everything in any order.


class Groups(RuleBasedStateMachine):
    """Two task groups whose calls come, fail and end, among other calls, on engines that go and come back."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.running: list[Booking] = []
        self.waiting: Counter[str] = Counter()

    @initialize(policy=st.sampled_from(sorted(POLICIES)), kv_tokens=st.none() | st.integers(100, 2_000))
    def start(self, policy: str, kv_tokens: int | None) -> None:
        self.router = new_router("a", "b", "c", policy=policy, kv_tokens=kv_tokens)

    def up(self) -> set[str]:
        return {name for name, engine in self.router.engines.items() if engine.health.state is HealthState.UP}

    def members(self, group: str) -> int:
        """Calls of a group that are on engines."""
        return sum(booking.call.group is not None and booking.call.group.group_id == group for booking in self.running)

    @rule(group=st.sampled_from("gh"), calls=st.integers(1, 5))
    def arrive(self, group: str, calls: int) -> None:
        self.waiting[group] += calls

    @precondition(lambda self: self.up())
    @rule(group=st.sampled_from("gh"), text=st.sampled_from(("s", "st", "u")))
    def place_member(self, group: str, text: str) -> None:
        if not self.waiting[group]:
            return
        known = self.waiting[group] + self.members(group)
        one = call(text, Objective.LATENCY, application="x", group=group, calls=known)
        before = self.router.reservations.of(one)
        placement = self.router.select(one)
        assert self.router.reservations.of(one) == before, "selecting has no side effects"
        self.waiting[group] -= 1
        self.running.append(self.router.book(one, placement, self.now_s))
        if self.router.policy == "e2":
            assert placement.reason is PlacementReason.GROUP
            assert placement.places is not None
            assert sum(placement.places.values()) == self.waiting[group], "a place for every call that is to come"
            assert {placement.engine_id, *placement.places} <= self.up()

    @precondition(lambda self: any(booking.call.group is not None for booking in self.running))
    @rule(which=st.integers(0, 99))
    def continue_member(self, which: int) -> None:
        """A step of a call ends and its next one follows."""
        members = [booking for booking in self.running if booking.call.group is not None]
        step = members[which % len(members)]
        assert step.call.group is not None
        group, engine = step.call.group.group_id, step.placement.engine_id
        end(self.router, step)
        self.running.remove(step)
        if not self.up():
            return
        known = self.waiting[group] + self.members(group) + 1
        one = call("st+", Objective.LATENCY, application="x", group=group, calls=known)
        placement = self.router.select(one, prefer=engine)
        assert (placement.reason is PlacementReason.CONTINUE) == (engine in self.up())
        self.running.append(self.router.book(one, placement, self.now_s))
        reservation = self.router.reservations.of(one)
        assert reservation is not None
        assert sum(reservation.places.values()) <= self.waiting[group], "a place that nobody will take"

    @precondition(lambda self: self.up())
    @rule(objective=st.none() | st.sampled_from(Objective), application=st.sampled_from((None, "x", "y")))
    def place_another(self, objective: Objective | None, application: str | None) -> None:
        self.running.append(place(self.router, call("st", objective, application=application), self.now_s))

    @rule(group=st.sampled_from("gh"))
    def fail_upstream(self, group: str) -> None:
        self.waiting[group] = max(0, self.waiting[group] - 1)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 99), how=st.sampled_from(("first token", "settle", "abort", "not delivered")))
    def go_on(self, which: int, how: str) -> None:
        booking = self.running[which % len(self.running)]
        if how == "first token":
            if booking.state is BookingState.BOOKED:
                self.router.first_token(booking, self.now_s)
            return
        self.running.remove(booking)
        if how == "settle":
            end(self.router, booking)
        else:
            self.router.release(booking, self.now_s, delivered=how == "abort")

    @rule(engine=st.sampled_from("abc"), answers=st.booleans())
    def change(self, engine: str, answers: bool) -> None:
        if answers:
            self.router.health.answered(engine, {"m": None})
        else:
            self.router.health.unreachable(engine)

    @rule(passed_s=st.sampled_from((0.0, 1.0, 6.0)))
    def age(self, passed_s: float) -> None:
        self.now_s += passed_s
        self.router.age(self.now_s)

    @invariant()
    def work_is_conserved(self) -> None:
        self.router.check()
        for engine_id, engine in self.router.engines.items():
            mine = [booking for booking in self.running if booking.placement.engine_id == engine_id]
            engine.view.work.check([booking.work for booking in mine])
            for objective, backlog in engine.view.work.backlogs.items():
                assert backlog.calls == sum(booking.call.served_as is objective for booking in mine)

    @invariant()
    def reservations_are_of_calls_that_run_or_are_to_come(self) -> None:
        for group in "gh":
            reservation = self.router.reservations.of(call("s", group=group))
            assert reservation is not None
            assert reservation.running == self.members(group)
            assert set(reservation.places) <= self.up()

    def teardown(self) -> None:
        """All calls end and the window passes."""
        if not hasattr(self, "router"):
            return
        for booking in self.running:
            end(self.router, booking)
        self.running.clear()
        self.router.age(self.now_s + WINDOW_S + 0.1)
        self.work_is_conserved()
        assert len(self.router.reservations) == 0, "a reservation has leaked"


Groups.TestCase.settings = settings(max_examples=100, stateful_step_count=40)
TestGroups = Groups.TestCase
