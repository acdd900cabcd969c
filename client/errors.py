"""The client's exceptions, and the causes of a variable's failure. Each exception is a `ClientError`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import httpx
import msgspec


class FailureCause(msgspec.Struct, frozen=True, kw_only=True):
    """One link of a chain of causes. None stands for what the gateway does not know."""

    call: str | None = None
    """The id of the call that failed."""
    engine: str | None = None
    """The engine at fault."""
    transform: str | None = None
    """The transform that refused the call's text."""
    variable: str | None = None
    """An output that failed with the call."""
    message: str
    transient: bool = False
    """Whether the same call may succeed when it is sent again."""

    def __str__(self) -> str:
        return self.message if self.call is None else f"{self.call}: {self.message}"


def chain_text(causes: Iterable[FailureCause]) -> str:
    return ", because ".join(map(str, causes))


_EXCERPT_CHARACTERS = 300


class ClientError(Exception):
    """The base of the client's exceptions. `__cause__` is the underlying exception, if there is one."""


class TemplateError(ClientError, ValueError):
    """A semantic function's definition is invalid, or it is called with arguments that it cannot take."""


class ConnectionFailedError(ClientError, ConnectionError):
    """The gateway gave no answer, or its answer broke off. `__cause__` says how. The request may have arrived."""


class AnswerError(ClientError):
    """The gateway answered with an error, or sent an error event inside a stream (then `status` is None).

    `kind` is OpenAI's error type. `param` names the field at fault. `code` is machine-readable. `request_id` is the
    request's id in the gateway's log. `causes` is the chain of causes of a failed input, the nearest first. `function`
    names the semantic function whose call was refused, if the error is about one call of a program.
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
        self.function: str | None = None

    def name_function(self, function: str) -> None:
        """Note that the error is about a call of this function, and put its name before the message."""
        self.function = function
        self.args = (f"{function}: {self}",)


class VariableFailedError(ClientError):
    """A variable will never have a value. `causes` goes from its producer back to the root.

    The gateway leaves out the middle of a long chain. If a native function of this session is among the causes,
    `__cause__` is the exception that it raised.
    """

    _verb = "has failed"

    def __init__(self, variable: str, causes: Sequence[FailureCause]) -> None:
        super().__init__(f"{variable} {self._verb}: {chain_text(causes)}")
        self.variable = variable
        self.causes = tuple(causes)


class SkippedError(VariableFailedError):
    """A variable will never have a value, since the condition of its call, or of one upstream, does not hold."""

    _verb = "was skipped"


class GetTimeoutError(ClientError, TimeoutError):
    """The value did not come in time. The call goes on, and the variable can be got again."""

    def __init__(self, variable: str, timeout_s: float) -> None:
        super().__init__(f"{variable} has no value after {timeout_s:g} s")
        self.variable = variable
        self.timeout_s = timeout_s


class ErrorObject(msgspec.Struct, frozen=True):
    """The fields of an error in OpenAI's form."""

    message: str
    type: str | None = None
    param: str | None = None
    code: str | None = None
    causes: tuple[FailureCause, ...] = ()


class ErrorBody(msgspec.Struct, frozen=True):
    """An error in OpenAI's form."""

    error: ErrorObject

    def exception(self, *, status: int | None = None, request_id: str | None = None) -> AnswerError:
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
    """The error in an answer that was read to its end. An answer in another form (a proxy's page) has no code."""
    request_id = response.headers.get("x-request-id")
    try:
        body = msgspec.json.decode(response.content, type=ErrorBody)
    except msgspec.MsgspecError:
        shown = response.text[:_EXCERPT_CHARACTERS] or response.reason_phrase
        return AnswerError(shown, status=response.status_code, request_id=request_id)
    return body.exception(status=response.status_code, request_id=request_id)
