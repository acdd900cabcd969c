"""What calls need imports no guest, but for a few files that are still shared."""

from __future__ import annotations

from tests.kernel import guests_in_kernel

STILL_SHARED = {
    "gateway/peers/signatures.py": "the keys of requests that another gateway has checked",
    "gateway/programs/condition.py": "the annotation `when`",
    "gateway/store/event_log.py": "the store's error, and what gateways have drawn of their tenants' rates",
    "policy/programs/group_outputs.py": "the output length that calls of a group predict for each other",
}
"""By file: why the kernel knows it."""


def test_the_kernel_imports_no_guest() -> None:
    assert guests_in_kernel() == STILL_SHARED.keys()
