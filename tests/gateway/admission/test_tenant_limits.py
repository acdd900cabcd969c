"""What one tenant may use in a second."""

from __future__ import annotations

import pytest

from plait.backends.errors import LimitError
from plait.gateway.admission.tenants import TenantLimits, TenantUse


def test_a_rate_allows_a_burst_and_then_its_share() -> None:
    limits, use = TenantLimits(calls_per_s=2.0), TenantUse()
    for _ in range(20):
        use.check_rate(limits, 1, 0.0)
        use.enter(1)
    with pytest.raises(LimitError, match="2 calls a second") as caught:
        use.check_rate(limits, 1, 0.0)
    assert caught.value.retry_after_s == 1.0
    use.check_rate(limits, 1, 0.5)
    use.enter(1)
    with pytest.raises(LimitError):
        use.check_rate(limits, 1, 0.5)


def test_requests_that_were_no_calls_count_for_the_rate_of_calls() -> None:
    limits, use = TenantLimits(calls_per_s=2.0, tokens_per_s=1.0), TenantUse()
    for _ in range(20):
        use.spend(limits, 0.0)
    with pytest.raises(LimitError, match="2 calls a second"):
        use.check_rate(limits, 1, 0.0)
    use.check_rate(limits, 10, 0.5)
    for _ in range(10_000):
        use.spend(limits, 1.0)
    use.check_rate(limits, 1, 2.0)
    unlimited = TenantUse()
    unlimited.spend(TenantLimits(), 0.0)
    assert unlimited == TenantUse()


def test_a_call_above_a_whole_burst_may_go_alone() -> None:
    limits, use = TenantLimits(tokens_per_s=10.0), TenantUse()
    use.check_rate(limits, 5_000, 0.0)
    use.enter(5_000)
    with pytest.raises(LimitError, match="10 tokens a second") as caught:
        use.check_rate(limits, 1, 1.0)
    assert caught.value.retry_after_s == pytest.approx(489.1)
    use.check_rate(limits, 1, 500.0)
