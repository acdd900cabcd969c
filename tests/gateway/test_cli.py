"""The `plait` command where not all of its packages are installed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from plait.gateway.cli import COMMANDS
from tests.extras import distributions_of, modules_of

BLOCKED = {module for name in distributions_of("gateway") for module in modules_of(name)}
"""What the extra brings, by the names of its imports."""


def in_base(program: str) -> subprocess.CompletedProcess[str]:
    """Run a program where the gateway's packages are not there."""
    code = f"import sys; sys.modules.update(dict.fromkeys({sorted(BLOCKED)})); {program}"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_the_gateways_packages_are_known() -> None:
    assert {"jinja2", "re2", "starlette", "structlog", "uvicorn", "uvloop"} <= BLOCKED
    assert not {"httpx", "msgspec", "plait"} & BLOCKED


@pytest.mark.parametrize("command", sorted(COMMANDS.keys() - {"drain", "explain"}))
def test_a_command_of_the_gateway_says_what_to_install(command: str) -> None:
    run = in_base(f"from plait.gateway.cli import main; sys.exit(main(['{command}']))")
    assert (run.returncode, run.stdout) == (2, "")
    first, *more = run.stderr.splitlines()
    assert first.startswith(f"plait: {command} needs ")
    assert first.endswith(", which is not installed: pip install 'plait[gateway]'")
    assert not more


def test_an_engine_is_drained_without_the_gateways_packages() -> None:
    run = in_base(
        "from plait.gateway.cli import main; sys.exit(main(['drain', 'a', '--key=k', '--url=http://127.0.0.1:1']))"
    )
    assert (run.returncode, run.stdout) == (2, "")
    assert "does not answer as a gateway does" in run.stderr


@pytest.mark.parametrize("arguments", ["--help", "--version", "explain waiting"])
def test_what_needs_no_gateway_does_without_it(arguments: str) -> None:
    run = in_base(f"from plait.gateway.cli import main; sys.exit(main({arguments.split()}))")
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout


def test_a_module_of_our_own_that_is_missing_is_a_defect() -> None:
    program = "sys.modules['plait.gateway.commands.serve'] = None; from plait.gateway.cli import main; main(['serve'])"
    run = subprocess.run([sys.executable, "-c", f"import sys; {program}"], capture_output=True, text=True, check=False)
    assert "ModuleNotFoundError" in run.stderr


@pytest.mark.parametrize(
    "module",
    [
        "plait.client",
        *("plait.backends.vllm.launch", "plait.backends.vllm.plugin", "plait.backends.vllm.middleware"),
        *("plait.backends.sglang.launch", "plait.backends.sglang.plugin", "plait.backends.sglang.route"),
    ],
)
def test_client_and_adapters_do_with_the_base(module: str) -> None:
    run = in_base(f"import {module}")
    assert (run.returncode, run.stderr) == (0, "")
