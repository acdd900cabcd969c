"""Holds the sessions' calls of each model, so that the contexts of those that are live fit into the engines' caches.

Drives the `SessionGate` of each model over the router's engines. See docs/design/sessions.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from math import inf
from typing import Final

import structlog

from plait.gateway.admission.backlog import Waiting
from plait.gateway.fleet.router import Router
from plait.gateway.timer import At
from plait.policy.sessions.session_gate import CHAT_TOKENS, Arrival, SessionGate, Turn
from plait.policy.sessions.worth import Caches

LOOK_S: Final = 0.25
"""While sessions are held, room may come as time passes: so often it is looked for."""

log = structlog.get_logger(__name__)


def _all(_model: str) -> float:
    """The part of a gateway that is alone."""
    return 1.0


class SessionGates:
    """The session gates, by base model. `on_free` is called with each call that was held, when it is to be placed.

    `weight` returns a tenant's weight. Prompts of fewer than `chat_tokens` that extend no other are chat (infinite:
    nothing is held). `at` schedules what comes later. `caches` finds what the engines of a model have, and `part` says
    how much of it is this gateway's: several share it.
    """

    def __init__(
        self,
        router: Router,
        at: At,
        weight: Callable[[str], float],
        on_free: Callable[[Waiting, float], None],
        chat_tokens: float = CHAT_TOKENS,
        *,
        part: Callable[[str], float] = _all,
    ) -> None:
        self.gates: dict[str, SessionGate] = {}
        self.part = part
        self.caches: Callable[[Router, str], Caches | None] = self._caches
        self._router = router
        self._at = at
        self._weight = weight
        self._on_free = on_free
        self._chat_tokens = chat_tokens
        self._held: dict[Turn, Waiting] = {}
        self._closed: set[SessionGate] = set()  # as was logged
        self._is_looking = False

    def _caches(self, router: Router, model: str) -> Caches | None:
        return caches(router, model, self.part(model))

    def arrive(self, call: Waiting, now_s: float) -> bool:
        """A call has come. Returns whether it passes; if not, it is held until `on_free` is called with it."""
        if self._chat_tokens == inf:
            return True
        model = self._router.models.bases.get(call.call.model, call.call.model)
        gate = self.gates.get(model) or self._new_gate(model)
        if gate is None:
            return True
        arrival = Arrival(call.call, call.output_tokens, call.tenant, call.session, call.passes)
        turn = call.turn = gate.arrive(arrival, now_s)
        if turn.is_held:
            self._held[turn] = call
        if gate.held.turns:
            freed = self._released(gate, now_s)
            if turn in freed:
                freed.remove(turn)
                del self._held[turn]
            self._free(freed, now_s)
            self._look_soon(now_s)
        if gate.worth.is_closed is not (gate in self._closed):
            self._tell(gate)
        return not turn.is_held

    def left(self, call: Waiting, used_tokens: int | None, now_s: float) -> None:
        """A call that was sent has ended."""
        turn, call.turn = call.turn, None
        if turn is not None:
            gate = turn.gate
            output_tokens = None if used_tokens is None else max(0, used_tokens - call.call.prompt_tokens)
            gate.ended(turn, output_tokens, now_s)
            if gate.held.turns or now_s >= gate.worth.due_s:
                self._free(self._released(gate, now_s), now_s)

    def gone(self, call: Waiting, now_s: float) -> None:
        """A call is not to be answered, held or not."""
        turn, call.turn = call.turn, None
        if turn is not None:
            gate = turn.gate
            self._held.pop(turn, None)
            gate.gone(turn, now_s)
            if gate.held.turns or now_s >= gate.worth.due_s:
                self._free(self._released(gate, now_s), now_s)

    # What is held.

    def waiting(self, call: Waiting) -> int:
        """How many calls of the same tenant and model are held."""
        return 0 if call.turn is None else len(call.turn.gate.held.of(call.tenant))

    def has_begun(self, call: Waiting) -> bool:
        """Whether a held call goes on with a context: the session would be lost without it."""
        return call.turn is not None and call.turn.context is not None and call.turn.context.ended_s is not None

    def outlook(self, call: Waiting) -> tuple[int, float]:
        """A held call's place among those of its tenant, and the seconds until it goes, as predicted."""
        assert call.turn is not None
        return call.turn.gate.held.outlook(call.turn)

    def check(self, entered: Iterable[Waiting]) -> None:
        """Assert the invariants, with all calls that have entered and not left; for tests."""
        held = {call.turn: call for call in entered if call.turn is not None and call.turn.is_held}
        assert held == self._held
        for gate in self.gates.values():
            gate.check()

    # The gates.

    def _new_gate(self, model: str) -> SessionGate | None:
        """The gate for a base model that has none so far; None if no engine serves it."""
        if not self._router.models.able(model):
            return None
        look = partial(self.caches, self._router, model)
        gate = self.gates[model] = SessionGate(self._router.block_tokens, look, self._weight, self._chat_tokens)
        return gate

    def _released(self, gate: SessionGate, now_s: float) -> list[Turn]:
        released = gate.release(now_s)
        if gate.worth.is_closed is not (gate in self._closed):
            self._tell(gate)
        return released

    def _tell(self, gate: SessionGate) -> None:
        """Log that the gate has closed or opened, and why."""
        worth = gate.worth
        (self._closed.add if worth.is_closed else self._closed.remove)(gate)
        log.info(
            "sessions are held" if worth.is_closed else "sessions are held no more",
            model=next(model for model, one in self.gates.items() if one is gate),
            value=round(worth.value, 2), load=round(worth.load, 2), live=len(gate.live),
            live_tokens=gate.tokens, kv_tokens=0 if worth.caches is None else worth.caches.kv_tokens,
        )  # fmt: skip

    def _free(self, turns: Iterable[Turn], now_s: float) -> None:
        for turn in turns:
            self._on_free(self._held.pop(turn), now_s)

    def _look_soon(self, now_s: float) -> None:
        if not self._is_looking:
            self._is_looking = True
            self._at(now_s + LOOK_S, self._look)

    def _look(self, now_s: float) -> None:
        self._is_looking = False
        for gate in self.gates.values():
            self._free(self._released(gate, now_s), now_s)
        if self._held:
            self._look_soon(now_s)


def caches(router: Router, model: str, part: float = 1.0) -> Caches | None:
    """A part of the engines that take calls for a model, and of their KV.

    None if one of the engines does not say how much it has.
    """
    views = router.models.able(model)
    sizes = [router.engines[view.engine_id].cache.estimated_tokens for view in views]
    if not views or not all(sizes):
        return None
    slowness = sum(view.slowness for view in views) / len(views)
    return Caches(part * len(views), int(part * sum(filter(None, sizes))), views[0].cost_model, slowness)
