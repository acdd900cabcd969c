"""Without annotations the plugin changes nothing but the order of admission, and with `fcfs` not even that."""

from __future__ import annotations

import pytest
from sglang.srt.managers.schedule_batch import Req

from e2e.real_schedulers.on_sglang.fixtures import Build
from e2e.real_schedulers.workloads import shared_prefixes


@pytest.mark.parametrize("seed", range(6))
def test_fcfs_schedules_what_stock_sglang_schedules(build: Build, seed: int) -> None:
    """As long as no prompt has to be cut: our chunks end with a page, and SGLang's need not.

    With overlap, versions before 0.5.22 compute one token too many of a call that ends by its limit; ours do not.
    """
    stock = build(plait=None)
    expected = shared_prefixes(stock, seed, most=120, arrivals=(0, 0, 1, 2))
    tokens = stock.tokens
    planned = build(plait={"scheduler": "fcfs"})
    steps = shared_prefixes(planned, seed, most=120, arrivals=(0, 0, 1, 2))
    assert steps == expected or not hasattr(Req, "next_output_finishes_by_length")
    assert planned.tokens == tokens
