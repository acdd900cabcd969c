"""LangChain through the gateway: its chains as it runs them, and the same chains as programs of semantic functions."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("langchain_core", reason="LangChain is not installed (pip install langchain-core langchain-openai)")
pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")

from langchain_core.output_parsers import JsonOutputParser, StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnableParallel
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

from e2e.server_process import NO_TLS
from e2e.servers import Fleet
from examples.langchain_map_reduce import map_reduce
from plait.client import Client, SemanticVariable, VariableFailedError
from plait.client.langchain import Program, in_session, semantic
from tests.waiting import WITHIN_S

ROOT = Path(__file__).parents[1]
EMULATED = "This is emulated text."
PARTS = ["The first part.", "The second part.", "The third part."]
DRAFT = ChatPromptTemplate.from_template("Write about {topic}.")
TITLE = ChatPromptTemplate.from_template("Find a title for this text:\n{text}")


@pytest.fixture
def model(fleet: Fleet) -> Iterator[ChatOpenAI]:
    url, key = f"{fleet.gateway.url}/v1", SecretStr("none")
    with httpx.Client(verify=NO_TLS, timeout=WITHIN_S) as http:  # LangChain's own stays open
        yield ChatOpenAI(model="demo", base_url=url, api_key=key, max_completion_tokens=30, seed=1, http_client=http)


@pytest.fixture
async def client(fleet: Fleet) -> AsyncIterator[Client]:
    async with Client(f"{fleet.gateway.url}/v1", tls=NO_TLS) as client:
        yield client


def test_a_chain_has_the_same_result_in_the_gateway(model: ChatOpenAI, client: Client) -> None:
    """The prompts come to the same tokens, and the emulated text follows from the prompt."""
    draft: Runnable[Any, Any] = DRAFT | model | StrOutputParser()
    chain = draft | TITLE | model
    plain = chain.invoke({"topic": "rivers"})
    program = Program(chain, client, objective="latency").invoke({"topic": "rivers"})
    assert program.text == plain.text


async def test_a_map_reduce_runs_either_way(model: ChatOpenAI, client: Client) -> None:
    chain = map_reduce(model)
    program = Program(chain, client, objective="latency")
    results = [program.invoke(PARTS), await program.ainvoke(PARTS), "".join(program.stream(PARTS))]
    assert len(set(results)) == 1
    assert results[0].startswith(EMULATED)


def test_all_calls_of_a_chain_are_there_before_the_first_has_run(
    fleet: Fleet, model: ChatOpenAI, client: Client
) -> None:
    with client.session() as session:
        summary = semantic(map_reduce(model)).invoke(PARTS, in_session(session))
        assert isinstance(summary, SemanticVariable)
        session.run()
        variables = fleet.gateway.get(f"/v1/sessions/{session.id}").json()["variables"]
        assert sum(variable["producer"] != "client" for variable in variables) == len(PARTS) + 1
        assert summary.get().startswith(EMULATED)


async def test_branches_side_by_side_and_one_that_fails(model: ChatOpenAI, client: Client) -> None:
    text: Runnable[Any, Any] = DRAFT | model | StrOutputParser()
    both = await Program(RunnableParallel(a=text, b=text | TITLE | model), client).ainvoke({"topic": "hills"})
    assert both["a"].startswith(EMULATED)
    assert both["b"].text.startswith(EMULATED)
    with pytest.raises(VariableFailedError, match="json"):
        Program(DRAFT | model | JsonOutputParser(), client).invoke({"topic": "hills"})


@pytest.mark.parametrize("options", [[], ["--plain"]], ids=["program", "plain"])
def test_the_example_runs(fleet: Fleet, options: list[str]) -> None:
    where = [f"--base-url={fleet.gateway.url}/v1", "--model=demo", *options]
    command = [sys.executable, "examples/langchain_map_reduce.py", *where, "README.md"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=WITHIN_S)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(EMULATED)
