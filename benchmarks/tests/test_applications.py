"""Applications in virtual time: what each kind of client pays, what is promised, what may run, what is claimed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.application.breakdown import breakdown, critical_path
from benchmarks.application.claims import claims, speedup
from benchmarks.application.clients import NETWORK_S, Clients, Job
from benchmarks.application.documents import chain_summary, map_reduce_summary
from benchmarks.application.experiments import EXPERIMENTS, Case
from benchmarks.application.figures import Figures
from benchmarks.application.multi_agent import AgentLengths, multi_agent
from benchmarks.application.program import Launch, Program, ProgramCall, Vocabulary, ids_of, text_of
from benchmarks.application.sweep import Point, Results, Runner, Task
from benchmarks.application.systems import LATENCY, OURS, THROUGHPUT, Machine, RunningTokensCap, System, systems
from plait.policy.programs.objectives import LATENCY_SLO
from plait.policy.scheduling.in_order import Fcfs
from plait.policy.scheduling.plan import EngineFacts, LocalCall, LocalScheduler, Plan
from plait.policy.types import Objective, Slo

MACHINE = Machine("a100-mistral-7b", 1, 32_000)
LENGTHS = AgentLengths(100, 80, 300, 20, 100, 20, 100, 20, (40, 60), (30, 20), (50, 40))


def run(system: str | System, *launches: Launch) -> list[Job]:
    named = systems()[system] if isinstance(system, str) else system
    return Clients(named, MACHINE).run(launches)


def launch(program: Program, objective: Objective | None = Objective.LATENCY, at_s: float = 0.0) -> Launch:
    return Launch(at_s, "job", program, objective)


class Watched:
    """A scheduler that notes what it is asked about."""

    def __init__(self, scheduler: LocalScheduler) -> None:
        self.calls: dict[str, LocalCall] = {}
        self.most_running_tokens = 0
        self.most_running = 0
        self._scheduler = scheduler

    def plan(
        self, now_s: float, waiting: Sequence[LocalCall], running: Sequence[LocalCall], facts: EngineFacts
    ) -> Plan:
        self.calls |= {call.call_id: call for call in (*waiting, *running)}
        plan = self._scheduler.plan(now_s, waiting, running, facts)
        runs = {call for call, _ in plan.picks} | set(running)
        if len(runs) > 1:
            self.most_running_tokens = max(self.most_running_tokens, sum(call.prompt_tokens for call in runs))
        self.most_running = max(self.most_running, len(runs))
        return plan


def watched(scheduler: LocalScheduler, *launches: Launch, chained: bool = True) -> Watched:
    watch = Watched(scheduler)
    run(System("watched", chained, lambda: watch, "least_outstanding"), *launches)
    return watch


def test_a_value_as_text_has_four_characters_a_token() -> None:
    ids = [0, 7, 2**24 - 1]
    assert ids_of(text_of(ids)) == ids
    assert len(text_of(ids)) == 4 * len(ids)


def test_a_chain_pays_the_network_once_when_chained_and_for_each_call_when_not() -> None:
    program = chain_summary(Vocabulary(), 1500, 500, 10)
    [ours], [theirs] = run("plait_fcfs", launch(program)), run(THROUGHPUT, launch(program))
    assert breakdown(ours).network_s == pytest.approx(NETWORK_S)
    assert breakdown(theirs).network_s == pytest.approx(3 * NETWORK_S)
    # A call that begins as another one ends waits for the iteration in which that one has a place that is wasted.
    wasted_s = ours.latency_s - (theirs.latency_s - 2 * NETWORK_S)
    assert 0 <= wasted_s < 0.03


def test_maps_are_sent_together_and_the_reduction_waits_for_the_last() -> None:
    program = map_reduce_summary(Vocabulary(), 2000, 500, 10)
    for system in (OURS, THROUGHPUT):
        [job] = run(system, launch(program))
        *maps, reduction = job.records.values()
        assert len({record.arrived_s for record in maps}) == 1
        gap_s = 0.0 if system == OURS else NETWORK_S
        assert reduction.arrived_s == pytest.approx(max(record.finished_s for record in maps) + gap_s)
        assert next(critical_path(job)) is reduction
        assert len(list(critical_path(job))) == 2


def test_the_parts_of_a_job_add_up_to_its_latency() -> None:
    [job] = run(OURS, launch(multi_agent(Vocabulary(), LENGTHS, 3)))
    parts = breakdown(job)
    assert parts.network_s == pytest.approx(NETWORK_S)
    assert parts.network_s + parts.queue_s + parts.prefill_s + parts.decode_s == pytest.approx(job.latency_s)
    assert min(parts.queue_s, parts.prefill_s, parts.decode_s) >= 0


def test_a_prompt_holds_the_ids_that_its_inputs_producers_generated() -> None:
    head, tail = Vocabulary().fresh(3), range(100, 102)
    call = ProgramCall((head, "a", tail, "b", "a"), "c", 1)
    assert call.inputs == ("a", "b")
    assert call.constant_tokens == 5
    assert list(call.prompt({"a": [1, 2], "b": [3]})) == [*head, 1, 2, *tail, 3, 1, 2]


def test_a_value_is_found_in_the_cache_by_whoever_has_the_same_prefix() -> None:
    vocabulary = Vocabulary()
    head = vocabulary.fresh(64)
    first = ProgramCall((head,), "first", 64)
    readers = [ProgramCall((head, "first", vocabulary.fresh(40)), f"reader_{n}", 2) for n in range(2)]
    program = Program((first, *readers), ("reader_0", "reader_1"))
    for system in (OURS, THROUGHPUT):
        [job] = run(system, launch(program))
        # The last generated token has no KV when the first call ends, so one block of 16 is missing; the second reader
        # begins an iteration later, and finds that block from the first.
        assert [record.cached_tokens for record in job.records.values()] == [0, 112, 128]
    [job] = run("throughput_uncached", launch(program))
    assert [record.cached_tokens for record in job.records.values()] == [0, 0, 0]


def test_the_engines_get_the_deduced_objectives() -> None:
    program = map_reduce_summary(Vocabulary(), 2000, 500, 10)
    calls = watched(Fcfs(), launch(program)).calls.values()
    slos = [call.slo for call in sorted(calls, key=lambda call: call.arrived_s)]
    assert len(slos) == 5
    assert slos[-1] == LATENCY_SLO, "the reduction"
    assert len(set(slos[:-1])) == 1, "the maps are one group, with one time"
    assert slos[0] is not None
    assert slos[0] == Slo(jct_s=slos[0].jct_s, is_deduced=True)
    assert {call.objective for call in calls} == {Objective.LATENCY}


@pytest.mark.parametrize("objective", [Objective.THROUGHPUT, None])
def test_who_asks_for_no_latency_is_promised_nothing(objective: Objective | None) -> None:
    calls = watched(Fcfs(), launch(chain_summary(Vocabulary(), 600, 300, 5), objective)).calls.values()
    assert {(call.slo, call.objective) for call in calls} == {(None, objective)}


def test_a_client_that_chains_itself_annotates_nothing() -> None:
    watch = watched(Fcfs(), launch(chain_summary(Vocabulary(), 600, 300, 5)), chained=False)
    assert {(call.slo, call.objective) for call in watch.calls.values()} == {(None, None)}


def test_a_latency_oriented_engine_runs_no_more_tokens_than_its_limit_but_one_call_of_any_length() -> None:
    vocabulary = Vocabulary()
    launches = [launch(map_reduce_summary(vocabulary, 4000, 500, 10)), launch(chain_summary(vocabulary, 3000, 3000, 5))]
    watch = watched(RunningTokensCap(1200), *launches)
    assert watch.most_running == 2
    assert watch.most_running_tokens <= 1200
    assert len(watch.calls) == 10, "the long ones have run as well"


def test_the_agents_see_what_they_are_to_see() -> None:
    program = multi_agent(Vocabulary(), LENGTHS, 3, rounds=2)
    calls = {call.output: call for call in program.calls}
    assert len(calls) == 1 + 3 + 2 * (3 + 3)
    assert calls["design"].output_tokens == 120
    assert calls["code_2"].inputs == ("design",)
    assert calls["comment_1_0"].inputs == ("code_0", "code_1", "code_2")
    assert calls["code_2_1"].inputs == ("code_1_0", "code_1_1", "code_1_2", "comment_2_1")
    assert program.awaited == ("code_2_0", "code_2_1", "code_2_2")


# Claims.


def some(latency_s: float, *latencies_s: float) -> Figures:
    return Figures(1, latency_s, latency_s, latency_s / 10, 0.02, 0.0, {}, latencies_s or (latency_s,))


def results(ours: Figures, latency: Figures, throughput: Figures, case: Case) -> Results:
    kind = EXPERIMENTS[case.experiment].kinds[-1]
    named = {OURS: ours, LATENCY: latency, THROUGHPUT: throughput}
    return {Point(case, system, kind): figures for system, figures in named.items()}


def test_claims_are_made_against_the_better_baseline_and_name_the_point() -> None:
    made = results(some(10.0), some(30.0), some(15.0), Case("chain", "output_tokens", 25))
    made |= results(some(10.0), some(9.0), some(15.0), Case("chain", "output_tokens", 50))
    most, worst = claims(made)
    assert (most.value, most.least, most.holds, most.where) == (1.5, 1.38, True, "output_tokens 25")
    assert (worst.value, worst.holds) == (0.9, False)
    assert worst.where.startswith("output_tokens 50")


def test_of_chains_at_once_each_counts() -> None:
    case = Case("chains", "applications", 2)
    made = claims(results(some(10.0, 8.0, 12.0), some(40.0, 40.0, 40.0), some(20.0, 30.0, 10.0), case))
    least = next(claim for claim in made if "gains least" in claim.name)
    assert (round(least.value, 3), least.holds, least.where) == (0.833, False, THROUGHPUT)


# Whole runs.


def write_traces(folder: Path) -> Path:
    (folder / "metagpt").mkdir(parents=True)
    articles = ["num_prefill_tokens,num_decode_tokens", *("4000,100" for _ in range(5))]
    (folder / "arxiv_summarization_lengths.csv").write_text("\n".join(articles) + "\n")
    (folder / "AzureLLMInferenceTrace_conv.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "t,200,20\nt,500,40\n"
    )
    stages = [_stage(0, {"noname": (180, 80)}), *(_stage(n, {"a.py": (900, 60), "b.py": (900, 40)}) for n in (1, 2, 3))]
    (folder / "metagpt" / "log_3_round.jsonl").write_text("\n".join(json.dumps(stage) for stage in stages) + "\n")
    return folder


def _stage(number: int, calls: dict[str, tuple[int, int]]) -> dict[str, object]:
    queries = {name: {"system": "s" * 100, "user_msg": "u" * 700 + name + "v" * 100} for name in calls}
    responses = {
        name: {"usage": {"prompt_tokens": prompt, "completion_tokens": output}}
        for name, (prompt, output) in calls.items()
    }
    return {f"r{number}_queries": queries, f"r{number}_responses": responses}


def test_the_same_seeds_give_the_same_results(tmp_path: Path) -> None:
    traces = write_traces(tmp_path / "traces")
    tasks: list[Task] = [
        (Case(experiment, parameter, value), system, (0,))
        for experiment, parameter, value in (
            ("background", "background_rate", 0.5),
            ("map_reduce", "chunk_tokens", 2048),
            ("multi_agent", "files", 2),
        )
        for system in (OURS, LATENCY, THROUGHPUT)
    ]
    first, second = ({point: of for task in tasks for point, of in Runner(traces)(task).items()} for _ in range(2))
    assert first == second
    assert {point.kind for point in first} == {"chain", "background", "map_reduce", "multi_agent"}
    [ours] = [point for point in first if point.system == OURS and point.kind == "map_reduce"]
    assert speedup(first, ours, LATENCY) > 1.0
