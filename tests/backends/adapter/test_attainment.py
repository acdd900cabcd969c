"""What an engine says of the promises that it kept."""

from __future__ import annotations

import pytest

from plait.backends.adapter.state_reporter import RECENT_CALLS, Attainment
from plait.backends.profiles import load_profile
from plait.lab.embedded.call import EmbeddedCall
from plait.lab.embedded.engine import Engine, EngineSettings
from plait.lab.embedded.hash_chain import HashChain
from plait.policy.prefix.block_hash import root_hash
from plait.policy.scheduling.plan import LocalCall
from plait.policy.types import Slo


def told(slo: Slo | None, tokens_at_s: list[float], ended_s: float, zero_s: float = 100.0) -> float | None:
    """The share after one call with these tokens."""
    attainment = Attainment()
    attainment.received("a", LocalCall("a", zero_s, 10, slo=slo))
    for at_s in tokens_at_s:
        attainment.produced("a", 1, at_s)
    attainment.ended("a", ended_s)
    return attainment.share


@pytest.mark.parametrize(
    ("slo", "tokens_at_s", "share"),
    [
        (Slo(ttft_s=1.0), [101.0, 109.0], 1.0),
        (Slo(ttft_s=1.0), [101.1, 101.2], 0.0),
        (Slo(tpot_s=0.5), [109.0, 109.1, 110.0], 1.0),
        (Slo(tpot_s=0.5), [109.0, 109.1, 110.1], 0.0),
        (Slo(tpot_s=0.5), [109.0], 1.0),
        (Slo(jct_s=3.0), [101.0, 103.0], 1.0),
        (Slo(jct_s=3.0), [101.0, 103.1], 0.0),
        (Slo(ttft_s=1.0, tpot_s=0.5, jct_s=3.0), [101.0, 101.5, 102.0], 1.0),
        (Slo(ttft_s=1.0, tpot_s=0.5, jct_s=1.5), [101.0, 101.5, 102.0], 0.0),
    ],
)
def test_every_objective_is_to_be_met(slo: Slo, tokens_at_s: list[float], share: float) -> None:
    assert told(slo, tokens_at_s, tokens_at_s[-1]) == share


def test_without_objectives_there_is_nothing_to_meet() -> None:
    assert told(None, [101.0], 101.0) is None


def test_several_tokens_may_come_at_once() -> None:
    attainment = Attainment()
    attainment.received("a", LocalCall("a", 0.0, 10, slo=Slo(tpot_s=0.5)))
    attainment.produced("a", 0, 0.5)
    attainment.produced("a", 2, 1.0)
    attainment.produced("a", 2, 2.4)
    attainment.ended("a", 2.4)
    assert attainment.share == 1.0


@pytest.mark.parametrize(
    ("slo", "ended_s", "share"),
    [
        (Slo(ttft_s=1.0), 100.9, None),
        (Slo(ttft_s=1.0), 101.1, 0.0),
        (Slo(jct_s=3.0), 103.1, 0.0),
        (Slo(tpot_s=0.1), 900.0, None),
    ],
)
def test_a_call_given_up_without_a_token_counts_once_it_is_overdue(
    slo: Slo, ended_s: float, share: float | None
) -> None:
    assert told(slo, [], ended_s) == share


def test_a_call_given_up_counts_for_what_it_had() -> None:
    assert told(Slo(ttft_s=1.0, jct_s=3.0), [100.5, 101.0], 200.0) == 1.0


def test_a_call_ends_once() -> None:
    attainment = Attainment()
    attainment.received("a", LocalCall("a", 0.0, 10, slo=Slo(ttft_s=1.0)))
    attainment.received("b", LocalCall("b", 0.0, 10, slo=Slo(ttft_s=1.0)))
    attainment.produced("a", 1, 0.5)
    attainment.ended("a", 0.5)
    attainment.retain({"b"}, 3.0)
    assert attainment.share == 1.0
    attainment.retain({}, 3.0)
    attainment.ended("b", 3.0)
    assert attainment.share == 0.5


def test_only_the_latest_calls_count() -> None:
    attainment = Attainment()
    for number in range(2 * RECENT_CALLS):
        attainment.received(number, LocalCall("a", 0.0, 10, slo=Slo(ttft_s=1.0)))
        attainment.produced(number, 1, 0.5 if number >= RECENT_CALLS else 2.0)
        attainment.ended(number, 2.0)
    assert attainment.share == 1.0


def embedded_call(name: str, ttft_s: float | None, output_tokens: int = 2) -> EmbeddedCall:
    tokens = [ord(letter) for letter in name] * 100
    chain = HashChain(64, root_hash("m"), tokens)
    slo = Slo(ttft_s=ttft_s) if ttft_s else None
    return EmbeddedCall(
        name, 0.0, len(tokens), slo=slo, chain=chain, tree_chain=chain, final_output_tokens=output_tokens
    )


def test_the_embedded_engine_reports_it() -> None:
    settings = EngineSettings(name="e", model="m", kv_tokens=4000, block_tokens=64)
    engine = Engine(settings, load_profile("a6000-mistral-7b").cost_model())
    reported = []
    for calls in ([("free", None)], [("met", 60.0), ("missed", 1e-6)]):
        for name, ttft_s in calls:
            engine.add(embedded_call(name, ttft_s))
        now_s: float | None = 0.0
        while now_s is not None:
            now_s = engine.step(now_s).ends_s
        reported.append(engine.cache_state().scheduler.slo_attainment)
    assert reported == [None, 0.5]


def test_the_embedded_engine_counts_a_call_that_is_ended_early() -> None:
    settings = EngineSettings(name="e", model="m", kv_tokens=4000, block_tokens=64)
    engine = Engine(settings, load_profile("a6000-mistral-7b").cost_model())
    call, unserved = embedded_call("ended", 60.0, 100), embedded_call("unserved", 60.0)
    engine.add(call)
    first = engine.step(0.0)
    assert first.ends_s is not None
    engine.step(first.ends_s)
    assert call.sent_tokens == 1
    engine.remove(call)
    engine.add(unserved)
    engine.abort(unserved)
    assert engine.cache_state().scheduler.slo_attainment == 1.0
