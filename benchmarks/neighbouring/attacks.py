"""What the tenant that does not behave sends. Each attack is a process: `python -m benchmarks.neighbouring.attacks`.

It is given PORT, KEY, the attack's name and SECONDS, and prints how often each status was answered.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import socket
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count, cycle
from typing import Any, Final

from benchmarks.faulting.bad_clients import SHORT_MODEL
from e2e.faults.completions import LARGE_MODEL, LONG_MODEL
from e2e.faults.hostile_requests import LARGE_TEMPLATE, LOOPS
from e2e.faults.raw_client import CHAT, Client, request

MEBIBYTE: Final = 2**20
TIMEOUT_S: Final = 120.0
RECEIVE_BYTES: Final = 16 * 1024
LINE: Final = "A line of a long prompt, with words.\n"
STALLED_BYTES: Final = 31 * MEBIBYTE


@dataclass
class Attacker:
    """Where it attacks until when, and what it was answered."""

    port: int
    key: str
    ends_s: float
    answered: Counter[str] = field(default_factory=Counter)
    numbers: count[int] = field(default_factory=count)

    @property
    def headers(self) -> dict[str, str]:
        """Those of each request."""
        return {"authorization": f"Bearer {self.key}"}

    @property
    def goes_on(self) -> bool:
        """Whether there is time left."""
        return time.monotonic() < self.ends_s

    async def post(self, body: Mapping[str, Any], path: str = CHAT) -> None:
        """Send and wait."""
        async with Client(self.port, TIMEOUT_S) as client:
            answer = await client.post(path, body, self.headers)
        self.answered[str(answer.status or answer.broken)] += 1

    async def repeat(self, at_once: int, one: Callable[[], Awaitable[None]]) -> None:
        """Do it again and again, several at once."""

        async def work() -> None:
            while self.goes_on:
                await one()

        await asyncio.gather(*(work() for _ in range(at_once)))

    async def hold(self, connections: int, data: Callable[[], bytes]) -> None:
        """Open connections, send on each, and read nothing until the end."""
        loop, held = asyncio.get_running_loop(), []
        for _ in range(connections):
            own = socket.socket()
            own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
            own.setblocking(False)
            held.append(own)
            await loop.sock_connect(own, ("127.0.0.1", self.port))
        self.answered["connected"] = len(held)
        sending = [asyncio.create_task(loop.sock_sendall(own, data())) for own in held]
        await asyncio.sleep(self.ends_s - time.monotonic())
        for task in sending:
            task.cancel()
        for outcome in await asyncio.gather(*sending, return_exceptions=True):
            self.answered["sent" if outcome is None else type(outcome).__name__] += 1
        for own in held:
            own.close()


def chat(content: Any, model: str = LARGE_MODEL, **fields: Any) -> dict[str, Any]:
    """The body of a chat."""
    return {"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": 4, **fields}


async def _long_prompts(attacker: Attacker) -> None:
    text = LINE * (4 * MEBIBYTE // len(LINE))
    await attacker.repeat(12, lambda: attacker.post(chat(f"{next(attacker.numbers)} {text}")))


async def _one_word(attacker: Attacker) -> None:
    text = "a" * 4 * MEBIBYTE
    await attacker.repeat(2, lambda: attacker.post(chat(f"{next(attacker.numbers)} {text}")))


async def _loops(attacker: Attacker) -> None:
    await attacker.repeat(4, lambda: attacker.post(chat("Hi", chat_template=LOOPS)))


async def _large_templates(attacker: Attacker) -> None:
    await attacker.repeat(4, lambda: attacker.post(chat("Hi", chat_template=LARGE_TEMPLATE)))


async def _many_messages(attacker: Attacker) -> None:
    body = {**chat(""), "messages": [{"role": "user", "content": "a"}] * 900_000}
    await attacker.repeat(2, lambda: attacker.post(body))


async def _many_numbers(attacker: Attacker) -> None:
    body = {"model": LARGE_MODEL, "prompt": [1000] * 6_000_000, "max_tokens": 4}
    await attacker.repeat(2, lambda: attacker.post(body, "/v1/completions"))


async def _too_large(attacker: Attacker) -> None:
    text = LINE * (64 * MEBIBYTE // len(LINE))
    await attacker.repeat(4, lambda: attacker.post(chat(text)))


async def _refused(attacker: Attacker) -> None:
    async with Client(attacker.port, TIMEOUT_S) as client:

        async def one() -> None:
            answer = await client.post(CHAT, chat("Hi", "unknown"), attacker.headers)
            attacker.answered[str(answer.status)] += 1

        await attacker.repeat(16, one)


async def _over_the_context(attacker: Attacker) -> None:
    text = LINE * (4 * MEBIBYTE // len(LINE))
    await attacker.repeat(4, lambda: attacker.post(chat(text, SHORT_MODEL)))


async def _unread(attacker: Attacker) -> None:
    def data() -> bytes:
        number = next(attacker.numbers)
        headers = {**attacker.headers, "plait-session": f"s{number}", "plait-output": "text"}
        return request("POST", CHAT, chat(f"{number}", LONG_MODEL, stream=True), headers)

    await attacker.hold(64, data)


async def _idle(attacker: Attacker) -> None:
    await attacker.hold(5_000, lambda: b"")


async def _stalled(attacker: Attacker) -> None:
    head = f"POST {CHAT} HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {attacker.key}\r\n"
    data = f"{head}content-length: {STALLED_BYTES + 1}\r\n\r\n".encode() + b" " * STALLED_BYTES
    await attacker.hold(40, lambda: data)


async def _sessions(attacker: Attacker) -> None:
    async with Client(attacker.port, TIMEOUT_S) as client:

        async def one() -> None:
            session = f"s{next(attacker.numbers)}"
            value = {"session_id": session, "semantic_var_id": "x", "value": "x" * 20_000}
            answer = await client.post("/v1/variables", value, attacker.headers)
            attacker.answered[str(answer.status)] += 1

        await attacker.repeat(8, one)


async def _placeholders(attacker: Attacker) -> None:
    """Chats and programs in which a value of 1 B to 1 MB stands once to 3,000 times."""
    values = {f"v{size}": "x" * size for size in (1, 1_000, 30_000, MEBIBYTE)}
    for name, value in values.items():
        await attacker.post({"session_id": "s", "semantic_var_id": name, "value": value}, "/v1/variables")
    cases = cycle(itertools.product(values, (1, 30, 300, 2_000, 3_000)))

    async def one() -> None:
        name, times = next(cases)
        text = f"{{{{{name}}}}}" * times
        session = {"session": "s", "inputs": [name]}
        await attacker.post({**chat(text, SHORT_MODEL), "plait": session})
        call = {"model": SHORT_MODEL, "prompt": text + "{{o}}", "max_tokens": 4}
        call["placeholders"] = [{"name": name}, {"name": "o", "in_out": True}]
        await attacker.post({"values": {name: values[name]}, "calls": [call], "gets": {"o": None}}, "/v1/programs")

    await attacker.repeat(4, one)


async def _programs(attacker: Attacker) -> None:
    """Programs of one to 1,024 calls: all need one value, or each needs the one before, or all need the first."""
    shapes = cycle(itertools.product((1, 64, 1_024), (lambda _: "v", lambda n: f"o{n - 1}", lambda _: "o0")))

    async def one() -> None:
        calls, input_of = next(shapes)
        inputs = ["v", *(input_of(number) for number in range(1, calls))]
        program: dict[str, Any] = {"values": {"v": "Hello"}, "gets": {f"o{calls - 1}": "latency", "o0": None}}
        program["calls"] = [
            {
                "model": SHORT_MODEL,
                "prompt": f"Say {{{{{name}}}}} {number} {{{{o{number}}}}}",
                "max_tokens": 4,
                "placeholders": [{"name": name}, {"name": f"o{number}", "in_out": True}],
            }
            for number, name in enumerate(inputs)
        ]
        await attacker.post(program, "/v1/programs")

    await attacker.repeat(2, one)


@dataclass(frozen=True)
class Attack:
    """What is sent, in words and as a coroutine that sends it until the attacker's time is over.

    `measured_s` is how long its neighbour is measured: long enough for what happens rarely.
    """

    what: str
    run: Callable[[Attacker], Awaitable[None]]
    measured_s: float = 12.0


ATTACKS: Final[Mapping[str, Attack]] = {
    "long-prompts": Attack("12 prompts of 4 MiB at a time", _long_prompts),
    "one-word": Attack("2 prompts of one word of 4 MiB at a time", _one_word),
    "over-context": Attack("4 prompts of 4 MiB at a time, for a context of 32,768 tokens", _over_the_context),
    "template-loops": Attack("4 templates at a time that loop without end", _loops),
    "template-output": Attack("4 templates at a time that write 300 MB", _large_templates),
    "many-messages": Attack("2 bodies at a time with 900,000 messages in 25 MiB", _many_messages),
    "many-numbers": Attack("2 bodies at a time with 6,000,000 token ids in 29 MiB", _many_numbers),
    "too-large": Attack("4 bodies of 64 MiB at a time", _too_large),
    "stalled-bodies": Attack("40 bodies that stop after 31 MiB", _stalled),
    "refused": Attack("refused requests on 16 connections", _refused),
    "idle": Attack("5,000 idle connections", _idle),
    "unread": Attack("64 chained calls with 8 MiB of answer that nobody reads", _unread),
    "placeholders": Attack("4 prompts at a time with a value of 1 B to 1 MiB 1 to 3,000 times", _placeholders),
    "programs": Attack("2 programs at a time of 1 to 1,024 calls", _programs),
    # A full collection of that many sessions takes 0.2 s, and the gateway makes one in 40 s.
    "sessions": Attack("sessions with a value of 20 kB, on 8 connections", _sessions, measured_s=60.0),
}


async def main() -> None:
    """Attack, and print what was answered."""
    port, key, name, time_s = sys.argv[1:]
    os.nice(19)  # a client has its own machine: it takes no CPU time from the gateway
    attacker = Attacker(int(port), key, time.monotonic() + float(time_s))
    with suppress(TimeoutError):
        async with asyncio.timeout(float(time_s) + TIMEOUT_S):
            await ATTACKS[name].run(attacker)
    sys.stdout.write(json.dumps(attacker.answered))


if __name__ == "__main__":
    asyncio.run(main())
