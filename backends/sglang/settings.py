"""What the plugin can be told, through the environment: `PLAIT_SGLANG='{"scheduler": "fcfs"}'`.

SGLang hands its environment down to the processes that it starts, and has no option that would travel with it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Final

from plait.backends.adapter.scheduler_settings import SchedulerSettings, SettingsError, convert_settings

VARIABLE: Final = "PLAIT_SGLANG"


class Settings(SchedulerSettings, frozen=True, forbid_unknown_fields=True):
    """As of any engine; one without a name is called for what it is."""

    name: str = "sglang"


def read_settings(environment: Mapping[str, str] = os.environ) -> Settings:
    """The settings in the environment; raises SettingsError."""
    try:
        given = json.loads(environment.get(VARIABLE) or "{}")
    except ValueError as error:
        raise SettingsError(f"{VARIABLE} is not JSON: {error}") from error
    return convert_settings(given, Settings, VARIABLE)
