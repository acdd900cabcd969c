"""What a tenant may use: its own limits where it has them, else those of all."""

from __future__ import annotations

from math import inf

from plait.gateway.admission.tenants import TenantIds, TenantLimits, TenantTerms, running_of, waiting_of
from plait.gateway.config.sections import AdmissionConfig, TenantConfig

IDS = TenantIds(b"secret")
BLUE, GREEN = IDS.of_name("blue"), IDS.of_name("green")
COMMON = AdmissionConfig(calls_per_s=5.0, max_running=8)


def test_a_tenant_without_a_section_has_the_common_limits() -> None:
    assert TenantTerms(COMMON, IDS).limits(IDS.of_key("any")) == TenantLimits(5.0, inf, 8, inf)


def test_a_section_replaces_single_limits_and_zero_lifts_them() -> None:
    blue = TenantConfig(name="blue", api_keys=("k",), calls_per_s=0.0, tokens_per_s=100.0, weight=2.0)
    terms = TenantTerms(COMMON, IDS, [blue])
    assert terms.limits(BLUE) == TenantLimits(inf, 100.0, 8, inf)
    assert terms.weights == {BLUE: 2.0}
    assert terms.limits("blue") == terms.limits("any"), "a name is not an identity"


def test_another_configuration_is_seen_through_the_same_weights() -> None:
    terms = TenantTerms(COMMON, IDS, [TenantConfig(name="blue", api_keys=("k",), weight=2.0)])
    weights = terms.weights
    terms.replace(COMMON, [TenantConfig(name="green", api_keys=("k",), weight=3.0)])
    assert weights == {GREEN: 3.0}


def test_several_gateways_share_the_limits_and_each_may_run_a_call() -> None:
    parts = [TenantTerms(COMMON, IDS, gateways=3, index=index).limits("any") for index in range(3)]
    assert [part.max_running for part in parts] == [3, 3, 2]
    assert abs(sum(part.calls_per_s for part in parts) - 5.0) < 1e-9
    assert {part.tokens_per_s for part in parts} == {inf}
    one = AdmissionConfig(max_running=1)
    assert [TenantTerms(one, IDS, gateways=3, index=index).limits("any").max_running for index in range(3)] == [1] * 3


def test_what_the_store_has_shared_out_replaces_the_division() -> None:
    terms = TenantTerms(AdmissionConfig(max_running=6, max_waiting=90), IDS, gateways=3)
    parts: dict[str, int] | None = None
    terms.parts = lambda: parts
    assert (terms.limits("any").max_running, terms.limits("any").max_waiting) == (2, 30)
    parts = {}
    assert (terms.limits("any").max_running, terms.limits("any").max_waiting) == (1, 30), "it has just come"
    parts = {running_of("any"): 5, waiting_of("any"): 80}
    assert (terms.limits("any").max_running, terms.limits("any").max_waiting) == (5, 80)
    parts = {running_of("any"): 0}
    assert terms.limits("any").max_running == 1, "or its calls would wait for ever"
    assert (terms.whole("any").max_running, terms.whole("any").max_waiting) == (6, 90)
    assert terms.have_counts
