"""What the programs share: where the gateway is, what they ask it, and how they say which features work.

A program runs in the environment of its client. For each feature it prints one line of JSON: the feature's name,
whether it works, why not, and when it ended, as Unix time in seconds.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

URL: Final = os.environ["PLAIT_URL"]
V1: Final = f"{URL}/v1"
KEY: Final = os.environ["PLAIT_KEY"]
LIMITED_KEY: Final = os.environ["PLAIT_LIMITED_KEY"]
"""Of a tenant that gets 429 after a few calls."""
WRONG_KEY: Final = "wrong-key"
MODEL: Final = "demo"
WRONG_MODEL: Final = "no-such-model"

PICTURE: Final = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
"""One pixel, as base64 of a PNG."""
PICTURE_URL: Final = f"data:image/png;base64,{PICTURE}"

PLACE_SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {"place": {"type": "string"}},
    "required": ["place"],
    "additionalProperties": False,
}

MAX_LIMITED_CALLS: Final = 50

Feature = Callable[[], object]

_features: list[tuple[str, Feature]] = []


def feature(name: str) -> Callable[[Feature], Feature]:
    """Enter a function that uses a feature: it raises if the feature does not work. It may be a coroutine function."""

    def enter(use: Feature) -> Feature:
        _features.append((name, use))
        return use

    return enter


def refused(kind: type[BaseException], ask: Callable[[], object]) -> BaseException:
    """The error of this kind that `ask` raises; raises `AssertionError` if it does not."""
    try:
        ask()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


async def refused_later(kind: type[BaseException], asking: Awaitable[object]) -> BaseException:
    """The error of this kind that `asking` raises; raises `AssertionError` if it does not."""
    try:
        await asking
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


def until_refused(kind: type[BaseException], ask: Callable[[], object]) -> None:
    """Ask until the limit on calls is reached."""
    for _ in range(MAX_LIMITED_CALLS):
        try:
            ask()
        except kind:
            return
    raise AssertionError(f"no {kind.__name__} in {MAX_LIMITED_CALLS} calls")


def run() -> None:
    """Use each feature in turn, and say which work. All coroutine functions run on one event loop."""
    with asyncio.Runner() as runner:
        for name, use in _features:
            _say(name, _outcome(use, runner))


def run_at_once() -> None:
    """Use all features at the same time, and say which work. None of them is a coroutine function."""
    with asyncio.Runner() as runner, ThreadPoolExecutor(len(_features)) as threads:
        outcomes = [(name, threads.submit(_outcome, use, runner)) for name, use in _features]
        for name, outcome in outcomes:
            _say(name, outcome.result())


def _say(name: str, outcome: dict[str, object]) -> None:
    sys.stdout.write(json.dumps({"feature": name, **outcome, "ended_unix_s": time.time()}) + "\n")
    sys.stdout.flush()


def _outcome(use: Feature, runner: asyncio.Runner) -> dict[str, object]:
    try:
        returned = use()
        if inspect.iscoroutine(returned):
            runner.run(returned)
    except Exception as error:  # noqa: BLE001 -- whatever a client raises is why the feature does not work
        return {"ok": False, "detail": f"{type(error).__name__}: {error}"[:2_000]}
    return {"ok": True, "detail": ""}
