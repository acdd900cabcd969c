"""The last requests of released clients' conversations, as e2e/clients recorded them: strict engines take each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from plait.backends.translation.translation import TRANSLATIONS
from tests.backends.translation.strict_engines import check_alternating, check_sglang_0_5_13, check_vllm_0_25
from tests.source_tree import ROOT

CORPUS = sorted((ROOT / "tests" / "corpus" / "conversations").glob("*.json"))


def read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The chat body of a recorded request, and its messages."""
    sent = json.loads(path.read_bytes())
    chat = TRANSLATIONS[sent["path"]].to_chat(sent["body"])
    return chat, chat["messages"]


def test_each_kind_of_conversation_is_recorded() -> None:
    for client in ("codex-cli", "claude-code", "opencode", "ai-sdk", "langchain", "pydantic-ai", "litellm"):
        for mishap in ("none", "picture", "cut-call"):
            assert any(path.stem.startswith(client) and path.stem.endswith(mishap) for path in CORPUS)


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.stem)
def test_strict_engines_take_a_conversation(path: Path) -> None:
    chat, messages = read(path)
    check_vllm_0_25(chat)
    check_sglang_0_5_13(chat)
    check_alternating(messages)


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.stem)
def test_a_result_follows_its_call(path: Path) -> None:
    _, messages = read(path)
    called: set[str] = set()
    for message in messages:
        called |= {call["id"] for call in message.get("tool_calls") or ()}
        assert message["role"] != "tool" or message["tool_call_id"] in called


@pytest.mark.parametrize("path", [path for path in CORPUS if "picture" in path.stem], ids=lambda path: path.stem)
def test_a_picture_of_a_tool_stays_one(path: Path) -> None:
    sent = json.dumps(json.loads(path.read_bytes()))
    if "previous_response_id" not in sent:  # else the picture is in what the gateway has stored
        _, messages = read(path)
        assert any(is_picture(part) for message in messages for part in parts(message))


def parts(message: Mapping[str, Any]) -> list[Any]:
    content = message.get("content")
    return content if isinstance(content, list) else []


def is_picture(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "image_url" and bool(part["image_url"]["url"])
