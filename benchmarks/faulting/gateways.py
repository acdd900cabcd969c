"""The gateways that are compared, Plait and its peers, each with its default settings, and how they are started.

A peer has an environment of its own under `.venv-peers`, which `install` makes from the package index.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PEERS: Final = Path(__file__).parents[2] / ".venv-peers"
STOP_S: Final = 2.0
"""smg goes on for 5 s after SIGTERM, for load balancers to notice."""

Command = Callable[[Sequence[int], Sequence[str], Path], list[str]]
"""From two ports, the second for metrics, the engines' URLs and a folder for files."""


@dataclass(frozen=True, slots=True)
class Gateway:
    """`requirement` is what pip installs; it is empty for Plait."""

    name: str
    command: Command
    requirement: str = ""

    @property
    def is_installed(self) -> bool:
        """Whether it can be started."""
        return not self.requirement or _script(self.name).exists()


def plait(ports: Sequence[int], urls: Sequence[str], folder: Path, settings: str = "", server: str = "") -> list[str]:
    """Plait's command. In TOML, `server` are keys of that section, and `settings` are further sections."""
    lines = [f"[server]\nport = {ports[0]}\n{server}", '[log]\nlevel = "warning"']
    lines += [f'[[engines]]\nname = "e{number}"\nurl = "{url}"' for number, url in enumerate(urls)]
    path = folder / "plait.toml"
    path.write_text("\n".join([*lines, settings]) + "\n")
    return [sys.executable, "-m", "plait.gateway.cli", "serve", "--config", str(path)]


def _peer(name: str, *words: str) -> Command:
    def command(ports: Sequence[int], urls: Sequence[str], _folder: Path) -> list[str]:
        where = ["--host", "127.0.0.1", "--port", str(ports[0]), "--prometheus-port", str(ports[1])]
        return [str(_script(name)), *words, *where, "--log-level", "error", "--worker-urls", *urls]

    return command


def _script(name: str) -> Path:
    return PEERS / name / "bin" / name


PLAIT: Final = Gateway("plait", plait)
GATEWAYS: Final = (
    PLAIT,
    Gateway("sglang-router", _peer("sglang-router", "launch"), "sglang-router==0.3.2"),
    Gateway("smg", _peer("smg", "launch"), "smg"),
    Gateway("vllm-router", _peer("vllm-router"), "vllm-router==0.1.17"),
)


def install() -> None:
    """Install the peers that are not installed yet."""
    for gateway in GATEWAYS:
        if not gateway.is_installed:
            folder = PEERS / gateway.name
            venv.create(folder, with_pip=True)
            subprocess.run([folder / "bin" / "pip", "install", "--quiet", gateway.requirement], check=True)  # noqa: S603


def versions() -> dict[str, str]:
    """The installed peers' versions, by name."""
    found = {}
    for gateway in GATEWAYS:
        if gateway.requirement and gateway.is_installed:
            code = f"import importlib.metadata as m; print(m.version({gateway.name!r}))"
            command = [str(PEERS / gateway.name / "bin" / "python"), "-c", code]
            found[gateway.name] = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()  # noqa: S603
    return found


@contextmanager
def process(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A server, stopped at the end of the context. What it says goes to `log`."""
    with log.open("ab") as out:
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out)  # noqa: S603
    try:
        yield server
    finally:
        server.terminate()
        try:
            server.wait(STOP_S)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
