"""Real servers for the demo and the comparison in real time: processes on loopback, and calls at their times."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import httpx
import msgspec

from plait.backends.http.client import HttpClient, Response
from plait.gateway.answers.completions import CompletionStream
from plait.gateway.asgi import header
from plait.lab.simulation.compare import Workload
from plait.lab.simulation.simulate import CallRecord
from plait.lab.simulation.workload import WorkloadCall

MAX_CONNECTIONS = 1_000
"""More than a demo's calls and browsers need. `serve`'s default needs more file descriptors than many shells allow."""

START_DEADLINE_S = 60.0
STOP_DEADLINE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPlan:
    """The servers to start: `engines` embedded engines on ports from `engine_port` on, and a gateway before them.

    The gateway has an admin API if there is an `admin_key`.
    """

    port: int = 8000
    engine_port: int = 8101
    engines: int = 4
    model: str = "demo"
    policy: str = "plait"
    profile: str = "a6000-mistral-7b"
    kv_tokens: int
    block_tokens: int = 16
    time_scale: float = 1.0
    log_level: str = "warning"
    admin_key: str = ""

    @property
    def engine_ports(self) -> range:
        return range(self.engine_port, self.engine_port + self.engines)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def config(self) -> str:
        engines = "".join(
            f'[[engines]]\nname = "engine-{i}"\nurl = "http://127.0.0.1:{port}"\n'
            for i, port in enumerate(self.engine_ports)
        )
        admin = f'admin_key = "{self.admin_key}"\n' if self.admin_key else ""
        return (
            f"[server]\nport = {self.port}\ndrain_delay_s = 0\nmax_connections = {MAX_CONNECTIONS}\n{admin}"
            f'[log]\nlevel = "{self.log_level}"\n[placement]\npolicy = "{self.policy}"\n'
            f'[[models]]\nname = "{self.model}"\ntokenizer = "embedded"\nprofile = "{self.profile}"\n{engines}'
        )

    def engine_arguments(self, number: int) -> list[str]:
        return [
            "engine",
            f"--name=engine-{number}",
            f"--port={self.engine_ports[number]}",
            f"--model={self.model}",
            f"--profile={self.profile}",
            f"--kv-tokens={self.kv_tokens}",
            f"--block-tokens={self.block_tokens}",
            f"--time-scale={self.time_scale}",
        ]


@contextmanager
def running_fleet(plan: FleetPlan, stderr: IO[bytes] | None = None) -> Iterator[int]:
    """Engines and gateway, ready on entry, stopped on exit. Yields the gateway's process id.

    The servers write to `stderr`, by default this process's. The gateway starts last, because it warns of engines that
    do not answer. Raises ValueError if a server ends early, for example because its port is in use, or is not ready in
    time.
    """
    if plan.port in plan.engine_ports:
        raise ValueError(f"port {plan.port} is an engine's, too: choose others, by --port or --engine-port")
    _check_ports([plan.port, *plan.engine_ports])
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="plait-"))
        config = Path(folder, "config.toml")
        config.write_text(plan.config(), encoding="utf-8")
        servers = [stack.enter_context(_process(plan.engine_arguments(i), stderr)) for i in range(plan.engines)]
        deadline_s = time.monotonic() + START_DEADLINE_S
        _await(servers, lambda: all(_answers(port) for port in plan.engine_ports), deadline_s)
        servers.append(stack.enter_context(_process(["serve", f"--config={config}"], stderr)))
        _await(servers, lambda: _is_ready(plan), deadline_s)
        yield servers[-1].pid


@contextmanager
def _process(arguments: Sequence[str], stderr: IO[bytes] | None) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "plait.gateway.cli", *arguments]
    process = subprocess.Popen(command, stderr=stderr)  # noqa: S603 - our own command
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _check_ports(ports: Iterable[int]) -> None:
    """Raise ValueError for a port on which another process listens."""
    for port in ports:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except (OSError, OverflowError) as error:
                message = f"port {port} is in use. Stop what listens there, or choose others: --port, --engine-port"
                raise ValueError(message) from error


def _await(servers: Sequence[subprocess.Popen[bytes]], is_up: Callable[[], bool], deadline_s: float) -> None:
    """Wait until `is_up`. Raises ValueError if one of the servers ends before, or the time is over."""
    while time.monotonic() < deadline_s:
        if any(server.poll() is not None for server in servers):
            raise ValueError("a server ended before it was ready (see above); are the ports in use?")
        with suppress(httpx.TransportError):  # not listening yet
            if is_up():
                return
        time.sleep(0.1)
    raise ValueError(f"the servers were not ready within {START_DEADLINE_S:.0f} s; see their messages above")


def _answers(port: int) -> bool:
    return httpx.get(f"http://127.0.0.1:{port}/health").is_success


def _is_ready(plan: FleetPlan) -> bool:
    """Whether the gateway knows every engine of the fleet."""
    up: Mapping[str, int] = httpx.get(f"{plan.url}/ready").json()["engines_up"]
    return up.get(plan.model) == plan.engines


async def send_workload(
    plan: FleetPlan, workload: Workload, arrivals_s: Sequence[float], progress: Callable[[int], None]
) -> list[CallRecord]:
    """Begin each session of the workload at the plan's gateway, `arrivals_s` emulated seconds from now.

    The records are in the order of the calls; their times are emulated seconds too. Raises RuntimeError for a call that
    is not answered in full.
    """
    client = HttpClient(plan.url)
    loop = asyncio.get_running_loop()
    zero = loop.time()
    finished = 0

    def now_s() -> float:
        return (loop.time() - zero) * plan.time_scale

    async def send(numbers: Sequence[int], begins_s: float) -> list[CallRecord]:
        records: list[CallRecord] = []
        due_s = begins_s
        for number in numbers:
            call = workload.calls[number]
            due_s += call.think_s
            await asyncio.sleep((due_s - now_s()) / plan.time_scale)
            records.append(await _send(client, plan.model, call, now_s))
            due_s = records[-1].finished_s
            nonlocal finished
            finished += 1
            progress(finished)
        return records

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(send(*pair)) for pair in zip(workload.sessions(), arrivals_s, strict=True)]
    finally:
        await client.aclose()
    return [record for task in tasks for record in task.result()]


async def _send(client: HttpClient, model: str, call: WorkloadCall, now_s: Callable[[], float]) -> CallRecord:
    body = {
        "model": model,
        "messages": call.messages,
        "max_tokens": call.max_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if call.session:
        body["prompt_cache_key"] = call.session
    if call.tools is not None:
        body["tools"] = call.tools
    arrived_s = now_s()
    headers = [(b"content-type", b"application/json")]
    response = await client.request("POST", "/v1/chat/completions", headers, msgspec.json.encode(body))
    stream, first_token_s = CompletionStream("gateway", withhold=False), 0.0
    while piece := await response.read_chunk():
        first_token_s = first_token_s or now_s()
        stream.feed(piece)
    if response.status != 200 or stream.usage is None:
        raise RuntimeError(f"a call on {call.prefix} failed: status {response.status}, or an answer without usage")
    return CallRecord(
        prefix=call.prefix,
        engine_id=_header(response, b"plait-engine"),
        reason=_header(response, b"plait-placement"),
        prompt_tokens=stream.usage.prompt_tokens,
        output_tokens=stream.usage.output_tokens,
        predicted_cached_tokens=int(_header(response, b"plait-cached-tokens")),
        arrived_s=arrived_s,
        cached_tokens=stream.usage.cached_tokens or 0,
        first_token_s=first_token_s,
        finished_s=now_s(),
    )


def _header(response: Response, name: bytes) -> str:
    value = header(response.headers, name)
    if value is None:
        raise RuntimeError(f"the gateway's answer lacks its {name.decode()} header")
    return value
