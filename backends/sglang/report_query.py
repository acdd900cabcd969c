"""How SGLang's API server asks a scheduler for the cache-state report: in the id of a request for its internal state.

That request has no field of its own for it. A scheduler without the plugin answers it as any other; one with it answers
with the report alone, under `STATE_KEY`: so the report also attests that the plugin is active where it has to be.
"""

from __future__ import annotations

from typing import Final

import msgspec

PREFIX: Final = "plait-cache-state "
STATE_KEY: Final = "plait_cache_state"


class Known(msgspec.Struct, frozen=True):
    """What is known already: the cursor of an epoch."""

    since: int | None = None
    epoch: str | None = None


def query_id(since: int | None, epoch: str | None) -> str:
    """The request id that asks for the changes since."""
    return PREFIX + msgspec.json.encode(Known(since, epoch)).decode()


def parse_query(request_id: str | None) -> Known | None:
    """What a request id asks for, None for any other request."""
    if request_id is None or not request_id.startswith(PREFIX):
        return None
    return msgspec.json.decode(request_id.removeprefix(PREFIX), type=Known)
