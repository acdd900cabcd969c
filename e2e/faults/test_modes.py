"""Every mode of `modes.py` on an engine beside a healthy one: what clients get, and what the gateway makes of it.

All modes run before the first test, many at once, each on an engine and a model of its own behind one gateway. A
healthy engine serves all models but those of engines that hang. Each of these has a healthy one of its own: calls that
a given-up engine leaves come all at once, and an engine that is still silent would get new calls beside them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial

import pytest

from e2e.faults.findings import Asked, Finding, Trial, run_all, wrong_calls
from e2e.faults.fleet import KEY, ScriptedServer
from e2e.faults.modes import MODES, Kinds, Mode
from e2e.faults.raw_client import Client
from e2e.faults.verdicts import complaints
from e2e.faults.watching import Watch
from e2e.server_process import Server
from e2e.servers import PATIENT, Launcher
from plait.gateway.membership.recovery import NOTHING_SAID

AT_ONCE, APART_S = 8, 0.3
SUCCESS_SHARE = 0.995
ON_PROBATION = 2
"""Calls that an engine may fail again: one whose streams break passes the call that tries it, which is not streamed."""

PORTS: set[int] = set()
all_modes = pytest.mark.parametrize("mode", MODES.values(), ids=MODES.keys())


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Finding]]:
    """What became of each mode, by name; the gateway and the engines run until the module's end."""
    folder = tmp_path_factory.mktemp("modes")
    faulty = ScriptedServer("faulty", {name: [name] for name in MODES}, folder)
    hanging = [name for name, mode in MODES.items() if mode.hangs]
    healthy = {f"beside_{name}": [name] for name in hanging} | {"well": [name for name in MODES if name not in hanging]}
    well = ScriptedServer("well", healthy, folder)
    entries = [engine.entry(**_key(MODES[name])) for name, engine in faulty.engines.items()]
    entries += [engine.entry() for engine in well.engines.values()]
    PORTS.update(engine.port for engine in (*faulty.engines.values(), *well.engines.values()))
    with ExitStack() as stack:
        stack.callback(well.stop)
        stack.callback(faulty.stop)
        launch = stack.enter_context(Launcher(folder))
        gateway = launch.gateway(entries, models=[], upstream=PATIENT)
        for server in (faulty, well, gateway):
            server.start()
        for server in (faulty, well, gateway):
            server.wait_until_ready()
        found = asyncio.run(_find(gateway, faulty, len(entries)))
        for line in gateway.log().splitlines():
            if '"engine failed a call"' in line and (name := json.loads(line)["engine"]) in found:
                found[name].failures.append(line)
        yield found


async def _find(gateway: Server, faulty: ScriptedServer, engines: int) -> dict[str, Finding]:
    found: list[Finding] = []
    async with Watch(gateway.port) as watch, Client(gateway.port) as client:
        are_up = await watch.until(lambda: len(watch.states) == engines and not any(map(watch.is_out, watch.states)))
        assert are_up is not None, "also the engines beside them have to be up"
        for modes, at_once in _in_turns():
            trials = [Trial(mode, faulty.engines[mode.name], client, watch).run for mode in modes]
            found += await run_all(trials, at_once, APART_S)
    return {finding.mode.name: finding for finding in found}


def _in_turns() -> Iterator[tuple[list[Mode], int]]:
    """The modes that run together, and how many at once.

    One with megabytes to send runs alone: it keeps the process of the faulty engines busy, and where these are slow,
    calls go to the healthy one.
    """
    hanging = [mode for mode in MODES.values() if mode.hangs]
    heavy = [mode for mode in MODES.values() if mode.heavy and not mode.hangs]
    yield [mode for mode in MODES.values() if not mode.hangs and not mode.heavy], AT_ONCE
    yield heavy, 1
    yield hanging, len(hanging)


def _key(mode: Mode) -> dict[str, str]:
    return {"api_key": KEY} if mode.asks_key else {}


@all_modes
def test_calls_that_can_succeed_do(findings: dict[str, Finding], mode: Mode) -> None:
    finding = findings[mode.name]
    wrong = list(wrong_calls(finding))
    assert len(wrong) <= (1 - SUCCESS_SHARE) * len(finding.calls), _shown(wrong)
    assert finding.hits > 0, "the mode never struck"


@all_modes
def test_clients_see_clean_answers(findings: dict[str, Finding], mode: Mode) -> None:
    seen = partial(complaints, engine_ports=frozenset(PORTS))
    found = {complaint for asked in findings[mode.name].all_calls for complaint in seen(asked.answer)}
    assert not found


@all_modes
def test_the_engine_is_given_up_if_it_is_at_fault(findings: dict[str, Finding], mode: Mode) -> None:
    finding = findings[mode.name]
    if mode.health == "none":
        assert not finding.was_out
    else:
        assert finding.out_s is not None, f"still {finding.state}"
        wrong = [asked for asked in finding.while_out if not asked.is_good]
        assert not [asked for asked in wrong if mode.succeeds.has(streamed=asked.is_streamed)], _shown(wrong)
        assert len(wrong) <= ON_PROBATION, _shown(wrong)


@all_modes
def test_the_engine_is_back_when_it_is_well(findings: dict[str, Finding], mode: Mode) -> None:
    finding = findings[mode.name]
    assert finding.back_s is not None, f"still {finding.state}"
    wrong = [asked for asked in finding.after[-16:] if not asked.is_good]
    assert not wrong, _shown(wrong)


@all_modes
def test_the_books_are_at_zero(findings: dict[str, Finding], mode: Mode) -> None:
    assert findings[mode.name].outstanding == 0


@pytest.mark.parametrize("mode", [mode for mode in MODES.values() if mode.status], ids=lambda mode: mode.name)
def test_what_the_caller_got_wrong_passes_through(findings: dict[str, Finding], mode: Mode) -> None:
    """The clients of the faulty engine see its status; those of the other engine are answered."""
    statuses = {asked.answer.status for asked in findings[mode.name].calls}
    assert mode.status in statuses
    assert statuses <= {200, mode.status}


@pytest.mark.parametrize("mode", [mode for mode in MODES.values() if mode.hangs], ids=lambda mode: mode.name)
def test_no_call_waits_for_an_engine_that_hangs(findings: dict[str, Finding], mode: Mode) -> None:
    """The engine is given up before a limit on its calls ends them."""
    assert not [failure for failure in findings[mode.name].failures if NOTHING_SAID in failure]
    assert not [asked for asked in findings[mode.name].calls if asked.answer.broken]


def _shown(wrong: Sequence[Asked]) -> str:
    """The first of them."""
    return f"{len(wrong)} wrong, such as {str(wrong[0])[:600] if wrong else ''}"


def test_every_kind_is_there() -> None:
    assert len(MODES) >= 45
    assert {mode.of for mode in MODES.values()} == {Kinds.BOTH, Kinds.WHOLE, Kinds.STREAMED}
