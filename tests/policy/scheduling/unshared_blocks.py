"""The part of an engine's facts that is about shared blocks, for engines whose calls share none."""

from __future__ import annotations

from plait.policy.scheduling.plan import LocalCall


class UnsharedBlocks:
    """No block of a call is another's."""

    loading = ()
    shares_in_iteration = True

    def stored_tokens(self, call: LocalCall) -> int:
        return call.computed_tokens

    def block_key(self, call: LocalCall, tokens: int) -> None:
        del call, tokens

    def shared_tokens(self, call: LocalCall, other: LocalCall) -> int:
        del call, other
        return 0
