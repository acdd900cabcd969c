"""`plait check-config` without engines: e2e tests have them."""

from __future__ import annotations

from pathlib import Path

import pytest

import plait.gateway.commands.check_config
from plait.gateway.cli import main

ENGINE = '[[models]]\nname = "m"\ntokenizer = "embedded"\n[[engines]]\nname = "a"\nurl = "http://127.0.0.1:9"\n'


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tmp_path / "config.toml"


def test_a_configuration_that_can_be_used_is_said(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config.write_text(ENGINE)
    assert main(["check-config", "--config", str(config)]) == 0
    assert capsys.readouterr().out


def test_a_wrong_key_is_named(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config.write_text(ENGINE + "nonsense = 1\n")
    assert main(["check-config", "--config", str(config)]) == 2
    assert "nonsense" in capsys.readouterr().err


def test_an_engine_that_does_not_answer_is_shown(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plait.gateway.commands.check_config, "configure_logging", lambda *_words: None)
    config.write_text(ENGINE)
    assert main(["check-config", "--config", str(config), "--probe"]) == 2
    printed = capsys.readouterr()
    assert "a: engine a cannot be reached" in printed.out
    assert "1 engine of 1 cannot be used as configured" in printed.err
