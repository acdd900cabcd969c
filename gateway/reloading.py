"""Re-reads the configuration file of a running gateway: what it changes, and what of that needs no restart."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import msgspec
import structlog
from prometheus_client import CollectorRegistry, Counter

from plait.backends.errors import ConflictError
from plait.backends.http.trust import SYSTEM_TRUST, TrustError
from plait.gateway.admission.tenants import TenantTerms
from plait.gateway.api.auth import KeyRing
from plait.gateway.config.file import ConfigError
from plait.gateway.config.section import Section
from plait.gateway.config.sections import AdmissionConfig, Config, EngineConfig, ModelConfig, PriceConfig
from plait.gateway.log.events import change_level
from plait.gateway.membership.engine_set import EngineSet

log = structlog.get_logger(__name__)


LIMITS = frozenset({"calls_per_s", "tokens_per_s", "max_running", "max_waiting"})
"""The keys of `[admission]` that limit each tenant. They change at once."""

AT_THE_START = ("placement", "upstream", "sessions", "store", "receipts", "tracing", "usage")
"""The sections that a start reads, and no reload."""

NOT_LIMITS = frozenset(AdmissionConfig.__struct_fields__) - LIMITS


@dataclass(frozen=True, slots=True)
class ConfigChange:
    """The difference of two configurations.

    Engines are identified by name; `removed` has names. `tenants`: names, keys or weights of tenants change. `limits`:
    the limits of tenants change.
    """

    added: tuple[EngineConfig, ...] = ()
    removed: tuple[str, ...] = ()
    changed: tuple[EngineConfig, ...] = ()
    tenants: bool = False
    limits: bool = False
    admin_key: bool = False
    log_level: bool = False
    prices: bool = False
    needs_restart: tuple[str, ...] = ()


def config_change(before: Config, after: Config) -> ConfigChange:
    """The change from `before` to `after`.

    Two changes need a restart: whether clients need a key at all (tenants would be mixed up), and an engine's KV cache.
    """
    old = {engine.name: engine for engine in before.engines}
    new = {engine.name: engine for engine in after.engines}
    both = [(old[name], engine) for name, engine in new.items() if name in old]
    guards_change = before.is_open != after.is_open
    keys_change = before.server.api_keys != after.server.api_keys
    tenants_change = before.tenants != after.tenants
    return ConfigChange(
        added=tuple(engine for name, engine in new.items() if name not in old),
        removed=tuple(name for name in old if name not in new),
        changed=tuple(_taken(was, engine) for was, engine in both if _taken(was, engine) != was),
        tenants=(keys_change or tenants_change) and not guards_change,
        limits=any(True for _ in _differing("admission", before.admission, after.admission, NOT_LIMITS)),
        admin_key=before.server.admin_key != after.server.admin_key,
        log_level=before.log.level != after.log.level,
        prices=_prices(before) != _prices(after),
        needs_restart=(
            *_differing("server", before.server, after.server, {"admin_key", "api_keys"}),
            *(["server.api_keys"] if keys_change and guards_change else []),
            *(["tenants"] if tenants_change and guards_change else []),
            *_differing("admission", before.admission, after.admission, LIMITS),
            *_differing("log", before.log, after.log, {"level"}),
            *(key for name in AT_THE_START for key in _section(name, before, after)),
            *(["models"] if _unpriced(before) != _unpriced(after) else []),
            *(["services"] if before.services != after.services else []),
            *(f"engines.{was.name}.kv_tokens" for was, engine in both if was.kv_tokens != engine.kv_tokens),
        ),
    )


def _unpriced(config: Config) -> list[ModelConfig]:
    """The models without their prices, which change at once."""
    return [msgspec.structs.replace(model, price=None) for model in config.models]


def _prices(config: Config) -> dict[str, PriceConfig]:
    return {model.name: model.price for model in config.models if model.price is not None}


def _taken(before: EngineConfig, after: EngineConfig) -> EngineConfig:
    return msgspec.structs.replace(after, kv_tokens=before.kv_tokens)


def _section(name: str, before: Config, after: Config) -> Iterator[str]:
    return _differing(name, getattr(before, name), getattr(after, name), set())


def _differing(name: str, before: Section, after: Section, taken: Collection[str]) -> Iterator[str]:
    for key in before.__struct_fields__:
        if key not in taken and getattr(before, key) != getattr(after, key):
            yield f"{name}.{key}"


class Reloading:
    """Applies changes of the file. `config` is the configuration in force.

    A reload applies only what has changed in the file since, so that changes by the admin API to other engines stay.
    """

    def __init__(
        self,
        config: Config,
        engines: EngineSet,
        keys: KeyRing,
        admin_keys: KeyRing,
        terms: TenantTerms,
        *,
        registry: CollectorRegistry,
    ) -> None:
        self.config = config
        self.refused: list[str] = []  # the problems of the file as it was read last
        self.on_change: list[Callable[[Config], None]] = []  # called with the new configuration in force
        self._engines = engines
        self._keys = keys
        self._admin_keys = admin_keys
        self._terms = terms
        self._reloads = Counter(
            "plait_reloads", "Times that the configuration file was read again", ["outcome"], registry=registry
        )

    def reload(self, load: Callable[[], Config]) -> None:
        """Read the engines' certificates again, and with `load` the configuration. An invalid one changes nothing."""
        refused = []
        try:
            if SYSTEM_TRUST.reload():
                log.info("certificates reloaded")
        except TrustError as error:
            refused = [str(error)]
            log.error("certificates refused, the old ones stay", problem=str(error))  # noqa: TRY400 - not a defect
        try:
            after = load()
        except ConfigError as error:
            self._reloads.labels("refused").inc()
            problems = str(error).splitlines()
            self.refused = refused + problems
            log.error("configuration refused, the old one stays", problems=problems)  # noqa: TRY400 - not a defect
            return
        self._reloads.labels("applied").inc()
        self.refused = refused
        self.apply(after)

    def apply(self, after: Config) -> ConfigChange:
        """Apply what can change in a running gateway. Returns and logs the change."""
        change = config_change(self.config, after)
        self._apply_tenants(change, after)
        server = self.config.server
        if change.admin_key:
            self._admin_keys.replace(filter(None, [after.server.admin_key]))
            server = msgspec.structs.replace(server, admin_key=after.server.admin_key)
        if change.log_level:
            change_level(after.log.level)
        self._apply_engines(change)
        same = {engine.name: engine for engine in self.config.engines} | {one.name: one for one in change.changed}
        prices = _prices(after)
        self.config = msgspec.structs.replace(
            self.config,
            server=server,
            models=tuple(msgspec.structs.replace(model, price=prices.get(model.name)) for model in self.config.models),
            log=msgspec.structs.replace(self.config.log, level=after.log.level),
            engines=tuple(same.get(engine.name, engine) for engine in after.engines),
        )
        say = log.warning if change.needs_restart else log.info
        say(
            "configuration reloaded",
            engines_added=[engine.name for engine in change.added],
            engines_removed=change.removed,
            engines_changed=[engine.name for engine in change.changed],
            tenants_changed=change.tenants,
            limits_changed=change.limits,
            admin_key_changed=change.admin_key,
            log_level=after.log.level if change.log_level else None,
            prices_changed=change.prices,
            needs_restart=change.needs_restart,
        )
        for tell in self.on_change:
            tell(self.config)
        return change

    def _apply_tenants(self, change: ConfigChange, after: Config) -> None:
        """Replace the keys and tenants. Sessions of a removed tenant stay until they expire."""
        now = self.config
        if change.limits:
            limits = {key: getattr(after.admission, key) for key in LIMITS}
            now = msgspec.structs.replace(now, admission=msgspec.structs.replace(now.admission, **limits))
        if change.tenants:
            server = msgspec.structs.replace(now.server, api_keys=after.server.api_keys)
            now = msgspec.structs.replace(now, server=server, tenants=after.tenants)
            self._keys.replace(now.server.api_keys, now.tenants)
        self._terms.replace(now.admission, now.tenants)
        self.config = now

    def _apply_engines(self, change: ConfigChange) -> None:
        """Add, change and remove engines. Removed ones take calls until the new ones have been probed."""
        successors = [engine.name for engine in change.added]
        for name in change.removed:
            if name in self._engines:
                self._engines.leave(name, successors, hands_over=True)
        for engine in (*change.changed, *change.added):
            self._put(engine)

    def _put(self, engine: EngineConfig) -> None:
        try:
            self._engines.put(engine)
        except (ConflictError, ValueError) as error:
            self.refused = [*self.refused, f"engine {engine.name}: {error}"]
            log.error("engine not taken over", engine=engine.name, problem=str(error))  # noqa: TRY400 - not a defect
