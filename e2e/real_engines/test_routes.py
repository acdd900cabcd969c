"""Each route that the engine has, through the gateway: the client gets the very bytes that the engine sent.

Routes of vectors need an engine of their own, which is in `test_other_engines`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pytest

from e2e.real_engines.engine import MODEL
from e2e.real_engines.fleet import EngineFleet
from e2e.real_engines.tapped import Tapped, tapped

HI: Final = [{"role": "user", "content": "Say hi."}]
USAGE: Final = {"stream": True, "stream_options": {"include_usage": True}}

GENERATING: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "chat": ("/v1/chat/completions", {"messages": HI, "max_tokens": 8}),
    "chat, streamed": ("/v1/chat/completions", {"messages": HI, "max_tokens": 8, **USAGE}),
    "text": ("/v1/completions", {"prompt": "Say hi.", "max_tokens": 8}),
    "text, streamed": ("/v1/completions", {"prompt": "Say hi.", "max_tokens": 8, **USAGE}),
    "response": ("/v1/responses", {"input": "Say hi.", "max_output_tokens": 8}),
    "response, streamed": ("/v1/responses", {"input": "Say hi.", "max_output_tokens": 8, "stream": True}),
    "message": ("/v1/messages", {"messages": HI, "max_tokens": 8}),
    "message, streamed": ("/v1/messages", {"messages": HI, "max_tokens": 8, "stream": True}),
    "count": ("/v1/messages/count_tokens", {"messages": HI}),
    "tokens of a text": ("/tokenize", {"prompt": "Say hi."}),
    "text of tokens": ("/detokenize", {"tokens": [9, 10, 11]}),
    "a refusal": ("/v1/chat/completions", {"messages": HI, "max_tokens": 0}),
}


@pytest.fixture(scope="module")
def generating(fleet: EngineFleet, model: Path, folder: Path) -> Iterator[Tapped]:
    with ExitStack() as stack:
        yield tapped(stack, fleet.engines["engine-1"], model, folder, "tapped-generating")


@pytest.mark.parametrize("request_", GENERATING)
def test_the_client_gets_what_the_engine_sent(generating: Tapped, request_: str) -> None:
    generating.check(*GENERATING[request_])


def test_what_the_engine_does_not_have_is_not_found(generating: Tapped) -> None:
    response = generating.gateway.post("/v1/load_lora_adapter", json={"model": MODEL})
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "not_found"
