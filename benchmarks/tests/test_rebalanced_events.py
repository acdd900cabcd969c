"""Random sequences of all that can happen to a fleet under E2 with all mechanisms: no route outlives its calls."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from benchmarks.placing.rebalancing import rebalanced_e2
from tests.gateway.fleet.test_router_events import Fleet


class RebalancedFleet(Fleet):
    @initialize(reports_first=st.booleans())
    def start(self, reports_first: bool) -> None:
        self.rebalanced = rebalanced_e2(("decode_balance", "shift", "replicate"), block_tokens=64)
        super().start(self.rebalanced.policy, reports_first)

    def teardown(self) -> None:
        super().teardown()
        assert not hasattr(self, "rebalanced") or not len(self.rebalanced.routes)


TestRebalancedFleet = RebalancedFleet.TestCase
TestRebalancedFleet.settings = settings(deadline=None, max_examples=20, stateful_step_count=30)
