"""The local scheduler's settings in an engine's plugin, and the scheduler that they make.

Each engine passes the settings in its own way. vLLM passes its configuration to the engine core on any machine, where
an environment variable would not get. SGLang passes its environment on to the processes that it starts, and has no
option for the settings.
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
    """What an engine's plugin can be told. `name` is the engine's, for its reports.

    `scheduler` is a name in `policy.scheduling.local_scheduler.SCHEDULERS`, or `package.module:name` of something of
    one's own that makes a `LocalScheduler`. It is called with `scheduler_options` as keywords. None: `slo`, as far as
    the engine has the names for it.
    `profile` is a cost profile: its name or the path of its .toml file. With it, a scheduler that plans with iteration
    times knows them from the start. Without it, the scheduler measures them.
    `require` is the lowest tier with which the engine may start.
    """

    scheduler: str | None = None
    name: str = ""
    profile: str | None = None
    scheduler_options: dict[str, Any] = {}
    require: Tier = "reports"

    @property
    def scheduler_name(self) -> str:
        return self.scheduler or DEFAULT_SCHEDULER

    @property
    def lowest_tier(self) -> Tier:
        """The lowest tier that does what is asked for: a scheduler that is named needs `order`."""
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
    """The local scheduler of the settings. `where` is as above. Raises SettingsError if it cannot be made."""
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
    """Returns `policy` if it measures, else None. It starts with `costs`, if given."""
    if not isinstance(policy, MeasuringScheduler):
        return None
    if costs is not None:
        policy.expect(costs)
    return policy


WHERE: Final = "--additional-config: plait"
"""Where vLLM has them: `--additional-config '{"plait": {"scheduler": "fcfs"}}'`."""


class VllmSettings(SchedulerSettings, frozen=True, forbid_unknown_fields=True):
    """The settings that all engines have. The default name is `vllm`."""

    name: str = "vllm"


def parse_settings(additional_config: Any) -> VllmSettings:
    """The settings in vLLM's `additional_config`. Raises SettingsError."""
    given = additional_config.get("plait", {}) if isinstance(additional_config, dict) else {}
    return convert_settings(given, VllmSettings, WHERE)


VARIABLE: Final = "PLAIT_SGLANG"
"""Where SGLang has them: `PLAIT_SGLANG='{"scheduler": "fcfs"}'`."""


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
