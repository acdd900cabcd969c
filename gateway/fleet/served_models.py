"""The models that the fleet serves, the names under which clients may call them, and the engines that take each.

In: the offers and health of the engines, read at each `refresh`. Out: lists by model, which every call reads.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from plait.backends.errors import CallerError, ModelNotFoundError, NoEngineError, NotFoundError
from plait.backends.protocol.dialects import DIALECTS
from plait.backends.protocol.openai import ANY_MODEL
from plait.backends.tokenization.rendered_fields import AS_VLLM, Renderers
from plait.gateway.fleet.comparisons import note
from plait.gateway.fleet.engine import FleetEngine
from plait.gateway.fleet.health import NOT_THERE, TAKES_CALLS, HealthState
from plait.policy.costs.engine_view import EngineView
from plait.policy.types import ESTIMATE_MARGIN, Call

KEPT_SHARE = 0.5
"""The least part of a model's addresses that ejections leave. Those that are down or drain count as gone."""

_BETTER_THAN_NONE = frozenset((HealthState.EJECTED, HealthState.PROBATION))

UNNAMED = frozenset(("", ANY_MODEL))
"""Names that stand for the fleet's only model."""


@dataclass(frozen=True, slots=True)
class ModelNames:
    """The operator's names of models.

    `expected` models belong to the fleet even if no engine serves them. `aliases` maps a further name to a model.
    `fallbacks` are the models that answer instead, in this order, while no engine takes calls for a model.
    """

    expected: Collection[str] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    fallbacks: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def meant(self, name: str, base_models: Collection[str]) -> str:
        """The model that a name stands for; an unknown name stands for itself."""
        if name in self.aliases:
            return self.aliases[name]
        if name in UNNAMED and name not in base_models and len(base_models) == 1:
            (only,) = base_models
            return only
        return name

    def unknown(self, name: str, models: Collection[str]) -> CallerError:
        """The error for a name that stands for no model."""
        known = ", ".join(sorted({*models, *self.aliases})) or "none so far"
        if not name:
            return CallerError(f"Say which model, in 'model'. Several are served here: {known}.", param="model")
        return ModelNotFoundError(f"The model '{name}' does not exist. Models served here: {known}.", param="model")


class ServedModels:
    """The models of the fleet's `engines`. Each change of the fleet calls `refresh`, which calls `on_change`.

    By model: `takers` are the engines that take calls, `bases` the base model of a LoRA adapter, `renderers` how the
    engines render chats, and `contexts` the longest context in tokens (None: some engine's is not known). `uneven` has
    the models with takers whose engines offer different contexts, with each engine's own (infinite: not known).

    Sets of models: `truncated`, of which some engine cuts longer prompts silently; `filled`, of which some engine
    generates until its context is full; `direct`, whose names need no look-up in `check`.

    A call for an expected model without an engine fails with `NoEngineError`: the fleet is at fault, not the caller.
    """

    def __init__(self, engines: Mapping[str, FleetEngine], names: ModelNames) -> None:
        self._engines = engines
        self.given = names
        self.on_change: Callable[[], None] = lambda: None
        self.bases: Mapping[str, str] = {}
        self.takers: dict[str, list[EngineView]] = {}
        self.direct: Collection[str] = ()
        self.contexts: Mapping[str, int | None] = {}
        self.uneven: Mapping[str, Mapping[str, float]] = {}
        self.renderers: Mapping[str, Renderers] = {}
        self.truncated: Collection[str] = ()
        self.filled: Collection[str] = ()
        self._taker_ids: Mapping[str, Collection[str]] = {}

    @property
    def names(self) -> set[str]:
        """Every model that an engine of the fleet is known to serve. The engine may be down."""
        return {model for engine in self._engines.values() for model in engine.offer.models}

    def refresh(self) -> None:
        """Make the lists again: an engine's health or models have changed."""
        _find_same(self._engines.values())
        names = self.names
        offers = [engine.offer for engine in self._engines.values()]
        self.bases = {adapter: base for offer in offers for adapter, base in offer.adapters.items()}
        self.takers = {model: [engine.view for engine in _able(self._serving(model))] for model in names}
        self._taker_ids = {model: {view.engine_id for view in views} for model, views in self.takers.items()}
        self.direct = {model for model in names if self.takers[model] and model not in self.given.aliases}
        offered = {model: self._offered_contexts(model) for model in names}
        self.contexts = {model: _longest(contexts.values()) for model, contexts in offered.items()}
        differing = {model: contexts for model, contexts in offered.items() if len({*contexts.values()}) > 1}
        self.uneven = {model: contexts for model, contexts in differing.items() if self.takers[model]}
        self.renderers = {model: _renderers(self._serving(model)) for model in names}
        self.truncated = {model for model in names if any(map(_truncates, self._serving(model)))}
        self.filled = {model for model in names if any(map(_fills_context, self._serving(model)))}
        self.on_change()

    def base(self, model: str) -> str:
        """The base model of a LoRA adapter; otherwise the model itself."""
        return self.bases.get(model, model)

    def target(self, name: str) -> str:
        """The model that answers calls for `name`: an alias's, the only one, a fallback, or the name itself."""
        if name in self.direct:
            return name
        model = self.given.meant(name, self.names.union(self.given.expected).difference(self.bases))
        if self.takers.get(model):
            return model
        return next((other for other in self.given.fallbacks.get(model, ()) if self.takers.get(other)), model)

    def shown(self, name: str) -> str:
        """The model that a name stands for, for metrics and the log; empty for an unknown one."""
        model = self.target(name)
        return model if model in self.names or model in self.given.expected else ""

    def check(self, name: str) -> str:
        """The model that answers calls for `name`, for which some engine takes calls now.

        Raises `CallerError` or `NoEngineError`.
        """
        if name in self.direct:
            return name
        model = self.target(name)
        if not self.takers.get(model):
            if model not in self.names.union(self.given.expected) and (self.names or name not in UNNAMED):
                _check_all_answered(self._engines.values(), name)
                raise self.given.unknown(name, self.names)
            raise NoEngineError(f"No engine that serves model '{model}' is up; try again shortly.", retry_after_s=1.0)
        return model

    def eligible(self, model: str, route: str | None = None) -> list[EngineView]:
        """The engines that take calls for `model` on `route` (None: one that every engine has), at least one.

        Without a healthy one, these are the stalled and doubted engines, and without those the ejected ones and those
        on probation: a sick engine is better than none. Raises the errors of `check`, and `NotFoundError` if these
        engines do not have the route.
        """
        views = self.takers.get(model)
        if not views:
            views = self.takers[self.check(model)]
        having = self._having(views, route)
        if not having:
            raise NotFoundError(f"No engine that serves model '{model}' has {route}.", code="no_such_route")
        return having

    def fitting(
        self, call: Call, takers: Sequence[EngineView], route: str | None = None, unable: Collection[str] = ()
    ) -> Sequence[EngineView]:
        """The engines among `takers` whose contexts have room for a call.

        If none has, and the prompt is counted exactly, these are stalled or sick engines that have room. Without such
        engines, these are the takers with the longest contexts that refuse too long prompts themselves. Raises
        `NoEngineError` if all takers would cut the prompt silently.
        """
        contexts = self.uneven[call.model]
        fitting = [view for view in takers if contexts[view.engine_id] >= self._needed_tokens(call, view.engine_id)]
        if not fitting and call.prompt_hash is not None:
            serving = [engine for engine in self._serving(call.model) if engine.view.engine_id not in unable]
            names = [(engine, engine.view.engine_id) for engine in serving]
            with_room = [engine for engine, name in names if contexts[name] >= self._needed_tokens(call, name)]
            fitting = self._having([engine.view for engine in _able(with_room)], route)
        if not fitting and takers:
            whole = [view for view in takers if not self._cuts(call, view.engine_id, contexts[view.engine_id])]
            if not whole:
                raise NoEngineError(f"No engine that serves model '{call.model}' and has room for the prompt is up.")
            longest = max(contexts[view.engine_id] for view in whole)
            fitting = [view for view in whole if contexts[view.engine_id] == longest]
        return fitting

    def _needed_tokens(self, call: Call, engine_id: str) -> int:
        """The context that a call needs: the prompt plus the output limit, or one token if the engine fills its own."""
        return call.prompt_tokens + (1 if _fills_context(self._engines[engine_id]) else call.output_limit or 1)

    def _cuts(self, call: Call, engine_id: str, context_tokens: float) -> bool:
        """Whether an engine would cut the prompt silently. An estimated prompt gets a margin."""
        margin = 1.0 if call.prompt_hash is not None else ESTIMATE_MARGIN
        return _truncates(self._engines[engine_id]) and call.prompt_tokens > margin * context_tokens

    def takes(self, call: Call, engine_id: str, route: str | None = None) -> bool:
        """Whether a call may be placed on an engine."""
        if route is not None and self._engines[engine_id].offer.has(route) is False:
            return False
        if call.model not in self.uneven:
            return engine_id in self._taker_ids.get(call.model, ())
        takers = self._having(self.takers[call.model], route)
        return any(view.engine_id == engine_id for view in self.fitting(call, takers, route))

    def too_short(self, call: Call, engine_id: str) -> frozenset[str]:
        """The engines without room for a call that this one refused as too long: all without a longer context.

        The call may be longer than the gateway counts. An engine whose context is not known may have room.
        """
        contexts = self._offered_contexts(call.model)
        own = contexts.get(engine_id, inf)
        more = 0 if own == inf else own + 1
        return frozenset(
            other for other, tokens in contexts.items() if tokens < max(self._needed_tokens(call, other), more)
        )

    def others(self, model: str, unable: Collection[str], route: str | None = None) -> list[EngineView]:
        """As `eligible`, without the engines in `unable`; may be empty."""
        serving = [engine for engine in self._serving(model) if engine.view.engine_id not in unable]
        return self._having([engine.view for engine in _able(serving)], route)

    def all_have(self, model: str, route: str) -> bool:
        """Whether each engine that takes calls for `model` is known to have `route`, on the rank that a call names."""
        engines = [self._engines[view.engine_id] for view in self.takers.get(model, ())]
        return all(engine.offer.has(route) and engine.obeys(route) for engine in engines)

    def lack_field(self, model: str, route: str, name: str) -> bool:
        """Whether some engine that takes calls for `model` is known to ignore a field of the route's body."""
        return any(self._engines[view.engine_id].offer.lacks_field(route, name) for view in self.takers.get(model, ()))

    def budget_thoughts(self, model: str) -> bool:
        """Whether each engine that takes calls for `model` is known to limit thoughts by a budget."""
        kinds = [self._engines[view.engine_id].kind for view in self.takers.get(model, ())]
        return all(kind is not None and DIALECTS[kind].budgets_thoughts for kind in kinds)

    def able(self, model: str) -> list[EngineView]:
        """As `eligible`; may be empty."""
        return self.takers.get(model, [])

    def peers(self) -> list[list[EngineView]]:
        """The engines that take calls, in groups that serve the same models."""
        groups: dict[frozenset[str], list[EngineView]] = {}
        for engine in self._engines.values():
            if engine.takes_calls:
                groups.setdefault(frozenset(engine.offer.models), []).append(engine.view)
        return list(groups.values())

    def serving(self, model: str) -> int:
        """How many engines take calls for `model`."""
        return len(self.takers.get(model, ()))

    def may_eject(self, engine: FleetEngine) -> bool:
        """Whether each model that the engine serves keeps at least `KEPT_SHARE` of its addresses without it."""
        for model in engine.offer.models:
            serving = [other for other in self._serving(model) if other.same_as is None]
            takers = [other for other in serving if other.health.state in TAKES_CALLS and not other.draining]
            kept = {other.address for other in takers if other is not engine}
            if len(kept) < KEPT_SHARE * len({other.address for other in serving}):
                return False
        return True

    def have_another(self, engine: FleetEngine, models: Iterable[str]) -> bool:
        """Whether each of these models has another engine that takes calls and is not stalled."""
        return all(
            any(other is not engine and other.takes_calls and not other.stalled for other in self._serving(model))
            for model in models
        )

    def _serving(self, model: str) -> list[FleetEngine]:
        return [engine for engine in self._engines.values() if model in engine.offer.models]

    def _having(self, views: list[EngineView], route: str | None) -> list[EngineView]:
        if route is None:
            return views
        return [view for view in views if self._engines[view.engine_id].offer.has(route) is not False]

    def _offered_contexts(self, model: str) -> dict[str, float]:
        offered = {engine.view.engine_id: engine.offer.models[model] for engine in self._serving(model)}
        return {engine_id: inf if tokens is None else tokens for engine_id, tokens in offered.items()}


def _able(serving: Sequence[FleetEngine]) -> list[FleetEngine]:
    """The engines among these that take calls: healthy ones, otherwise stalled or doubted ones, otherwise sick ones."""
    able = [engine for engine in serving if engine.takes_calls]
    able = [engine for engine in able if not (engine.stalled or engine.is_doubted)] or able
    return able or [engine for engine in serving if engine.health.state in _BETTER_THAN_NONE and not engine.is_aside]


def _renderers(serving: Sequence[FleetEngine]) -> Renderers:
    caches = [(DIALECTS[engine.cache.kind], engine.cache) for engine in serving if engine.cache.kind is not None]
    forms = {dialect.chat_form for dialect, _ in caches}
    prepares = [cache.agreement.prepares for dialect, cache in caches if dialect.chat_ids is not None]
    drops = {cache.agreement.drops_tools for dialect, cache in caches if dialect.chat_ids is None}
    return Renderers(
        form=forms.pop() if len(forms) == 1 else AS_VLLM.form,
        is_mixed=len(forms) > 1,
        prepares=bool(prepares) and all(prepares),
        drops_tools=None if len(drops) > 1 else True in drops,
    )


def _truncates(engine: FleetEngine) -> bool:
    return engine.kind is not None and DIALECTS[engine.kind].truncates


def _fills_context(engine: FleetEngine) -> bool:
    return engine.kind is not None and DIALECTS[engine.kind].fills_context


def _longest(contexts: Iterable[float]) -> int | None:
    longest = max(contexts, default=inf)
    return None if longest == inf else int(longest)


def _find_same(engines: Iterable[FleetEngine]) -> None:
    """Find engines that are one process. The first that can be reached and does not drain gets the calls of all."""
    first: dict[str, FleetEngine] = {}
    for engine in engines:
        same = engine
        if engine.process is not None and not engine.draining and engine.health.state not in NOT_THERE:
            same = first.setdefault(engine.process, engine)
        engine.same_as = None if same is engine else same.view.engine_id
        problem = f"it is engine {engine.same_as} under another address, and gets no calls" if engine.same_as else None
        note(engine, "process", problem)


def _check_all_answered(engines: Collection[FleetEngine], name: str) -> None:
    """Raises `NoEngineError` while an engine has never answered: it may serve the model."""
    silent = sorted(engine.view.engine_id for engine in engines if not engine.offer.models)
    if silent or not engines:
        waits = f"no answer so far from {', '.join(silent[:5])}" if silent else "there are no engines so far"
        message = f"No engine is known to serve '{name}': {waits}; try again shortly."
        raise NoEngineError(message, retry_after_s=1.0, quotes=True)  # the name is the client's
