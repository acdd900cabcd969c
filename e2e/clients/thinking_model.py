"""The model of the conversations: chat completions only, a thought before each step, and an engine that says no.

In a turn it calls the agent's shell, and answers with what that said. `Mishap` says what goes wrong in the first turn.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from e2e.stub_engine import EVENT_STREAM, JSON, Received, Script, StubEngine
from tests.backends.translation.strict_engines import (
    RefusedError,
    check_alternating,
    check_sglang_0_5_13,
    check_vllm_0_25,
)

PROMPTS: Final = ("Begin the work.", "Go on with the work.")
COMMAND: Final = "echo $((6*7))-said"
SAID: Final = "42-said"
"""What the shell says, which is not in the command."""
ANSWER: Final = f"It said: {SAID}"
SEEN: Final = "It shows a square."
TITLE: Final = "Some work"
"""Said where an agent asks for something beside the conversation, without a shell."""
SHELLS: Final = ("bash", "exec_command", "shell", "shell_command", "local_shell")
VIEWERS: Final = {"view_image": "path", "read": "filePath", "Read": "file_path", "look": "place"}
"""Tools that bring a picture, and the argument that says which."""
BYTES_A_TOKEN: Final = 4
LONG_TOKENS: Final = 60_000
"""How long the prompt of the first turn's answer is said to be where the client should shorten its history."""
MOST_STEPS: Final = 4
"""Steps of a turn whose tools bring nothing. The model then gives up: a broken client would call for ever."""


class Mishap(StrEnum):
    """What goes wrong in a first turn, once."""

    NONE = "none"
    CUT_CALL = "cut call"
    EMPTY_CALL = "empty call"
    NULL_CALL = "null call"
    LIST_CALL = "list call"
    CUT_ANSWER = "cut answer"
    SHORTENED = "shortened"
    PICTURE = "picture"
    RESUMED = "resumed"


MALFORMED: Final[Mapping[Mishap, str]] = {
    Mishap.CUT_CALL: "",
    Mishap.EMPTY_CALL: '""',
    Mishap.NULL_CALL: "null",
    Mishap.LIST_CALL: '["echo"]',
}
"""The arguments of the first call. An empty text stands for the right ones, cut off."""


@dataclass(frozen=True)
class Kind:
    """What an engine refuses, and in which words. `check` raises `RefusedError`."""

    name: str
    check: Callable[[Mapping[str, Any]], None]
    error: Callable[[str], Mapping[str, Any]]
    context_tokens: int = 131_072
    too_long: Callable[[int, int, int], str] | None = None
    """Says that the tokens of a prompt and of its answer do not fit a context."""
    is_listed: bool = True
    """Whether its list of models has the context, so that the gateway can refuse first, by its own count."""


def _vllm_error(message: str) -> Mapping[str, Any]:
    return {"error": {"message": message, "type": "BadRequestError", "param": None, "code": 400}}


def _sglang_error(message: str) -> Mapping[str, Any]:
    return {"object": "error", "message": message, "type": "BadRequest", "param": None, "code": 400}


def _vllm_0_25_too_long(prompt: int, answer: int, context: int) -> str:
    """vLLM 0.25 stops to count where the prompt no longer fits: it does not know how long that is."""
    least = min(prompt, context - answer + 1)
    more = "at least " if least == context - answer + 1 else ""
    return (
        f"This model's maximum context length is {context} tokens. However, you requested {answer} output tokens and "
        f"your prompt contains {more}{least} input tokens, for a total of {more}{least + answer} tokens. Please reduce "
        "the length of the input prompt or the number of requested output tokens."
    )


def _vllm_0_19_too_long(prompt: int, answer: int, context: int) -> str:
    return (
        f"'max_tokens' or 'max_completion_tokens' is too large: {answer}. This model's maximum context length is "
        f"{context} tokens and your request has {prompt} input tokens ({answer} > {context} - {prompt})."
    )


def _sglang_too_long(prompt: int, answer: int, context: int) -> str:
    return (
        f"Requested token count exceeds the model's maximum context length of {context} tokens. You requested a total "
        f"of {prompt + answer} tokens: {prompt} tokens from the input messages and {answer} tokens for the completion. "
        "Please reduce the number of tokens in the input messages or the completion to fit within the limit."
    )


def _check_mistral(chat: Mapping[str, Any]) -> None:
    check_vllm_0_25(chat)
    check_alternating(chat["messages"])


SGLANG: Final = Kind("SGLang 0.5.13", check_sglang_0_5_13, _sglang_error)
VLLM: Final = Kind("vLLM 0.25", check_vllm_0_25, _vllm_error)
MISTRAL: Final = Kind("Mistral's template", _check_mistral, _vllm_error)
CONTEXT_40960: Final = Kind("context of 40,960", check_vllm_0_25, _vllm_error, 40_960, _vllm_0_25_too_long, False)
CONTEXT_32768: Final = Kind("context of 32,768", check_vllm_0_25, _vllm_error, 32_768, _vllm_0_19_too_long)
SGLANG_40960: Final = Kind("SGLang, 40,960", check_sglang_0_5_13, _sglang_error, 40_960, _sglang_too_long, False)
KINDS: Final = (SGLANG, VLLM, MISTRAL, CONTEXT_40960, CONTEXT_32768, SGLANG_40960)


@dataclass(frozen=True)
class Step:
    """One request of a conversation with a shell: the turn that it is of, and its number in all conversations."""

    turn: int
    number: int
    chat: Mapping[str, Any]

    @property
    def thought(self) -> str:
        """What the model thought, which it thought nowhere else."""
        return f"Thought {self.number}: look first."

    @property
    def call_id(self) -> str:
        """The id of the call that it made, if it did."""
        return f"call{self.number:05}"


class ThinkingModel(StubEngine):
    """A scripted engine of a `kind`. `mishap` is what goes wrong once, `steps` and `refusals` are what came so far.

    `picture` is the path of a picture that the agent's tool can show.
    """

    def __init__(self, kind: Kind) -> None:
        super().__init__(kind.name)
        self.kind = kind
        self.model = kind.name.lower().replace(" ", "-").replace("'", "").replace(",", "")
        context = {"max_model_len": kind.context_tokens} if kind.is_listed else {}
        model = {"id": self.model, "object": "model", **context}
        self.models = json.dumps({"object": "list", "data": [model]}).encode()
        self.picture = "picture.png"
        self._thoughts = 0
        self.begin(Mishap.NONE)

    def begin(self, mishap: Mishap) -> None:
        """Forget the conversation before."""
        self.mishap = mishap
        self.has_happened = False
        self.received.clear()
        self.steps: list[Step] = []
        self.refusals: list[str] = []

    def answer(self, received: Received) -> Script:
        """Refuse what the engine would, else say the next step."""
        chat = json.loads(received.body)
        refusal = self._refusal(chat, len(received.body))
        if refusal is not None:
            self.refusals.append(refusal)
            return Script([json.dumps(self.kind.error(refusal)).encode()], 400, JSON)
        delta, finish = self._step(chat)
        prompt_tokens = len(received.body) // BYTES_A_TOKEN
        if self._is_due(Mishap.SHORTENED) and ANSWER in delta.get("content", ""):
            self.has_happened = True
            prompt_tokens = LONG_TOKENS
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": 20, "total_tokens": prompt_tokens + 20}
        if chat.get("stream"):
            return Script([*_events(self.model, delta, finish, usage)], headers=EVENT_STREAM)
        return Script([_whole(self.model, delta, finish, usage)], headers=JSON)

    def _refusal(self, chat: Mapping[str, Any], size: int) -> str | None:
        try:
            self.kind.check(chat)
        except RefusedError as error:
            return str(error)
        asked = chat.get("max_completion_tokens") or chat.get("max_tokens") or 1
        if self.kind.too_long is not None and size // BYTES_A_TOKEN + asked > self.kind.context_tokens:
            return self.kind.too_long(size // BYTES_A_TOKEN, asked, self.kind.context_tokens)
        return None

    def _step(self, chat: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
        """The next step as a message, and why it ends."""
        shell = _tool(chat, SHELLS)
        if shell is None:
            return {"content": TITLE}, "stop"
        self._thoughts += 1
        results = results_of(chat)
        step = Step(turn_of(chat), self._thoughts, chat)
        self.steps.append(step)
        message: dict[str, Any] = {"reasoning_content": step.thought}
        viewer = _tool(chat, tuple(VIEWERS)) if self._is_due(Mishap.PICTURE) else None
        if viewer is not None:
            self.has_happened = True
            return {**message, "tool_calls": [_called(step, viewer, self._picture_arguments(viewer))]}, "tool_calls"
        if SAID in results or _has_picture(chat):
            if self._is_due(Mishap.CUT_ANSWER):
                self.has_happened = True
                return {**message, "content": ANSWER[:6]}, "length"
            return {**message, "content": ANSWER if SAID in results else f"{ANSWER}. {SEEN}"}, "stop"
        if results.count("\n") >= MOST_STEPS:
            return {**message, "content": "Nothing works."}, "stop"
        arguments = _shell_arguments(shell)
        if self.mishap in MALFORMED and not self.has_happened:
            self.has_happened = True
            arguments = MALFORMED[self.mishap] or arguments[:-4]
        return {**message, "tool_calls": [_called(step, shell, arguments)]}, "tool_calls"

    def _is_due(self, mishap: Mishap) -> bool:
        return self.mishap is mishap and not self.has_happened

    def _picture_arguments(self, viewer: Mapping[str, Any]) -> str:
        return json.dumps({VIEWERS[viewer["name"]]: self.picture})


def _called(step: Step, tool: Mapping[str, Any], arguments: str) -> dict[str, Any]:
    function = {"name": tool["name"], "arguments": arguments}
    return {"index": 0, "id": step.call_id, "type": "function", "function": function}


def turn_of(chat: Mapping[str, Any]) -> int:
    """The number of the turn that a chat is in, from 0."""
    said = json.dumps(chat["messages"])
    return 1 if PROMPTS[1] in said else 0


def results_of(chat: Mapping[str, Any]) -> str:
    """What tools have said in this turn, a line each."""
    return "".join(json.dumps(one.get("content")) + "\n" for one in _of_turn(chat) if one["role"] == "tool")


def _of_turn(chat: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    messages = chat["messages"]
    prompt = PROMPTS[turn_of(chat)]
    asked = [i for i, one in enumerate(messages) if one["role"] == "user" and prompt in json.dumps(one.get("content"))]
    return messages[asked[-1] + 1 if asked else 0 :]  # type: ignore[no-any-return]


def _has_picture(chat: Mapping[str, Any]) -> bool:
    return '"image_url"' in json.dumps([one.get("content") for one in _of_turn(chat)])


def has_picture(chat: Mapping[str, Any]) -> bool:
    """Whether a part of the conversation is a picture."""
    return '"type": "image_url"' in json.dumps([one.get("content") for one in chat["messages"]])


def _tool(chat: Mapping[str, Any], names: tuple[str, ...]) -> Mapping[str, Any] | None:
    for tool in chat.get("tools") or ():
        function: Mapping[str, Any] = tool["function"]
        if function["name"] in names or (names is SHELLS and function["name"].lower() in names):
            return function
    return None


def _shell_arguments(shell: Mapping[str, Any]) -> str:
    arguments: dict[str, Any] = {}
    for name, schema in shell.get("parameters", {}).get("properties", {}).items():
        if name in ("cmd", "command"):
            arguments[name] = ["bash", "-lc", COMMAND] if schema.get("type") == "array" else COMMAND
        elif name == "description":
            arguments[name] = "Says something"
    return json.dumps(arguments)


def _events(model: str, message: Mapping[str, Any], finish: str, usage: Mapping[str, int]) -> Iterator[bytes]:
    """The message in pieces, as engines send it: the thought and the arguments of a call in two each."""
    yield _event(model, {"role": "assistant", "content": ""})
    thought = message.get("reasoning_content", "")
    for piece in (thought[:9], thought[9:]) if thought else ():
        yield _event(model, {"reasoning_content": piece})
    if message.get("content"):
        yield _event(model, {"content": message["content"]})
    for call in message.get("tool_calls", ()):
        function = call["function"]
        yield _event(model, {"tool_calls": [{**call, "function": {**function, "arguments": ""}}]})
        for piece in (function["arguments"][:7], function["arguments"][7:]):
            if piece:
                yield _event(model, {"tool_calls": [{"index": 0, "function": {"arguments": piece}}]})
    yield _event(model, {}, finish)
    yield b"data: %b\n\n" % json.dumps({"model": model, "choices": [], "usage": usage}).encode()
    yield b"data: [DONE]\n\n"


def _event(model: str, delta: Mapping[str, Any], finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": model, "choices": [choice]}
    return b"data: %b\n\n" % json.dumps(chunk).encode()


def _whole(model: str, message: Mapping[str, Any], finish: str, usage: Mapping[str, int]) -> bytes:
    choice = {"index": 0, "message": {"role": "assistant", "content": None, **message}, "finish_reason": finish}
    completion = {"id": "c", "object": "chat.completion", "created": 1, "model": model, "choices": [choice]}
    return json.dumps({**completion, "usage": usage}).encode()


def png(side: int = 64) -> bytes:
    """A picture: a grey square."""
    rows = (b"\0" + b"\x80" * side) * side
    header = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
