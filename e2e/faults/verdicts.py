"""What is to be said of an answer: whether it is what a healthy engine gives, and what no client may see."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

from e2e.faults.completions import Body, completion_of
from e2e.faults.modes import INTERNAL_URL
from e2e.faults.raw_client import Answer

_LONGEST_ERROR_BYTES = 10_000
"""A client may see a part of what the engine said, and the chain of causes of a program."""
_ONCE = (
    "plait-engine",
    "plait-placement",
    "plait-cached-tokens",
    "plait-slo",
    "x-request-id",
    "content-type",
    "content-length",
)


def is_good(body: Body, answer: Answer) -> bool:
    """Whether a call got the whole answer that a healthy engine gives to it."""
    if answer.broken or answer.status != 200:
        return False
    wanted = completion_of(body)
    text, finish_reason, has_error = text_of(answer, streamed=bool(body.get("stream")))
    return not has_error and (text, finish_reason) == (wanted.text, wanted.finish_reason)


def text_of(answer: Answer, *, streamed: bool) -> tuple[str, str | None, bool]:
    """The text, the finish reason, and whether there is an error in it."""
    text, finish_reason, has_error = "", None, False
    for data in events(answer) if streamed else [_decoded(answer.body)]:
        if not isinstance(data, dict) or "error" in data:
            has_error = True
            continue
        for choice in data.get("choices") or ():
            part = choice.get("delta") or choice.get("message") or choice
            text += part.get("content") or part.get("text") or ""
            finish_reason = choice.get("finish_reason") or finish_reason
    return text, finish_reason, has_error


def signs_of_life(answer: Answer) -> int:
    """How many comments a stream has that say that it goes on."""
    return sum(part.lstrip().startswith(b": waiting") for part in answer.body.split(b"\n\n"))


def events(answer: Answer) -> list[Any]:
    """The data of a stream's events, decoded; without [DONE]. None stands for what is not JSON."""
    found = []
    for part in answer.body.replace(b"\r\n", b"\n").split(b"\n\n"):
        lines = [line.partition(b":")[2].strip() for line in part.split(b"\n") if line.startswith(b"data:")]
        if lines and lines[0] != b"[DONE]":
            found.append(_decoded(b"\n".join(lines)))
    return found


def complaints(answer: Answer, engine_ports: frozenset[int]) -> Iterator[str]:
    """What a client should not have seen in an answer, be it good or an error."""
    shown = answer.body + repr(answer.headers).encode()
    if b"<html" in shown.lower():
        yield "HTML"
    if INTERNAL_URL.encode() in shown or any(b"127.0.0.1:%d" % port in shown for port in engine_ports):
        yield "an engine's address"
    if answer.status != 200 and len(answer.body) > _LONGEST_ERROR_BYTES:
        yield f"an error of {len(answer.body)} bytes"
    yield from _header_complaints(answer)
    if answer.broken:
        yield f"an answer that breaks off ({answer.broken}) with status {answer.status}"
    elif answer.status == 200 and (answer.header("content-type") or "").startswith("text/event-stream"):
        if not _ends(answer):
            yield "a stream that ends without [DONE] and without an error"
    elif answer.status != 200 and not _is_error(_decoded(answer.body)):
        yield f"status {answer.status} with a body that is no error of OpenAI's: {answer.body[:100]!r}"


def _header_complaints(answer: Answer) -> Iterator[str]:
    counts = Counter(name for name, _ in answer.headers)
    for name in _ONCE:
        if counts[name] > 1:
            yield f"the header {name} {counts[name]} times"
    for name in ("set-cookie", "x-internal", "location"):
        if counts[name]:
            yield f"the header {name}"
    if any(value == "forged" for _, value in answer.headers):
        yield "a forged header"


def _ends(answer: Answer) -> bool:
    found = events(answer)
    is_done = answer.body.rstrip().endswith(b"[DONE]")
    return is_done or (bool(found) and _is_error(found[-1]))


def _is_error(data: Any) -> bool:
    error = data.get("error") if isinstance(data, dict) else None
    return isinstance(error, dict) and isinstance(error.get("message"), str) and bool(error["message"])


def _decoded(data: bytes) -> Any:
    try:
        return json.loads(data.decode("utf-8", "replace"), strict=False)
    except ValueError:
        return None
