"""Gates over engines of known size, and calls for them."""

from __future__ import annotations

from math import inf
from typing import NamedTuple
from zlib import crc32

from plait.policy.costs.cost_model import CostModel, LongAttention, PiecewiseLinear
from plait.policy.sessions.session_gate import SessionGate, Turn
from plait.policy.sessions.worth import Caches
from plait.policy.types import Call, Slo
from tests.invariants import check

BLOCK_TOKENS = 10
COSTS = CostModel(PiecewiseLinear(((0, 0.010),), 0.001), 0.0, 0.0, 0.0, LongAttention())
"""An iteration takes 10 ms, and a millisecond more for each token."""


class Arrival(NamedTuple):
    """A call that comes to a gate."""

    call: Call
    output_tokens: int
    tenant: str
    session: str
    passes: bool
    is_final: bool = False


def prompt_of(text: str) -> list[int]:
    """The chained hashes of a prompt with a block for each letter."""
    return [crc32(text[: end + 1].encode()) for end in range(len(text))]


def arrival(
    text: str,
    session: str = "",
    *,
    tenant: str = "",
    output_tokens: int = 0,
    passes: bool = False,
    slo: Slo | None = None,
) -> Arrival:
    """A call whose prompt has a block for each letter of `text`."""
    hashes = prompt_of(text)
    call = Call("call", "m", BLOCK_TOKENS * len(hashes), BLOCK_TOKENS, hashes, slo=slo)
    return Arrival(call, output_tokens, tenant, session, passes)


class Gate(SessionGate):
    """A gate whose engines have `kv_tokens` in all. It `is_closed` as said, whatever it is worth."""

    def __init__(
        self, kv_tokens: int = 100, *, is_closed: bool = True, weights: dict[str, float] | None = None
    ) -> None:
        given = weights or {}
        super().__init__(BLOCK_TOKENS, lambda: None, lambda tenant: given.get(tenant, 1.0), chat_tokens=30)
        self.worth.caches = Caches(2, kv_tokens, COSTS)
        self.worth.is_closed = is_closed
        self.worth.due_s = inf  # it is never judged
        self.turns: list[Turn] = []

    def come(self, text: str, session: str = "", now_s: float = 0.0, *, tenant: str = "", passes: bool = False) -> Turn:
        """A call has come, and was sent if it passes."""
        turn = self.arrive(arrival(text, session, tenant=tenant, passes=passes), now_s)
        self.turns.append(turn)
        if not turn.is_held:
            self.sent(turn)
        check(self)
        return turn

    def end(self, turn: Turn, now_s: float, output_tokens: int = 0) -> list[Turn]:
        """A turn was answered; returns those that pass."""
        self.ended(turn, output_tokens, now_s)
        self.turns.remove(turn)
        return self.free(now_s)

    def free(self, now_s: float) -> list[Turn]:
        """The turns that pass now."""
        turns = self.release(now_s)
        for turn in turns:
            self.sent(turn)
        check(self)
        return turns
