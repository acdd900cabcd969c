"""Arguments of the client that cannot be meant: refused before anything is sent, in words."""

from __future__ import annotations

import re

import pytest

from plait.client import Client
from plait.client.objectives import Objective


@pytest.mark.parametrize("key", ["secret\n", "schlüssel", "two words"])
def test_a_key_that_no_header_can_carry_is_not_shown(key: str) -> None:
    with pytest.raises(ValueError, match=re.escape("api_key is (hidden); expected printable ASCII")) as caught:
        Client(api_key=key)
    assert key not in str(caught.value)


def test_an_unknown_objective_gets_those_that_there_are() -> None:
    with pytest.raises(ValueError, match="an objective is 'fast'; expected latency or throughput"):
        Objective("fast")
