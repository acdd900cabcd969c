"""What every test runs under."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# A busy machine is no failure: examples are bounded in number, not in time.
settings.register_profile(
    "plait", deadline=None, max_examples=60, stateful_step_count=40, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("plait")
