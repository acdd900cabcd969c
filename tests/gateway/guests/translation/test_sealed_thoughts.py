"""Thoughts that clients keep between two calls, sealed."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.gateway.guests.translation.sealed_thoughts import MARK, SealedThoughts

OURS = SealedThoughts(b"secret")


def reasoning(sealed: Any, **more: Any) -> dict[str, Any]:
    return {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": sealed, **more}


def thinking(sealed: Any, text: str = "") -> dict[str, Any]:
    return {"role": "assistant", "content": [{"type": "thinking", "thinking": text, "signature": sealed}]}


def opened(item: dict[str, Any], tenant: str = "t") -> list[str]:
    """The thoughts in an item or message of a request."""
    fields = OURS.opened(tenant, {"model": "m", "input": [item], "messages": [item]})
    [of_input], [of_messages] = fields["input"], fields["messages"]
    assert of_input == of_messages
    assert fields["model"] == "m"
    parts = of_input.get("content") or []
    return [part.get("text") or part.get("thinking") for part in parts if part.get("text") or part.get("thinking")]


@given(st.text())
def test_a_tenant_reads_its_own(thought: str) -> None:
    sealed = OURS.seal("t", thought)
    assert sealed == SealedThoughts(b"secret").seal("t", thought), "another process has the same secret"
    kept = [thought.encode("utf-8", "replace").decode()] if thought else []
    assert opened(reasoning(sealed)) == kept
    assert opened(thinking(sealed)) == kept
    assert opened({"role": "assistant", "content": [{"type": "redacted_thinking", "data": sealed}]}) == kept


def test_a_text_that_is_there_stays() -> None:
    sealed = OURS.seal("t", "hm")
    text = [{"type": "reasoning_text", "text": "shown"}]
    assert opened(reasoning(sealed, content=text)) == ["shown"]
    assert opened(thinking(sealed, "shown")) == ["shown"]


SEALED = OURS.seal("t", "hm")


@pytest.mark.parametrize(
    "sealed",
    [
        OURS.seal("other", "hm"),
        SealedThoughts(b"another").seal("t", "hm"),
        SEALED[:-2] + ("A=" if not SEALED.endswith("A=") else "B="),
        SEALED[: len(MARK) + 4],
        MARK,
        f"{MARK}\u00e4",
        f"{MARK}===",
        "gAAAAABo",
        "",
        None,
        3,
    ],
)
def test_what_others_have_sealed_is_nothing(sealed: Any) -> None:
    for item in (reasoning(sealed), thinking(sealed)):
        assert opened(item) == []
        assert OURS.opened("t", {"input": [item]}) == {"input": [item]}


def test_any_other_form_stays() -> None:
    fields = {"input": ["a", 3, {"type": ["x"]}, {"content": None}, {"content": "x"}], "messages": "hi"}
    assert OURS.opened("t", fields) == fields
