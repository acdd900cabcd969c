"""`plait drain`: what it asks for, what it waits for, and where calls would have gone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from plait.gateway.cli import main
from plait.gateway.commands.drain import MOST_RECEIPTS, elsewhere
from tests.gateway.commands.conftest import Answers

PATH = "/admin/engines/a%2Fb"
POST = f"POST {PATH}"


def run(*options: str) -> int:
    return main(["drain", "a/b", "--url=http://gateway/", "--key=k", *options])


def receipt(at: float, engine: str | None, margin_s: float | None, **more: Any) -> dict[str, Any]:
    attempt = {"engine": "a", "rule": "least_delay", "next_engine": engine, "margin_s": margin_s, **more}
    return {"at": at, "attempts": [{"engine": "failed"}, attempt]}


def status(calls: int, state: str = "draining", *silent: str) -> dict[str, Any]:
    problems = [{"code": "worker_down", "about": name} for name in silent]
    return {"problems": problems, "engines": [{"name": "a/b", "state": state, "calls": calls}]}


@pytest.mark.parametrize(
    ("hands_over", "said"),
    [(True, "a/b hands its prefixes over, then gets no new calls.\n"), (False, "a/b gets no new calls.\n")],
)
def test_an_engine_is_drained(
    answers: Answers, capsys: pytest.CaptureFixture[str], hands_over: bool, said: str
) -> None:
    answers.put(POST, {"hands_over": hands_over})
    assert run() == 0
    assert answers.asked == [(POST, {"state": "draining"})]
    assert capsys.readouterr().out == said


def test_the_last_engine_of_a_model_is_warned_of(answers: Answers, capsys: pytest.CaptureFixture[str]) -> None:
    answers.put(POST, {"hands_over": False, "alone_for": ["m", "n"]})
    assert (run(), run("--undo")) == (0, 0)
    assert capsys.readouterr().out.splitlines() == [
        "a/b gets no new calls.",
        "Warning: no other engine takes calls for m, n: they get 503.",
        "a/b gets calls again.",
    ]


def test_a_drain_is_taken_back(answers: Answers, capsys: pytest.CaptureFixture[str]) -> None:
    answers.put(POST, {"hands_over": False})
    assert run("--undo") == 0
    assert answers.asked == [(POST, {"state": "active"})]
    assert capsys.readouterr().out == "a/b gets calls again.\n"


def test_it_waits_for_all_gateways(
    answers: Answers, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: Iterator[dict[str, Any]] = iter([
        status(0, "handing over"), status(2), status(0, "draining", "worker 1"), status(0, "draining", "worker 1"),
        status(0),
    ])  # fmt: skip
    answers.put(POST, {"hands_over": True})
    monkeypatch.setattr("time.sleep", lambda _s: answers.put("GET /admin/status", next(seen)))
    answers.put("GET /admin/status", status(5))
    assert run("--wait") == 0
    assert next(seen, None) is None
    assert capsys.readouterr().out.splitlines()[1:] == ["worker 1 does not answer.", "No call is on a/b."]


def test_an_engine_that_has_left_has_no_calls(answers: Answers) -> None:
    answers.put(POST, {"hands_over": False})
    answers.put("GET /admin/status", {"problems": [], "engines": []})
    assert run("--wait") == 0


@pytest.mark.parametrize("options", [[], ["--undo"], ["--dry-run"], ["--wait"]])
def test_an_unknown_engine_is_said(answers: Answers, capsys: pytest.CaptureFixture[str], options: list[str]) -> None:
    for asked in (POST, f"GET {PATH}"):
        answers.put(asked, {"error": {"message": "There is no engine 'a/b'."}}, 404)
    assert run(*options) == 2
    assert capsys.readouterr().err == "plait: http://gateway: There is no engine 'a/b'.\n"


def test_a_dry_run_changes_nothing(answers: Answers, capsys: pytest.CaptureFixture[str]) -> None:
    answers.put(f"GET {PATH}", {})
    answers.put("GET /admin/receipts?engine=a%2Fb&limit=200", {"data": []})
    assert run("--dry-run") == 0
    assert {asked.split()[0] for asked, _ in answers.asked} == {"GET"}
    assert capsys.readouterr().out == "No receipt of the last ten minutes is of a/b.\n"


def test_it_is_said_where_calls_would_have_gone_and_at_what_cost() -> None:
    receipts = [
        receipt(990.0, "b", 0.25), receipt(980.0, "c", 1.0), receipt(970.0, "b", 0.75),
        receipt(950.0, None, None, rule="only_engine"), receipt(940.0, None, None), receipt(399.0, "b", 9.0),
    ]  # fmt: skip
    first, *lines = elsewhere("a", receipts, now_s=1000.0)
    assert first == "Without a its 5 calls of the last 600 s would have gone, each by itself:"
    assert [line.strip() for line in lines] == [
        "2 to b, at +0.500 s of cost",
        "1 to c, at +1.000 s of cost",
        "1 nowhere: no other engine could take them",
        "1 not compared",
    ]


def test_it_is_said_how_far_the_receipts_go_back() -> None:
    receipts = [receipt(1000.0 - number / 10, "b", 0.0) for number in range(MOST_RECEIPTS)]
    assert "its 200 calls of the last 20 s" in next(elsewhere("a", receipts, now_s=1000.0))
