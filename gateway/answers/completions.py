"""Completions as the gateway reads them: a whole answer, or a stream of events on its way to the client.

It reads the usage, the endings and the errors. Nothing in an answer is trusted, and the bytes stay the engine's. Pure:
bytes in, bytes out. The time to read a stream is linear in its bytes, and the memory is bounded by the longest event.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from math import isnan
from operator import itemgetter
from typing import Any, ClassVar, NamedTuple, Protocol

import msgspec

from plait.backends.errors import (
    EngineBrokenError,
    EngineError,
    EngineGarbledError,
    EngineStatusError,
    PlaitError,
)
from plait.backends.http.content_types import is_event_stream
from plait.backends.protocol.json_constants import without_constants
from plait.backends.protocol.openai import check_unicode
from plait.backends.protocol.surrogates import events_with_whole_pairs, has_half, may_go_on
from plait.gateway.answers.error_texts import excerpt
from plait.gateway.answers.event_bytes import end_of_last_event, events_of
from plait.gateway.fleet.booking import CallUsage

MOST_TOKENS = 2**24
"""The most tokens that a call may report where the model's context is not known."""

LONG_BYTES = 2**20
"""Of an answer: the texts of a longer one are not decoded where nobody needs them."""

FAILED_ENDINGS = frozenset(("abort", "error"))
"""Finish reasons of a text that its engine gave up."""


class CompletionBody(msgspec.Struct, frozen=True):
    """A response, or the data of an event. The fields that matter can hold anything, so that any JSON object fits."""

    usage: Any = None
    choices: Any = None
    error: Any = None

    @property
    def only_usage(self) -> bool:
        return self.usage is not None and self.choices == []


class _Ending(msgspec.Struct, frozen=True):
    finish_reason: Any = None
    index: Any = 0


class _LongBody(msgspec.Struct, frozen=True):
    """What matters of a long answer. Its texts are skipped: as a value they would take as much memory again."""

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
    """What matters of nearly all answers: one choice, and a usage in whole numbers."""

    usage: _Counts
    choices: tuple[_UsualEnding]
    error: None = None


class UsageBounds(msgspec.Struct, frozen=True):
    """The most tokens that a call can have used."""

    prompt_tokens: int = MOST_TOKENS
    output_tokens: int = MOST_TOKENS


UNKNOWN = UsageBounds()
_DECODER = msgspec.json.Decoder(CompletionBody)
_LONG_DECODER = msgspec.json.Decoder(_LongBody)
_USUAL_DECODER = msgspec.json.Decoder(_UsualBody)


def decode(data: bytes | bytearray) -> CompletionBody | None:
    """The body of a response or the data of an event; None if it is not a JSON object."""
    try:
        return _DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        document = without_constants(data)
        return None if document is None else decode(document)


def _decode_long(answer: bytes | bytearray) -> CompletionBody | None:
    """The body of a long response, whose choices have their endings only; None if it is no JSON object."""
    try:
        check_unicode(answer)
        body = _LONG_DECODER.decode(answer)
    except msgspec.DecodeError:  # another object, or it has what JSON lacks
        return decode(answer)
    except (UnicodeDecodeError, RecursionError):
        return None
    given = body.choices
    choices = None if given is None else [{"finish_reason": one.finish_reason, "index": one.index} for one in given]
    return CompletionBody(body.usage, choices, body.error)


def endings(body: CompletionBody) -> list[tuple[int, str]]:
    """The finish reasons in it, each after the index of its choice."""
    found: list[tuple[int, str]] = []
    for choice in body.choices if isinstance(body.choices, list) else ():
        if isinstance(choice, dict) and (reason := choice.get("finish_reason")) is not None:
            index = choice.get("index", 0)
            found.append(
                (index if isinstance(index, int) else 0, reason if type(reason) is str else _reason_text(reason))
            )
    return found


def ending_problem(engine_id: str, ended: Collection[str], choices: int) -> EngineError | None:
    """The error of an answer that should have `choices` endings and has those in `ended`; None if it is whole."""
    given_up = FAILED_ENDINGS.intersection(ended)
    if given_up:
        return EngineBrokenError(f"engine {engine_id} gave the call up: its finish reason is '{min(given_up)}'")
    if len(ended) < choices:
        missing = "no finish reason" if choices == 1 else f"{len(ended)} finish reasons for {choices} choices"
        return EngineBrokenError(f"engine {engine_id} ended its answer with {missing}")
    return None


def read_usage(usage: object, bounds: UsageBounds) -> tuple[CallUsage | None, bool]:
    """The usage within its bounds, and whether it had to be corrected. It is None if it does not hold numbers."""
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
    """The error that an engine sent inside an answer: its own fault (a code of 500 or above), or the caller's."""
    fields = error if isinstance(error, dict) else {"message": str(error)}
    message, code = str(fields.get("message") or "an error without a message"), fields.get("code")
    if isinstance(code, int) and 400 <= code < 500:
        return excerpt(message)
    return EngineStatusError(f"engine {engine_id}: {excerpt(message)}", 502, said=excerpt(message))


def caller_fault(engine_id: str, error: object) -> str:
    """What an error in an answer says. Raises it if the engine is at fault."""
    reported = reported_error(engine_id, error)
    if isinstance(reported, EngineError):
        raise reported
    return reported


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
_ERROR_KEY = b'"error":'
_DONE = b"[DONE]"
_FINISH_KEY = b'"finish_reason":'
_UNFINISHED = b'"finish_reason":null'

MAX_EVENT_BYTES = 16 * 2**20
"""The longest event that is read. Log probabilities of a long prompt come as one event of some megabytes."""

_WITHOUT_DATA = re.compile(
    rb"(?:\A|(?<=\n\n)|(?<=\n\r\n))((?::[^\r\n]*\r?\n)*)(?:event:[^\r\n]*\r?\n)?(?:data:[ \t]*\r?\n)+\r?\n"
)
"""An event whose data is empty: none, but clients would take it for one. Its comments stay."""


class EventStream(ABC):
    """One stream, of whatever form of events.

    One that `may_be_empty` is an answer also without an event.
    `usage` is the latest usage that the engine reported, within `bounds`; `usage_corrected` is True if it had to be
    corrected. `error` is an error that the engine sent as an event. `finish` says why the first choice ended.
    """

    may_be_empty: ClassVar[bool] = False

    def __init__(self, engine_id: str, bounds: UsageBounds | None = None) -> None:
        self.usage: CallUsage | None = None
        self.usage_corrected = False
        self.error: EngineError | str | None = None
        self.finish: str | None = None
        self._engine_id = engine_id
        self._bounds = bounds or UNKNOWN
        self._pieces: list[bytes] = []  # of the event that is not whole yet
        self._rest_bytes = 0
        self._tail = b""  # the end of those pieces, in which an end of event may have begun

    def feed(self, chunk: bytes) -> bytes:
        """Take a chunk and return the events that are complete now. So a stream can be ended between two events.

        Raises `EngineGarbledError` for an event beyond `MAX_EVENT_BYTES`.
        """
        whole = self._completed(chunk) if self._pieces or not chunk.endswith(b"\n\n") else chunk
        if (whole.find(b"\\") >= 0 or not whole.isascii()) and has_half(whole):
            whole = self._with_whole_pairs(whole)
        named, objects = whole.count(b"data:"), whole.count(b"data: {")
        if named != objects and named != objects + whole.count(b"data: ["):  # all but `[DONE]`
            whole = _WITHOUT_DATA.sub(lambda empty: empty[1] and empty[1] + b"\n", whole)
        if whole and self._says_more(whole):
            return b"".join([self._pass(event) if self._says_more(event) else event for event in events_of(whole)])
        return whole

    def end(self) -> bytes:
        """End the stream; returns the bytes behind its last whole event."""
        rest = events_with_whole_pairs(b"".join(self._pieces))
        self._pieces.clear()
        return self._pass(rest) if rest else b""

    @property
    @abstractmethod
    def problem(self) -> EngineError | str | None:
        """Why the ended stream is not a whole answer; None if it is one."""

    @abstractmethod
    def _says_more(self, events: bytes) -> bool:
        """Whether the events may hold something besides text: most have none of it, and need not be decoded."""

    @abstractmethod
    def _pass(self, event: bytes) -> bytes:
        """Record what an event says; returns the bytes of it that go to the client."""

    def _used(self, usage: object) -> None:
        self.usage, corrected = read_usage(usage, self._bounds)
        self.usage_corrected |= corrected

    def _with_whole_pairs(self, events: bytes) -> bytes:
        """Events in which half a surrogate pair is U+FFFD. The last one waits if the next may have the other half."""
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
        self._rest_bytes += len(rest)
        self._tail = (self._tail + rest)[-3:]
        if self._rest_bytes > MAX_EVENT_BYTES:
            message = f"engine {self._engine_id} sent an event of over {MAX_EVENT_BYTES} bytes"
            raise EngineGarbledError(message)


class CompletionStream(EventStream):
    """Reads one stream that should have `choices` endings.

    If the gateway asked for the usage and the client did not, `withhold` drops the event that carries only the usage.
    """

    def __init__(self, engine_id: str, *, withhold: bool, choices: int = 1, bounds: UsageBounds | None = None) -> None:
        super().__init__(engine_id, bounds)
        self._withhold = withhold
        self._choices = choices
        self._ended: dict[int, str] = {}
        self._is_done = False

    @property
    def problem(self) -> EngineError | str | None:
        """Why the ended stream is not a whole answer; None if it is one."""
        if self.error is not None:
            return self.error
        missing = ending_problem(self._engine_id, self._ended.values(), self._choices)
        if missing is None and not self._is_done:
            missing = EngineBrokenError(f"engine {self._engine_id} ended its stream without [DONE]")
        return missing

    def _says_more(self, events: bytes) -> bool:
        if _USAGE_KEY in events or _DONE in events or _ERROR_KEY in events:
            return True
        return events.count(_FINISH_KEY) != events.count(_UNFINISHED)

    def _pass(self, event: bytes) -> bytes:
        """Record what an event says; returns the bytes of it that go to the client.

        The end of a stream without endings is withheld: clients do not read what comes after it, and it is an error.
        """
        if event.partition(b"data:")[2].strip() == _DONE:
            self._is_done = True
            return b"" if self.error is None and self.problem is not None else event
        body = self._read(event)
        if body is None or not (self._withhold and body.only_usage):
            return event
        return event[: len(event) - len(event.lstrip(b"\r\n"))]  # blank lines before it belong to the event before

    def _read(self, event: bytes) -> CompletionBody | None:
        body = decode(event.partition(b"data:")[2])
        if body is None:
            return None
        if body.usage is not None:
            self._used(body.usage)
        if body.error is not None:
            self.error = reported_error(self._engine_id, body.error)
        self._ended.update(endings(body))
        self.finish = next(iter(self._ended.values()), None)
        return body


class WholeAnswer(NamedTuple):
    """What an answer that is not streamed says. `problem` is what is wrong with it by the caller's fault.

    `usage_corrected` is True if the usage was out of bounds. `finish` says why the first choice ended.
    """

    usage: CallUsage | None = None
    usage_corrected: bool = False
    problem: str | None = None
    finish: str | None = None


def _usual(answer: bytes | bytearray, bounds: UsageBounds) -> WholeAnswer | None:
    """Read an answer of the usual form: one choice, which has ended, and a usage within the bounds. None for others.

    The text, and whatever else is not read, only has to be JSON.
    """
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


class AnswerForm(Protocol):
    """One form of answers. If it has no events, a stream can tell neither of an error nor of a silence."""

    has_events: ClassVar[bool]

    def streams(self, headers: Sequence[tuple[bytes, bytes]]) -> bool:
        """Whether a good answer with these headers goes to its client as it comes."""

    def whole(self, engine_id: str, answer: bytes | bytearray, bounds: UsageBounds) -> WholeAnswer:
        """Read an answer that is not streamed; raises `EngineError` if it is not whole."""

    def stream(self, engine_id: str, *, withhold: bool, choices: int, bounds: UsageBounds) -> EventStream:
        """A reader of a stream that should have `choices` endings. `withhold` drops the usage-only event."""

    def error_body(self, error: PlaitError) -> bytes:
        """An error in the place of an answer."""

    def error_event(self, error: PlaitError) -> bytes:
        """An error in a stream that has begun."""

    def sign_of_life(self, comment: str, *, has_begun: bool) -> bytes:
        """What a silent stream is told. `has_begun`: it has had an event of the answer."""


class CompletionForm:
    """Completions, chat and text."""

    has_events: ClassVar[bool] = True
    streams = staticmethod(is_event_stream)

    def whole(self, engine_id: str, answer: bytes | bytearray, bounds: UsageBounds) -> WholeAnswer:
        """Read an answer: each of its choices needs an ending."""
        usual = _usual(answer, bounds)
        if usual is not None:
            return usual
        body = decode(answer) if len(answer) <= LONG_BYTES else _decode_long(answer)
        if body is None:
            raise garbled(engine_id, "an answer that is not JSON")
        usage, corrected = read_usage(body.usage, bounds)
        if body.error is not None:
            return WholeAnswer(usage, corrected, caller_fault(engine_id, body.error))
        if not isinstance(body.choices, list) or not body.choices:
            raise garbled(engine_id, "an answer without choices")
        reasons = [*map(itemgetter(1), endings(body))]
        missing = ending_problem(engine_id, reasons, len(body.choices))
        if missing is not None:
            raise missing
        return WholeAnswer(usage, corrected, finish=reasons[0])

    def stream(self, engine_id: str, *, withhold: bool, choices: int, bounds: UsageBounds) -> EventStream:
        return CompletionStream(engine_id, withhold=withhold, choices=choices, bounds=bounds)

    def error_body(self, error: PlaitError) -> bytes:
        """OpenAI's error object."""
        return error.body()

    def error_event(self, error: PlaitError) -> bytes:
        """An event with OpenAI's error object."""
        return b"data: %b\n\n" % error.body()

    def sign_of_life(self, comment: str, *, has_begun: bool) -> bytes:  # noqa: ARG002
        """A comment. Clients ignore comments, and so do proxies, except that they wait on."""
        return b": %b\n\n" % comment.encode()


COMPLETION = CompletionForm()
