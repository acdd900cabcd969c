"""What engines say of a request that is too long."""

from __future__ import annotations

import pytest

from plait.backends.protocol.context_overflow import is_overflow, overflow_error


@pytest.mark.parametrize(
    ("text", "needed", "context"),
    [
        (
            ("This model's maximum context length is 8192 tokens. However, you requested 9000 tokens (8900 in the "
            "messages, 100 in the completion)."),
            9000, 8192,
        ),
        ("Input length (2100) exceeds model's maximum context length (2000).", 2100, 2000),
        ("The input (2100 tokens) is longer than the model's context length (2000 tokens).", 2100, 2000),
        (
            ("Requested token count exceeds the model's maximum context length of 2000 tokens. You requested a "
            "total of 2300 tokens: 2100 tokens from the input messages and 200 tokens for the completion."),
            2300, 2000,
        ),
        ("The decoder prompt (length 2100) is longer than the maximum model length of 2000.", 2100, 2000),
        ("request (2100 tokens) exceeds the available context size (2000 tokens), try increasing it", 2100, 2000),
        ("the request exceeds the available context size. try increasing the context size", None, None),
        ("Model 'llama-70000' has a maximum context length of 2000 tokens", None, 2000),
    ],
)  # fmt: skip
def test_the_numbers_of_an_overflow(text: str, needed: int | None, context: int | None) -> None:
    assert is_overflow(text)
    error = overflow_error(text, "messages")
    assert (error.needed_tokens, error.context_tokens) == (needed, context)
    assert (error.message, error.param, error.code) == (text, "messages", "context_length_exceeded")


def test_other_refusals_are_none() -> None:
    assert not is_overflow("max_tokens must be at least 1, got 0.")


def test_what_an_engine_repeats_of_a_client_is_no_trouble() -> None:
    assert overflow_error("context length '" + "1" * 5_000).context_tokens != 0
    assert overflow_error("maximum context length is 2000 tokens. " + "'1a" * 100_000).context_tokens == 2_000
