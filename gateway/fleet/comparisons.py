"""Differences between an engine and what the gateway assumes: tokenizer, contexts, token counts, cached tokens, cache.

They are found when an engine starts and from its answers, and recorded in its `mismatches`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import structlog

from plait.gateway.fleet.booking import Booking, CallUsage
from plait.gateway.fleet.engine import FleetEngine, OtherCount
from plait.gateway.fleet.engine_cache import EngineCache
from plait.policy.types import Call

TELLING_TOKENS: Final = 256
"""Fewer cached tokens do not show whether an engine's cache uses the reported blocks."""
CONTRADICTIONS: Final = 3
SMALL: Final = 0.5
"""Up to this part of what it is taken for, an estimated cache is small, or its prompts are found in part."""
HINTS: Final[Mapping[str, str]] = {
    "tokenizer": "set tokenizer and chat_template of [[models]] to what the engine loads, and restart the gateway",
    "context": "leave max_context_tokens out of [[models]]: the engine says what it takes",
    "cache": "a cache salt that does not reach the engine, a LoRA adapter behind the same name, or windows in layers",
    "estimate": "the gateway predicts by what it has seen; with Plait's adapter, the engine reports its cache",
    "address": "on Kubernetes, a headless service; see docs/engines.md",
    "process": "remove one of the two from [[engines]], or from the name of [[services]]",
    "count": "the gateway's chat template or tokenizer is not the engine's: see tokenizer in [[models]]",
}

SEVERAL: Final = (
    "several engines answer at its address, as behind a load balancer: list each of them in [[engines]], or in "
    "[[services]] a name that DNS resolves to all of them"
)

log = structlog.get_logger(__name__)


class Comparisons:
    """Compares the router's `engines` with what the gateway assumes. `addresses` has those at each address."""

    def __init__(self, engines: Mapping[str, FleetEngine], addresses: Mapping[str, Sequence[FleetEngine]]) -> None:
        self._engines = engines
        self._addresses = addresses
        self.looked_at = set[str]()
        """The addresses that were asked over several connections."""

    def is_due(self, address: str) -> bool:
        """Whether the tokenizer of an address without reports has not been compared yet."""
        return not all(engine.compared for engine in self._addresses[address])

    def tokenizer(self, address: str, problem: str | None) -> None:
        """The tokenizer was compared. `problem` says how it differs; None: no difference was found."""
        for engine in self._addresses[address]:
            note(engine, "tokenizer", problem)
            engine.compared = True

    def contexts(self, address: str, said: Mapping[str, int | None], configured: Mapping[str, int]) -> None:
        """The address has listed the contexts of its models."""
        for engine in self._addresses[address]:
            note(engine, "context", context_mismatch(said, configured))

    def looked(self, address: str, *, several: bool | None) -> None:
        """The address was asked over several connections, and several engines answered; None: not known."""
        self.looked_at.add(address)
        for engine in self._addresses[address] if several is not None else ():
            note(engine, "address", SEVERAL if several else None)

    def estimates(self) -> None:
        """Compare each estimated cache with what answers have told. Called about once a second."""
        for engine in self._engines.values():
            if engine.health.takes_calls:
                note(engine, "estimate", estimate_problem(engine.cache))

    def anew(self) -> None:
        """The gateway has another tokenizer: no engine gets token ids before it has reported its own again."""
        for engine in self._engines.values():
            engine.cache.lost()
            engine.compared = False

    def forget(self, address: str) -> None:
        """The address does not answer, or is gone. It may come back as another process."""
        for engine in self._addresses.get(address, ()):
            engine.mismatches.clear()
            engine.contradictions = 0
            engine.compared = False


def note(engine: FleetEngine, kind: str, problem: str | OtherCount | None) -> None:
    """Record the difference of one `kind` (None: there is none). A change is logged."""
    known = engine.mismatches.get(kind)
    if problem is None:
        if engine.mismatches.pop(kind, None) is not None:
            log.info("engine agrees again", engine=engine.view.engine_id, about=kind)
        return
    engine.mismatches[kind] = problem
    if known is None:
        log.warning("engine differs", engine=engine.view.engine_id, about=kind, problem=str(problem), hint=HINTS[kind])


def context_mismatch(models: Mapping[str, int | None], configured: Mapping[str, int]) -> str | None:
    """The difference if an engine lists a shorter context than the configured one."""
    for model, most in models.items():
        wanted = configured.get(model)
        if most is not None and wanted is not None and wanted > most:
            return f"the engine takes {most} tokens of context for '{model}', and max_context_tokens says {wanted}"
    return None


def estimate_problem(cache: EngineCache) -> str | None:
    """How an estimated cache seems to differ from what it is taken for."""
    learned, size = cache.learned, cache.estimated_tokens or cache.assumed_tokens or 0
    if cache.reports or min(*learned.shares, learned.fraction) > SMALL:
        return None
    if learned.finds_nothing:
        return "the engine finds nothing in its cache of prompts that it has had before: caching seems to be off"
    if learned.fraction <= SMALL:
        return (
            f"the engine's cache seems to have {learned.fraction * size:.0f} tokens, and not {size}: other clients use "
            "it too, or the model has layers with windows or states"
        )
    return (
        "the engine finds only a part of the prompts that it has had before: other clients use its cache too, or the "
        "model has layers with windows or states, or the engine's tokenizer is another one"
    )


def note_answer(engine: FleetEngine, booking: Booking, usage: CallUsage, now_s: float) -> None:
    """The engine has counted the tokens of an answered call: compare the prompt's, and the cached ones."""
    call, differed = booking.call, "count" in engine.mismatches
    differs = call.prompt_tokens != usage.prompt_tokens
    if differs is not differed:
        note_count(engine, call, usage)
    elif differs and call.prompt_hash is not None:  # logged before; keep the latest numbers
        engine.mismatches["count"] = OtherCount(usage.prompt_tokens, call.prompt_tokens)
    if usage.cached_tokens is not None and engine.cache.reports and call.prompt_hash is not None:
        note_cached(engine, booking.placement.cached_tokens, usage.cached_tokens, booking.booked_s, now_s)


def note_cached(engine: FleetEngine, predicted_tokens: int, cached_tokens: int, booked_s: float, now_s: float) -> None:
    """Compare the cached tokens of a prompt, placed at `booked_s`, with what the engine's own reports predicted.

    One call may find nothing because of an eviction, or of a prefix that is not computed yet. If several in a row find
    nothing, or something where the reports have nothing, the reports name other blocks than the prompts.
    """
    if max(predicted_tokens, cached_tokens) < TELLING_TOKENS:
        return
    if min(predicted_tokens, cached_tokens) > 0:
        engine.contradictions = 0
        note(engine, "cache", None)
        return
    if booked_s < engine.contradicted_s:
        return  # the call was placed before the last contradiction came, and may have the same cause
    engine.contradictions += 1
    engine.contradicted_s = now_s
    if engine.contradictions >= CONTRADICTIONS:
        said = (
            f"the engine finds {cached_tokens} tokens of a prompt in its cache, and its reports say {predicted_tokens}"
        )
        note(engine, "cache", said)


def note_count(engine: FleetEngine, call: Call, usage: CallUsage) -> None:
    """Compare the prompt tokens in an answer's usage with the gateway's, if the gateway has counted exactly."""
    if call.prompt_hash is None:
        return
    if call.prompt_tokens == usage.prompt_tokens:
        note(engine, "count", None)
        return
    note(engine, "count", OtherCount(usage.prompt_tokens, call.prompt_tokens))
