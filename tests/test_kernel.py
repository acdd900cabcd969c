"""What calls need imports no guest."""

from __future__ import annotations

from tests.kernel import guests_in_kernel


def test_the_kernel_imports_no_guest() -> None:
    assert guests_in_kernel() == set()
