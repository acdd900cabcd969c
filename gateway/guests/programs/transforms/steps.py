"""The transforms, except `json` and `code_block`: see `json_value` and `code_block`.

Each checks its parameters and returns the function that converts a text.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from plait.gateway.guests.programs.transforms.chain import Convert
from plait.gateway.guests.programs.transforms.errors import (
    ParameterError,
    RejectedTextError,
    excerpt,
    nearest,
    place,
    quoted,
)
from plait.gateway.guests.programs.transforms.json_value import dump_json

_PLACEHOLDER = "{{value}}"


def strip() -> Convert:
    """The text without white space around it."""
    return lambda text: iter((text.strip(),))


def template(text: str) -> Convert:
    """The parameter `text`, in which the value replaces each `{{value}}`. All other characters are literal."""
    before, *rest = text.split(_PLACEHOLDER)
    if not rest:
        raise ParameterError("text", "a template without a place for the value", expected=f"{_PLACEHOLDER} in it")

    def convert(value: str) -> Iterator[str]:
        yield before
        for part in rest:
            yield value
            yield part

    return convert


_WORD = re.compile(r"\w+")

_TRUE = frozenset({"yes", "true"})
_FALSE = frozenset({"no", "false"})


def boolean(true: str | None = None, false: str | None = None) -> Convert:
    """`true` if the text contains the word "yes" or "true"; `false` if it contains "no" or "false".

    The parameters replace each pair by another word. Only whole words count, in any case. The sentence's meaning does
    not count: "not true" contains the word "true". Fails if the text has words for both answers, or for neither.
    """
    if true is not None or false is not None:
        for parameter, word in (("true", true), ("false", false)):
            if word is None:
                raise ParameterError(parameter, "one word only", expected="one for true and one for false")
            if not _WORD.fullmatch(word):
                raise ParameterError(parameter, quoted(word), expected="one word of letters, digits or _")
    trues = _TRUE if true is None else {true.casefold()}
    falses = _FALSE if false is None else {false.casefold()}
    if trues == falses:
        raise ParameterError("false", f"{quoted(false or '')} for both", expected="a different word for each")

    def convert(text: str) -> Iterator[str]:
        words = {word.casefold() for word in _WORD.findall(text)}
        if words & trues and words & falses:
            both = " and ".join(f'"{word}"' for word in sorted(words & (trues | falses)))
            raise RejectedTextError(f"{both} occur in the text: the answer is ambiguous")
        if not words & (trues | falses):
            neither = ", ".join(f'"{word}"' for word in sorted(trues | falses))
            raise RejectedTextError(f"none of {excerpt(neither)} occurs in the text")
        yield "true" if words & trues else "false"

    return convert


def one_of(*options: str, ignore_case: bool = False) -> Convert:
    """The option that equals the text without the white space around it.

    With `ignore_case`, the text may be in any case. The result is the option as the specification has it.
    """
    if not options:
        raise ParameterError("options", "enum without options", expected="options")
    for option in options:
        if not option or option != option.strip():
            raise ParameterError("options", quoted(option), expected="an option without white space around it")
    key = str.casefold if ignore_case else str
    by_key = {key(option): option for option in options}
    if len(by_key) < len(options):
        raise ParameterError("options", "an option given twice", expected="each option once")

    def convert(text: str) -> Iterator[str]:
        chosen = by_key.get(key(text.strip()))
        if chosen is None:
            raise RejectedTextError(f"the text is none of {excerpt(', '.join(options))}")
        yield chosen

    return convert


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


def integer() -> Convert:
    """The only integer in a text, in decimal digits without separators. The text may repeat it.

    Fails if there is no number, a number that is not an integer, or more than one integer.
    """

    def convert(text: str) -> Iterator[str]:
        found = list(dict.fromkeys(map(_integer, _NUMBER.finditer(text))))
        if not found:
            raise RejectedTextError("there is no separate integer")
        if len(found) > 1:
            named = ", ".join(map(excerpt, found[:_NAMED_INTEGERS])) + (" ..." if len(found) > _NAMED_INTEGERS else "")
            raise RejectedTextError(f"which of {len(found)} integers is meant: {named}?")
        yield found[0]

    return convert


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


def item_list(style: str) -> Convert:
    """A list in one of three styles, as a JSON array of texts.

    Fails if there is no item, because an answer that is not a list must not count as an empty list.
    """
    if style not in _STYLES:
        hint = nearest(style, _STYLES)
        raise ParameterError("style", quoted(style), expected="comma, numbered or bulleted", nearest=hint)
    read, missing = _STYLES[style]

    def convert(text: str) -> Iterator[str]:
        items = read(text)
        if not items:
            raise RejectedTextError(f"there is no item in the list: {missing}")
        yield dump_json(items)

    return convert


_TAG_NAME = re.compile(r"[A-Za-z_][\w.:-]*")


def xml_tag(tag: str) -> Convert:
    """The text between the first `<tag>` and its matching `</tag>`. Tags of the same name may be nested.

    Tags may have attributes, whose values contain neither `<` nor `>`. Entities in the text are not replaced. The text
    around the tags need not be XML. Fails if the tag is not opened or not closed.
    """
    if not _TAG_NAME.fullmatch(tag):
        raise ParameterError("tag", quoted(tag), expected="a tag's name without < and >")

    def convert(text: str) -> Iterator[str]:
        # No quantifier matches `<`, so the search reads each character at most twice.
        tags = re.compile(rf"<(?P<slash>/?){re.escape(tag)}(?=[\s/>])[^<>]*>")
        opening: re.Match[str] | None = None
        depth = 0
        for found in tags.finditer(text):
            change = -1 if found["slash"] else 0 if found[0].endswith("/>") else 1
            if opening is None:
                if change < 0:
                    continue
                opening = found
            depth += change
            if depth == 0:  # the closing tag, or an empty element such as <tag/>
                yield text[opening.end() : max(opening.end(), found.start())]
                return
        if opening is None:
            raise RejectedTextError(f"there is no <{tag}>")
        raise RejectedTextError(f"<{tag}> at {place(text, opening.start())} is not closed by </{tag}>")

    return convert


_MAX_PROGRAM_BYTES = 1 << 20
"""The memory limit of a compiled pattern. RE2's cache has up to 128 patterns."""

_MAX_WORK = 100_000_000
"""The limit of a pattern's instructions times a text's bytes. If the pattern's automaton does not fit into its memory,
RE2 simulates every instruction at every byte. One simulated instruction takes some 4 ns on a current server, during
which no other Python thread runs."""

_MAX_GROUPS = 20
"""Each group makes the simulation slower: 50 groups triple the time."""

_ALL_GROUPS = "*"


def regex(pattern: str, group: str | None = None) -> Convert:
    """The first match of a pattern in RE2's syntax: one group, or all named groups as a JSON object.

    `group` is a number (0: the whole match), a name, or `*` for all named groups. Without `group`, the result is the
    pattern's only group, or the whole match if the pattern has no group. RE2 takes linear time for every pattern.
    Fails if nothing matches, if the group took no part in the match, or if matching would take too long.
    """
    compiled = _compiled(pattern)
    if compiled.groups > _MAX_GROUPS:
        expected = f"{_MAX_GROUPS} at most; (?:...) groups without capturing"
        raise ParameterError("pattern", f"{compiled.groups} groups", expected=expected)
    if group is None:
        if compiled.groups > 1:
            raise ParameterError("group", f"{compiled.groups} groups", expected=f"which one: {_groups(compiled)}")
        group = str(compiled.groups)  # 1: the only group, 0: the whole match
    elif group == _ALL_GROUPS:
        if not compiled.groupindex:
            raise ParameterError("group", '"*" without named groups', expected="groups such as (?P<name>...)")
    elif group not in {*map(str, range(compiled.groups + 1)), *compiled.groupindex}:
        raise ParameterError("group", quoted(group), expected=_groups(compiled))
    return partial(_matched, pattern, group)


def _matched(pattern: str, group: str, text: str) -> Iterator[str]:
    compiled = _compiled(pattern)  # not kept, because a pattern may use 1 MB
    longest_bytes = _MAX_WORK // compiled.programsize
    if len(text.encode()) > longest_bytes:
        raise RejectedTextError(f"the text is longer than the {longest_bytes:,} bytes that this pattern may search")
    found = compiled.search(text)
    if found is None:
        raise RejectedTextError("the pattern matches nowhere")
    if group == _ALL_GROUPS:
        by_number = sorted(compiled.groupindex, key=compiled.groupindex.__getitem__)  # RE2's own order is by name
        yield dump_json({name: found[name] for name in by_number})
        return
    taken = found[int(group) if group.isdecimal() else group]
    if taken is None:
        raise RejectedTextError(f"the pattern matches, but group {group} takes no part in it")
    yield taken


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
