"""What the router takes each engine's cache to have: as reported, as estimated, and while calls are on their way."""

from __future__ import annotations

from math import ceil

import msgspec
import pytest

from plait.backends.protocol.cache_state import KvGroup, KvState
from plait.gateway.fleet.booking import CallUsage
from tests.gateway.fleet.lettered_prompts import cached, call, new_router, report
from tests.invariants import check

# What an engine has.


def test_a_booked_prefix_is_expected_until_the_first_report_asked_for_after_the_call_ended() -> None:
    router = new_router("a")
    router.report("a", report(snapshot=True), 0.0)
    booking = router.book(call("abcd"), router.select(call("abcd"), 1.0), 1.0)
    router.report("a", report("ab"), 2.0)
    assert cached(router, "abcd") == 4, "it is still running"
    router.settle(booking, CallUsage(257, 1), 3.0)
    router.report("a", report("abc"), 2.9)
    assert cached(router, "abcd") == 4, "the engine was asked before the call ended"
    router.report("a", report("abc"), 3.0)
    assert cached(router, "abcd") == 3
    router.report("a", report(removed="ab"), 4.0)
    assert cached(router, "abcd") == 1


def test_a_restarted_engine_has_nothing_but_what_it_says() -> None:
    router = new_router("a", "b")
    for engine in "ab":
        router.report(engine, report("abcd", snapshot=True), 0.0)
    running = router.book(call("xy"), router.select(call("xy"), 1.0), 1.0)
    router.report("a", report("ab", epoch="2", snapshot=True), 2.0)
    assert (cached(router, "abcd", "a"), cached(router, "abcd", "b")) == (2, 4)
    assert cached(router, "xy", running.placement.engine_id) == 2, "calls on their way are still expected"
    router.report("a", report(epoch="3"), 3.0)
    assert cached(router, "abcd", "a") == 0, "even without a snapshot"
    assert router.engines["a"].cache.epoch == "3"


def test_an_engine_that_is_down_keeps_what_it_has() -> None:
    router = new_router("a")
    router.report("a", report("abcd", snapshot=True), 0.0)
    router.health.unreachable("a")
    router.health.answered("a", {"m": None})
    assert (cached(router, "abcd"), router.engines["a"].cache.cursor) == (4, 7)


def test_a_report_in_other_blocks_is_refused_and_the_cache_estimated() -> None:
    router = new_router("a")
    router.report("a", report("ab", snapshot=True), 0.0)
    ended = router.book(call("abcd"), router.select(call("abcd"), 1.0), 1.0)
    router.settle(ended, CallUsage(257, 1), 2.0)
    with pytest.raises(ValueError, match="blocks of 96 tokens, but the prefix tree has blocks of 64"):
        router.report("a", report("zz", granularity=96), 3.0)
    engine = router.engines["a"]
    assert (engine.cache.reports, engine.cache.cursor, engine.view.free_tokens, list(engine.cache.unconfirmed)) == (
        False,
        None,
        None,
        [],
    )
    assert (cached(router, "abcd"), cached(router, "zz")) == (4, 0)
    router.report("a", report("ab", snapshot=True), 4.0)
    assert (engine.cache.reports, cached(router, "abcd")) == (True, 2)


def test_sizes_in_tokens_are_those_of_calls_as_long_as_they_are_here() -> None:
    """With a group of full attention and two windows: a block of each for the first tokens, then of the first only."""
    router, engine_kv = new_router("a"), KvState(300, 30, 0, [KvGroup(16), KvGroup(16, 20), KvGroup(16, 20)])
    cache = router.engines["a"].cache
    router.report("a", msgspec.structs.replace(report("ab", snapshot=True), kv=engine_kv), 0.0)
    assert (cache.told_tokens, cache.free_tokens) == (100 * 16, 10 * 16)
    booking = router.book(call("a" * 25), router.select(call("a" * 25), 1.0), 1.0)
    mean_tokens = 25 * 64 + 1 + cache.view.ledger.mean_output_tokens
    router.report("a", msgspec.structs.replace(report(), kv=engine_kv), 2.0)
    blocks = ceil(mean_tokens / 16)
    assert cache.told_tokens == 300 * 16 * blocks // (blocks + 40)
    assert cache.view.free_tokens == cache.free_tokens == 30 * 16 * blocks // (blocks + 40)
    router.settle(booking, CallUsage(1601, 1), 3.0)


def test_an_engine_without_reports_is_taken_to_keep_what_fits_least_lately_used_first_out() -> None:
    router = new_router("a", kv_tokens=6 * 64 + 63)
    router.no_reports("a")
    now_s = 0.0
    for text in ("abc", "xyz", "abc", "pq"):
        booking = router.book(call(text), router.select(call(text), now_s), now_s)
        router.settle(booking, CallUsage(1, 1), now_s + 1)
        now_s += 2
    assert [cached(router, text) for text in ("abc", "xyz", "pq")] == [3, 1, 2]
    assert router.engines["a"].view.residency.resident.blocks == 6


def test_running_calls_are_not_evicted_from_an_estimate() -> None:
    router = new_router("a", kv_tokens=2 * 64)
    router.no_reports("a")
    running = router.book(call("abcd"), router.select(call("abcd"), 0.0), 0.0)
    other = router.book(call("xy"), router.select(call("xy"), 0.0), 0.0)
    router.settle(other, CallUsage(1, 1), 1.0)
    assert (cached(router, "abcd"), cached(router, "xy")) == (4, 2)
    router.settle(running, CallUsage(1, 1), 2.0)
    assert (cached(router, "abcd"), cached(router, "xy")) == (2, 0)


def test_until_its_first_report_an_engine_is_estimated() -> None:
    router = new_router("a")
    assert router.engines["a"].cache.reports is None
    booking = router.book(call("abcd"), router.select(call("abcd"), 0.0), 0.0)
    router.settle(booking, CallUsage(257, 1), 1.0)
    assert cached(router, "abcd") == 4
    router.report("a", report("abc", snapshot=True), 2.0)
    assert cached(router, "abcd") == 3


def test_an_engine_that_stops_reporting_is_taken_to_have_stored_what_ended_unconfirmed() -> None:
    router = new_router("a")
    router.report("a", report(snapshot=True), 0.0)
    booking = router.book(call("abcd"), router.select(call("abcd"), 1.0), 1.0)
    router.release(booking, 2.0, delivered=True)
    router.no_reports("a")
    assert cached(router, "abcd") == 4
    router.age(1_000.0)
    assert router.engines["a"].view.residency.resident.blocks == len(router.tree) == 4
    check(router)


def test_ageing_lets_go_of_what_no_engine_holds() -> None:
    router = new_router("a")
    router.report("a", report(snapshot=True), 0.0)
    booking = router.book(call("abcd"), router.select(call("abcd"), 10.0), 10.0)
    router.settle(booking, CallUsage(257, 1), 11.0)
    router.report("a", report("a"), 12.0)
    assert len(router.tree) == 4, "the call still counts as sharing it"
    router.age(190.0)
    assert len(router.tree) == 4
    router.age(190.1)
    assert len(router.tree) == 1


# Room for a call on its way.


@pytest.mark.parametrize("streams", [True, False])
def test_a_call_on_its_way_pushes_out_the_oldest_prefix_until_it_has_its_room(streams: bool) -> None:
    router = new_router("a")
    router.report("a", report("abcdef", "wxyz", snapshot=True, free=4), 0.0)  # one tree block is free
    large = call("mnopq")
    booking = router.book(large, router.select(large, 1.0), 1.0)
    router.report("a", report(free=4), 1.5)
    assert (cached(router, "abcdef"), cached(router, "wxyz")) == (2, 4), "four blocks more than are free, and a token"
    if streams:
        router.first_token(booking, 2.0)
    else:
        router.settle(booking, CallUsage(321, 5, 0), 2.0)
    assert cached(router, "abcdef") == 6, "what the engine did not report as evicted is there"
    check(router)


def test_a_call_that_was_not_delivered_pushes_nothing_out() -> None:
    router = new_router("a")
    router.report("a", report("abcdef", snapshot=True, free=0), 0.0)
    large = call("mnopq")
    booking = router.book(large, router.select(large, 1.0), 1.0)
    router.report("a", report(free=0), 1.5)
    assert cached(router, "abcdef") == 1
    router.release(booking, 2.0, delivered=False)
    assert cached(router, "abcdef") == 6
    check(router)
