"""What gateways need in their configurations to share a store."""

from __future__ import annotations

import pytest

from plait.gateway.config.file import ConfigError, parse_config
from plait.gateway.config.sections import Config


def parse(**sections: object) -> Config:
    return parse_config({"engines": [{"url": "http://a"}], **sections}, "c.toml")


def problems(**sections: object) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse(**sections)
    return [line.removeprefix("c.toml: ") for line in str(caught.value).splitlines()]


def sharing(**server: object) -> dict[str, object]:
    """The configuration of a gateway that shares a store, with its problems as `problems` lists them."""
    whole = {"advertise_url": "http://10.0.0.1", "peer_key": "p" * 32, "secret": "s" * 32}
    given = {key: value for key, value in {**whole, **server}.items() if value is not None}
    return {"server": given, "store": {"url": "postgresql://plait@db/plait"}}


def test_gateways_that_share_a_store_need_an_address_and_a_key() -> None:
    assert parse(**sharing()).store.url is not None
    missing = [problem.split(" is missing")[0] for problem in problems(**sharing(advertise_url=None, peer_key=None))]
    assert missing == ["server.advertise_url", "server.peer_key"]
    keys = {"api_keys": ["k"], "secret": None}
    assert [problem.split(" is missing")[0] for problem in problems(**sharing(**keys))] == ["server.secret"]
    assert problems(**sharing(advertise_url="10.0.0.1"))[0].startswith("server.advertise_url: url = ")


def test_a_stores_url_is_not_shown_since_it_may_hold_a_password() -> None:
    wrong = {"store": {"url": "mysql://plait:hunter2@db/plait"}}
    assert problems(**wrong) == ["store.url: expected postgresql://USER@HOST:PORT/DATABASE"]
    both = {"store": {"url": "postgresql://plait@db/plait", "path": "sessions.db"}}
    assert problems(**both) == ["store.url: expected no path beside it; sessions are in one of the two"]
