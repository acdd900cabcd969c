"""SGLang's API server asks a scheduler for what is Plait's in the id of a request for its internal state.

That request has no other free field. A scheduler without the plugin answers with its internal state as usual. With the
plugin, it answers only with what was asked for, under `STATE_KEY`. So the answer also proves that the plugin is active.
All tensor-parallel ranks get the request.
"""

from __future__ import annotations

from typing import Final

import msgspec

PREFIX: Final = "plait "
STATE_KEY: Final = "plait"


class ReportSince(msgspec.Struct, frozen=True, tag="report"):
    """Asks for the cache-state report as msgpack, since the cursor and epoch of the latest known one."""

    since: int | None = None
    epoch: str | None = None


class ChangeObjectives(msgspec.Struct, frozen=True, tag="objectives"):
    """Changes objectives of calls, by a valid body of `POST /call_objectives`. Asks how many calls are known."""

    body: str


SchedulerQuery = ReportSince | ChangeObjectives


def query_id(query: SchedulerQuery) -> str:
    """The request id with a query."""
    return PREFIX + msgspec.json.encode(query).decode()


def parse_query(request_id: str | None) -> SchedulerQuery | None:
    """The query in a request id; None for any other id."""
    if request_id is None or not request_id.startswith(PREFIX):
        return None
    query: SchedulerQuery = msgspec.json.decode(request_id.removeprefix(PREFIX), type=SchedulerQuery)
    return query
