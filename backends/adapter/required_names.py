"""Finds out how much a plugin can do in the installed version of an engine.

Each class, method, parameter and attribute of the engine that the plugin uses or replaces serves a tier
(`plait.backends.protocol.cache_state.TIERS`). The engine gets the highest tier whose names, and those of all lower
tiers, it has. Version numbers are not checked: they say nothing of forks and future releases.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from plait.backends.protocol.cache_state import TIERS, Tier

_log = logging.getLogger("vllm.plait")
"""A child of vLLM's logger, because vLLM prints only such records. SGLang prints those of any logger."""


Missing = Mapping[Tier, Sequence[str]]
"""The names that an engine lacks, by the tier that needs them."""


class UnsupportedEngineError(RuntimeError):
    """The plugin cannot work with the installed engine, or with the way it was started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """The names that one tier needs, beside those of the tiers below."""

    methods: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Dotted names of functions, each with the first parameters that it must take. A last `name?` may be missing."""
    attributes: Sequence[str] = ()
    """Dotted paths in a scheduler that is built."""
    either_method: Sequence[Mapping[str, tuple[str, ...]]] = ()
    """Alternatives, since versions differ: one name of each entry is enough."""
    either_attribute: Sequence[Sequence[str]] = ()
    """As `either_method`, for attributes."""

    def missing_installed(self) -> list[str]:
        """The methods that the installed version lacks."""
        either = [(names, list(missing_names(names))) for names in self.either_method]
        return [*missing_names(self.methods), *_missing_alternatives(either)]

    def missing_in(self, scheduler: Any) -> list[str]:
        either = [(paths, list(missing_attributes(scheduler, paths))) for paths in self.either_attribute]
        return [*missing_attributes(scheduler, self.attributes), *_missing_alternatives(either)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequiredNames:
    """The names that a plugin needs in an `engine`, by tier.

    The engine is installed as `package`. `without_plait` tells the user how to start the engine without the plugin.
    """

    engine: str
    package: str
    without_plait: str
    reports: Names
    order: Names = Names()
    chunks: Names = Names()

    def installed_tier(self, lowest: Tier = "reports") -> Tier:
        """The highest tier whose methods the installed version has. Attributes are checked later, in the scheduler.

        Raises UnsupportedEngineError if that is below the `lowest` tier.
        """
        return self._highest(self.missing_installed(), lowest)[0]

    def missing_installed(self) -> Missing:
        """The methods that the installed version lacks, by tier. To be asked before the plugin replaces methods."""
        return {tier: self._of(tier).missing_installed() for tier in TIERS}

    def check_scheduler(self, scheduler: Any) -> None:
        """Raise UnsupportedEngineError if the installed version or its scheduler lacks a name of the lowest tier."""
        self._highest(self._missing(scheduler), TIERS[0])

    def scheduler_tier(self, scheduler: Any, lowest: Tier = "reports", installed: Missing | None = None) -> Tier:
        """The highest tier whose names the installed version and its scheduler have. Logs the missing names.

        `installed` is from `missing_installed`, called before the plugin replaced methods: the plugin's own methods
        have other parameters. Raises UnsupportedEngineError if the tier is below the `lowest` tier.
        """
        tier, lacks = self._highest(self._missing(scheduler, installed), lowest)
        if lacks:
            _log.warning("Plait's tier in this %s is %r; it lacks: %s", self._version, tier, ", ".join(lacks))
        return tier

    def _missing(self, scheduler: Any, installed: Missing | None = None) -> Missing:
        methods = self.missing_installed() if installed is None else installed
        return {tier: [*methods[tier], *self._of(tier).missing_in(scheduler)] for tier in TIERS}

    def _of(self, tier: Tier) -> Names:
        return {"reports": self.reports, "order": self.order, "chunks": self.chunks}[tier]

    def _highest(self, missing: Missing, lowest: Tier) -> tuple[Tier, list[str]]:
        """The highest tier, and the names that the tiers above it lack."""
        height = next((height for height, tier in enumerate(TIERS) if missing[tier]), len(TIERS)) - 1
        needed = TIERS[: TIERS.index(lowest) + 1]
        if height + 1 < len(needed):
            lacks = ", ".join(name for tier in needed for name in missing[tier])
            what = "" if lowest == "reports" else f" in the tier {lowest!r}, which --require or a named scheduler needs"
            raise UnsupportedEngineError(
                f"Plait does not support this {self._version}{what}; it lacks: {lacks}. "
                f"{self.without_plait}, or install a version that Plait supports."
            )
        return TIERS[height], [name for tier in TIERS for name in missing[tier]]

    @property
    def _version(self) -> str:
        version = getattr(importlib.import_module(self.package), "__version__", "of unknown version")
        return f"{self.engine} ({version})"


def load(name: str) -> Any:
    """The object with a dotted name (a module's path, then attributes); None if it is missing."""
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            found = getattr(found, part, None)
        return found
    return None


def missing_names(methods: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    """The dotted names that are missing, and `name(parameters)` for functions that do not take these parameters."""
    for name, parameters in methods.items():
        found = load(name)
        if found is None:
            yield name
        elif parameters:
            taken = [parameter for parameter in inspect.signature(found).parameters if parameter != "self"]
            if not _takes(taken, parameters):
                yield f"{name}({', '.join(parameters)})"


def _takes(taken: Sequence[str], parameters: Sequence[str]) -> bool:
    """Whether `taken` begins with `parameters`, or ends before a last one that may be missing."""
    *first, last = parameters
    if last.endswith("?") and list(taken) == first:
        return True
    return list(taken[: len(parameters)]) == [*first, last.removesuffix("?")]


def missing_attributes(target: Any, paths: Sequence[str]) -> Iterator[str]:
    """The dotted paths that an object lacks, each with its class's name in front."""
    for path in paths:
        if not _has(target, path):
            yield f"{type(target).__name__}.{path}"


def _missing_alternatives(either: Iterable[tuple[Collection[str], Sequence[str]]]) -> Iterator[str]:
    """`one or other` for each group of alternatives that is missing as a whole. `either`: (group, missing names)."""
    for names, missing in either:
        if len(missing) == len(names):
            yield " or ".join(missing)


def _has(target: Any, path: str) -> bool:
    for part in path.split("."):
        if not hasattr(target, part):
            return False
        target = getattr(target, part)
    return True
