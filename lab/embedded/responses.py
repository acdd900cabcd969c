"""OpenAI's response objects as the embedded engine sends them: chat and text completions, whole and as events."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from plait.lab.embedded.generation import Piece

Json = dict[str, Any]

FINGERPRINT = "plait-embedded-emulated-text"
"""In every response, so that nobody takes the text for a model's."""


@dataclass(slots=True)
class ResponseUsage:
    """Token counts of a request. Outputs are summed over its choices; the prompt counts once, as in OpenAI's API."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def json(self) -> Json:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(slots=True)
class _Envelope:
    request_id: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))

    def json(self, kind: str, choices: list[Json], **more: Any) -> Json:
        return {
            "id": self.request_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": FINGERPRINT,
            "choices": choices,
            **more,
        }


class ChatFormat:
    """`chat.completion` and `chat.completion.chunk`. With `tool`, the text becomes the arguments of a call to it."""

    def __init__(self, request_id: str, model: str, *, tool: str | None = None, logprobs: bool = False) -> None:
        self._envelope = _Envelope(f"chatcmpl-{request_id}", model)
        self._tool = tool
        self._logprobs = logprobs

    def opening(self, index: int) -> Json:
        """The event that names the role, and the tool if one is called."""
        delta: Json = {"role": "assistant", "content": "" if self._tool is None else None}
        if self._tool is not None:
            delta["tool_calls"] = [{"index": 0, **self._tool_call(index, "")}]
        return self._chunk([self._choice(index, "delta", delta, None)])

    def delta(self, index: int, piece: Piece) -> Json:
        delta: Json = {"content": piece.text}
        if self._tool is not None:
            delta = {"tool_calls": [{"index": 0, "function": {"arguments": piece.text}}]}
        return self._chunk([self._choice(index, "delta", delta, piece.finish_reason, [piece])])

    def usage(self, usage: ResponseUsage) -> Json:
        return self._chunk([], usage=usage.json())

    def whole(self, choices: list[list[Piece]], usage: ResponseUsage) -> Json:
        bodies = []
        for index, pieces in enumerate(choices):
            text = "".join(piece.text for piece in pieces)
            message: Json = {"role": "assistant", "content": text}
            if self._tool is not None:
                message = {"role": "assistant", "content": None, "tool_calls": [self._tool_call(index, text)]}
            bodies.append(self._choice(index, "message", message, pieces[-1].finish_reason, pieces))
        return self._envelope.json("chat.completion", bodies, usage=usage.json())

    def _chunk(self, choices: list[Json], **more: Any) -> Json:
        return self._envelope.json("chat.completion.chunk", choices, **more)

    def _choice(
        self, index: int, key: str, value: Json, finish_reason: str | None, pieces: list[Piece] | None = None
    ) -> Json:
        if finish_reason == "stop" and self._tool is not None:
            finish_reason = "tool_calls"
        choice = {"index": index, key: value, "logprobs": None, "finish_reason": finish_reason}
        if pieces and pieces[-1].stop is not None:
            choice["stop_reason"] = pieces[-1].stop  # vLLM's field, from which `stop_sequence` of /v1/messages comes
        if self._logprobs and pieces:
            choice["logprobs"] = {"content": [_certain(text) for piece in pieces for _, text in piece.tokens]}
        return choice

    def _tool_call(self, index: int, arguments: str) -> Json:
        call_id = f"call_{self._envelope.request_id[-12:]}_{index}"
        return {"id": call_id, "type": "function", "function": {"name": self._tool, "arguments": arguments}}


class TextFormat:
    """`text_completion`, in events and as a whole. `echo[i]` precedes the text of choice i."""

    def __init__(self, request_id: str, model: str, *, echo: list[str] | None = None, logprobs: bool = False) -> None:
        self._envelope = _Envelope(f"cmpl-{request_id}", model)
        self._echo = echo
        self._logprobs = logprobs
        self._offsets: dict[int, int] = {}

    def opening(self, index: int) -> Json | None:
        if self._echo is None:
            return None
        return self._envelope.json("text_completion", [_text_choice(index, self._echo[index], None)])

    def delta(self, index: int, piece: Piece) -> Json:
        return self._envelope.json("text_completion", [self._choice(index, "", [piece])])

    def usage(self, usage: ResponseUsage) -> Json:
        return self._envelope.json("text_completion", [], usage=usage.json())

    def whole(self, choices: list[list[Piece]], usage: ResponseUsage) -> Json:
        echoes = self._echo or [""] * len(choices)
        bodies = [self._choice(index, echoes[index], pieces) for index, pieces in enumerate(choices)]
        return self._envelope.json("text_completion", bodies, usage=usage.json())

    def _choice(self, index: int, echo: str, pieces: list[Piece]) -> Json:
        text = "".join(piece.text for piece in pieces)
        choice = _text_choice(index, echo + text, pieces[-1].finish_reason)
        if pieces[-1].stop is not None:
            choice["stop_reason"] = pieces[-1].stop
        if self._logprobs:
            choice["logprobs"] = self._certain_tokens(index, [text for piece in pieces for _, text in piece.tokens])
        return choice

    def _certain_tokens(self, index: int, texts: list[str]) -> Json:
        """The older form of logprobs: columns, one of them with each token's offset in the text."""
        start = self._offsets.get(index, len(self._echo[index]) if self._echo else 0)
        *offsets, self._offsets[index] = accumulate(map(len, texts), initial=start)
        return {
            "tokens": texts,
            "token_logprobs": [0.0] * len(texts),
            "top_logprobs": [{text: 0.0} for text in texts],
            "text_offset": offsets,
        }


Format = ChatFormat | TextFormat


def _text_choice(index: int, text: str, finish_reason: str | None) -> Json:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}


def _certain(text: str) -> Json:
    """A token's logprob of 0: the emulated model is sure of every token."""
    return {"token": text, "logprob": 0.0, "bytes": list(text.encode()), "top_logprobs": []}
