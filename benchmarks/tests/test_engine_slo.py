"""The experiment on real servers, without them: what it would send, to whom, and what it makes of the answers."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from benchmarks import engine_slo
from benchmarks.engine_slo_parts import servers
from benchmarks.engine_slo_parts.emulated import attainments
from benchmarks.engine_slo_parts.figures import Run, claims, figures, medians, throughput_ratio
from benchmarks.engine_slo_parts.load import Load, Served
from benchmarks.engine_slo_parts.servers import ENGINES, OURS, STOCK, arguments_of
from benchmarks.engine_slo_parts.workload import BenchCall, CallSource, Shape
from e2e.real_engines.environment import Environment
from plait.backends.profiles import load_profile

SHAPE = Shape(period_s=2.0, longs=5, long_tokens=600, short_tokens=40)


def test_a_seed_is_a_run() -> None:
    assert CallSource(SHAPE, "a").run() == CallSource(SHAPE, "a").run()
    assert CallSource(SHAPE, "a").run() != CallSource(SHAPE, "b").run()


def test_long_prompts_come_at_a_steady_rate_and_short_ones_at_random() -> None:
    calls = CallSource(SHAPE, "a").run()
    assert [call.at_s for call in calls if call.is_long] == [0.0, 2.0, 4.0, 6.0, 8.0]
    assert {len(call.prompt) for call in calls if call.is_long} == {600}
    shorts = [call for call in calls if not call.is_long]
    assert 10 < len(shorts) < 35, "20 are expected"
    assert len({round(after.at_s - before.at_s, 6) for before, after in pairwise(shorts)}) == len(shorts) - 1
    assert [call.at_s for call in calls] == sorted(call.at_s for call in calls)
    assert all(call.at_s < 10.0 for call in calls)


def test_no_two_prompts_share_a_prefix() -> None:
    calls = [call for seed in ("a", "b") for call in CallSource(SHAPE, seed).run()]
    assert len({tuple(call.prompt[:16]) for call in calls}) == len(calls)


class Stub:
    """An OpenAI-compatible server that answers at once, each token in an event; `bodies` are what it was sent."""

    def __init__(self, status: int = 200, missing_tokens: int = 0) -> None:
        self.bodies: list[dict[str, Any]] = []
        self._status = status
        self._missing_tokens = missing_tokens

    @asynccontextmanager
    async def load(self) -> AsyncIterator[Load]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        load = Load(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "annotations")
        async with server:
            yield load
            await load.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        body = json.loads(await reader.readexactly(int(length.split(b":")[1])))
        self.bodies.append(body)
        tokens = body["max_tokens"] - self._missing_tokens
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": tokens}
        events: list[dict[str, Any]] = [{"choices": [{"text": "x"}]}] * tokens
        payload = "".join(f"data: {json.dumps(event)}\n\n" for event in [*events, {"choices": [], "usage": usage}])
        writer.write(
            f"HTTP/1.1 {self._status} -\r\ncontent-length: {len(payload)}\r\nconnection: close\r\n\r\n".encode()
        )
        writer.write(payload.encode())
        await writer.drain()
        writer.close()


CALLS = [BenchCall(0.1, [1, 2], 3, is_long=False), BenchCall(0.0, [1, 2, 3], 2, is_long=True)]


async def test_calls_under_load_are_sent_at_their_time_and_short_ones_promised() -> None:
    stub = Stub()
    async with stub.load() as load:
        served = await load.on_time(CALLS, ttft_s=0.25)
    assert {len(body["prompt"]): body["annotations"] for body in stub.bodies} == {2: {"plait_ttft_ms": 250.0}, 3: {}}
    assert [one.call for one in served] == CALLS
    assert served[0].sent_s - served[1].sent_s > 0
    assert all(one.sent_s < one.first_s <= one.last_s for one in served)


async def test_unloaded_calls_are_promised_nothing() -> None:
    stub = Stub()
    async with stub.load() as load:
        await load.one_by_one(CALLS)
    assert [body["max_tokens"] for body in stub.bodies] == [3, 2]
    assert all(body["annotations"] == {} and body["ignore_eos"] for body in stub.bodies)


@pytest.mark.parametrize(
    ("stub", "reason"), [(Stub(status=503), "answers 503"), (Stub(missing_tokens=1), "asked for 3 tokens, got 2")]
)
async def test_an_answer_that_is_not_what_was_asked_for_ends_the_run(stub: Stub, reason: str) -> None:
    async with stub.load() as load:
        with pytest.raises(ValueError, match=reason):
            await load.one_by_one(CALLS[:1])


def served(ttfts_s: list[float]) -> list[Served]:
    """A second apart, with the second to last token 0.5 s before the last; and a long call over all of 10 s."""
    short, long = CALLS
    shorts = [Served(short, n + 0.0, n + ttft_s, n + ttft_s + 0.5) for n, ttft_s in enumerate(ttfts_s)]
    return [Served(long, 0.0, 8.0, 10.0), *shorts]


def test_figures_of_a_run() -> None:
    run = figures(OURS, 0, 1.5, 0.1, served([0.1, 0.2, 0.3, 0.4]))
    assert run.objective_s == pytest.approx(0.3)
    assert run.attainment == 0.75, "three times the unloaded TTFT still counts"
    assert (run.ttft_p50_s, run.ttft_max_s) == pytest.approx((0.25, 0.4))
    assert run.duration_s == 10.0
    assert run.output_tokens_s == pytest.approx((2 + 4 * 3) / 10)
    assert (run.long_ttft_s, run.long_e2e_s) == (8.0, 10.0)


def five_runs(ours: float, stock: float, tokens_s: float) -> list[Run]:
    """All alike but one of each, which is far off."""
    base = figures(STOCK, 0, 0.0, 0.1, served([0.1]))
    runs = []
    for number in range(5):
        off = number == 2
        runs.append(replace(base, number=number, attainment=0.0 if off else stock, output_tokens_s=100.0 + number))
        tokens = 1.0 if off else tokens_s * (100.0 + number)
        attained = 0.0 if off else ours
        runs.append(replace(base, system=OURS, number=number, attainment=attained, output_tokens_s=tokens))
    return runs


def test_medians_are_of_a_systems_runs() -> None:
    runs = five_runs(0.93, 0.31, 0.97)
    assert medians(runs, OURS)["attainment"] == 0.93
    assert medians(runs, STOCK)["output_tokens_s"] == 102.0
    assert throughput_ratio(runs) == pytest.approx(0.97)


@pytest.mark.parametrize(
    ("values", "holds"),
    [
        ((0.93, 0.31, 0.97), [True, True, True]),
        ((0.89, 0.31, 0.97), [False, True, True]),
        ((0.93, 0.50, 0.97), [True, False, True]),
        ((0.93, 0.31, 0.94), [True, True, False]),
    ],
)
def test_claims_have_fixed_targets(values: tuple[float, float, float], holds: list[bool]) -> None:
    made = list(claims(five_runs(*values)))
    assert [claim.value for claim in made] == pytest.approx(values)
    assert [claim.holds for claim in made] == holds


@pytest.mark.parametrize("name", ENGINES)
def test_both_servers_have_the_same_arguments(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(servers, "tiny_model", lambda: tmp_path)
    made = servers.new_servers(ENGINES[name], tmp_path)

    def from_the_host_on(system: str) -> list[str]:
        arguments = arguments_of(made[system])
        return [argument for argument in arguments[arguments.index("--host") :] if argument != str(made[system].port)]

    assert from_the_host_on(STOCK) == from_the_host_on(OURS)
    flags = list(ENGINES[name].flags)
    assert from_the_host_on(OURS)[-len(flags) :] == flags
    ours = arguments_of(made[OURS])
    assert ours[0] == name
    assert ours[ours.index("--scheduler") + 1] == "slo"


def test_an_emulated_engine_has_the_same_calls() -> None:
    """In the order of arrival, most short calls wait for a long prompt."""
    costs = load_profile("a6000-mistral-7b").cost_model()
    shape = replace(SHAPE, long_tokens=6000, short_tokens=256, period_s=1.6 * costs.iteration_time_s([(6000, 0)]))
    kept = attainments([CallSource(shape, f"run {number}").run() for number in range(2)], costs, ahead=0)
    assert kept.keys() == {STOCK, OURS}
    assert kept[STOCK] < 0.5 < kept[OURS]


def test_only_sglang_is_emulated(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["engine_slo", "--engine", "vllm", "--emulate", "a6000-mistral-7b"])
    with pytest.raises(SystemExit):
        engine_slo.main()
    assert "only SGLang's forward passes" in capsys.readouterr().err


@pytest.mark.parametrize("name", ENGINES)
def test_without_the_engine_it_is_skipped(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    engine = ENGINES[name]
    environment = Environment(f"not-there-{name}", ())
    monkeypatch.setattr(engine_slo, "ENGINES", {name: replace(engine, environment=environment)})
    monkeypatch.setattr("sys.argv", ["engine_slo", "--engine", name])
    assert engine_slo.main() == 0
    assert capsys.readouterr().out.startswith("skipped: ")
