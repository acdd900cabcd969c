"""The requests that send a session's collected entries to the gateway and get the values of variables."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import httpx
import msgspec

from plait.client.collected import Batch, Collected
from plait.client.errors import AnswerError, ClientError, ErrorBody, ErrorObject, VariableFailedError, answer_error
from plait.client.flow import POLL_S, Flow, Request, Retries, failed_get, responded

PATH = "/programs"
Result = str | ClientError
"""A variable's value, or why it has none."""


class _Answer(msgspec.Struct, frozen=True):
    object: Literal["program"]
    values: dict[str, str] = {}
    errors: dict[str, ErrorObject] = {}


@dataclass(frozen=True, slots=True)
class Delivery:
    """Sends a session's entries. `session` has the body's fields that name the session.

    `failures` has the exceptions of native functions, by their outputs. `ended` is set when the session has ended.
    """

    session: Mapping[str, object]
    collected: Collected
    retries: Retries
    failures: dict[str, Exception] = field(default_factory=dict)
    ended: threading.Event = field(default_factory=threading.Event)

    def delivered(self, gets: Mapping[str, object], timeout_s: float) -> Flow[dict[str, Result]]:
        """Send all entries, and get variables. `gets` has the criteria of each.

        This takes one request, unless the entries do not fit into one or the values take longer than `POLL_S`. Raises
        `AnswerError` if the gateway refuses the program, `ConnectionFailedError` if it does not answer.
        """
        ends_s = time.monotonic() + timeout_s
        results: dict[str, Result] = {}
        batch = yield from self.opened(gets)
        if not batch.entries and not gets:
            return results
        with batch.sent():
            while True:
                left_s = max(ends_s - time.monotonic(), 0.001)
                waits = {name: wanted for name, wanted in gets.items() if name not in results}
                answer = yield from self._answered(self.request(batch, waits, min(left_s, POLL_S)))
                batch.accept()
                results.update(answer.values)
                for name, error in answer.errors.items():
                    problem = ErrorBody(error).exception()
                    if problem.code != "get_timeout" or left_s <= POLL_S:  # else only this poll's time is up
                        results[name] = self.explained(failed_get(problem, name, timeout_s))
                if len(results) >= len(gets):
                    return results
                batch = Batch(self.collected, (), batch.external)  # further polls carry no entries

    def opened(self, gets: Iterable[str]) -> Flow[Batch]:
        """Send all batches but the last one, which is returned: the `gets` go with it."""
        left = deque(self.collected.batches(gets))
        try:
            while len(left) > 1:
                with left.popleft().sent() as batch:
                    yield from self._answered(self.request(batch, {}, 1.0))
                    batch.accept()
            return left.pop()
        finally:
            for batch in left:
                self.collected.keep(batch)

    def request(self, batch: Batch, gets: Mapping[str, object], wait_s: float, *, stream: bool = False) -> Request:
        waiting = {"gets": gets, "timeout_s": wait_s, **({"stream": True} if stream else {})} if gets else {}
        return Request("POST", PATH, {**self.session, **batch.body(), **waiting}, wait_s if gets else 0.0)

    def explained(self, error: ClientError) -> ClientError:
        """A get's error, with the exception of a native function as `__cause__` if one is among the causes."""
        if isinstance(error, VariableFailedError):
            named = [self.failures[cause.variable] for cause in error.causes if cause.variable in self.failures]
            error.__cause__ = named[-1] if named else None
        return error

    def _answered(self, request: Request) -> Flow[_Answer]:
        response = yield from responded(request, self.retries)
        answer = _answer(response)
        if answer is not None:
            return answer
        raise answer_error(response)


def raised(result: Result) -> str:
    """The value. Raises the error if there is none."""
    if isinstance(result, ClientError):
        raise result
    return result


def _answer(response: httpx.Response) -> _Answer | None:
    """The gateway's answer to a program that it has taken, which may have the status of the first failed get."""
    try:
        return msgspec.json.decode(response.content, type=_Answer)
    except msgspec.MsgspecError:
        if response.is_success:
            raise AnswerError(f"not a program's answer: {response.text[:100]}", status=response.status_code) from None
        return None
