"""The steps of `/v1/submit` and `/v1/programs`, read from a request or, after a restart, from the log.

A step may have several outputs. For each, the prompt is filled up to the output, and an engine generates it.
"""

from __future__ import annotations

import json
from functools import partial
from hashlib import sha256
from typing import Final

import msgspec

from plait.backends.errors import CallerError
from plait.backends.protocol.openai import decode_body
from plait.gateway.calls.annotations import CALL_OF_PROGRAM, Annotations, of_route
from plait.gateway.calls.call_reader import CallReader, Incoming, PromptReader
from plait.gateway.calls.condition import ACCEPTED, read_condition
from plait.gateway.guests.programs.asked_step import AskedStep, without_keys
from plait.gateway.guests.programs.chained_call import CallRunner, ChainedCall
from plait.gateway.guests.programs.core.held_call import HeldCall, KeptRequest
from plait.gateway.guests.programs.core.session import Session
from plait.gateway.guests.programs.filled_prompts import in_turns
from plait.gateway.guests.programs.submission import CALL_BODY, SET_FOR_EACH_STEP, CallBody, Submission

SUBMIT: Final = "/v1/submit"


async def read_submission(reader: CallReader, incoming: Incoming, body: CallBody, session_id: str | None) -> AskedStep:
    """The submission in `incoming`; `body` is its decoded body. Raises `CallerError` if it could never run."""
    read = partial(_read, reader.prompts, incoming, body, session_id)
    asked = await in_turns(reader, incoming.tenant, read, len(incoming.body))
    reader.router.models.check(body.model)
    return asked


def _read(prompts: PromptReader, incoming: Incoming, body: CallBody, session_id: str | None) -> AskedStep:
    """The part of reading that does not need the state of the fleet, so that it can run on a thread."""
    submission = Submission(incoming.body, body)
    _check_whole(submission)
    asked = _asked(incoming, submission, session_id)
    templated = submission.templated
    if templated is not None:
        prompts.check(templated)
    if incoming.path != SUBMIT and "session_id" in submission.fields:
        message = "A call of a program takes no 'session_id'; name the session in the program."
        raise CallerError(message, param="session_id")
    return asked


def submitted_again(runner: CallRunner, session: Session, incoming: Incoming) -> HeldCall:
    """The call of a submission from the log. Raises `CallerError` if this release cannot read it."""
    submission = Submission(incoming.body, decode_body(incoming.body, CALL_BODY))
    return ChainedCall(runner, session, _asked(incoming, submission, session.session_id)).call


def _asked(incoming: Incoming, submission: Submission, session_id: str | None) -> AskedStep:
    return AskedStep(
        incoming,
        _annotations(incoming, submission.body, session_id),
        submission,
        fingerprint=sha256(b"submit" + incoming.body).digest(),
        kept=lambda: KeptRequest("submission", incoming.path, without_keys(incoming.headers), incoming.body),
    )


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
    if route != SUBMIT:  # its headers are those of the whole program
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
