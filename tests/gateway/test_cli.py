"""The `plait` command where not all of its packages are installed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import pytest

from plait.gateway.cli import COMMANDS, OF_CLI, main
from tests.extras import distributions_of, modules_of

BLOCKED = {module for name in distributions_of("gateway") for module in modules_of(name)}
"""What the extra brings, by the names of its imports."""


OF_OPERATORS = {module for name in distributions_of("cli") for module in modules_of(name)}
"""What the extra `cli` brings of that."""

ASKING = {
    "status": ["http://127.0.0.1:1", "--key=k"],
    "top": ["http://127.0.0.1:1", "--key=k"],
    "drain": ["a", "--url=http://127.0.0.1:1", "--key=k"],
    "keys": ["list", "--url=http://127.0.0.1:1", "--key=k"],
    "usage": ["--url=http://127.0.0.1:1", "--key=k"],
    "explain": ["an-id", "--url=http://127.0.0.1:1", "--key=k"],
}
"""Commands of `cli` that ask a gateway, with arguments to ask one that is not there."""


def in_base(program: str, brought: Collection[str] = ()) -> subprocess.CompletedProcess[str]:
    """Run a program where the gateway's packages are not there, but for what is `brought`."""
    code = f"import sys; sys.modules.update(dict.fromkeys({sorted(BLOCKED.difference(brought))})); {program}"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_the_gateways_packages_are_known() -> None:
    assert {"jinja2", "re2", "starlette", "structlog", "uvicorn", "uvloop"} <= BLOCKED
    assert not {"httpx", "msgspec", "plait"} & BLOCKED


@pytest.mark.parametrize("command", sorted(COMMANDS.keys() - {"batch", "drain", "explain", "keys", "usage"}))
def test_a_command_of_the_gateway_says_what_to_install(command: str) -> None:
    run = in_base(f"from plait.gateway.cli import main; sys.exit(main(['{command}']))")
    assert (run.returncode, run.stdout) == (2, "")
    first, *more = run.stderr.splitlines()
    assert first.startswith(f"plait: {command} needs ")
    extra = "cli" if command in OF_CLI else "gateway"
    assert first.endswith(f", which is not installed: pip install 'plait[{extra}]'")
    assert not more


@pytest.mark.parametrize("command", ASKING)
def test_what_asks_a_gateway_needs_no_other_package_of_it(command: str) -> None:
    run = in_base(f"from plait.gateway.cli import main; sys.exit(main({[command, *ASKING[command]]}))", OF_OPERATORS)
    assert (run.returncode, run.stdout) == (2, "")
    said = "top needs a terminal" if command == "top" else "does not answer as a gateway does"
    assert said in run.stderr


def test_without_the_gateway_a_shell_completes_what_can_run() -> None:
    run = in_base("from plait.gateway.cli import main; sys.exit(main(['completion', 'bash']))", OF_OPERATORS)
    assert (run.returncode, run.stderr) == (0, "")
    assert "--dry-run" in run.stdout
    assert "--workers" not in run.stdout
    assert {*ASKING, "batch", "completion"} == OF_CLI


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


@pytest.mark.parametrize("arguments", [["--body"], ["some-id", "--log"]])
def test_a_missing_file_is_one_line_with_its_name(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "missing"
    assert main(["explain", *arguments, str(missing)]) == 2
    assert capsys.readouterr().err == f"plait: {missing}: No such file or directory\n"


def test_a_body_that_is_no_json_is_one_line_with_its_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    body = tmp_path / "body"
    for content in (b"{", b"\xff"):
        body.write_bytes(content)
        assert main(["explain", "--body", str(body)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"plait: {body} is no JSON: ")


def test_a_reader_that_has_read_enough_is_no_error() -> None:
    command = [sys.executable, "-m", "plait.gateway.cli", "explain", "waiting"]
    reader, writer = os.pipe()
    os.close(reader)
    run = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (run.returncode, run.stderr) == (128 + signal.SIGPIPE, b"")


def test_a_job_that_a_shell_started_in_the_background_ends_by_an_interrupt() -> None:
    wait = "import plait.gateway.commands.explain as e, time; e.run = lambda _: (print(flush=True), time.sleep(60))"
    code = f"import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); {wait}; "
    code += "from plait.gateway.cli import main; sys.exit(main(['explain', 'waiting']))"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130


@pytest.mark.parametrize("code", ["overloadd", "invalid_request_error", "waiting"])
def test_a_code_or_nearly_one_needs_no_gateway(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["explain", code, "--key", "k", "--url", "http://127.0.0.1:1"])
    printed = capsys.readouterr()
    assert status == (2 if code == "overloadd" else 0)
    assert ("Did you mean overloaded?" in printed.err) if status else printed.out.startswith(f"{code}: HTTP 4")


@pytest.mark.parametrize("arguments", ["serve http://e:1 --port 65536", "engine --port 99999", "demo --engine-port 0"])
def test_a_number_that_is_no_port_is_refused(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments.split())
    assert "port: expected a " in capsys.readouterr().err
