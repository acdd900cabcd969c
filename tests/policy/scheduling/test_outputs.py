"""Mean outputs, by objective."""

from __future__ import annotations

from plait.policy.scheduling.iteration_model import IterationModel
from plait.policy.scheduling.outputs import RECENT_OUTPUTS, START_OUTPUT_TOKENS, MeanOutputs
from plait.policy.scheduling.pace import Pace, RecentIterations
from plait.policy.scheduling.plan import LocalCall
from plait.policy.scheduling.preemption_history import PreemptionHistory
from plait.policy.types import Objective


def pace(outputs: MeanOutputs) -> Pace:
    return Pace.of(RecentIterations(), IterationModel(), PreemptionHistory(), outputs, 1)


def test_mean_outputs_are_those_of_calls_that_have_left_by_objective() -> None:
    outputs = MeanOutputs()
    assert pace(outputs).output_tokens(None) == START_OUTPUT_TOKENS
    calls = [LocalCall(str(n), 0.0, 10, 10, 10 * (n + 1)) for n in range(2)]
    batch = LocalCall("batch", 0.0, 10, 10, 500, objective=Objective.THROUGHPUT)
    outputs.on_ended([*calls, batch])
    assert (pace(outputs).output_tokens(None), pace(outputs).output_tokens(Objective.THROUGHPUT)) == (15, 500)
    assert pace(outputs).output_tokens(Objective.LATENCY) == START_OUTPUT_TOKENS


def test_only_the_latest_outputs_count() -> None:
    outputs = MeanOutputs()
    outputs.on_ended([LocalCall("first", 0.0, 10, 10, 9000)])
    outputs.on_ended(LocalCall(str(n), 0.0, 10, 10, 7) for n in range(RECENT_OUTPUTS))
    assert outputs.means() == {None: 7.0}
