"""What Python's encoder writes for numbers that JSON lacks."""

from __future__ import annotations

import json

import pytest

from plait.backends.protocol.json_constants import without_constants


def test_numbers_that_json_lacks_become_numbers_or_null() -> None:
    document = json.dumps({"a": [float("-inf"), float("inf"), float("nan"), 1.5, "NaN"]}).encode()
    assert json.loads(without_constants(document) or b"") == {"a": [-9999.0, None, None, 1.5, "NaN"]}


@pytest.mark.parametrize(
    "document",
    [
        b'{"a": 1}',
        b"",
        b"NaN NaN",
        b"[NaN",
        b'["\\ud83d", NaN]',
        b"\xff NaN",
        b"[" * 9999,
        b'["NaN"]',
    ],
)
def test_what_has_none_or_is_no_json_is_left(document: bytes) -> None:
    assert without_constants(document) is None
