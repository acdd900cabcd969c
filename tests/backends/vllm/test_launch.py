"""`plait vllm -- ...`: the command that it becomes."""

from __future__ import annotations

import json
import sys

import pytest

from plait.backends.adapter.launch_arguments import LaunchError
from plait.backends.vllm.launch import MIDDLEWARE, SCHEDULER, main, serve_command

OURS = ["--scheduler-cls", SCHEDULER, "--middleware", MIDDLEWARE]
DETAILS = "--enable-prompt-tokens-details"


def served(*arguments: str) -> list[str]:
    command = serve_command(arguments)
    assert command[:4] == [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"]
    return command[4:]


def test_our_flags_are_added_behind_the_users() -> None:
    assert served("--", "model", "--port", "8001") == ["model", "--port", "8001", *OURS, DETAILS]


def test_serve_may_be_said() -> None:
    assert served("--", "serve", "model", DETAILS) == ["model", DETAILS, *OURS]


@pytest.mark.parametrize("own", [["--scheduler", "fcfs", "--name=one"], ["--scheduler=fcfs", "--name", "one"]])
@pytest.mark.parametrize(
    "given",
    [
        ["--additional-config", '{"a": 1, "plait": {"name": "x", "profile": "a100"}}'],
        ['--additional_config={"a":1}'],
    ],
)
def test_our_settings_are_merged_into_vllms(own: list[str], given: list[str]) -> None:
    arguments = served(*own, "--", "model", *given, "--port", "1")
    assert arguments[:3] == ["model", "--port", "1"]
    config = json.loads(arguments[arguments.index("--additional-config") + 1])
    assert config["a"] == 1
    assert config["plait"] | {"profile": "a100"} == {"scheduler": "fcfs", "name": "one", "profile": "a100"}
    assert sum(argument.startswith("--additional") for argument in arguments) == 1


def test_the_tier_that_is_required_is_a_setting() -> None:
    arguments = served("--require", "chunks", "--", "model")
    assert json.loads(arguments[arguments.index("--additional-config") + 1]) == {"plait": {"require": "chunks"}}


def test_without_settings_of_ours_vllms_are_left_alone() -> None:
    assert served("--", "model", "--additional-config", "{}")[:3] == ["model", "--additional-config", "{}"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["model"], "after --"),
        (["--port", "1", "--", "model"], "--port is not an option"),
        (["--scheduler", "--", "model"], "--scheduler needs a value"),
        (["--", "model", "--scheduler_cls=mine"], "leave it out"),
        (["--name", "a", "--", "model", "--additional-config", "{"], "not JSON"),
        (["--name", "a", "--", "model", "--additional-config", "[]"], "not a JSON object"),
        (["--name", "a", "--", "model", "--additional-config", '{"plait": 3}'], "plait is not a JSON object"),
        (["--name", "a", "--", "model", "--additional-config"], "needs a value"),
    ],
)
def test_what_cannot_be_started_is_refused(arguments: list[str], reason: str) -> None:
    with pytest.raises(LaunchError, match=reason):
        serve_command(arguments)


def test_help_is_printed_and_mistakes_end_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--help"])
    assert "plait vllm" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="after --"):
        main(["model"])


def test_the_process_becomes_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    became: list[tuple[str, list[str]]] = []
    monkeypatch.setattr("os.execv", lambda path, command: became.append((path, command)))
    with pytest.raises(SystemExit, match=r"^plait vllm: vLLM is not installed for .*: pip install 'plait\[vllm\]'$"):
        main(["--", "model"])
    monkeypatch.setattr("plait.backends.adapter.launch_arguments.find_spec", lambda _name: object())
    main(["--", "model"])
    assert became == [(sys.executable, serve_command(["--", "model"]))]
