"""What a new configuration changes: the parts that can be taken over, and those that need a restart."""

from __future__ import annotations

from typing import Any

import pytest

from plait.gateway.config.file import parse_config
from plait.gateway.config.sections import Config, EngineConfig
from plait.gateway.reloading import ConfigChange, config_change

A, B = {"name": "a", "url": "http://a"}, {"name": "b", "url": "http://b"}


def config(*engines: dict[str, Any], **sections: Any) -> Config:
    return parse_config({"engines": list(engines or (A,)), **sections}, "test")


def test_the_same_file_changes_nothing() -> None:
    assert config_change(config(), config()) == ConfigChange()


def test_engines_are_told_apart_by_name() -> None:
    change = config_change(config(A, B), config({**A, "api_key": "k"}, {"name": "c", "url": "http://b"}))
    assert change == ConfigChange(
        added=(EngineConfig(name="c", url="http://b"),),
        removed=("b",),
        changed=(EngineConfig(name="a", url="http://a", api_key="k"),),
    )


def test_an_engines_cache_size_needs_a_restart_and_the_rest_does_not() -> None:
    change = config_change(config(A), config({**A, "kv_tokens": 64, "models": ["m"]}))
    assert change.changed == (EngineConfig(name="a", url="http://a", models=("m",)),)
    assert change.needs_restart == ("engines.a.kv_tokens",)


def test_keys_and_log_level_change() -> None:
    before = config(server={"api_keys": ["one"]})
    change = config_change(before, config(server={"api_keys": ["two"], "admin_key": "admin"}, log={"level": "warning"}))
    assert change == ConfigChange(tenants=True, admin_key=True, log_level=True)


def test_tenants_and_limits_change() -> None:
    tenant = {"name": "blue", "api_keys": ["one"]}
    before = config(tenants=[tenant])
    for changed in ({**tenant, "weight": 2.0}, {**tenant, "api_keys": ["two"]}, {**tenant, "max_running": 4}):
        assert config_change(before, config(tenants=[changed])) == ConfigChange(tenants=True)
    moved = config(server={"api_keys": ["one"]})
    assert config_change(before, moved) == ConfigChange(tenants=True)
    assert config_change(before, config(tenants=[tenant], admission={"max_running": 4})) == ConfigChange(limits=True)


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"server": {"port": 9}}, "server.port"),
        ({"server": {"api_keys": ["k"]}}, "server.api_keys"),
        ({"tenants": [{"name": "blue", "api_keys": ["k"]}]}, "tenants"),
        ({"server": {"secret": "s" * 32}}, "server.secret"),
        ({"admission": {"max_wait_s": 1}}, "admission.max_wait_s"),
        ({"admission": {"ahead_s": 2}}, "admission.ahead_s"),
        ({"log": {"format": "json"}}, "log.format"),
        ({"placement": {"policy": "round_robin"}}, "placement.policy"),
        ({"upstream": {"max_attempts": 1}}, "upstream.max_attempts"),
        ({"upstream": {"pass_response_headers": ["etag"]}}, "upstream.pass_response_headers"),
        ({"sessions": {"ttl_s": 1}}, "sessions.ttl_s"),
        ({"store": {"path": "s.db"}}, "store.path"),
        ({"receipts": {"max_bytes": 0}}, "receipts.max_bytes"),
        ({"tracing": {"sample": 1.0}}, "tracing.sample"),
        ({"models": [{"name": "m"}]}, "models"),
    ],
)
def test_other_keys_need_a_restart(sections: dict[str, Any], key: str) -> None:
    assert config_change(config(), config(**sections)) == ConfigChange(needs_restart=(key,))
