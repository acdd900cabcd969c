"""`plait engine`: what the profile says of the engine."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec import structs

from plait.backends.embedded.engine import EngineSettings
from plait.backends.embedded.server import EmbeddedServer, ServerSettings
from plait.backends.profiles import load_profile
from plait.gateway.cli import main
from plait.gateway.commands import engine


@pytest.mark.parametrize("ahead", [None, 0, 1])
def test_it_plans_ahead_as_its_profile_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: int | None) -> None:
    started: list[ServerSettings] = []

    def server(settings: ServerSettings) -> EmbeddedServer:
        started.append(settings)
        return EmbeddedServer(settings)

    monkeypatch.setattr(engine, "EmbeddedServer", server)
    monkeypatch.setattr(engine, "run_server", lambda *_, **__: None)
    monkeypatch.setattr(engine, "write_stderr_in_background", lambda: None)
    path = tmp_path / "mine.toml"
    path.write_text(structs.replace(load_profile("a6000-mistral-7b"), ahead=ahead).toml(), encoding="utf-8")
    assert main(["engine", "--profile", str(path)]) == 0
    default = EngineSettings(name="e", model="m", kv_tokens=16).ahead
    assert started[0].engine.ahead == (default if ahead is None else ahead)
