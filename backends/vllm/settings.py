"""What the plugin can be told, through vLLM's own `--additional-config '{"plait": {"scheduler": "fcfs"}}'`.

That option travels with vLLM's configuration to wherever the engine core runs, which an environment variable does not.
"""

from __future__ import annotations

from typing import Any, Final

from plait.backends.adapter.scheduler_settings import SchedulerSettings, convert_settings

WHERE: Final = "--additional-config: plait"


class Settings(SchedulerSettings, frozen=True, forbid_unknown_fields=True):
    """As of any engine; one without a name is called for what it is."""

    name: str = "vllm"


def parse_settings(additional_config: Any) -> Settings:
    """The settings in vLLM's `additional_config`; raises SettingsError."""
    given = additional_config.get("plait", {}) if isinstance(additional_config, dict) else {}
    return convert_settings(given, Settings, WHERE)
