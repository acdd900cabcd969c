"""Two summaries of a long text, in an event loop: a chain, part after part, and a map-reduce, all parts at once.

    plait demo                                          # a gateway with four emulated engines, in another shell
    python examples/summaries.py --model demo README.md

The calls of the chain run one after the other inside the gateway, for latency. The maps of the map-reduce are one task
group: the gateway optimises the time at which the last of them is done.
"""

from __future__ import annotations

import argparse
import asyncio
import textwrap
from collections.abc import Sequence

from plait.client import Argument, Client, SemanticVariable, Session, Text, semantic_function

PART_CHARACTERS = 2000


@semantic_function(max_tokens=60)
def continue_summary(summary: Text, part: Text) -> SemanticVariable:
    """
    Here is a summary of a text so far, and its next part. Write a summary of all of it.
    So far: {{summary}}
    The next part: {{part}}
    The summary: {{longer}}
    """
    raise NotImplementedError


@semantic_function(max_tokens=60)
def summarize(part: Text) -> SemanticVariable:
    """
    Summarize this part of a text in two sentences.
    The part: {{part}}
    The summary: {{summary}}
    """
    raise NotImplementedError


@semantic_function(max_tokens=100)
def combine(summaries: Argument) -> SemanticVariable:
    """
    Make one summary of the summaries of a text's parts.
    {{summaries}}
    The summary: {{whole}}
    """
    raise NotImplementedError


def in_a_chain(session: Session, parts: Sequence[str]) -> SemanticVariable:
    """One call for each part after the first. Each call waits for the one before it."""
    summary = session.variable(parts[0])
    for part in parts[1:]:
        summary = continue_summary(summary, part)
    return summary


def in_parallel(session: Session, parts: Sequence[str]) -> SemanticVariable:
    """One call for each part, and one call that combines their summaries."""
    return combine([summarize.on(session)(part) for part in parts])


async def summaries(client: Client, text: str) -> tuple[str, str]:
    """Both summaries, computed at the same time."""
    parts = textwrap.wrap(text, PART_CHARACTERS)
    async with client.session() as session:
        chained, reduced = in_a_chain(session, parts), in_parallel(session, parts)
        first, second = await asyncio.gather(chained.aget("latency"), reduced.aget("latency"))
    return first, second


async def main() -> None:
    """Summarize a file."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", default="demo")
    parser.add_argument("file", type=argparse.FileType(encoding="utf-8"))
    arguments = parser.parse_args()
    async with Client(arguments.base_url, model=arguments.model) as client:
        chained, reduced = await summaries(client, arguments.file.read())
    print(f"--- in a chain\n{chained}\n--- in parallel\n{reduced}")


if __name__ == "__main__":
    asyncio.run(main())
