"""Outlines of held calls' prompts: constant texts and the variables between them, before anything is rendered.

An outline holds the client's text, not the rendered chat template: for one model, equal messages render to equal text.
Lengths are guesses from the number of characters, because the texts are not tokenized yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from plait.backends.protocol.openai import ChatRequest, CompletionRequest
from plait.gateway.calls.guessed_tokens import CHARACTERS_PER_TOKEN
from plait.gateway.programs.substitution import PLACEHOLDER
from plait.policy.prefix.block_hash import root_hash
from plait.policy.programs.variable_prefix import Constant, Outline, Segment


def outline_of(request: ChatRequest | CompletionRequest, inputs: Iterable[str]) -> Outline:
    """The outline of a request. `{{name}}` in a text is the variable of that name if the name is one of `inputs`.

    A segment ends at a variable and at the end of a message. Raises `CallerError` for an invalid prompt.
    """
    return Outline.of(_segments(request, frozenset(inputs)), root_hash(request.model, request.cache_salt or ""))


def _segments(request: ChatRequest | CompletionRequest, inputs: frozenset[str]) -> Iterator[Segment]:
    """The segments of the request's first prompt, which alone decides the placement."""
    if isinstance(request, CompletionRequest):
        prompt = request.prompts()[0]
        yield from _split(prompt if isinstance(prompt, str) else _text(prompt), inputs)
        return
    if request.tools or request.chat_template or request.chat_template_kwargs:  # may be rendered before any message
        yield _constant(_text((request.tools, request.chat_template, request.chat_template_kwargs)))
    for message in request.messages:
        yield from _split(_text(message), inputs)


def _split(text: str, inputs: frozenset[str]) -> Iterator[Segment]:
    start = 0
    for match in PLACEHOLDER.finditer(text):
        if match[1] in inputs:
            yield _constant(text[start : match.start()])
            yield match[1]
            start = match.end()
    yield _constant(text[start:])


def _constant(text: str) -> Constant:
    content = text.encode()
    return Constant(content, len(content) // CHARACTERS_PER_TOKEN)


def _text(value: object) -> str:
    """The value as JSON. Placeholders are unchanged in it."""
    return msgspec.json.encode(value).decode()
