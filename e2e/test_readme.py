"""The README's blocks run in their order, as a reader pastes them: commands, then programs."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from e2e.demo import demo, refused
from e2e.installed import copied_environment
from e2e.ports import free_port, free_ports
from e2e.server_process import Server, eventually

README: Final = Path(__file__).parents[1] / "README.md"
BLOCK: Final = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
MOST_LINES: Final = 120


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the first command makes, without a download of what it needs."""
    return copied_environment(Path(sys.executable), tmp_path_factory.mktemp("environment") / "copy")


def test_it_is_short() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= MOST_LINES


def test_its_blocks_run(python: Path, tmp_path: Path) -> None:
    blocks = BLOCK.findall(README.read_text(encoding="utf-8"))
    first, *rest = [text for language, text in blocks if language == ""]
    assert [line.partition("#")[0].strip() for line in first.splitlines()] == [
        "pip install '.[gateway]'",
        "plait demo",
    ]
    ports = free_ports(5)
    with demo(ports[0], ports[1], plait=python.with_name("plait")) as process:
        eventually(lambda: process.poll() is not None or not refused(ports[0]))
        url = f"http://127.0.0.1:{ports[0]}"
        call, program = [text for language, text in blocks if language == "python"]
        said = _run(python, call, url, tmp_path / "call.py").splitlines()
        assert re.fullmatch(r"engine-\d (explore|exploit) expected", said[0])
        assert said[1].startswith("This is emulated text.")
        assert _run(python, program, url, tmp_path / "program.py").startswith("This is emulated text.")

        (serve,) = [line for text in rest for line in text.splitlines() if line.startswith("plait serve ")]
        engines = iter(ports[1:])
        words = [
            re.sub(r"10\.0\.0\.\d+:8000", lambda _: f"127.0.0.1:{next(engines)}", word) for word in shlex.split(serve)
        ]
        port = free_port()
        gateway = Server(
            "served", port, [*words[1:], "--port", str(port)], tmp_path / "served.log", ready_path="/ready"
        )
        gateway.start()
        try:
            gateway.wait_until_ready()
            said = _run(python, call, gateway.url, tmp_path / "call.py").splitlines()
            assert said[0].endswith(" expected")
        finally:
            gateway.stop()


def _run(python: Path, program: str, url: str, script: Path) -> str:
    assert "http://127.0.0.1:8000" in program
    script.write_text(program.replace("http://127.0.0.1:8000", url))
    done = subprocess.run([str(python), str(script)], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout
