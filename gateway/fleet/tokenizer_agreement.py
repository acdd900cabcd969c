"""Whether an engine has the gateway's tokenizer, so that token ids mean the same text to both.

An engine with another tokenizer would decode another text from the ids, and answer without an error. Its cache would
have the KV of that text under the names that the gateway expects. So no other check would find the difference.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Final

import structlog

from plait.backends.protocol.chat_rendering import ChatRendering
from plait.backends.protocol.tokenizer_fingerprint import TokenizerFingerprint
from plait.gateway.fleet.health import Offer

log = structlog.get_logger(__name__)

PARTS: Final = {
    "vocabulary": "the vocabulary",
    "ids": "the ids of a text",
    "prompt_ids": "what is put around a prompt",
    "chats": "the chat template",
}
"""What may differ: the fields of a fingerprint, in words."""

INSTEAD: Final = "it gets texts instead of token ids, and its cache is estimated"


@dataclass(frozen=True, slots=True)
class Agreement:
    """What an engine may be sent as token ids instead of text."""

    prompts: bool = True
    """Plain prompts."""
    chats: bool = True
    """Rendered chats."""
    prepares: bool = False
    """It is known how an SGLang engine prepares messages and tools for the template. If not, only chats of roles and
    texts are sent as ids.
    """
    drops_tools: bool = False
    """The engine leaves tools out for `tool_choice: none`."""
    problem: str | None = None
    """Why not everything is sent as ids; None: the tokenizers agree in full."""
    hint: str | None = None
    """What the operator can do."""
    configured: tuple[str, ...] = ()
    """The gateway's tokenizers."""
    reported: str | None = None
    """The engine's tokenizer."""

    def tell(self, engine_id: str, known_problem: str | None) -> None:
        """Log a change of the problem; `known_problem` was logged before."""
        if self.problem == known_problem:
            return
        if self.problem is None:
            log.info("token ids sent again", engine=engine_id)
            return
        log.warning(
            "token ids not sent",
            engine=engine_id,
            problem=self.problem,
            configured=", ".join(self.configured) or None,
            reported=self.reported,
            hint=self.hint,
        )


AGREED: Final = Agreement()
UNKNOWN: Final = Agreement(prompts=False, chats=False)
"""Before the first report, and while the engine cannot be reached: it may come back with another tokenizer."""

NOT_REPORTED: Final = Agreement(
    prompts=False,
    chats=False,
    problem=f"the engine does not report which tokenizer it has: {INSTEAD}",
    hint="install the gateway's version of Plait in the engine's environment; if it is there, see the engine's log",
)

Configured = Callable[[str], TokenizerFingerprint | None]
"""Returns the gateway's tokenizer for a model; None if the gateway only counts bytes."""


_Compared = tuple[Mapping[str, TokenizerFingerprint | None], TokenizerFingerprint | None, ChatRendering | None]
"""(the gateway's tokenizers by model, the engine's tokenizer, how the engine renders chats)."""


class TokenizerAgreements:
    """Compares the tokenizers that engines report with the gateway's for their models.

    `requested` returns the digest of clients' chats by the gateway's tokenizer for a model.
    """

    def __init__(self, configured: Configured, requested: Callable[[str], str] = lambda _model: "") -> None:
        self._configured = configured
        self._requested = requested
        self._latest: dict[str, tuple[_Compared, Agreement]] = {}

    def of(
        self,
        engine_id: str,
        offer: Offer,
        reported: TokenizerFingerprint | None,
        chats: ChatRendering | None = None,
    ) -> Agreement:
        """The agreement on all models that an engine offers; cached, because most reports repeat the one before."""
        ours = {model: self._configured(model) for model in _base_models(offer)}
        compared, latest = (ours, reported, chats), self._latest.get(engine_id)
        if latest is None or latest[0] != compared:
            agreement = _agreement(ours, reported)
            if chats is not None and agreement.problem is None:
                prepares = bool(chats.requested) and all(self._requested(model) == chats.requested for model in ours)
                agreement = replace(agreement, prepares=prepares, drops_tools=chats.drops_tools)
            latest = self._latest[engine_id] = (compared, agreement)
        return latest[1]

    def forget(self, engine_id: str) -> None:
        """The engine has gone."""
        self._latest.pop(engine_id, None)


def _agreement(all_ours: Mapping[str, TokenizerFingerprint | None], reported: TokenizerFingerprint | None) -> Agreement:
    configured = {model: one for model, one in all_ours.items() if one is not None}
    if not configured:
        return AGREED  # the gateway counts bytes and sends no ids
    if reported is None:
        return NOT_REPORTED
    ours = configured.values()
    differing = tuple(part for part in PARTS if any(getattr(one, part) != getattr(reported, part) for one in ours))
    if not differing or reported.is_none:
        return AGREED
    parts = ", ".join(_both(part, ours, reported) for part in differing)
    names = ", ".join(sorted({one.name for one in ours}))
    return Agreement(
        prompts=differing == ("chats",),
        chats=differing == ("prompt_ids",),
        problem=(
            f"the engine's tokenizer ({reported.name}) is not the gateway's ({names}), "
            f"they differ in {parts}: {INSTEAD}"
        ),
        hint="set tokenizer and chat_template of [[models]] to what the engine loads, and restart the gateway",
        configured=tuple(sorted(f"{model}: {one.name}" for model, one in configured.items())),
        reported=reported.name,
    )


def _both(part: str, ours: Collection[TokenizerFingerprint], reported: TokenizerFingerprint) -> str:
    """The differing part in words, with the beginnings of both digests."""
    own = next(getattr(one, part) for one in ours if getattr(one, part) != getattr(reported, part))
    return f"{PARTS[part]} ({own[:8]} here, {getattr(reported, part)[:8]} there)"


def _base_models(offer: Offer) -> set[str]:
    """The models that an engine offers, where a LoRA adapter counts as its base model, whose tokenizer it has."""
    return {offer.adapters.get(model, model) for model in offer.models}
