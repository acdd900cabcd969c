"""What a new configuration changes, compared to the one in force."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import msgspec

from plait.gateway.config.sections import AdmissionConfig, Config, EngineConfig, Section

LIMITS = frozenset({"calls_per_s", "tokens_per_s", "max_running", "max_waiting"})
"""The keys of `[admission]` that limit each tenant. They change at once."""

NOT_LIMITS = frozenset(AdmissionConfig.__struct_fields__) - LIMITS


@dataclass(frozen=True, slots=True)
class ConfigChange:
    """The engines that come, go and change, what else changes, and the keys that need a restart.

    Engines are the same if they have the same name. `removed` has names. `tenants` is True if names, keys or weights of
    tenants change, and `limits` if what tenants may use does.
    """

    added: tuple[EngineConfig, ...] = ()
    removed: tuple[str, ...] = ()
    changed: tuple[EngineConfig, ...] = ()
    tenants: bool = False
    limits: bool = False
    admin_key: bool = False
    log_level: bool = False
    needs_restart: tuple[str, ...] = ()


def config_change(before: Config, after: Config) -> ConfigChange:
    """The change from `before` to `after`.

    Whether clients need a key at all is fixed: tenants would be mixed up. So is an engine's KV cache.
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
        needs_restart=(
            *_differing("server", before.server, after.server, {"admin_key", "api_keys"}),
            *(["server.api_keys"] if keys_change and guards_change else []),
            *(["tenants"] if tenants_change and guards_change else []),
            *_differing("admission", before.admission, after.admission, LIMITS),
            *_differing("log", before.log, after.log, {"level"}),
            *(name for name in ("placement", "upstream", "sessions") for name in _section(name, before, after)),
            *(name for name in ("models", "services") if getattr(before, name) != getattr(after, name)),
            *(f"engines.{was.name}.kv_tokens" for was, engine in both if was.kv_tokens != engine.kv_tokens),
        ),
    )


def _taken(before: EngineConfig, after: EngineConfig) -> EngineConfig:
    """The engine as it can be from now on."""
    return msgspec.structs.replace(after, kv_tokens=before.kv_tokens)


def _section(name: str, before: Config, after: Config) -> Iterator[str]:
    return _differing(name, getattr(before, name), getattr(after, name), set())


def _differing(name: str, before: Section, after: Section, taken: Collection[str]) -> Iterator[str]:
    for key in before.__struct_fields__:
        if key not in taken and getattr(before, key) != getattr(after, key):
            yield f"{name}.{key}"
