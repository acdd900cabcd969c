"""Recognizes refusals by an engine that lacks the model or a long enough context, which another engine may have.

An engine may also lack a field that the gateway itself has written, and gets the call again without the field. Any
other refusal is about the call, and would be the same on another engine.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Final

from plait.backends.protocol.context_overflow import is_overflow
from plait.gateway.answers.error_texts import error_text


class Lack(StrEnum):
    """What an engine lacks for a call. The value is the retry's cause in metrics and log."""

    CONTEXT = "context_length"
    MODEL = "model_not_found"
    FIELD = "unknown_field"


class LackError(Exception):
    """An engine lacks what another engine may have, or a field, so the call is placed again. No client sees this error.

    `unable`: all engines that are known to lack the same model or context length.
    """

    def __init__(self, lack: Lack, unable: frozenset[str]) -> None:
        super().__init__(lack)
        self.lack = lack
        self.unable = unable


LOOKED_AT_BYTES: Final = 4_096
"""The part of a refusal that is read. Some engines append the client's input, which could imitate the message."""

_NO_MODEL: Final = re.compile(
    r"(?:the )?model [`'\"](?P<model>.+?)[`'\"] (?:does not exist|not found)"
    r"|the following requested lora adapters are not loaded: (?P<adapter>\S+)",
    re.IGNORECASE,
)
"""The beginning of a refusal's message, with the model's name. A client may have written the rest of the message.

- vLLM and SGLang: "The model `m` does not exist."
- SGLang's completions take any name for its model, and `m:adapter` for an adapter: "The following requested LoRA
  adapters are not loaded: adapter ..."
"""


EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""OpenAI's and Anthropic's words for the effort of reasoning, in ascending order."""

_QUOTED: Final = re.compile(r"['\"`](\w+)\\?['\"`]")

RefusedFields = Mapping[str, Sequence[str]]
"""Fields that an engine refuses, each with the words that the engine takes there; no words: it takes no such field."""


def refused_field(status: int, answer: bytes, own: Mapping[str, object]) -> tuple[str, Sequence[str]] | None:
    """The field that a refusal is about, and the words that it offers; None unless it is a field of `own`."""
    if not own or status not in {400, 422}:
        return None
    said = answer[:LOOKED_AT_BYTES].decode("utf-8", "ignore")
    name = next((name for name in own if name in said), None)
    if name is None:
        return None
    return name, [word for word in _QUOTED.findall(said) if word in EFFORTS and word != own[name]]  # may quote it, too


def nearest_effort(effort: object, words: Sequence[str]) -> str | None:
    """The word of an engine that is nearest to an effort; None without one."""
    if effort not in EFFORTS:
        return None
    return min(words, key=lambda word: abs(EFFORTS.index(word) - EFFORTS.index(effort)), default=None)


def lack_of(status: int, answer: bytes, model: str) -> Lack | None:
    """What an engine that refuses a call for `model` with this answer lacks; None for any other refusal."""
    if status == 400 and is_overflow(answer[:LOOKED_AT_BYTES].decode("utf-8", "ignore")):
        return Lack.CONTEXT
    refused = _NO_MODEL.match(error_text(answer).message) if status in {400, 404} else None
    if refused is None:
        return None
    adapter = refused["adapter"]
    is_meant = refused["model"] == model if adapter is None else model.endswith(f":{adapter}")
    return Lack.MODEL if is_meant else None
