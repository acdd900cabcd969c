"""Receipts as JSON for tenants and operators, and as sentences."""

from __future__ import annotations

import json
from pathlib import Path
from struct import pack
from typing import Any

import msgspec
import pytest

from plait.gateway.commands.explain import from_log
from plait.gateway.guests.receipts.receipt import PARTS, WEIGHTS, Candidate, Choice, EndedWait, Limit, Move, Receipt
from plait.gateway.guests.receipts.told import MOST_BYTES, in_header
from plait.gateway.guests.receipts.view import shown
from plait.gateway.guests.receipts.words import sentences


def parts(**seconds: float) -> bytes:
    return pack("<9f", *(seconds.get(part, 0.0) for part in PARTS))


def candidate(engine: str, cached_tokens: int = 0, **seconds: float) -> Candidate:
    return Candidate(engine, cached_tokens, parts(**seconds))


OWN = candidate("engine-1", 1024, queue=0.2, prefill=0.1, decode=0.5, repaid=0.2)
FAR = candidate("engine-2", 4096, queue=2.0, decode=0.5)


def choice(*candidates: Candidate, **fields: Any) -> Choice:
    given = {"reason": "exploit", "rule": "least_delay", "engines": 4, "cached_tokens": 1024, "decode_s": 0.5}
    return Choice(engine="engine-1", candidates=candidates, **{"placed_s": 0.0, "sent_s": 0.4, **given, **fields})


def receipt(*choices: Choice, **fields: Any) -> Receipt:
    given = {"tenant": "t", "request_id": "r-1", "at": 0.0, "path": "/v1/chat/completions", "model": "m"}
    ended = {"status": 200, "outcome": "ok", "prompt_tokens": 2000, "output_tokens": 20, "first_s": 0.5, "e2e_s": 1.5}
    return Receipt(**{**given, **ended, **fields}, choices=choices)


def told(found: Receipt) -> str:
    return " ".join(sentences(shown(found, str)))


def test_a_cost_is_the_sum_of_its_weighted_parts() -> None:
    assert pytest.approx(2 * 0.2 + 2 * 0.1 + 0.5 - 0.2) == OWN.cost_s
    fields = shown(receipt(choice(OWN, FAR)), str)["attempts"][0]["candidates"][0]
    assert sum(part["s"] * part["weight"] for part in fields["parts"].values()) == pytest.approx(fields["cost_s"])
    assert WEIGHTS.keys() == set(PARTS)


def test_a_tenant_sees_no_parts_of_other_engines_and_no_words_of_errors() -> None:
    found = receipt(choice(OWN, FAR), message="the prompt 'secret' is too long")
    own, far = shown(found)["attempts"][0]["candidates"]
    assert own["cached_tokens"] == 1024
    assert far == {"engine": "engine-2", "cost_s": 4.5}
    assert b"secret" not in msgspec.json.encode(shown(found))
    assert shown(found, lambda tenant: f"tenant {tenant}")["tenant"] == "tenant t"


def test_the_agent_that_sent_it_and_the_one_that_began_this_one() -> None:
    assert "agent" not in told(receipt())
    assert " The agent run sent it. " in told(receipt(agent="run"))
    assert " The agent run/a sent it, which run has begun. " in told(receipt(agent="run/a", parent="run"))


@pytest.mark.parametrize(
    ("candidates", "said"),
    [
        ((OWN, FAR), "engine-2 would have cost 3.6 s more."),
        ((OWN, candidate("engine-2", queue=0.55)), "engine-2 would have been about as good (0.2 s more)."),
        ((OWN, candidate("engine-2", queue=0.35)), "engine-2 would have cost 0.2 s less."),
        ((OWN, FAR, candidate("engine-3", queue=0.55)), "engine-3 would have been about as good (0.2 s more)."),
        ((OWN,), "It cost 0.9 s there"),
    ],
)
def test_the_next_engine_is_named_if_it_is_known(candidates: tuple[Candidate, ...], said: str) -> None:
    assert said in told(receipt(choice(*candidates)))


def test_a_bound_of_the_other_engines_is_known_no_more() -> None:
    """Version 0.2.0 gave it; clients that read the field get null."""
    (attempt,) = shown(receipt(choice(OWN, FAR)))["attempts"]
    assert attempt["others_cost_s"] is None


def test_the_whole_story_of_a_call() -> None:
    story = receipt(
        choice(OWN, FAR, ended_by="connect_timeout"),
        choice(OWN, rule="after_failure", meets_slo=False),
        waits=(EndedWait("prompts", 0.25), EndedWait("turn", 0.1)),
        moves=(Move("engine-3", "engine-1", 0.3, 1.25),),
    )
    text = told(story)
    for said in (
        "r-1: a request to /v1/chat/completions for m of 2,000 prompt tokens.",
        "It waited 0.25 s because its engine had enough prompts to compute.",
        "After 0.3 s it went to engine-1 from engine-3, to cost 1.25 s less.",
        "engine-1 failed it: connect_timeout.",
        "the attempt before it had failed",
        "The first token came after 0.5 s, 0.2 s later than expected.",
        "It was answered with 200 with 20 tokens after 1.5 s.",
    ):
        assert said in text


def test_what_was_cached_and_how_long_the_gateway_was_late() -> None:
    found = receipt(choice(OWN, cached_tokens=1_088), cached_tokens=1_104, waits=(EndedWait("gateway", 19.4),))
    text = told(found)
    assert "It waited 19.4 s for the gateway itself, which had too little CPU time or was stopped." in text
    assert "1,104 of 2,000 tokens were cached (1,088 expected)." in text
    assert "cached" not in told(receipt(choice(OWN))), "the engine has not said how many"


def test_a_line_of_the_log_tells_the_same(tmp_path: Path) -> None:
    line = {
        "event": "call", "request_id": "r-1", "path": "/v1/completions", "status": 200, "outcome": "ok", "model": "m",
        "engine": "a", "rule": "only_engine", "prompt_tokens": 2_000, "cached_tokens": 64, "output_tokens": 3,
        "predicted_cached_tokens": 128, "waited_for": {"gateway": 2.5}, "e2e_s": 4.0, "ttft_s": 3.0,
    }  # fmt: skip
    (file := tmp_path / "log").write_text(json.dumps(line))
    text = " ".join(sentences(from_log(file, "r-1")))
    assert "It waited 2.5 s for the gateway itself" in text
    assert "64 of 2,000 tokens were cached (128 expected)." in text
    file.write_text(json.dumps({**line, "predicted_cached_tokens": None}))
    assert "64 of 2,000 tokens were cached." in " ".join(sentences(from_log(file, "r-1")))


def test_a_refusal_names_its_limit() -> None:
    refused = receipt(
        status=429, outcome="refused", code="too_many_waiting", first_s=None, output_tokens=None,
        limit=Limit("max_waiting", 3, 3), retry_after_s=2.0,
    )  # fmt: skip
    text = told(refused)
    assert "It was refused with 429 too_many_waiting: " in text
    assert "The limit max_waiting is 3; 3 were used. It was told to come again in 2 s." in text


def test_a_refusal_of_an_engine_is_no_answer() -> None:
    text = told(receipt(choice(OWN), status=422, outcome="refused", first_s=None, output_tokens=None))
    assert text.endswith("Its engine refused it with 422 after 1.5 s.")


def test_a_header_has_two_kilobytes_at_most() -> None:
    many = [candidate(f"engine-{number}-{'x' * 60}", queue=number) for number in range(40)]
    short = in_header(shown(receipt(choice(OWN, FAR))))
    long = in_header(shown(receipt(choice(OWN, *many, rule="ü"))))
    assert len(short) <= MOST_BYTES
    assert len(long) <= MOST_BYTES
    assert msgspec.json.decode(short)["attempts"][0]["candidates"][0]["parts"]["queue"]["weight"] == 2.0
    assert msgspec.json.decode(long)["attempts"][0]["rule"] == "ü"
    waited = receipt(choice(OWN), waits=(EndedWait("tenant_share", 0.123456),) * 64, cached_tokens=7)
    assert len(in_header(shown(waited))) <= MOST_BYTES
    assert msgspec.json.decode(in_header(shown(waited)))["cached_tokens"] == 7
