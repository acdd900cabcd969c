"""Leaves asynchronous scheduling as it is on a GPU, which means on. vLLM's CPU platform switches it off."""

from __future__ import annotations

from typing import Any


def leave() -> None:
    """Called by vLLM in each of its processes, before it makes a configuration."""
    from vllm.platforms.cpu import CpuPlatform  # noqa: PLC0415 - vLLM is being imported when it lists its plugins

    stock = CpuPlatform.check_and_update_config

    def check_and_update_config(cls: type, config: Any) -> None:
        chosen = config.scheduler_config.async_scheduling
        stock(config)
        config.scheduler_config.async_scheduling = chosen

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
