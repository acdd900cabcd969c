"""Programs that wait long or fail, with no gateway there: the test plays the transport."""

from __future__ import annotations

from typing import Any

import httpx

from plait.client.collected import Collected
from plait.client.delivery import Delivery
from plait.client.errors import AnswerError, FailureCause, GetTimeoutError, VariableFailedError
from plait.client.flow import POLL_S, Pause, Request, Retries
from tests.client.played import LOST, played, refusal

NOT_YET = {"message": "later", "code": "get_timeout"}


def delivered(collected: Collected, timeout_s: float, *names: str) -> Any:
    delivery = Delivery({"session": "s"}, collected, Retries(most=2, first_pause_s=0.5))
    return delivery.delivered(dict.fromkeys(names, "latency"), timeout_s)


def answer(errors: dict[str, Any] | None = None, **values: str) -> httpx.Response:
    status = 200 if values else 408
    return httpx.Response(status, json={"object": "program", "values": values, "errors": errors or {}})


def bodies(steps: list[Request | Pause]) -> list[dict[str, Any]]:
    return [dict(step.body or {}) for step in steps if isinstance(step, Request)]


def test_values_are_waited_for_in_pieces_that_proxies_stand() -> None:
    collected = Collected()
    collected.set_value("task", "it")
    later = answer({"code": NOT_YET, "test": NOT_YET})
    steps, values = played(
        delivered(collected, 600.0, "code", "test"), later, answer({"code": NOT_YET}, test="ok"), answer(code="x = 1")
    )
    assert values == {"code": "x = 1", "test": "ok"}
    assert all(isinstance(step, Request) and step.wait_s == POLL_S for step in steps)
    first, second, third = bodies(steps)
    assert (first["timeout_s"], set(first["gets"]), "values" in first) == (POLL_S, {"code", "test"}, True)
    assert [(set(body["gets"]), "values" in body) for body in (second, third)] == [
        ({"code", "test"}, False),
        ({"code"}, False),
    ]


def test_a_short_wait_is_one_request() -> None:
    (step,), results = played(delivered(Collected(), 0.5, "code"), answer({"code": NOT_YET}))
    assert isinstance(step, Request)
    assert 0.4 < step.wait_s <= 0.5
    assert isinstance(results, dict)
    assert isinstance(results["code"], GetTimeoutError)
    assert str(results["code"]) == "code has no value after 0.5 s"


def test_a_failed_variable_says_why_from_the_call_to_the_root() -> None:
    chain = [
        {"call": "call-2", "variable": "tests", "engine": None, "transform": None, "message": "its input code failed"},
        {"call": "call-1", "variable": "code", "engine": "e1", "message": "the engine is gone, because of rain"},
    ]
    failure = {"message": "why", "code": "variable_failed", "causes": chain}
    _, results = played(delivered(Collected(), 600.0, "tests"), answer({"tests": failure}))
    assert isinstance(results, dict)
    error = results["tests"]
    assert isinstance(error, VariableFailedError)
    assert str(error).startswith("tests has failed: call-2: its input code failed, because call-1: the engine is gone")
    root = FailureCause(call="call-1", variable="code", engine="e1", message="the engine is gone, because of rain")
    assert error.causes == (FailureCause(call="call-2", variable="tests", message="its input code failed"), root)


def test_an_unknown_session_is_an_answer_like_others() -> None:
    _, error = played(delivered(Collected(), 600.0, "code"), refusal(410, "session_ended"))
    assert isinstance(error, AnswerError)


def test_a_lost_program_is_sent_again() -> None:
    steps, values = played(delivered(Collected(), 600.0, "code"), LOST, answer(code="x"))
    assert values == {"code": "x"}
    assert steps[1] == Pause(0.5)
