"""Each client as it is released, with the features that it has, at a gateway that asks for keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from e2e.clients.client import CLIENTS, TRANSLATED, Client
from e2e.clients.matrix import Matrix
from e2e.clients.program_run import run_program
from e2e.clients.recording import recorded
from e2e.servers import Fleet


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.file_name)
def test_a_client_has_its_features(client: Client, fleets: dict[str, Fleet], matrix: Matrix, tmp_path: Path) -> None:
    check(client, client.title, fleets["forwarding"], matrix, tmp_path)


@pytest.mark.parametrize("client", TRANSLATED, ids=lambda client: client.file_name)
def test_a_client_sees_no_translation(client: Client, fleets: dict[str, Fleet], matrix: Matrix, tmp_path: Path) -> None:
    check(client, f"{client.title}, translated", fleets["translating"], matrix, tmp_path)


def check(client: Client, title: str, fleet: Fleet, matrix: Matrix, home: Path) -> None:
    """Run a client, and enter what works."""
    if client.why_not is not None:
        matrix.skip(title, client.why_not)
        pytest.skip(client.why_not)
    with recorded(client, fleet.gateway) as (url, keep):
        outcomes = run_program(client.command, url, home)
        keep(outcomes)
    matrix.enter(title, outcomes)
    failed = [f"{outcome.feature}: {outcome.detail}" for outcome in outcomes if not outcome.ok]
    assert not failed, "\n".join(failed)
