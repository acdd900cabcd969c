"""What engines say when they refuse a call for what they lack: a context that is long enough.

Another engine of the fleet may have it. Every other refusal is about the call, and would be the same elsewhere.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Final


class Lack(StrEnum):
    """What an engine lacks for a call. The value is the cause in metrics and in the log."""

    CONTEXT = "context_length"


class LackError(Exception):
    """An engine has refused a call for what it lacks, and another engine may have that. No client sees this error."""

    def __init__(self, lack: Lack) -> None:
        super().__init__(lack)
        self.lack = lack


LOOKED_AT_BYTES: Final = 4_096
"""Of a refusal. Behind the message, some engines repeat what the client has sent."""

_TOO_LONG: Final = re.compile(
    rb"context_length_exceeded|context length|context size|maximum model length|max_model_len|maximum allowed length|"
    rb"supports at most \d+ completion tokens",
    re.IGNORECASE,
)
"""A wrong match costs one more refusal.

- The code of OpenAI's API: "context_length_exceeded".
- vLLM: "This model's maximum context length is 2000 tokens. However, ...", "Input length (2100) exceeds model's maximum
  context length (2000).", "... is longer than the maximum model length of 2000.", "... exceeds the max_model_len 2000."
- SGLang: "The input (2100 tokens) is longer than the model's context length (2000 tokens).", "Requested token count
  exceeds the model's maximum context length of 2000 tokens. ...", "Input length (2100 tokens) exceeds the maximum
  allowed length (2000 tokens). ...", "... This model supports at most 2000 completion tokens."
- llama.cpp: "the request exceeds the available context size ..."
"""


def lack_of(status: int, answer: bytes) -> Lack | None:
    """What the engine lacks that refuses a call with this answer; None if it is not that."""
    return Lack.CONTEXT if status == 400 and _TOO_LONG.search(answer, 0, LOOKED_AT_BYTES) else None
