"""The answers before an output are not computed again: the engine has them in its cache, whatever is written before."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest

from e2e.servers import Fleet, Launcher

OUTPUTS = ("code", "review", "tests")
ANSWER_TOKENS = 200
MOST_MISSED = 80
"""A block of the cache, and what stands between two outputs."""

_numbers = itertools.count()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with Launcher(tmp_path_factory.mktemp("answers")) as launch:
        engine = launch.engine("demo-1")
        fleet = Fleet(launch.gateway([engine]), {engine.name: engine})
        fleet.start()
        yield fleet


@pytest.mark.parametrize("chat", [True, False], ids=["chat", "text"])
@pytest.mark.parametrize("before", ["Code: ", "Code:\n", "Code:"], ids=["space", "line", "nothing"])
def test_each_step_finds_the_answers_before_it(fleet: Fleet, before: str, chat: bool) -> None:
    session = f"s{next(_numbers)}"
    prompt = f"Write a game, number {session}." + "".join(f"\n{before}{{{{{name}}}}}" for name in OUTPUTS)
    call = {
        "model": "demo",
        "prompt": prompt,
        "placeholders": [{"name": name, "in_out": True} for name in OUTPUTS],
        "chat": chat,
        "max_tokens": ANSWER_TOKENS,
        "ignore_eos": True,
    }
    gets = dict.fromkeys(OUTPUTS)
    answer = fleet.gateway.post("/v1/programs", json={"session": session, "calls": [call], "gets": gets}).json()
    assert not answer["errors"]
    lines: list[dict[str, Any]] = [json.loads(line) for line in fleet.gateway.log().splitlines() if '"call"' in line]
    steps = [line for line in lines if line["session"] == session]
    assert [line["output"] for line in steps] == list(OUTPUTS)
    missed = [line["prompt_tokens"] - line["cached_tokens"] for line in steps[1:]]
    assert all(0 < tokens <= MOST_MISSED for tokens in missed), missed
    if before.endswith(" "):
        assert all(value.startswith("This is emulated text.") for value in answer["values"].values())
