"""The local scheduler's settings in an engine's plugin. Each engine passes them in its own way."""

from __future__ import annotations

from typing import Any, Literal, TypeVar

import msgspec

from plait.backends.profiles import load_profile
from plait.policy.cost_model import CostModel
from plait.policy.scheduling.local_scheduler import SCHEDULERS


class SettingsError(ValueError):
    """The plugin's settings are wrong. The message names the place of the settings and the key."""


class LeverSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Forced levers, for tests of each lever's effect on the engine. By default none is forced.

    order: `reverse` admits the latest arrival first.
    budget_tokens: the most tokens of an iteration. chunk_tokens: the most tokens of one prompt in an iteration.
    hold_back_iterations: each waiting call is held back for this many iterations while others run.
    preempt_every_iterations: every Nth iteration preempts the running call with the most output.
    """

    order: Literal["arrival", "reverse"] = "arrival"
    budget_tokens: int | None = None
    chunk_tokens: int | None = None
    hold_back_iterations: int = 0
    preempt_every_iterations: int = 0


class SchedulerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`scheduler` is a name in `policy.scheduling.local_scheduler.SCHEDULERS`. `name` is the engine's, for its reports.

    `profile` is a cost profile: its name or the path of its .toml file. With it, a scheduler that plans with iteration
    times knows them from the start. Without it, the scheduler measures them.
    """

    scheduler: str = "slo"
    name: str = ""
    profile: str | None = None
    levers: LeverSettings = LeverSettings()


S = TypeVar("S", bound=SchedulerSettings)


def convert_settings(given: Any, kind: type[S], where: str) -> S:
    """The settings in a decoded object. `where` names their place in error messages. Raises SettingsError."""
    try:
        settings = msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise SettingsError(f"{where}: {error}") from error
    if settings.scheduler not in SCHEDULERS:
        known = ", ".join(sorted(SCHEDULERS))
        raise SettingsError(f"{where}.scheduler: {settings.scheduler!r} is none of {known}")
    return settings


def cost_model(settings: SchedulerSettings, where: str) -> CostModel | None:
    """The cost model of the settings' profile; None without a profile. Raises SettingsError if it cannot be loaded."""
    if settings.profile is None:
        return None
    try:
        return load_profile(settings.profile).cost_model()
    except ValueError as error:
        raise SettingsError(f"{where}.profile: {error}") from error
