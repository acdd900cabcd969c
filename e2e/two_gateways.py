"""Calls through one gateway, as another before the same engines knows them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any, Final

import httpx

from e2e.server_process import NO_TLS, Server, eventually

SEEN_WITHIN_S: Final = 0.1
"""Of a report that is at most 20 ms old; asking for the metrics takes most of it."""


def others(gateway: Server) -> float:
    """The calls that a gateway knows on all engines, and that it has not sent."""
    return gateway.metric("plait_engine_other_calls")


def seen_after_s(gateway: Server, calls: int) -> float:
    """How long it takes until a gateway knows of so many calls of others."""
    began_s = time.monotonic()
    eventually(lambda: others(gateway) == calls)
    return time.monotonic() - began_s


def begin(gateway: Server, stack: ExitStack, body: Mapping[str, Any]) -> httpx.Response:
    """Begin a streamed chat, which goes on until the stack ends."""
    http = stack.enter_context(httpx.Client(base_url=gateway.url, verify=NO_TLS, timeout=60))
    return stack.enter_context(http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}))


def begin_all(gateway: Server, stack: ExitStack, bodies: Iterable[Mapping[str, Any]]) -> None:
    """Begin many at once, and return when all have begun to answer."""
    threads = [threading.Thread(target=begin, args=(gateway, stack, body)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
