"""Greedy outputs, to be compared token by token: what an engine says to the same prompts, one call at a time."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, Final

from e2e.real_engines.engine import MODEL, RealEngine
from e2e.server_process import Server

OUTPUT_TOKENS: Final = 40

Outputs = list[tuple[int, ...]]
"""Token ids, an entry for each of `REQUESTS`."""


def _requests() -> list[dict[str, Any]]:
    """Prompts of up to six chunks, whole blocks and odd ends; some extend others, so that they begin in the cache."""
    rng = random.Random(1)
    long = [rng.randrange(10, 8000) for _ in range(3000)]
    prompts: list[Any] = [long[:length] for length in (1, 31, 32, 33, 65, 500, 1024, 1500, 3000)]
    prompts += [long[500:1100], [*long[:1024], *long[2000:2100]], "Once upon a time, in a cache far away,"]
    completions = [{"prompt": prompt} for prompt in prompts]
    text = " ".join(f"Line {number} of a long question." for number in range(100))
    chats = [{"messages": [{"role": "user", "content": content}]} for content in ("Hello.", text, f"{text} And more.")]
    return [*completions, *chats]


REQUESTS: Final = _requests()


def greedy_outputs(
    engine: RealEngine, server: Server | None = None, headers: Mapping[str, str] | None = None
) -> Outputs:
    """What an engine says to `REQUESTS`, through `server`, asked twice: the second time, their prompts are cached."""
    return [_ask(engine, server or engine, request, headers or {}) for _ in range(2) for request in REQUESTS]


def _ask(engine: RealEngine, server: Server, request: dict[str, Any], headers: Mapping[str, str]) -> tuple[int, ...]:
    path = "/v1/chat/completions" if "messages" in request else "/v1/completions"
    options = {"max_tokens": OUTPUT_TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    response = server.post(path, json={"model": MODEL, **options, **request}, headers=dict(headers))
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    return tuple(engine.token_ids(choice))
