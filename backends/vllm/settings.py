"""The plugin's settings, passed by vLLM's own `--additional-config '{"plait": {"scheduler": "fcfs"}}'`.

vLLM's configuration reaches the engine core wherever that runs. An environment variable does not.
"""

from __future__ import annotations

from typing import Any, Final

from plait.backends.adapter.scheduler_settings import SchedulerSettings, convert_settings

WHERE: Final = "--additional-config: plait"


class Settings(SchedulerSettings, frozen=True, forbid_unknown_fields=True):
    """The settings of every engine; the default name is `vllm`."""

    name: str = "vllm"


def parse_settings(additional_config: Any) -> Settings:
    """The settings in vLLM's `additional_config`; raises SettingsError."""
    given = additional_config.get("plait", {}) if isinstance(additional_config, dict) else {}
    return convert_settings(given, Settings, WHERE)
