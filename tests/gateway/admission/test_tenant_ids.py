"""What tenants are called: inside, where nobody may guess it, and in metrics, which anybody may read."""

from __future__ import annotations

from hashlib import sha256

from plait.gateway.admission.tenants import TenantIds

SECRET = b"0123456789abcdef" * 4


def test_identity_and_label_are_those_of_the_secret() -> None:
    ids = TenantIds(SECRET)
    tenants = [ids.of_key("one"), ids.of_key("two"), ids.of_name("one"), ids.of_name("two")]
    assert tenants[0] == "ea74f14430a7835ac2bb35a5172b6cfb", "as it was in the releases before"
    again = TenantIds(SECRET)
    assert [again.of_key("one"), again.of_key("two"), again.of_name("one"), again.of_name("two")] == tenants
    assert [again.label(tenant) for tenant in tenants] == [ids.label(tenant) for tenant in tenants]
    assert len({*tenants, TenantIds(SECRET + b"x").of_key("one"), TenantIds().of_key("one")}) == 6


def test_an_identity_cannot_be_computed_without_the_secret() -> None:
    tenant = TenantIds(SECRET).of_key("one")
    assert tenant not in sha256(b"plait-tenant\0one").hexdigest()
    assert TenantIds().of_key("one") != TenantIds().of_key("one"), "without a secret, one is made for each process"


def test_all_identities_have_one_length() -> None:
    ids = TenantIds(SECRET)
    assert {len(ids.of_name(name)) for name in ("blue", "blue:x", "b" * 300)} == {len(ids.of_key("k"))} == {32}


def test_a_label_is_the_name_or_eight_digits() -> None:
    ids = TenantIds(SECRET)
    assert ids.label(ids.of_name("blue")) == "blue"
    one = ids.of_key("one")
    assert ids.label(one) == one[:8]
    assert ids.label("") == "", "an open gateway's tenant"
