"""The calls of `/v1/submit` and `/v1/programs`: their owners, made from a request or, after a restart, from the log.

A call may have several outputs. For each, the prompt is filled up to the output, and an engine generates it.
"""

from __future__ import annotations

import json
from functools import partial
from hashlib import sha256
from typing import NamedTuple

import msgspec

from plait.backends.errors import CallerError, PlaitError
from plait.backends.protocol.openai import decode_body
from plait.gateway.calls.annotations import CALL_OF_PROGRAM, Annotations, of_route
from plait.gateway.calls.call import NOWHERE
from plait.gateway.calls.call_reader import CallReader, Incoming, PromptReader
from plait.gateway.chaining.chained_call import CallRunner, ChainedCall, without_keys
from plait.gateway.chaining.filled_prompts import Unfilled, in_turns
from plait.gateway.chaining.submission import CALL_BODY, SET_FOR_EACH_STEP, CallBody, Submission
from plait.gateway.programs.condition import ACCEPTED, read_condition
from plait.gateway.programs.held_call import HeldCall, KeptRequest, ReadyCall, with_condition
from plait.gateway.programs.session import Session
from plait.gateway.timer import loop_time_s
from plait.policy.types import CHARACTERS_PER_TOKEN


class HeldSubmission(NamedTuple):
    """A client's submission, parsed, with its annotations. A repetition has the same `fingerprint`."""

    incoming: Incoming
    submission: Submission
    annotations: Annotations
    fingerprint: bytes


class SubmittedCall(ChainedCall):
    """A call whose client does not wait for it. Clients get its outputs by name."""

    __slots__ = ("_asked", "_made")

    def __init__(self, runner: CallRunner, session: Session, asked: HeldSubmission) -> None:
        super().__init__(runner, session, asked.submission.path)
        incoming = msgspec.structs.replace(asked.incoming, path=self.path)
        self._asked: HeldSubmission | None = asked._replace(incoming=incoming)
        self._made: list[tuple[str, str]] = []

    def go_on_after(self, text: str, value: str) -> None:
        """Skip an output that an earlier process has generated: its text, and the value after its transform."""
        self._made.append((text, value))

    async def run(self, ready: ReadyCall) -> None:
        assert self._asked is not None, "a call runs once"
        (sent, submission, annotations, _), self._asked = self._asked, None  # frees the body: the call is kept longer
        values, texts, engine_id = dict(ready.values), dict[str, str](), None
        for step, (text, value) in zip(submission.steps, self._made, strict=False):
            texts[step.name], values[step.output.variable] = text, value
        for number, step in enumerate(submission.steps[len(self._made) :], len(self._made)):
            now_s = loop_time_s()
            incoming = msgspec.structs.replace(
                sent,
                request_id=f"{self.call.call_id}.{number}" if number else self.call.call_id,
                arrived_s=now_s if number else ready.ready_s,
            )
            self.promise.steps_left = len(submission.steps) - number
            self.space = submission.space_before(step)
            with self.runner.prompts.of(sent.tenant, self.call) as prompt:
                unfilled = Unfilled(
                    submission.body.model,
                    submission.field,
                    partial(submission.filled_sizes, step, values, texts),
                    partial(submission.request, step, values, texts),
                    self.unless_watched,
                )
                asked = await prompt.read(incoming, unfilled, annotations)
                if number == 0:
                    self.runner.executor.start(self.call, loop_time_s())
                of_session = msgspec.structs.replace(asked, continues_on=engine_id, session=self.session.session_id)
                generated = await self.generate(of_session, NOWHERE)
            engine_id, texts[step.name], values[step.output.variable] = generated

    def take_back(self) -> bool:
        """Always True: only streaming getters see text early, and they get an error if the new text differs."""
        return True

    def on_failed(self, error: PlaitError) -> None:
        """Does nothing: clients wait for the outputs, which have failed, and not for the call."""


async def read_submission(
    reader: CallReader, incoming: Incoming, body: CallBody, session_id: str | None
) -> HeldSubmission:
    """The submission in `incoming`; `body` is its decoded body. Raises `CallerError` if it could never run."""
    read = partial(_read, reader.prompts, incoming, body, session_id)
    asked = await in_turns(reader, incoming.tenant, read, len(incoming.body))
    reader.router.models.check(body.model)
    return asked


def _read(prompts: PromptReader, incoming: Incoming, body: CallBody, session_id: str | None) -> HeldSubmission:
    """The part of reading that does not need the state of the fleet, so that it can run on a thread."""
    submission = Submission(incoming.body, body)
    _check_whole(submission)
    annotations = _annotations(incoming, body, session_id)
    templated = submission.templated
    if templated is not None:
        prompts.check(templated)
    return HeldSubmission(incoming, submission, annotations, _fingerprint(incoming.body))


def _fingerprint(body: bytes) -> bytes:
    return sha256(b"submit" + body).digest()


def new_call(runner: CallRunner, session: Session, asked: HeldSubmission) -> HeldCall:
    """The submission's call. The caller adds it to the session."""
    incoming, submission, annotations, fingerprint = asked
    owner = SubmittedCall(runner, session, asked)
    owner.call = HeldCall(
        session.unused_id(incoming.request_id),
        with_condition(submission.inputs, annotations.when),
        tuple(step.output for step in submission.steps),
        owner,
        submission.body.model,
        when=annotations.when,
        slo=annotations.slo,
        objective=annotations.objective,
        prompt_tokens=submission.characters // CHARACTERS_PER_TOKEN,
        output_tokens=submission.output_tokens,
        held_bytes=len(incoming.body),
        fingerprint=fingerprint,
        request=lambda: KeptRequest("submission", incoming.path, without_keys(incoming.headers), incoming.body),
    )
    return owner.call


def made_again(runner: CallRunner, session: Session, call_id: str, request: KeptRequest, now_s: float) -> HeldCall:
    """The call of a submission from the log. Raises `CallerError` if this release cannot read it."""
    incoming = Incoming(request.path, request.headers, request.body, call_id, now_s, session.tenant.name)
    body = decode_body(request.body, CALL_BODY)
    submission, annotations = Submission(request.body, body), _annotations(incoming, body, session.session_id)
    return new_call(runner, session, HeldSubmission(incoming, submission, annotations, _fingerprint(request.body)))


def _check_whole(submission: Submission) -> None:
    """Raise for fields that Plait sets itself and for undeclared placeholders, which would have no effect."""
    useless = sorted(SET_FOR_EACH_STEP.intersection(submission.fields))
    if useless:
        raise CallerError(f"A submitted call takes no '{useless[0]}'; leave it out.", param=useless[0])
    undeclared = sorted(submission.undeclared)
    if undeclared:
        raise CallerError(
            f"The prompt has {{{{{undeclared[0]}}}}}, which is not among the call's 'placeholders'; declare it there, "
            "or put a text that has such braces into a value.",
            param="placeholders",
        )


def _annotations(incoming: Incoming, body: CallBody, session_id: str | None) -> Annotations:
    route, headers = incoming.path, incoming.headers
    if route != "/v1/submit":  # its headers are those of the whole program
        route, headers = CALL_OF_PROGRAM, ()
    annotations = of_route(route, headers, ("session_id", "session", session_id), body_annotations=body.plait)
    if body.when is None:
        return annotations
    when = read_condition(body.when)
    if when is None:
        raise CallerError(f"'when' is {_shown(body.when)}; it must be {ACCEPTED}.", param="when")
    return msgspec.structs.replace(annotations, when=when)


def _shown(text: str) -> str:
    return json.dumps(text if len(text) <= 80 else f"{text[:80]}...")
