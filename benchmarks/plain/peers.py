"""Other routers for `python -m benchmarks dataplane`: released packages in an environment of their own."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from e2e.ports import free_port

VENV: Final = Path(__file__).parents[2] / ".venv-peers"
RELEASES: Final = ("sglang-router==0.3.2", "vllm-router==0.1.17", "smg==1.13.0")


@dataclass(frozen=True, slots=True)
class Peer:
    """A router of another project, by the name of its program, and its policy."""

    program: str
    policy: str
    words: tuple[str, ...] = ("launch",)

    def command(self, engines: Sequence[str], port: int) -> list[str]:
        """How it is started over the engines' addresses."""
        where = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
        return [
            str(VENV / "bin" / self.program),
            *self.words,
            *where,
            "--policy",
            self.policy,
            "--worker-urls",
            *engines,
        ]


PEERS: Final[Mapping[str, Peer]] = {
    "sglang-router, cache aware": Peer("sglang-router", "cache_aware"),
    "vllm-router, cache aware": Peer("vllm-router", "cache_aware", ()),
    "smg, cache aware": Peer("smg", "cache_aware"),
    "vllm-router, round robin": Peer("vllm-router", "round_robin", ()),
}
NGINX: Final = "nginx"
"""The floor: it reads no body. It is measured where it is installed."""


def environment() -> None:
    """Install the releases, once."""
    done = VENV / ".installed"
    if done.exists() and done.read_text() == str(RELEASES):
        return
    shutil.rmtree(VENV, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=True)  # noqa: S603 - a Python of ours
    pip = [str(VENV / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, *RELEASES], check=True)  # noqa: S603 - releases with their versions
    done.write_text(str(RELEASES))


def has_nginx() -> bool:
    """Whether it is installed."""
    return _nginx() is not None


def nginx_command(engines: Sequence[str], folder: Path, port: int) -> list[str]:
    """How nginx is started as a proxy."""
    servers = "".join(f"server {engine.removeprefix('http://')};" for engine in engines)
    return nginx(
        folder,
        f"upstream engines {{ {servers} keepalive 512; }}"
        f"server {{ listen 127.0.0.1:{port}; keepalive_requests 1000000; location / {{ proxy_pass http://engines;"
        'proxy_http_version 1.1; proxy_set_header connection ""; proxy_buffering off; } }',
    )


def nginx(folder: Path, settings: str) -> list[str]:
    """How nginx is started with its files in the folder, and these settings of HTTP. Raises RuntimeError without it."""
    path = _nginx()
    if path is None:
        raise RuntimeError("nginx is not installed")
    temporary = "".join(
        f"{kind}_temp_path {folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (folder / "nginx.conf").write_text(
        f"daemon off; worker_processes 1; pid {folder}/nginx.pid; error_log {folder}/nginx.log;"
        "events { worker_connections 4096; }"
        f"http {{ access_log off; client_max_body_size 64m; client_body_buffer_size 1m; {temporary} {settings} }}"
    )
    return [path, "-p", str(folder), "-c", str(folder / "nginx.conf")]


def _nginx() -> str | None:
    return shutil.which(NGINX) or shutil.which(NGINX, path="/usr/sbin")
