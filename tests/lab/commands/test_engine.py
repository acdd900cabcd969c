"""`plait engine`: what the profile says of the engine."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec import structs

from plait.backends.profiles import load_profile
from plait.gateway.cli import main
from plait.lab.commands import engine
from plait.lab.embedded.engine import EngineSettings
from plait.lab.embedded.server import EmbeddedServer, ServerSettings


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[ServerSettings]:
    """The settings of the servers that would have been started."""
    settings_of: list[ServerSettings] = []

    def server(settings: ServerSettings) -> EmbeddedServer:
        settings_of.append(settings)
        return EmbeddedServer(settings)

    monkeypatch.setattr(engine, "EmbeddedServer", server)
    monkeypatch.setattr(engine, "run_server", lambda *_, **__: None)
    monkeypatch.setattr(engine, "write_stderr_in_background", lambda: None)
    return settings_of


@pytest.mark.parametrize("ahead", [None, 0, 1])
def test_it_plans_ahead_as_its_profile_says(tmp_path: Path, started: list[ServerSettings], ahead: int | None) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(structs.replace(load_profile("a6000-mistral-7b"), ahead=ahead).toml(), encoding="utf-8")
    assert main(["engine", "--profile", str(path)]) == 0
    default = EngineSettings(name="e", model="m", kv_tokens=16).ahead
    assert started[0].engine.ahead == (default if ahead is None else ahead)


def test_it_has_a_sliding_window_if_asked(started: list[ServerSettings]) -> None:
    assert main(["engine"]) == main(["engine", "--window", "1024"]) == 0
    assert [settings.engine.window_tokens for settings in started] == [0, 1024]


def test_a_window_beside_lower_tiers_is_an_error(
    started: list[ServerSettings], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["engine", "--window", "1024", "--host-kv-tokens", "100000"]) != 0
    assert "no lower tiers" in capsys.readouterr().err
    assert len(started) == 1


def test_a_cache_without_a_block_is_an_error(started: list[ServerSettings], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["engine", "--kv-tokens", "10"]) == 2
    assert "--kv-tokens 10: expected at least one block of 16 tokens" in capsys.readouterr().err
    assert not started
