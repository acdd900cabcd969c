"""Anthropic's content blocks as parts of a chat's messages. A block that chats do not have becomes a note."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from typing import Any

from plait.backends.translation.chat_history import note, text_part
from plait.backends.translation.fields import Json, a_text, an_object, objects, wrong

Block = tuple[Mapping[str, Any], str]
"""A content block and its place in the body."""


def blocks_of(content: object, where: str) -> list[Block]:
    """The content as blocks; a text is one block."""
    if isinstance(content, str):
        return [(text_part(content), where)]
    if content is None:
        raise wrong(where, "is missing")
    return list(objects(content, where))


def parts_of(block: Mapping[str, Any], where: str) -> Iterator[Json]:
    kind = block.get("type")
    if kind == "text":
        yield text_part(a_text(block.get("text"), f"{where}.text"))
    elif kind == "image":
        yield _image(block, f"{where}.source")
    elif kind == "document":
        yield from _document(block, f"{where}.source")
    elif kind == "search_result":
        yield text_part(_titled(block.get("title"), block.get("source")))
        for inner, place in blocks_of(block.get("content"), f"{where}.content"):
            yield from parts_of(inner, place)
    elif isinstance(kind, str):
        yield text_part(note(kind, block))
    else:
        raise wrong(f"{where}.type", "must be a string")


def text_of(block: Mapping[str, Any], where: str) -> str:
    """The text of a block of a system prompt or an answer, where all parts are texts."""
    return "\n".join(part["text"] for part in parts_of(block, where) if part["type"] == "text")


def _image(block: Mapping[str, Any], where: str) -> Json:
    source = an_object(block.get("source"), where)
    kind = source.get("type")
    if kind == "url":
        url = a_text(source.get("url"), f"{where}.url")
    elif kind == "base64":
        media, data = (a_text(source.get(key), f"{where}.{key}") for key in ("media_type", "data"))
        url = f"data:{media};base64,{data}"
    else:
        return text_part(note("image", source))
    return {"type": "image_url", "image_url": {"url": url}}


def _document(block: Mapping[str, Any], where: str) -> Iterator[Json]:
    """A document's text; a note for other documents, such as a PDF, which engines do not read."""
    source = an_object(block.get("source"), where)
    head = _titled(block.get("title"), block.get("context"))
    if head:
        yield text_part(head)
    kind, data = source.get("type"), source.get("data")
    if kind == "content":
        for inner, place in blocks_of(source.get("content"), f"{where}.content"):
            yield from parts_of(inner, place)
    elif kind == "text":
        yield text_part(a_text(data, f"{where}.data"))
    else:
        text = _plain(source)
        yield text_part(note("document that cannot be read here", source) if text is None else text)


def _plain(source: Mapping[str, Any]) -> str | None:
    """The text of a base64 document; None if it is not text."""
    if not str(source.get("media_type")).startswith("text/") or not isinstance(source.get("data"), str):
        return None
    try:
        return base64.b64decode(source["data"], validate=True).decode()
    except ValueError:  # it is not base64, or not UTF-8
        return None


def _titled(*said: object) -> str:
    return "\n".join(text for text in said if isinstance(text, str) and text)
