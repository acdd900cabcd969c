"""Renders chats of one shape without Jinja, by a recording of what the template did with the first one's contents.

In a recording, each message's content is a `_Recorded` instead of a string. A template can only do with it what this
module allows. Two things are recorded: each place where a content goes into the text, and each question that the
template asks, such as whether a content contains `</think>`, with its answer. Other contents that give the same answers
take the same path through the template, so their text is the recorded one with these contents in the places. Anything
else that a template does with a content ends the recording. docs/design/chat-templates.md has the reasons.
"""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from operator import methodcaller
from typing import Any, Final, NoReturn

import msgspec
from jinja2 import Template

from plait.backends.tokenization.chat_messages import BILLING_LINE
from plait.backends.tokenization.chat_template import TEMPLATE_ERRORS, ChatEnvironment, globals_apart, now

Value = Callable[[str], str]
"""A function that a template applies to a content before it goes into the text, such as `trim`."""
Question = Callable[[str], Any]


_ENTRY_BYTES: Final = 200
"""The memory of a place or a question."""


class UnrecordedError(Exception):
    """A template did something with a content that cannot be recorded."""


@dataclass(frozen=True, slots=True)
class _Place:
    """A content's place in the text: the content's number, and the functions applied to it."""

    number: int
    values: tuple[Value, ...] = ()

    def of(self, contents: Sequence[str]) -> str:
        text = contents[self.number]
        for value in self.values:
            text = value(text)
        return text


@dataclass(slots=True)
class _Recording:
    """The questions of a template to `contents`, and to the clock. `failed` stays set, even if the template goes on."""

    contents: Sequence[str]
    asked: dict[tuple[_Place, str, Any], tuple[Question, bool]] = field(default_factory=dict)
    clock: dict[str, str] = field(default_factory=dict)
    failed: bool = False

    def fail(self, *_arguments: Any, **_named: Any) -> NoReturn:
        self.failed = True
        raise UnrecordedError

    def ask(self, place: _Place, name: str, argument: Any, question: Question) -> bool:
        answer = bool(question(place.of(self.contents)))
        self.asked[place, name, argument] = question, answer
        return answer

    def now(self, form: str) -> str:
        return self.clock.setdefault(form, now(form))


def _refused(content: _Recorded, *_arguments: Any, **_named: Any) -> NoReturn:
    content._recording.fail()  # noqa: SLF001 - of the class below


class _Recorded:
    """A text with contents in it. Operations that are not recorded are `_refused`.

    Jinja's sandbox hides names that begin with an underscore, as it does for strings.
    """

    __slots__ = ("_parts", "_recording")

    def __init__(self, recording: _Recording, parts: Iterable[str | _Place]) -> None:
        self._recording = recording
        self._parts = tuple(part for part in parts if part != "")

    def __getattr__(self, name: str) -> NoReturn:
        self._recording.fail()

    def __add__(self, other: Any) -> _Recorded:
        return _joined(self._recording, (self, other))

    def __radd__(self, other: Any) -> _Recorded:
        return _joined(self._recording, (other, self))

    def __bool__(self) -> bool:
        if any(type(part) is str for part in self._parts):
            return True
        return bool(self._parts) and self._ask("bool", None, bool)

    def __contains__(self, other: Any) -> bool:
        return self._ask("contains", self._checked(other), methodcaller("__contains__", other))

    def __eq__(self, other: object) -> bool:
        return self._ask("eq", self._checked(other), methodcaller("__eq__", other))

    def __ne__(self, other: object) -> bool:
        return not self == other

    def startswith(self, start: Any) -> bool:
        return self._ask("startswith", self._checked(start), methodcaller("startswith", start))

    def endswith(self, end: Any) -> bool:
        return self._ask("endswith", self._checked(end), methodcaller("endswith", end))

    def strip(self, characters: Any = None) -> _Recorded:
        return self._made("strip", characters)

    def lstrip(self, characters: Any = None) -> _Recorded:
        return self._made("lstrip", characters)

    def rstrip(self, characters: Any = None) -> _Recorded:
        return self._made("rstrip", characters)

    __hash__ = _refused
    __str__ = __repr__ = __format__ = __bytes__ = _refused
    __len__ = __iter__ = __getitem__ = __index__ = __int__ = __float__ = __call__ = _refused
    __lt__ = __le__ = __gt__ = __ge__ = __mul__ = __rmul__ = __mod__ = __rmod__ = _refused

    def _place(self) -> _Place:
        if len(self._parts) != 1 or not isinstance(self._parts[0], _Place):
            self._recording.fail()
        return self._parts[0]

    def _ask(self, name: str, argument: Any, question: Question) -> bool:
        return self._recording.ask(self._place(), name, argument, question)

    def _checked(self, argument: object) -> str:
        if type(argument) is not str:
            self._recording.fail()
        return argument

    def _made(self, name: str, characters: Any) -> _Recorded:
        place = self._place()
        if characters is not None:
            self._checked(characters)
        return _Recorded(self._recording, (_Place(place.number, (*place.values, _stripping(name, characters))),))


@lru_cache(maxsize=256)
def _stripping(name: str, characters: str | None) -> Value:
    """Cached, so that equal functions are the same object and places can be compared."""
    return methodcaller(name, characters)


def _joined(recording: _Recording, texts: Iterable[Any]) -> _Recorded:
    parts: list[str | _Place] = []
    for text in texts:
        if type(text) is _Recorded:
            parts += text._parts  # noqa: SLF001
        elif type(text) is str:
            parts.append(text)
        else:
            recording.fail()
    return _Recorded(recording, parts)


def _concat(texts: Iterable[Any]) -> Any:
    """Joins the output of a macro or a block, in the place of `"".join`."""
    texts = list(texts)
    recording = next((text._recording for text in texts if type(text) is _Recorded), None)  # noqa: SLF001
    return "".join(texts) if recording is None else _joined(recording, texts)


def _output(value: Any) -> Any:
    """Converts each output of a compiled template, in the place of `str`."""
    return value if type(value) is _Recorded else str(value)


def _said(answer: bool, _content: _Recorded) -> bool:
    return answer


_ANSWERS: Final = {
    "string": True, "iterable": True, "sequence": True, "defined": True, "undefined": False, "none": False,
    "mapping": False, "number": False, "integer": False, "float": False, "boolean": False, "true": False,
    "false": False,
}  # fmt: skip
"""The result of each of Jinja's tests for any string."""

_TESTS: Final = {name: partial(_said, answer) for name, answer in _ANSWERS.items()}


def _default(content: _Recorded, other: Any = "", boolean: Any = False) -> Any:
    return other if boolean and not content else content


_FILTERS: Final[Mapping[str, Callable[..., Any]]] = {
    "trim": _Recorded.strip, "string": lambda content: content, "default": _default, "d": _default
}  # fmt: skip


def _guarded(function: Callable[..., Any], of_content: Callable[..., Any] | None) -> Callable[..., Any]:
    """A filter or a test, replaced by `of_content` for a content. None: it cannot be recorded."""

    def guarded(*arguments: Any, **named: Any) -> Any:
        contents = [one for one in (*arguments, *named.values()) if type(one) is _Recorded]
        if not contents:
            return function(*arguments, **named)
        if of_content is None or type(arguments[0]) is not _Recorded or len(contents) > 1 or named:
            contents[0]._recording.fail()  # noqa: SLF001
        return of_content(*arguments)

    if hasattr(function, "jinja_pass_arg"):  # the environment or the context comes before the value
        vars(guarded)["jinja_pass_arg"] = function.jinja_pass_arg
    return guarded


def _unrecorded(*_arguments: Any, **_named: Any) -> NoReturn:
    raise UnrecordedError


class _RecordingEnvironment(ChatEnvironment):
    """The environment of chat templates, for contents that are `_Recorded`."""

    concat = staticmethod(_concat)

    def __init__(self) -> None:
        super().__init__()
        filters: dict[str, Any] = dict(self.filters)
        self.filters = {name: _guarded(filters[name], _FILTERS.get(name)) for name in filters}
        self.filters["random"] = _unrecorded
        self.globals["lipsum"] = _unrecorded
        tests: dict[str, Any] = dict(self.tests)
        self.tests = {name: _guarded(tests[name], _TESTS.get(name)) for name in tests}


_ENVIRONMENT: Final = _RecordingEnvironment()


@lru_cache(maxsize=32)
def _compiled(template: str) -> Template:
    compiled = _ENVIRONMENT.from_string(template)
    compiled.globals = globals_apart(compiled)
    compiled.root_render_func.__globals__.update(str=_output, str_join=lambda texts: _concat(map(_output, texts)))
    return compiled


@dataclass(frozen=True, slots=True)
class Shape:
    """The text of chats of one shape, with places for contents. `asked` has the questions and the answers they need."""

    texts: Sequence[str]
    places: Sequence[tuple[int, _Place]]
    asked: Sequence[tuple[_Place, Question, bool]]
    clock: Sequence[tuple[str, str]]

    @property
    def size_bytes(self) -> int:
        return sum(map(sys.getsizeof, self.texts)) + _ENTRY_BYTES * (len(self.places) + len(self.asked))

    def render(self, contents: Sequence[str]) -> str | None:
        """The text with other contents; None if these take another path through the template."""
        for place, question, answer in self.asked:
            text = place.of(contents) if place.values else contents[place.number]
            if question(text) != answer:
                return None
        for form, text in self.clock:
            if now(form) != text:
                return None
        texts = [*self.texts]
        for at, place in self.places:
            texts[at] = place.of(contents) if place.values else contents[place.number]
        return "".join(texts)


def record(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    contents: Sequence[str],
    variables: Mapping[str, Any],
) -> Shape | None:
    """The shape of a chat with these `variables`. `contents` has the content of each message.

    `messages` are in the template's form: content as a string, or as one part. None if the template refuses the chat,
    or does something with a content that cannot be recorded.
    """
    recording = _Recording(contents)
    prepared = [
        {**message, "content": _placed(message["content"], _Recorded(recording, (_Place(number),)))}
        for number, message in enumerate(messages)
    ]
    compiled = _compiled(template)
    try:
        context = compiled.new_context(
            {"strftime_now": recording.now, **variables, "messages": prepared, "documents": None}
        )
        output = _joined(recording, compiled.root_render_func(context))
    except (UnrecordedError, *TEMPLATE_ERRORS):
        return None
    return None if recording.failed else _shape(output._parts, recording)  # noqa: SLF001


def _placed(content: Any, placed: _Recorded) -> Any:
    return placed if isinstance(content, str) else [{**content[0], "text": placed}]


def _shape(parts: Iterable[str | _Place], recording: _Recording) -> Shape:
    texts: list[str] = []
    places: list[tuple[int, _Place]] = []
    literal: list[str] = []
    for part in parts:
        if isinstance(part, str):
            literal.append(part)
            continue
        places.append((len(texts) + 1, part))
        texts += ["".join(literal), ""]
        literal = []
    texts.append("".join(literal))
    asked = [(place, question, answer) for (place, _, _), (question, answer) in recording.asked.items()]
    return Shape(texts, places, asked, [*recording.clock.items()])


MOST_BYTES: Final = 2 * 2**20
"""The memory for a tokenizer's shapes. A shape with 8 tools takes some 15 KB."""

MOST_MESSAGES: Final = 256
MOST_TOOLS_BYTES: Final = 64 * 1024

MOST_WAYS: Final = 4
"""How many paths through the template are recorded for chats of one kind. Jinja renders chats on other paths."""

_KIND_BYTES: Final = 500
"""The memory of a kind."""
_SEEN: Final = 1_024
_ROLES: Final = ("system", "user", "assistant")


class PlainChat(msgspec.Struct, frozen=True):
    """A chat whose messages have only a role and a text: its `contents`, and the `kind`, which is all the rest."""

    kind: Hashable
    contents: Sequence[str]


@dataclass(slots=True)
class _Ways:
    shapes: list[Shape] = field(default_factory=list)
    recorded: int = 0
    size_bytes: int = 0


def _said_of(
    tools: Sequence[Mapping[str, Any]] | None, options: Mapping[str, Any] | None, salt: Hashable
) -> tuple[Hashable, ...] | None:
    """A key for tools and options; None if they are too long."""
    try:
        said = msgspec.json.encode((tools, options))  # equal bytes: the same keys in the same order, and the same kinds
    except (TypeError, ValueError, OverflowError):
        return None
    return (salt, said) if len(said) <= MOST_TOOLS_BYTES else None


class ShapeMemo:
    """Shapes in MOST_BYTES of memory, evicted in LRU order of their kinds; safe to call from many threads.

    A shape is recorded when a chat of its kind comes for the second time.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._kinds: OrderedDict[Hashable, _Ways] = OrderedDict()
        self._seen: OrderedDict[int, None] = OrderedDict()
        self._lock = threading.Lock()
        self.held_bytes = 0

    def __repr__(self) -> str:
        return f"ShapeMemo({len(self._kinds)} kinds, {self.held_bytes} of {self._most_bytes} bytes)"

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, Any] | None,
        salt: Hashable,
        *,
        add_generation_prompt: bool,
    ) -> tuple[str | None, PlainChat | None]:
        """(the chat's text, or None if Jinja has to render it; the chat to `learn` then, if it is a plain one).

        Shapes with tools and options are shared within one `salt` only.
        """
        contents: list[str] = []
        roles: list[str] = []
        for message in messages:
            if type(message) is not dict or len(message) != 2:
                return None, None
            role, content = message.get("role"), message.get("content")
            if role not in _ROLES or type(content) is not str or content.startswith(BILLING_LINE):
                return None, None
            roles.append(role)
            contents.append(content)
        if not 0 < len(roles) <= MOST_MESSAGES:
            return None, None
        said = _said_of(tools, options, salt) if tools is not None or options else ()
        if said is None:
            return None, None
        kind = (add_generation_prompt, *said, *roles)
        ways = self._kinds.get(kind)
        for shape in () if ways is None else ways.shapes:
            text = shape.render(contents)
            if text is not None:
                return text, None
        return None, PlainChat(kind, contents)

    def learn(
        self,
        chat: PlainChat,
        template: str,
        prepared: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        text: str,
    ) -> None:
        """Record the shape of a chat that Jinja has rendered, with these messages and variables, as `text`."""
        if not self._may_record(chat.kind):
            return
        shape = record(template, prepared, chat.contents, variables)
        if shape is not None and shape.render(chat.contents) == text:
            self._keep(chat.kind, shape)

    def _may_record(self, kind: Hashable) -> bool:
        """Whether a kind has come before and may have a further path, which is then counted."""
        with self._lock:
            ways = self._kinds.get(kind)
            if ways is None:
                seen = hash(kind)
                if seen not in self._seen:
                    self._seen[seen] = None
                    if len(self._seen) > _SEEN:
                        self._seen.popitem(last=False)
                    return False
                ways = self._kinds[kind] = _Ways()
                self._add(ways, _KIND_BYTES + sum(map(sys.getsizeof, kind)))  # type: ignore[call-overload]
            else:
                self._kinds.move_to_end(kind)
            ways.recorded += 1
            return ways.recorded <= MOST_WAYS

    def _keep(self, kind: Hashable, shape: Shape) -> None:
        with self._lock:
            ways = self._kinds.get(kind)
            if ways is not None:
                ways.shapes.append(shape)
                self._add(ways, shape.size_bytes)

    def _add(self, ways: _Ways, size_bytes: int) -> None:
        ways.size_bytes += size_bytes
        self.held_bytes += size_bytes
        while self.held_bytes > self._most_bytes:
            _, forgotten = self._kinds.popitem(last=False)
            self.held_bytes -= forgotten.size_bytes
