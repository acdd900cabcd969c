"""A server with data-parallel ranks: each has a cache of its own, and the header names the one for a call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any, Final

import pytest

from e2e.real_engines.engine import MODEL, EngineKind, RealEngine, started, stored_blocks
from e2e.server_process import eventually
from plait.policy.prefix.block_hash import TREE_BLOCK_TOKENS

RANKS: Final = 2
WORDS: Final = 4 * TREE_BLOCK_TOKENS
OUTPUT_TOKENS: Final = 2000

_prompts = count(1)


def new_prompt() -> str:
    """A text of several tree blocks that no other begins with."""
    return f"{next(_prompts)} is the number of this text. " * (WORDS // 8)


def chat(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 2}


ROUTES: Final[dict[str, tuple[Callable[[str], dict[str, Any]], Callable[[Any], int | None]]]] = {
    "/v1/chat/completions": (chat, lambda usage: (usage["prompt_tokens_details"] or {}).get("cached_tokens")),
    "/v1/completions": (
        lambda text: {"prompt": text, "max_tokens": 2},
        lambda usage: (usage["prompt_tokens_details"] or {}).get("cached_tokens"),
    ),
    "/v1/messages": (chat, lambda usage: usage.get("cache_read_input_tokens")),
    "/v1/responses": (
        lambda text: {"input": text, "max_output_tokens": 2},
        lambda usage: usage["input_tokens_details"]["cached_tokens"],
    ),
}
"""How each route is given a text, and where its usage has the cached tokens."""

VECTORS: Final[Mapping[str, Callable[[str], dict[str, Any]]]] = {
    "/v1/embeddings": lambda text: {"input": text},
    "/pooling": lambda text: {"input": text},
    "/v1/score": lambda text: {"text_1": text, "text_2": text},
    "/v1/rerank": lambda text: {"query": text, "documents": [text]},
}

ABSENT: Final = (str(RANKS), "-1")


@pytest.fixture(scope="module")
def engine(kind: EngineKind, python: Path, model: Path, folder: Path) -> Iterator[RealEngine]:
    engine = kind.plait("ranked", python, model, folder)
    engine.set_ranks(RANKS)
    with started((engine,)):
        yield engine


@pytest.fixture(scope="module")
def embedding(kind: EngineKind, python: Path, model: Path, folder: Path) -> Iterator[RealEngine]:
    if not kind.embedding:
        pytest.skip("its vectors are not tested")
    engine = kind.plait("ranked-embedding", python, model, folder, flags=kind.embedding)
    engine.set_ranks(RANKS)
    with started((engine,)):
        yield engine


def sent(engine: RealEngine, route: str, body: Mapping[str, Any], rank: int) -> Any:
    response = engine.post(route, json={"model": MODEL, **body}, headers=named(rank))
    assert response.status_code == 200, response.text
    return response.json()


def named(rank: int | str) -> dict[str, str]:
    return {"x-data-parallel-rank": str(rank)}


def cached_blocks(engine: RealEngine) -> list[set[int]]:
    """The tree blocks in the cache of each rank, by its report."""
    return [set(stored_blocks(engine.cache_state(rank=rank))) for rank in range(RANKS)]


def test_each_rank_has_a_report(engine: RealEngine) -> None:
    states = [engine.cache_state(rank=rank) for rank in range(RANKS)]
    assert [(state.rank, state.ranks) for state in states] == [(rank, RANKS) for rank in range(RANKS)]
    assert len({state.epoch for state in states}) == RANKS
    assert engine.cache_state().epoch == states[0].epoch, "rank 0 is the default"
    assert all(state.kv.total_blocks == states[0].kv.total_blocks for state in states)


@pytest.mark.parametrize("rank", [*ABSENT, "x"])
def test_a_rank_that_does_not_exist_has_no_report(engine: RealEngine, rank: str) -> None:
    response = engine.get("/cache_state", params={"rank": rank})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "rank"


@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize("route", ROUTES)
def test_a_call_goes_to_the_rank_that_it_names(engine: RealEngine, route: str, rank: int) -> None:
    body_of, cached_of = ROUTES[route]
    body, other = body_of(new_prompt()), 1 - rank
    before = cached_blocks(engine)
    assert (cached_of(sent(engine, route, body, rank)["usage"]) or 0) < TREE_BLOCK_TOKENS, (
        "the template's begin at most"
    )
    after = cached_blocks(engine)
    assert len(after[rank] - before[rank]) >= WORDS // TREE_BLOCK_TOKENS
    assert after[other] == before[other]
    assert (cached_of(sent(engine, route, body, rank)["usage"]) or 0) >= WORDS // 2
    assert (cached_of(sent(engine, route, body, other)["usage"]) or 0) < TREE_BLOCK_TOKENS


@pytest.mark.parametrize("route", VECTORS)
def test_vectors_come_from_the_rank_that_the_call_names(embedding: RealEngine, route: str) -> None:
    for rank in range(RANKS):
        before = cached_blocks(embedding)
        sent(embedding, route, VECTORS[route](new_prompt()), rank)
        after = cached_blocks(embedding)
        assert [after[one] != before[one] for one in range(RANKS)] == [one == rank for one in range(RANKS)]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("rank", ABSENT)
def test_a_call_to_a_rank_that_does_not_exist_is_refused(
    engine: RealEngine, rank: str, route: str, streamed: bool
) -> None:
    body = {"model": MODEL, **ROUTES[route][0]("Hi"), "stream": streamed}
    response = engine.post(route, json=body, headers=named(rank))
    assert response.status_code == 400, response.text
    assert "rank" in response.json()["error"]["message"]
    assert engine.get("/health").status_code == 200


@pytest.mark.parametrize("route", VECTORS)
@pytest.mark.parametrize("rank", ABSENT)
def test_vectors_of_a_rank_that_does_not_exist_are_refused(embedding: RealEngine, rank: str, route: str) -> None:
    response = embedding.post(route, json={"model": MODEL, **VECTORS[route]("Hi")}, headers=named(rank))
    assert response.status_code == 400, response.text


def test_changed_objectives_reach_the_rank_that_they_name(engine: RealEngine) -> None:
    more = {"max_tokens": OUTPUT_TOKENS, "ignore_eos": True}
    body = {"prompt": new_prompt(), **more, engine.annotations_field: {"plait_handle": "h"}}

    def known(headers: Mapping[str, str]) -> Any:
        change = [{"plait_handle": "h", "plait_ttft_ms": 1000}]
        return engine.post("/call_objectives", json=change, headers=headers).json().get("known")

    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(sent, engine, "/v1/completions", body, 1)
        eventually(lambda: engine.cache_state(rank=1).queue.running == 1)
        assert (known(named(1)), known(named(0)), known({})) == (1, 0, 0)
        call.result()
    for rank in ABSENT:
        assert engine.post("/call_objectives", json=[], headers=named(rank)).status_code == 400


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_report_waits_for_news_of_its_rank(engine: RealEngine, rank: int) -> None:
    waits = engine.cache_state(rank=rank)
    with ThreadPoolExecutor(1) as pool:
        news = pool.submit(engine.cache_state, rank=rank, since=waits.cursor, epoch=waits.epoch, wait_ms=20_000)
        sent(engine, "/v1/completions", {"prompt": new_prompt(), "max_tokens": 1}, 1 - rank)
        assert not news.done()
        sent(engine, "/v1/completions", {"prompt": new_prompt(), "max_tokens": 1}, rank)
        assert news.result().stored
