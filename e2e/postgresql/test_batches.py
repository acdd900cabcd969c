"""Batches of gateways that share a PostgreSQL: asked for anywhere, and gone on with where one has died."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import openai
import pytest

from e2e.postgresql.server import ABSENT, binaries
from e2e.sdk import sync_client
from e2e.server_process import Server, eventually
from e2e.servers import Fleet, Launcher
from e2e.test_batches import TENANTS, answers, completed, create, ended, line, upload

pytestmark = pytest.mark.skipif(binaries() is None, reason=ABSENT)

LINES = 300


def test_a_batch_outlives_its_gateway(tmp_path: Path) -> None:
    with Launcher(tmp_path) as launch:
        engines = [launch.engine(name, time_scale=5) for name in ("batches-a", "batches-b")]
        several = launch.gateways(engines, tenants=TENANTS)
        Fleet(several, {engine.name: engine for engine in engines}).start()
        with sync_client(several, api_key="blue", max_retries=20) as client:
            made = create(client, *[line(number, max_tokens=20) for number in range(LINES)])
            eventually(lambda: completed(client, made.id) > 20)
            owner = _owner(several.members)
            owner.kill()
            found = ended(client, made.id)
            told = answers(client, found.output_file_id)
        calls = sum(member.metric("plait_batch_lines_total") for member in several.members if member is not owner)
        with sync_client(several, api_key="red", max_retries=20) as red, pytest.raises(openai.NotFoundError):
            red.batches.retrieve(made.id)
    assert found.status == "completed"
    assert [one["custom_id"] for one in told] == [f"line-{number}" for number in range(LINES)]
    assert calls < LINES - 20, "no line with a stored answer runs again"


def test_a_gateway_that_stops_hands_its_batches_over(tmp_path: Path) -> None:
    with Launcher(tmp_path) as launch:
        engine = launch.engine("handed-a", time_scale=5)
        several = launch.gateways([engine], tenants=TENANTS)
        Fleet(several, {engine.name: engine}).start()
        with sync_client(several, api_key="blue", max_retries=20) as client:
            made = create(client, *[line(number, max_tokens=20) for number in range(LINES)])
            eventually(lambda: completed(client, made.id) > 20)
            owner = _owner(several.members)
            owner.stop()
            assert ended(client, made.id).request_counts.completed == LINES
            assert upload(client, line(0)).bytes


def _owner(members: Sequence[Server]) -> Server:
    """The gateway that has the batch."""
    found = [member for member in members if member.metric("plait_batch_lines_total")]
    assert len(found) == 1
    return found[0]
