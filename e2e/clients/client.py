"""The clients of the matrix: which program runs each, in which environment, with which version."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from e2e.clients.environment import HERE, NODE, NODE_FILES, NODE_MODULES, OPENAI_2, OPENAI_3, ClientEnvironment

PROGRAMS: Final = HERE / "programs"


@dataclass(frozen=True)
class Client:
    """One client. `package` is what the index calls it; `environment` is None for Node's."""

    name: str
    package: str
    program: str
    environment: ClientEnvironment | None = None

    @property
    def title(self) -> str:
        """Its name and version, as the matrix shows them."""
        return f"{self.name} {self.version}"

    @property
    def version(self) -> str:
        """The version that is installed."""
        if self.environment is not None:
            return pinned(self.environment, self.package)
        return str(msgspec.json.decode(NODE_FILES[0].read_bytes())["dependencies"][self.package])

    @property
    def file_name(self) -> str:
        """A name for its files."""
        return re.sub(r"\W+", "-", self.name.lower()).strip("-")

    @property
    def why_not(self) -> str | None:
        """Why it cannot run on this machine; None if it can."""
        if self.environment is None and shutil.which("node") is None:
            return "Node is not installed"
        return None

    @property
    def command(self) -> Sequence[str]:
        """What runs its program. Raises `AssertionError` if its environment is not there."""
        runs = NODE_MODULES if self.environment is None else self.environment.environment.python
        assert runs.exists(), "its environment is not there: run `make e2e-clients`"
        if self.environment is None:
            return ["node", str(NODE / self.program)]
        return [str(runs), str(PROGRAMS / self.program)]


def pinned(environment: ClientEnvironment, package: str) -> str:
    """The version of a package in an environment."""
    found = re.search(rf"^{re.escape(package)}==(\S+)", Path(environment.constraints).read_text(), re.MULTILINE)
    assert found, f"{package} is not in {environment.constraints.name}"
    return found[1]


OPENAI_PYTHON: Final = Client("OpenAI Python", "openai", "with_openai.py", OPENAI_3)
OPENAI_PYTHON_BEFORE: Final = Client("OpenAI Python, major before", "openai", "with_openai.py", OPENAI_2)
OPENAI_NODE: Final = Client("OpenAI Node", "openai", "with_openai.mjs")
OPENAI_AGENTS: Final = Client("OpenAI Agents", "openai-agents", "with_agents.py", OPENAI_3)
ANTHROPIC_PYTHON: Final = Client("Anthropic Python", "anthropic", "with_anthropic.py", OPENAI_3)

CLIENTS: Final = (
    OPENAI_PYTHON,
    OPENAI_PYTHON_BEFORE,
    OPENAI_NODE,
    OPENAI_AGENTS,
    ANTHROPIC_PYTHON,
    Client("LangChain", "langchain-openai", "with_langchain.py", OPENAI_3),
    Client("LlamaIndex", "llama-index-llms-openai-like", "with_llama_index.py", OPENAI_2),
    Client("LiteLLM", "litellm", "with_litellm.py", OPENAI_2),
    Client("Instructor", "instructor", "with_instructor.py", OPENAI_2),
    Client("Pydantic AI", "pydantic-ai-slim", "with_pydantic_ai.py", OPENAI_3),
    Client("AI SDK", "ai", "with_ai_sdk.mjs"),
    Client("Haystack", "haystack-ai", "with_haystack.py", OPENAI_3),
)

TRANSLATED: Final = (OPENAI_PYTHON, OPENAI_NODE, OPENAI_AGENTS, ANTHROPIC_PYTHON)
"""Those that also ask a gateway that translates Responses and Messages, as for engines without these routes."""
