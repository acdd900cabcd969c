"""The same programs through each front end, and chained by hand: a map-reduce over a document, and a chain."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

import httpx
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable
from langchain_openai import ChatOpenAI
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from pydantic import SecretStr

from e2e.programs import Program, ProgramCall, by_hand, chained_by_gateway, texts, whole
from e2e.server_process import NO_TLS
from plait.client import Argument, Client, SemanticVariable, Text, semantic_function
from plait.client.langchain import Program as ChainProgram
from tests.waiting import WITHIN_S

MAPS, PART_WORDS, OUTPUT_TOKENS = 16, 300, 40
LINKS = 8
SUMMARIZE, COMBINE, GO_ON = "Summarize this part:\n", "Make one summary of these:\n", "Go on:\n"
"""What each prompt begins with."""
LATENCY = "latency"
_WORDS = ["river", "stone", "cloud", "letter", "garden", "winter", "signal", "harbour", "engine", "mirror"]


def document(seed: object, parts: int = MAPS) -> list[str]:
    """Parts of a text that no other seed has."""
    chance = random.Random(f"document {seed}")
    return [" ".join(f"{chance.choice(_WORDS)}{chance.randrange(10)}" for _ in range(PART_WORDS)) for _ in range(parts)]


def map_reduce_of(parts: Sequence[str]) -> Program:
    """A summary of each part, and one of these."""
    maps = [
        ProgramCall(f"part{number}", SUMMARIZE + part, max_tokens=OUTPUT_TOKENS) for number, part in enumerate(parts)
    ]
    taken = "\n\n".join(f"{{{{{call.output}}}}}" for call in maps)
    return [*maps, ProgramCall("whole", COMBINE + taken, max_tokens=OUTPUT_TOKENS)]


def chain_of(text: str, output_tokens: int) -> Program:
    """Each call goes on from the text of the one before it."""
    texts = [text, *(f"{{{{link{number}}}}}" for number in range(LINKS - 1))]
    return [ProgramCall(f"link{number}", GO_ON + text, max_tokens=output_tokens) for number, text in enumerate(texts)]


# The Python front end.


@semantic_function(max_tokens=OUTPUT_TOKENS, seed=0)
def summarize(part: Text) -> SemanticVariable:
    """Summarize this part:
    {{part}}{{summary}}"""
    raise NotImplementedError


@semantic_function(max_tokens=OUTPUT_TOKENS, seed=0)
def combine(summaries: Argument) -> SemanticVariable:
    """Make one summary of these:
    {{summaries}}{{whole}}"""
    raise NotImplementedError


def map_reduce(parts: Sequence[str]) -> SemanticVariable:
    """As `map_reduce_of`."""
    return combine([summarize(part) for part in parts])


def chain(text: Text, output_tokens: int) -> Text:
    """As `chain_of`."""

    @semantic_function(max_tokens=output_tokens, seed=0)
    def go_on(text: Text) -> SemanticVariable:
        """Go on:
        {{text}}{{more}}"""
        raise NotImplementedError

    for _ in range(LINKS):
        text = go_on(text)
    return text


# LangChain.


def langchain_map_reduce(model: ChatOpenAI) -> Runnable[Any, str]:
    """As `map_reduce_of`."""
    model = model.model_copy(update={"max_tokens": OUTPUT_TOKENS})
    maps: Runnable[Any, Any] = (
        ChatPromptTemplate.from_template(SUMMARIZE + "{part}") | model | StrOutputParser()
    ).map()
    reduce = ChatPromptTemplate.from_template(COMBINE + "{summaries}") | model | StrOutputParser()
    return maps | (lambda summaries: {"summaries": summaries}) | reduce


def langchain_chain(model: ChatOpenAI, output_tokens: int) -> Runnable[Any, str]:
    """As `chain_of`."""
    model = model.model_copy(update={"max_tokens": output_tokens})
    link: Runnable[Any, Any] = ChatPromptTemplate.from_template(GO_ON + "{text}") | model | StrOutputParser()
    last = link
    for _ in range(LINKS - 1):
        last = last | link
    return last


class FrontEnds:
    """Clients of one address. They keep their connections. Each method returns a program's last text."""

    def __init__(self, client: Client, async_client: Client, sdk: AsyncOpenAI, http: httpx.AsyncClient) -> None:
        self._client = client
        self._async_client = async_client
        self._sdk = sdk
        self._http = http
        self._model = ChatOpenAI(model="demo", api_key=SecretStr("none"), seed=0)

    def map_reduces(self) -> Mapping[str, Callable[[Sequence[str]], Awaitable[str]]]:
        """A map-reduce of parts, by front end."""
        return {
            "sync": lambda parts: asyncio.to_thread(self._client.run, map_reduce, parts, objective=LATENCY),
            "async": lambda parts: self._async_client.arun(map_reduce, parts, objective=LATENCY),
            "langchain": lambda parts: asyncio.to_thread(self._langchain(langchain_map_reduce(self._model)), parts),
            "programs": lambda parts: self._by_request(map_reduce_of(parts)),
            "headers": lambda parts: self._by_headers(map_reduce_of(parts)),
            "by hand": lambda parts: self._by_hand(map_reduce_of(parts)),
        }

    def chains(self, output_tokens: int) -> Mapping[str, Callable[[str], Awaitable[str]]]:
        """A chain from a text, by front end."""
        langchain = self._langchain(langchain_chain(self._model, output_tokens))
        return {
            "sync": lambda text: asyncio.to_thread(self._client.run, chain, text, output_tokens, objective=LATENCY),
            "async": lambda text: self._async_client.arun(chain, text, output_tokens, objective=LATENCY),
            "langchain": lambda text: asyncio.to_thread(langchain, {"text": text}),
            "programs": lambda text: self._by_request(chain_of(text, output_tokens)),
            "headers": lambda text: self._by_headers(chain_of(text, output_tokens)),
            "by hand": lambda text: self._by_hand(chain_of(text, output_tokens)),
        }

    def _langchain(self, chain: Runnable[Any, str]) -> Callable[[Any], str]:
        program = ChainProgram(chain, self._client, objective=LATENCY)
        return lambda given: str(program.invoke(given))

    async def _by_request(self, program: Program) -> str:
        last = program[-1].output
        answer = await self._http.post("/programs", json={"calls": whole(program), "gets": {last: LATENCY}})
        return str(answer.raise_for_status().json()["values"][last])

    async def _by_headers(self, program: Program) -> str:
        """All calls at once by OpenAI's client, which says in each header what they are for."""
        headers = {"plait-session-objective": LATENCY}
        answers = await chained_by_gateway(self._sdk, f"headers-{uuid4().hex}", program, extra_headers=headers)
        return texts(answers)[program[-1].output]

    async def _by_hand(self, program: Program) -> str:
        return (await by_hand(self._sdk, program))[program[-1].output]


@asynccontextmanager
async def front_ends(url: str) -> AsyncIterator[FrontEnds]:
    """Clients of a gateway at this URL."""
    where = f"{url}/v1"
    async with (
        Client(where, model="demo", tls=NO_TLS) as async_client,
        httpx.AsyncClient(base_url=where, verify=NO_TLS, timeout=WITHIN_S) as http,
        AsyncOpenAI(
            base_url=where, api_key="none", max_retries=0, http_client=DefaultAsyncHttpxClient(verify=NO_TLS)
        ) as sdk,
    ):
        with Client(where, model="demo", tls=NO_TLS) as client:
            yield FrontEnds(client, async_client, sdk, http)
