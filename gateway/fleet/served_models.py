"""The models that the fleet serves, and the engines that serve each."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from plait.backends.errors import ModelNotFoundError, NoEngineError
from plait.gateway.fleet.engine import FleetEngine
from plait.gateway.fleet.health import TAKES_CALLS, HealthState
from plait.policy.placement.engine_view import EngineView

KEPT_SHARE = 0.5
"""The part of a model's engines that ejections leave. Engines that are down or draining count as lost."""

_BETTER_THAN_NONE = frozenset((HealthState.EJECTED, HealthState.PROBATION))


class ServedModels:
    """The models of the fleet's `engines`. `refresh` has to be called after each change of the fleet.

    `expected` are the configured models. If no engine serves one of them, a call for it fails with `NoEngineError`: the
    fleet is at fault, not the caller.
    """

    def __init__(self, engines: Mapping[str, FleetEngine], expected: Collection[str]) -> None:
        self._engines = engines
        self._expected = frozenset(expected)
        self._eligible: dict[str, list[EngineView]] = {}
        self._contexts: dict[str, int | None] = {}

    @property
    def names(self) -> set[str]:
        """Every model that an engine of the fleet is known to serve. The engine may be down."""
        return {model for engine in self._engines.values() for model in engine.models}

    def refresh(self) -> None:
        """Update the lists: an engine's health changed, or its models."""
        names = self.names
        self._eligible = {model: [engine.view for engine in self._able(model)] for model in names}
        self._contexts = {model: self._longest_context(model) for model in names}

    def eligible(self, model: str) -> list[EngineView]:
        """The engines that take calls for `model`, at least one. Raises the errors of `check`.

        If every other engine is out, ejected ones and those on probation count: a sick engine is better than none.
        """
        self.check(model)
        return self._eligible[model]

    def able(self, model: str) -> list[EngineView]:
        """As `eligible`, but empty if there is none."""
        return self._eligible.get(model, [])

    def eligible_ids(self) -> dict[str, list[str]]:
        """For each model, the engines that take calls for it."""
        return {model: [view.engine_id for view in views] for model, views in self._eligible.items()}

    def peers(self) -> list[list[EngineView]]:
        """The engines that take calls, in groups that serve the same models."""
        groups: dict[frozenset[str], list[EngineView]] = {}
        for engine in self._engines.values():
            if engine.takes_calls:
                groups.setdefault(frozenset(engine.models), []).append(engine.view)
        return list(groups.values())

    def serving(self, model: str) -> int:
        """How many engines take calls for `model`."""
        return len(self._eligible.get(model, ()))

    def context_tokens(self, model: str) -> int | None:
        """The longest context that an engine offers for `model`; None if an engine's context is not known."""
        return self._contexts.get(model)

    def check(self, model: str) -> None:
        """Raise `ModelNotFoundError` or `NoEngineError` unless some engine takes calls for `model`."""
        if self._eligible.get(model):
            return
        if model in self.names | self._expected:
            raise NoEngineError(f"No engine that serves model '{model}' is up; try again shortly.", retry_after_s=1.0)
        known = ", ".join(sorted(self.names)) or "none so far"
        raise ModelNotFoundError(f"The model '{model}' does not exist. Models served here: {known}.", param="model")

    def may_eject(self, engine: FleetEngine) -> bool:
        """Whether each model that the engine serves keeps at least `KEPT_SHARE` of its engines without it."""
        for model in engine.models:
            serving = [other for other in self._engines.values() if model in other.models]
            takers = [other for other in serving if other.health.state in TAKES_CALLS and not other.draining]
            kept = sum(other is not engine for other in takers)
            if kept < KEPT_SHARE * len(serving):
                return False
        return True

    def _able(self, model: str) -> list[FleetEngine]:
        serving = [engine for engine in self._engines.values() if model in engine.models]
        able = [engine for engine in serving if engine.takes_calls]
        return able or [e for e in serving if e.health.state in _BETTER_THAN_NONE and not e.draining]

    def _longest_context(self, model: str) -> int | None:
        offers = [engine.models[model] for engine in self._engines.values() if model in engine.models]
        known = [offer for offer in offers if offer is not None]
        return max(known) if known and len(known) == len(offers) else None
