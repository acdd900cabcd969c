"""Calls through one gateway, as another before the same engines knows them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any, Final

import httpx

from e2e.server_process import NO_TLS, Server, eventually
from tests.waiting import WITHIN_S

UNCHANGED_S: Final = 4 * WITHIN_S
"""How long engines may hold a poll of their reports while nothing changes: what is seen earlier was told at once."""


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
    http = stack.enter_context(httpx.Client(base_url=gateway.url, verify=NO_TLS, timeout=WITHIN_S))
    return stack.enter_context(http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}))


def begin_all(gateway: Server, stack: ExitStack, bodies: Iterable[Mapping[str, Any]]) -> None:
    """Begin many at once, and return when all have begun to answer."""
    threads = [threading.Thread(target=begin, args=(gateway, stack, body)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
