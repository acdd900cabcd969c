"""Whether an engine's tokenizer is the gateway's: only then do the gateway's token ids mean the same text to it.

With another tokenizer, an engine would read another text out of the ids, and answer as if nothing were wrong. Its cache
would hold what it read, under the names that the gateway expects. So nothing else would show it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import structlog

from plait.backends.protocol.tokenizer_fingerprint import TokenizerFingerprint
from plait.gateway.fleet.offer import Offer

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
    """What an engine may be sent as token ids: plain `prompts`, rendered `chats`.

    `problem` says why not everything; None where the tokenizers agree in full. `hint` says what to do about it.
    `configured` are the gateway's tokenizers, `reported` is the engine's.
    """

    prompts: bool = True
    chats: bool = True
    problem: str | None = None
    hint: str | None = None
    configured: tuple[str, ...] = ()
    reported: str | None = None

    def tell(self, engine_id: str, known_problem: str | None) -> None:
        """Log what is wrong with an engine's tokenizer, or that it is right again; `known_problem` was told before."""
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
"""Until the engine has reported, and from the time when it cannot be reached: it may come back with another one."""

NOT_REPORTED: Final = Agreement(
    prompts=False,
    chats=False,
    problem=f"the engine does not report which tokenizer it has: {INSTEAD}",
    hint="install the gateway's version of Plait in the engine's environment; if it is there, see the engine's log",
)

Configured = Callable[[str], TokenizerFingerprint | None]
"""The gateway's tokenizer for a model; None if the gateway only counts bytes."""


class TokenizerAgreements:
    """Compares the tokenizers that engines report with those that the gateway has for their models."""

    def __init__(self, configured: Configured) -> None:
        self._configured = configured
        self._latest: dict[str, tuple[Offer, TokenizerFingerprint | None, Agreement]] = {}

    def of(self, engine_id: str, offer: Offer, reported: TokenizerFingerprint | None) -> Agreement:
        """The agreement on all models that an engine offers. Most reports are as the one before."""
        latest = self._latest.get(engine_id)
        if latest is None or latest[0] is not offer or latest[1] != reported:
            latest = self._latest[engine_id] = (offer, reported, self._compared(offer, reported))
        return latest[2]

    def forget(self, engine_id: str) -> None:
        """The engine has gone."""
        self._latest.pop(engine_id, None)

    def _compared(self, offer: Offer, reported: TokenizerFingerprint | None) -> Agreement:
        configured = {model: found for model in _base_models(offer) if (found := self._configured(model)) is not None}
        if not configured:
            return AGREED  # there are no ids
        if reported is None:
            return NOT_REPORTED
        ours = configured.values()
        differing = tuple(part for part in PARTS if any(getattr(one, part) != getattr(reported, part) for one in ours))
        if not differing or reported.is_none:
            return AGREED
        parts = ", ".join(PARTS[part] for part in differing)
        return Agreement(
            prompts=differing == ("chats",),
            chats=differing == ("prompt_ids",),
            problem=f"the engine's tokenizer is not the gateway's, they differ in {parts}: {INSTEAD}",
            hint="set tokenizer and chat_template of [[models]] to what the engine loads, and restart the gateway",
            configured=tuple(sorted(f"{model}: {one.name}" for model, one in configured.items())),
            reported=reported.name,
        )


def _base_models(offer: Offer) -> set[str]:
    """The models that an engine offers. LoRA adapters have the tokenizer of their base model."""
    return {offer.adapters.get(model, model) for model in offer.models}
