"""The data-parallel ranks of a vLLM server: engine cores, each with a KV cache of its own, behind one API server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from plait.backends.adapter.named_ranks import named_rank


def rank_count(state: Any) -> int:
    """How many ranks an API server with this state has, also those of nodes without a server."""
    core = getattr(getattr(state, "engine_client", None), "engine_core", None)
    return len(getattr(core, "core_engines", ())) or 1


async def call_rank(core: Any, rank: int, method: str, *arguments: Any) -> Any:
    """The answer of one rank's engine core. vLLM's own way asks all of them and waits for each."""
    if len(getattr(core, "core_engines", ())) <= 1:
        return await core.call_utility_async(method, *arguments)
    return await core._call_utility_async(method, *arguments, engine=core.core_engines[rank])  # noqa: SLF001


async def to_named_rank(add_request: Callable[..., Awaitable[Any]], *args: Any, **kwargs: Any) -> Any:
    """Stands around vLLM's `add_request`. vLLM reads the header on some of its routes itself."""
    if kwargs.get("data_parallel_rank") is None:
        kwargs["data_parallel_rank"] = named_rank()
    return await add_request(*args, **kwargs)
