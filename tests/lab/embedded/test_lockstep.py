"""Ranks in lockstep, in virtual time: their iterations begin and end together, and each call is computed once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from plait.backends.profiles import load_profile
from plait.lab.embedded.call import EmbeddedCall, Output
from plait.lab.embedded.engine import Engine, EngineSettings
from plait.lab.embedded.hash_chain import HashChain
from plait.lab.embedded.lockstep import Lockstep
from plait.policy.prefix.block_hash import root_hash

COSTS = load_profile("a6000-mistral-7b").cost_model()
Arrival = tuple[float, int, int, int]
"""Seconds after the one before, rank, prompt tokens, output tokens."""

RANKS = 3
arrivals = st.lists(
    st.tuples(st.sampled_from([0.0, 0.01, 0.5]), st.integers(0, RANKS - 1), st.integers(1, 3_000), st.integers(1, 8)),
    min_size=1,
    max_size=12,
)


def new_engines(count: int) -> list[Engine]:
    settings = EngineSettings(name="e", model="m", kv_tokens=4_096, max_batch_tokens=512)
    return [Engine(settings, COSTS) for _ in range(count)]


def new_call(number: int, at_s: float, tokens: int, output: int) -> EmbeddedCall:
    chain, tree_chain = (HashChain(size, root_hash("m"), range(number, number + tokens)) for size in (16, 64))
    return EmbeddedCall(str(number), at_s, tokens, chain=chain, tree_chain=tree_chain, final_output_tokens=output)


def play(steps: Engine | Lockstep, engines: list[Engine], given: list[Arrival]) -> list[tuple[float, Output]]:
    """The outputs with their times. Checks after each step that iterations in flight end together."""
    now_s, next_s, heard = 0.0, None, list[tuple[float, Output]]()
    to_come: list[tuple[float, int, EmbeddedCall]] = []
    for number, (after_s, rank, tokens, output) in enumerate(given):
        at_s = (to_come[-1][0] if to_come else 0.0) + after_s
        to_come.append((at_s, rank, new_call(number, at_s, tokens, output)))
    while to_come or next_s is not None:
        if to_come and (next_s is None or to_come[0][0] < next_s):
            now_s, rank, call = to_come.pop(0)
            engines[rank % len(engines)].add(call)
            if not steps.idle:
                before = [engine.counters.iterations for engine in engines]
                assert steps.step(now_s).outputs == ()
                assert [engine.counters.iterations for engine in engines] == before, "it waits for the next iteration"
                continue
        else:
            assert next_s is not None
            now_s = next_s
        step = steps.step(now_s)
        heard += [(now_s, output) for output in step.outputs]
        next_s = step.ends_s
        ends = {engine.step(now_s).ends_s for engine in engines if not engine.idle}
        assert ends == ({next_s} if next_s is not None else set())
    return heard


@given(given_=arrivals)
def test_iterations_end_together_and_each_call_is_computed_by_one_rank(given_: list[Arrival]) -> None:
    engines = new_engines(RANKS)
    heard = play(Lockstep(engines), engines, given_)
    counts = [engine.counters for engine in engines]
    for rank, of_rank in enumerate(counts):
        own = [(tokens, output) for _, named, tokens, output in given_ if named == rank]
        assert of_rank.calls == len(own)
        assert of_rank.output_tokens == sum(output for _, output in own)
        assert of_rank.prompt_tokens == sum(tokens for tokens, _ in own)
    assert len(heard) == sum(output for *_, output in given_)
    assert sum(output.finished for _, output in heard) == len(given_)


@given(given_=arrivals)
def test_an_engine_in_lockstep_with_none_is_an_engine(given_: list[Arrival]) -> None:
    alone, together = new_engines(1), new_engines(1)
    expected = [(at_s, one.call.call_id, one.finished) for at_s, one in play(alone[0], alone, given_)]
    assert [
        (at_s, one.call.call_id, one.finished) for at_s, one in play(Lockstep(together), together, given_)
    ] == expected
    assert alone[0].counters == together[0].counters
    assert alone[0].cache_state() == together[0].cache_state()


def test_a_token_takes_as_long_as_a_siblings_chunk() -> None:
    engines = new_engines(2)
    steps = Lockstep(engines)
    engines[0].add(new_call(0, 0.0, 8, 2))
    first = steps.step(0.0)
    assert first.ends_s is not None
    engines[1].add(new_call(1, first.ends_s / 2, 2_048, 1))
    chunk = steps.step(first.ends_s)
    assert chunk.ends_s is not None
    assert [one.call.call_id for one in chunk.outputs] == ["0"]
    took_s = chunk.ends_s - first.ends_s
    assert took_s > 2 * COSTS.iteration_time_s([(1, 8)]), "the sibling's 512 tokens, not one"
    for engine in engines:
        assert engine.cache_state().iteration.max_s == took_s, "as a clock at the engine measures it"
