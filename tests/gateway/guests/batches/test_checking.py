"""One pass over an input file: where its lines are, and what is wrong with them."""

import json
from codecs import BOM_UTF8
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.gateway.guests.batches import checking
from plait.gateway.guests.batches.checking import MOST_ERRORS, CheckedLines, read_line

CHAT = "/v1/chat/completions"


def line(custom_id: str = "one", url: str = CHAT, **body: Any) -> dict[str, Any]:
    given = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}], **body}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": given}


def checked(*lines: dict[str, Any] | str, endpoint: str = CHAT, most: int = 100) -> CheckedLines:
    made = CheckedLines(endpoint, most, {"demo", "other"}.__contains__)
    made.feed("\n".join(one if isinstance(one, str) else json.dumps(one) for one in lines).encode())
    made.end()
    return made


def test_lines_without_an_error() -> None:
    found = checked(line("a"), "", line("b"), "  ")
    assert (len(found), found.model, found.errors) == (2, "demo", [])


@given(st.lists(st.integers(1, 40), max_size=20), st.integers(1, 60))
def test_a_line_is_where_it_is_said_to_be(sizes: list[int], piece: int) -> None:
    lines = [json.dumps(line(f"{number}", user="ä" * size)) for number, size in enumerate(sizes)]
    data, found = "\n".join(lines).encode(), CheckedLines(CHAT, 100, {"demo"}.__contains__)
    for begin in range(0, len(data), piece):
        found.feed(data[begin : begin + piece])
    found.end()
    assert len(found) == len(lines)
    for number, (begin, length) in enumerate(zip(found.begins, found.lengths, strict=True)):
        assert read_line(data[begin : begin + length]).custom_id == f"{number}"


@pytest.mark.parametrize(
    ("lines", "code", "number"),
    [
        ((), "empty_file", None),
        (("{",), "invalid_json_line", 1),
        ((line(), '{"custom_id": 1}'), "invalid_json_line", 2),
        ((line(), line()), "duplicate_custom_id", 2),
        ((line(""),), "invalid_custom_id", 1),
        ((line("x" * 513),), "invalid_custom_id", 1),
        ((line(url="/v1/embeddings"),), "mismatched_endpoint", 1),
        ((line(stream=True),), "stream_not_supported", 1),
        ((line(background=True),), "background_not_supported", 1),
        ((line(plait={"session": "s", "inputs": ["never"]}),), "annotations_not_supported", 1),
        ((line(model="nobody"),), "model_not_found", 1),
        ((line("a"), line("b", model="other")), "model_mismatch", 2),
        (({**line(), "method": "GET"},), "invalid_method", 1),
    ],
)
def test_what_is_wrong_is_named(lines: tuple[dict[str, Any] | str, ...], code: str, number: int | None) -> None:
    (error,) = checked(*lines).errors
    assert (error.code, error.line) == (code, number)


@pytest.mark.parametrize("given", ['["\\ud800"]', "[1e999]", "[" * 3000])
def test_an_input_that_is_no_json_is_named(given: str) -> None:
    body = '{"custom_id": "a", "url": "/v1/embeddings", "body": {"model": "demo", "input": ' + given + "}}"
    assert [error.code for error in checked(body, endpoint="/v1/embeddings").errors] in (["invalid_json_line"], [])


def test_a_batch_has_so_many_lines() -> None:
    assert [error.code for error in checked(*map(line, "abc"), most=2).errors] == ["too_many_lines"]


def test_checking_ends_where_a_batch_has_too_many_lines() -> None:
    found = checked(*map(line, "abcd"), "{", line("a"), most=2)
    assert ([(error.code, error.line) for error in found.errors], len(found)) == ([("too_many_lines", 3)], 2)
    assert found.is_done
    assert not checked(line("a"), "", line("b"), "", "  ", most=2).is_done


def test_blank_lines_are_counted_at_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "MOST_BLANK", 10)
    assert not checked(line(), *[""] * 9).errors
    assert [error.code for error in checked(line(), *[""] * 20).errors] == ["too_many_lines"]


def test_ids_are_kept_no_longer_than_they_are_needed() -> None:
    made = CheckedLines(CHAT, 100, {"demo"}.__contains__)
    made.feed(b"\n".join(json.dumps(line(f"{number}" * 500)).encode() for number in range(9)) + b"\n")
    assert {len(one) for one in made._ids} == {16}
    made.end()
    assert not made._ids


def test_not_every_error_is_kept() -> None:
    found = checked(*["{"] * 500)
    assert (len(found.errors), found.is_done) == (MOST_ERRORS, True)


def test_inputs_of_embeddings_are_counted() -> None:
    made = line(url="/v1/embeddings", input=["text"] * 30_000)
    found = checked(made, {**made, "custom_id": "two"}, endpoint="/v1/embeddings")
    assert [error.code for error in found.errors] == ["too_many_inputs"]
    assert not checked(line(url="/v1/embeddings", input=list(range(60_000))), endpoint="/v1/embeddings").errors


def test_lines_with_the_same_prompt_have_the_same_chain() -> None:
    system = [{"role": "system", "content": "s" * 3000}]
    found = checked(
        line("a", messages=[*system, {"role": "user", "content": "one"}]),
        line("b", max_tokens=3, messages=[*system, {"role": "user", "content": "two"}]),
    )
    assert found.chains[0][:12] == found.chains[1][:12] != b""


@pytest.mark.parametrize("model", [{}, {"model": None}])
def test_a_line_may_leave_the_model_out(model: dict[str, None]) -> None:
    given: dict[str, Any] = {"messages": [], **model}
    found = CheckedLines(CHAT, 9, {""}.__contains__)
    found.feed(json.dumps({"custom_id": "a", "url": CHAT, "body": given}).encode())
    found.end()
    assert (found.errors, found.model) == ([], "")


def test_half_a_surrogate_pair_is_no_error() -> None:
    text = json.dumps(line(user="cut \ud83d"))
    assert checked(text).errors == []
    assert json.loads(bytes(read_line(text.encode()).body))["user"] == "cut \ufffd"


def test_a_byte_order_mark_is_skipped() -> None:
    text = json.dumps(line()).encode()
    found = CheckedLines(CHAT, 9, {"demo"}.__contains__)
    found.feed(BOM_UTF8 + text + b"\n" + text.replace(b"one", b"two"))
    found.end()
    assert (found.errors, list(found.begins)) == ([], [3, 4 + len(text)])
    assert list(found.lengths) == [len(text)] * 2
