"""What the adapters read from the query of a request for a report."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from plait.backends.adapter.routes import ReportQuery, Scope, answer_cache_state

RANKS = 4


async def answered(query: str) -> tuple[int, bytes, list[ReportQuery]]:
    """The status and the body, and what was asked for. There is no report."""
    asked: list[ReportQuery] = []
    sent: list[Any] = []

    async def report(_scope: Scope, query: ReportQuery) -> bytes:
        asked.append(query)
        return msgspec.msgpack.encode({"epoch": "e"})

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"method": "GET", "query_string": query.encode(), "headers": [(b"accept", b"application/msgpack")]}
    await answer_cache_state(scope, send, report, msgspec.msgpack.encode({}), RANKS)
    start, body = sent
    return start["status"], body["body"], asked


@pytest.mark.parametrize(
    ("query", "asked"),
    [
        ("", ReportQuery(None, None, 0.0)),
        ("rank=3", ReportQuery(None, None, 0.0, rank=3)),
        ("since=7&epoch=e&wait_ms=1500&gateway=g&rank=0", ReportQuery(7, "e", 1.5, "g")),
        ("wait_ms=99999999", ReportQuery(None, None, 60.0)),
    ],
)
async def test_a_query(query: str, asked: ReportQuery) -> None:
    status, body, found = await answered(query)
    assert (status, found) == (200, [asked])
    assert msgspec.msgpack.decode(body) == {"epoch": "e", "rank": asked.rank, "ranks": RANKS}


@pytest.mark.parametrize("name", ["rank", "since", "wait_ms"])
@pytest.mark.parametrize("value", ["-1", "x", "1.0", "%2B1", "9" * 5000])
async def test_what_is_no_number_is_refused(name: str, value: str) -> None:
    status, body, asked = await answered(f"{name}={value}")
    assert (status, asked) == (400, [])
    assert msgspec.json.decode(body)["error"]["param"] == name


async def test_a_rank_that_the_server_lacks_is_refused_and_nobody_is_asked() -> None:
    status, body, asked = await answered(f"rank={RANKS}")
    assert (status, asked) == (400, [])
    assert "no data-parallel rank 4" in msgspec.json.decode(body)["error"]["message"]
