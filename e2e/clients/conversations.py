"""Conversations of two turns: each client with each engine that says no, and with each mishap of the first turn.

A client works where its second turn ends with the right answer, no request of the second turn is refused for good, and
each thought of the first turn is in the engine's prompt of the second one: as reasoning of the assistant, and nowhere
else. What a client cannot do with any server is said in its row, and not asked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import msgspec

from e2e.clients.agent import AGENT_PROGRAMS, Agent, prepared
from e2e.clients.client import ANTHROPIC_PYTHON, CLIENTS, OPENAI_PYTHON, Client
from e2e.clients.program_run import KEY, ProgramError, run_tool
from e2e.clients.thinking_model import (
    ANSWER,
    CONTEXT_32768,
    CONTEXT_40960,
    MALFORMED,
    MISTRAL,
    PROMPTS,
    SGLANG,
    SGLANG_40960,
    VLLM,
    Kind,
    Mishap,
    Step,
    ThinkingModel,
    has_picture,
    png,
)
from e2e.real_engines.environment import ROOT
from e2e.real_engines.findings import REPORTS

PAGE: Final = ROOT / "docs" / "clients.md"
OUTCOMES: Final = REPORTS / "conversations"
"""A file for each conversation: what is wrong with it."""
BEGINS, ENDS = "<!-- conversations -->\n", "<!-- end of conversations -->\n"
"""Around the table in the page."""


@dataclass(frozen=True)
class Talker:
    """A client that holds conversations. `speaks` is the API, `kind` the way in which it keeps the history."""

    title: str
    speaks: str
    kind: str = ""
    client: Client | None = None
    agent: Agent | None = None
    without: Mapping[Mishap, str] = field(default_factory=dict)
    """Mishaps that the client does not survive with any server, or that no gateway can mend, and why."""
    drops_thoughts: str = ""
    """Why the client itself sends none back; empty if it does."""
    brief: bool = False
    """Whether it has few of the conversations: another row of the same program has them, or it is not translated."""

    def __str__(self) -> str:
        return self.file_name

    @property
    def name(self) -> str:
        """The row in the table."""
        return f"{self.title}, {self.speaks}"

    @property
    def file_name(self) -> str:
        """A name for its tests and files."""
        return re.sub(r"\W+", "-", self.name.lower()).strip("-")

    @property
    def why_not(self) -> str | None:
        """Why it cannot run on this machine; None if it can."""
        if self.agent is not None:
            return None if self.agent.runs else "it has no program for this machine"
        assert self.client is not None
        return self.client.why_not


@dataclass(frozen=True)
class Cell:
    """One conversation: an engine, and what goes wrong."""

    kind: Kind
    mishap: Mishap

    @property
    def name(self) -> str:
        """A name for its tests and files."""
        return re.sub(r"[^\w.]+", "-", f"{self.kind.name} {self.mishap}".lower())

    @property
    def column(self) -> str:
        """The column in the table: the engine, or the mishap on SGLang."""
        if self.mishap is Mishap.NONE:
            return self.kind.name
        return "malformed call" if self.mishap in MALFORMED else self.mishap.value


ENGINES: Final = tuple(Cell(kind, Mishap.NONE) for kind in (SGLANG, VLLM, MISTRAL))
CONTEXTS: Final = tuple(Cell(kind, Mishap.NONE) for kind in (CONTEXT_40960, CONTEXT_32768, SGLANG_40960))
"""Agents fill a context with their instructions."""
RECORDED: Final = (Mishap.NONE, Mishap.CUT_CALL, Mishap.PICTURE)
"""Whose last requests, on SGLang, are in the corpus for the fast tests."""
MISHAPS: Final = tuple(Cell(SGLANG, mishap) for mishap in Mishap if mishap is not Mishap.NONE)
COLUMNS: Final = tuple(dict.fromkeys(cell.column for cell in (*ENGINES, *CONTEXTS, *MISHAPS)))


def cells(talker: Talker) -> Iterator[Cell]:
    """The conversations that a client has."""
    yield from ENGINES
    if talker.agent is not None and not talker.brief:
        yield from CONTEXTS
    for cell in MISHAPS:
        is_anyway = talker.agent is not None and cell.mishap is Mishap.RESUMED
        is_left_out = talker.brief and cell.mishap not in RECORDED
        if not (is_anyway or is_left_out or cell.mishap in talker.without):
            yield cell


# The agents.

CODEX, OPENCODE, CLAUDE_CODE = AGENT_PROGRAMS
_CODEX_SHORTENED: Final = ("-c", "model_auto_compact_token_limit=20000")
_OPENCODE_FILE: Final = ".config/opencode/opencode.json"


def _opencode(package: str) -> Agent:
    """opencode over another package of the AI SDK, with a context that it knows of."""
    settings = json.loads(json.dumps(OPENCODE.files[_OPENCODE_FILE]))
    settings["permission"] |= {"read": "allow", "external_directory": "allow"}
    settings["provider"]["plait"]["npm"] = package
    settings["provider"]["plait"]["models"]["demo"] |= {
        "limit": {"context": 40_000, "output": 4_000},
        "modalities": {"input": ["text", "image"], "output": ["text"]},
        "attachment": True,
    }
    return replace(OPENCODE, files={_OPENCODE_FILE: settings})


def _commands(talker: Talker, agent: Agent, model: str, cell: Cell) -> Iterator[list[str]]:
    """What is run for each turn, and between them what makes the agent shorten its history."""
    for turn, arguments in enumerate((agent.first, agent.next)):
        asked = [model if argument == "demo" else argument for argument in arguments]
        asked[-1] = PROMPTS[turn]
        if talker.title == CODEX.name:
            window = cell.kind.context_tokens
            asked[1 if turn == 0 else 3 : 1 if turn == 0 else 3] = ["-c", f"model_context_window={window}"]
            if cell.mishap is Mishap.SHORTENED:
                asked[-1:-1] = _CODEX_SHORTENED
        if talker.title == OPENCODE.name:
            asked[-1:-1] = ["-m", f"plait/{model}"]
        if talker.title == CLAUDE_CODE.name and cell.mishap is Mishap.SHORTENED and turn == 1:
            yield [*asked[:-1], "/compact"]
        yield asked


AS_IT_IS: Final = dict.fromkeys(MALFORMED, "a chat goes to the engine as it is")
NO_OBJECT: Final = dict.fromkeys(
    (Mishap.EMPTY_CALL, Mishap.NULL_CALL, Mishap.LIST_CALL), "it raises where arguments are no object"
)
WITHOUT: Final[Mapping[tuple[str, str], Mapping[Mishap, str]]] = {
    ("LangChain", "Responses"): NO_OBJECT,
    ("LangChain", "Responses stored"): NO_OBJECT,
    ("AI SDK", "chat"): {**AS_IT_IS, Mishap.PICTURE: "it writes a tool's picture as text"},
}
DROPS_THOUGHTS: Final[Mapping[tuple[str, str], str]] = {
    ("LangChain", "chat"): "it sends no thoughts back",
}

TALKERS: Final = (
    Talker(CODEX.name, "Responses", agent=CODEX),
    Talker(CLAUDE_CODE.name, "Messages", agent=CLAUDE_CODE),
    Talker(OPENCODE.name, "Responses", agent=_opencode("@ai-sdk/openai")),
    Talker(OPENCODE.name, "Messages", agent=_opencode("@ai-sdk/anthropic"), brief=True),
    Talker(OPENCODE.name, "chat", agent=_opencode("@ai-sdk/openai-compatible"), brief=True),
    *(
        Talker(
            client.name,
            speaks,
            kind,
            replace(client, program=program),
            without=WITHOUT.get((client.name, speaks), AS_IT_IS if speaks == "chat" else {}),
            drops_thoughts=DROPS_THOUGHTS.get((client.name, speaks), ""),
            brief=speaks == "chat",
        )
        for client, program, ways in (
            (
                next(client for client in CLIENTS if client.package == "ai"),
                "converse_with_ai_sdk.mjs",
                {"Responses": "sent", "Responses stored": "stored", "Messages": "anthropic", "chat": "compatible"},
            ),
            (
                OPENAI_PYTHON,
                "converse_with_openai.py",
                {"Responses": "sent", "Responses stored": "stored", "chat": "chat"},
            ),
            (
                ANTHROPIC_PYTHON,
                "converse_with_anthropic.py",
                {"Messages": "whole", "Messages streamed": "stream"},
            ),
            (
                next(client for client in CLIENTS if client.name == "LangChain"),
                "converse_with_langchain.py",
                {"Responses": "sent", "Responses stored": "stored", "Messages": "anthropic", "chat": "chat"},
            ),
            (
                next(client for client in CLIENTS if client.name == "Pydantic AI"),
                "converse_with_pydantic_ai.py",
                {"Responses": "sent", "Responses, unknown model": "unknown", "Messages": "anthropic", "chat": "chat"},
            ),
            (
                next(client for client in CLIENTS if client.name == "LiteLLM"),
                "converse_with_litellm.py",
                {"Responses": "sent", "Responses stored": "stored", "Messages": "anthropic", "chat": "chat"},
            ),
        )
        for speaks, kind in ways.items()
    ),
)


# One conversation.


def converse(talker: Talker, cell: Cell, url: str, engine: ThinkingModel, home: Path) -> list[str]:
    """Hold the conversation, and give what each process of the client said. A first turn may fail where it is cut."""
    engine.begin(cell.mishap)
    picture = home / "picture.png"
    picture.write_bytes(png())
    engine.picture = str(picture)
    said = []
    runs = _agent_runs(talker, cell, url, engine, home) if talker.agent else _program_runs(talker, cell, engine, home)
    for number, (command, environment) in enumerate(runs):
        try:
            said.append(run_tool(command, home, {**_served(url), **environment}).stdout)
        except ProgramError as error:
            if number > 0 or cell.mishap is not Mishap.CUT_ANSWER:
                raise
            said.append(str(error))
    return said


def _served(url: str) -> Mapping[str, str]:
    return {"PLAIT_URL": url, "PLAIT_KEY": KEY, "PLAIT_LIMITED_KEY": KEY}


def _agent_runs(
    talker: Talker, cell: Cell, url: str, engine: ThinkingModel, home: Path
) -> Iterator[tuple[list[str], Mapping[str, str]]]:
    assert talker.agent is not None
    written = json.dumps(dict(talker.agent.files))
    files = json.loads(written.replace('"demo"', f'"{engine.model}"').replace("/demo", f"/{engine.model}"))
    environment = prepared(replace(talker.agent, files=files), url, home)
    for arguments in _commands(talker, talker.agent, engine.model, cell):
        yield [*talker.agent.runs, *(one.replace("{url}", url) for one in arguments)], environment


def _program_runs(
    talker: Talker, cell: Cell, engine: ThinkingModel, home: Path
) -> Iterator[tuple[list[str], Mapping[str, str]]]:
    assert talker.client is not None
    apart = cell.mishap in (Mishap.RESUMED, Mishap.CUT_ANSWER)
    for prompts in [[prompt] for prompt in PROMPTS] if apart else [list(PROMPTS)]:
        job = {
            "model": engine.model,
            "kind": talker.kind,
            "prompts": prompts,
            "history": str(home / "history.json"),
            "picture": engine.picture,
            "shortened": cell.mishap is Mishap.SHORTENED,
        }
        yield [*talker.client.command, json.dumps(job)], {}


def faults(talker: Talker, cell: Cell, engine: ThinkingModel, said: Sequence[str]) -> Iterator[str]:
    """What is wrong with a conversation that has been held."""
    if ANSWER not in said[-1]:
        yield f"the last turn says {said[-1][-600:]!r}"
    if cell.kind.too_long is None and talker.speaks != "chat":  # opencode's request for a title gets 400 as it is
        yield from (f"the engine refuses: {refusal}" for refusal in dict.fromkeys(engine.refusals))
    first, last = ([step for step in engine.steps if step.turn == turn] for turn in (0, 1))
    if not first or not last:
        yield f"the engine saw {len(first)} steps of the first turn and {len(last)} of the last one"
        return
    if cell.mishap not in (Mishap.NONE, Mishap.RESUMED) and not engine.has_happened:
        yield "nothing went wrong"
    if cell.mishap is Mishap.PICTURE and not any(has_picture(step.chat) for step in engine.steps):
        yield "the picture is not in the engine's prompt"
    if cell.mishap is Mishap.SHORTENED and first[0].call_id in json.dumps(last[0].chat["messages"]):
        yield "the client has not shortened its history"
    yield from _lost_thoughts(talker, cell, [*first, *last])


def _lost_thoughts(talker: Talker, cell: Cell, steps: Sequence[Step]) -> Iterator[str]:
    """Thoughts that a later prompt lacks, or has in the wrong place."""
    for number, step in enumerate(steps):
        for later in steps[number + 1 :]:
            where = list(_places(later.chat, step.thought))
            is_forgotten = cell.mishap is Mishap.SHORTENED and not _goes_on_from(step, later.chat)
            if not (talker.drops_thoughts or is_forgotten) and "reasoning" not in where:
                yield f"{step.thought!r} of turn {step.turn + 1} is lost in turn {later.turn + 1}"
            yield from (f"{step.thought!r} is a text of the {place}" for place in where if place != "reasoning")


def _goes_on_from(step: Step, chat: Mapping[str, Any]) -> bool:
    """Whether a chat still has a step, and is not one that asks for a summary."""
    return chat["messages"][-1]["role"] == "tool" and step.call_id in json.dumps(chat["messages"])


def _places(chat: Mapping[str, Any], thought: str) -> Iterator[str]:
    """Where a thought is: `reasoning` of the assistant, or the role whose text it is."""
    for message in chat["messages"]:
        if (
            message["role"] == "assistant"
            and thought in f"{message.get('reasoning')}{message.get('reasoning_content')}"
        ):
            yield "reasoning"
        if thought in json.dumps(message.get("content")):
            yield message["role"]


# The table.


def enter(talker: Talker, cell: Cell, found: Sequence[str]) -> None:
    """Note what is wrong with a conversation, if anything is, for the table."""
    OUTCOMES.mkdir(parents=True, exist_ok=True)
    _outcome(talker, cell).write_bytes(msgspec.json.encode(found))


def _outcome(talker: Talker, cell: Cell) -> Path:
    return OUTCOMES / f"{talker.file_name}-{cell.name}.json"


def table() -> Iterator[str]:
    """The rows that were run, as Markdown. A column of several mishaps works if each of them does."""
    yield f"|  | {' | '.join(COLUMNS)} |"
    yield f"|---|{':-:|' * len(COLUMNS)}"
    for talker in TALKERS:
        shown: dict[str, str] = {}
        for cell in cells(talker):
            outcome = _outcome(talker, cell)
            if outcome.exists():
                works = not msgspec.json.decode(outcome.read_bytes())
                shown[cell.column] = shown.get(cell.column, "+") if works else "FAILS"
        if shown:
            yield f"| {talker.name} | {' | '.join(shown.get(column, '') for column in COLUMNS)} |"
    yield ""
    for talker in TALKERS:
        reasons = dict.fromkeys(filter(None, (*talker.without.values(), talker.drops_thoughts)))
        if said := "; ".join(reason for reason in reasons if reason not in AS_IT_IS.values()):
            yield f"- {talker.name}: {said}."


def write_page() -> None:
    """Put the table into docs/clients.md."""
    before, begins, rest = PAGE.read_text().partition(BEGINS)
    _, ends, after = rest.partition(ENDS)
    if not (begins and ends):
        raise SystemExit(f"{PAGE} has no place for the table")
    PAGE.write_text(before + begins + "\n" + "\n".join(table()) + "\n\n" + ends + after)


if __name__ == "__main__":
    write_page()
