from __future__ import annotations

import sys
import time
from contextlib import suppress
from hashlib import sha256
from math import inf
from types import FrameType

import pytest
from starlette.types import Scope

from plait.backends.errors import AuthenticationError
from plait.gateway.admission.tenants import TenantIds
from plait.gateway.api.auth import IssuedKey, IssuedKeys, KeyRing
from plait.gateway.asgi import ON_KNOWN
from plait.gateway.config.sections import TenantConfig
from plait.gateway.others import ADMIN_KEY, CHECKED, Checked


def scope(*headers: tuple[bytes, bytes]) -> Scope:
    return {"headers": headers}


def bearer(value: bytes) -> Scope:
    return scope((b"accept", b"*/*"), (b"authorization", value))


def test_without_keys_the_gateway_is_open() -> None:
    ring = KeyRing([])
    assert ring.is_open
    assert ring.check(scope()) == ring.check(bearer(b"Bearer whatever")) == ""


@pytest.mark.parametrize("value", [b"Bearer two", b"bearer two", b"BEARER  two ", b"Bearer one"])
def test_any_of_the_keys_opens(value: bytes) -> None:
    ring = KeyRing(["one", "two"])
    assert not ring.is_open
    assert ring.check(bearer(value))


@pytest.mark.parametrize(
    "value",
    [b"", b"two", b"Bearer", b"Bearer ", b"Bearer tw", b"Bearer twoo", b"Basic two", b"Bearer \xff", b"Bearer two two"],
)
def test_nothing_else_does(value: bytes) -> None:
    with pytest.raises(AuthenticationError) as caught:
        KeyRing(["one", "two"]).check(bearer(value))
    assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")


def test_a_request_without_a_key_is_refused() -> None:
    with pytest.raises(AuthenticationError, match="Authorization: Bearer"):
        KeyRing(["one"]).check(scope((b"x-key", b"one")))


@pytest.mark.parametrize("name", [b"x-api-key", b"api-key"])
def test_other_sdks_have_headers_of_their_own(name: bytes) -> None:
    ring = KeyRing(["one"])
    assert ring.check(scope((name, b"one"))) == ring.check(bearer(b"Bearer one"))


@pytest.mark.parametrize("wrong", [b"Bearer two", b"Bearer", b"Basic dHdv"])
@pytest.mark.parametrize("name", [b"x-api-key", b"api-key"])
def test_a_right_key_wins_beside_a_wrong_one(name: bytes, wrong: bytes) -> None:
    ring = KeyRing(["one", "three"])
    right = ring.check(bearer(b"Bearer one"))
    assert ring.check(scope((b"authorization", wrong), (name, b"one"))) == right
    assert ring.check(scope((name, b"two"), (b"authorization", b"Bearer one"))) == right
    assert ring.check(scope((name, b"three"), (b"authorization", b"Bearer one"))) == right, (
        "a bearer token counts first"
    )
    with pytest.raises(AuthenticationError):
        ring.check(scope((b"authorization", wrong), (name, b"two")))


def test_a_tenant_is_known_by_its_key() -> None:
    ring = KeyRing(["one", "two"])
    one, again, two = (ring.check(bearer(value)) for value in (b"Bearer one", b"bearer one", b"Bearer two"))
    assert one == again != two
    assert "one" not in one


def test_a_named_tenant_may_have_several_keys() -> None:
    ids = TenantIds(b"secret")
    ring = KeyRing(["one"], [TenantConfig(name="blue", api_keys=("two", "three"))], ids)
    tenants = [ring.check(bearer(b"Bearer " + key)) for key in (b"one", b"two", b"three")]
    assert tenants == [ids.of_key("one"), ids.of_name("blue"), ids.of_name("blue")]
    ring.replace([], [TenantConfig(name="green", api_keys=("two",))])
    assert ring.check(bearer(b"Bearer two")) == ids.of_name("green")
    with pytest.raises(AuthenticationError):
        ring.check(bearer(b"Bearer three"))


def test_keys_can_be_replaced() -> None:
    ring = KeyRing(["one"])
    ring.replace(["two"])
    assert ring.check(bearer(b"Bearer two"))
    with pytest.raises(AuthenticationError):
        ring.check(bearer(b"Bearer one"))


CHECKED_BY_PEER: Scope = {"headers": (), CHECKED: Checked("api_keys", "tenant")}


@pytest.mark.parametrize("request_scope", [bearer(b"Bearer one"), CHECKED_BY_PEER])
def test_the_server_is_told_of_a_valid_key(request_scope: Scope) -> None:
    told: list[str] = []
    KeyRing(["one"]).check({**request_scope, ON_KNOWN: lambda: told.append("known")})
    assert told == ["known"]


@pytest.mark.parametrize("keys", [[], ["two"]])
def test_the_server_is_not_told_without_one(keys: list[str]) -> None:
    told: list[str] = []
    with suppress(AuthenticationError):
        KeyRing(keys).check({**bearer(b"Bearer one"), ON_KNOWN: lambda: told.append("known")})
    assert told == []


def test_what_another_gateway_has_checked_needs_no_key_and_opens_nothing_else() -> None:
    assert KeyRing(["one"]).check(CHECKED_BY_PEER) == "tenant"
    with pytest.raises(AuthenticationError):
        KeyRing(["admin"], name=ADMIN_KEY).check(CHECKED_BY_PEER)


def python_calls(ring: KeyRing, key: str) -> int:
    """How many Python functions a check of this key calls."""
    called = list[str]()
    request = bearer(f"Bearer {key}".encode())

    def note(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call":
            called.append(frame.f_code.co_qualname)

    sys.setprofile(note)
    try:
        ring.check(request)
    finally:
        sys.setprofile(None)
    return len(called)


def test_ten_thousand_issued_keys_cost_what_two_of_the_file_do() -> None:
    of_file, issuing = KeyRing(["one", "two"]), KeyRing([], [TenantConfig(name="blue")])
    issuing.issued = issued = IssuedKeys()
    issued.known_until_s = time.time() + 60
    for number in range(10_000):
        issued[sha256(f"sk-{number}".encode()).digest()] = IssuedKey("blue", f"key_{number}", inf)
    assert python_calls(issuing, "sk-9999") == python_calls(of_file, "two")
