"""Calls at random, the same for every engine, and prompts."""

from __future__ import annotations

import random
from collections.abc import Sequence

from e2e.real_schedulers.built_engine import BuiltEngine, answer


def prompt(tokens: int, seed: int) -> list[int]:
    """No two of these share a page."""
    return [(seed * 37 + position * 11) % 1000 for position in range(tokens)]


def shared_prefixes(
    engine: BuiltEngine, seed: int, *, most: int, arrivals: Sequence[int], aborted: float = 0.0
) -> list[dict[str, int]]:
    """Run calls that share prefixes, and return the steps. No prompt is longer than `most` tokens.

    So many calls arrive in a step as one of `arrivals` says. In so many steps, from 0 to 1, a call is `aborted`.
    """
    dice = random.Random(seed)
    prefixes = [[dice.randrange(1000) for _ in range(dice.randrange(most // 2))] for _ in range(4)]
    steps, names = [], []
    for _ in range(60):
        for _ in range(dice.choice(arrivals)):
            own = [dice.randrange(1000) for _ in range(dice.randrange(1, most // 2))]
            names.append(engine.add([*dice.choice(prefixes), *own], dice.randrange(1, 30)))
        if names and dice.random() < aborted:
            engine.abort(dice.choice(names))
        steps.append(engine.step())
    return steps + engine.run()


def one_a_step(engine: BuiltEngine, seed: int) -> dict[str, list[int]]:
    """Run 30 calls, of which one arrives in each step. Returns what the model says to each."""
    dice = random.Random(seed)
    shared = [dice.randrange(1000) for _ in range(250)]
    answers = {}
    for _ in range(30):
        own = [dice.randrange(1000) for _ in range(dice.randrange(1, 150))]
        tokens, output_tokens = [*shared[: dice.randrange(250)], *own], dice.randrange(1, 25)
        answers[engine.add(tokens, output_tokens)] = answer(len(tokens), output_tokens)
        engine.step()
    engine.run(limit=10_000)
    return answers


def answers_so_far(engine: BuiltEngine) -> dict[str, list[int]]:
    """What the model says to every call, cut where the call's output is now."""
    return {name: answer(engine.prompts[name], len(tokens)) for name, tokens in engine.tokens.items()}
