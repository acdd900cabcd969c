"""A session and its contexts: what their latest calls have, or have left, in the engines' KV caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from plait.policy.types import Call

EXTENDED_SHARE: Final = 0.9
"""98.8 % of the turns of coding agents extend so much of the latest prompt. So do questions about a document."""

MOST_CONTEXTS: Final = 16
"""So many contexts of a session are known. With one more, the one that has been idle longest is forgotten."""


@dataclass(slots=True, eq=False)
class Context:
    """A conversation, or an agent's or a subagent's, as its latest prompt has left it.

    `tokens` is the prompt with its answer. The prompt has these whole tree blocks (none are kept while the session is
    not live). The hash of the one that the next prompt is known by is `mark`, in the place `marked`; that of the last
    one is `last`, in the place before `blocks`. So many `calls` of it have come and not ended. `ended_s` is None until
    one has. A context that `is_shared` is none of a session: it is a document that many ask about, for example.
    """

    session: Session
    tokens: int = 0
    hashes: Sequence[int] = ()
    marked: int = -1
    mark: int | None = None
    blocks: int = 0
    last: int | None = None
    calls: int = 0
    ended_s: float | None = None
    is_shared: bool = False

    def is_extended_by(self, hashes: Sequence[int]) -> bool:
        """Whether a prompt of these blocks extends the latest one."""
        return self.mark is not None and self.marked < len(hashes) and hashes[self.marked] == self.mark

    def is_continued_by(self, hashes: Sequence[int]) -> bool:
        """Whether a prompt of these blocks goes on where the latest one ended: it has all its whole blocks."""
        return self.blocks < len(hashes) and hashes[self.blocks - 1] == self.last


@dataclass(slots=True, eq=False)
class Session:
    """What is known of one session. It was `born_s` when its first call came. `calls` are on their way or in an engine.

    A live one may have its contexts in the engines' caches. `prefill_s` is what computing all of them takes. So many
    turns are `held`. The client has tried since `tried_s` to send one that has not passed (None: there is none).
    """

    tenant: str
    name: str
    born_s: float
    contexts: list[Context] = field(default_factory=list)
    is_live: bool = False
    calls: int = 0
    held: int = 0
    ended_s: float = 0.0
    tried_s: float | None = None
    prefill_s: float = 0.0

    @property
    def tokens(self) -> int:
        """What its contexts have. Blocks that several have in common count for each."""
        return sum(context.tokens for context in self.contexts)


def marked_block(call: Call) -> int:
    """The place of the block of a prompt that the next one is known by; negative if the prompt is too short."""
    return min(len(call.block_hashes), round(EXTENDED_SHARE * call.prompt_tokens) // call.block_tokens) - 1
