"""Engines without reports hold the answers that they gave, as the next turn shows; a tree block has 64 tokens."""

from __future__ import annotations

from plait.gateway.fleet.booking import CallUsage
from plait.gateway.fleet.router import Router
from plait.policy.prefix.block_hash import chain, whole_hash
from plait.policy.types import Call
from tests.gateway.fleet.lettered_prompts import new_router, report
from tests.invariants import check

ROOT = 3
PROMPT = [*range(100)]
ANSWER = [*range(500, 700)]
NEXT_TURN = [*PROMPT, *ANSWER, *range(20)]


def call(tokens: list[int]) -> Call:
    hashes = chain(tokens, 64, ROOT)
    whole = whole_hash(tokens[64 * len(hashes) :], hashes[-1] if hashes else ROOT)
    return Call("c", "m", len(tokens), 64, hashes, prompt_hash=whole, tokens=tokens)


def answer(router: Router, tokens: list[int], usage: CallUsage) -> None:
    booking = router.book(call(tokens), router.select(call(tokens), 0.0), 0.0)
    router.settle(booking, usage, 1.0)


def cached_tokens(router: Router, tokens: list[int]) -> int:
    """As predicted for a prompt that has arrived."""
    router.answers.arrived(tokens, chain(tokens, 64, ROOT), ROOT, None)
    check(router)
    return router.select(call(tokens), 2.0).cached_tokens


def estimated(kv_tokens: int | None = None) -> Router:
    router = new_router("a", kv_tokens=kv_tokens)
    router.no_reports("a")
    return router


def test_the_next_turn_finds_the_answer() -> None:
    router = estimated()
    answer(router, PROMPT, CallUsage(100, 200))
    assert cached_tokens(router, PROMPT) == 64
    assert cached_tokens(router, NEXT_TURN) == 256, "299 tokens are stored"
    assert cached_tokens(router, [*PROMPT[:-1], 7, *ANSWER]) == 64, "the prompt before was another"


def test_an_engine_that_reports_says_itself_what_it_generated() -> None:
    router = new_router("a")
    router.report("a", report(snapshot=True), 0.0)
    answer(router, PROMPT, CallUsage(100, 200))
    assert cached_tokens(router, NEXT_TURN) == 64


def test_an_engine_that_begins_to_report_is_believed() -> None:
    router = estimated()
    answer(router, PROMPT, CallUsage(100, 200))
    router.report("a", report(snapshot=True), 3.0)
    assert cached_tokens(router, NEXT_TURN) == 0


def test_nothing_is_learnt_of_prompts_that_the_engine_counts_differently() -> None:
    router = estimated()
    answer(router, PROMPT, CallUsage(90, 200))
    assert cached_tokens(router, NEXT_TURN) == 64


def test_the_answer_counts_only_behind_a_prompt_that_is_still_there() -> None:
    router = estimated(kv_tokens=3 * 64)
    answer(router, PROMPT, CallUsage(100, 200))
    answer(router, [*range(1000, 1192)], CallUsage(192, 1))
    assert cached_tokens(router, NEXT_TURN) == 0, "three blocks came after it"


def test_the_answer_takes_room() -> None:
    router = estimated(kv_tokens=4 * 64)
    answer(router, [*range(1000, 1128)], CallUsage(128, 1))
    answer(router, PROMPT, CallUsage(100, 200))
    assert cached_tokens(router, NEXT_TURN) == 256
    assert cached_tokens(router, [*range(1000, 1129)]) == 0


def test_a_new_process_has_none_of_the_answers() -> None:
    router = estimated()
    answer(router, PROMPT, CallUsage(100, 200))
    router.no_reports("a", is_new=True)
    router.no_reports("a")
    assert cached_tokens(router, NEXT_TURN) == 0
    router.engines["a"].draining = True
    router.remove_engine("a")
    router.answers.arrived(NEXT_TURN, chain(NEXT_TURN, 64, ROOT), ROOT, None)
    check(router)
