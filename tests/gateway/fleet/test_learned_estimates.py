"""An estimated cache learns from answers: an engine that is not what the gateway takes it for is predicted soon."""

from __future__ import annotations

import random

import pytest

from plait.gateway.fleet.engine import degradation
from plait.policy.prefix.block_hash import chain, root_hash
from tests.gateway.fleet.emulated_cache import BLOCK, EmulatedCache, Traffic, questions, run
from tests.invariants import check

TOLD = 256
"""Blocks that the engine seems to have."""


@pytest.mark.parametrize("sums", [False, True], ids=["told by answers", "told by sums"])
@pytest.mark.parametrize("prefixes", [4, 12])
def test_a_right_estimate_stays_right(prefixes: int, sums: bool) -> None:
    traffic = Traffic(EmulatedCache(TOLD), TOLD, sums=sums)
    run(traffic, questions(prefixes, 300, seed=1))
    predicted, found = traffic.shares()
    assert found > 0.5
    assert predicted == pytest.approx(found, abs=0.03)
    assert traffic.share_off() < 0.08


@pytest.mark.parametrize("sums", [False, True], ids=["told by answers", "told by sums"])
@pytest.mark.parametrize(("size", "prefixes"), [(128, 8), (64, 4), (64, 12)])
def test_a_smaller_cache_than_told(size: int, prefixes: int, sums: bool) -> None:
    traffic = Traffic(EmulatedCache(size), TOLD, sums=sums)
    run(traffic, questions(prefixes, 300, seed=2))
    predicted, found = traffic.shares()
    assert 0.05 < found < 0.95
    assert predicted == pytest.approx(found, abs=0.05)
    assert traffic.share_off() < 0.2
    check(traffic.router)


@pytest.mark.parametrize("sums", [False, True], ids=["told by answers", "told by sums"])
def test_caching_that_is_off_is_known_after_twenty_calls(sums: bool) -> None:
    traffic = Traffic(EmulatedCache(0), TOLD, sums=sums)
    run(traffic, questions(6, 120, seed=3))
    assert not any(traffic.predicted[20:])


@pytest.mark.parametrize("prefixes", [4, 8])
def test_windows_keep_hits_at_their_places(prefixes: int) -> None:
    traffic = Traffic(EmulatedCache(10 * TOLD, has_windows=True), 10 * TOLD)
    run(traffic, questions(prefixes, 200, seed=4))
    off = [
        number
        for number, (predicted, found) in enumerate(zip(traffic.predicted, traffic.found, strict=True))
        if abs(predicted - found) > BLOCK
    ]
    assert len(off) <= 10, "the first prompts that branch off a prefix"
    assert max(off) < 40
    assert traffic.shares()[1] > 0.8


def test_other_clients_make_the_cache_smaller() -> None:
    traffic, rng = Traffic(EmulatedCache(TOLD), TOLD), random.Random(5)

    def flush(number: int) -> None:
        traffic.cache.look_up([rng.getrandbits(60) for _ in range(60)])

    run(traffic, questions(8, 300, seed=5), flush)
    predicted, found = traffic.shares()
    assert found < 0.6
    assert predicted == pytest.approx(found, abs=0.06)


def test_a_restart_that_nobody_saw_is_made_up_for() -> None:
    traffic = Traffic(EmulatedCache(TOLD), TOLD)

    def restart(number: int) -> None:
        if number == 150:
            traffic.cache.clear()

    run(traffic, questions(6, 300, seed=6), restart)
    assert traffic.share_off(200) < 0.05


def test_a_cache_that_grows_again_is_used_again() -> None:
    traffic = Traffic(EmulatedCache(40), TOLD)

    def grow(number: int) -> None:
        if number == 150:
            traffic.cache.size = TOLD

    run(traffic, questions(6, 400, seed=7), grow)
    predicted, found = traffic.shares(250)
    assert found > 0.8
    assert predicted == pytest.approx(found, abs=0.05)


def test_conversations_are_predicted_on_an_engine_of_half_the_size() -> None:
    rng, traffic = random.Random(8), Traffic(EmulatedCache(TOLD // 2), TOLD)
    sessions = [[rng.randrange(30_000) for _ in range(4 * BLOCK)] for _ in range(8)]
    for _ in range(400):
        turn = rng.choice(sessions)
        if len(turn) > 40 * BLOCK:
            turn[:] = [rng.randrange(30_000) for _ in range(4 * BLOCK)]
        turn += [rng.randrange(30_000) for _ in range(rng.randint(BLOCK, 4 * BLOCK))]
        traffic.send(turn)
    predicted, found = traffic.shares()
    assert predicted == pytest.approx(found, abs=0.05)
    assert traffic.share_off() < 0.2


def said(traffic: Traffic) -> str | None:
    """What the engine's status says."""
    traffic.router.age(1_000.0)
    return degradation(traffic.router.engines["a"])


def test_an_engine_that_finds_what_is_predicted_is_looked_at_no_closer() -> None:
    traffic = Traffic(EmulatedCache(TOLD), TOLD)
    run(traffic, questions(4, 100, seed=10))
    learned = traffic.router.engines["a"].cache.learned
    assert (learned.is_sure, learned.agreed) == (True, sum(map(bool, traffic.predicted[:-1])))


def test_the_status_says_what_is_seen() -> None:
    right = Traffic(EmulatedCache(TOLD), TOLD)
    run(right, questions(4, 100, seed=9))
    assert said(right) is None
    off = Traffic(EmulatedCache(0), TOLD)
    run(off, questions(4, 40, seed=9))
    assert "caching seems to be off" in (said(off) or "")
    small = Traffic(EmulatedCache(60), TOLD)
    run(small, questions(3, 200, seed=9))
    assert f"and not {TOLD * BLOCK}: other clients" in (said(small) or "")
    windows = Traffic(EmulatedCache(10 * TOLD, has_windows=True), 10 * TOLD)
    run(windows, questions(8, 60, seed=9))
    assert "windows or states" in (said(windows) or "")
    small.router.no_reports("a", is_new=True)
    assert said(small) is None, "another process may answer next"


def test_calls_are_not_kept_while_an_engine_sums_nothing() -> None:
    traffic = Traffic(EmulatedCache(TOLD), TOLD, sums=True)
    run(traffic, questions(4, 20, seed=11))
    cache = traffic.router.engines["a"].cache
    assert cache.sums is not None
    traffic.router.counted("a", None, 1_000.0)
    assert cache.sums is None


def test_sums_of_an_engine_that_counts_fewer_tokens_keep_up() -> None:
    traffic = Traffic(EmulatedCache(TOLD), TOLD, sums=True)
    traffic.counted_part = 0.93
    run(traffic, questions(6, 300, seed=12))
    sums = traffic.router.engines["a"].cache.sums
    assert sums is not None
    assert len(sums.open) <= 2


def test_other_clients_lookups_in_the_sums_are_not_the_gateways() -> None:
    traffic = Traffic(EmulatedCache(TOLD // 2), TOLD, sums=True)
    traffic.others_factor = 2
    run(traffic, questions(8, 300, seed=13))
    predicted, found = traffic.shares()
    assert predicted == pytest.approx(found, abs=0.08)


def test_answers_that_tell_once_do_not_silence_the_sums() -> None:
    traffic = Traffic(EmulatedCache(TOLD), TOLD, sums=True)
    prompts = list(questions(4, 40, seed=14))
    run(traffic, iter(prompts[:20]))
    traffic.tells_once = True
    run(traffic, iter(prompts[20:]))
    assert traffic.router.engines["a"].cache.sums is not None


def test_what_fails_no_more_is_forgotten() -> None:
    traffic = Traffic(EmulatedCache(TOLD), TOLD)

    def restart(number: int) -> None:
        if number == 60:
            traffic.cache.clear()

    run(traffic, questions(6, 500, seed=15), restart)
    assert said(traffic) is None


def test_sessions_get_the_room_that_the_cache_seems_to_have() -> None:
    traffic = Traffic(EmulatedCache(60), TOLD)
    run(traffic, questions(3, 200, seed=16))
    cache = traffic.router.engines["a"].cache
    assert cache.likely_tokens is not None
    assert cache.likely_tokens < TOLD * BLOCK / 2
    assert cache.estimated_tokens == TOLD * BLOCK


def test_a_prompt_under_way_is_no_reason_for_an_engine_without_caching() -> None:
    traffic = Traffic(EmulatedCache(0), TOLD)
    run(traffic, questions(4, 40, seed=17))
    (prompt,) = questions(1, 1, seed=18)
    traffic.send(prompt)  # still open
    view = traffic.router.engines["a"].view
    assert view.residency.cached_blocks(traffic.router.tree.match(chain(prompt, BLOCK, root_hash("m")))) == 0
