"""Answered prompts: which tokens engines have stored behind a prompt that they answered, without reading the answer.

An engine's cache also has the answer's tokens. Their ids are not known to the gateway, but the next turn's prompt has
them: it begins with the whole prompt of the turn before, and the answer comes next.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from plait.policy.prefix.block_hash import whole_hash

MOST_PROMPTS = 16_384
"""The prompts that are remembered, some 6 MB. A turn that comes after so many others is not recognised."""


@dataclass(slots=True)
class _Answered:
    """A prompt. `before` is the hash of its whole blocks; None: it has none. `stored_tokens` are by engine."""

    before: int | None
    rest_tokens: int
    stored_tokens: dict[str, int] = field(default_factory=dict)


class AnsweredPrompts:
    """The latest prompts that engines have answered, `prompts`. Tree blocks have `block_tokens`."""

    def __init__(self, block_tokens: int, most_prompts: int = MOST_PROMPTS) -> None:
        self._block_tokens = block_tokens
        self._most_prompts = most_prompts
        self.prompts: OrderedDict[int, _Answered] = OrderedDict()
        self._rests: dict[int | None, Counter[int]] = {}
        """By the hash of the whole blocks: how many prompts have so many tokens behind them."""

    def add(self, engine_id: str, prompt_hash: int, before: int | None, prompt_tokens: int, output_tokens: int) -> None:
        """An engine has answered the prompt with this `whole_hash`. It does not compute the KV of the last token."""
        answered = self.prompts.get(prompt_hash)
        if answered is None:
            answered = self.prompts[prompt_hash] = _Answered(before, prompt_tokens % self._block_tokens)
            self._rests.setdefault(before, Counter())[answered.rest_tokens] += 1
            if len(self.prompts) > self._most_prompts:
                self._forget(next(iter(self.prompts)))
        self.prompts.move_to_end(prompt_hash)
        answered.stored_tokens[engine_id] = prompt_tokens + max(0, output_tokens - 1)

    def continued(
        self, tokens: Sequence[int], hashes: Sequence[int], root: int, turn_ends: AbstractSet[int] | None
    ) -> tuple[int, Mapping[str, int]]:
        """The whole blocks of the prompt that this one continues, and how many tokens its engines have stored.

        `hashes` are those of its whole blocks, behind `root`. With `turn_ends`, one of these tokens has to end the
        answer where it ended. Else the prompt has another text in its place, such as an answer without its reasoning.
        """
        for blocks in range(len(hashes), -1, -1):
            before = hashes[blocks - 1] if blocks else None
            start = blocks * self._block_tokens
            for rest_tokens in sorted(self._rests.get(before, ()), reverse=True):
                rest = tokens[start : start + rest_tokens]
                answered = self.prompts.get(whole_hash(rest, root if before is None else before))
                if answered is not None and start + rest_tokens < len(tokens):
                    stored = answered.stored_tokens.items()
                    return blocks, {
                        engine_id: min(end, len(tokens))
                        for engine_id, end in stored
                        if turn_ends is None or not turn_ends.isdisjoint(tokens[end : end + 2])
                    }
        return 0, {}

    def forget(self, engine_id: str) -> None:
        """Nothing is known of an engine's cache any more."""
        for prompt_hash, answered in list(self.prompts.items()):
            answered.stored_tokens.pop(engine_id, None)
            if not answered.stored_tokens:
                self._forget(prompt_hash)

    def _forget(self, prompt_hash: int) -> None:
        answered = self.prompts.pop(prompt_hash)
        rests = self._rests[answered.before]
        rests[answered.rest_tokens] -= 1
        if not rests[answered.rest_tokens]:
            del rests[answered.rest_tokens]
            if not rests:
                del self._rests[answered.before]
