"""The gateway that tests of receipts ask, with scripted engines, an admin key and two tenants."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

from tests.gateway.api.served_gateway import ANSWER, Reply, Served, request, serving

KEYS: Final = ["one", "two"]
SERVER: Final[dict[str, Any]] = {"api_keys": KEYS, "admin_key": "admin", "max_body_bytes": 100_000}
MODELS: Final = [{"name": "m", "tokenizer": "embedded"}]
PREFIX: Final = "the beginning of many prompts " * 100


@asynccontextmanager
async def fleet(*engines: str, server: dict[str, Any] | None = None, **sections: Any) -> AsyncIterator[Served]:
    given = {"models": MODELS, **sections, "server": {**SERVER, **(server or {})}}
    async with serving(*engines, **given) as made:
        yield made


async def reply(made: Served, data: bytes) -> Reply:
    return Reply.of(await made.send(data))


async def get(made: Served, path: str, key: str = "admin") -> Reply:
    return await reply(made, request(b"", method="GET", path=path, key=key))


async def receipt(made: Served, request_id: str, key: str | None = None) -> dict[str, Any]:
    """The receipt as operators see it, or as the tenant with the key."""
    path = f"/admin/receipts/{request_id}" if key is None else f"/v1/receipts/{request_id}"
    found = await get(made, path, key or "admin")
    assert found.status == 200, found
    fields: dict[str, Any] = found.json
    return fields


async def receipt_of(made: Served, data: bytes) -> dict[str, Any]:
    answer = await reply(made, data)
    await asyncio.sleep(0.02)  # a call may end after its client has the answer
    return await receipt(made, answer.headers["x-request-id"])


def said(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **fields}


def answer(cached_tokens: int) -> dict[str, Any]:
    usage = {**ANSWER["usage"], "prompt_tokens_details": {"cached_tokens": cached_tokens}}  # type: ignore[dict-item]
    return {**ANSWER, "usage": usage}
