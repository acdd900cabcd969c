"""Engines without the adapter whose streams are silent, as while a tool parser holds arguments back, and that are well.

All cases run at the same time before the first test, each on two engines and a model of its own.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Final

import pytest

from e2e.faults.fleet import ScriptedEngine, ScriptedServer
from e2e.faults.raw_client import CHAT, Answer, Client
from e2e.faults.verdicts import is_good, signs_of_life
from e2e.faults.watching import POLL_S, Watch
from e2e.servers import PATIENT, Launcher
from tests.waiting import WITHIN_S

SIGN_OF_LIFE_S: Final = 15.0
"""A client of a silent stream hears something so often, in the mean: after 10 s, by a look once a second, or later."""
CALLS_APART_S: Final = 0.25
SILENCES_S: Final = (9.0, 30.0, *((120.0,) if "PLAIT_NIGHTLY" in os.environ else ()))


@dataclass(frozen=True)
class Case:
    """So many streams are silent. `others` says that other calls go on beside them, and `grammar` that they have one.

    The engines count what they compute if they have `metrics`. If it `hangs`, the one that has the stream computes
    nothing any more.
    """

    name: str
    streams: int
    silence: dict[str, float]
    metrics: bool
    others: bool = False
    grammar: bool = False
    hangs: bool = False


@dataclass
class Found:
    """The answers to a case's streams and other calls, and the calls that its engines got.

    `out_s` is when one of the engines took no more calls, in seconds since the case began; None: each always did.
    """

    answers: list[Answer] = field(default_factory=list)
    others: list[bool] = field(default_factory=list)
    got: int = 0
    out_s: float | None = None


def _cases(*, metrics: bool) -> Iterator[Case]:
    kind = "metrics" if metrics else "plain"
    for silent_s in SILENCES_S:
        middle, first = {"middle_s": silent_s}, {"first_s": silent_s}
        yield Case(f"one_{silent_s:g}_{kind}", 1, middle, metrics)
        yield Case(f"six_{silent_s:g}_{kind}", 6, middle, metrics)
        yield Case(f"beside_{silent_s:g}_{kind}", 3, middle, metrics, others=True)
        if silent_s <= 30:
            yield Case(f"first_{silent_s:g}_{kind}", 6, first, metrics)
            yield Case(f"grammar_{silent_s:g}_{kind}", 2, first, metrics, others=True, grammar=True)
    yield Case(f"hangs_{kind}", 1, {"middle_s": 20 * WITHIN_S}, metrics, hangs=True)


CASES: Final = [case for metrics in (False, True) for case in _cases(metrics=metrics)]
SILENT: Final = [case for case in CASES if not case.hangs]


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Found]]:
    """What became of each case, by name; the gateway and the engines run until the module's end."""
    folder = tmp_path_factory.mktemp("silent")
    servers = [_engines(folder, metrics=metrics) for metrics in (False, True)]
    engines = {name: engine for server in servers for name, engine in server.engines.items()}
    with ExitStack() as stack:
        for server in servers:
            stack.callback(server.stop)
        launch = stack.enter_context(Launcher(folder))
        entries = [engine.entry() for engine in engines.values()]
        gateway = launch.gateway(entries, models=[], upstream=PATIENT)
        for each in (*servers, gateway):
            each.start()
        for each in (*servers, gateway):
            each.wait_until_ready()
        yield asyncio.run(_find(gateway.port, engines))


def _engines(folder: Any, *, metrics: bool) -> ScriptedServer:
    names = {f"{side}_{case.name}": [case.name] for case in CASES if case.metrics is metrics for side in "ab"}
    return ScriptedServer(f"engines_{metrics}", names, folder, *(["--metrics"] if metrics else []))


async def _find(port: int, engines: dict[str, ScriptedEngine]) -> dict[str, Found]:
    async with Watch(port) as watch, Client(port, timeout_s=SILENCES_S[-1] + 2 * WITHIN_S) as client:
        assert await watch.until(lambda: all(watch.state(name) == "up" for name in engines)) is not None
        trials = [_run(case, [engines[f"{side}_{case.name}"] for side in "ab"], client, watch) for case in CASES]
        found = await asyncio.gather(*trials)
    return {case.name: one for case, one in zip(CASES, found, strict=True)}


async def _run(case: Case, engines: Sequence[ScriptedEngine], client: Client, watch: Watch) -> Found:
    found, begun_s = Found(), time.monotonic()
    streams = [asyncio.create_task(client.post(CHAT, _body(case, at, case.silence))) for at in range(case.streams)]
    if case.hangs:
        found.out_s = await _hang(engines, watch)
    while case.others and not all(stream.done() for stream in streams):
        asked = _body(case, 100 + len(found.others), {})
        found.others.append(is_good(asked, await client.post(CHAT, asked)))
        await asyncio.sleep(CALLS_APART_S)
    found.answers = [await stream for stream in streams]
    if not case.hangs:
        found.out_s = 0.0 if any(watch.was_out(engine.name, begun_s) for engine in engines) else None
    stats = [await engine.stats() for engine in engines]
    found.got = sum(stat["begun"] - stat["trials"] for stat in stats)
    return found


async def _hang(engines: Sequence[ScriptedEngine], watch: Watch) -> float | None:
    """The engine that has the stream computes nothing any more. Returns after how many seconds it is out."""
    async with asyncio.timeout(WITHIN_S):
        while not (having := [engine for engine in engines if (await engine.stats())["open"]]):  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)
    (stuck,) = having
    await stuck.set_mode("hang_request")
    return await watch.until(lambda: watch.is_out(stuck.name))


def _body(case: Case, number: int, silence: dict[str, float]) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"Question {number}?"}]
    body: dict[str, Any] = {"model": case.name, "messages": messages, "max_tokens": 4_096, "stream": True}
    grammar = {"response_format": {"type": "json_object"}} if case.grammar and silence else {}
    return {**body, **grammar, "silence": silence}


@pytest.mark.parametrize("case", SILENT, ids=lambda case: case.name)
def test_no_stream_is_cut_and_no_call_is_computed_twice(findings: dict[str, Found], case: Case) -> None:
    found = findings[case.name]
    wrong = [one for at, one in enumerate(found.answers) if not is_good(_body(case, at, case.silence), one)]
    assert not wrong
    assert found.out_s is None
    assert all(found.others)
    assert found.got == case.streams + len(found.others)


@pytest.mark.parametrize("case", SILENT, ids=lambda case: case.name)
def test_its_client_hears_something(findings: dict[str, Found], case: Case) -> None:
    (silence_s,) = case.silence.values()
    for answer in findings[case.name].answers:
        assert signs_of_life(answer) >= silence_s // SIGN_OF_LIFE_S


@pytest.mark.parametrize("case", [case for case in CASES if case.hangs], ids=lambda case: case.name)
def test_an_engine_that_is_stuck_is_out_and_its_stream_ends(findings: dict[str, Found], case: Case) -> None:
    """The engine still lists its models, and computes nothing."""
    found = findings[case.name]
    assert found.out_s is not None
    assert b'"code":"engine_lost"' in found.answers[0].body
