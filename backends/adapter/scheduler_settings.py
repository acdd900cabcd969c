"""The local scheduler's settings in an engine's plugin, and the scheduler that they make.

vLLM takes them in `--additional-config`, because its engine core may run on a machine without the API server's
environment. SGLang has no such option, so it takes them in an environment variable, which its processes inherit.
"""

from __future__ import annotations

import json
import os
import pkgutil
from collections.abc import Mapping
from typing import Any, Final, TypeVar

import msgspec

from plait.backends.profiles import load_profile
from plait.backends.protocol.cache_state import TIERS, Tier
from plait.policy.costs.cost_model import CostModel
from plait.policy.scheduling.local_scheduler import SCHEDULERS
from plait.policy.scheduling.plan import LocalScheduler, MeasuringScheduler

DEFAULT_SCHEDULER: Final = "slo"


class SettingsError(ValueError):
    """The plugin's settings are wrong. The message names the place of the settings and the key."""


class SchedulerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of an engine's plugin."""

    scheduler: str | None = None
    """A name in `policy.scheduling.local_scheduler.SCHEDULERS`, or `package.module:name` of a factory of a user's own
    `LocalScheduler`. None: `slo`, as far as the engine's tier allows.
    """
    name: str = ""
    """The engine's name in its reports."""
    profile: str | None = None
    """A cost profile's name or .toml file. Without one, a scheduler that needs iteration times measures them first."""
    scheduler_options: dict[str, Any] = {}
    """Keyword arguments for the user's factory."""
    require: Tier = "reports"
    """The lowest tier with which the engine may start."""

    @property
    def scheduler_name(self) -> str:
        return self.scheduler or DEFAULT_SCHEDULER

    def policy(self, tier: Tier) -> str:
        """Who schedules in a tier, for the reports: the scheduler's name, or `engine`."""
        return "engine" if tier == "reports" else self.scheduler_name

    @property
    def lowest_tier(self) -> Tier:
        """The lowest tier that satisfies the settings. A scheduler that is named needs `order`."""
        named: Tier = "reports" if self.scheduler is None else "order"
        return max(self.require, named, key=TIERS.index)


S = TypeVar("S", bound=SchedulerSettings)


def convert_settings(given: Any, kind: type[S], where: str) -> S:
    """The settings in a decoded object. `where` names their place in error messages. Raises SettingsError."""
    try:
        settings = msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise SettingsError(f"{where}: {error}") from error
    name = settings.scheduler_name
    if name in SCHEDULERS:
        if settings.scheduler_options:
            raise SettingsError(f"{where}.scheduler_options: {name!r} takes none")
    elif ":" not in name:
        known = ", ".join(sorted(SCHEDULERS))
        raise SettingsError(f"{where}.scheduler: {name!r} is none of {known}, and no package.module:name")
    return settings


def cost_model(settings: SchedulerSettings, where: str) -> CostModel | None:
    """The cost model of the settings' profile; None without a profile. Raises SettingsError if it cannot be loaded."""
    if settings.profile is None:
        return None
    try:
        return load_profile(settings.profile).cost_model()
    except ValueError as error:
        raise SettingsError(f"{where}.profile: {error}") from error


def local_scheduler(settings: SchedulerSettings, where: str) -> LocalScheduler:
    """The local scheduler of the settings. Raises SettingsError, which begins with `where`, if it cannot be made."""
    name, options = settings.scheduler_name, settings.scheduler_options
    if name in SCHEDULERS:
        return SCHEDULERS[name]()
    try:
        made: object = pkgutil.resolve_name(name)(**options)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise SettingsError(f"{where}.scheduler: {name!r} makes no scheduler of {options}: {error}") from error
    if not isinstance(made, LocalScheduler):
        raise SettingsError(f"{where}.scheduler: {name!r} makes a {type(made).__name__}, which has no `plan`")
    return made


def measuring(policy: LocalScheduler, costs: CostModel | None) -> MeasuringScheduler | None:
    """`policy` if it takes iteration times, else None. Gives it the expected times of `costs` first."""
    if not isinstance(policy, MeasuringScheduler):
        return None
    if costs is not None:
        policy.expect(costs)
    return policy


WHERE: Final = "--additional-config: plait"
"""Where vLLM has the settings: `--additional-config '{"plait": {"scheduler": "fcfs"}}'`."""


class VllmSettings(SchedulerSettings, frozen=True, forbid_unknown_fields=True):
    """The settings that all engines have. The default name is `vllm`."""

    name: str = "vllm"


def parse_settings(additional_config: Any) -> VllmSettings:
    """The settings in vLLM's `additional_config`. Raises SettingsError."""
    given = additional_config.get("plait", {}) if isinstance(additional_config, dict) else {}
    return convert_settings(given, VllmSettings, WHERE)


VARIABLE: Final = "PLAIT_SGLANG"
"""Where SGLang has the settings: `PLAIT_SGLANG='{"scheduler": "fcfs"}'`."""


class SglangSettings(SchedulerSettings, frozen=True, forbid_unknown_fields=True):
    """The settings that all engines have. The default name is `sglang`."""

    name: str = "sglang"


def read_settings(environment: Mapping[str, str] = os.environ) -> SglangSettings:
    """The settings in the environment. Raises SettingsError."""
    try:
        given = json.loads(environment.get(VARIABLE) or "{}")
    except ValueError as error:
        raise SettingsError(f"{VARIABLE} is not JSON: {error}") from error
    return convert_settings(given, SglangSettings, VARIABLE)
