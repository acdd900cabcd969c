"""The engines, models and store that the command line or the environment adds to the configuration file."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import structlog

from plait.gateway.config.file import ConfigError, load_config
from plait.gateway.config.sections import Config, EngineConfig, ModelConfig
from plait.gateway.guests.discovery.found_config import ENGINE_KEY

ENGINES = "PLAIT_ENGINES"
"""The environment variable with the engines' addresses, separated by spaces or commas."""


log = structlog.get_logger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("urls", nargs="*", metavar="URL", help="an engine, such as http://10.0.0.11:8000")
    parser.add_argument("--engine", action="append", default=[], metavar="URL", help="the same; may be repeated")
    parser.add_argument("--config", type=Path, metavar="FILE", help="see config.example.toml")
    parser.add_argument(
        "--model", action="append", default=[], metavar="NAME", help="a model whose tokenizer may be downloaded"
    )
    parser.add_argument("--store", metavar="FILE", help="keep sessions in this file, instead of store.path")
    parser.add_argument("--engine-api-key", metavar="KEY", help=f"the engines' key (default: ${ENGINE_KEY})")


@dataclass(frozen=True, slots=True)
class GivenEngines:
    """A configuration file (None: the defaults) with the engines, models and store that the command line adds."""

    path: Path | None
    engines: tuple[EngineConfig, ...]
    models: tuple[str, ...]
    store: str | None = None

    def load(self) -> Config:
        """Read the file, and add the engines and models that it does not have. Raises `ConfigError`."""
        config = Config() if self.path is None else load_config(self.path)
        known = {engine.url for engine in config.engines}
        names = {model.name for model in config.models}
        added = tuple(engine for engine in self.engines if engine.url not in known)
        models = tuple(ModelConfig(name=name) for name in dict.fromkeys(self.models) if name and name not in names)
        engines = config.engines + added
        called = [engine.name for engine in engines]
        twice = next((name for name in called if called.count(name) > 1), None)
        if twice is not None:
            raise ConfigError(f"two engines are called {twice}: name them in a file, under [[engines]]")
        path = config.store.path if self.store is None else str(Path(self.store).absolute())
        store = msgspec.structs.replace(config.store, path=path)
        return msgspec.structs.replace(config, engines=engines, models=config.models + models, store=store)


class LastGood:
    """The latest valid configuration, with which a worker can restart while the file is invalid.

    The constructor raises `ConfigError` if the file is invalid at the start.
    """

    def __init__(self, load: Callable[[], Config]) -> None:
        self._load = load
        self._config = load()

    def load(self) -> Config:
        """Read the file again. If the file is invalid, its problems are logged and the configuration stays."""
        try:
            self._config = self._load()
        except ConfigError as error:
            problems = str(error).splitlines()
            log.error("configuration refused, the old one stays", problems=problems)  # noqa: TRY400 - not a defect
        return self._config


def given_engines(arguments: argparse.Namespace) -> GivenEngines:
    """Read the arguments and the environment.

    Raises `ConfigError` for an invalid address, and if there is neither an engine nor a file.
    """
    urls = [*arguments.urls, *arguments.engine]
    if (file := next((url for url in urls if Path(url).is_file()), None)) is not None:
        raise ConfigError(f"{file} is a file, not an engine: give it as --config {file}")
    if not urls:
        urls = [url for url in re.split(r"[\s,]+", os.environ.get(ENGINES, "")) if url]
    if not urls and arguments.config is None:
        raise ConfigError(
            "no engines: give their addresses (plait serve http://HOST:PORT ...), a file (--config FILE), "
            f"or set {ENGINES}"
        )
    api_key = arguments.engine_api_key or os.environ.get(ENGINE_KEY) or None
    if api_key is not None and not re.fullmatch("[!-~]+", api_key):
        raise ConfigError(f"--engine-api-key or {ENGINE_KEY} = (hidden): expected printable ASCII without spaces")
    return GivenEngines(arguments.config, tuple(_engines(urls, api_key)), tuple(arguments.model), arguments.store)


def _engines(urls: Sequence[str], api_key: str | None) -> list[EngineConfig]:
    try:
        engines = [msgspec.convert({"url": url, "api_key": api_key}, EngineConfig) for url in dict.fromkeys(urls)]
    except ValueError as error:
        raise ConfigError(f"engine: {str(error).removesuffix(' - at `$`')}") from error
    return list({engine.url: engine for engine in engines}.values())  # two spellings may be one address
