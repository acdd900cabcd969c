"""Stand-ins for the API servers of vLLM and SGLang: their tokenizers are real, and what asks them is the adapters' own.

What they have under which name is the engines': `make e2e-vllm` and `make e2e-sglang` ask the real ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import httpx
import msgspec
import pytest

from plait.backends.adapter.engine_tokenizer import EngineTokenizer, read_tokenizer
from plait.backends.adapter.routes import Scope, Send
from plait.backends.protocol.cache_state import CacheState, KvState
from plait.backends.protocol.tokenizer_files import PATH as TOKENIZER
from plait.backends.sglang.channel import SchedulerQuery
from plait.backends.sglang.route import CacheStateRoute, SchedulerAccess, TokenizerRoute
from plait.backends.sglang.served_tokenizer import served_tokenizer as sglang_tokenizer
from plait.backends.tokenization.chat_template import import_transformers
from plait.backends.vllm.launch import SCHEDULER
from plait.backends.vllm.middleware import CacheStateMiddleware

Messages = list[dict[str, Any]]


class Server:
    """An engine with the tokenizer in `folder`; None: it was started without one. It answers as the adapter does.

    `template` replaces the tokenizer's own, and `defaults` are variables that it gets by default. `conversation` is a
    template of SGLang's own.
    """

    kind: str

    def __init__(
        self,
        folder: Path | None,
        *,
        template: str | None = None,
        defaults: Mapping[str, Any] | None = None,
        conversation: str | None = None,
    ) -> None:
        self.folder, self.template, self.defaults, self.conversation = folder, template, defaults, conversation
        self.tokenizer = None if folder is None else _loaded(folder)

    def ids(self, text: str) -> list[int]:
        """What it computes for a plain prompt."""
        return list(self._loaded.encode(text))

    def chat_ids(self, messages: Messages) -> list[int]:
        """What it computes for a chat."""
        options = {**(self.defaults or {}), "tokenize": False, "add_generation_prompt": True}
        text = self._loaded.apply_chat_template(messages, chat_template=self.template, **options)
        return list(self._loaded.encode(text, add_special_tokens=False))

    async def report(self) -> CacheState:
        """Its cache-state report."""
        response = await self.get("/cache_state")
        response.raise_for_status()
        return msgspec.msgpack.decode(response.content, type=CacheState)

    async def get(self, path: str) -> httpx.Response:
        """What it answers."""
        async with httpx.AsyncClient(transport=httpx.ASGITransport(self.application()), base_url="http://e") as client:
            return await client.get(path, headers={"accept": "application/msgpack"})

    def application(self) -> Callable[..., Any]:
        """Its API server."""
        raise NotImplementedError

    @property
    def _loaded(self) -> Any:
        assert self.tokenizer is not None
        return self.tokenizer

    def scheduler_report(self) -> bytes:
        """What its scheduler reports."""
        state = CacheState(
            engine="e", kind=self.kind, epoch="1", cursor=1, model="m", block_tokens=16, granularity_tokens=64,
            snapshot=True, stored=[], removed=[], kv=KvState(100, 100, 0),
        )  # fmt: skip
        return msgspec.msgpack.encode(state)


class VllmServer(Server):
    """vLLM's."""

    kind = "vllm"

    def application(self) -> Callable[..., Any]:
        """Its middleware, in an application with the state that vLLM's has."""
        model = SimpleNamespace(tokenizer=str(self.folder))
        config = SimpleNamespace(
            scheduler_config=SimpleNamespace(scheduler_cls=SCHEDULER),
            parallel_config=SimpleNamespace(data_parallel_size=1),
            model_config=model,
        )
        client = SimpleNamespace(
            engine_core=SimpleNamespace(call_utility_async=self._call),
            vllm_config=config,
            errored=False,
            renderer=SimpleNamespace(tokenizer=self.tokenizer),
        )
        chats = SimpleNamespace(chat_template=self.template, default_chat_template_kwargs=self.defaults or {})
        app = SimpleNamespace(state=SimpleNamespace(engine_client=client, online_renderer=chats, args=None))
        middleware = CacheStateMiddleware(_nothing)

        async def with_app(scope: Scope, receive: Any, send: Send) -> None:
            scope["app"] = app
            await middleware(scope, receive, send)

        return with_app

    async def _call(self, *_arguments: Any) -> bytes:
        await asyncio.sleep(0)
        return self.scheduler_report()


class SglangServer(Server):
    """SGLang's."""

    kind = "sglang"

    def application(self) -> Callable[..., Any]:
        """Its route. The tokenizer has the template, as in SGLang."""
        if self.template is not None:
            self._loaded.chat_template = self.template
        config = SimpleNamespace(hf_config=SimpleNamespace(model_type="llama"))
        manager = SimpleNamespace(tokenizer=self.tokenizer, model_config=config, server_args=SimpleNamespace())
        templates = SimpleNamespace(chat_template_name=self.conversation, jinja_template_content_format="string")

        def find() -> EngineTokenizer | None:
            return sglang_tokenizer(manager, templates)

        tokenizer = read_tokenizer(find, "1")
        reports = CacheStateRoute(_Scheduler(self), SimpleNamespace(), tokenizer, 1)  # type: ignore[arg-type]
        offers = TokenizerRoute(find, tokenizer)

        async def routed(scope: Scope, receive: Any, send: Send) -> None:
            await (offers if scope["path"] == TOKENIZER else reports)(scope, receive, send)

        return routed


class _Scheduler(SchedulerAccess):
    def __init__(self, server: SglangServer) -> None:
        super().__init__()
        self._server = server

    async def ask(self, query: SchedulerQuery) -> bytes:  # noqa: ARG002
        await asyncio.sleep(0)
        return self._server.scheduler_report()


SERVERS: Final = (VllmServer, SglangServer)


def install_engines(monkeypatch: pytest.MonkeyPatch, server: Server | None = None) -> None:
    """Put the engines' functions that the adapters call in their place. SGLang's settings are those of `server`."""

    def resolve(tokenizer: Any, *, chat_template: str | None, tools: Any, model_config: object) -> str:
        return str(tokenizer.get_chat_template(chat_template, tools=tools))

    def serving() -> SimpleNamespace:
        defaults = {} if server is None else server.defaults
        folder = "sglang's" if server is None else str(server.folder)
        return SimpleNamespace(default_chat_template_kwargs=defaults, tokenizer_path=folder)

    names = {
        "vllm.renderers.hf.resolve_chat_template": resolve,
        "sglang.srt.runtime_context.get_serving": serving,
    }
    monkeypatch.setattr("plait.backends.vllm.middleware.load", names.get)
    monkeypatch.setattr("plait.backends.sglang.compatibility.load", names.get)
    monkeypatch.setattr("plait.backends.sglang.served_tokenizer.load", names.get)


def _loaded(folder: Path) -> Any:
    import_transformers()
    from transformers import AutoTokenizer  # noqa: PLC0415 - without noise

    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


async def _nothing(scope: Scope, receive: Any, send: Send) -> None:
    """The rest of vLLM's routes."""
