"""On every route, SGLang sends what it computes to the rank that the request names."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from plait.backends.adapter.routes import Scope
from plait.backends.sglang.route import obey_named_ranks

RANKS = 2


class TokenizerManager:
    """Makes what is sent to the schedulers, with the rank that a route has taken from the header itself."""

    def _create_tokenized_object(self, of_route: int | None, text: str = "") -> Any:
        return SimpleNamespace(text=text, routed_dp_rank=of_route)


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None, str | None], Awaitable[int | None]]:
    """Serves a request with a value of the header. Returns the rank to which SGLang sends it."""
    manager = TokenizerManager()
    added: list[Any] = []
    app = SimpleNamespace(add_middleware=lambda kind, **options: added.append((kind, options)))
    monkeypatch.setattr("plait.backends.sglang.route.load", lambda _: app)
    obey_named_ranks(manager, RANKS)
    ((middleware, options),) = added

    async def served(of_route: int | None, value: str | None) -> int | None:
        sent: list[Any] = []

        async def route(*_: Any) -> None:
            sent.append(manager._create_tokenized_object(of_route, text="Hi"))

        headers = [] if value is None else [(b"x-data-parallel-rank", value.encode())]
        scope: Scope = {"type": "http", "headers": headers}
        await middleware(route, **options)(scope, None, None)
        (computed,) = sent
        assert computed.text == "Hi"
        rank: int | None = computed.routed_dp_rank
        return rank

    return served


@pytest.mark.parametrize(
    ("of_route", "header", "rank"), [(None, "1", 1), (None, "0", 0), (1, "1", 1), (0, None, 0), (None, None, None)]
)
async def test_a_request_is_computed_by_the_rank_that_it_names(
    serve: Callable[[int | None, str | None], Awaitable[int | None]],
    of_route: int | None,
    header: str | None,
    rank: int | None,
) -> None:
    assert await serve(of_route, header) == rank
