"""Reports that cannot be true: they are refused, or harmless. No report ends a task or loses a booking."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.backends.protocol.cache_state import (
    CacheState,
    HitEnds,
    IterationState,
    KvState,
    QueueState,
    SchedulerState,
    StoredRun,
)
from plait.backends.protocol.tokenizer_fingerprint import TokenizerFingerprint
from plait.gateway.fleet.booking import Booking, CallUsage
from plait.gateway.fleet.router import Router
from plait.policy.costs.cost_model import CostModel, LongAttention, PiecewiseLinear
from plait.policy.prefix.block_hash import chain
from plait.policy.types import Call
from tests.invariants import check, check_progress

COSTS = CostModel(PiecewiseLinear(((0, 0.010),), 0.001), 0.0, 0.0, 0.0, LongAttention())
PROMPTS = [chain(prompt, 1, 0) for prompt in ([0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 0, 0], [1, 1, 1, 1])]
HASHES = st.sampled_from(sorted({block for prompt in PROMPTS for block in prompt} | {0, 7, 2**64 - 1}))
RUNS = st.builds(StoredRun, st.none() | HASHES, st.lists(HASHES, max_size=6))
OPENED = st.lists(st.tuples(HASHES, st.integers(-1, 9)), max_size=4)
INSIDE = st.tuples(HASHES, st.integers(0, 64), HASHES)
ENDS = st.none() | st.builds(
    HitEnds,
    st.sampled_from([0, 16, 64]),
    st.just(0),
    OPENED,
    st.lists(INSIDE, max_size=2),
    st.lists(HASHES, max_size=3),
)


def report(*runs: StoredRun, removed: tuple[int, ...] = (), cursor: int = 1, **fields: object) -> CacheState:
    state = CacheState(
        engine="a", kind="embedded", epoch="1", cursor=cursor, model="m", block_tokens=16, granularity_tokens=64,
        snapshot=False, stored=list(runs), removed=list(removed), kv=KvState(100, 50, 0),
    )  # fmt: skip
    return msgspec.structs.replace(state, **fields)


def fleet() -> Router:
    router = Router()
    for name in "ab":
        router.add_engine(name, COSTS, kv_tokens=320)
        router.health.answered(name, {"m": None})
    return router


STEPS = st.one_of(
    st.tuples(st.just("report"), st.tuples(st.lists(RUNS, max_size=3), ENDS), st.lists(HASHES, max_size=3)),
    st.tuples(st.just("call"), st.integers(0, 3), st.just(None)),
    st.tuples(st.just("end"), st.integers(0, 20), st.just(None)),
    st.tuples(st.just("age"), st.integers(1, 200), st.just(None)),
)


@given(st.lists(STEPS, max_size=30))
def test_whatever_an_engine_reports_calls_are_placed_and_books_return_to_zero(
    steps: list[tuple[str, Any, Any]],
) -> None:
    router, now_s, running = fleet(), 0.0, list[Booking]()
    for kind, first, second in steps:
        now_s += 1
        if kind == "report":
            with suppress(ValueError):
                runs, ends = first
                router.report("a", report(*runs, removed=tuple(second), cursor=int(now_s), ends=ends), now_s)
                check(router)
        elif kind == "call":
            call = Call("c", "m", 4 * 64 + 1, 64, PROMPTS[first])
            running.append(router.book(call, router.select(call, now_s), now_s))
        elif kind == "end" and running:
            booking = running.pop(first % len(running))
            router.settle(booking, CallUsage(257, 3, 64), now_s)
        elif kind == "age":
            now_s += first
            router.age(now_s)
    for booking in running:
        router.release(booking, now_s, delivered=False)
    router.age(now_s + 1_000)
    for engine in router.engines.values():
        assert (engine.view.outstanding, len(engine.view.ledger)) == (0, 0)
        check_progress(engine.progress, 0)
        assert engine.view.residency.resident.blocks >= 0


@pytest.mark.parametrize(
    "runs",
    [
        [StoredRun(None, [1, 2, 1])],
        [StoredRun(None, [1, 2]), StoredRun(None, [3, 2])],
        [StoredRun(None, [1, 2]), StoredRun(2, [1])],
        [StoredRun(None, [1, 2]), StoredRun(2, [3, 3])],
    ],
    ids=["a circle in a run", "a block after two", "a circle over runs", "twice in a row"],
)
def test_a_report_that_contradicts_itself_is_refused_and_residency_reset(runs: list[StoredRun]) -> None:
    router = fleet()
    router.report("a", report(StoredRun(None, [9, 8])), 0.0)
    with pytest.raises(ValueError, match="two different"):
        router.report("a", report(*runs, cursor=2), 1.0)
    engine = router.engines["a"]
    assert (engine.cache.reports, engine.cache.cursor, engine.view.residency.resident.blocks) == (False, None, 0)
    check(router)
    router.report("a", report(StoredRun(None, [9, 8]), snapshot=True), 2.0)
    assert (engine.cache.reports, engine.view.residency.resident.blocks) == (True, 2)


def test_a_block_that_an_eviction_shows_to_be_in_two_places_resets_residency() -> None:
    router = fleet()
    router.report("a", report(StoredRun(None, [5, 7]), StoredRun(None, [0, 5])), 0.0)
    with pytest.raises(ValueError, match="two different"):
        router.report("a", report(removed=(7,), cursor=2), 1.0)
    assert router.engines["a"].view.residency.resident.blocks == 0
    check(router)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"engine": "x" * 9_999}, "names"),
        ({"tokenizer": TokenizerFingerprint("x" * 9_999, "", "", "", "")}, "names"),
        ({"tokenizer": TokenizerFingerprint("", "", "", "", "x" * 9_999)}, "names"),
        ({"block_tokens": 0}, "no tokens"),
        ({"kv": KvState(10, 11, 0)}, "add up"),
        ({"kv": KvState(10, -1, 0)}, "add up"),
        ({"kv": KvState(2**60, 0, 0)}, "add up"),
        ({"kv": KvState(1, 1, 0), "stored": [StoredRun(None, [1, 2, 3, 4, 5])]}, "more than fits"),
        ({"cursor": -1}, "a count"),
        ({"queue": QueueState(waiting=-3)}, "a count"),
        ({"scheduler": SchedulerState(slots=-1)}, "a count"),
        ({"scheduler": SchedulerState(slots=2**60)}, "a count"),
        ({"queue": QueueState(mean_queue_s=float("nan"))}, "a time"),
        ({"queue": QueueState(mean_queue_s=-1.0)}, "a time"),
        ({"iteration": IterationState(mean_s=float("inf"))}, "a time"),
    ],
)
def test_a_report_that_cannot_be_true_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        fleet().report("a", report(**fields), 0.0)


@given(
    st.binary(max_size=60)
    | st.recursive(st.none() | st.integers(0, 2**63) | st.text(max_size=3), st.lists).map(msgspec.msgpack.encode)
)
def test_bytes_that_are_no_report_are_a_decode_error(body: bytes) -> None:
    with suppress(msgspec.DecodeError):
        msgspec.msgpack.decode(body, type=CacheState).check()
