"""The coding agents: how each is started, and the model that they work with here."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from e2e.clients.environment import AGENTS
from e2e.clients.program_run import KEY
from e2e.stub_engine import EVENT_STREAM, JSON, Received, Script, StubEngine
from plait.backends.translation.translation import TRANSLATIONS

MODEL: Final = "demo"
SAID: Final = ("42-one", "42-two")
"""What the shell says in a turn. The commands do not have these texts in them."""
SCHEMA_FILE: Final = "answer.json"
SCHEMA: Final[Mapping[str, Any]] = {
    "type": "object",
    "properties": {"said": {"type": "string"}},
    "required": ["said"],
    "additionalProperties": False,
}
COMMANDS: Final = ("echo $((6*7))-one", "echo $((6*7))-two")


@dataclass(frozen=True)
class Agent:
    """One agent. `program` is a path below the modules, `first` and `next` are its arguments for two turns.

    `{url}` stands for the gateway's address. `files` are written into its home first. `structured` are the arguments
    for a turn whose answer is an object of `SCHEMA`, which is in the home's `SCHEMA_FILE`; an agent may have none.
    """

    name: str
    package: str
    program: str
    first: Sequence[str]
    next: Sequence[str]
    structured: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, Any] = field(default_factory=dict)

    @property
    def version(self) -> str:
        """The version that is installed."""
        return str(msgspec.json.decode((AGENTS / "package.json").read_bytes())["optionalDependencies"][self.package])

    @property
    def runs(self) -> Sequence[str]:
        """What runs it; nothing where it has no program for this machine."""
        found = sorted((AGENTS / "node_modules").glob(self.program))
        return [] if not found else ["node", str(found[0])] if found[0].suffix == ".js" else [str(found[0])]


CODEX_KEY: Final = "model_providers.plait.env_key=AGENT_KEY"
_CODEX: Final = (
    "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "-m", MODEL, "-c", "model_provider=plait",
    "-c", "model_providers.plait.name=plait", "-c", "model_providers.plait.wire_api=responses",
    "-c", "model_providers.plait.base_url={url}/v1", "-c", CODEX_KEY,
)  # fmt: skip
_CLAUDE: Final = ("-p", "--model", MODEL, "--dangerously-skip-permissions")
_OPENCODE: Final[Mapping[str, Any]] = {
    "autoupdate": False,
    "share": "disabled",
    "model": f"plait/{MODEL}",
    "small_model": f"plait/{MODEL}",
    "permission": {"bash": "allow"},
    "provider": {
        "plait": {
            "npm": "@ai-sdk/openai",
            "options": {"baseURL": "{url}/v1", "apiKey": KEY},
            "models": {MODEL: {"reasoning": True, "tool_call": True}},
        }
    },
}

AGENT_PROGRAMS: Final = (
    Agent(
        "Codex CLI",
        "@openai/codex",
        "@openai/codex/bin/codex.js",
        ("exec", *_CODEX, "Work."),
        ("exec", "resume", "--last", *_CODEX, "Go on."),
        ("exec", "--output-schema", SCHEMA_FILE, *_CODEX, "Work."),
        {"AGENT_KEY": KEY},
    ),
    Agent(
        "opencode",
        "opencode-linux-x64",
        "opencode-linux-x64/bin/opencode",
        ("run", "Work."),
        ("run", "-c", "Go on."),
        (),
        {
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
            "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
        },
        {".config/opencode/opencode.json": _OPENCODE},
    ),
    Agent(
        "Claude Code",
        "@anthropic-ai/claude-code-linux-x64",
        "@anthropic-ai/claude-code-linux-x64/claude",
        (*_CLAUDE, "Work."),
        (*_CLAUDE, "-c", "Go on."),
        (*_CLAUDE, "--output-format", "json", "--json-schema", json.dumps(SCHEMA), "Work."),
        {
            "ANTHROPIC_API_KEY": KEY,
            "ANTHROPIC_BASE_URL": "{url}",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
            "IS_SANDBOX": "1",
        },
    ),
)


def prepared(agent: Agent, url: str, home: Path) -> Mapping[str, str]:
    """The agent's environment, after its files have been written."""
    for name, content in {SCHEMA_FILE: SCHEMA, **agent.files}.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(json.dumps(content).replace("{url}", url))
    return {name: value.replace("{url}", url) for name, value in agent.environment.items()}


class ShellModel(StubEngine):
    """Thinks in each turn, calls the agent's shell twice at a time, and then repeats what that said.

    The pieces of both calls alternate. An object that has to fit a schema is the answer, or the arguments of the tool
    that an agent has for it. With `routes` it has Responses and Messages of its own.
    """

    def answer(self, received: Received) -> Script:
        """A stream, or a whole answer where the agent wants no stream."""
        asked = json.loads(received.body)
        translation = TRANSLATIONS.get(received.path)
        chat = asked if translation is None else translation.to_chat(asked)
        translator = None if translation is None else translation.answer(asked)
        if not asked.get("stream"):
            whole = json.dumps(_whole(chat)).encode()
            return Script([whole if translator is None else translator.whole(whole)], headers=JSON)
        pieces = [event if translator is None else translator.feed(event) for event in _events(chat)]
        return Script([piece for piece in pieces if piece], headers=EVENT_STREAM)


def _whole(chat: Mapping[str, Any]) -> dict[str, Any]:
    calls = [_piece(index, arguments, f"call_{index}", name) for index, (name, arguments) in enumerate(_calls(chat))]
    content = None if calls else _repeated(chat)
    message = {"role": "assistant", "content": content, "reasoning_content": "I think.", "tool_calls": calls or None}
    return {"model": MODEL, "choices": [{"message": message, "finish_reason": "tool_calls" if calls else "stop"}]}


def _events(chat: Mapping[str, Any]) -> Iterator[bytes]:
    calls = list(_calls(chat))
    yield _event({"role": "assistant", "content": "", "reasoning_content": "I think."})
    if calls:
        for cut in (slice(0, 0), slice(0, 9), slice(9, None)):
            for index, (name, arguments) in enumerate(calls):
                named = {"id": f"call_{len(chat['messages'])}_{index}", "name": name} if cut.stop == 0 else {}
                yield _event({"tool_calls": [_piece(index, arguments[cut], **named)]})
    else:
        yield _event({"content": _repeated(chat)})
    yield _event({}, "tool_calls" if calls else "stop")
    usage = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
    yield b"data: %b\n\n" % json.dumps({"model": MODEL, "choices": [], "usage": usage}).encode()
    yield b"data: [DONE]\n\n"


def _piece(index: int, arguments: str, id: str | None = None, name: str | None = None) -> dict[str, Any]:  # noqa: A002
    if name is None:
        return {"index": index, "function": {"arguments": arguments}}
    return {"index": index, "id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _calls(chat: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The calls that are due: those of the agent's shell, and when it has answered, the one with the object."""
    has_results = chat["messages"][-1]["role"] == "tool"
    for tool in chat.get("tools", ()):
        name, properties = tool["function"]["name"], tool["function"].get("parameters", {}).get("properties", {})
        if has_results:
            if name == "StructuredOutput" and all(said in _results(chat) for said in SAID):
                yield name, _object(chat)
        elif name.lower() in ("bash", "exec_command"):
            key = "cmd" if "cmd" in properties else "command"
            for command in COMMANDS:
                yield name, json.dumps({key: command, **({"description": "Echo"} if key == "command" else {})})


def _repeated(chat: Mapping[str, Any]) -> str:
    return _object(chat) if "response_format" in chat else _said(chat)


def _object(chat: Mapping[str, Any]) -> str:
    return json.dumps({"said": _said(chat)})


def _said(chat: Mapping[str, Any]) -> str:
    return "It said: " + " ".join(said for said in SAID if said in _results(chat))


def _results(chat: Mapping[str, Any]) -> str:
    """What has been said since the user's last turn."""
    said = []
    for message in reversed(chat["messages"]):
        if message["role"] != "tool":
            break
        said.append(json.dumps(message["content"]))
    return "\n".join(said)


def _event(delta: Mapping[str, Any], finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return b"data: %b\n\n" % json.dumps({"model": MODEL, "choices": [choice]}).encode()
