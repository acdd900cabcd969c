"""Calls of several tenants to random servers, and what their answers say was used."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Final

import msgspec

from e2e.accounts import Used, bearer, results
from e2e.faults.raw_client import CHAT, Answer, Client
from e2e.sdk import asking
from e2e.server_process import Server, eventually
from tests.waiting import SLOWNESS

AT_ONCE: Final = 8
LOST_S: Final = 1.0 + 0.5 * SLOWNESS
"""Usage is written once a second, and on a busy machine later."""


@dataclass(frozen=True, slots=True)
class Answered:
    """A whole answer: when it came, from which server, to whose call, and the usage in it."""

    at_s: float
    server: int
    tenant: str
    used: Used


@dataclass
class Load:
    """Sends calls to `servers`, of which some may die. `keys` has a key of each tenant."""

    servers: Sequence[Server]
    keys: Mapping[str, str]
    chance: random.Random
    answered: list[Answered] = field(default_factory=list)
    lost: list[Answered] = field(default_factory=list)
    """Those that a killed server may not have written."""
    problems: list[str] = field(default_factory=list)

    async def run(self, calls: int, disturb: Callable[[], Awaitable[None]] | None = None) -> None:
        """Send as many calls, each until it is answered; `disturb` begins while they run."""
        wanted, clients = iter(range(calls)), [Client(server.port) for server in self.servers]
        async with AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
            for client in clients:
                await stack.enter_async_context(client)
            for _ in range(AT_ONCE):
                tasks.create_task(self._send(wanted, clients))
            if disturb is not None:
                before = len(self.answered)
                while len(self.answered) < before + calls // 3:  # noqa: ASYNC110 - no event tells of it
                    await asyncio.sleep(0.01)
                await disturb()

    async def _send(self, wanted: Iterator[int], clients: Sequence[Client]) -> None:
        for number in wanted:
            tenant = self.chance.choice(list(self.keys))
            words = " ".join(["word"] * self.chance.randrange(1, 40))
            body = asking(f"{number} {words}", max_tokens=self.chance.randrange(1, 30), ignore_eos=True)
            while True:
                server = self.chance.randrange(len(clients))
                answer = await clients[server].post(CHAT, body, bearer(self.keys[tenant]))
                if not answer.broken:
                    break
                await asyncio.sleep(0.02)  # it is dead
            self._take(answer, server, tenant)

    def _take(self, answer: Answer, server: int, tenant: str) -> None:
        if answer.status != 200:
            self.problems.append(f"{answer.status} {answer.body.decode()}")
            return
        usage = msgspec.json.decode(answer.body)["usage"]
        used = Used(1, usage["prompt_tokens"], usage["completion_tokens"])
        self.answered.append(Answered(answer.ended_s, server, tenant, used))

    def may_be_lost(self, server: int | None, killed_s: float) -> None:
        """A server was killed (None: one of its processes): the answers of its last second may not be written."""
        since_s = killed_s - LOST_S
        self.lost += [one for one in self.answered if one.at_s > since_s and server in {None, one.server}]

    def check(self, gateway: Server) -> int:
        """What was used is never above the answers' own, and what a kill has lost below. Returns the calls lost."""
        lost = set(self.lost)
        most, least = by_tenant(self.answered), by_tenant([one for one in self.answered if one not in lost])
        found: dict[str, Used] = {}

        def is_there() -> bool:
            found.clear()
            for result in results(gateway, "project_id", project_ids=",".join(self.keys)):
                one = Used(result["num_model_requests"], result["input_tokens"], result["output_tokens"])
                found[result["project_id"]] = Used(
                    *map(sum, zip(found.get(result["project_id"], Used()), one, strict=True))
                )
            assert all(a <= b for name, used in found.items() for a, b in zip(used, most[name], strict=True)), (
                found,
                most,
            )
            return all(
                a >= b for name, used in least.items() for a, b in zip(found.get(name, Used()), used, strict=True)
            )

        eventually(is_there)
        assert self.problems == []
        return sum(used.requests for used in most.values()) - sum(used.requests for used in found.values())


def by_tenant(answered: Sequence[Answered]) -> dict[str, Used]:
    sums: dict[str, Used] = defaultdict(Used)
    for one in answered:
        sums[one.tenant] = Used(*map(sum, zip(sums[one.tenant], one.used, strict=True)))
    return sums
