"""The names that clients may use for models, as the operator has configured them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from plait.backends.errors import CallerError, ModelNotFoundError
from plait.backends.protocol.openai import ANY_MODEL

UNNAMED = frozenset(("", ANY_MODEL))
"""What stands for the only model."""


@dataclass(frozen=True, slots=True)
class ModelNames:
    """`expected` models belong to the fleet even if no engine serves them. `aliases` maps a further name to a model.

    `fallbacks` has the models that answer, in this order, while no engine takes calls for the one that is asked.
    """

    expected: Collection[str] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    fallbacks: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def meant(self, name: str, base_models: Collection[str]) -> str:
        """The model that a name stands for, which may be the name itself."""
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
