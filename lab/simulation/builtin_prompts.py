"""The built-in prompts of `plait demo --compare`: invented manuals and tool lists, written by code.

The texts come from the words in `builtin_prompts.toml` and a fixed seed. So the package needs no corpus, and the same
version writes the same prompts everywhere. Their sizes are from about 1,000 to about 6,000 tokens, so that small and
large prefixes compete for a fleet's caches.
"""

from __future__ import annotations

import random
import tomllib
from itertools import product
from pathlib import Path
from typing import Any, Final, NamedTuple


class Manual(NamedTuple):
    """A product manual. `text` is the document; it answers the `questions`."""

    title: str
    text: str
    questions: tuple[str, ...]


class Catalogue(NamedTuple):
    """The tools of one service as OpenAI's `tools` array, and `questions` that they can answer."""

    title: str
    tools: tuple[dict[str, Any], ...]
    questions: tuple[str, ...]


_PER_TITLE_QUESTIONS = 16
_WORDS: Final[dict[str, Any]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
_MANUALS, _TOOLS = _WORDS["manuals"], _WORDS["tools"]


def manuals() -> list[Manual]:
    """A dozen manuals, the shortest of about 1,000 tokens and the longest of about 6,000."""
    return [_manual(device, 6 + 31 * step // 11) for step, device in enumerate(_MANUALS["devices"])]


def _manual(device: str, n_parts: int) -> Manual:
    rng = random.Random(f"manual of the {device}")  # noqa: S311 - writes text, guards nothing
    title = f"{device.capitalize()}, model {rng.choice('BDKRT')}{rng.randrange(200, 900)}"
    chapters = [f"Operating manual. {title}.\n\nThis manual describes the {n_parts} parts a user can service."]
    questions: list[str] = []
    parts = rng.sample([f"{place} {part}" for place, part in product(_MANUALS["places"], _MANUALS["parts"])], n_parts)
    for number, part in enumerate(parts, start=1):
        other = rng.choice([name for name in parts if name != part])
        text, asked = _chapter(number, part, other, rng)
        chapters.append(text)
        questions += asked
    return Manual(title, "\n\n".join(chapters), tuple(rng.sample(questions, _PER_TITLE_QUESTIONS)))


def _chapter(number: int, part: str, other: str, rng: random.Random) -> tuple[str, list[str]]:
    """The chapter on one part, and the questions that it answers."""
    hours, torque, code = rng.randrange(50, 2000, 10), rng.randrange(2, 40), f"E{number:02d}{rng.randrange(10)}"
    sentences = [
        f"Service the {part} every {hours} operating hours and tighten its screws to {torque} newton metres.",
        f"Fault code {code} means that the {part} {rng.choice(_MANUALS['faults'])}; look at the {other} first.",
    ]
    for advice in rng.sample(_MANUALS["advice"], 5):
        sentence = advice.format(
            part=part, other=other, minutes=rng.randrange(2, 30), percent=rng.randrange(5, 40),
            degrees=rng.randrange(60, 400, 5), machines=rng.randrange(2, 12),
        )  # fmt: skip
        sentences.append(sentence)
    rng.shuffle(sentences)
    questions = [
        f"How often does the {part} need service?",
        f"To which torque are the screws of the {part} tightened?",
        f"What does fault code {code} mean, and what should I look at first?",
    ]
    return f"{number}. The {part}\n" + " ".join(sentences), questions


def catalogues() -> list[Catalogue]:
    """A dozen tool lists, the shortest of about 1,000 tokens and the longest of about 6,000 as JSON."""
    return [_catalogue(service, 5 + 26 * step // 11) for step, service in enumerate(_TOOLS["services"])]


def _catalogue(service: str, n_tools: int) -> Catalogue:
    rng = random.Random(f"tools of the {service}")  # noqa: S311 - writes text, guards nothing
    pairs = sorted(rng.sample(list(product(_TOOLS["services"][service], _TOOLS["actions"])), n_tools))
    tools = tuple(_tool(service, noun, action, rng) for noun, action in pairs)
    asked = [
        template.format(noun=noun.replace("_", " "), state=rng.choice(_TOOLS["states"]), n=rng.randrange(2, 60))
        for noun, template in product(dict.fromkeys(noun for noun, _ in pairs), _TOOLS["requests"])
    ]
    return Catalogue(f"{service} service", tools, tuple(rng.sample(asked, min(_PER_TITLE_QUESTIONS, len(asked)))))


def _tool(service: str, noun: str, action: str, rng: random.Random) -> dict[str, Any]:
    """One function of a service: the key that its action requires, and a few optional ones."""
    done = _TOOLS["actions"][action]
    required, pool = done["required"], _TOOLS["optional"][done["optional"]]
    keys = [required, *(key for key in rng.sample(sorted(pool), 4) if key != required)]
    function = {
        "name": f"{service}_{action}_{noun}",
        "description": done["description"].format(noun=noun.replace("_", " "), service=service),
        "parameters": {
            "type": "object",
            "properties": {key: pool[key] if key in pool else _TOOLS["keys"][key] for key in keys},
            "required": [required],
        },
    }
    return {"type": "function", "function": function}
