"""What an engine gets of a request's body: the client's bytes, unless something has to be added or taken out."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from plait.backends.protocol.openai import ChatRequest, CompletionRequest, parse_request
from plait.gateway.calls.outgoing import FIELDS, STREAM_INTERVAL, OutgoingBody, Recipient, unhurried
from plait.gateway.fleet.tokenizer_agreement import AGREED, UNKNOWN, Agreement
from plait.policy.types import Call, Objective, Placement, PlacementReason, Slo

CALL = Call("c", "m", 100, 64, ())
PLACEMENT = Placement("e", PlacementReason.EXPLOIT, cached_tokens=64, missed_tokens=36)
CHAT = b'{ "model":"m","vendor": {"x":[1 , 2.50]}, "messages":[{"role":"user","content":"\\u00e9"}] %s}'
TEXT = b'{"model": "m", "prompt": "one two", "echo": false}'


def chat(more: bytes = b"", **changes: Any) -> OutgoingBody:
    body = CHAT % more
    request = parse_request(body, ChatRequest)
    return OutgoingBody(body, request, **{"cache_salt": request.cache_salt, **changes})


def to(kind: str | None, agreement: Agreement = AGREED, *, call: Call = CALL) -> Recipient:
    return Recipient(kind, call, PLACEMENT, 0.25, agreement=agreement)


def sent(body: OutgoingBody, kind: str | None, call: Call = CALL) -> dict[str, Any]:
    decoded: dict[str, Any] = msgspec.json.decode(body.for_engine(to(kind, call=call)))
    return decoded


def test_an_engine_without_our_plugin_gets_the_very_bytes() -> None:
    body = chat()
    assert body.for_engine(to(None)) is body.original


def test_what_has_to_change_leaves_every_other_field_as_it_was_written() -> None:
    rewritten = chat(b',"plait":{"priority":1},"stream":true').for_engine(to(None))
    assert b'"vendor":{"x":[1 , 2.50]}' in rewritten
    assert b'"messages":[{"role":"user","content":"\\u00e9"}]' in rewritten
    decoded = msgspec.json.decode(rewritten)
    assert "plait" not in decoded
    assert decoded["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize("kind", [None, "vllm", "sglang"])
@pytest.mark.parametrize("more", [b"", b',"plait":{"priority":1},"stream":true', b',"vllm_xargs":{"plait_age_s":1}'])
def test_each_engine_that_is_tried_gets_the_same_whether_or_not_the_fields_were_read(
    kind: str | None, more: bytes
) -> None:
    tries: tuple[str | None, ...] = ("embedded", kind)
    once, read = chat(more), chat(more, fields=FIELDS.decode(CHAT % more))
    for tried in tries:
        assert read.for_engine(to(tried)) == once.for_engine(to(tried))


@pytest.mark.parametrize(
    ("more", "withheld", "options"),
    [
        (b"", False, None),
        (b',"stream":true', True, {"include_usage": True}),
        (b',"stream":true,"stream_options":{"vendor":1}', True, {"vendor": 1, "include_usage": True}),
        (b',"stream":true,"stream_options":{"include_usage":false}', True, {"include_usage": True}),
        (b',"stream":true,"stream_options":{"include_usage":true}', False, {"include_usage": True}),
    ],
)
def test_usage_is_asked_for_where_the_client_did_not(more: bytes, withheld: bool, options: object) -> None:
    body = chat(more)
    assert body.withholds_usage is withheld
    assert sent(body, None).get("stream_options") == options


def test_an_engine_with_our_plugin_is_told_budgets_and_age_but_no_time_stamp() -> None:
    call = Call("c", "m", 100, 64, (), Slo(ttft_s=0.5, tpot_s=0.02, jct_s=3.0), Objective.LATENCY, priority=-2)
    assert sent(chat(b',"vllm_xargs":{"mine":"x"}'), "vllm", call)["vllm_xargs"] == {
        "mine": "x",
        "plait_age_ms": 250.0,
        "plait_cached_tokens": 64,
        "plait_ttft_ms": 500.0,
        "plait_tpot_ms": 20.0,
        "plait_jct_ms": 3000.0,
        "plait_objective": "latency",
        "plait_priority": -2,
    }


def test_what_was_not_annotated_is_not_told() -> None:
    assert sent(chat(), "embedded")["vllm_xargs"] == {"plait_age_ms": 0.0, "plait_cached_tokens": 64}


@pytest.mark.parametrize(
    ("slo", "age_ms"), [(None, 0.0), (Slo(tpot_s=0.1), 0.0), (Slo(ttft_s=9.0), 250.0), (Slo(jct_s=9.0), 250.0)]
)
def test_only_what_is_promised_from_the_arrival_has_an_age(slo: Slo | None, age_ms: float) -> None:
    call = Call("c", "m", 100, 64, (), slo)
    assert sent(chat(), "vllm", call)["vllm_xargs"]["plait_age_ms"] == age_ms


@pytest.mark.parametrize(("prompts", "expected"), [([[1, 2]], [1, 2]), ([[1], [2]], [[1], [2]])])
def test_token_ids_replace_text_where_the_engine_takes_them(prompts: list[list[int]], expected: object) -> None:
    body = OutgoingBody(TEXT, parse_request(TEXT, CompletionRequest), prompts)
    assert sent(body, "vllm")["prompt"] == expected
    assert sent(body, None)["prompt"] == "one two"


def test_a_tenants_salt_replaces_the_clients() -> None:
    assert sent(chat(b',"cache_salt":"mine"', cache_salt="tenant:mine"), None)["cache_salt"] == "tenant:mine"
    assert sent(chat(b',"cache_salt":"mine"'), "vllm")["cache_salt"] == "mine"
    assert "cache_salt" not in sent(chat(), "vllm")


def test_sglang_takes_annotations_among_its_custom_params() -> None:
    outgoing = sent(chat(b',"custom_params":{"mine":"x"},"vllm_xargs":{"k":"v"}'), "sglang")
    assert outgoing["custom_params"] == {"mine": "x", "plait_age_ms": 0.0, "plait_cached_tokens": 64}
    assert outgoing["vllm_xargs"] == {"k": "v"}


def test_only_sglang_takes_the_ids_of_a_chat() -> None:
    assert sent(chat(prompt_ids=[[1, 2]]), "sglang")["input_ids"] == [1, 2]
    assert "input_ids" not in sent(chat(prompt_ids=[[1, 2]]), "vllm")
    assert sent(chat(b',"input_ids":[3]', prompt_ids=[[1, 2]]), "sglang")["input_ids"] == [3]


@pytest.mark.parametrize("kind", [None, "vllm", "sglang"])
@pytest.mark.parametrize("name", ["vllm_xargs", "custom_params"])
def test_a_client_cannot_speak_for_plait(kind: str | None, name: str) -> None:
    body = chat(b',"%b":{"mine":1,"plait_priority":-9,"plait_age_ms":1e9}' % name.encode())
    parameters = sent(body, kind)[name]
    assert parameters["mine"] == 1
    assert "plait_priority" not in parameters
    assert parameters.get("plait_age_ms") in {None, 0.0}


def test_parameters_that_are_no_object_are_the_engines_to_judge() -> None:
    assert sent(chat(b',"custom_params":[1]'), None)["custom_params"] == [1]


@pytest.mark.parametrize("kind", [None, "vllm", "sglang", "embedded"])
def test_vllm_sends_several_tokens_at_a_time_of_a_stream_that_nobody_watches(kind: str | None) -> None:
    def asked(more: bytes) -> Any:
        body = CHAT % b',"stream":true%b' % more
        return sent(OutgoingBody(body, unhurried(parse_request(body, ChatRequest))), kind).get("stream_interval")

    assert asked(b"") == (STREAM_INTERVAL if kind == "vllm" else None)
    assert asked(b',"stream_interval":3') == 3


@pytest.mark.parametrize(("kind", "priority"), [("vllm", 5), ("embedded", 5), (None, 5), ("sglang", -5)])
def test_a_priority_means_the_same_on_every_engine(kind: str | None, priority: int) -> None:
    """Lower first, as vLLM has it."""
    body = b'{"model": "m", "prompt": "x", "priority": 5}'
    sent = OutgoingBody(body, parse_request(body, CompletionRequest)).for_engine(to(kind))
    assert json.loads(sent)["priority"] == priority


def test_usage_that_goes_with_each_event_is_left_out_where_the_client_gets_none() -> None:
    """The client did not ask for the last usage, so it is not to get it with each event either."""
    body = b'{"model":"m","prompt":"x","stream":true,"stream_options":{"continuous_usage_stats":true}}'
    withheld = OutgoingBody(body, parse_request(body, CompletionRequest)).for_engine(to(None))
    assert json.loads(withheld)["stream_options"] == {"include_usage": True}
    asked = body.replace(b"true}}", b'true,"include_usage":true}}')
    assert OutgoingBody(asked, parse_request(asked, CompletionRequest)).for_engine(to(None)) == asked


def text(agreement: Agreement, kind: str = "vllm") -> dict[str, Any]:
    body = OutgoingBody(TEXT, parse_request(TEXT, CompletionRequest), [[11, 12]])
    decoded: dict[str, Any] = msgspec.json.decode(body.for_engine(to(kind, agreement)))
    return decoded


@pytest.mark.parametrize("kind", ["embedded", "vllm", "sglang"])
def test_an_engine_with_another_tokenizer_gets_the_text(kind: str) -> None:
    assert text(AGREED, kind)["prompt"] == [11, 12]
    assert text(UNKNOWN, kind)["prompt"] == "one two"
    assert text(Agreement(prompts=False), kind)["prompt"] == "one two"
    assert text(Agreement(chats=False), kind)["prompt"] == [11, 12], "no template is needed"


def test_an_engine_with_another_template_renders_chats_itself() -> None:
    def ids(agreement: Agreement) -> object:
        body = chat(prompt_ids=[[11, 12]]).for_engine(to("sglang", agreement))
        return msgspec.json.decode(body).get("input_ids")

    assert ids(AGREED) == [11, 12]
    assert ids(Agreement(chats=False)) is None
    assert ids(Agreement(prompts=False)) == [11, 12], "templates write what comes before a prompt"
    assert ids(UNKNOWN) is None


def test_tokens_of_another_tokenizer_are_no_hint() -> None:
    assert text(AGREED)["vllm_xargs"]["plait_cached_tokens"] == 64
    assert "plait_cached_tokens" not in text(Agreement(problem="another tokenizer"))["vllm_xargs"]
