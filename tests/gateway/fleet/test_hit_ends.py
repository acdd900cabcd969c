"""A router and an engine that tells where hits can end; a block is a letter of 64 tokens."""

from __future__ import annotations

from math import inf

import msgspec
import pytest

from plait.backends.protocol.cache_state import CacheState, HitEnds, KvState, OutstandingCall, StoredRun
from plait.gateway.fleet.booking import Booking, CallUsage
from plait.gateway.fleet.router import Router
from plait.policy.costs.cost_model import CostModel, LongAttention, PiecewiseLinear
from plait.policy.prefix.block_hash import chain
from plait.policy.types import Call
from tests.invariants import check

BLOCK = 64
COSTS = CostModel(PiecewiseLinear(((0, 0.010),), 0.001), 0.0, 0.0, 0.0, LongAttention())


def hashes(text: str) -> list[int]:
    return list(chain(list(text.encode()), 1, 0))


class Fleet:
    """A router with one engine, which reports as the test says."""

    def __init__(self, *, interval_tokens: int = 0) -> None:
        self.router = Router()
        self.router.add_engine("a", COSTS)
        self.router.health.answered("a", {"m": None})
        self.interval_tokens = interval_tokens
        self.cursor = 0

    def report(
        self, *stored: str, ends: tuple[str, ...] | None = (), closed: tuple[str, ...] = (), at_s: float = inf,
        **fields: object,
    ) -> None:  # fmt: skip
        self.cursor += 1
        told = None
        if ends is not None:
            opened = [(hashes(text)[-1], 1) for text in ends]
            told = HitEnds(BLOCK, self.interval_tokens, opened, closed=[hashes(text)[-1] for text in closed])
        state = CacheState(
            engine="a", kind="vllm", epoch="1", cursor=self.cursor, model="m", block_tokens=16,
            granularity_tokens=BLOCK, snapshot=False, stored=[StoredRun(None, hashes(text)) for text in stored],
            removed=[], kv=KvState(1_000, 900, 0), ends=told,
        )  # fmt: skip
        now_s = float(self.cursor)
        self.router.report("a", msgspec.structs.replace(state, **fields), min(at_s, now_s), now_s=now_s)
        check(self.router)

    def call(self, text: str, rest_tokens: int = 1) -> Call:
        return Call("c", "m", BLOCK * len(text) + rest_tokens, BLOCK, hashes(text))

    def predicted(self, text: str, rest_tokens: int = 1) -> int:
        """The blocks that a call is expected to find."""
        booking = self.book(text, rest_tokens)
        self.router.release(booking, float(self.cursor), delivered=False)
        return booking.placement.cached_tokens // BLOCK

    def book(self, text: str, rest_tokens: int = 1) -> Booking:
        call = self.call(text, rest_tokens)
        return self.router.book(call, self.router.select(call, float(self.cursor)), float(self.cursor))


def test_a_turn_finds_the_last_prompt_and_not_its_answer() -> None:
    fleet = Fleet()
    fleet.report()
    turn = fleet.book("abc")
    assert fleet.predicted("abcXYd") == 3, "as soon as it is booked"
    fleet.router.first_token(turn, 1.5)
    fleet.report("abc", ends=("abc",))
    fleet.router.settle(turn, CallUsage(3 * BLOCK + 1, 2 * BLOCK), 2.5)
    fleet.report("abcXY")
    assert fleet.predicted("abcXYd") == 3
    fleet.report(closed=("abc",))
    assert fleet.predicted("abcXYd") == 0, "its window is gone, full attention has all"


def test_the_third_call_of_a_shared_prefix_is_the_first_to_hit_it() -> None:
    fleet = Fleet()
    fleet.report("abcde", ends=("abcde",))
    assert fleet.predicted("abcxy") == 0
    fleet.book("abcxy")
    assert fleet.predicted("abcz") == 3


def test_the_prompts_last_token_is_computed_and_so_is_what_comes_after_the_last_end() -> None:
    fleet = Fleet()
    fleet.report("abcd", ends=("ab", "abcd"))
    assert fleet.predicted("abcd", rest_tokens=0) == 2
    assert fleet.predicted("abcd", rest_tokens=1) == 4


def test_ends_of_calls_are_expected_until_a_report_after_their_first_tokens() -> None:
    fleet = Fleet()
    fleet.report()
    turn = fleet.book("abc")
    fleet.report()
    fleet.router.first_token(turn, 2.5)
    fleet.report("abc", at_s=2.2)
    assert fleet.predicted("abcd") == 3, "the report is older than the first token"
    fleet.report()
    assert fleet.predicted("abcd") == 0


def test_with_an_interval_calls_leave_more_ends() -> None:
    fleet = Fleet(interval_tokens=2 * BLOCK)
    fleet.report()
    fleet.book("abcdefg")
    assert [fleet.predicted(text) for text in ("abx", "abcx", "abcdex", "abcdefgx")] == [2, 2, 4, 7]


def test_ends_of_other_gateways_calls_are_expected() -> None:
    fleet = Fleet()
    fleet.report("ab", ends=())
    other = OutstandingCall(1, "another", 4 * BLOCK + 1, 2 * BLOCK + 1, False, False, hashes("abcd"))
    fleet.report(calls=[other])
    assert fleet.router.engines["a"].view.queue.tokens == 4 * BLOCK + 1, "the two blocks before are no hit"
    assert fleet.predicted("abcdx") == 4
    assert fleet.predicted("abx") == 2, "the junction"
    fleet.report(ended=[1], calls=[])
    assert fleet.predicted("abcdx") == 0


@pytest.mark.parametrize("ends", [None, ()])
def test_an_adapter_that_tells_no_ends_has_one_after_each_block(ends: tuple[str, ...] | None) -> None:
    fleet = Fleet()
    fleet.report("abcd", ends=ends)
    assert fleet.predicted("abcx") == (3 if ends is None else 0)


def test_a_cache_that_is_not_told_in_full_is_estimated() -> None:
    fleet = Fleet()
    fleet.report("abcd", ends=None, untold="where hits of its states can end")
    engine = fleet.router.engines["a"]
    assert engine.cache.problem == "the engine does not tell where hits of its states can end: its cache is estimated"
    assert not engine.cache.reports
    assert fleet.predicted("abcd") == 0
    fleet.router.settle(fleet.book("abcd"), CallUsage(4 * BLOCK + 1, 3, 0), 2.0)
    assert fleet.predicted("abcde") == 4


def test_a_restart_with_another_model_forgets_the_ends() -> None:
    fleet = Fleet()
    fleet.report("abcd", ends=("abcd",))
    fleet.report("abc", ends=None, epoch="2", snapshot=True)
    assert fleet.predicted("abcd") == 3
    fleet.report("abcd", ends=(), epoch="3", snapshot=True)
    assert fleet.predicted("abcd") == 0
