"""Plays the transport of a flow: no gateway is there."""

from __future__ import annotations

from typing import Any

import httpx

from plait.client.errors import ClientError
from plait.client.flow import Flow, Pause, Request

LOST = httpx.ReadError("reset")


def refusal(status: int, code: str = "some", **headers: str) -> httpx.Response:
    """An error in OpenAI's shape; headers with _ for -."""
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.Response(status, json={"error": {"message": "why", "code": code}}, headers=headers)


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
