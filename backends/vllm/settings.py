"""The plugin's settings, in vLLM's own option `--additional-config '{"plait": {"scheduler": "fcfs"}}'`.

vLLM passes its configuration to the engine core on any machine. An environment variable would not get there.
"""

from __future__ import annotations

from typing import Any, Final

from plait.backends.adapter.scheduler_settings import SchedulerSettings, convert_settings

WHERE: Final = "--additional-config: plait"


class VllmSettings(SchedulerSettings, frozen=True, forbid_unknown_fields=True):
    """The settings that all engines have. The default name is `vllm`."""

    name: str = "vllm"


def parse_settings(additional_config: Any) -> VllmSettings:
    """The settings in vLLM's `additional_config`. Raises SettingsError."""
    given = additional_config.get("plait", {}) if isinstance(additional_config, dict) else {}
    return convert_settings(given, VllmSettings, WHERE)
