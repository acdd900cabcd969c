"""The tables of a store that several gateways share, and the migrations from older versions."""

from __future__ import annotations

from typing import Final

MIGRATIONS: Final = (
    """
    CREATE SEQUENCE plait.epochs;
    CREATE TABLE plait.gateways (
        epoch BIGINT PRIMARY KEY, url TEXT NOT NULL, release TEXT NOT NULL, until TIMESTAMPTZ NOT NULL,
        steady_since TIMESTAMPTZ NOT NULL, commits BIGINT NOT NULL
    );
    CREATE TABLE plait.streams (
        stream BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY, kind TEXT NOT NULL, tenant TEXT NOT NULL,
        name TEXT NOT NULL, owner BIGINT, version SMALLINT NOT NULL, UNIQUE (tenant, name, kind)
    );
    CREATE INDEX streams_of_owner ON plait.streams (owner);
    CREATE TABLE plait.events (
        stream BIGINT NOT NULL, event BIGINT GENERATED ALWAYS AS IDENTITY, version SMALLINT NOT NULL,
        at_unix_s DOUBLE PRECISION NOT NULL, data BYTEA NOT NULL, PRIMARY KEY (stream, event)
    );
    CREATE UNLOGGED TABLE plait.buckets (
        bucket TEXT PRIMARY KEY, used DOUBLE PRECISION[] NOT NULL, at TIMESTAMPTZ NOT NULL
    );
    """,
    """
    ALTER TABLE plait.gateways
        ADD COLUMN needs JSONB NOT NULL DEFAULT '{}', ADD COLUMN parts JSONB NOT NULL DEFAULT '{}';
    """,
    """
    ALTER TABLE plait.gateways ADD COLUMN signature TEXT NOT NULL DEFAULT '';
    """,
)
"""Each leads to the next version of the schema. They only add, so that gateways of the release before keep running."""
