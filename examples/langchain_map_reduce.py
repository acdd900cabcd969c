"""A map-reduce chain in LangChain. The same chain runs in LangChain itself and, unchanged, as a program on Plait.

    plait demo                                          # a gateway with four emulated engines, in another shell
    pip install '.[langchain]' langchain-openai         # in a checkout of Plait
    python examples/langchain_map_reduce.py --model demo README.md

LangChain itself waits for every summary before it sends the last call. A `Program` submits all calls at once, with
their templates and variables. The summaries of the parts never leave the gateway.
"""

from __future__ import annotations

import argparse
import textwrap
from typing import Any

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

from plait.client import Client
from plait.client.langchain import Program

PART_CHARACTERS = 2000


def map_reduce(model: ChatOpenAI) -> Runnable[list[str], str]:
    """A chain from the parts of a text to its summary."""
    summarize = ChatPromptTemplate.from_template("Summarize this part of a text in two sentences:\n\n{part}")
    combine = ChatPromptTemplate.from_template("Make one summary of these summaries of a text's parts:\n\n{summaries}")
    maps: Runnable[Any, Any] = (summarize | model | StrOutputParser()).map()
    return maps | (lambda summaries: {"summaries": summaries}) | combine | model | StrOutputParser()


def main() -> None:
    """Summarize a file in the gateway, or with --plain in LangChain itself."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("file", type=argparse.FileType(encoding="utf-8"))
    arguments = parser.parse_args()
    parts = textwrap.wrap(arguments.file.read(), PART_CHARACTERS)
    model = ChatOpenAI(
        model=arguments.model, base_url=arguments.base_url, api_key=SecretStr("none"), max_completion_tokens=60
    )
    chain = map_reduce(model)
    if arguments.plain:
        print(chain.invoke(parts))
        return
    with Client(arguments.base_url) as client:
        print(Program(chain, client, objective="latency").invoke(parts))


if __name__ == "__main__":
    main()
