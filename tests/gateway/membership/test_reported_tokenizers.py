"""Engines whose tokenizer is not the gateway's: no token ids, an estimated cache, one warning, and the way back."""

from __future__ import annotations

import re
from collections.abc import Sequence

import httpx
import msgspec
import pytest
from structlog.testing import capture_logs

from plait.backends.protocol.cache_state import CacheState, KvState
from plait.backends.protocol.tokenizer_fingerprint import NO_TOKENIZER, TokenizerFingerprint
from plait.gateway.fleet.booking import CallUsage
from plait.gateway.fleet.health import Offer
from plait.gateway.fleet.router import Router
from plait.gateway.fleet.tokenizer_agreement import AGREED, NOT_REPORTED, UNKNOWN, Agreement, TokenizerAgreements
from tests.gateway.fleet.lettered_prompts import cached, call, new_router, report
from tests.gateway.membership.watched_engine import FakeEngine, is_up, until, watching
from tests.gateway.membership.watched_engine import report as polled
from tests.invariants import check

OURS = TokenizerFingerprint("/models/ours", "v", "i", "p", "c")
THEIRS = TokenizerFingerprint("/models/theirs", "w", "j", "q", "c")
WRONG = Agreement(prompts=False, chats=False, problem="another tokenizer")


def agreement(
    reported: TokenizerFingerprint | None, *configured: TokenizerFingerprint | None, adapters: Sequence[str] = ()
) -> Agreement:
    """Of an engine that serves a model for each configured tokenizer, and LoRA adapters of the first."""
    models = {f"m{number}": tokenizer for number, tokenizer in enumerate(configured)}
    offer = Offer(dict.fromkeys([*models, *adapters]), dict.fromkeys(adapters, "m0"))
    return TokenizerAgreements(lambda model: models[model]).of("e", offer, reported)


# What an engine may get.


@pytest.mark.parametrize(
    ("changes", "prompts", "chats", "said"),
    [
        ({"name": "elsewhere"}, True, True, None),
        ({"vocabulary": "x"}, False, False, "the vocabulary"),
        ({"ids": "x"}, False, False, "the ids of a text"),
        ({"prompt_ids": "x"}, False, True, "what is put around a prompt"),
        ({"chats": "x"}, True, False, "the chat template"),
        ({"prompt_ids": "x", "chats": "x"}, False, False, "what is put around a prompt, the chat template"),
        ({"vocabulary": "x", "chats": "x"}, False, False, "the vocabulary, the chat template"),
    ],
)
def test_ids_are_sent_where_all_that_they_depend_on_agrees(
    changes: dict[str, str], prompts: bool, chats: bool, said: str | None
) -> None:
    found = agreement(msgspec.structs.replace(OURS, **changes), OURS)
    assert (found.prompts, found.chats) == (prompts, chats)
    if said is None:
        assert found == AGREED
    else:
        assert found.problem is not None
        assert f"they differ in {said}:" in re.sub(r" \(\w+ here, x there\)", "", found.problem)
        assert (found.configured, found.reported) == (("m0: /models/ours",), "/models/ours")


def test_an_older_adapter_gets_no_ids() -> None:
    assert agreement(None, OURS) is NOT_REPORTED


def test_an_engine_without_a_tokenizer_takes_ids_only() -> None:
    assert agreement(NO_TOKENIZER, OURS) == AGREED


def test_a_gateway_that_counts_bytes_sends_no_ids_in_any_case() -> None:
    assert agreement(THEIRS, None) == AGREED
    assert agreement(None, None) == AGREED


def test_all_models_of_an_engine_have_its_tokenizer() -> None:
    found = agreement(OURS, OURS, THEIRS)
    assert not found.prompts
    assert found.configured == ("m0: /models/ours", "m1: /models/theirs")
    assert agreement(OURS, OURS, None) == AGREED, "one that the gateway only counts bytes for does not matter"


def test_lora_adapters_have_the_tokenizer_of_their_base_model() -> None:
    assert agreement(OURS, OURS, adapters=["lora"]) == AGREED
    assert agreement(THEIRS, OURS, adapters=["lora"]).configured == ("m0: /models/ours",)


def test_equal_reports_are_compared_once() -> None:
    agreements, offer = TokenizerAgreements(lambda _model: OURS), Offer({"m": None})
    found = [agreements.of("e", offer, msgspec.structs.replace(THEIRS)) for _ in range(3)]
    assert found[0] is found[2]
    assert agreements.of("e", offer, OURS) == AGREED, "the engine was restarted"
    agreements.forget("e")
    assert agreements.of("e", offer, OURS) == AGREED


# What the router takes such an engine's cache to have.


def ended(router: Router, text: str, now_s: float) -> None:
    """A call on a prompt, from begin to end."""
    booking = router.book(call(text), router.select(call(text), now_s), now_s)
    router.settle(booking, CallUsage(1, 1), now_s + 0.5)


def test_its_cache_is_estimated() -> None:
    router = new_router("a", kv_tokens=64)
    router.report("a", report("xyz", snapshot=True), 0.0, WRONG)
    ended(router, "abcd", 1.0)
    router.report("a", report("zz"), 2.0, WRONG)
    engine = router.engines["a"]
    assert (cached(router, "abcd"), cached(router, "xyz"), cached(router, "zz")) == (4, 0, 0)
    assert (engine.cache.reports, engine.cache.kind, engine.cache.problem) == (False, "embedded", "another tokenizer")
    assert (engine.cache.cursor, engine.cache.epoch, engine.view.free_tokens) == (7, "1", None)
    assert engine.cache.last_report is not None, "its queue is known all the same"
    check(router)


def test_the_estimate_is_as_large_as_the_reported_cache() -> None:
    router = new_router("a", kv_tokens=64)
    small = msgspec.structs.replace(report(snapshot=True), kv=KvState(12, 12, 0))  # three tree blocks
    router.report("a", small, 0.0, WRONG)
    ended(router, "ab", 1.0)
    ended(router, "wxy", 2.0)
    assert (cached(router, "ab"), cached(router, "wxy")) == (0, 3)


def test_a_restarted_engine_has_an_empty_cache() -> None:
    router = new_router("a")
    router.report("a", report(snapshot=True), 0.0, WRONG)
    ended(router, "abcd", 1.0)
    router.report("a", report(epoch="2", snapshot=True), 2.0, WRONG)
    assert cached(router, "abcd") == 0


def test_with_the_right_tokenizer_after_a_restart_the_reports_count() -> None:
    router = new_router("a")
    router.report("a", report(snapshot=True), 0.0, WRONG)
    ended(router, "abcd", 1.0)
    router.report("a", report("ab", epoch="2", snapshot=True), 2.0)
    cache = router.engines["a"].cache
    assert (cached(router, "abcd"), cache.reports, cache.problem) == (2, True, None)
    assert cache.agreement == AGREED
    check(router)


def test_reports_that_were_not_applied_are_asked_for_again() -> None:
    """The tokenizers agree without a restart, for example as the engine no longer offers a model."""
    router = new_router("a")
    router.report("a", report("xy", snapshot=True), 0.0, WRONG)
    router.report("a", report("ab"), 1.0)
    cache = router.engines["a"].cache
    assert (cache.cursor, cache.epoch, cache.reports, cached(router, "ab")) == (None, None, False, 0)
    router.report("a", report("ab", "xy", snapshot=True), 2.0)
    assert (cache.cursor, cache.reports, cached(router, "ab"), cached(router, "xy")) == (7, True, 2, 2)
    check(router)


def test_what_was_known_stays_when_the_tokenizers_no_longer_agree() -> None:
    router = new_router("a")
    router.report("a", report("ab", snapshot=True), 0.0)
    ended(router, "xyz", 1.0)
    router.report("a", report("zz"), 2.0, WRONG)
    assert (cached(router, "ab"), cached(router, "xyz"), cached(router, "zz")) == (2, 3, 0)
    assert not router.engines["a"].cache.unconfirmed
    check(router)


def test_an_engine_that_cannot_be_reached_gets_no_ids_until_it_reports() -> None:
    """Another one may answer next under its address."""
    router = new_router("a")
    cache = router.engines["a"].cache
    assert cache.agreement is UNKNOWN
    router.report("a", report("ab", snapshot=True), 0.0)
    assert cache.agreement == AGREED
    router.health.unreachable("a")
    router.health.answered("a", {"m": None})
    assert cache.agreement is UNKNOWN
    assert not UNKNOWN.prompts
    assert not UNKNOWN.chats
    router.report("a", report(), 1.0)
    assert cache.agreement == AGREED
    assert cached(router, "ab") == 2, "it was the same one"
    router.no_reports("a")
    assert cache.agreement is UNKNOWN


# What the monitor makes of reports.


def with_tokenizer(tokenizer: TokenizerFingerprint | None, cursor: int = 1, epoch: str = "1") -> CacheState:
    return msgspec.structs.replace(polled(1, cursor=cursor, epoch=epoch), tokenizer=tokenizer)


@pytest.mark.parametrize("reported", [THEIRS, None])
async def test_one_warning_names_both_and_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, reported: TokenizerFingerprint | None
) -> None:
    fake = FakeEngine()
    fake.reports = [with_tokenizer(reported, cursor) for cursor in range(1, 20)]
    with capture_logs() as logs:
        async with watching(monkeypatch, fake, tokenizer=OURS) as router:
            cache = router.engines["a"].cache
            await until(lambda: cache.problem is not None)
            assert is_up(router)
            assert (cache.reports, cache.kind, cache.agreement.prompts) == (False, "embedded", False)
            fake.reports += [with_tokenizer(reported, epoch="2"), with_tokenizer(OURS, epoch="3")]
            await until(lambda: cache.problem is None and not fake.reports)
            assert (cache.reports, cache.agreement) == (True, AGREED)
    (warning,) = (entry for entry in logs if entry["log_level"] == "warning")
    assert (warning["event"], warning["engine"]) == ("token ids not sent", "a")
    assert warning["hint"]
    if reported is not None:
        assert (warning["configured"], warning["reported"]) == ("m: /models/ours", "/models/theirs")
    assert logs[-1]["event"] == "token ids sent again"


async def test_the_models_of_an_engine_with_an_estimated_cache_are_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plait.gateway.membership.monitor.MODELS_INTERVAL_S", 0.001)
    fake = FakeEngine()
    fake.reports = [with_tokenizer(THEIRS)]
    async with watching(monkeypatch, fake, tokenizer=OURS) as router:
        await until(lambda: router.engines["a"].cache.problem is not None)
        asked = len(fake.requests)
        await until(lambda: len([r for r in fake.requests[asked:] if r.url.path == "/base/v1/models"]) > 2)


async def test_a_restart_that_nobody_saw_is_seen_with_the_next_report(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeEngine()
    fake.reports = [with_tokenizer(OURS)]
    async with watching(monkeypatch, fake, tokenizer=OURS) as router:
        cache = router.engines["a"].cache
        await until(lambda: cache.agreement == AGREED)
        fake.reports = [httpx.Response(503), with_tokenizer(THEIRS, epoch="2")]
        await until(lambda: cache.problem is not None and cache.kind is not None)
        assert not cache.agreement.prompts


def test_a_tokenizer_that_is_found_later_counts_for_engines_that_were_there() -> None:
    """Else an engine without ids to compare with would get those of another engine's tokenizer."""
    ours: dict[str, TokenizerFingerprint | None] = {"m": None}
    agreements, offer = TokenizerAgreements(ours.__getitem__), Offer({"m": None})
    assert agreements.of("e", offer, THEIRS) == AGREED
    ours["m"] = OURS
    assert not agreements.of("e", offer, THEIRS).prompts
