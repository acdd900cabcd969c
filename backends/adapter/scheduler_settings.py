"""The local scheduler's settings in an engine's plugin; each engine has its own way to pass them."""

from __future__ import annotations

from typing import Any, Literal, TypeVar

import msgspec

from plait.backends.profiles import load_profile
from plait.policy.cost_model import CostModel
from plait.policy.scheduling.local_scheduler import SCHEDULERS


class SettingsError(ValueError):
    """The plugin's settings are wrong; the message names their place and the key."""


class LeverSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Forced levers, for tests that each lever moves the engine. By default none is forced.

    order: `reverse` admits the latest arrival first.
    budget_tokens: tokens an iteration may compute. chunk_tokens: tokens of one prompt in an iteration.
    hold_back_iterations: each waiting call is held back for this many iterations while others run.
    preempt_every_iterations: every Nth iteration preempts the running call with the most output.
    """

    order: Literal["arrival", "reverse"] = "arrival"
    budget_tokens: int | None = None
    chunk_tokens: int | None = None
    hold_back_iterations: int = 0
    preempt_every_iterations: int = 0


class SchedulerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`scheduler` is a name in `policy.scheduling.local_scheduler.SCHEDULERS`; `name` is the engine's, for its reports.

    `profile` is a cost profile: its name or the path of its .toml file. A scheduler that plans by how long iterations
    take then knows this from the start. Without a profile it measures them.
    """

    scheduler: str = "slo"
    name: str = ""
    profile: str | None = None
    levers: LeverSettings = LeverSettings()


S = TypeVar("S", bound=SchedulerSettings)


def convert_settings(given: Any, kind: type[S], where: str) -> S:
    """The settings in a decoded object; `where` names its place in messages. Raises SettingsError."""
    try:
        settings = msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise SettingsError(f"{where}: {error}") from error
    if settings.scheduler not in SCHEDULERS:
        known = ", ".join(sorted(SCHEDULERS))
        raise SettingsError(f"{where}.scheduler: {settings.scheduler!r} is none of {known}")
    return settings


def cost_model(settings: SchedulerSettings, where: str) -> CostModel | None:
    """The cost model of the settings' profile, None without one. Raises SettingsError if it is missing or bad."""
    if settings.profile is None:
        return None
    try:
        return load_profile(settings.profile).cost_model()
    except ValueError as error:
        raise SettingsError(f"{where}.profile: {error}") from error
