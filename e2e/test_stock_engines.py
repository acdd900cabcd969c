"""Engines of each kind without Plait's adapter, as stubs: a gateway finds out what they are and take."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, Final

import pytest

from e2e.server_process import Server, eventually
from e2e.servers import Launcher
from e2e.stub_engine import JSON, Script, StubEngine

ADMIN: Final = {"authorization": "Bearer sk-admin"}
PROPS: Final = b'{"default_generation_settings":{"n_ctx":8192},"total_slots":4}'
TRTLLM: Final = (
    b"trtllm_num_requests_running 6.0\ntrtllm_num_requests_waiting 2.0\n"
    b"trtllm_kv_cache_max_blocks 1000.0\ntrtllm_kv_cache_tokens_per_block 32.0\n"
)
ANSWERS: Final[dict[str, tuple[str, int | None, dict[str, bytes]]]] = {
    "vllm": ("vllm", 32_768, {"/metrics": b"vllm:num_requests_running 6.0\nvllm:num_requests_waiting 2.0\n"}),
    "sglang": ("sglang", 32_768, {"/metrics": b"sglang:num_running_reqs 6.0\nsglang:num_queue_reqs 2.0\n"}),
    "trtllm": ("tensorrt_llm", None, {"/prometheus/metrics": TRTLLM, "/metrics": b"[]"}),
    "llamacpp": (
        "llamacpp",
        None,
        {"/metrics": b"llamacpp:requests_processing 6\nllamacpp:requests_deferred 2\n", "/props": PROPS},
    ),
    "tgi": (
        "org/m",
        None,
        {
            "/metrics": b"tgi_batch_current_size 6\ntgi_queue_size 2\n",
            "/info": b'{"model_id":"org/m","max_concurrent_requests":128,"max_total_tokens":4096}',
        },
    ),
    "ollama": ("library", None, {"/api/ps": b'{"models":[{"name":"demo","context_length":16384}]}'}),
}
"""By kind: the owner of its models, the context that it lists with them, and what it answers to other GETs."""

CONTEXTS: Final = {"vllm": 32_768, "sglang": 32_768, "trtllm": None, "llamacpp": 8_192, "tgi": 4_096, "ollama": 16_384}
WITHOUT_COUNTS: Final = ("ollama",)


def stub(kind: str) -> StubEngine:
    owner, context, answers = ANSWERS[kind]
    engine, more = StubEngine(), b"" if context is None else b',"max_model_len":%d' % context
    engine.models = b'{"data":[{"id":"demo","owned_by":"%b"%b}]}' % (owner.encode(), more)
    engine.answers = answers
    engine.script = Script([b'{"choices":[{"index":0,"text":"Hi","finish_reason":"stop"}]}'], 200, JSON)
    return engine


@pytest.fixture(params=ANSWERS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def fleet(launch: Launcher, kind: str) -> Iterator[tuple[Server, StubEngine]]:
    with ExitStack() as stack:
        engine = stack.enter_context(stub(kind))
        gateway = launch.gateway([{"name": "stock", "url": engine.url}], server={"admin_key": "sk-admin"})
        gateway.start()
        gateway.wait_until_ready()
        yield gateway, engine


def test_ollama_gets_no_prompt_that_it_would_cut(launch: Launcher) -> None:
    models = [{"name": "demo", "tokenizer": "estimated"}]
    with stub("ollama") as engine:
        gateway = launch.gateway([{"name": "stock", "url": engine.url}], models=models)
        gateway.start()
        gateway.wait_until_ready()

        def asked(prompt: str) -> Any:
            return gateway.post("/v1/completions", json={"model": "demo", "prompt": prompt, "max_tokens": 1})

        eventually(lambda: gateway.get("/v1/models").json()["data"][0]["max_model_len"] == 16_384)
        assert asked("word " * 10_000).status_code == 200
        refused = asked("word " * 24_000)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert len(engine.received) == 1


def test_it_is_recognised_and_serves(fleet: tuple[Server, StubEngine], kind: str) -> None:
    gateway, engine = fleet

    def told() -> dict[str, Any]:
        return dict(gateway.get("/admin/engines/stock", headers=ADMIN).json())

    eventually(lambda: told()["kind"] == kind and told()["models"] == {"demo": CONTEXTS[kind]})
    if kind not in WITHOUT_COUNTS:
        eventually(lambda: gateway.metric("plait_engine_running_calls", engine="stock") == 6)
        assert gateway.metric("plait_engine_waiting_calls", engine="stock") == 2
    body = {"model": "demo", "prompt": "Hello", "max_tokens": 1}
    assert gateway.post("/v1/completions", json=body).status_code == 200
    assert b"Hello" in engine.received[-1].body, "a text, no ids"
    if kind == "trtllm":
        assert "/metrics" not in engine.asked, "a reader would empty it"
