"""Engines by their addresses, from the command line and the environment."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from plait.gateway.commands.given_engines import GivenEngines, add_arguments, given_engines
from plait.gateway.config.file import ConfigError

FILE = """
[[engines]]
name = "one"
url = "http://10.0.0.11:8000"
[[models]]
name = "m"
tokenizer = "bytes"
"""


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PLAIT_ENGINES", "PLAIT_ENGINE_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def given(*words: str) -> GivenEngines:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return given_engines(parser.parse_args(words))


def urls(*words: str) -> list[str]:
    return [engine.url for engine in given(*words).load().engines]


def test_addresses_are_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    assert urls("http://a:8000", "http://b:8000/") == ["http://a:8000", "http://b:8000"]
    assert urls("--engine", "http://a:8000", "--engine", "https://b", "http://a:8000/") == [
        "http://a:8000",
        "https://b",
    ]
    monkeypatch.setenv("PLAIT_ENGINES", " http://c:1,http://d:1  http://e:1\n")
    assert urls() == ["http://c:1", "http://d:1", "http://e:1"]
    assert urls("http://a:8000") == ["http://a:8000"], "the command line goes first"


def test_the_key_is_that_of_all_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    assert given("http://a:1").load().engines[0].api_key is None
    monkeypatch.setenv("PLAIT_ENGINE_API_KEY", "secret-1")
    assert [engine.api_key for engine in given("http://a:1", "http://b:1").load().engines] == ["secret-1"] * 2
    assert given("http://a:1", "--engine-api-key", "secret-2").load().engines[0].api_key == "secret-2"


def test_a_key_of_two_lines_is_named_and_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLAIT_ENGINE_API_KEY", "secret\n")
    with pytest.raises(ConfigError, match=r"PLAIT_ENGINE_API_KEY = \(hidden\): expected printable ASCII"):
        given("http://a:1")


def test_they_add_to_a_file(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(FILE)
    config = given("http://10.0.0.11:8000", "http://b:1", "--config", str(file), "--model", "m", "--model", "x").load()
    assert [engine.name for engine in config.engines] == ["one", "b:1"]
    assert [(model.name, model.tokenizer) for model in config.models] == [("m", "bytes"), ("x", "auto")]


def test_a_file_in_an_engines_place_is_told_its_own(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(FILE)
    with pytest.raises(ConfigError, match=f"give it as --config {file}"):
        given(str(file))


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ((), "no engines: give their addresses .*PLAIT_ENGINES"),
        (("10.0.0.11:8000",), 'engine: url = "10.0.0.11:8000": expected http://HOST:PORT'),
        (("http://a:8000/v1",), "expected the engine's root, without /v1"),
        (("http://a:8000/one", "http://a:8000/two"), "two engines are called a:8000: name them in a file"),
        (("http://me:secret@a:8000",), "put the engine's key into api_key"),
    ],
)
def test_what_is_no_engine_is_an_error(words: tuple[str, ...], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        given(*words).load()
    assert "secret" not in str(caught.value)
