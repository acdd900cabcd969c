"""Gateways and engines with the repository's tokenizers, taken two by two: an engine reads what the client has sent.

The engines are vLLM and SGLang, with the code of their adapters. What an engine reads is compared, as token ids, with
what it makes of the client's own text.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
from structlog.testing import capture_logs

from plait.backends.protocol.openai import ChatRequest, CompletionRequest, parse_request
from plait.backends.tokenization.rendered_fields import Renderers
from plait.gateway.calls.annotations import Annotations
from plait.gateway.calls.call import Asked
from plait.gateway.calls.call_reader import CallReader, Incoming, PromptReader
from plait.gateway.calls.outgoing import Recipient
from plait.gateway.calls.routes import CHAT_PATH
from plait.gateway.config.sections import Config, ModelConfig
from plait.gateway.fleet.health import Offer
from plait.gateway.fleet.router import Router
from plait.gateway.fleet.tokenizer_agreement import AGREED, Agreement, TokenizerAgreements
from plait.policy.costs.cost_model import CostModel, LongAttention, PiecewiseLinear
from plait.policy.types import Placement, PlacementReason
from tests.backends.adapter.api_servers import SERVERS, Server, install_engines
from tests.backends.tokenization.tokenizer_folders import tokenizer_folders
from tests.backends.tokenization.trained import rank_file

COSTS: Final = CostModel(PiecewiseLinear(((0, 0.010),), 0.001), 0.0, 0.0, 0.0, LongAttention())
PLACEMENT: Final = Placement("e", PlacementReason.EXPLOIT, cached_tokens=0, missed_tokens=1)
TEXTS: Final = (
    "The quick brown fox jumps over the lazy dog, and then 1234567 times again!",
    "  def f(self):\n\t\treturn <s>x</s> if HTTPServer's else {'a': 'Cafe\u0301'}\n\n",
    "Заметка: 你好。 <think> says it, and <|im_start|>user too.",
)
UNRENDERED: Final = frozenset({"without a template", "with a date"})
"""Engines whose chats cannot be compared: there is no template, or it never renders the same twice."""


@dataclass(frozen=True)
class Sent:
    """A request of a client, as the gateway has read it with one of its tokenizers."""

    text: str
    is_chat: bool
    wanted: Asked

    @property
    def messages(self) -> list[dict[str, Any]]:
        return [{"role": "user", "content": self.text}]

    def body(self, server: Server, agreement: Agreement) -> dict[str, Any]:
        """What the engine gets."""
        wanted = self.wanted
        body = wanted.body.for_engine(Recipient(server.kind, wanted.call, PLACEMENT, 0.0, agreement=agreement))
        assert isinstance(body, bytes)
        decoded: dict[str, Any] = json.loads(body)
        return decoded

    def is_read(self, server: Server, agreement: Agreement) -> bool:
        """Whether the engine computes what it makes of the client's own text."""
        body = self.body(server, agreement)
        if self.is_chat:
            assert body["messages"] == self.messages
            return "input_ids" not in body or body["input_ids"] == server.chat_ids(self.messages)
        return body["prompt"] in (self.text, server.ids(self.text))


class Gateway:
    """A gateway with one model for each tokenizer."""

    def __init__(self, specifications: dict[str, str]) -> None:
        models = tuple(ModelConfig(name=name, tokenizer=tokenizer) for name, tokenizer in specifications.items())
        self.prompts = PromptReader(Config(models=models), 64)
        self.router = Router()
        self.router.add_engine("e", COSTS)
        self.router.health.answered("e", dict.fromkeys(specifications))
        self.router.models.renderers = dict.fromkeys(specifications, Renderers(is_mixed=True))  # of both kinds
        self.reader = CallReader(self.router, self.prompts)

    async def read(self, model: str) -> list[Sent]:
        """Completions and, if the tokenizer has a template, chats."""
        requests = [(text, False) for text in TEXTS]
        requests += [(text, True) for text in TEXTS if model != "without a template"]
        return [Sent(text, is_chat, await self._asked(model, text, is_chat)) for text, is_chat in requests]

    async def _asked(self, model: str, text: str, is_chat: bool) -> Asked:
        asked = {"messages": [{"role": "user", "content": text}]} if is_chat else {"prompt": text}
        body = json.dumps({"model": model, **asked}).encode()
        request = parse_request(body, ChatRequest) if is_chat else parse_request(body, CompletionRequest)
        incoming = Incoming(CHAT_PATH if is_chat else "/v1/completions", [], body, "c", 0.0, "t")
        return await self.reader.read(incoming, request, Annotations())


@dataclass(frozen=True)
class Pair:
    """A gateway's tokenizer and an engine, which has reported."""

    configured: str
    running: str
    server: Server
    agreement: Agreement
    sent: list[Sent]

    @property
    def misread(self) -> list[Sent]:
        """The requests of which the engine reads another text."""
        return [one for one in self._comparable if not one.is_read(self.server, self.agreement)]

    @property
    def misread_unchecked(self) -> list[Sent]:
        """Those of which it would, if all token ids were sent."""
        return [one for one in self._comparable if not one.is_read(self.server, AGREED)]

    @property
    def _comparable(self) -> Iterator[Sent]:
        return (one for one in self.sent if not one.is_chat or self.running not in UNRENDERED)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return tokenizer_folders(tmp_path_factory.mktemp("tokenizers"))


@pytest.fixture(scope="module")
def pairs(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> list[Pair]:
    """Each of the gateway's tokenizers with each engine."""
    ranks = rank_file(tmp_path_factory.mktemp("ranks"), "cl100k_base")
    with pytest.MonkeyPatch.context() as monkeypatch:
        return asyncio.run(all_pairs(folders, {"cl100k": f"tiktoken:{ranks}", "bytes": "bytes"}, monkeypatch))


async def all_pairs(folders: dict[str, Path], own: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> list[Pair]:
    """The gateway has tokenizers of its `own`, which no engine has."""
    gateway = Gateway({**{name: str(folder) for name, folder in folders.items()}, **own})
    agreements = TokenizerAgreements(gateway.prompts.tokenizers.fingerprint)
    sent = {name: await gateway.read(name) for name in gateway.router.models.names}
    found = []
    for running, folder in folders.items():
        for kind in SERVERS:
            server = kind(folder)
            install_engines(monkeypatch, server)
            report = await server.report()
            for configured, requests in sent.items():
                agreement = agreements.of(f"{running}-{kind.kind}", Offer({configured: None}), report.tokenizer)
                found.append(Pair(configured, running, server, agreement, requests))
    return found


def test_no_engine_reads_another_text_than_the_client_has_sent(pairs: list[Pair]) -> None:
    wrong = [pair for pair in pairs if pair.configured != pair.running]
    assert len(wrong) > 800
    assert sum(len(pair.misread_unchecked) for pair in wrong) > 800, "else nothing is shown"
    assert [(pair.configured, pair.running, one.text) for pair in pairs for one in pair.misread] == []


def test_the_engine_with_the_gateways_files_gets_ids(pairs: list[Pair]) -> None:
    same = [pair for pair in pairs if pair.configured == pair.running]
    assert len(same) > 40
    for pair in same:
        assert pair.agreement == AGREED, pair.configured
        for one in pair.sent:
            body = one.body(pair.server, pair.agreement)
            assert isinstance(body.get("input_ids" if one.is_chat else "prompt"), list) or (
                one.is_chat and pair.server.kind == "vllm"
            ), pair.configured


def test_what_differs_is_said_with_both_names(pairs: list[Pair], folders: dict[str, Path]) -> None:
    pair = next(pair for pair in pairs if (pair.configured, pair.running) == ("llama 2", "gpt-2"))
    with capture_logs() as logs:
        pair.agreement.tell("e", None)
        pair.agreement.tell("e", pair.agreement.problem)
    [warning] = logs
    assert warning["log_level"] == "warning"
    assert warning["configured"] == f"llama 2: {folders['llama 2']}"
    assert warning["reported"] == (str(folders["gpt-2"]))
    assert "the vocabulary" in warning["problem"]
    assert "tokenizer" in warning["hint"]
