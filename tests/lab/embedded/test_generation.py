"""From the engine's tokens to text that can be sent: stop strings, what is held back for them, why a text ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.lab.embedded.call import EmbeddedCall, Output
from plait.lab.embedded.clock import EngineClock, OnOutput
from plait.lab.embedded.engine import Engine, EngineSettings
from plait.lab.embedded.generation import EmulatedToken, Generation, Piece
from plait.policy.costs.cost_model import CostModel, LongAttention, PiecewiseLinear

COSTS = CostModel(PiecewiseLinear(((1, 0.01),), 0.0), 0.0, 0.0, 0.0, LongAttention())
TEXTS = st.lists(st.text("abc", max_size=3), min_size=1, max_size=12)
STOPS = st.lists(st.text("abc", min_size=1, max_size=4), max_size=3)


class Clock:
    """What a generation sees of the engine's clock; `run` is the accelerator."""

    def __init__(self, block_tokens: int = 16) -> None:
        self.engine = Engine(EngineSettings(name="e", model="m", kv_tokens=10_000, block_tokens=block_tokens), COSTS)
        self.listeners: dict[EmbeddedCall, OnOutput] = {}
        self.aborted: list[EmbeddedCall] = []

    def now_s(self) -> float:
        return 7.0

    def add(self, _engine: Engine, call: EmbeddedCall, on_output: OnOutput) -> None:
        self.listeners[call] = on_output
        self.engine.add(call)

    def end(self, _engine: Engine, call: EmbeddedCall) -> None:
        if self.listeners.pop(call, None) is not None:
            assert self.engine.remove(call)

    def abort(self, _engine: Engine, call: EmbeddedCall) -> None:
        self.aborted.append(call)

    def run(self) -> None:
        now_s: float | None = 7.0
        while now_s is not None:
            step = self.engine.step(now_s)
            now_s = step.ends_s
            for output in step.outputs:
                self.hand_out(output)

    def hand_out(self, output: Output) -> None:
        listener = self.listeners.get(output.call)
        if listener is not None:
            if output.finished:
                del self.listeners[output.call]
            listener(output)


def generate(
    texts: Sequence[str], *, stop: Sequence[str] = (), limit: int | None = None, natural: int | None = None
) -> tuple[list[Piece], EmbeddedCall]:
    clock, pieces = Clock(), list[Piece]()
    source = iter([EmulatedToken(number, text) for number, text in enumerate(texts)])
    generation = Generation(
        clock.engine,
        cast("EngineClock", clock),
        "c",
        [1, 2, 3],
        source=source,
        natural_tokens=natural,
        limit=len(texts) if limit is None else limit,
        stop=stop,
        root=0,
        on_piece=pieces.append,
    )
    clock.run()
    assert not clock.listeners
    assert not clock.engine.running
    return pieces, generation.call


def expected(texts: Sequence[str], stop: Sequence[str]) -> tuple[str, int, str]:
    """The text sent, the tokens generated and the reason: cut at the first stop string, looked for token by token."""
    for end in range(1, len(texts) + 1):
        text = "".join(texts[:end])
        found = [text.find(string) for string in stop if string in text]
        if found:
            return text[: min(found)], end, "stop"
    return "".join(texts), len(texts), "length"


@given(TEXTS, STOPS)
def test_text_ends_before_the_first_stop_string_wherever_the_tokens_cut_it(texts: list[str], stop: list[str]) -> None:
    pieces, call = generate(texts, stop=stop)
    text, tokens, reason = expected(texts, stop)
    assert "".join(piece.text for piece in pieces) == text
    assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + [reason]
    assert call.sent_tokens == tokens
    assert [token for piece in pieces for token in piece.tokens] == list(enumerate(texts))[:tokens]


def test_no_more_is_held_back_than_the_start_of_a_stop_string() -> None:
    pieces, _ = generate("0123456789", stop=["xyz", "x"])
    assert [piece.text for piece in pieces] == [*"0123456", "789"]


def test_every_token_is_sent_at_once_where_nothing_can_stop_it() -> None:
    pieces, _ = generate(["one", " two", ""])
    assert [(piece.text, piece.finish_reason) for piece in pieces] == [("one", None), (" two", None), ("", "length")]


def test_a_stop_string_over_several_tokens_is_not_sent_in_part() -> None:
    pieces, call = generate(["go", " EN", "D", " on"], stop=["END"])
    assert [(piece.text, piece.finish_reason, piece.stop) for piece in pieces] == [
        ("go", None, None),
        (" ", "stop", "END"),
    ]
    assert call.sent_tokens == 3


@pytest.mark.parametrize(
    ("natural", "limit", "tokens", "reason"),
    [(None, 3, 3, "length"), (2, 3, 2, "stop"), (3, 3, 3, "stop"), (4, 3, 3, "length")],
)
def test_it_ends_by_itself_or_at_the_limit(natural: int | None, limit: int, tokens: int, reason: str) -> None:
    pieces, call = generate(["a"] * 9, natural=natural, limit=limit)
    assert (call.sent_tokens, pieces[-1].finish_reason) == (tokens, reason)


def test_the_call_has_the_prompts_chains_in_both_block_lengths() -> None:
    for block_tokens, same in ((16, False), (64, True)):
        clock = Clock(block_tokens)
        generation = Generation(
            clock.engine, cast("EngineClock", clock), "c", range(130), source=iter([]), natural_tokens=None, limit=1,
            stop=(), root=0, on_piece=lambda _: None,
        )  # fmt: skip
        call = generation.call
        assert (call.prompt_tokens, call.arrived_s) == (130, 7.0)
        assert (call.chain is call.tree_chain) == same
        assert (len(call.chain.hashes), len(call.tree_chain.hashes)) == (130 // block_tokens, 2)
        generation.abort()
        assert clock.aborted == [call]
