"""`POST /call_objectives`: the gateway changes the objectives of calls that an engine has.

The body is a JSON list. Each item has a call's handle (`plait_handle`) and all of its new objectives, in the keys of
`call_annotations`; an objective that an item lacks is removed. Times count from the call's zero, as before. The answer
has the number of items whose call the engine has.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec

from plait.backends.errors import CallerError
from plait.backends.protocol.call_annotations import AnnotationReader, EngineAnnotations, to_parameters

PATH: Final = "/call_objectives"

MAX_CHANGES: Final = 1_024
"""The most changes of one request."""

MAX_BODY_BYTES: Final = 1_024 * MAX_CHANGES
"""Far more than `MAX_CHANGES` changes take."""


class ChangesAnswer(msgspec.Struct, frozen=True):
    """The engine's answer: the number of changes whose call it has."""

    known: int


def encode_changes(changes: Iterable[EngineAnnotations]) -> bytes:
    """The body for calls with these handles and objectives."""
    return msgspec.json.encode([to_parameters(change) for change in changes])


def read_changes(body: bytes, reader: AnnotationReader) -> Sequence[EngineAnnotations]:
    """The changes in a body. As in a call, a bad objective is ignored and counted. Raises `CallerError`."""
    try:
        items = msgspec.json.decode(body, type=list[dict[str, Any]])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CallerError(f"the body must be a JSON list of objects: {error}") from error
    if len(items) > MAX_CHANGES:
        raise CallerError(f"the body has {len(items)} changes; at most {MAX_CHANGES} are taken")
    changes = [reader.read(item) for item in items]
    if any(change.handle is None for change in changes):
        raise CallerError("each change needs the handle of its call", param="plait_handle")
    return changes
