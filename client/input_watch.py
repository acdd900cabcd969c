"""Native steps whose inputs have no values yet: the streams that bring the values, and what they make ready. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from plait.client.delivery import PATH, Delivery
from plait.client.errors import AnswerError, ClientError, GetTimeoutError
from plait.client.flow import MAY_PASS, POLL_S, Request
from plait.client.native_step import NativeStep
from plait.client.program_stream import ProgramStream

STREAM_S = 600.0
"""How long a stream waits before the next one."""


class Job(NamedTuple):
    """A step that can be computed, with what its function gets."""

    step: NativeStep
    given: dict[str, str | list[str]]


class InputWatch:
    """Steps that were sent at the same time, or are under way.

    Its streams declare the steps too. So they may overtake the program, and a value is never set before its step is
    declared: a gateway takes each step once. `give_back` gets the steps that are left if the gateway does not answer.

    When no step waits any more, the stream is at its end. `last` are the jobs to begin then: their values can go over
    the stream's connection.
    """

    def __init__(
        self, steps: Iterable[NativeStep], delivery: Delivery, give_back: Callable[[Iterable[NativeStep]], None]
    ) -> None:
        self.delivery = delivery
        self.last: list[Job] = []
        self._open = list(steps)
        self._give_back = give_back
        self._values: dict[str, str] = {}
        self._failures = 0
        self._stream = ProgramStream(STREAM_S)

    @property
    def is_open(self) -> bool:
        """Whether steps still wait for inputs."""
        return bool(self._open)

    def request(self) -> Request:
        """The next stream."""
        self._stream = ProgramStream(STREAM_S)
        inputs = list(dict.fromkeys(name for step in self._open for name in step.inputs))
        body = {
            **self.delivery.session,
            "natives": [step.entry.content for step in self._open],
            "external": inputs,
            "gets": {name: None for name in inputs if name not in self._values},
            "timeout_s": STREAM_S,
            "stream": True,
        }
        return Request("POST", PATH, body, POLL_S)  # the gateway's comments come more often

    def feed(self, line: str) -> list[Job]:
        """The jobs to begin after a stream's line. Raises `AnswerError` if the stream as a whole has failed.

        A step one of whose inputs has failed or was skipped never runs: the gateway has failed its output.
        """
        news = self._stream.feed(line)
        if news is None:
            return []
        self._failures = 0
        if news.value is not None:
            self._values[news.name] = news.value
            ready = [step for step in self._open if self._values.keys() >= set(step.inputs)]
            self._open = [step for step in self._open if step not in ready]
            jobs = [Job(step, step.given(self._values)) for step in ready]
            if self._open:
                return jobs
            self.last = jobs
        if news.error is not None and not isinstance(news.error, GetTimeoutError):
            self.delivery.collected.settle(step.entry for step in self._open if news.name in step.inputs)
            self._open = [step for step in self._open if news.name not in step.inputs]
        return []

    def pause_after(self, error: ClientError | None) -> float | None:
        """The seconds until the next stream, after one that has ended or failed. None if there is nothing to wait for.

        The gateway's refusal is final: the program is refused too, and says why.
        """
        is_refused = isinstance(error, AnswerError) and error.status is not None and error.status not in MAY_PASS
        is_given_up = is_refused or self.delivery.ended.is_set() or self._failures > self.delivery.retries.most
        if self._open and not is_given_up:
            self._failures += 1
            return self.delivery.retries.pause_s(self._failures - 1)
        self._give_back(self._open)
        self._open = []
        return None
