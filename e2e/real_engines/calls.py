"""Calls on real engines, and what the gateway said and the engine found of their prompts in the cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
from openai import OpenAI

from e2e.real_engines.engine import MODEL, DocumentSizes, EngineKind
from e2e.sdk import sync_client
from e2e.server_process import Server
from plait.backends.protocol.openai import ChatRequest
from plait.backends.tokenization.loading import load_tokenizer
from plait.backends.tokenization.rendered_fields import RenderedFields, Renderers, rendered_fields
from plait.backends.tokenization.tokenizer import Tokenizer
from plait.lab.simulation.shared_prefixes import SharedPrefix, load_prefixes
from plait.lab.simulation.workload import (
    WorkloadCall,
    generate_calls,
    select_working_set,
)
from plait.policy.prefix.block_hash import TREE_BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class Answer:
    """One call's fate: cached tokens as the gateway predicted and as the engine found them, TTFT in seconds.

    `sent_s` is when it was sent, on the monotonic clock.
    """

    prefix: str
    engine: str
    prompt_tokens: int
    predicted_tokens: int
    cached_tokens: int
    ttft_s: float
    sent_s: float

    @property
    def was_predicted(self) -> bool:
        """Whether prediction and finding agree to a tree block."""
        return self.was_predicted_to(TREE_BLOCK_TOKENS)

    def was_predicted_to(self, tokens: int) -> bool:
        return abs(self.predicted_tokens - self.cached_tokens) <= tokens


def fields_of(kind: EngineKind, body: Mapping[str, Any]) -> RenderedFields:
    """How engines of one kind render a chat's body, as far as the gateway knows."""
    raw = msgspec.json.encode(body)
    request, given = msgspec.json.decode(raw, type=ChatRequest), msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    return rendered_fields(request, given, Renderers(form=kind.name, prepares=True))


def prompt_of(call: WorkloadCall, tokenizer: Tokenizer, kind: EngineKind) -> list[int]:
    """The ids of a call's prompt on engines of one kind."""
    body = {"model": MODEL, "messages": call.messages, **({} if call.tools is None else {"tools": call.tools})}
    fields = fields_of(kind, body)
    return tokenizer.encode_chat(call.messages, tools=fields.tools, form=fields.form)


def workload(
    traces: Path | None, working_set_tokens: int, n_calls: int, *, seed: int, sizes: DocumentSizes
) -> list[WorkloadCall]:
    """Calls on shared prefixes of some `working_set_tokens`, made from `traces`, for None from built-in texts.

    They are about their prompts: outputs are cut too.
    """
    tokenizer = load_tokenizer("embedded")
    cut = [document for prefix in load_prefixes(traces) for document in _documents(prefix, sizes)]

    def tokens(prefix: SharedPrefix) -> int:
        return len(tokenizer.encode_chat(prefix.messages_for(""), tools=list(prefix.tools) or None))

    chosen = select_working_set(
        [prefix for prefix in cut if tokens(prefix) <= sizes.shared_tokens], tokens, working_set_tokens, seed
    )
    calls = generate_calls(chosen, n_calls, seed)
    return [replace(call, max_tokens=min(call.max_tokens, sizes.output_tokens)) for call in calls]


def _documents(prefix: SharedPrefix, sizes: DocumentSizes) -> Iterator[SharedPrefix]:
    """The documents of a long text; any other shared part as it is."""
    yield replace(prefix, text=prefix.text[: sizes.characters])
    for number in range(1, sizes.of_a_text):
        begin = number * sizes.characters
        if begin + sizes.characters <= len(prefix.text):
            text = prefix.text[begin : begin + sizes.characters]
            yield replace(prefix, name=f"{prefix.name}, part {number + 1}", text=text)


def send_singly(gateway: Server, calls: Sequence[WorkloadCall], before_each: Callable[[], None]) -> list[Answer]:
    """Send one call after the other's end, each after `before_each()`."""
    answers = []
    with sync_client(gateway) as client:
        for call in calls:
            before_each()
            answers.append(_ask(client, call))
    return answers


def send_at_once(gateway: Server, calls: Sequence[WorkloadCall], concurrency: int) -> list[Answer]:
    """Send the calls in order, `concurrency` of them under way at any time."""
    with sync_client(gateway) as client, ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(lambda call: _ask(client, call), calls))


def _ask(client: OpenAI, call: WorkloadCall) -> Answer:
    request: dict[str, Any] = {
        "model": MODEL,
        "messages": call.messages,
        "max_tokens": call.max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        "extra_body": {"ignore_eos": True},
    }
    if call.tools is not None:
        request["tools"] = call.tools
    sent_s = time.monotonic()
    raw = client.chat.completions.with_raw_response.create(**request)
    first_s, usage = None, None
    for chunk in raw.parse():
        first_s = first_s or time.monotonic()
        usage = chunk.usage or usage
    assert first_s is not None
    assert usage is not None
    details = usage.prompt_tokens_details
    return Answer(
        prefix=call.prefix,
        engine=raw.headers["plait-engine"],
        prompt_tokens=usage.prompt_tokens,
        predicted_tokens=int(raw.headers["plait-cached-tokens"]),
        cached_tokens=(details and details.cached_tokens) or 0,
        ttft_s=first_s - sent_s,
        sent_s=sent_s,
    )
