"""A gateway for commands that ask one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx
import pytest


class Answers:
    """The answers of a gateway at `http://gateway`, by method and path, and what it was asked."""

    def __init__(self) -> None:
        self.found: dict[str, tuple[int, Any]] = {}
        self.asked: list[tuple[str, Any]] = []

    def put(self, asked: str, body: Mapping[str, Any], status: int = 200) -> None:
        """From now on this is the answer."""
        self.found[asked] = status, body

    def request(self, client: httpx.Client, method: str, url: str, json: Any) -> httpx.Response:
        """As a client sends it."""
        assert client.headers["authorization"] == "Bearer k"
        asked = f"{method} {url.removeprefix('http://gateway')}"
        self.asked.append((asked, json))
        if asked not in self.found:
            raise httpx.ConnectError(f"no connection for {asked}")
        status, body = self.found[asked]
        return httpx.Response(status, json=body)


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Answers:
    """None yet: there is no connection."""
    made = Answers()

    def request(client: httpx.Client, method: str, url: str, *, json: Any = None) -> httpx.Response:
        return made.request(client, method, url, json)

    monkeypatch.setattr(httpx.Client, "request", request)
    return made
