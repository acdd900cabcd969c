"""The plugin's settings, in the environment: `PLAIT_SGLANG='{"scheduler": "fcfs"}'`.

SGLang passes its environment on to the processes that it starts. It has no command-line option for the settings.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Final

from plait.backends.adapter.scheduler_settings import SchedulerSettings, SettingsError, convert_settings

VARIABLE: Final = "PLAIT_SGLANG"


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
