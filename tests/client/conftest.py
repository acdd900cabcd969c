"""The fake gateway, and clients of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import pytest

from plait.client import Client, Session
from plait.client.flow import Retries
from tests.client.fake_gateway import FakeGateway


@pytest.fixture(scope="module")
def server() -> Iterator[FakeGateway]:
    with FakeGateway() as fake:
        yield fake


@pytest.fixture
def fake(server: FakeGateway) -> FakeGateway:
    """The module's server, with nothing written down."""
    server.forget()
    return server


@pytest.fixture
async def client(fake: FakeGateway) -> AsyncIterator[Client]:
    async with Client(fake.base_url, api_key="secret", model="demo", tls=False) as client:
        client._connection = replace(client._connection, retries=Retries(most=2, first_pause_s=0.0))
        yield client


@pytest.fixture
def session(client: Client) -> Iterator[Session]:
    with client.session() as session:
        yield session
