"""The recipe for a placement policy, of CONTRIBUTING and docs/placement.md, followed in a package of one's own."""

from __future__ import annotations

import re
import sys
from math import inf
from pathlib import Path

import pytest

import plait.gateway.kernel
import plait.lab.commands.demo
from plait.gateway.app import Gateway
from plait.gateway.cli import main
from plait.gateway.config.file import parse_config
from tests.gateway.admission.waiting_fleet import COMPUTED, WaitingFleet
from tests.source_tree import ROOT

TRAITS = ", keeps_sessions=True, moves_waiting=True"
NAMED = "mine.placing:new"


@pytest.fixture(params=[True, False], ids=["traits", "no traits"])
def has_traits(request: pytest.FixtureRequest, package: Path) -> bool:
    """Whether the policy keeps its traits."""
    if not request.param:
        source = package.read_text(encoding="utf-8")
        assert TRAITS in source
        package.write_text(source.replace(TRAITS, ""), encoding="utf-8")
    return bool(request.param)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The example of docs/placement.md in a package on the path."""
    text = (ROOT / "docs/placement.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    module = tmp_path / "mine" / "placing.py"
    module.parent.mkdir()
    module.write_text(example, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for name in ("mine", "mine.placing"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return module


class OwnGateway(WaitingFleet):
    """A gateway whose configuration names the policy, in virtual time. Its engines are x and y."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kv_tokens: int | None = None) -> None:
        super().__init__()
        monkeypatch.setattr(plait.gateway.kernel, "at_loop_time", self._at)
        engines = [{"name": name, "url": f"http://{name}"} for name in "xy"]
        config = parse_config(
            {
                "placement": {"policy": NAMED, "options": {"most_calls": 32}},
                "engines": [{**engine, "kv_tokens": kv_tokens} if kv_tokens else engine for engine in engines],
            },
            "test",
        )
        gateway = Gateway(config)
        self.router, self.admission = gateway.kernel.router, gateway.kernel.admission
        self.router.health.answered("x", {"m": None})


def test_a_waiting_call_is_moved_if_the_policy_lets_it(has_traits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = OwnGateway(monkeypatch)
    fleet.router.engines["x"].cache.others.apply([COMPUTED], (), 0.0, snapshot=True, blocks=False)
    calls = [fleet.enter("a", 60_000) for _ in range(3)]
    assert [fleet.engine_of(call) for call in calls] == ["x", "x", "x"]
    assert not calls[-1].is_sent
    fleet.router.health.answered("y", {"m": None})
    fleet.settle()
    assert ("y" in map(fleet.engine_of, calls)) == has_traits


def test_a_session_is_held_if_the_policy_keeps_it_where_its_context_is(
    has_traits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = OwnGateway(monkeypatch, kv_tokens=10_000)
    fleet.end(fleet.enter())
    for gate in fleet.admission.sessions.gates.values():
        gate.worth.is_closed, gate.worth.due_s = True, inf
    fleet.enter(tokens=6_000, session="first")
    assert fleet.enter(tokens=5_000, session="second").is_held == has_traits


def test_it_is_compared_with_what_ships(
    package: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plait.lab.commands.demo, "QUICK_CALLS", 40)
    monkeypatch.setattr(plait.lab.commands.demo, "configure_logging", lambda *_words: None)
    assert main(["demo", "--compare", "--quick", "--markdown", "--policies", f"plait,{NAMED}"]) == 0
    assert capsys.readouterr().out.startswith("| | plait | most cached |\n")
