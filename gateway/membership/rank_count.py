"""How many data-parallel ranks a server has, asked before it gets its first call.

SGLang says so by its list of loads, vLLM by the labels of its metrics. With Plait's adapter, a later report with
another number counts (`monitor`).
"""

from __future__ import annotations

from plait.backends.errors import EngineGarbledError
from plait.backends.protocol.cache_state import MAX_RANKS
from plait.backends.protocol.dialects import DIALECTS
from plait.backends.protocol.engine_counts import count_ranks, read_loads, read_owners
from plait.gateway.membership.engine_requests import Body, EngineRequests, RefusedRequestError


async def ranks_of(requests: EngineRequests, models: Body) -> int | None:
    """The number of ranks of the server that has listed these `models`; None if only its reports say it.

    Raises `EngineError`.
    """
    owners = read_owners(models)
    row = next((row for row in DIALECTS.values() if row.rank_label is not None and row.owners & owners), None)
    if row is None:
        return None if owners <= {"plait"} else 1
    found = 0 if row.loads_path is None else read_loads(await _answer(requests, row.loads_path))
    if not found and row.metrics is not None:
        found = count_ranks(row, await _answer(requests, row.metrics))
    return min(max(1, found), MAX_RANKS)


async def _answer(requests: EngineRequests, path: str) -> Body:
    """The answer of a route; empty if there is none."""
    try:
        return await requests.get(path, accept=b"*/*")
    except (RefusedRequestError, EngineGarbledError):
        return b""
