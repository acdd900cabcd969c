"""Calls with a TTFT objective behind long prompts on a real engine: in which order and steps it computes them.

Steps are those of the engine's own log. How long they take is left open: objectives are set by what the machine does.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import pytest
from openai import OpenAI

from e2e.real_engines.engine import BATCH_TOKENS, MODEL, EngineKind, RealEngine, Step
from e2e.real_engines.fleet import EngineFleet
from e2e.real_engines.greedy import greedy_outputs
from e2e.real_engines.reference import Reference
from e2e.sdk import sync_client
from e2e.server_process import eventually
from tests.waiting import WITHIN_S

SHORT_TOKENS: Final = 64
LONG: Final = ("long-1", "long-2")
SHORT: Final = ("short-1", "short-2", "short-3")


@dataclass(frozen=True)
class Round:
    """Long prompts and short ones behind them: texts by call, whose first token came when, and the engine's steps."""

    outputs: dict[str, str]
    first_tokens: list[str]
    steps: list[Step]
    short_waited_s: float
    long_tokens: int

    @property
    def stock_steps(self) -> int:
        """Steps that a stock engine, first come first served, needs for the long prompts before the short ones."""
        return -(-len(LONG) * self.long_tokens // BATCH_TOKENS)

    @property
    def steps_before_output(self) -> int:
        """Steps until a call had a token, which is the first input of its next step."""
        return next(number for number, step in enumerate(self.steps) if step.decoding_calls)


@pytest.fixture(scope="module")
def engine(fleet: EngineFleet) -> RealEngine:
    """One of the fleet's, whose local scheduler is `slo`. No other call comes to it meanwhile."""
    return fleet.engines["engine-1"]


@pytest.fixture(scope="module")
def unpromised(engine: RealEngine, kind: EngineKind) -> Round:
    """Nothing is said about any call."""
    return run_round(engine, "unpromised", kind.overtaken_tokens, {})


@pytest.fixture(scope="module")
def promised(engine: RealEngine, unpromised: Round) -> Round:
    """The short calls shall have their first token in half the time that they have waited without a promise."""
    objective = {"plait_ttft_ms": unpromised.short_waited_s * 1e3 / 2}
    return run_round(engine, "promised", unpromised.long_tokens, objective)


def run_round(engine: RealEngine, salt: str, long_tokens: int, annotations: dict[str, float]) -> Round:
    """Send the short calls while the first long prompt is computed; `salt` keeps rounds out of each other's cache."""
    engine.settled_state()
    before = len(engine.steps())
    first_tokens: list[str] = []
    waited_s: list[float] = []
    with sync_client(engine, timeout=WITHIN_S) as client, ThreadPoolExecutor() as pool:

        def run(name: str) -> str:
            sent_s, text = time.monotonic(), ""
            fields = {"cache_salt": salt, engine.annotations_field: own(name, annotations)}
            for piece in ask(client, name, long_tokens, fields):
                if not text:
                    first_tokens.append(name)
                    waited_s.append(time.monotonic() - sent_s)
                text += piece
            return text

        calls = {}
        for already, name in enumerate(LONG, start=1):
            calls[name] = pool.submit(run, name)
            eventually(lambda n=already: engine.outstanding_calls() == n)  # type: ignore[misc]
        calls.update({name: pool.submit(run, name) for name in SHORT})
        outputs = {name: call.result() for name, call in calls.items()}
    engine.settled_state()
    waits = dict(zip(first_tokens, waited_s, strict=True))
    return Round(outputs, first_tokens, engine.steps()[before:], min(waits[name] for name in SHORT), long_tokens)


def own(name: str, annotations: dict[str, float]) -> dict[str, float]:
    """The annotations of a call: short calls carry them."""
    return {} if name in LONG else annotations


def ask(client: OpenAI, name: str, long_tokens: int, fields: dict[str, Any]) -> Iterator[str]:
    """The pieces of a call's output."""
    rng = random.Random(name)
    prompt = [rng.randrange(10, 8000) for _ in range(long_tokens if name in LONG else SHORT_TOKENS)]
    stream = client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=8, temperature=0, stream=True, extra_body={"ignore_eos": True, **fields}
    )
    for chunk in stream:
        yield from (choice.text for choice in chunk.choices if choice.text)


def test_without_promises_the_long_prompts_come_first_as_they_do_in_a_stock_engine(unpromised: Round) -> None:
    assert unpromised.first_tokens[0] == LONG[0]
    behind = unpromised.steps[: unpromised.stock_steps]
    assert max(step.decoding_calls for step in behind) == 1, "the first long one, while the second is computed"


def test_promised_calls_have_their_first_token_before_the_long_prompts_are_through(promised: Round) -> None:
    assert set(promised.first_tokens[: len(SHORT)]) == set(SHORT)
    assert promised.steps_before_output < promised.stock_steps
    later = promised.steps[promised.steps_before_output :]
    assert sum(step.context_tokens for step in later) > promised.long_tokens, (
        "at least one long prompt was still to be computed"
    )


def test_they_share_the_step_with_a_long_prompt(promised: Round) -> None:
    step = promised.steps[promised.steps_before_output - 1]
    assert step.context_calls > 1
    assert step.context_tokens > (step.context_calls - 1) * SHORT_TOKENS


def test_they_decode_while_the_long_prompts_are_computed(promised: Round) -> None:
    shared = [step for step in promised.steps if step.context_tokens and step.decoding_calls]
    most = max(step.decoding_calls for step in shared)
    assert most in {len(SHORT), len(SHORT) + 1}, "beside them perhaps the first long one, while the second is computed"


def test_nothing_is_computed_twice(unpromised: Round, promised: Round) -> None:
    tokens = len(LONG) * promised.long_tokens + len(SHORT) * SHORT_TOKENS
    for done in (unpromised, promised):
        assert sum(step.context_tokens for step in done.steps) == tokens
        assert max(step.context_tokens + step.decoded_tokens for step in done.steps) <= BATCH_TOKENS


def test_the_order_changes_no_token(unpromised: Round, promised: Round) -> None:
    assert promised.outputs == unpromised.outputs
    assert len(set(promised.outputs.values())) == len(promised.outputs), "else equal outputs would mean little"


def test_the_engine_reports_whether_promises_were_kept(engine: RealEngine, promised: Round) -> None:
    """Other calls with promises came to it before, so its share of kept ones has to fall and to rise."""
    assert engine.cache_state().scheduler.policy == "slo"
    broken, kept = (attainment_after(engine, ttft_ms) for ttft_ms in (0.001, 60_000.0))
    assert broken < kept


def attainment_after(engine: RealEngine, ttft_ms: float) -> float:
    """The engine's share of kept promises after one more call, which is promised its first token in this time."""
    body = {"model": MODEL, "prompt": "Hello", "max_tokens": 2, engine.annotations_field: {"plait_ttft_ms": ttft_ms}}
    assert engine.post("/v1/completions", json=body).status_code == 200
    attainment = engine.settled_state().scheduler.slo_attainment
    assert attainment is not None
    return attainment


def test_calls_without_a_promise_say_what_a_stock_engine_says(
    reference: Reference, engine: RealEngine, promised: Round
) -> None:
    assert greedy_outputs(engine) == reference.stock
