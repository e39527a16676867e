"""From the words of a command line to a store."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lifecycle.errors import ConfigurationError, StoreUnavailable
from lifecycle.stores import PostgresStore, SqliteStore, open_store
from lifecycle.stores.opening import is_dsn


@pytest.mark.parametrize(
    ("where", "dsn"),
    [
        ("postgresql://node/db", True),
        ("postgres://node/db", True),
        ("host=node dbname=db", True),
        ("dbname = db", True),
        ("run.db", False),
        ("/data/postgres/run.db", False),
        ("lr=0.1.db", False),
    ],
)
def test_dsns_and_paths_are_told_apart(where: str, dsn: bool) -> None:
    """A DSN is a URL of PostgreSQL's or begins with one of its words; everything else is a path."""
    assert is_dsn(where) is dsn


def test_a_path_is_a_sqlite_file(tmp_path: Path) -> None:
    """Made where it is missing; a folder stands for the store of the run in it."""
    open_store(str(tmp_path / "snapshots.db")).close()
    with open_store(str(tmp_path), read_only=True) as store:
        assert isinstance(store, SqliteStore)
        assert store.path == tmp_path / "snapshots.db"


def test_an_unreachable_server_is_told_without_the_password() -> None:
    """Host, port and database are named; the password is not."""
    with pytest.raises(StoreUnavailable, match=r"postgresql://127.0.0.1:1/runs: connection") as caught:
        open_store("host=127.0.0.1 port=1 dbname=runs user=me password=hunter2")
    assert "hunter2" not in str(caught.value)


def test_a_dsn_that_cannot_be_read_is_not_quoted() -> None:
    """What is wrong may be the password."""
    with pytest.raises(ConfigurationError, match="cannot be read; right would be postgresql://") as caught:
        PostgresStore("hunter2")
    assert "hunter2" not in str(caught.value)
    assert caught.value.__suppress_context__


def test_the_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without psycopg the message is the install command."""
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'rollout-lifecycle\[postgres\]'"):
        PostgresStore("host=node")
