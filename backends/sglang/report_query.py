"""SGLang's API server asks a scheduler for the cache-state report in the id of a request for its internal state.

That request has no other free field. A scheduler without the plugin answers with its internal state as usual. With the
plugin, it answers only with the report, under `STATE_KEY`. So the report also proves that the plugin is active.
"""

from __future__ import annotations

from typing import Final

import msgspec

PREFIX: Final = "plait-cache-state "
STATE_KEY: Final = "plait_cache_state"


class Known(msgspec.Struct, frozen=True):
    """The cursor and epoch of the latest known report."""

    since: int | None = None
    epoch: str | None = None


def query_id(since: int | None, epoch: str | None) -> str:
    """The request id that asks for the changes since a cursor of `epoch`."""
    return PREFIX + msgspec.json.encode(Known(since, epoch)).decode()


def parse_query(request_id: str | None) -> Known | None:
    """The query in a request id; None for any other id."""
    if request_id is None or not request_id.startswith(PREFIX):
        return None
    return msgspec.json.decode(request_id.removeprefix(PREFIX), type=Known)
