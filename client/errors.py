"""What can go wrong between a program and the gateway, as exceptions: every one is a `ClientError`."""

from __future__ import annotations

from collections.abc import Sequence

import httpx
import msgspec

from plait.client.failure_cause import FailureCause, chain_text

_EXCERPT_CHARACTERS = 300


class ClientError(Exception):
    """The root. An exception's `__cause__` is what it was made of, where there is such a thing."""


class TemplateError(ClientError, ValueError):
    """A semantic function is not written as it has to be, or is called with arguments that it cannot take."""


class ConnectionFailedError(ClientError, ConnectionError):
    """The gateway gave no answer, or broke one off; `__cause__` says how. What was sent may have arrived."""


class AnswerError(ClientError):
    """The gateway answered with an error, or in the middle of a stream with an error event (whose `status` is None).

    `kind` is OpenAI's error type, `param` names the field at fault, `code` is machine-readable; `request_id` finds the
    request in the gateway's log. `causes` are those of a failed input, from the nearest back to the root.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        kind: str | None = None,
        param: str | None = None,
        code: str | None = None,
        request_id: str | None = None,
        causes: Sequence[FailureCause] = (),
    ) -> None:
        super().__init__(message if status is None else f"{message} (status {status})")
        self.message = message
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code
        self.request_id = request_id
        self.causes = tuple(causes)


class VariableFailedError(ClientError):
    """A variable will never have a value. `causes` goes from the call that should have produced it back to the root; of
    a long chain the gateway leaves the middle out.
    """

    def __init__(self, variable: str, causes: Sequence[FailureCause]) -> None:
        super().__init__(f"{variable} has failed: {chain_text(causes)}")
        self.variable = variable
        self.causes = tuple(causes)


class GetTimeoutError(ClientError, TimeoutError):
    """The value did not come in time. Nothing is lost: the call goes on, and the variable can be got again."""

    def __init__(self, variable: str, timeout_s: float) -> None:
        super().__init__(f"{variable} has no value after {timeout_s:g} s")
        self.variable = variable
        self.timeout_s = timeout_s


class _ErrorObject(msgspec.Struct, frozen=True):
    message: str
    type: str | None = None
    param: str | None = None
    code: str | None = None
    causes: tuple[FailureCause, ...] = ()


class ErrorBody(msgspec.Struct, frozen=True):
    """OpenAI's shape of an error."""

    error: _ErrorObject

    def exception(self, *, status: int | None = None, request_id: str | None = None) -> AnswerError:
        """The error to raise."""
        found = self.error
        return AnswerError(
            found.message,
            status=status,
            kind=found.type,
            param=found.param,
            code=found.code,
            request_id=request_id,
            causes=found.causes,
        )


def answer_error(response: httpx.Response) -> AnswerError:
    """The error in an answer that was read to its end; a proxy's page counts as one without a code."""
    request_id = response.headers.get("x-request-id")
    try:
        body = msgspec.json.decode(response.content, type=ErrorBody)
    except msgspec.MsgspecError:
        shown = response.text[:_EXCERPT_CHARACTERS] or response.reason_phrase
        return AnswerError(shown, status=response.status_code, request_id=request_id)
    return body.exception(status=response.status_code, request_id=request_id)
