"""The errors that a client can get, in OpenAI's shape. Each says who is at fault and has an HTTP status.

The gateway and the embedded engine answer with them. The code that calls a library translates the library's errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import msgspec


class ReachedLimit(NamedTuple):
    """A limit that a request is above, by its name in the configuration: `most` is allowed, and so much was `used`."""

    limit: str
    most: float
    used: float


class PlaitError(Exception):
    """The base class: a message that a user can act on, and the other fields of OpenAI's error object.

    `param` names the field at fault, `code` is machine-readable, `retry_after_s` becomes a `Retry-After` header. If not
    `is_stored`, it tells of what should be stored and is not.

    The log has a message only if it never `quotes` a request or an answer. A class whose messages have the gateway's
    words and numbers only says so; an error of another class can, where it is raised.
    """

    status: int = 500
    kind: ClassVar[str] = "server_error"
    default_code: ClassVar[str | None] = None
    is_stored: bool = True
    reached: ReachedLimit | None = None
    """The limit that was reached, for operators; None if there is none."""

    quotes: bool = True
    """Whether the message may have words of a prompt, a tool, a schema or an answer."""

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
        """The code as metrics and the log have it: never empty."""
        return self.code or self.kind

    @property
    def error_object(self) -> dict[str, Any]:
        """OpenAI's error object, ready for JSON."""
        return {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}

    def body(self) -> bytes:
        """The error object as the body of a response, or as the data of an event in a stream."""
        return msgspec.json.encode({"error": self.error_object})


class CallerError(PlaitError):
    """The request is at fault: sending it again unchanged fails again."""

    status = 400
    kind = "invalid_request_error"


class AuthenticationError(CallerError):
    """The API key is missing or unknown."""

    status = 401
    kind = "authentication_error"
    default_code = "invalid_api_key"
    quotes = False


class NotFoundError(CallerError):
    """The path does not exist here."""

    status = 404
    default_code = "not_found"


class MethodNotAllowedError(CallerError):
    """The path exists, and takes POST requests only."""

    status = 405
    default_code = "method_not_allowed"
    quotes = False


class ModelNotFoundError(NotFoundError):
    """No engine of the fleet serves the model."""

    default_code = "model_not_found"


class NoWebSocketError(CallerError):
    """A client asks for a WebSocket where there is none; clients go on with HTTP then."""

    status = 426
    default_code = "no_websocket"
    quotes = False

    def __init__(self) -> None:
        super().__init__("There is no WebSocket here. Send POST requests and ask for a stream.")


class BodyTooLargeError(CallerError):
    """The request body is over the configured limit."""

    status = 413
    default_code = "body_too_large"
    quotes = False


class EncodingNotSupportedError(CallerError):
    """The request body is compressed in a way that is not known here. `taken` has those that are."""

    status = 415
    default_code = "unsupported_content_encoding"

    def __init__(self, message: str, taken: str) -> None:
        super().__init__(message)
        self.taken = taken


class HeadersTooLargeError(CallerError):
    """The request's headers are over a limit on their number or their bytes."""

    status = 431
    default_code = "headers_too_large"
    quotes = False


class RequestTimeoutError(CallerError):
    """The request did not come in time."""

    status = 408
    default_code = "request_timeout"
    quotes = False


class WaitTimeoutError(CallerError):
    """The variable did not come within the caller's time limit; it may still come."""

    status = 408
    default_code = "get_timeout"


class ConflictError(CallerError):
    """The request contradicts an earlier one; `code` says how."""

    status = 409


class SessionEndedError(CallerError):
    """The session was deleted or has expired. Its waiting and running calls were cancelled."""

    status = 410
    default_code = "session_ended"


class ValueTooLargeError(CallerError):
    """A value is above its limit, or the tenant's sessions would hold too many bytes of values and waiting calls."""

    status = 413
    default_code = "value_too_large"


class ProgramTooLargeError(CallerError):
    """A program has more calls than one request may have."""

    status = 413
    default_code = "program_too_large"


class FailedDependencyError(CallerError):
    """A dependency of the request has failed. `causes` run from the nearest to the root, ready for JSON.

    `transient` is True if the dependency may succeed when it is sent again.
    """

    status = 424
    kind = "failed_dependency"

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


class LimitError(CallerError):
    """The tenant has reached a limit on what it may have at once; `code` says which."""

    status = 429
    kind = "rate_limit_error"
    quotes = False


class SessionWaitingError(LimitError):
    """The session waits until its context fits into the engines' caches, at this `position` among the tenant's."""

    default_code = "session_waiting"

    def __init__(self, message: str, *, position: int, retry_after_s: float) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.position = position


class OverloadedError(LimitError):
    """More waits for the model than may: the call is refused, and may be sent again when the queue is shorter."""

    kind = "overloaded_error"
    default_code = "overloaded"


class ContextLengthError(CallerError):
    """The prompt, alone or with the requested output, exceeds the model's context.

    `needed_tokens` and `context_tokens` are None where they are not known.
    """

    default_code = "context_length_exceeded"
    quotes = False

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        needed_tokens: int | None = None,
        context_tokens: int | None = None,
    ) -> None:
        super().__init__(message, param=param)
        self.needed_tokens = needed_tokens
        self.context_tokens = context_tokens


class UnsupportedError(CallerError):
    """The request is valid, but Plait does not support it. It is refused rather than ignored."""

    status = 501
    default_code = "unsupported"


class TooManyConnectionsError(PlaitError):
    """The server has no room for another connection."""

    status = 503
    default_code = "too_many_connections"
    quotes = False


class AnswerTooLargeError(PlaitError):
    """The gateway has no room for an answer that it has to hold. The engine has done nothing wrong."""

    status = 502
    default_code = "answer_too_large"
    quotes = False


class NoRoomForUploadError(PlaitError):
    """The gateway's disk takes no more of an upload."""

    status = 503
    default_code = "no_room_for_upload"
    quotes = False

    def __init__(self) -> None:
        super().__init__("The gateway has no room on its disk for this upload; send it again.", retry_after_s=1.0)


class PeerUnavailableError(PlaitError):
    """The gateway that has the request's session does not answer. It may be back soon."""

    status = 503
    default_code = "gateway_unavailable"
    quotes = False


class GatewayStoppingError(PlaitError):
    """The gateway stops before the request has its answer. Another gateway, or the next one here, can give it."""

    status = 503
    default_code = "gateway_stopping"
    quotes = False

    def __init__(self, message: str = "The gateway is stopping; send the request again.") -> None:
        super().__init__(message, retry_after_s=1.0)


class EngineError(PlaitError):
    """The engine is at fault: the same request may succeed later or elsewhere.

    `cause` is the kind of failure, as metrics and the log show it. This class itself is a lost connection.
    """

    status = 502
    kind = "engine_error"
    default_code = "engine_error"
    cause: str = "closed"
    quotes = False


class EngineUnreachableError(EngineError):
    """No connection to the engine: nothing of the request has run, so another engine may take it."""

    default_code = "engine_unreachable"
    cause = "unreachable"


class EngineTimeoutError(EngineError):
    """The engine took the request and then said nothing for too long."""

    status = 504
    default_code = "engine_timeout"
    cause = "timeout"


class EngineGarbledError(EngineError):
    """The engine sent something that is not an answer: not HTTP, not JSON, not a completion."""

    default_code = "engine_garbled"
    cause = "garbled"
    quotes = True


class EngineBrokenError(EngineError):
    """The answer has no ending: no finish reason, or a stream without its last event."""

    default_code = "engine_broken"
    cause = "broken"


class EngineStatusError(EngineError):
    """The engine answered with an error status that is its own fault. A client gets the same status.

    `said` is the engine's own message, if it sent one, which may quote the prompt.
    """

    quotes = True

    def __init__(
        self,
        message: str,
        status: int,
        *,
        code: str | None = None,
        retry_after_s: float | None = None,
        said: str = "",
    ) -> None:
        super().__init__(message, code=code, retry_after_s=retry_after_s)
        self.status = status
        self.said = said
        self.cause = f"status_{status}"


class EngineLostError(EngineError):
    """The gateway gave the engine up in the middle of the call: it was silent, or ejected."""

    default_code = "engine_lost"
    cause = "lost"


class NoEngineError(EngineError):
    """Engines serve the model, but none of them takes calls right now."""

    status = 503
    default_code = "no_engine_available"
    cause = "no_engine"
