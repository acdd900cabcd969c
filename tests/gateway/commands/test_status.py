"""`plait status`: what it prints, and its exit status."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Any

import httpx
import pytest

from plait.gateway.cli import main

ENGINE = {"name": "a", "state": "active", "health": "up", "cause": None, "since": "2026-01-01T00:00:00+00:00",
          "outstanding_calls": 3}  # fmt: skip
PROBLEM = {
    "code": "engine_out", "about": "b", "since": 1.0, "sentence": "b takes no calls: it is ejected (status_500).",
    "part": "an-engine-is-out",
}  # fmt: skip


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[int, Any]]:
    """What the gateway answers, by path."""
    found: dict[str, tuple[int, Any]] = {
        "/admin/status": (200, {"problems": []}), "/admin/engines": (200, {"object": "list", "data": [ENGINE]}),
    }  # fmt: skip

    def get(url: str, *, headers: Mapping[str, str], timeout: float) -> httpx.Response:
        assert headers == {"authorization": "Bearer k"}
        assert timeout > 0
        status, body = found[url.removeprefix("http://gateway")]
        return httpx.Response(status, json=body)

    monkeypatch.setattr(httpx, "get", get)
    return found


def run(*options: str) -> int:
    with contextlib.suppress(SystemExit):  # problems
        return main(["status", "http://gateway", "--key", "k", *options])
    return 1


def test_nothing_is_wrong(answers: dict[str, tuple[int, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    assert answers
    assert run() == 0
    assert capsys.readouterr().out.splitlines()[0] == "Nothing is wrong."


def test_problems_are_named(answers: dict[str, tuple[int, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    answers["/admin/status"] = 200, {"problems": [PROBLEM]}
    assert run() == 1
    text = capsys.readouterr().out
    assert "b takes no calls: it is ejected (status_500).  (docs/oncall.md#an-engine-is-out)" in text
    assert "3 calls" in text
    assert run("--json") == 1
    assert json.loads(capsys.readouterr().out) == {"problems": [PROBLEM], "engines": [ENGINE]}


def test_a_wrong_key_and_no_gateway_are_errors(
    answers: dict[str, tuple[int, Any]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers["/admin/status"] = 401, {"error": {"message": "Incorrect or missing API key."}}
    assert run() == 2
    assert "Incorrect or missing API key." in capsys.readouterr().err

    def unreachable(url: str, **_options: Any) -> httpx.Response:
        raise httpx.ConnectError(f"no connection to {url}")

    monkeypatch.setattr(httpx, "get", unreachable)
    assert run() == 2
    assert main(["status", "http://gateway"]) == 2
    assert "give the gateway's admin key" in capsys.readouterr().err
