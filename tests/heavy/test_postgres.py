"""The PostgreSQL store against a real server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from threading import Thread
from uuid import uuid4

import psycopg
import pytest

from lifecycle.errors import ConfigurationError, Fenced, SnapshotCorrupt, StoreUnavailable
from lifecycle.stores import PostgresStore, SnapshotStore, StoreTooNew
from lifecycle.testing.stores import OTHER, OWNER, TTL, StoreContract, ids, same, snapshot, tail
from tests.heavy.postgres_server import PostgresServer
from tests.support.writers import until


@pytest.fixture
def dsn(server: PostgresServer) -> str:
    """A database schema of its own for each test."""
    return server.dsn_for(f"t{uuid4().hex}")


class TestPostgresStore(StoreContract):
    """The shared store; a peer is another connection."""

    @pytest.fixture(autouse=True)
    def _database(self, dsn: str) -> Iterator[None]:
        self.dsn = dsn
        super().setup_method()
        yield
        super().teardown_method()

    def setup_method(self) -> None:
        """Done by the fixture, which knows the server."""

    def teardown_method(self) -> None:
        """Done by the fixture."""

    def make_store(self, clock: Callable[[], float]) -> SnapshotStore:
        """Four new tables."""
        return PostgresStore(self.dsn, clock=clock)

    def peer(self, store: SnapshotStore) -> SnapshotStore:
        """Another connection to the same tables."""
        return PostgresStore(self.dsn, clock=self.clock)


def test_leases_follow_the_clock_of_the_server(dsn: str) -> None:
    """Without a clock of the caller's, nodes that disagree on the time agree on leases."""
    with PostgresStore(dsn) as store, psycopg.connect(dsn) as connection:
        store.put(snapshot(tokens=3), store.new_epoch(), owner=OWNER, ttl=TTL)
        store.flush()
        left = connection.execute(
            "SELECT lease_until - extract(epoch FROM clock_timestamp()) FROM lifecycle_owners"
        ).fetchone()
        assert left is not None
        assert TTL - 15 < left[0] <= TTL
        assert ids(store.claim(OTHER, TTL)) == []


def test_a_crash_of_the_server_loses_nothing_flushed_and_keeps_nothing_half(
    server: PostgresServer, dsn: str
) -> None:
    """After an immediate stop in the middle of a transaction, flushed writes are there and the others are not."""
    store = PostgresStore(dsn)
    epoch = store.new_epoch()
    store.put(snapshot("kept", 5), epoch, owner=OWNER, ttl=TTL)
    store.flush()
    store.append(tail("kept", 5, 3), epoch)
    store.put(snapshot("lost", 5), epoch, owner=OWNER, ttl=TTL)
    server.crash()
    with pytest.raises(StoreUnavailable):
        store.flush()
    with pytest.raises(StoreUnavailable):
        store.put(snapshot("lost", 5), epoch, owner=OWNER, ttl=TTL)
    server.start()
    assert same(store.load("kept"), snapshot("kept", 5))
    with pytest.raises(KeyError):
        store.load("lost")
    store.append(tail("kept", 5, 3), epoch)
    store.flush()
    assert len(store.load("kept").tokens) == 8
    store.close()


def test_two_who_store_a_new_id_at_once(dsn: str) -> None:
    """The second waits for the first and is judged by what that one stored."""
    with (
        PostgresStore(dsn) as first,
        PostgresStore(dsn) as second,
        psycopg.connect(dsn, autocommit=True) as watch,
    ):
        early, late = first.new_epoch(), second.new_epoch()
        first.put(snapshot("r1", 5), early, owner=OWNER, ttl=TTL)
        outcome: list[BaseException | None] = []

        def race() -> None:
            try:
                second.put(snapshot("r1", 5), late, owner=OTHER, ttl=TTL)
                outcome.append(None)
            except Fenced as error:
                outcome.append(error)

        thread = Thread(target=race)
        thread.start()
        waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted"
        until(lambda: watch.execute(waiting).fetchone() == (1,))
        first.flush()
        thread.join()
        assert isinstance(outcome[0], Fenced)
        second.flush()
        assert first.rows()[0].owner == OWNER


def test_a_lock_that_stays_is_told(dsn: str) -> None:
    """With a `lock_timeout` in the DSN, a row that another transaction holds makes the store unavailable, for then."""
    with PostgresStore(dsn) as first:
        epoch = first.new_epoch()
        first.put(snapshot("r1", 5), epoch, owner=OWNER, ttl=TTL)
        first.flush()
        first.append(tail("r1", 5), epoch)
        with PostgresStore(dsn.replace("options='", "options='-c lock_timeout=50ms ")) as second:
            second.put(snapshot("r2", 5), epoch, owner=OWNER, ttl=TTL)
            with pytest.raises(StoreUnavailable, match="lock timeout"):
                second.append(tail("r1", 5), epoch)
            first.flush()
            assert [row.id for row in second.rows()] == ["r1"]
            second.append(tail("r1", 5), epoch)


def test_a_claim_whose_answer_was_lost_is_made_good(server: PostgresServer, dsn: str) -> None:
    """If a claim was committed and nobody heard of it, the same owner's next claim brings the rollouts."""
    with PostgresStore(dsn) as store:
        store.put(snapshot("r1", 5), store.new_epoch(), owner=OWNER, ttl=TTL)
        store.flush()
        store.release(OWNER)
        commit, store._commit = store._commit, _lost_after(store)
        with pytest.raises(StoreUnavailable):
            store.claim(OTHER, TTL)
        store._commit = commit
        assert [row.owner for row in store.rows()] == [OTHER]
        assert ids(store.claim(OTHER, TTL)) == ["r1"]
        assert ids(store.claim(OTHER, TTL)) == []


def _lost_after(store: PostgresStore) -> Callable[[], None]:
    """A commit that happens, with an answer that does not arrive."""
    commit = store._commit

    def commit_and_fail() -> None:
        commit()
        if store._unsure is not None:
            raise psycopg.OperationalError("server closed the connection unexpectedly")

    return commit_and_fail


def test_flipped_bits_are_found(dsn: str) -> None:
    """A damaged payload names its rollout; the others load."""
    with PostgresStore(dsn) as store, psycopg.connect(dsn, autocommit=True) as connection:
        epoch = store.new_epoch()
        for name in ("r1", "r2", "r3"):
            store.put(snapshot(name, 50), epoch, owner=OWNER, ttl=TTL)
        store.flush()
        connection.execute("UPDATE lifecycle_pieces SET payload = set_byte(payload, 99, 7) WHERE id = 'r2'")
        with pytest.raises(SnapshotCorrupt, match="'r2'"):
            store.load("r2")
        claim = store.claim(OTHER, TTL, force=True)
        assert [claimed.snapshot.id for claimed in claim.claimed] == ["r1", "r3"]
        assert "'r2'" in str(claim.unreadable[0])


def test_a_newer_store_is_refused(dsn: str) -> None:
    """Tables of a later version are left alone, with an error that says what to do."""
    PostgresStore(dsn).close()
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("UPDATE lifecycle_store SET schema_version = 99")
    with pytest.raises(StoreTooNew, match="upgrade"):
        PostgresStore(dsn)


def test_nothing_is_created_when_told_not_to(dsn: str) -> None:
    """Looking at a database that holds no store leaves it as it is."""
    with pytest.raises(ConfigurationError, match="no snapshot store"):
        PostgresStore(dsn, create=False)
    with psycopg.connect(dsn) as connection:
        assert connection.execute("SELECT to_regclass('lifecycle_store')").fetchone() == (None,)


def test_many_may_create_the_tables_at_once(dsn: str) -> None:
    """Processes that start together do not stumble over each other's CREATE TABLE."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(8) as pool:
        stores = list(pool.map(PostgresStore, [dsn] * 8))
    assert sorted(store.new_epoch() for store in stores) == list(range(1, 9))
    for store in stores:
        store.close()
