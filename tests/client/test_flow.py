"""What is asked, how often and after what, with no gateway there: the test plays the transport."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from plait.client.errors import AnswerError, ConnectionFailedError
from plait.client.flow import LONGEST_PAUSE_S, Pause, Request, Retries, answered
from tests.client.played import LOST, played, refusal

ASK = Request("POST", "/programs", {"a": 1})
RETRIES = Retries(most=2, first_pause_s=0.5)
OK = httpx.Response(200, content=b"{}")
REFUSED = httpx.ConnectError("refused")


def test_an_answer_is_the_end() -> None:
    assert played(answered(ASK, RETRIES), OK) == ([ASK], b"{}")


@pytest.mark.parametrize("failure", [REFUSED, LOST, refusal(503), refusal(502), refusal(504)], ids=str)
def test_what_may_pass_is_tried_again_after_a_growing_pause(failure: Any) -> None:
    assert played(answered(ASK, RETRIES), failure, failure, OK) == ([ASK, Pause(0.5), ASK, Pause(1.0), ASK], b"{}")


def test_the_last_failure_is_raised() -> None:
    steps, error = played(answered(ASK, RETRIES), REFUSED, LOST, REFUSED)
    assert steps == [ASK, Pause(0.5), ASK, Pause(1.0), ASK]
    assert isinstance(error, ConnectionFailedError)
    assert (str(error), error.__cause__) == ("POST /programs: refused", REFUSED)


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
