"""Programs of 200 chained calls on engines that fail at random: they end as on healthy ones, or say what went wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from e2e.faults.completions import completion_of
from e2e.faults.fleet import ScriptedServer
from e2e.faults.modes import MODES
from e2e.faults.raw_client import CHAT, Answer, Client
from e2e.faults.verdicts import complaints, text_of
from e2e.server_process import Server
from e2e.servers import Launcher
from tests.waiting import SLOWNESS, WITHIN_S

ENGINES: Final = 4
"""As many as a call is tried on: on three, one of 200 calls meets three failures in every 40th run, by chance."""
UPSTREAM: Final = {"first_byte_timeout_s": SLOWNESS, "idle_timeout_s": SLOWNESS, "max_attempts": ENGINES}
CHAINS, LINKS = 8, 25
SHARE: Final = 0.05

_QUICK: Final = [mode for mode in MODES.values() if mode.is_quick and not mode.asks_key]
CHANGES_TEXT: Final = {"stream_not_utf8", "stream_nul", "stream_json_cut"}
"""Modes that put something into the text without breaking it: the program goes on with another text."""
_NOT_THE_CALLERS: Final = [mode for mode in _QUICK if mode.status is None and mode.name != "stream_callers_error"]
ENGINES_FAULTS: Final = [mode.name for mode in _NOT_THE_CALLERS if mode.name not in CHANGES_TEXT]
"""The modes in which the engine is at fault, or nobody."""
ALL_FAULTS: Final = [mode.name for mode in _QUICK]
HANGS: Final = ["hang_request", "hang_head_stream", "hang_stream"]


@dataclass(frozen=True)
class Link:
    """A call of the program: it takes the text of the one before it in its chain."""

    chain: int
    number: int
    is_streamed: bool

    @property
    def name(self) -> str:
        return f"c{self.chain}_{self.number}"

    def body(self, before: str) -> dict[str, Any]:
        """The request, `before` being the text before it or its placeholder."""
        text = f"{before} Step {self.number} of chain {self.chain}."
        return {"model": "demo", "messages": [{"role": "user", "content": text}], "stream": self.is_streamed}


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[tuple[Server, ScriptedServer]]:
    """A gateway, and the scripted engines behind it."""
    scripted = ScriptedServer(
        "engines", {f"e{number}": ["demo"] for number in range(ENGINES)}, tmp_path, "--token-s", "0.001"
    )
    with ExitStack() as stack:
        stack.callback(scripted.stop)
        launch = stack.enter_context(Launcher(tmp_path))
        entries = [engine.entry() for engine in scripted.engines.values()]
        gateway = launch.gateway(entries, upstream=UPSTREAM)
        for server in (scripted, gateway):
            server.start()
        for server in (scripted, gateway):
            server.wait_until_ready()
        yield gateway, scripted


async def test_engines_at_fault_change_nothing(servers: tuple[Server, ScriptedServer]) -> None:
    """No client asks for a stream, so every call can be started again, although the engines stream them all."""
    links, answers = await _run(servers, ENGINES_FAULTS, streams=False)
    assert _correct(links, answers) >= 0.99 * len(links), _first_wrong(links, answers)


async def test_hangs_change_nothing(servers: tuple[Server, ScriptedServer]) -> None:
    links, answers = await _run(servers, HANGS, streams=False)
    assert _correct(links, answers) >= 0.99 * len(links), _first_wrong(links, answers)


async def test_streams_may_break_and_say_so(servers: tuple[Server, ScriptedServer]) -> None:
    links, answers = await _run(servers, ENGINES_FAULTS, streams=True)
    _check_chains(links, answers)


async def test_every_mode_at_random(servers: tuple[Server, ScriptedServer]) -> None:
    _links, answers = await _run(servers, ALL_FAULTS, streams=True)
    assert all(answer.status for answer in answers)


async def _run(
    servers: tuple[Server, ScriptedServer], modes: Sequence[str], *, streams: bool
) -> tuple[list[Link], list[Answer]]:
    """All calls of the program, sent at once, and their answers."""
    gateway, scripted = servers
    for seed, engine in enumerate(scripted.engines.values()):
        await engine.set_mode(modes, share=SHARE, seed=seed)
    links = [
        Link(chain, number, streams and (chain + number) % 2 == 0) for chain in range(CHAINS) for number in range(LINKS)
    ]
    async with Client(gateway.port) as client:
        answers = await asyncio.gather(*(_ask(client, link) for link in links))
    hits = sum([(await engine.stats())["hits"] for engine in scripted.engines.values()])
    assert hits >= SHARE * len(links) / 5, "hardly any fault struck"
    for answer in answers:
        assert not list(complaints(answer, frozenset())), answer
    assert gateway.metric("plait_engine_outstanding_calls") == 0
    assert gateway.metric("plait_held_calls") == 0
    return links, answers


async def _ask(client: Client, link: Link) -> Answer:
    headers = {"plait-session": "program", "plait-output": link.name}
    before = ""
    if link.number:
        headers["plait-inputs"] = f"c{link.chain}_{link.number - 1}"
        before = f"{{{{{headers['plait-inputs']}}}}}"
    while True:
        answer = await client.post(CHAT, link.body(before), headers)
        if answer.status != 429:  # a gateway that a busy machine has held up refuses, and SDKs ask again
            return answer
        await asyncio.sleep(0.1)


def _expected(link: Link) -> str:
    text = ""
    for number in range(link.number + 1):
        text = completion_of(Link(link.chain, number, is_streamed=False).body(text)).text
    return text


def _is_right(link: Link, answer: Answer) -> bool:
    text, _, has_error = text_of(answer, streamed=_came_as_stream(answer))
    return not answer.broken and answer.status == 200 and not has_error and text == _expected(link)


def _came_as_stream(answer: Answer) -> bool:
    return (answer.header("content-type") or "").startswith("text/event-stream")


def _correct(links: Sequence[Link], answers: Sequence[Answer]) -> int:
    return sum(map(_is_right, links, answers))


def _check_chains(links: Sequence[Link], answers: Sequence[Answer]) -> None:
    """Up to the first failure of a chain all is right; behind it all fail, at once and with the right cause."""
    by_link = dict(zip(links, answers, strict=True))
    for chain in range(CHAINS):
        calls = [link for link in links if link.chain == chain]
        wrong = [link for link in calls if not _is_right(link, by_link[link])]
        if not wrong:
            continue
        assert wrong == calls[calls.index(wrong[0]) :], "a call ran on a text that it should not have had"
        cause_s = by_link[wrong[0]].ended_s
        for link in wrong[1:]:
            answer = by_link[link]
            assert answer.status == 424 or b'"input_failed"' in answer.body, answer
            assert answer.ended_s - cause_s <= WITHIN_S


def _first_wrong(links: Sequence[Link], answers: Sequence[Answer]) -> str:
    wrong = [
        (link.name, answer.status, answer.body[:400])
        for link, answer in zip(links, answers, strict=True)
        if not _is_right(link, answer)
    ]
    return f"{len(wrong)} of {len(links)}: {wrong[:2]}"
