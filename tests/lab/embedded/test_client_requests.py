"""What released clients send to an embedded engine itself, as it is and with odd values."""

from __future__ import annotations

import pytest

from tests.client_requests import odd, recorded
from tests.lab.embedded.served_engine import KV_TOKENS, serving

SENT = [sent for _, sent in recorded()]


async def test_every_request_is_answered() -> None:
    async with serving(tokenizer="embedded") as served:
        for sent in SENT:
            if sent["body"].get("previous_response_id") is None:  # the engine stores none
                fitting = {"max_tokens": 100} if sent["body"].get("max_tokens", 0) > KV_TOKENS else {}
                response = await served.post(sent["path"], **{**sent["body"], "model": "m", **fitting})
                assert response.status_code == 200, (sent, response.text)


@pytest.mark.parametrize("path", sorted({sent["path"] for sent in SENT}))
async def test_an_odd_value_anywhere_is_taken_or_refused(path: str) -> None:
    """A failure is an exception of another kind than `PlaitError`, which nothing here catches."""
    places: set[tuple[str, ...]] = set()
    bodies = [body for sent in SENT if sent["path"] == path for body in odd(sent, places)]
    async with serving(tokenizer="embedded") as served:
        for body in bodies:
            response = await served.post(path, **{**body, "model": "m", "max_tokens": body.get("max_tokens", 4)})
            assert response.status_code < 500, (body, response.text)
