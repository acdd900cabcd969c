"""Programs of several calls: run by hand, one round trip after the other, or given to the gateway all at once."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

METAGPT = Path(__file__).resolve().parents[2] / "shared" / "traces" / "metagpt" / "log_3_round.jsonl"


@dataclass(frozen=True)
class ProgramCall:
    """One call: `{{name}}` in its prompt is the output of another."""

    output: str
    prompt: str
    seed: int = 0
    max_tokens: int = 12

    @property
    def inputs(self) -> list[str]:
        return sorted(set(re.findall(r"\{\{(\w+)\}\}", self.prompt)))

    def request(self, prompt: str) -> dict[str, Any]:
        messages = [{"role": "user", "content": prompt}]
        return {"model": "demo", "messages": messages, "seed": self.seed, "max_tokens": self.max_tokens}


Program = Sequence[ProgramCall]
"""Every call after those whose outputs it takes."""


async def by_hand(client: AsyncOpenAI, program: Program) -> dict[str, str]:
    """Each output's text, as a client gets it that knows nothing of semantic variables."""
    texts: dict[str, str] = {}
    for call in program:
        prompt = re.sub(r"\{\{(\w+)\}\}", lambda match: texts[match[1]], call.prompt)
        answer = await client.chat.completions.create(**call.request(prompt))
        texts[call.output] = answer.choices[0].message.content or ""
    return texts


async def ask(client: AsyncOpenAI, session: str, call: ProgramCall, **fields: Any) -> Any:
    """One call of a program, as it is given to the gateway."""
    headers = {"plait-session": session, "plait-output": call.output}
    if call.inputs:
        headers["plait-inputs"] = ", ".join(call.inputs)
    return await client.chat.completions.create(**call.request(call.prompt), extra_headers=headers, **fields)


async def at_once(client: AsyncOpenAI, session: str, program: Program) -> dict[str, str]:
    """Each output's text, all calls sent at the same time."""
    answers = await asyncio.gather(*(ask(client, session, call) for call in program))
    return {call.output: answer.choices[0].message.content for call, answer in zip(program, answers, strict=True)}


def chain(chunks: int) -> Program:
    """A summary that is carried from chunk to chunk."""
    first = ProgramCall("s0", "Summarize part 0.")
    return [first, *(ProgramCall(f"s{n}", f"{{{{s{n - 1}}}}} Go on with part {n}.", n) for n in range(1, chunks))]


def map_reduce(maps: int) -> Program:
    """Chunks that are summarized by themselves, and then together."""
    parts = [ProgramCall(f"part{n}", f"Summarize part {n}.", n) for n in range(maps)]
    return [*parts, ProgramCall("all", "Together: " + " ".join(f"{{{{{part.output}}}}}" for part in parts))]


def diamond() -> Program:
    """Two calls between a first and a last one."""
    sides = [ProgramCall(side, f"The {side} of {{{{top}}}}", seed) for seed, side in enumerate(("left", "right"))]
    return [ProgramCall("top", "Begin."), *sides, ProgramCall("bottom", "{{left}} and {{right}} of {{top}}")]


def metagpt() -> Program:
    """A software team of the recorded run, 25 calls: an architect, and for each of 8 files a coder, a reviewer who
    sees all code, and a coder who revises it by all reviews.
    """
    logged: dict[str, Any] = {}
    for line in METAGPT.read_text(encoding="utf-8").splitlines():
        logged |= json.loads(line)
    architect = logged["r0_queries"]["noname"]
    files = list(logged["r1_queries"])
    codes = "\n".join(f"{{{{code{n}}}}}" for n in range(len(files)))
    reviews = "\n".join(f"{{{{review{n}}}}}" for n in range(len(files)))
    program = [ProgramCall("design", f"{architect['system']}\n{architect['user_msg']}", max_tokens=40)]
    for round_, output, context in (
        (1, "code", "{{design}}"),
        (2, "review", f"{{{{design}}}}\n{codes}"),
        (3, "revised", f"{{{{design}}}}\n{codes}\n{reviews}"),
    ):
        for number, file in enumerate(files):
            query = logged[f"r{round_}_queries"][file]
            task = query["user_msg"][-400:]  # which file it is about
            program.append(ProgramCall(f"{output}{number}", f"{query['system']}\n{context}\n{task}", number, 20))
    return program
