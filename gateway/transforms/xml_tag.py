"""The transform that extracts the text between two XML tags. The text around the tags need not be XML."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from plait.gateway.transforms.errors import ParameterError, RejectedTextError, place, quoted
from plait.gateway.transforms.step import Parameter, Step

_TAG_NAME = re.compile(r"[A-Za-z_][\w.:-]*")


@dataclass(frozen=True, slots=True)
class XmlTag(Step):
    """The text between the first `<tag>` and its matching `</tag>`. Tags of that name may be nested in it.

    Tags may have attributes, whose values hold neither `<` nor `>`. The text is unchanged; entities are not replaced.
    """

    name: ClassVar[str] = "xml"
    parameters: ClassVar[tuple[Parameter, ...]] = (Parameter("tag"),)

    tag: str

    def __post_init__(self) -> None:
        if not _TAG_NAME.fullmatch(self.tag):
            raise ParameterError("tag", quoted(self.tag), expected="a tag's name without < and >")

    def convert(self, text: str) -> Iterator[str]:
        """Fails if the tag is not opened or not closed."""
        # No quantifier can run over the next <, so each character is looked at twice at most.
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
            if depth == 0:  # at once for an empty element
                yield text[opening.end() : max(opening.end(), tag.start())]
                return
        if opening is None:
            raise RejectedTextError(f"there is no <{self.tag}>")
        raise RejectedTextError(f"<{self.tag}> at {place(text, opening.start())} is not closed by </{self.tag}>")
