"""The errors that a client can get, in OpenAI's shape. Each says who is at fault and has an HTTP status.

The gateway and the embedded engine answer with them. The code that calls a library translates the library's errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Final, NamedTuple

import msgspec


class ReachedLimit(NamedTuple):
    """A limit that a request exceeds: its name in the configuration, the value allowed, and the value `used`."""

    limit: str
    most: float
    used: float


class PlaitError(Exception):
    """The base class: a message that a user can act on, and the other fields of OpenAI's error object.

    `param` names the field at fault, `code` is machine-readable, `retry_after_s` becomes a `Retry-After` header.

    The log gets a message only if the message does not quote a request or an answer. `quotes=False` says so, for a
    class, or for one error where it is raised.
    """

    status: int = 500
    kind: ClassVar[str] = "server_error"
    default_code: ClassVar[str | None] = None
    is_stored: bool = True  # False: of a durable session, but the store could not record it; a header says so
    reached: ReachedLimit | None = None
    """The limit that was reached, for operators."""

    quotes: bool = True
    """Whether the message may have words of a prompt, a tool, a schema or an answer."""

    def __init_subclass__(
        cls, *, status: int = 0, kind: str = "", code: str | None = None, quotes: bool | None = None
    ) -> None:
        """Attributes given in a class's head. Attributes that are left out are inherited."""
        cls.status = status or cls.status
        cls.kind = kind or cls.kind
        cls.default_code = code or cls.default_code
        cls.quotes = cls.quotes if quotes is None else quotes

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        quotes: bool | None = None,
        reached: ReachedLimit | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code if code is not None else self.default_code
        self.retry_after_s = retry_after_s
        if quotes is not None:
            self.quotes = quotes
        self.reached = reached

    @property
    def logged_message(self) -> str | None:
        """The message for the log; None if it may quote a request or an answer."""
        return None if self.quotes else self.message

    @property
    def shown_code(self) -> str:
        """The code for metrics and the log; never empty."""
        return self.code or self.kind

    @property
    def error_object(self) -> dict[str, Any]:
        """OpenAI's error object, ready for JSON."""
        return {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}

    def body(self) -> bytes:
        """The error object as the body of a response, or as the data of an event in a stream."""
        return msgspec.json.encode({"error": self.error_object})


class CallerError(PlaitError, status=400, kind="invalid_request_error"):
    """The request is at fault: sending it again unchanged fails again."""


class AuthenticationError(CallerError, status=401, kind="authentication_error", code="invalid_api_key", quotes=False):
    """The API key is missing or unknown."""


class AccountsUnavailableError(PlaitError, status=503, code="accounts_unavailable", quotes=False):
    """The store of API keys and budgets does not answer, and without it nobody knows whether the request may pass."""

    def __init__(self) -> None:
        super().__init__("The accounts cannot be read now; send the request again.", retry_after_s=1.0)


class NotFoundError(CallerError, status=404, code="not_found"):
    """The path does not exist here."""


class MethodNotAllowedError(CallerError, status=405, code="method_not_allowed", quotes=False):
    """The path exists, and takes POST requests only."""


class ModelNotFoundError(NotFoundError, code="model_not_found"):
    """No engine of the fleet serves the model."""


class NoWebSocketError(CallerError, status=426, code="no_websocket", quotes=False):
    """A client asks for a WebSocket where there is none. Clients then fall back to HTTP."""

    def __init__(self) -> None:
        super().__init__("There is no WebSocket here. Send POST requests and ask for a stream.")


class BodyTooLargeError(CallerError, status=413, code="body_too_large", quotes=False):
    """The request body is over the configured limit."""


class EncodingNotSupportedError(CallerError, status=415, code="unsupported_content_encoding"):
    """The request body has an unknown compression. `taken` lists the known ones."""

    def __init__(self, message: str, taken: str) -> None:
        super().__init__(message)
        self.taken = taken


class HeadersTooLargeError(CallerError, status=431, code="headers_too_large", quotes=False):
    """The request's headers are over a limit on their number or their bytes."""


class RequestTimeoutError(CallerError, status=408, code="request_timeout", quotes=False):
    """The request did not come in time."""


class WaitTimeoutError(CallerError, status=408, code="get_timeout"):
    """The variable did not come within the caller's time limit; it may still come."""


class ConflictError(CallerError, status=409):
    """The request contradicts an earlier one; `code` says how."""


class SessionEndedError(CallerError, status=410, code="session_ended"):
    """The session was deleted or has expired. Its waiting and running calls were cancelled."""


class ValueTooLargeError(CallerError, status=413, code="value_too_large"):
    """A value is above its limit, or the tenant's sessions would hold too many bytes of values and waiting calls."""


class ProgramTooLargeError(CallerError, status=413, code="program_too_large"):
    """A program has more calls than one request may have."""


class FailedDependencyError(CallerError, status=424, kind="failed_dependency"):
    """A dependency of the request has failed. `causes` run from the nearest to the root, ready for JSON.

    `transient` is True if the dependency may succeed when it is sent again.
    """

    def __init__(
        self,
        message: str,
        causes: Sequence[Any],
        *,
        param: str | None = None,
        code: str | None = None,
        transient: bool = False,
    ) -> None:
        super().__init__(message, param=param, code=code)
        self.causes = tuple(causes)
        self.transient = transient

    @property
    def error_object(self) -> dict[str, Any]:
        """OpenAI's error object with the causes beside it."""
        return {**super().error_object, "transient": self.transient, "causes": self.causes}


class LimitError(CallerError, status=429, kind="rate_limit_error", quotes=False):
    """The tenant has reached a limit on what it may have at once; `code` says which."""


class BudgetExceededError(LimitError, code="budget_exceeded"):
    """A budget of the tenant or of its key has nothing left until `retry_after_s` is over.

    `is_reserved`: calls that run have reserved the rest, and may leave some of it.
    """

    def __init__(
        self, message: str, *, retry_after_s: float, reached: ReachedLimit | None = None, is_reserved: bool = False
    ) -> None:
        super().__init__(message, retry_after_s=retry_after_s, reached=reached)
        self.is_reserved = is_reserved


ENDS_STREAMS: Final = (BudgetExceededError, AccountsUnavailableError)
"""What may end a stream that has begun, by an error event: no engine is at fault, and its client has not gone."""


class SessionWaitingError(LimitError, code="session_waiting"):
    """The session waits until its context fits into the engines' caches, at this `position` among the tenant's."""

    def __init__(self, message: str, *, position: int, retry_after_s: float) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.position = position


class OverloadedError(LimitError, kind="overloaded_error", code="overloaded"):
    """More waits for the model than may: the call is refused, and may be sent again when the queue is shorter."""


class ContextLengthError(CallerError, code="context_length_exceeded", quotes=False):
    """The prompt, alone or with the requested output, exceeds the model's context.

    `prompt_tokens` and `context_tokens` are None where they are not known. `output_tokens` is what the request wants
    beside the prompt; 0: not known, or the prompt alone is too long. `is_bound`: the prompt may have more tokens.
    """

    is_bound: bool = False

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        prompt_tokens: int | None = None,
        output_tokens: int = 0,
        context_tokens: int | None = None,
    ) -> None:
        super().__init__(message, param=param)
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.context_tokens = context_tokens

    @property
    def prompt_fits(self) -> bool:
        """Whether the same prompt would fit with a lower output limit."""
        if self.prompt_tokens is None or self.context_tokens is None:
            return False
        return self.output_tokens > 0 and self.prompt_tokens < self.context_tokens


class UnsupportedError(CallerError, status=501, code="unsupported"):
    """Plait does not support a valid part of the request, and refuses the request instead of ignoring the part."""


class TooManyOpenRequestsError(LimitError, code="too_many_open_requests"):
    """Most connections are in use, many of them by this tenant. The answer closes its connection."""


class TooManyConnectionsError(PlaitError, status=503, code="too_many_connections", quotes=False):
    """The server has no room for another connection."""


class AnswerTooLargeError(PlaitError, status=502, code="answer_too_large", quotes=False):
    """The gateway has no room for an answer that it has to hold. The engine has done nothing wrong."""


class TemplateTimeoutError(PlaitError, status=503, code="template_timeout", quotes=False):
    """The machine gave the process that renders chat templates too little CPU time. The request is not at fault."""

    def __init__(self) -> None:
        super().__init__("The gateway had too little time to render the chat; send it again.", retry_after_s=1.0)


class NoRoomForUploadError(PlaitError, status=503, code="no_room_for_upload", quotes=False):
    """The gateway's disk takes no more of an upload."""

    def __init__(self) -> None:
        super().__init__("The gateway has no room on its disk for this upload; send it again.", retry_after_s=1.0)


class PeerUnavailableError(PlaitError, status=503, code="gateway_unavailable", quotes=False):
    """The gateway that has the request's session does not answer, but may be back soon."""


class GatewayStoppingError(PlaitError, status=503, code="gateway_stopping", quotes=False):
    """The gateway stops before the request has its answer. Another gateway, or the next one here, can give it."""

    def __init__(self, message: str = "The gateway is stopping; send the request again.") -> None:
        super().__init__(message, retry_after_s=1.0)


class EngineError(PlaitError, status=502, kind="engine_error", code="engine_error", quotes=False):
    """The engine is at fault: the same request may succeed later or elsewhere.

    `cause` is the kind of failure, as metrics and the log show it. This class itself is a lost connection.
    """

    cause: str = "closed"
    is_requests: bool = False  # True: the request itself makes engines fail, so no other engine is asked


class EngineUnreachableError(EngineError, code="engine_unreachable"):
    """No connection to the engine: nothing of the request has run, so another engine may take it."""

    cause = "unreachable"


class EngineTimeoutError(EngineError, status=504, code="engine_timeout"):
    """The engine took the request and then said nothing for too long."""

    cause = "timeout"


class EngineGarbledError(EngineError, code="engine_garbled", quotes=True):
    """The engine sent something that is not an answer: not HTTP, not JSON, not a completion."""

    cause = "garbled"


class EngineBrokenError(EngineError, code="engine_broken"):
    """The answer has no ending: no finish reason, or a stream without its last event."""

    cause = "broken"


class EngineStatusError(EngineError, quotes=True):
    """The engine answered with an error status that is its own fault. A client gets the same status.

    `said` is the engine's own message, if it sent one, which may quote the prompt.
    """

    def __init__(self, message: str, status: int, *, retry_after_s: float | None = None, said: str = "") -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.status = status
        self.said = said
        self.cause = f"status_{status}"


class EngineLostError(EngineError, code="engine_lost"):
    """The gateway gave the engine up in the middle of the call: it was silent, or ejected."""

    cause = "lost"


class NoEngineError(EngineError, status=503, code="no_engine_available"):
    """Engines serve the model, but none of them takes calls right now."""

    cause = "no_engine"
