"""What is asked, how often and after what, with no gateway there: the test plays the transport."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from plait.client.errors import (
    AnswerError,
    ClientError,
    ConnectionFailedError,
    GetTimeoutError,
    VariableFailedError,
)
from plait.client.failure_cause import FailureCause
from plait.client.flow import LONGEST_PAUSE_S, POLL_S, Flow, Pause, Request, Retries, answered, got

ASK = Request("POST", "/submit", {"a": 1}, done_code="double_producer")
ONCE = Request("POST", "/variables", {"a": 1}, repeatable=False)
RETRIES = Retries(most=2, first_pause_s=0.5)
OK = httpx.Response(200, content=b"{}")
REFUSED = httpx.ConnectError("refused")
LOST = httpx.ReadError("reset")


def refusal(status: int, code: str = "some", causes: object = (), **headers: str) -> httpx.Response:
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.Response(status, json={"error": {"message": "why", "code": code, "causes": causes}}, headers=headers)


def played(flow: Flow[Any], *answers: httpx.Response | Exception) -> tuple[list[Request | Pause], object]:
    """All steps of a flow that is answered like this, and what it returned or raised."""
    todo, steps = list(answers), list[Request | Pause]()
    try:
        step = next(flow)
        while True:
            steps.append(step)
            if isinstance(step, Pause):
                step = flow.send(None)
                continue
            answer = todo.pop(0)
            step = flow.throw(answer) if isinstance(answer, Exception) else flow.send(answer)
    except StopIteration as end:
        result = end.value
    except ClientError as error:
        result = error
    assert not todo, "answers that nobody asked for"
    return steps, result


def test_an_answer_is_the_end() -> None:
    assert played(answered(ASK, RETRIES), OK) == ([ASK], b"{}")


@pytest.mark.parametrize("failure", [REFUSED, LOST, refusal(503), refusal(502), refusal(504)], ids=str)
def test_what_may_pass_is_tried_again_after_a_growing_pause(failure: Any) -> None:
    assert played(answered(ASK, RETRIES), failure, failure, OK) == ([ASK, Pause(0.5), ASK, Pause(1.0), ASK], b"{}")


def test_the_last_failure_is_raised() -> None:
    steps, error = played(answered(ASK, RETRIES), REFUSED, LOST, REFUSED)
    assert steps == [ASK, Pause(0.5), ASK, Pause(1.0), ASK]
    assert isinstance(error, ConnectionFailedError)
    assert (str(error), error.__cause__) == ("POST /submit: refused", REFUSED)


def test_the_gateway_says_how_long_to_wait() -> None:
    first, second = refusal(429, retry_after="7"), refusal(503, retry_after="1000")
    steps, _ = played(answered(ASK, RETRIES), first, second, OK)
    assert steps == [ASK, Pause(7.0), ASK, Pause(LONGEST_PAUSE_S), ASK]


@pytest.mark.parametrize("status", [400, 401, 404, 409, 413, 424, 429, 500])
def test_what_will_not_pass_is_raised_at_once(status: int) -> None:
    steps, error = played(answered(ASK, RETRIES), refusal(status, "code", x_request_id="r1"))
    assert steps == [ASK]
    assert isinstance(error, AnswerError)
    assert (error.status, error.code, error.message, error.request_id) == (status, "code", "why", "r1")


def test_a_page_of_a_proxy_is_an_error_without_a_code() -> None:
    _, error = played(answered(ASK, Retries(0)), httpx.Response(502, html="<h1>Bad gateway</h1>"))
    assert str(error) == "<h1>Bad gateway</h1> (status 502)"


def test_a_repetition_that_finds_itself_done_is_done() -> None:
    """The first was accepted and its answer lost: the name of the output is nobody else's."""
    twice = refusal(409, "double_producer")
    assert played(answered(ASK, RETRIES), LOST, twice)[1] == b""
    for before in (REFUSED, refusal(503)):
        assert isinstance(played(answered(ASK, RETRIES), before, twice)[1], AnswerError), (
            "the first cannot have arrived"
        )


def test_what_is_not_repeatable_is_repeated_only_if_it_cannot_have_arrived() -> None:
    assert played(answered(ONCE, RETRIES), REFUSED, OK)[1] == b"{}"
    assert played(answered(ONCE, RETRIES), refusal(503, retry_after="0"), OK)[1] == b"{}"
    assert isinstance(played(answered(ONCE, RETRIES), LOST)[1], ConnectionFailedError)
    assert isinstance(played(answered(ONCE, RETRIES), refusal(504))[1], AnswerError)


GET = Request("POST", "/get", {"semantic_var_id": "code"})
VALUE = httpx.Response(200, json={"object": "semantic_variable", "semantic_var_id": "code", "value": "x = 1"})
NOT_YET = refusal(408, "get_timeout")


def test_a_value_is_waited_for_in_pieces_that_proxies_stand() -> None:
    steps, value = played(got(GET, "code", 600.0, RETRIES), NOT_YET, NOT_YET, VALUE)
    waits = [step.body["timeout_s"] for step in steps if isinstance(step, Request) and step.body]
    assert (waits, value) == ([POLL_S] * 3, "x = 1")
    assert all(isinstance(step, Request) and step.wait_s == POLL_S for step in steps)


def test_a_short_wait_is_one_request() -> None:
    (step,), error = played(got(GET, "code", 0.5, RETRIES), NOT_YET)
    assert isinstance(step, Request)
    assert 0.4 < step.wait_s <= 0.5
    assert isinstance(error, GetTimeoutError)
    assert str(error) == "code has no value after 0.5 s"


def test_a_failed_variable_says_why_from_the_call_to_the_root() -> None:
    chain = [
        {"call": "call-2", "variable": "tests", "engine": None, "transform": None, "message": "its input code failed"},
        {"call": "call-1", "variable": "code", "engine": "e1", "message": "the engine is gone, because of rain"},
    ]
    _, error = played(got(GET, "tests", 600.0, RETRIES), refusal(424, "variable_failed", chain))
    assert isinstance(error, VariableFailedError)
    assert str(error).startswith("tests has failed: call-2: its input code failed, because call-1: the engine is gone")
    root = FailureCause(call="call-1", variable="code", engine="e1", message="the engine is gone, because of rain")
    assert error.causes == (FailureCause(call="call-2", variable="tests", message="its input code failed"), root)
    assert isinstance(error.__cause__, AnswerError)
    assert error.__cause__.status == 424


def test_an_unknown_session_is_an_answer_like_others() -> None:
    _, error = played(got(GET, "code", 600.0, RETRIES), refusal(404, "not_found"))
    assert isinstance(error, AnswerError)


def test_a_lost_get_is_asked_again() -> None:
    assert played(got(GET, "code", 600.0, RETRIES), LOST, VALUE)[1] == "x = 1"
