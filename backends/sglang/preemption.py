"""Preemption in SGLang: frees the blocks of requests, which later compute their tokens again."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any


def preempt(scheduler: Any, running_batch: Any, victims: Iterable[Any], release: Callable[..., Any]) -> list[Any]:
    """Free the blocks of those victims that can start anew. Returns them; the caller queues them again.

    `release` is SGLang's `release_req`, which frees a request's resources.
    """
    victims = [request for request in victims if _can_start_anew(request)]
    if not victims:
        return []
    ids = {id(request) for request in victims}
    staying = [index for index, request in enumerate(running_batch.reqs) if id(request) not in ids]
    for index, request in enumerate(running_batch.reqs):
        if id(request) in ids:
            running_batch.release_req(index, len(staying))
    if len(staying) < len(running_batch.reqs):
        running_batch.filter_batch(keep_indices=staying)
        running_batch.batch_is_full = False
    if id(scheduler.chunked_req) in ids:
        release(
            req=scheduler.chunked_req,
            remaing_req_count=len(staying),
            req_to_token_pool=scheduler.req_to_token_pool,
            token_to_kv_pool_allocator=scheduler.token_to_kv_pool_allocator,
            tree_cache=scheduler.tree_cache,
            hisparse_coordinator=None,
        )
        scheduler.chunked_req = None
    return victims


def _can_start_anew(request: Any) -> bool:
    """Whether SGLang can compute a request again from its tokens."""
    return request.beam_group is None and request.input_embeds is None and request.session is None
