"""A gateway before one real server with data-parallel ranks: it places by rank what the server would only balance."""

from __future__ import annotations

import os
import random
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from e2e.real_engines import token_calls
from e2e.real_engines.engine import KV_TOKENS, MODEL, EngineKind, RealEngine, started
from e2e.real_engines.findings import Findings
from e2e.real_engines.fleet import new_gateway
from e2e.real_engines.token_calls import Placed, cached_share, near_share, predicted_share
from e2e.server_process import Server, eventually
from e2e.servers import PATIENT
from plait.policy.prefix.block_hash import TREE_BLOCK_TOKENS
from tests.waiting import WITHIN_S

pytestmark = pytest.mark.nightly

RANKS: Final = 2
NAME: Final = "ranked"
PREFIX_TOKENS: Final = 25 * TREE_BLOCK_TOKENS
PREFIXES: Final = round(0.78 * RANKS * KV_TOKENS / PREFIX_TOKENS)
CALLS: Final = 12 * PREFIXES
WARM: Final = 2 * PREFIXES
"""The first calls, which are not counted: they find empty caches."""
AT_ONCE: Final = 4
OUTPUT_TOKENS: Final = 4


@pytest.fixture(scope="module", params=["stock", "plait"])
def server(
    request: pytest.FixtureRequest, kind: EngineKind, python: Path, model: Path, folder: Path
) -> Iterator[RealEngine]:
    made = kind.stock if request.param == "stock" else kind.plait
    engine = made(NAME, python, model, folder)
    engine.set_ranks(RANKS)
    engine.may_log_tracebacks = True  # of what is killed here
    with started((engine,)):
        yield engine


@contextmanager
def gateway_before(engine: RealEngine, model: Path, folder: Path, **fields: Any) -> Iterator[Server]:
    gateway = new_gateway(
        f"gateway-{len(fields)}", {NAME: engine}, model, folder, engine_fields=fields, patience=PATIENT
    )
    with ExitStack() as stack:
        gateway.start()
        stack.callback(gateway.stop)
        eventually(lambda: up(gateway) == (1 if fields else RANKS))
        yield gateway


def up(gateway: Server) -> int:
    lines = gateway.get("/metrics").text.splitlines()
    return sum(line.startswith("plait_engine_up{") and line.endswith(" 1.0") for line in lines)


def prompts(calls: int, seed: int) -> Iterator[list[int]]:
    """Prompts that share a prefix with a 16th of the others, and have an end of their own."""
    drawn = random.Random(seed)
    for number in range(calls):
        prefix = drawn.randrange(PREFIXES)
        yield [100 + prefix, *(10 + token % 7_000 for token in range(PREFIX_TOKENS - 1)), 200 + number % 7_000, seed]


def placed(gateway: Server, calls: int, seed: int) -> list[Placed]:
    return token_calls.placed(gateway, prompts(calls, seed), AT_ONCE, OUTPUT_TOKENS)


def core_pids(engine: RealEngine) -> list[int]:
    """The processes of the ranks, in their order."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            title = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            group = os.getpgid(int(folder.name))
        except (OSError, ProcessLookupError):
            continue
        named = re.search(r"(?:EngineCore_DP|scheduler_DP)(\d+)", title)
        if named is not None and group == engine.pid:
            found[int(named[1])] = int(folder.name)
    assert sorted(found) == [*range(RANKS)]
    return [found[rank] for rank in sorted(found)]


def test_placement_by_rank_finds_more_cached_than_the_servers_balancing(
    server: RealEngine, model: Path, folder: Path, findings: Findings, request: pytest.FixtureRequest
) -> None:
    made = request.node.callspec.params["server"]
    with gateway_before(server, model, folder, ranks=1) as gateway:
        balanced = placed(gateway, CALLS, seed=1)[WARM:]
        assert {one.engine for one in balanced} == {NAME}
    with gateway_before(server, model, folder) as gateway:
        by_rank = placed(gateway, CALLS, seed=2)[WARM:]
        assert {one.engine for one in by_rank} == {f"{NAME}@{rank}" for rank in range(RANKS)}
    cached, predicted, near = cached_share(by_rank), predicted_share(by_rank), near_share(by_rank)
    own = cached_share(balanced)
    findings.figures[f"{made}, {RANKS} ranks, {CALLS} calls"] = {
        "cached share by rank": cached, "predicted": predicted, "within a tree block": near, "balanced": own
    }  # fmt: skip
    assert findings.at_most("cached share, the server's own balancing / by rank", own / cached, 1 / 1.4)
    assert abs(predicted - cached) <= 0.03
    assert near >= 0.97


def test_a_conversation_returns_to_its_rank(server: RealEngine, model: Path, folder: Path) -> None:
    with gateway_before(server, model, folder) as gateway:
        for session in range(6):
            told, engines = [300 + session, *range(10, 10 + 4 * TREE_BLOCK_TOKENS)], set()
            for turn in range(3):
                (one,) = token_calls.placed(gateway, [told], AT_ONCE, OUTPUT_TOKENS)
                engines.add(one.engine)
                assert one.cached >= (0 if turn == 0 else len(told) - 3 * TREE_BLOCK_TOKENS)
                told = [*told, *range(400 + turn, 400 + turn + TREE_BLOCK_TOKENS)]
            assert len(engines) == 1


def test_a_stopped_rank_goes_out_alone_and_comes_back(server: RealEngine, model: Path, folder: Path) -> None:
    with gateway_before(server, model, folder) as gateway:
        placed(gateway, 8, seed=3)
        stopped = core_pids(server)[1]
        os.kill(stopped, signal.SIGSTOP)
        try:
            placed(gateway, 60, seed=4)
            assert gateway.metric("plait_engine_up", engine=f"{NAME}@0") == 1
            assert gateway.metric("plait_engine_up", engine=f"{NAME}@1") == 0
        finally:
            os.kill(stopped, signal.SIGCONT)
        eventually(lambda: up(gateway) == RANKS)
        placed(gateway, 8, seed=5)


def test_a_killed_rank_goes_out_until_its_server_is_back(
    kind: EngineKind, server: RealEngine, model: Path, folder: Path
) -> None:
    """vLLM's server ends with its rank. SGLang's goes on, but the other ranks answer no more."""
    with gateway_before(server, model, folder) as gateway:
        body = {"model": MODEL, "prompt": [7, 8, 9], "max_tokens": 2_000, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"{gateway.url}/v1/completions", json=body, timeout=2 * WITHIN_S) as stream:
            events, rank = stream.iter_lines(), int(stream.headers["plait-engine"].rpartition("@")[2])
            next(events)
            os.kill(core_pids(server)[rank], signal.SIGKILL)
            last = [line for line in events if line][-3:]
        assert any('"error"' in line for line in last), last
        eventually(lambda: up(gateway) == (RANKS - 1 if kind.name == "sglang" else 0))
        server.kill()
        server.start()
        server.wait_until_ready()
        eventually(lambda: up(gateway) == RANKS)
        placed(gateway, 8, seed=6)
