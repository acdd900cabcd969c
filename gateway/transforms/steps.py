"""The transforms, one class each, except `json` and `code_block`: see `json_value` and `code_block`."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from plait.gateway.transforms.chain import Kind, Parameter, Step
from plait.gateway.transforms.errors import ParameterError, RejectedTextError, excerpt, nearest, place, quoted
from plait.gateway.transforms.json_value import dump_json

_PLACEHOLDER = "{{value}}"


@dataclass(frozen=True, slots=True)
class Strip(Step):
    """The text without white space around it."""

    name: ClassVar[str] = "strip"

    def convert(self, text: str) -> Iterator[str]:
        yield text.strip()


@dataclass(frozen=True, slots=True)
class Template(Step):
    """The parameter `text`, in which the value replaces each `{{value}}`. All other characters are literal."""

    name: ClassVar[str] = "template"
    parameters: ClassVar[tuple[Parameter, ...]] = (Parameter("text"),)

    text: str

    def __post_init__(self) -> None:
        if _PLACEHOLDER not in self.text:
            raise ParameterError("text", "a template without a place for the value", expected=f"{_PLACEHOLDER} in it")

    def convert(self, text: str) -> Iterator[str]:
        """Never fails, but `Transform.apply` refuses a result that is too long."""
        before, *rest = self.text.split(_PLACEHOLDER)
        yield before
        for part in rest:
            yield text
            yield part


_WORD = re.compile(r"\w+")

_TRUE = frozenset({"yes", "true"})
_FALSE = frozenset({"no", "false"})


@dataclass(frozen=True, slots=True)
class Boolean(Step):
    """`true` if the text contains the word "yes" or "true"; `false` if it contains "no" or "false".

    The parameters replace each pair by another word. Only whole words count, in any case. The sentence's meaning does
    not count: "not true" contains the word "true".
    """

    name: ClassVar[str] = "boolean"
    parameters: ClassVar[tuple[Parameter, ...]] = (
        Parameter("true", required=False),
        Parameter("false", required=False),
    )

    true: str | None = None
    false: str | None = None

    def __post_init__(self) -> None:
        if self.true is None and self.false is None:
            return
        for parameter, word in (("true", self.true), ("false", self.false)):
            if word is None:
                raise ParameterError(parameter, "one word only", expected="one for true and one for false")
            if not _WORD.fullmatch(word):
                raise ParameterError(parameter, quoted(word), expected="one word of letters, digits or _")
        if self._words(self.true, _TRUE) == self._words(self.false, _FALSE):
            raise ParameterError("false", f"{quoted(self.false or '')} for both", expected="a different word for each")

    def convert(self, text: str) -> Iterator[str]:
        """Fails if the text has words for both answers, or for neither."""
        words = {word.casefold() for word in _WORD.findall(text)}
        true, false = self._words(self.true, _TRUE), self._words(self.false, _FALSE)
        if words & true and words & false:
            both = " and ".join(f'"{word}"' for word in sorted(words & (true | false)))
            raise RejectedTextError(f"{both} occur in the text: the answer is ambiguous")
        if not words & (true | false):
            neither = ", ".join(f'"{word}"' for word in sorted(true | false))
            raise RejectedTextError(f"none of {excerpt(neither)} occurs in the text")
        yield "true" if words & true else "false"

    @staticmethod
    def _words(own: str | None, usual: frozenset[str]) -> frozenset[str]:
        return usual if own is None else frozenset({own.casefold()})


@dataclass(frozen=True, slots=True)
class OneOf(Step):
    """The option that equals the text without the white space around it.

    With `ignore_case`, the text may be in any case. The result is the option as the specification has it.
    """

    name: ClassVar[str] = "enum"
    parameters: ClassVar[tuple[Parameter, ...]] = (
        Parameter("options", Kind.TEXTS),
        Parameter("ignore_case", Kind.FLAG, required=False),
    )

    options: tuple[str, ...]
    ignore_case: bool = False

    def __post_init__(self) -> None:
        for option in self.options:
            if not option or option != option.strip():
                raise ParameterError("options", quoted(option), expected="an option without white space around it")
        if len({self._key(option) for option in self.options}) < len(self.options):
            raise ParameterError("options", "an option given twice", expected="each option once")

    def convert(self, text: str) -> Iterator[str]:
        """Fails if the text is none of the options."""
        options = {self._key(option): option for option in self.options}
        chosen = options.get(self._key(text.strip()))
        if chosen is None:
            raise RejectedTextError(f"the text is none of {excerpt(', '.join(self.options))}")
        yield chosen

    def _key(self, text: str) -> str:
        return text.casefold() if self.ignore_case else text


_SEPARATOR = r",_'\u2019\u00a0\u202f\u2009"
"""Separators of thousands: comma, underscore, apostrophes, no-break and thin spaces. A point is a decimal point."""

# Next to one of these, a number is part of a word. Only Latin letters count: scripts without spaces, such as Chinese,
# write numbers directly next to letters.
_LETTER = r"0-9A-Za-z_\u00c0-\u024f"

# A number with all its digits and separators, unless it is part of a word such as x86, 2nd or v1.2. A hyphen after a
# word is not a minus sign.
_NUMBER = re.compile(
    rf"(?:(?<![{_LETTER})+\-\u2212])(?P<sign>[-+\u2212]))?[$\u20ac\u00a3\u00a5]?"
    rf"(?P<digits>(?:(?<![{_LETTER}.])\.)?(?<![{_LETTER}])(?<![0-9][.{_SEPARATOR}])"
    rf"[0-9]++(?:[.{_SEPARATOR}][0-9]++)*+)(?![{_LETTER}])"
)
_GROUPED = re.compile(rf"[0-9]{{1,3}}([{_SEPARATOR}])[0-9]{{3}}(?:\1[0-9]{{3}})*+")

_NAMED_INTEGERS = 5


@dataclass(frozen=True, slots=True)
class Integer(Step):
    """The only integer in a text, in decimal digits without separators. The text may repeat it."""

    name: ClassVar[str] = "integer"

    def convert(self, text: str) -> Iterator[str]:
        """Fails if there is no number, a number that is not an integer, or more than one integer."""
        found = list(dict.fromkeys(map(_integer, _NUMBER.finditer(text))))
        if not found:
            raise RejectedTextError("there is no separate integer")
        if len(found) > 1:
            named = ", ".join(map(excerpt, found[:_NAMED_INTEGERS])) + (" ..." if len(found) > _NAMED_INTEGERS else "")
            raise RejectedTextError(f"which of {len(found)} integers is meant: {named}?")
        yield found[0]


def _integer(number: re.Match[str]) -> str:
    """A number's sign and digits. Raises `RejectedTextError` if the number is not an integer.

    The digits stay text, because Python's `int` takes quadratic time.
    """
    written = number["digits"]
    if not written.isdecimal() and not _GROUPED.fullmatch(written):
        raise RejectedTextError(f"{quoted(number[0])} is not an integer")
    digits = "".join(filter(str.isdecimal, written)).lstrip("0") or "0"
    return f"-{digits}" if number["sign"] in {"-", "\u2212"} and digits != "0" else digits


_NUMBERED = re.compile(r"[ \t]*+[0-9]++[.)][ \t]++(.*\S)")
_BULLETED = re.compile(r"[ \t]*+[-*+][ \t]++(.*\S)")


def _comma_items(text: str) -> list[str]:
    """The items of all lines. An item in double quotes may contain commas; `""` in it is one quote."""
    lines = (f"{line.strip()}\n" for line in text.split("\n"))
    rows = csv.reader(lines, skipinitialspace=True, strict=True)
    try:
        return [item.strip() for row in rows for item in row if item.strip()]
    except csv.Error as error:
        raise RejectedTextError(f"this is not a comma-separated list ({error})") from None


def _numbered_items(text: str) -> list[str]:
    return _marked_items(text, _NUMBERED)


def _bulleted_items(text: str) -> list[str]:
    return [item for item in _marked_items(text, _BULLETED) if not _is_rule(item)]


def _marked_items(text: str, marked: re.Pattern[str]) -> list[str]:
    """The text after the marker on each line that begins with a marker. Other lines are skipped."""
    return [found[1] for line in text.split("\n") if (found := marked.match(line))]


def _is_rule(item: str) -> bool:
    """Whether the item is the rest of a horizontal rule such as `* * *`."""
    return len(item) > 1 and set(item) in ({"*", " "}, {"-", " "})


# For each style: the function that reads the items, and the reason to give when it finds none.
_STYLES: dict[str, tuple[Callable[[str], list[str]], str]] = {
    "comma": (_comma_items, "the text is empty"),
    "numbered": (_numbered_items, 'no line begins with a number such as "1." or "1)"'),
    "bulleted": (_bulleted_items, "no line begins with -, * or + and a space"),
}


@dataclass(frozen=True, slots=True)
class ItemList(Step):
    """A list in one of three styles, as a JSON array of texts."""

    name: ClassVar[str] = "list"
    parameters: ClassVar[tuple[Parameter, ...]] = (Parameter("style"),)

    style: str

    def __post_init__(self) -> None:
        if self.style not in _STYLES:
            hint = nearest(self.style, _STYLES)
            raise ParameterError("style", quoted(self.style), expected="comma, numbered or bulleted", nearest=hint)

    def convert(self, text: str) -> Iterator[str]:
        """Fails if there is no item, because an answer that is not a list must not count as an empty list."""
        read, missing = _STYLES[self.style]
        items = read(text)
        if not items:
            raise RejectedTextError(f"there is no item in the list: {missing}")
        yield dump_json(items)


_TAG_NAME = re.compile(r"[A-Za-z_][\w.:-]*")


@dataclass(frozen=True, slots=True)
class XmlTag(Step):
    """The text between the first `<tag>` and its matching `</tag>`. Tags of the same name may be nested.

    Tags may have attributes, whose values contain neither `<` nor `>`. Entities in the text are not replaced. The text
    around the tags need not be XML.
    """

    name: ClassVar[str] = "xml"
    parameters: ClassVar[tuple[Parameter, ...]] = (Parameter("tag"),)

    tag: str

    def __post_init__(self) -> None:
        if not _TAG_NAME.fullmatch(self.tag):
            raise ParameterError("tag", quoted(self.tag), expected="a tag's name without < and >")

    def convert(self, text: str) -> Iterator[str]:
        """Fails if the tag is not opened or not closed."""
        # No quantifier matches `<`, so the search reads each character at most twice.
        tags = re.compile(rf"<(?P<slash>/?){re.escape(self.tag)}(?=[\s/>])[^<>]*>")
        opening: re.Match[str] | None = None
        depth = 0
        for tag in tags.finditer(text):
            change = -1 if tag["slash"] else 0 if tag[0].endswith("/>") else 1
            if opening is None:
                if change < 0:
                    continue
                opening = tag
            depth += change
            if depth == 0:  # the closing tag, or an empty element such as <tag/>
                yield text[opening.end() : max(opening.end(), tag.start())]
                return
        if opening is None:
            raise RejectedTextError(f"there is no <{self.tag}>")
        raise RejectedTextError(f"<{self.tag}> at {place(text, opening.start())} is not closed by </{self.tag}>")


_MAX_PROGRAM_BYTES = 1 << 20
"""The memory limit of a compiled pattern. RE2's cache has up to 128 patterns."""

_MAX_WORK = 100_000_000
"""The limit of a pattern's instructions times a text's bytes. If the pattern's automaton does not fit into its memory,
RE2 simulates every instruction at every byte. One simulated instruction takes some 4 ns on a current server, during
which no other Python thread runs."""

_MAX_GROUPS = 20
"""Each group makes the simulation slower: 50 groups triple the time."""

_ALL_GROUPS = "*"


@dataclass(frozen=True, slots=True)
class Regex(Step):
    """The first match of a pattern in RE2's syntax: one group, or all named groups as a JSON object.

    `group` is a number (0: the whole match), a name, or `*` for all named groups. Without `group`, the result is the
    pattern's only group, or the whole match if the pattern has no group. RE2 takes linear time for every pattern.
    """

    name: ClassVar[str] = "regex"
    parameters: ClassVar[tuple[Parameter, ...]] = (Parameter("pattern"), Parameter("group", required=False))

    pattern: str
    group: str | None = None

    def __post_init__(self) -> None:
        compiled = _compiled(self.pattern)
        if compiled.groups > _MAX_GROUPS:
            expected = f"{_MAX_GROUPS} at most; (?:...) groups without capturing"
            raise ParameterError("pattern", f"{compiled.groups} groups", expected=expected)
        if self.group is None:
            if compiled.groups > 1:
                raise ParameterError("group", f"{compiled.groups} groups", expected=f"which one: {_groups(compiled)}")
        elif self.group == _ALL_GROUPS:
            if not compiled.groupindex:
                raise ParameterError("group", '"*" without named groups', expected="groups such as (?P<name>...)")
        elif self.group not in {*map(str, range(compiled.groups + 1)), *compiled.groupindex}:
            raise ParameterError("group", quoted(self.group), expected=_groups(compiled))

    def convert(self, text: str) -> Iterator[str]:
        """Fails if nothing matches, if the group took no part in the match, or if matching would take too long."""
        compiled = _compiled(self.pattern)
        longest_bytes = _MAX_WORK // compiled.programsize
        if len(text.encode()) > longest_bytes:
            raise RejectedTextError(f"the text is longer than the {longest_bytes:,} bytes that this pattern may search")
        found = compiled.search(text)
        if found is None:
            raise RejectedTextError("the pattern matches nowhere")
        if self.group == _ALL_GROUPS:
            by_number = sorted(compiled.groupindex, key=compiled.groupindex.__getitem__)  # RE2's own order is by name
            yield dump_json({name: found[name] for name in by_number})
            return
        taken = found[self._group(compiled)]
        if taken is None:
            raise RejectedTextError(f"the pattern matches, but group {self._group(compiled)} takes no part in it")
        yield taken

    def _group(self, compiled: Any) -> int | str:
        if self.group is None:
            return int(compiled.groups)  # 1: the only group, 0: the whole match
        return int(self.group) if self.group.isdecimal() else self.group


def _compiled(pattern: str) -> Any:
    """Compile a pattern, or take it from RE2's cache. Raises `ParameterError` for an invalid pattern."""
    import re2  # type: ignore[import-untyped]  # noqa: PLC0415 - 3 MB, for those who use patterns

    options = re2.Options()
    options.max_mem = _MAX_PROGRAM_BYTES
    options.log_errors = False
    try:
        return re2.compile(pattern, options)
    except re2.error as error:
        reason = error.args[0]
        shown = reason.decode("utf-8", "replace") if isinstance(reason, bytes) else str(reason)
        expected = "a pattern in RE2's syntax, which has no backreferences and no look-around"
        raise ParameterError("pattern", f"an invalid regular expression ({shown})", expected=expected) from None


def _groups(compiled: Any) -> str:
    numbers = f"a number from 0 to {compiled.groups}"
    return f"{numbers}, {', '.join(compiled.groupindex)} or *" if compiled.groupindex else numbers
