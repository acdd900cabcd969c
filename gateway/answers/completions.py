"""Reads completions on their way to the client: whole answers, and streams of events.

The gateway needs an answer's usage, finish reasons and errors, and trusts none of them. The client gets the engine's
bytes. Pure: bytes in, bytes out. Reading a stream takes time linear in its bytes, and memory for its longest event.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from codecs import BOM_UTF8
from collections.abc import Collection
from math import isnan
from operator import itemgetter
from typing import Any, ClassVar, NamedTuple

import msgspec

from plait.backends.errors import (
    EngineBrokenError,
    EngineError,
    EngineGarbledError,
    EngineStatusError,
)
from plait.backends.http.content_types import is_event_stream
from plait.backends.protocol.api_errors import COMPLETION_ERRORS, ApiErrors
from plait.backends.protocol.json_constants import without_constants
from plait.backends.protocol.openai import check_unicode
from plait.backends.protocol.plain_events import PlainEvents
from plait.backends.protocol.surrogates import events_with_whole_pairs, has_half, may_go_on
from plait.gateway.answers.assembled_completion import AssembledCompletion, events_of_whole
from plait.gateway.answers.error_texts import excerpt, stated_status
from plait.gateway.answers.event_bytes import end_of_last_event, events_of, with_data
from plait.gateway.fleet.booking import CallUsage

MOST_TOKENS = 2**24
"""The most tokens that an engine may report if the model's context is unknown."""

LONG_BYTES = 2**20
"""The texts of a longer answer are not decoded, to save memory."""

FAILED_ENDINGS = frozenset(("abort", "error"))
"""The finish reasons of a text that its engine has aborted."""


class CompletionBody(msgspec.Struct, frozen=True):
    """A response, or the data of an event. Each field may have any type, so that any JSON object can be decoded."""

    usage: Any = None
    choices: Any = None
    error: Any = None
    object: Any = None
    message: Any = None
    type: Any = None
    code: Any = None

    @property
    def failure(self) -> Any:
        """The error object of an engine that has answered with an error; None: the answer is no error."""
        if self.error is not None or self.object != "error":
            return self.error
        return {"message": self.message, "type": self.type, "param": None, "code": self.code}

    @property
    def only_usage(self) -> bool:
        return self.usage is not None and self.choices == []


class _Ending(msgspec.Struct, frozen=True):
    finish_reason: Any = None
    index: Any = 0


class _LongBody(msgspec.Struct, frozen=True):
    """A long answer without its texts, which would take as much memory again."""

    usage: Any = None
    choices: list[_Ending] | None = None
    error: Any = None


class _CachedTokens(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class _Counts(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: _CachedTokens | None = None


class _UsualEnding(msgspec.Struct, frozen=True):
    finish_reason: str


class _UsualBody(msgspec.Struct, frozen=True):
    """The form of nearly all answers: one choice, and a usage in integers. Typed fields decode faster."""

    usage: _Counts
    choices: tuple[_UsualEnding]
    error: None = None


class UsageBounds(msgspec.Struct, frozen=True):
    """The most tokens that a call can have used, by its request and the model's context."""

    prompt_tokens: int = MOST_TOKENS
    output_tokens: int = MOST_TOKENS


UNKNOWN = UsageBounds()
_DECODER = msgspec.json.Decoder(CompletionBody)
_LONG_DECODER = msgspec.json.Decoder(_LongBody)
_USUAL_DECODER = msgspec.json.Decoder(_UsualBody)


def decode(data: bytes | bytearray) -> CompletionBody | None:
    """The body of a response or the data of an event, also with constants that JSON lacks; None if it is no object."""
    body = _decode(data)
    document = without_constants(data) if body is None else None
    return body if document is None else _decode(document)


def _decode(data: bytes | bytearray) -> CompletionBody | None:
    """Decode with None in place of constants that JSON lacks."""
    try:
        return _DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _decode_long(answer: bytes | bytearray) -> CompletionBody | None:
    """The body of a long response, with finish reasons but without texts; None if it is no JSON object."""
    try:
        check_unicode(answer)
        body = _LONG_DECODER.decode(answer)
    except msgspec.DecodeError:  # an object of another form
        return _decode(answer)
    except (UnicodeDecodeError, RecursionError):
        return None
    given = body.choices
    choices = None if given is None else [{"finish_reason": one.finish_reason, "index": one.index} for one in given]
    return CompletionBody(body.usage, choices, body.error)


def endings(body: CompletionBody) -> list[tuple[int, str]]:
    """Pairs of a choice's index and its finish reason."""
    found: list[tuple[int, str]] = []
    for choice in body.choices if isinstance(body.choices, list) else ():
        if isinstance(choice, dict) and (reason := choice.get("finish_reason")) is not None:
            index = choice.get("index", 0)
            found.append(
                (index if isinstance(index, int) else 0, reason if type(reason) is str else _reason_text(reason))
            )
    return found


def given_up(engine_id: str, ended: Collection[str]) -> EngineError | None:
    """The error of an answer that its engine has aborted, by its finish reasons; None: it was not aborted."""
    failed = FAILED_ENDINGS.intersection(ended)
    if not failed:
        return None
    return EngineBrokenError(f"engine {engine_id} gave the call up: its finish reason is '{min(failed)}'")


def read_usage(usage: object, bounds: UsageBounds) -> tuple[CallUsage | None, bool]:
    """The usage, clamped to its bounds (None if a count is no number), and whether the usage was changed."""
    if not isinstance(usage, dict):
        return None, usage is not None
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    prompt_tokens, output_tokens = usage.get("prompt_tokens", 0), usage.get("completion_tokens") or 0
    prompt, output = _within(prompt_tokens, bounds.prompt_tokens), _within(output_tokens, bounds.output_tokens)
    if prompt is None or output is None:
        return None, True
    found = None if cached is None else _within(cached, prompt)
    if found is None and cached is not None:
        return None, True
    read = CallUsage(prompt, output, found)
    return read, read != (prompt_tokens, output_tokens, cached)


def reported_error(engine_id: str, error: object) -> EngineError | str:
    """The error that an engine sent inside an answer: a text for a 4xx code (the caller's fault), else an error."""
    fields = error if isinstance(error, dict) else {"message": str(error)}
    message = str(fields.get("message") or "an error without a message")
    status = stated_status(fields)
    if status < 500:
        return excerpt(message)
    return EngineStatusError(f"engine {engine_id}: {excerpt(message)}", status, said=excerpt(message))


def garbled(engine_id: str, what: str) -> EngineGarbledError:
    return EngineGarbledError(f"engine {engine_id} sent {what}")


def _reason_text(reason: object) -> str:
    """A finish reason; SGLang once sent an object with a `type`."""
    return str(reason.get("type", "")) if isinstance(reason, dict) else str(reason)


def _within(value: object, limit: int) -> int | None:
    """The number, at least 0 and at most the limit; None if it is no number."""
    if type(value) is int:  # nearly always, and no bool
        return min(max(value, 0), limit)
    return int(min(max(value, 0), limit)) if isinstance(value, float) and not isnan(value) else None


_USAGE_KEY = b'"usage":'
_NO_USAGE = b'"usage":null'
_ERROR = b'"error"'  # the key, or the value of `object`; in a text, its quotes are escaped
_DONE = b"[DONE]"
_FINISH_KEY = b'"finish_reason":'
_UNFINISHED = b'"finish_reason":null'

MAX_EVENT_BYTES = 16 * 2**20
"""The longest event that is read. Log probabilities of a long prompt come as one event of some megabytes."""

PIECE_BYTES = 64
"""The memory of a piece of an event besides its bytes. An event in pieces of a few bytes is no longer in memory."""

_WITHOUT_DATA = re.compile(
    rb"(?:\A|(?<=\n\n)|(?<=\n\r\n))((?::[^\r\n]*\r?\n)*)(?:event:[^\r\n]*\r?\n)?(?:data:[ \t]*\r?\n)+\r?\n"
)
"""An event with empty data. By the standard, clients ignore it, but OpenAI's SDK parses its data, so it is removed.
Comments stay.
"""


class EventStream(ABC):
    """Reads one stream, in any form of events. `may_be_empty`: a stream without events is a whole answer.

    `usage` is the last usage that the engine reported, clamped to `bounds`. `usage_corrected`: one of the reported
    usages was changed.
    `error` is an error that the engine sent as an event. `finish` is the finish reason of the first choice that ended.
    """

    may_be_empty: ClassVar[bool] = False
    is_done: bool = True  # False: `[DONE]` has not come

    def __init__(self, engine_id: str, bounds: UsageBounds | None = None) -> None:
        self.usage: CallUsage | None = None
        self.usage_corrected = False
        self.error: EngineError | str | None = None
        self.finish: str | None = None
        self._engine_id = engine_id
        self._bounds = bounds or UNKNOWN
        self._pieces: list[bytes] = []  # of the incomplete last event
        self._rest_bytes = 0
        self._tail = b""  # the last bytes of these pieces: an event's end (blank line) may be split over two chunks

    def feed(self, chunk: bytes) -> bytes:
        """Take a chunk, and return the events that are complete now.

        Only whole events are forwarded, so that an error event can follow at any time. Raises `EngineGarbledError` for
        an event above `MAX_EVENT_BYTES`.
        """
        whole = self._completed(chunk) if self._pieces or not chunk.endswith(b"\n\n") else chunk
        whole = whole.removeprefix(BOM_UTF8)  # allowed before the first event, whose text clients would not see
        if (whole.find(b"\\") >= 0 or not whole.isascii()) and has_half(whole):
            whole = self._with_whole_pairs(whole)
        named, objects = whole.count(b"data:"), whole.count(b"data: {")
        if named != objects and named != objects + whole.count(b"data: ["):  # else no event has empty data
            whole = _WITHOUT_DATA.sub(lambda empty: empty[1] and empty[1] + b"\n", whole)
        if whole and self._says_more(whole):
            return b"".join([self._pass(event) if self._says_more(event) else event for event in events_of(whole)])
        return whole

    def end(self) -> bytes:
        """The engine has ended the stream. Returns the bytes after its last whole event."""
        rest = events_with_whole_pairs(b"".join(self._pieces).removeprefix(BOM_UTF8))
        self._pieces.clear()
        rest = self._pass(rest) if rest else b""
        return rest if self.is_done else self._done(rest)

    def _done(self, rest: bytes) -> bytes:
        """A whole completion without `[DONE]` gets one behind its last bytes, since SDKs wait for it."""
        self.is_done = True
        return rest if self.problem is not None else rest + (b"\n\n" if rest else b"") + b"data: [DONE]\n\n"

    @property
    @abstractmethod
    def problem(self) -> EngineError | str | None:
        """Why the ended stream is not a whole answer; None if it is one."""

    @abstractmethod
    def _says_more(self, events: bytes) -> bool:
        """Whether the events may have more than text. Most events have only text and are forwarded undecoded."""

    @abstractmethod
    def _pass(self, event: bytes) -> bytes:
        """Decode and record an event. Returns the bytes for the client."""

    def _used(self, usage: object) -> None:
        self.usage, corrected = read_usage(usage, self._bounds)
        self.usage_corrected |= corrected

    def _with_whole_pairs(self, events: bytes) -> bytes:
        """Replace lone surrogates by U+FFFD. The last event is kept back if the next one may have the other half."""
        *before, last = events_of(events)
        if may_go_on(last):
            self._pieces.insert(0, last)
            self._rest_bytes += len(last)
            events = b"".join(before)
        return events_with_whole_pairs(events)

    def _completed(self, chunk: bytes) -> bytes:
        seen = self._tail + chunk
        end = end_of_last_event(seen) - len(self._tail)
        if end <= 0:
            self._keep(chunk)
            return b""
        whole = b"".join((*self._pieces, chunk[:end]))
        self._pieces.clear()
        self._rest_bytes, self._tail = 0, b""
        self._keep(chunk[end:])
        return whole

    def _keep(self, rest: bytes) -> None:
        if not rest:
            return
        self._pieces.append(rest)
        self._rest_bytes += len(rest) + PIECE_BYTES
        self._tail = (self._tail + rest)[-3:]
        if self._rest_bytes > MAX_EVENT_BYTES:
            message = f"engine {self._engine_id} sent an event of over {MAX_EVENT_BYTES} bytes in memory"
            raise EngineGarbledError(message)


class CompletionStream(EventStream):
    """Reads one stream of a completion. Each choice that has begun needs a finish reason.

    Fewer than the `choices` that were asked may begin: some engines know no `n`. Some engines send no `[DONE]` before
    a proper end, so `end` adds it. `withhold` drops the event that has only the usage, for a client that has not asked
    for it.
    """

    def __init__(self, engine_id: str, *, withhold: bool, choices: int = 1, bounds: UsageBounds | None = None) -> None:
        super().__init__(engine_id, bounds)
        self._withhold = withhold
        self._choices = choices
        self._begun: set[int] = set()  # choices, if there may be several
        self._ended: dict[int, str] = {}
        self.is_done = False
        self._plain = PlainEvents() if choices == 1 else PlainEvents(looks=0)

    def feed(self, chunk: bytes) -> bytes:
        """Take a chunk as any stream does, but pass on what differs from a plain event only in its text."""
        if not self._pieces and self._plain.text(chunk) is not None:
            return chunk
        events = super().feed(chunk)
        if self._plain.looks and events == chunk:
            if self._says_more(chunk):
                self._plain.looks -= 1
            else:
                self._plain.learn(chunk)
        return events

    @property
    def problem(self) -> EngineError | str | None:
        """Why the ended stream is not a whole answer; None if it is one."""
        if self.error is not None:
            return self.error
        ended, begun = self._ended, self._begun
        failed = given_up(self._engine_id, ended.values())
        if failed is None and not (self.is_done and ended and begun <= ended.keys()):
            missing = "no finish reason" if len(begun) < 2 else f"{len(ended)} finish reasons for {len(begun)} choices"
            return EngineBrokenError(f"engine {self._engine_id} ended its answer with {missing}")
        return failed

    def _says_more(self, events: bytes) -> bool:
        if self._choices > 1 or events.find(_DONE) >= 0 or events.find(_ERROR) >= 0:  # `in` raises and catches an error
            return True
        if events.count(_USAGE_KEY) != events.count(_NO_USAGE):
            return True
        return events.count(_FINISH_KEY) != events.count(_UNFINISHED)

    def _pass(self, event: bytes) -> bytes:
        """Decode and record an event. Returns the bytes for the client.

        `[DONE]` is dropped if a finish reason is missing: an error event follows, and clients stop reading at `[DONE]`.
        """
        if event.partition(b"data:")[2].strip() == _DONE:
            self.is_done = True
            return b"" if self.error is None and self.problem is not None else event
        body = self._read(event)
        if body is None and (mended := without_constants(event.partition(b"data:")[2])) is not None:
            return self._pass(with_data(event, msgspec.Raw(mended)))
        if body is not None and body.error is None and body.failure is not None:  # SDKs know only the key `error`
            return with_data(event, {"error": body.failure})
        if body is None or not (self._withhold and body.only_usage):
            return event
        return event[: len(event) - len(event.lstrip(b"\r\n"))]  # leading blank lines end the event before

    def _read(self, event: bytes) -> CompletionBody | None:
        body = _decode(event.partition(b"data:")[2])
        if body is None:
            return None
        if body.usage is not None:
            self._used(body.usage)
        if body.failure is not None:
            self.error = reported_error(self._engine_id, body.failure)
        if self._choices > 1 and isinstance(body.choices, list):
            indexes = [choice.get("index", 0) for choice in body.choices if isinstance(choice, dict)]
            self._begun.update([index if isinstance(index, int) else 0 for index in indexes])
        self._ended.update(endings(body))
        self.finish = next(iter(self._ended.values()), None)
        return body


class WholeAnswer(NamedTuple):
    """The contents of an unstreamed answer. `failed_status` is the status of the error that it is; None: no error.

    `usage_corrected`: the usage was out of bounds. `finish` is the first choice's finish reason. `mended` is the body
    for the client if the engine's has constants that JSON lacks. `is_not_json`: the body is no JSON.
    """

    usage: CallUsage | None = None
    usage_corrected: bool = False
    failed_status: int | None = None
    finish: str | None = None
    mended: bytes | None = None
    is_not_json: bool = False


def _usual(answer: bytes | bytearray, bounds: UsageBounds) -> WholeAnswer | None:
    """A fast path for answers with one finished choice and a usage within the bounds; None for any other."""
    try:
        if not answer.isascii():
            check_unicode(answer)
        body = _USUAL_DECODER.decode(answer)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    counts, finish = body.usage, body.choices[0].finish_reason
    prompt_tokens, output_tokens, details = counts.prompt_tokens, counts.completion_tokens, counts.prompt_tokens_details
    cached_tokens = None if details is None else details.cached_tokens
    if (
        not 0 <= prompt_tokens <= bounds.prompt_tokens
        or not 0 <= output_tokens <= bounds.output_tokens
        or not (cached_tokens is None or 0 <= cached_tokens <= prompt_tokens)
        or finish in FAILED_ENDINGS
    ):
        return None
    return WholeAnswer(CallUsage(prompt_tokens, output_tokens, cached_tokens), finish=finish)


class AnswerForm:
    """How to read and write answers of one API: of completions, chat and text, where a subclass does not say otherwise.

    Without `has_events`, a stream can have no error event or comment.
    """

    has_events: ClassVar[bool] = True
    token_mark: ClassVar[bytes] = b"data: {"
    """What each event of a stream with a piece of text has once."""

    errors: ApiErrors = COMPLETION_ERRORS
    """How the API writes errors."""

    streams = staticmethod(is_event_stream)
    """Whether an answer of status 200 with these headers is forwarded as it comes."""

    def whole(self, engine_id: str, answer: bytes | bytearray, bounds: UsageBounds) -> WholeAnswer:
        """Read an unstreamed answer. Raises `EngineError` if it is not whole.

        A choice may lack a finish reason: the answer has come as a whole.
        """
        usual = _usual(answer, bounds)
        if usual is not None:
            return usual
        body = _decode(answer) if len(answer) <= LONG_BYTES else _decode_long(answer)
        if body is None and (mended := without_constants(answer)) is not None:
            return self.whole(engine_id, mended, bounds)._replace(mended=mended)
        if body is None:
            raise garbled(engine_id, "an answer that is not JSON")
        usage, corrected = read_usage(body.usage, bounds)
        if body.failure is not None:
            return WholeAnswer(usage, corrected, stated_status(body.failure))
        if not isinstance(body.choices, list) or dict not in map(type, body.choices):
            raise garbled(engine_id, "an answer without choices")
        reasons = [*map(itemgetter(1), endings(body))]
        failed = given_up(engine_id, reasons)
        if failed is not None:
            raise failed
        return WholeAnswer(usage, corrected, finish=next(iter(reasons), None))

    def stream(self, engine_id: str, *, withhold: bool, choices: int, bounds: UsageBounds) -> EventStream:
        """A reader of a stream. See `CompletionStream` for the arguments."""
        return CompletionStream(engine_id, withhold=withhold, choices=choices, bounds=bounds)

    def assembled(self, engine_id: str, events: bytes) -> bytes:
        """A stream as a whole answer, for a call without `stream`. Raises `EngineError` if it makes none."""
        stream, completion = self.stream(engine_id, withhold=False, choices=1, bounds=UNKNOWN), AssembledCompletion()
        whole = stream.feed(events) + stream.end()
        if isinstance(stream.problem, EngineError):
            raise stream.problem
        try:
            completion.feed(whole)
        except ValueError as error:
            raise garbled(engine_id, "an event that is no part of a completion") from error
        return completion.json()

    def as_events(self, engine_id: str, answer: bytes | bytearray, *, withhold: bool) -> bytes | None:  # noqa: ARG002
        """A whole answer as a stream, for a call with `stream`; None: the answer passes as it is.

        `withhold` as in `CompletionStream`. Raises `EngineError` if the answer makes no stream.
        """
        return events_of_whole(answer, withhold=withhold)

    def sign_of_life(self, comment: str, *, has_begun: bool) -> bytes:  # noqa: ARG002
        """A keep-alive comment, which clients ignore, but at which proxies reset their idle time-outs; or an event.

        `has_begun`: the client has had an event of the answer.
        """
        return b": %b\n\n" % comment.encode()


COMPLETION = AnswerForm()
