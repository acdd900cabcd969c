"""Writes a configuration file with the engines and the models found on them: `plait serve URL ... --save FILE`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import structlog
import tomli_w

from plait.gateway.config.sections import Config
from plait.gateway.fleet.health import TAKES_CALLS
from plait.gateway.fleet.router import Router

LOOK_S: Final = 0.1
"""The polling period until all engines have answered."""

ENGINE_KEY: Final = "PLAIT_ENGINE_API_KEY"
"""The environment variable with the engines' API key. The file refers to the variable, and does not show the key."""

log = structlog.get_logger(__name__)


class FoundConfig:
    """The file for the engines of `config`. `tokenizer` returns the specification of a model's tokenizer."""

    def __init__(self, config: Config, router: Router, tokenizer: Callable[[str], str]) -> None:
        self._config = config
        self._router = router
        self._tokenizer = tokenizer

    async def save(self, path: Path) -> None:
        """Wait until each engine has answered, and write the file. Logs an error if it cannot be written, or exists."""
        names = [engine.name for engine in self._config.engines]
        while not all(map(self._answered, names)):  # noqa: ASYNC110
            await asyncio.sleep(LOOK_S)
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(self.text())
        except OSError as error:
            log.error("configuration not saved", file=str(path), problem=error.strerror)  # noqa: TRY400 - no defect
        else:
            log.info("configuration saved", file=str(path))

    def text(self) -> str:
        """The content of the file: the models with their tokenizers, and the engines."""
        tables = [("models", table) for table in self._models()] + [("engines", table) for table in self._engines()]
        return "\n".join(f"[[{name}]]\n{tomli_w.dumps(table)}" for name, table in tables)

    def _answered(self, name: str) -> bool:
        return any(rank.health.state in TAKES_CALLS for rank in self._router.addresses.get(name, ()))

    def _models(self) -> list[dict[str, Any]]:
        models = self._router.models
        names = sorted({models.base(name) for name in models.names})
        return [{"name": name, "tokenizer": self._tokenizer(name)} for name in names]

    def _engines(self) -> list[dict[str, Any]]:
        return [
            {"name": engine.name, "url": engine.url}
            | ({"api_key": f"${{{ENGINE_KEY}}}"} if engine.api_key is not None else {})
            for engine in self._config.engines
        ]
