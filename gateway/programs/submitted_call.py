"""A submitted call on its way: one delivery for each output, in order, on the same engine."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import msgspec
from starlette.types import Message

from plait.backends.errors import PlaitError
from plait.gateway.calls.annotations import Annotations
from plait.gateway.calls.call_reader import Incoming
from plait.gateway.programs.chained_call import CallRunner, ChainedCall
from plait.gateway.programs.filled_prompts import Unfilled
from plait.gateway.programs.held_call import ReadyCall
from plait.gateway.programs.session import Session
from plait.gateway.programs.submission import Submission
from plait.gateway.timer import loop_time_s


class HeldSubmission(NamedTuple):
    """A client's submission, parsed, with its annotations. `fingerprint` is equal for a repetition."""

    incoming: Incoming
    submission: Submission
    annotations: Annotations
    fingerprint: bytes


class SubmittedCall(ChainedCall):
    """A call whose client does not wait for it. Clients get its outputs by name."""

    __slots__ = ("_asked",)

    def __init__(self, runner: CallRunner, session: Session, asked: HeldSubmission) -> None:
        super().__init__(runner, session)
        incoming = msgspec.structs.replace(asked.incoming, path=asked.submission.path)
        self._asked: HeldSubmission | None = asked._replace(incoming=incoming)

    async def run(self, ready: ReadyCall) -> None:
        """For each output: fill the prompt, then generate."""
        assert self._asked is not None, "a call runs once"
        (sent, submission, annotations, _), self._asked = self._asked, None  # frees the body: the call is kept longer
        values, texts, engine_id = dict(ready.values), dict[str, str](), None
        for number, step in enumerate(submission.steps):
            now_s = loop_time_s()
            incoming = msgspec.structs.replace(
                sent,
                request_id=f"{self.call.call_id}.{number}" if number else self.call.call_id,
                arrived_s=now_s if number else ready.ready_s,
            )
            self.promise.steps_left = len(submission.steps) - number
            with self.runner.prompts.of(sent.tenant, self.call) as prompt:
                unfilled = Unfilled(
                    submission.body.model,
                    submission.field,
                    partial(submission.filled_sizes, step, values, texts),
                    partial(submission.request, step, values, texts),
                    self.unless_watched,
                )
                delivery = await prompt.read(incoming, unfilled, annotations)
                if number == 0:
                    self.runner.executor.start(self.call, loop_time_s())
                generated = await self.generate(msgspec.structs.replace(delivery, continues_on=engine_id), _nobody)
            engine_id, texts[step.name], values[step.output.variable] = generated

    def take_back(self) -> bool:
        """Always True: only streaming getters have seen text, and they get an error if the new text differs."""
        return True

    def on_failed(self, error: PlaitError) -> None:
        """No effect: clients wait for the outputs, not for the call, and the outputs have failed."""


async def _nobody(_message: Message) -> None:
    """ASGI's send for a call without a client."""
