"""`plait completion`: the script of each shell has all commands with their options, and no key."""

from __future__ import annotations

import re
import subprocess

import pytest

from plait.gateway.cli import COMMANDS, LAUNCHERS, main

OPTIONS = {"drain": "--dry-run", "explain": "--without", "serve": "--config", "status": "--json", "demo": "--compare"}


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_commands_and_their_options_complete(
    shell: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLAIT_ADMIN_KEY", "a-secret")
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(re.search(rf"\b{name}\b", script) for name in (COMMANDS | LAUNCHERS))
    assert all(option.strip("-") in script for option in OPTIONS.values())
    assert "a-secret" not in script


def completed(script: str, *words: str) -> set[str]:
    """The words that bash offers for the last one."""
    line = " ".join(words)
    program = (
        f"{script}\nCOMP_WORDS=({line}{' ' if words[-1] else chr(39) * 2})\nCOMP_CWORD={len(words) - 1}\n"
        f"COMP_LINE='{line}'\nCOMP_POINT=${{#COMP_LINE}}\n_shtab_plait\nprintf '%s\\n' \"${{COMPREPLY[@]}}\""
    )
    run = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True)
    return set(run.stdout.split())


def test_bash_completes_by_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    main(["completion", "bash"])
    script = capsys.readouterr().out
    assert completed(script, "plait", "st") == {"status"}
    assert {"--wait", "--undo", "--dry-run", "--url", "--key"} <= completed(script, "plait", "drain", "--")
    assert completed(script, "plait", "completion", "z") == {"zsh"}


def test_a_shell_that_is_none_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["completion", "cmd"])
    assert "invalid choice" in capsys.readouterr().err
