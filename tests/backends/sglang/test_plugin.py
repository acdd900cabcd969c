"""SGLang servers get the plugin where they ask for it."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from plait.backends.adapter.scheduler_settings import VARIABLE
from plait.backends.sglang import plugin


@pytest.mark.parametrize(("settings", "expected"), [(None, []), ("{}", [plugin.API_SERVER])])
def test_a_server_gets_the_plugin_if_its_environment_has_settings(
    monkeypatch: pytest.MonkeyPatch, settings: str | None, expected: list[str]
) -> None:
    hooked = list[str]()
    monkeypatch.setattr(plugin, "_hook", lambda target, *_hook: hooked.append(target))
    monkeypatch.setattr(plugin, "check", lambda: None)
    monkeypatch.setattr(plugin, "NewsReceiver", Mock)
    monkeypatch.delenv(VARIABLE, raising=False)
    if settings is not None:
        monkeypatch.setenv(VARIABLE, settings)
    plugin.register()
    assert hooked == expected
