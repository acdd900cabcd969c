"""Reads a submission and makes its call, for both routes that take submissions: `/v1/submit` and `/v1/programs`."""

from __future__ import annotations

import json
from functools import partial
from hashlib import sha256

import msgspec

from plait.backends.errors import CallerError
from plait.gateway.calls.annotations import ACCEPTED, Annotations, read_annotations, read_condition, with_condition
from plait.gateway.calls.call_reader import CallReader, Incoming
from plait.gateway.calls.tokenization import CHARACTERS_PER_TOKEN, PromptReader
from plait.gateway.programs.chained_call import CallRunner
from plait.gateway.programs.held_call import HeldCall
from plait.gateway.programs.session import Session
from plait.gateway.programs.submission import SET_FOR_EACH_STEP, CallBody, Submission
from plait.gateway.programs.submitted_call import HeldSubmission, SubmittedCall


async def read_submission(
    reader: CallReader, incoming: Incoming, body: CallBody, session_id: str | None
) -> HeldSubmission:
    """The submission in `incoming`, whose body is decoded as `body`. Raises `CallerError` if it could never run."""
    read = partial(_read, reader.prompts, incoming, body, session_id)
    asked = await reader.in_turns(incoming.tenant, read, len(incoming.body))
    reader.router.models.check(body.model)
    return asked


def _read(prompts: PromptReader, incoming: Incoming, body: CallBody, session_id: str | None) -> HeldSubmission:
    """What can be read of a submission without the state of the fleet: on a thread, if it is long."""
    submission = Submission(incoming.body, body)
    _check_whole(submission)
    annotations = _annotations(body, session_id)
    prompts.check(submission.opening)
    return HeldSubmission(incoming, submission, annotations, sha256(b"submit" + incoming.body).digest())


def new_call(runner: CallRunner, session: Session, asked: HeldSubmission) -> HeldCall:
    """The submission's call, which is not in the session yet."""
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
    )
    return owner.call


def _check_whole(submission: Submission) -> None:
    """Raise for what would have no effect: a field that Plait sets itself, a placeholder that is not declared."""
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


def _annotations(body: CallBody, session_id: str | None) -> Annotations:
    annotations = read_annotations((), body.plait)
    if annotations.inputs or annotations.output or annotations.when or annotations.session not in (None, session_id):
        message = (
            "'plait' cannot name these here: the session and 'when' are fields of their own, inputs and outputs are in "
            "'placeholders'."
        )
        raise CallerError(message, param="plait")
    if body.when is None:
        return annotations
    when = read_condition(body.when)
    if when is None:
        raise CallerError(f"'when' is {_shown(body.when)}; it must be {ACCEPTED}.", param="when")
    return msgspec.structs.replace(annotations, when=when)


def _shown(text: str) -> str:
    return json.dumps(text if len(text) <= 80 else f"{text[:80]}...")
