"""What engines say when they refuse a call, whoever wrote the form of it."""

from __future__ import annotations

import pytest

from plait.gateway.answers.error_texts import ErrorText, error_of, error_text


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (b'{"error":{"message":"too long","code":7}}', ErrorText(is_openai=True, message="too long")),
        (b'{"type":"error","error":{"message":"too long"}}', ErrorText(is_openai=True, message="too long")),
        (b'{"object":"error","message":"too long","code":400}', ErrorText(message="too long")),
        (
            b'{"object":"error","message":"too long","param":"prompt"}',
            ErrorText(False, "too long (in prompt)", "prompt"),
        ),
        (b'{"detail":"too long"}', ErrorText(message="too long")),
        (b'{"detail":{"error":"too long"}}', ErrorText(message="too long")),
        (b'{"error":"too long"}', ErrorText(message="too long")),
        (b'{"error":{"detail":"too long"}}', ErrorText(message="too long")),
        (b'{"error":{"message":""},"message":"too long"}', ErrorText(is_openai=True)),
        (b'{"error":{"message":"%b"}}' % (b"l" * 10_000), ErrorText(message="l" * 300 + "...")),
        (b'{"errors":["too long","too hot"]}', ErrorText(message="too long; too hot")),
        (b'"too long"', ErrorText(message="too long")),
        (b"too long\n", ErrorText(message="too long")),
        (b'{"detail":[{"loc":["body"]}]}', ErrorText()),
        (b"<html>http://10.0.0.7:8000 is busy</html>", ErrorText()),
        (b"[" * 5 + b'"deep"' + b"]" * 5, ErrorText()),
        (b"[" * 9_000, ErrorText(message="[" * 300 + "...")),
        (b"", ErrorText()),
        (b"\xff", ErrorText()),
        (b"7", ErrorText()),
    ],
)
def test_the_message_of_an_error(answer: bytes, expected: ErrorText) -> None:
    assert error_text(answer) == expected


@pytest.mark.parametrize(
    ("loc", "param"),
    [
        (b'["body","temperature"]', "temperature"),
        (b'["body","messages",0,"role"]', "messages[0].role"),
        (b'["query","n"]', "n"),
        (b'["n"]', "n"),
        (b'["body"]', None),
        (b'["body",7]', "[7]"),
        (b'"n"', None),
        (b"null", None),
    ],
)
def test_a_list_of_details_names_the_field_at_fault(loc: bytes, param: str | None) -> None:
    said = error_text(b'{"detail":[{"loc":%b,"msg":"field required","type":"missing"},{"msg":"and more"}]}' % loc)
    where = "" if param is None else f" (in {param})"
    assert said == ErrorText(message=f"field required{where}; and more", param=param)


def test_an_engines_error_keeps_what_it_says() -> None:
    error = error_of(422, b'{"error": {"message": "no", "param": "x", "code": 5}}')
    assert (error.status, error.message, error.param, error.code) == (422, "no", "x", None)
    assert error_of(500, b"<html>").message == "The engine answered with status 500."
