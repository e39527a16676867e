"""Shared by the heavy tests: one PostgreSQL server for all of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.heavy.postgres_server import NoServer, PostgresServer


@pytest.fixture(scope="session")
def server() -> Iterator[PostgresServer]:
    """A running server with a data directory of its own; where none can be had, the tests fail with one line."""
    try:
        running = PostgresServer()
    except NoServer as error:
        pytest.fail(str(error), pytrace=False)
    with running:
        yield running
