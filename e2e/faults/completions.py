"""What a scripted engine answers when nothing is wrong. The text follows from the prompt, the same on every engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final

import msgspec

_WORDS: Final = tuple(
    f" {first}{second}" for first in "bdfgklmn" for second in ("a", "e", "i", "o", "u", "ai", "ei", "ou")
)
_LEAST_WORDS: Final = 8
_CHARACTERS_PER_TOKEN: Final = 4
LONG_MODEL: Final = "long"
"""Its answers have 8 MiB, in tokens of 64 KiB: more than the kernel keeps for a client that does not read."""
LARGE_MODEL: Final = "large"
"""Engines do not say its context, so that a gateway's configuration does."""
_LONG_TOKENS: Final = 128
_LONG_TOKEN_BYTES: Final = 64 * 1024

Body = Mapping[str, Any]


@dataclass(frozen=True)
class Completion:
    """The whole answer to one request, its text in tokens."""

    model: str
    is_chat: bool
    tokens: tuple[str, ...]
    finish_reason: str
    prompt_tokens: int

    @property
    def text(self) -> str:
        return "".join(self.tokens)

    @property
    def usage(self) -> dict[str, Any]:
        counts = {"prompt_tokens": self.prompt_tokens, "completion_tokens": len(self.tokens)}
        total = {"total_tokens": self.prompt_tokens + len(self.tokens)}
        return counts | total | {"prompt_tokens_details": {"cached_tokens": self.prompt_tokens // 2}}

    def whole(self) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        part = {"message": {"role": "assistant", "content": self.text}} if self.is_chat else {"text": self.text}
        choice = {"index": 0, **part, "finish_reason": self.finish_reason}
        return {**self._head("chat.completion"), "choices": [choice], "usage": self.usage}

    def chunks(self) -> Iterator[dict[str, Any]]:
        """The events of a stream, without usage: one for each token, and one with the finish reason."""
        head = self._head("chat.completion.chunk")
        for token in self.tokens:
            part = {"delta": {"role": "assistant", "content": token}} if self.is_chat else {"text": token}
            yield {**head, "choices": [{"index": 0, **part, "finish_reason": None}]}
        last: dict[str, Any] = {"delta": {}} if self.is_chat else {"text": ""}
        yield {**head, "choices": [{"index": 0, **last, "finish_reason": self.finish_reason}]}

    def usage_chunk(self, usage: Any) -> dict[str, Any]:
        """The event behind them that carries only the usage."""
        return {**self._head("chat.completion.chunk"), "choices": [], "usage": usage}

    def _head(self, chat_object: str) -> dict[str, Any]:
        kind = chat_object if self.is_chat else "text_completion"
        return {"id": "cmpl-scripted", "object": kind, "created": 1_700_000_000, "model": self.model}


def completion_of(body: Body) -> Completion:
    """The answer to a request's body."""
    prompt = prompt_of(body)
    limit = body.get("max_tokens") or body.get("max_completion_tokens")
    tokens = tuple(_tokens_of(prompt))
    if body.get("model") == LONG_MODEL:
        tokens = tuple(_long(tokens[at % len(tokens)]) for at in range(_LONG_TOKENS))
    finish_reason = "stop" if limit is None or limit >= len(tokens) else "length"
    prompt_tokens = 1 + len(prompt) // _CHARACTERS_PER_TOKEN
    return Completion(body.get("model", ""), "messages" in body, tokens[:limit], finish_reason, prompt_tokens)


def prompt_of(body: Body) -> str:
    """The text that is answered."""
    if "messages" not in body:
        prompt = body.get("prompt", "")
        return prompt if isinstance(prompt, str) else bytes(prompt).decode()  # token ids are bytes here
    return "\n".join(_text_of(message.get("content")) for message in body["messages"])


def event(data: Any) -> bytes:
    """A server-sent event with JSON data."""
    return b"data: %b\n\n" % msgspec.json.encode(data)


def _text_of(content: Any) -> str:
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content)
    return content or ""


def _tokens_of(prompt: str) -> Iterator[str]:
    digest = blake2b(prompt.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    for byte in digest[: _LEAST_WORDS + digest[-1] % _LEAST_WORDS]:
        yield _WORDS[byte % len(_WORDS)]


def _long(token: str) -> str:
    return (token * (_LONG_TOKEN_BYTES // len(token) + 1))[:_LONG_TOKEN_BYTES]
