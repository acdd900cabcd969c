"""`[placement] policy` and `options`: a name that the gateway knows, or `package.module:name` of one's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.gateway.cli import main
from plait.gateway.config.file import ConfigError, parse_config
from plait.policy.placement.policies import POLICIES, Policy

KNOWN = '"plait", "e2", "round_robin", "least_outstanding"'
ENGINE = '[[engines]]\nurl = "http://127.0.0.1:9"\n'

OWN = """
from plait.policy.placement.policies import POLICIES, Policy

value = POLICIES["e2"]
number = 1

def new(title="none", **more):
    return Policy("own", title, value.place, **more)

def wrong():
    return "e2"

def broken():
    raise ValueError("a\\nb")
"""


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of somebody."""
    (tmp_path / "own_policies.py").write_text(OWN, encoding="utf-8")
    (tmp_path / "own_mistake.py").write_text("def new(:", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)


def made(**placement: object) -> Policy:
    sections = {"placement": placement, "engines": [{"url": "http://a:1"}]}
    return parse_config(sections, "test").placement.new_policy()


@pytest.mark.parametrize("name", POLICIES)
def test_a_known_name(name: str) -> None:
    assert made(policy=name) is POLICIES[name]


def test_one_of_ones_own_is_a_policy_or_makes_one_of_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TITLE", "mine")
    assert made(policy="own_policies:value") is POLICIES["e2"]
    assert made(policy="own_policies:new").title == "none"
    assert str(made(policy="own_policies:new", options={"title": [{"of": "${TITLE}"}]}).title) == "[{'of': 'mine'}]"
    policy = made(policy="own_policies:new", options={"title": "${TITLE}", "keeps_sessions": True})
    assert (policy.title, policy.keeps_sessions, policy.moves_waiting) == ("mine", True, False)


@pytest.mark.parametrize(
    ("placement", "problem"),
    [
        ({"policy": "e3"}, f'policy = "e3": expected one of {KNOWN}, or package.module:name of your own'),
        (
            {"policy": "e2", "options": {"a": 1}},
            'options = (a table): expected none, because policy = "e2" takes none',
        ),
        ({"options": 1}, "options = (hidden): expected a table"),
        (
            {"policy": "own_policies:none"},
            (
                'policy = "own_policies:none": cannot be loaded: AttributeError: '
                "module 'own_policies' has no attribute 'none'"
            ),
        ),
        (
            {"policy": "own_absent:new"},
            "policy = \"own_absent:new\": cannot be loaded: ModuleNotFoundError: No module named 'own_absent'",
        ),
        ({"policy": "own_policies:broken"}, 'policy = "own_policies:broken": cannot be loaded: ValueError: a b'),
        (
            {"policy": "own_policies:wrong"},
            'policy = "own_policies:wrong": expected a Policy or what returns one, not str',
        ),
        (
            {"policy": "own_policies:value", "options": {"a": 1}},
            "policy = \"own_policies:value\": cannot be loaded: TypeError: 'Policy' object is not callable",
        ),
    ],
)
def test_what_is_wrong_is_said(placement: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        made(**placement)
    assert str(caught.value) == f"test: placement.{problem}"


@pytest.mark.parametrize("name", ["e3", "own_absent:new", "own_mistake:new", "own_policies:broken"])
@pytest.mark.parametrize("command", ["check-config", "serve"])
def test_a_command_says_it_in_one_line(
    command: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.toml"
    config.write_text(f'[placement]\npolicy = "{name}"\n{ENGINE}')
    assert main([command, "--config", str(config)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f'config.toml: placement.policy = "{name}": ' in line


def test_a_comparison_refuses_an_unknown_name_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--compare", "--policies", "plait,e3"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f'policy = "e3": expected one of {KNOWN}, "session_hash", "smg", "llmd", or package.module:name' in line
