"""Reads a submission and makes its call, for both routes that take submissions: `/v1/submit` and `/v1/programs`."""

from __future__ import annotations

from hashlib import sha256

from plait.backends.errors import CallerError
from plait.gateway.calls.annotations import Annotations, read_annotations
from plait.gateway.calls.call_reader import CallReader, Incoming
from plait.gateway.calls.guessed_tokens import CHARACTERS_PER_TOKEN
from plait.gateway.programs.chained_call import CallRunner
from plait.gateway.programs.held_call import HeldCall
from plait.gateway.programs.session import Session
from plait.gateway.programs.submission import SET_FOR_EACH_STEP, CallBody, Submission
from plait.gateway.programs.submitted_call import HeldSubmission, SubmittedCall


def read_submission(reader: CallReader, incoming: Incoming, body: CallBody, session_id: str | None) -> HeldSubmission:
    """The submission in `incoming`, whose body is decoded as `body`. Raises `CallerError` if it could never run."""
    submission = Submission(incoming.body, body)
    _check_whole(submission)
    annotations = _annotations(body, session_id)
    reader.router.models.check(body.model)
    reader.prompts.check(submission.opening)
    return HeldSubmission(incoming, submission, annotations)


def new_call(runner: CallRunner, session: Session, asked: HeldSubmission) -> HeldCall:
    """The submission's call, which is not in the session yet."""
    incoming, submission, annotations = asked
    owner = SubmittedCall(runner, session, asked)
    owner.call = HeldCall(
        session.unused_id(incoming.request_id),
        submission.inputs,
        tuple(step.output for step in submission.steps),
        owner,
        submission.body.model,
        slo=annotations.slo,
        objective=annotations.objective,
        prompt_tokens=submission.characters // CHARACTERS_PER_TOKEN,
        output_tokens=submission.output_tokens,
        held_bytes=len(incoming.body),
        fingerprint=sha256(b"submit" + incoming.body).digest(),
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
    if annotations.inputs or annotations.output or annotations.session not in (None, session_id):
        message = (
            "'plait' cannot name these here: name the session in its own field, inputs and outputs in 'placeholders'."
        )
        raise CallerError(message, param="plait")
    return annotations
