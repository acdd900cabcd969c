"""Recognises an engine's refusal of a request that is longer than the model's context."""

from __future__ import annotations

import re
from typing import Final

from plait.backends.errors import ContextLengthError

_TOO_LONG: Final = re.compile(
    r"context_length_exceeded|context length|context size|maximum model length|max_model_len|maximum allowed length|"
    r"supports at most \d+ completion tokens",
    re.IGNORECASE,
)
"""The engines' words. A wrong match costs one more refusal.

- The code of OpenAI's API: "context_length_exceeded".
- vLLM: "This model's maximum context length is 2000 tokens. However, ...", "Input length (2100) exceeds model's maximum
  context length (2000).", "... is longer than the maximum model length of 2000.", "... exceeds the max_model_len 2000."
- SGLang: "The input (2100 tokens) is longer than the model's context length (2000 tokens).", "Requested token count
  exceeds the model's maximum context length of 2000 tokens. ...", "Input length (2100 tokens) exceeds the maximum
  allowed length (2000 tokens). ...", "... This model supports at most 2000 completion tokens."
- llama.cpp: "the request exceeds the available context size ..."
"""

_LIMIT: Final = re.compile(
    r"(?:context length|context size|model length|max_model_len|allowed length|context|at most)\D{0,9}(\d{1,12})",
    re.IGNORECASE,
)
_PROMPT: Final = re.compile(
    r"(at least )?(\d{1,12}) (?:in the messages|input tokens|tokens from the input)", re.IGNORECASE
)
_OUTPUT: Final = re.compile(
    r"(\d{1,12}) (?:in the completion|output tokens|tokens for the completion)|is too large: (\d{1,12})", re.IGNORECASE
)
"""What the request wants beside its prompt. SGLang refuses more than the context without having counted the prompt."""
_QUOTED: Final = re.compile(r"'[^'\n]{0,200}'|`[^`\n]{0,200}`|\"[^\"\n]{0,200}\"")
_NUMBER: Final = re.compile(r"\d{1,12}")
LOOKED_AT: Final = 4_000
"""How many characters of a message are searched: an engine may repeat a client's input in it."""


def is_overflow(text: str) -> bool:
    """Whether an engine's refusal means that the request is too long."""
    return _TOO_LONG.search(text, 0, LOOKED_AT) is not None


def overflow_error(message: str, param: str | None = None) -> ContextLengthError:
    """The error, with the numbers that the engine's words have."""
    text = _QUOTED.sub("", message[:LOOKED_AT])  # quoted names of models have numbers too
    limit, prompt, output = _LIMIT.search(text), _PROMPT.search(text), _OUTPUT.search(text)
    context = None if limit is None else int(limit[1])
    numbers = map(int, _NUMBER.findall(text))
    said = max((number for number in numbers if context is not None and number > context), default=None)
    error = ContextLengthError(
        message,
        param=param,
        prompt_tokens=int(prompt[2]) if prompt is not None else said if output is None else 0,
        output_tokens=0 if output is None else int(output[1] or output[2]),
        context_tokens=context,
    )
    error.is_bound = prompt is None or prompt[1] is not None  # vLLM stops counting where there is no room
    error.quotes = True  # the engine's words
    return error
