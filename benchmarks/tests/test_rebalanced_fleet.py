"""What a fleet under E2 does when its load changes: each mechanism in virtual time, and an hour of steady load."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from heapq import merge
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.placing.routes import Route, RouteReason, RouteState
from benchmarks.tests.virtual_fleet import VirtualFleet
from plait.policy.types import PlacementReason
from tests.invariants import check

EXPLOIT = PlacementReason.EXPLOIT


def asked(prefix: str, per_s: float, from_s: float, to_s: float) -> Iterator[tuple[float, str]]:
    """Prompts that begin with `prefix`, each with a last block of its own."""
    for number in range(round(per_s * (to_s - from_s))):
        at_s = from_s + number / per_s
        yield at_s, prefix + chr(0x10000 + round(at_s * 100))


def spread(fleet: VirtualFleet, prefixes: dict[str, str]) -> None:
    """Put each prefix on an engine, with two calls."""
    for prefix, engine in prefixes.items():
        for other in fleet.router.engines:
            if other != engine:
                fleet.router.health.unreachable(other)
        fleet.run([(0.0, f"{prefix}!"), (0.0, f"{prefix}?")])
        for other in fleet.router.engines:
            fleet.router.health.answered(other, {"m": None})


def test_an_overloaded_engine_sheds_whole_prefixes_and_gets_them_back() -> None:
    fleet = VirtualFleet("ab", ["shift"])
    spread(fleet, {"AAAAAAAA": "a", "BBBBBBBB": "a", "CCCCCCCC": "b"})
    steady = [asked("AAAAAAAA", 1.0, 1, 2000), asked("BBBBBBBB", 1.0, 1.3, 2000), asked("CCCCCCCC", 2.0, 1.6, 2000)]
    surge = asked("AAAAAAAA", 3.0, 400.5, 1000.5)
    fleet.run(merge(*steady, surge))
    assert fleet.reasons("B", 100, 400) == {("a", EXPLOIT)}, "balanced loads move nothing"
    assert {engine for engine, _ in fleet.reasons("B", 600, 1000)} == {"b"}, "all calls of the prefix, not some"
    assert fleet.reasons("A", 100, 2000) == {("a", EXPLOIT)}, "moving the hot prefix would overload b"
    computed = [one for one in fleet.sent if one.prompt.startswith("B") and one.missed_tokens > 300]
    assert len(computed) == 2, "computed once on each engine"
    assert fleet.reasons("B", 1500, 2000) == {("a", EXPLOIT)}, "the surge is over"
    assert len(fleet.changes()) == 3, "shifted, returning, at home"
    check(fleet.router)


def test_a_prefix_is_not_moved_for_less_than_its_prefill() -> None:
    """The idle engine has no load at all, so any load is more than `TH_BAL` times as much."""
    fleet = VirtualFleet("ab", ["shift"])
    spread(fleet, {"A" * 40: "a", "B" * 40: "a"})
    fleet.run(merge(asked("A" * 40, 0.02, 200, 800), asked("B" * 40, 0.02, 201, 800)))
    assert not [at_s for at_s in fleet.changes() if at_s > 200]


def test_a_prefix_whose_load_doubles_is_replicated_and_its_subtree_divided() -> None:
    fleet = VirtualFleet("ab")
    topics = ("AAAAAAAAxxxx", "AAAAAAAAyyyy")
    spread(fleet, {**dict.fromkeys(topics, "a"), "CCCCCCCC": "b"})
    quiet = [asked(topic, 2.2, 1 + number / 3, 600) for number, topic in enumerate(topics)]
    beside = asked("CCCCCCCC", 3.0, 1.1, 2000)
    surge = [asked(topic, 7.5, 600 + number / 7, 1400) for number, topic in enumerate(topics)]
    later = [asked(topic, 2.2, 1400 + number / 3, 2000) for number, topic in enumerate(topics)]
    fleet.run(merge(*quiet, beside, *surge, *later))
    assert {reason for _, reason in fleet.reasons("A", 100, 600)} == {EXPLOIT}
    replicated = [routes for _, routes in fleet.routes if any(r.state is RouteState.REPLICATED for r in routes)]
    assert replicated
    route = replicated[0][0]
    assert (route.home, route.others) == ("a", ("b",))
    assert sorted(route.parts.values()) == ["a", "b"], "each engine gets one of the two topics"
    engines = [{engine for engine, _ in fleet.reasons(topic, 700, 1400)} for topic in topics]
    assert sorted(engines, key=min) == [{"a"}, {"b"}]
    assert RouteReason.REPLICA in {reason for _, reason in fleet.reasons("A", 700, 1400)}
    assert len(fleet.changes()) == 2
    assert not fleet.routes[-1][1], "the replica ends with the surge"
    check(fleet.router)


@pytest.mark.no_cover
@pytest.mark.parametrize("seed", [1, 2])
def test_nothing_flaps_in_an_hour_of_steady_load(seed: int) -> None:
    rng = random.Random(seed)
    fleet = VirtualFleet("abc")
    prefixes = [letter * 12 for letter in "ABCDEFGHIJKL"]
    weights = [(rank + 1) ** -1.1 for rank in range(len(prefixes))]
    at_s = 0.0
    arrivals: list[tuple[float, str]] = []
    while at_s < 3600:
        at_s += rng.expovariate(4.0)
        arrivals.append((at_s, rng.choices(prefixes, weights)[0] + chr(0x10000 + len(arrivals))))
    fleet.run(arrivals)
    changes = fleet.changes()
    assert len(changes) <= 6, changes
    reasons = Counter(one.reason for one in fleet.sent)
    computed = sum(one.missed_tokens > 300 for one in fleet.sent)
    assert computed <= len(prefixes) + len(changes), reasons
    check(fleet.router)


@pytest.mark.no_cover
@settings(deadline=None, max_examples=10)
@given(
    rates=st.lists(st.floats(0.1, 2.0), min_size=2, max_size=5),
    surges=st.lists(st.floats(0.0, 4.0), min_size=2, max_size=5),
    engines=st.sampled_from(("ab", "abc")),
)
def test_whatever_the_load_a_route_lasts_a_window(rates: list[float], surges: list[float], engines: str) -> None:
    fleet = VirtualFleet(engines)
    prefixes = [chr(ord("A") + number) * (2 + number) for number in range(len(rates))]
    steady = [asked(prefix, rate, 0, 500) for prefix, rate in zip(prefixes, rates, strict=True)]
    surge = [asked(prefix, rate, 150, 350) for prefix, rate in zip(prefixes, surges, strict=False)]
    fleet.run(merge(*steady, *surge))
    for (_, before), (at_s, after) in pairwise(fleet.routes):
        for route in after:
            assert route.home not in route.others
            assert len(set(route.others)) == len(route.others)
            if route not in before:
                assert route.since_s == at_s
        for route in before:
            assert at_s - route.since_s >= 180 or route in after or _replaced(route, after)
    check(fleet.router)


def _replaced(route: Route, after: list[Route]) -> bool:
    """A shifted prefix was replicated."""
    return any(other.state is RouteState.REPLICATED and other.since_s > route.since_s for other in after)
