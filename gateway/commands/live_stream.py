"""Reads a gateway's `/admin/live`, and writes its figures for people."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, Final

import httpx
import msgspec

AGAIN_S: Final = 1.0
"""Before a stream that has ended is begun again."""

REFUSALS: Final = {
    401: "does not take this admin key",
    404: "has no admin API there",
    429: "has as many watchers as it takes",
}

SILENCE_S: Final = 15.0
"""Events come twice a second. A stream that is silent for so long has ended."""


def events(url: str, key: str, is_over: threading.Event) -> Iterator[tuple[str, dict[str, Any]]]:
    """The events of a gateway, and `lost` when a stream has ended. It is begun again.

    Raises ValueError if the gateway refuses.
    """
    headers, path = {"authorization": f"Bearer {key}"}, f"{url.rstrip('/')}/admin/live"
    with httpx.Client(timeout=SILENCE_S, trust_env=False) as client:
        while not is_over.is_set():
            try:
                with client.stream("GET", path, headers=headers) as answer:
                    if answer.status_code in REFUSALS:
                        raise ValueError(f"{url} {REFUSALS[answer.status_code]}")
                    if answer.status_code == 200:
                        yield from _parsed(answer.iter_lines())
            except httpx.UnsupportedProtocol as error:
                raise ValueError(f"{url} is no address of a gateway: it begins with http:// or https://") from error
            except httpx.HTTPError:
                pass  # it is not there, or stops
            yield "lost", {}
            is_over.wait(AGAIN_S)


def _parsed(lines: Iterator[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    name = ""
    for line in lines:
        field, _, value = line.partition(": ")
        if field == "event":
            name = value
        elif field == "data":
            yield name, msgspec.json.decode(value)


def seconds(value: float | None) -> str:
    """A time for people."""
    if value is None:
        return "-"
    return f"{value * 1000:.0f} ms" if value < 0.9995 else f"{value:.2f} s"


def percent(value: float | None) -> str:
    """A share for people."""
    return "-" if value is None else f"{100 * value:.1f}%"


def cached_share(call: dict[str, Any]) -> float | None:
    """The part of a call's prompt that was cached."""
    cached = call.get("cached_tokens")
    return None if cached is None else min(1.0, cached / max(1, call["prompt_tokens"]))
