"""`plait status`: what it prints, and its exit status."""

from __future__ import annotations

import contextlib
import json
import re
from time import time
from typing import Any

import pytest

from plait.gateway.cli import main
from tests.gateway.commands.conftest import Answers

ENGINES = [
    {"name": "a", "state": "up", "cause": "", "since": 1.0, "calls": 3},
    {"name": "b", "state": "ejected", "cause": "status_500", "since": 1.0, "calls": 0},
]
PROBLEM = {
    "code": "engine_out", "about": "b", "since": 1.0, "sentence": "b takes no calls: it is ejected (status_500).",
    "part": "an-engine-is-out",
}  # fmt: skip


def status(**more: Any) -> dict[str, Any]:
    models = [{"name": "m", "waiting_calls": 41, "held_sessions": 0}]
    tenants = [{"name": "acme", "waiting_calls": 7, "answered_calls": 8, "failed_calls": 9}]
    return {"problems": [], "engines": ENGINES, "models": models, "tenants": tenants, **more}


def run(*options: str) -> int:
    with contextlib.suppress(SystemExit):  # problems
        return main(["status", "http://gateway", "--key", "k", *options])
    return 1


def words(line: str) -> str:
    return " ".join(line.split())


def test_nothing_is_wrong(answers: Answers, capsys: pytest.CaptureFixture[str]) -> None:
    answers.put("GET /admin/status", status(engines=ENGINES[:1]))
    assert run() == 0
    text = capsys.readouterr().out
    assert "http://gateway   nothing is wrong" in text
    assert {"m 41 0", "acme 7 8 9"} <= set(map(words, text.splitlines()))
    assert "Calls" not in text


def test_engines_say_why_and_how_full_and_gateways_what_they_are(
    answers: Answers, capsys: pytest.CaptureFixture[str]
) -> None:
    full = ENGINES[0] | {"kv_tokens": 1_000, "kv_used_tokens": 250, "reason": ""}
    down = ENGINES[1] | {"kv_tokens": None, "kv_used_tokens": 0, "reason": "engine b answered with status 500"}
    gateways = [
        {"name": "http://one", "version": "1.2", "since": time() - 30, "store": "PostgreSQL", "failing_since": 0.0},
        {"name": "http://two", "version": "1.1", "since": time() - 7_200, "store": "PostgreSQL", "failing_since": 1.0},
        {"name": "http://six", "version": "1.1", "since": time() - 30, "store": "", "failing_since": 0.0},
    ]
    answers.put("GET /admin/status", status(engines=[full, down], gateways=gateways))
    assert run() == 0
    lines = list(map(words, capsys.readouterr().out.splitlines()))
    engines = {line.split()[0]: line for line in lines if line.startswith(("a ", "b "))}
    assert "25.0%" in engines["a"]
    assert "not known engine b answered with status 500" in engines["b"]
    told = {line.split()[0]: line for line in lines if line.startswith("http://") and "wrong" not in line}
    assert re.search(r" 1\.2 3\d s PostgreSQL ok$", told["http://one"])
    assert " 1.1 2 h PostgreSQL failing for" in told["http://two"]
    assert re.search(r" 1\.1 3\d s$", told["http://six"])


def test_a_long_reason_leaves_the_room_of_the_other_columns(
    answers: Answers, capsys: pytest.CaptureFixture[str]
) -> None:
    down = ENGINES[1] | {"reason": 40 * "has a certificate of /a/long/path "}
    answers.put("GET /admin/status", status(engines=[ENGINES[0], down]))
    assert run() == 0
    lines = capsys.readouterr().out.splitlines()
    (shown,) = (words(line) for line in lines if line.startswith(" b "))
    assert shown.startswith("b ejected status_500 ")
    assert " has a " in shown
    assert shown.endswith("…")


def test_an_engine_is_out(answers: Answers, capsys: pytest.CaptureFixture[str]) -> None:
    answers.put("GET /admin/status", status(problems=[PROBLEM]))
    assert run() == 1
    lines = capsys.readouterr().out.splitlines()
    assert "problems: 1" in lines[0]
    problem = next(line for line in lines if line.startswith(" engine_out "))
    assert "b takes no calls: it is ejected (status_500). " in problem
    assert problem.rstrip().endswith("docs/oncall.md#an-engine-is-out")
    engines = [words(line) for line in lines if " ejected " in line or " up " in line][1:]
    assert [engine.split()[0] for engine in engines] == ["b", "a"], "those that are out are the first"
    assert engines[0].startswith("b ejected status_500 ")
    assert run("--json") == 1
    assert json.loads(capsys.readouterr().out) == status(problems=[PROBLEM])


@pytest.mark.parametrize(
    ("code", "body", "said"),
    [
        (401, {"error": {"message": "Incorrect or missing API key."}}, "http://gateway: Incorrect or missing API key."),
        (502, {"detail": "no upstream"}, "http://gateway does not answer as a gateway does"),
        (503, {"error": {"message": "The gateway stops."}}, "http://gateway: The gateway stops."),
    ],
)
def test_an_error_is_no_answer(
    answers: Answers, capsys: pytest.CaptureFixture[str], code: int, body: dict[str, Any], said: str
) -> None:
    answers.put("GET /admin/status", body, code)
    assert run() == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["http://gateway", "--key=k"], "plait: http://gateway does not answer as a gateway does: no connection"),
        (["127.0.0.1:1", "--key=k"], "plait: 127.0.0.1:1 is no address of a gateway"),
        (["http://gateway"], "plait: give the gateway's admin key"),
    ],
)
def test_no_gateway(answers: Answers, capsys: pytest.CaptureFixture[str], options: list[str], said: str) -> None:
    assert not answers.found
    assert main(["status", *options]) == 2
    err = capsys.readouterr().err
    assert err.startswith(said)
    assert err.count("\n") == 1
