"""What an engine is not as the gateway takes it to be, found at its start and by its answers.

An engine with Plait's adapter reports its tokenizer. For any other, the ids of a text and of a chat are compared where
it has `/tokenize`, and in any case the prompt tokens that its answers count.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import httpx
import msgspec
import structlog

from plait.backends.errors import PlaitError
from plait.backends.protocol.tokenizer_fingerprint import TEXTS
from plait.backends.tokenization.tokenizer import Tokenizer
from plait.gateway.fleet.booking import Booking, CallUsage
from plait.gateway.fleet.engine import FleetEngine
from plait.policy.types import Call

TOKENIZE: Final = "/tokenize"
PROBE_TEXT: Final = "\n".join(TEXTS[:6])
"""Some 400 tokens: short enough for any context."""
PROBE_CHAT: Final = [{"role": "user", "content": " Say «hi». "}]
TELLING_TOKENS: Final = 256
"""Prompts of which less is cached say nothing of what an engine's cache goes by."""
CONTRADICTIONS: Final = 3
HINTS: Final[Mapping[str, str]] = {
    "tokenizer": "set tokenizer and chat_template of [[models]] to what the engine loads, and restart the gateway",
    "context": "leave max_context_tokens out of [[models]]: the engine says what it takes",
    "cache": "the usual causes: a cache salt that does not reach the engine, a LoRA adapter behind the same name",
    "count": "the gateway's chat template or tokenizer is not the engine's: see tokenizer in [[models]]",
}

log = structlog.get_logger(__name__)


class _Tokens(msgspec.Struct):
    tokens: list[int]


def note(engine: FleetEngine, kind: str, problem: str | None) -> None:
    """Keep what is wrong of one `kind` (None: nothing). A change is logged."""
    known = engine.mismatches.get(kind)
    if problem is None:
        if engine.mismatches.pop(kind, None) is not None:
            log.info("engine agrees again", engine=engine.view.engine_id, about=kind)
        return
    engine.mismatches[kind] = problem
    if known is None:
        log.warning("engine differs", engine=engine.view.engine_id, about=kind, problem=problem, hint=HINTS[kind])


def context_mismatch(models: Mapping[str, int | None], configured: Mapping[str, int]) -> str | None:
    """What is wrong with the contexts that an engine lists, if they are shorter than the configured ones."""
    for model, most in models.items():
        wanted = configured.get(model)
        if most is not None and wanted is not None and wanted > most:
            return f"the engine takes {most} tokens of context for '{model}', and max_context_tokens says {wanted}"
    return None


def note_answer(engine: FleetEngine, booking: Booking, usage: CallUsage, now_s: float) -> None:
    """Compare the tokens that an answer counts with the gateway's: those of the prompt, and the cached ones."""
    note_count(engine, booking.call, usage)
    if usage.cached_tokens is not None and engine.cache.reports:
        note_cached(engine, booking.placement.cached_tokens, usage.cached_tokens, booking.booked_s, now_s)


def note_cached(engine: FleetEngine, predicted_tokens: int, cached_tokens: int, booked_s: float, now_s: float) -> None:
    """Compare the cached tokens of a prompt, placed at `booked_s`, with what the engine's own reports predicted.

    One call may meet an eviction, or a prefix that is not computed yet. Several, one after the other, that find all or
    nothing against the reports have other blocks than those name.
    """
    if max(predicted_tokens, cached_tokens) < TELLING_TOKENS:
        return
    if min(predicted_tokens, cached_tokens) > 0:
        engine.contradictions = 0
        note(engine, "cache", None)
        return
    if booked_s < engine.contradicted_s:
        return  # it was placed before the last contradiction was known, and has the same cause
    engine.contradictions += 1
    engine.contradicted_s = now_s
    if engine.contradictions >= CONTRADICTIONS:
        said = (
            f"the engine finds {cached_tokens} tokens of a prompt in its cache, and its reports say {predicted_tokens}"
        )
        note(engine, "cache", said)


def note_count(engine: FleetEngine, call: Call, usage: CallUsage) -> None:
    """Compare the prompt tokens that an answer counts with the gateway's, of a call that has exact ones."""
    if call.prompt_hash is None:
        return
    if call.prompt_tokens == usage.prompt_tokens:
        if engine.mismatches:
            note(engine, "count", None)
        return
    problem = (
        f"the engine counts {usage.prompt_tokens} tokens in a prompt in which the gateway counts {call.prompt_tokens}"
    )
    note(engine, "count", problem)


async def tokenizer_mismatch(http: httpx.AsyncClient, model: str, tokenizer: Tokenizer) -> str | None:
    """How an engine's `/tokenize` differs from the gateway's tokenizer; None if it does not, or does not say.

    Raises `httpx.TransportError`.
    """
    asked: dict[str, tuple[dict[str, Any], Sequence[int]]] = {
        "a text": ({"prompt": PROBE_TEXT}, await asyncio.to_thread(tokenizer.encode, PROBE_TEXT)),
    }
    with suppress(PlaitError):  # the model has no template, or it cannot be rendered now
        chat = await asyncio.to_thread(tokenizer.encode_chat, PROBE_CHAT)
        asked["a chat"] = ({"messages": PROBE_CHAT, "add_generation_prompt": True}, chat)
    for what, (fields, ours) in asked.items():
        theirs = await _tokenized(http, {"model": model, **fields})
        if theirs is not None and theirs != list(ours):
            return (
                f"the engine's tokenizer is not the gateway's: it makes {len(theirs)} tokens of {what} "
                f"({_different(theirs, ours)}), the gateway {len(ours)} ({_different(ours, theirs)})"
            )
    return None


async def _tokenized(http: httpx.AsyncClient, body: dict[str, Any]) -> list[int] | None:
    try:
        response = await http.post(TOKENIZE, json=body)
        return msgspec.json.decode(response.content, type=_Tokens).tokens if response.status_code == 200 else None
    except (msgspec.DecodeError, UnicodeDecodeError, httpx.DecodingError):
        return None


def _different(ids: Sequence[int], others: Sequence[int]) -> str:
    """The first ids that are not those of the others."""
    same = (one == other for one, other in zip(ids, others, strict=False))
    place = next((place for place, is_same in enumerate(same) if not is_same), min(len(ids), len(others)))
    return f"{', '.join(map(str, ids[place : place + 3])) or 'nothing'} from token {place} on"
