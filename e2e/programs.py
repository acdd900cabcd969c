"""Programs of several calls: chained by hand, as clients do, or given to the gateway all at once."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any, NamedTuple

from openai import AsyncOpenAI
from openai.types.chat import ChatCompletion

from e2e.traces import METAGPT


@dataclass(frozen=True)
class ProgramCall:
    """One call: `{{name}}` in its prompt is the output of another."""

    output: str
    prompt: str
    seed: int = 0
    max_tokens: int = 12
    objective: str | None = None

    @property
    def inputs(self) -> list[str]:
        return sorted(set(re.findall(r"\{\{(\w+)\}\}", self.prompt)))

    def filled_in(self, texts: Mapping[str, str]) -> str:
        """Its prompt, by the texts of its inputs."""
        return re.sub(r"\{\{(\w+)\}\}", lambda match: texts[match[1]], self.prompt)

    def request(self, prompt: str) -> dict[str, Any]:
        messages = [{"role": "user", "content": prompt}]
        return {"model": "demo", "messages": messages, "seed": self.seed, "max_tokens": self.max_tokens}


Program = Sequence[ProgramCall]
"""Every call after those whose outputs it takes."""

NO_HEADERS: Mapping[str, str] = {}

Answers = dict[str, ChatCompletion]
"""Each call's, by its output."""


async def by_hand(client: AsyncOpenAI, program: Program) -> dict[str, str]:
    """Each output's text, as a client gets it that knows nothing of semantic variables."""
    return texts(await chained_by_client([client], program))


async def chained_by_client(servers: Sequence[AsyncOpenAI], program: Program, **fields: Any) -> Answers:
    """Each call is sent as soon as the client has its inputs, to each of the servers in turn; `fields` are of all."""
    turns = cycle(servers)
    sent: dict[str, asyncio.Task[ChatCompletion]] = {}

    async def run(call: ProgramCall) -> ChatCompletion:
        inputs = {name: await sent[name] for name in call.inputs}
        request = call.request(call.filled_in(texts(inputs)))
        answer: ChatCompletion = await next(turns).chat.completions.create(**request | fields)
        return answer

    async with asyncio.TaskGroup() as group:
        sent.update((call.output, group.create_task(run(call))) for call in program)
    return {output: task.result() for output, task in sent.items()}


async def ask(
    client: AsyncOpenAI,
    session: str,
    call: ProgramCall,
    *,
    extra_headers: Mapping[str, str] = NO_HEADERS,
    **fields: Any,
) -> Any:
    """One call of a program, as it is given to the gateway."""
    headers = {"plait-session": session, "plait-output": call.output, **extra_headers}
    if call.inputs:
        headers["plait-inputs"] = ", ".join(call.inputs)
    if call.objective is not None:
        headers["plait-objective"] = call.objective
    return await client.chat.completions.create(**call.request(call.prompt) | fields, extra_headers=headers)


async def at_once(client: AsyncOpenAI, session: str, program: Program) -> dict[str, str]:
    """Each output's text, all calls sent at the same time."""
    return texts(await chained_by_gateway(client, session, program))


async def chained_by_gateway(client: AsyncOpenAI, session: str, program: Program, **fields: Any) -> Answers:
    """All calls are sent at the same time; `fields` are of all, `extra_headers` among them."""
    answers = await asyncio.gather(*(ask(client, session, call, **fields) for call in program))
    return {call.output: answer for call, answer in zip(program, answers, strict=True)}


def whole(program: Program) -> list[dict[str, Any]]:
    """The calls of a program, as `/v1/programs` takes them."""
    return [
        {
            **call.request(call.prompt),
            "messages": [{"role": "user", "content": call.prompt}, {"role": "assistant", "content": "{{OUT}}"}],
            "placeholders": [
                *({"name": name} for name in call.inputs),
                {"name": "OUT", "in_out": True, "semantic_var_id": call.output},
            ],
        }
        for call in program
    ]


def texts(answers: Answers) -> dict[str, str]:
    """Each output's text."""
    return {output: answer.choices[0].message.content or "" for output, answer in answers.items()}


def wanted(program: Program, objective: str) -> Program:
    """The same, its results (what no other call takes) asked for with an objective."""
    taken = {name for call in program for name in call.inputs}
    return [call if call.output in taken else replace(call, objective=objective) for call in program]


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


class _Logged(NamedTuple):
    """A call of the recorded run."""

    prompt: str
    output: str
    output_tokens: int


def metagpt(output_share: float = 1 / 8) -> Program:
    """A software team of the recorded run, 25 calls: an architect, and for each of 8 files a coder, a reviewer who
    sees all code, and a coder who revises it by all reviews.

    The prompts are the recorded ones, with a variable where an output of the run stood. (It had cut the design up, and
    showed the last coders only the last review.) Outputs have `output_share` of their recorded tokens.
    """
    architect, codes, reviews, revisions = _logged_rounds()
    all_reviews = "\n".join(f"{{{{review{n}}}}}" for n in range(len(reviews)))

    def prompt_of(call: _Logged) -> str:
        prompt = _LOGGED_DESIGN.sub("{{design}}", call.prompt)
        for number, code in enumerate(codes):
            prompt = prompt.replace(code.output, f"{{{{code{number}}}}}")
        return prompt.replace(reviews[-1].output, all_reviews)

    names = ["design", *(f"{kind}{n}" for kind in ("code", "review", "revised") for n in range(len(codes)))]
    calls = [*architect, *codes, *reviews, *revisions]
    return [
        ProgramCall(name, prompt_of(call), max_tokens=round(output_share * call.output_tokens))
        for name, call in zip(names, calls, strict=True)
    ]


_LOGGED_DESIGN = re.compile(r" *Files:\n.*(?=\n\n    You only need to implement)", re.DOTALL)


def _logged_rounds() -> list[list[_Logged]]:
    """Those of the architect, the coders, the reviewers, and again the coders, each in the order of files."""
    logged: dict[str, Any] = {}
    for line in METAGPT.read_text(encoding="utf-8").splitlines():
        logged |= json.loads(line)

    def call(number: int, file: str) -> _Logged:
        query, response = logged[f"r{number}_queries"][file], logged[f"r{number}_responses"][file]
        output, tokens = response["choices"][0]["message"]["content"], response["usage"]["completion_tokens"]
        return _Logged(f"{query['system']}\n{query['user_msg']}", output, tokens)

    return [[call(number, file) for file in logged[f"r{number}_queries"]] for number in range(4)]
