"""What engines say of a request that is too long."""

from __future__ import annotations

import pytest

from plait.backends.protocol.context_overflow import is_overflow, overflow_error


@pytest.mark.parametrize(
    ("text", "prompt", "output", "context"),
    [
        (
            ("This model's maximum context length is 8192 tokens. However, you requested 9000 tokens (8900 in the "
            "messages, 100 in the completion)."),
            8900, 100, 8192,
        ),
        ("Input length (2100) exceeds model's maximum context length (2000).", 2100, 0, 2000),
        ("The input (2100 tokens) is longer than the model's context length (2000 tokens).", 2100, 0, 2000),
        (
            ("Requested token count exceeds the model's maximum context length of 2000 tokens. You requested a "
            "total of 2300 tokens: 2100 tokens from the input messages and 200 tokens for the completion."),
            2100, 200, 2000,
        ),
        ("The decoder prompt (length 2100) is longer than the maximum model length of 2000.", 2100, 0, 2000),
        ("request (2100 tokens) exceeds the available context size (2000 tokens), try increasing it", 2100, 0, 2000),
        (
            ("'max_tokens' or 'max_completion_tokens' is too large: 32000. This model's maximum context length is "
            "40960 tokens and your request has 12200 input tokens (32000 > 40960 - 12200)."),
            12200, 32000, 40960,
        ),
        (
            ("This model's maximum context length is 2000 tokens. However, you requested 2500 output tokens and your "
            "prompt contains at least 30 input tokens, for a total of at least 2530 tokens."),
            30, 2500, 2000,
        ),
        ("max_completion_tokens is too large: 5000.This model supports at most 2000 completion tokens.", 0, 5000, 2000),
        ("the request exceeds the available context size. try increasing the context size", None, 0, None),
        ("Model 'llama-70000' has a maximum context length of 2000 tokens", None, 0, 2000),
    ],
)  # fmt: skip
def test_the_numbers_of_an_overflow(text: str, prompt: int | None, output: int, context: int | None) -> None:
    assert is_overflow(text)
    error = overflow_error(text, "messages")
    assert (error.prompt_tokens, error.output_tokens, error.context_tokens) == (prompt, output, context)
    assert error.prompt_fits == (output > 0 and prompt is not None and context is not None and prompt < context)
    assert (error.message, error.param, error.code) == (text, "messages", "context_length_exceeded")


def test_other_refusals_are_none() -> None:
    assert not is_overflow("max_tokens must be at least 1, got 0.")


def test_what_an_engine_repeats_of_a_client_is_no_trouble() -> None:
    assert overflow_error("context length '" + "1" * 5_000).context_tokens != 0
    assert overflow_error("maximum context length is 2000 tokens. " + "'1a" * 100_000).context_tokens == 2_000
