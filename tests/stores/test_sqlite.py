"""What is special about the embedded store: its file, and what can happen to it."""

from __future__ import annotations

import gzip
import random
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from lifecycle.errors import (
    ConfigurationError,
    LifecycleError,
    SnapshotCorrupt,
    SnapshotError,
    StoreUnavailable,
)
from lifecycle.snapshot import Snapshot
from lifecycle.states import Disposition, RolloutState
from lifecycle.stores import SqliteStore, StoreTooNew
from lifecycle.stores.sqlite import PATIENCE_SECONDS
from lifecycle.testing.stores import OTHER, OWNER, TTL, ids, same, snapshot, tail
from tests.support.golden import following, full, plain, resealed, started
from tests.support.stores import fast_folder

GOLDEN = Path(__file__).parents[1] / "data" / "snapshots" / "v1" / "store.db.gz"


@pytest.fixture
def path() -> Iterator[Path]:
    """Where a store may be made."""
    with fast_folder() as folder:
        yield Path(folder) / "snapshots.db"


def filled(path: Path, count: int = 3, tokens: int = 40) -> dict[str, Snapshot]:
    """A store with `count` rollouts, each with two tails; closed. What was stored, by id."""
    expected: dict[str, Snapshot] = {}
    with SqliteStore(path) as store:
        epoch = store.new_epoch()
        for number in range(count):
            name = f"r{number:02}"
            size = tokens * (1 + number % 5)
            store.put(snapshot(name, size, state=RolloutState.PARTIAL), epoch, owner=OWNER, ttl=TTL)
            store.append(tail(name, size, 5), epoch)
            store.append(tail(name, size + 5, 1), epoch)
            disposition = list(Disposition)[number % 5]
            store.mark(name, disposition, epoch)
            expected[name] = snapshot(name, size + 6, state=RolloutState.PARTIAL, disposition=disposition)
    return expected


def execute(path: Path, sql: str, *values: Any) -> None:
    """Change the file behind the store's back."""
    connection = sqlite3.connect(path)
    with connection:
        connection.execute(sql, values)
    connection.close()


# -- the file ----------------------------------------------------------------------------------------------------


def test_the_golden_store_of_schema_1_loads(path: Path) -> None:
    """A whole file that version 1 wrote is read, claimed and written on, for ever."""
    path.write_bytes(gzip.decompress(GOLDEN.read_bytes()))
    with SqliteStore(path) as store:
        assert same(store.load("prompt-7/3"), full())
        assert same(store.load("started"), started().extended(following()))
        assert store.load("plain").disposition is Disposition.CARRIED
        assert ids(store.claim("later", TTL)) == ["plain", "prompt-7/3", "started"]
        assert not store.problems()


def test_a_store_is_one_file_when_closed(path: Path) -> None:
    """The write-ahead log is folded in by the last one who closes."""
    filled(path)
    assert [found.name for found in path.parent.iterdir()] == [path.name]
    with SqliteStore(path, read_only=True) as store:
        assert plain().id not in [row.id for row in store.rows()]


def test_missing_folders_are_made(path: Path) -> None:
    """A run directory need not exist yet."""
    deep = path.parent / "a" / "b" / "snapshots.db"
    SqliteStore(deep).close()
    assert deep.is_file()


@pytest.mark.parametrize("how", [{"create": False}, {"read_only": True}])
def test_a_missing_store_is_not_made_by_looking(path: Path, how: dict[str, bool]) -> None:
    """Who wants to read a store does not create one."""
    with pytest.raises(ConfigurationError, match="no snapshot store at"):
        SqliteStore(path, **how)
    assert not path.exists()


def test_other_files_are_refused_by_name(path: Path) -> None:
    """A text file, a folder, a foreign database and a folder that is a file: each gets a clear word, and is kept."""
    text, foreign = path.with_name("notes.txt"), path.with_name("foreign.db")
    text.write_text("These are notes, long enough to be looked at as a database header. " * 20)
    execute(foreign, "CREATE TABLE t (x)")
    for where, problem in (
        (text, "is not a snapshot store, or is damaged"),
        (foreign, "is a database, but not a snapshot store"),
        (path.parent, "no snapshot store at"),
        (text / "below.db", "cannot open the snapshot store"),
    ):
        before = where.read_bytes() if where.is_file() else None
        with pytest.raises(ConfigurationError, match=problem):
            SqliteStore(where)
        assert before is None or where.read_bytes() == before


def test_a_newer_store_is_refused(path: Path) -> None:
    """A file of a later version is left alone, with an error that says what to do."""
    filled(path)
    execute(path, "PRAGMA user_version = 2")
    for how in ({}, {"read_only": True}):
        with pytest.raises(StoreTooNew, match="has schema 2, this version reads up to 1; upgrade"):
            SqliteStore(path, **how)


def test_a_newer_record_is_refused_and_the_others_load(path: Path) -> None:
    """Newer snapshots in a store that is readable otherwise are named."""
    expected = filled(path)
    execute(path, "UPDATE lifecycle_pieces SET payload = ? WHERE id = 'r01'", resealed(b"", schema=7))
    with SqliteStore(path) as store:
        claim = store.claim(OTHER, TTL, force=True)
        assert "'r01' has schema 7" in str(claim.unreadable[0])
        assert [claimed.snapshot.id for claimed in claim.claimed] == ["r00", "r02"]
        assert same(store.load("r00"), expected["r00"])


def test_reading_changes_nothing(path: Path) -> None:
    """A read-only store gives everything, refuses every write, and leaves the file as it was."""
    expected = filled(path)
    before = path.read_bytes()
    with SqliteStore(path, read_only=True) as store:
        assert same(store.load("r01"), expected["r01"])
        assert len(store.rows()) == 3
        with pytest.raises(StoreUnavailable, match="readonly"):
            store.new_epoch()
    assert path.read_bytes() == before


def test_a_lock_that_stays_is_told(path: Path) -> None:
    """Another process that holds the file makes the store unavailable, not broken."""
    filled(path)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with SqliteStore(path, busy=0.01) as store:
        with pytest.raises(StoreUnavailable, match="locked"):
            store.new_epoch()
        other.execute("COMMIT")
        assert store.new_epoch() > 0
    other.execute("PRAGMA journal_mode = DELETE")
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(StoreUnavailable, match="locked by another process"):
        SqliteStore(path, busy=0.01)
    other.close()


def test_a_lock_on_a_file_being_made_is_waited_for(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite itself does not wait here: the store does, and opens as soon as the other lets go."""
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    waits: list[float] = []

    def let_go(seconds: float) -> None:
        waits.append(seconds)
        other.execute("ROLLBACK")

    monkeypatch.setattr("lifecycle.stores.sqlite.time.sleep", let_go)
    with SqliteStore(path) as store:
        assert store.new_epoch() == 1
    assert waits == [PATIENCE_SECONDS]
    other.close()


def test_several_may_create_it_at_once(path: Path) -> None:
    """Connections that open a new file together all get a working store."""
    stores: list[SqliteStore] = []
    threads = [Thread(target=lambda: stores.append(SqliteStore(path))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(store.new_epoch() for store in stores) == [1, 2, 3, 4, 5, 6]
    for store in stores:
        store.close()


def test_using_a_closed_store_is_an_error(path: Path) -> None:
    """It is said plainly."""
    store = SqliteStore(path)
    store.close()
    store.close()
    for use in (store.rows, lambda: store.load("r1"), store.new_epoch):
        with pytest.raises(StoreUnavailable, match="closed"):
            use()


# -- trouble of the disk -----------------------------------------------------------------------------------------


def test_a_full_disk_undoes_the_group_and_passes(path: Path) -> None:
    """Nothing of the group is stored, everything before it is; with space again the same group is saved."""
    expected = filled(path)
    with SqliteStore(path) as store:
        epoch = store.new_epoch()
        pages = store._pragma("page_count")
        store._connection.execute(f"PRAGMA max_page_count = {pages + 2}")
        with pytest.raises(StoreUnavailable, match="full"):
            put_many(store, epoch)
        assert [row.id for row in store.rows()] == list(expected)
        store._connection.execute("PRAGMA max_page_count = 1000000")
        store.put(snapshot("n0", 2000), epoch, owner=OWNER, ttl=TTL)
        store.flush()
        assert len(store.rows()) == 4


def put_many(store: SqliteStore, epoch: int) -> None:
    """More than fits."""
    for number in range(100):
        store.put(snapshot(f"n{number}", 2000), epoch, owner=OWNER, ttl=TTL)


def test_a_reader_in_trouble_does_not_hide_it_from_the_writer(path: Path) -> None:
    """If a failing read undoes what another thread has written, that thread's next call says so."""
    filled(path)
    with SqliteStore(path) as store:
        epoch = store.new_epoch()
        query = store._query
        for write_again in (store.flush, store.new_epoch):
            store.put(snapshot("new", 3), epoch, owner=OWNER, ttl=TTL)
            store._query = _broken
            with pytest.raises(StoreUnavailable):
                store.rows()
            store._query = query
            with pytest.raises(StoreUnavailable):
                write_again()
        store.put(snapshot("new", 3), epoch, owner=OWNER, ttl=TTL)
        store.flush()
        assert len(store.load("new").tokens) == 3


def _broken(*_: object) -> list[tuple[Any, ...]]:
    raise sqlite3.OperationalError("disk I/O error")


def states_of(path: Path) -> tuple[bytes, bytes, list[dict[str, Snapshot]]]:
    """A store whose log is never folded in: its file, its log, and what was stored after each flush."""
    store = SqliteStore(path)
    store._connection.execute("PRAGMA wal_autocheckpoint = 0")
    history: list[dict[str, Snapshot]] = [{}]
    epoch = store.new_epoch()
    for step in range(6):
        for number in range(3):
            name, size = f"r{number}", 700 * (step + 1)
            if step % 2:
                store.append(tail(name, size - 700, 700, attempt=step + 1), epoch)
            else:
                value = snapshot(name, size, attempt=step + 1, state=RolloutState.PARTIAL)
                store.put(value, epoch, owner=OWNER, ttl=TTL)
        store.flush()
        history.append({row.id: store.load(row.id) for row in store.rows()})
    log = path.with_name(path.name + "-wal").read_bytes()
    file = path.read_bytes()
    store.close()
    return file, log, history


def contents(path: Path) -> dict[str, Snapshot]:
    """What a store holds after a crash."""
    with SqliteStore(path) as store:
        assert not store.problems()
        return {row.id: store.load(row.id) for row in store.rows()}


def equal(one: dict[str, Snapshot], other: dict[str, Snapshot]) -> bool:
    """The same rollouts with the same contents."""
    return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)


def test_a_crash_at_any_write_leaves_a_whole_state(path: Path) -> None:
    """However much of the log was written when the process died, the store is as after one of its flushes."""
    file, log, history = states_of(path)
    source = random.Random(4)
    frame = 24 + 16384
    frames = [32 + frame * number for number in range((len(log) - 32) // frame + 1)]
    cuts = [0, 1, 31, *frames, *(cut + 100 for cut in frames), *source.sample(range(len(log)), 40)]
    reached = set()
    for number, cut in enumerate(cuts):
        crashed = path.with_name(f"crash-{number}.db")
        crashed.write_bytes(file)
        crashed.with_name(crashed.name + "-wal").write_bytes(log[:cut])
        found = contents(crashed)
        matching = [step for step, state in enumerate(history) if equal(found, state)]
        assert matching, f"cut at byte {cut}: half a group"
        reached.update(matching)
        crashed.unlink()
    assert reached == set(range(len(history)))


def test_a_crash_while_the_log_is_folded_in_loses_nothing(path: Path) -> None:
    """With any part of the pages copied from the log already, everything flushed is there."""
    file, log, history = states_of(path)
    after = path.read_bytes()
    assert len(after) > len(file)
    source = random.Random(5)
    for number in range(20):
        pages = [
            (after if source.random() < 0.5 else file.ljust(len(after), b"\0"))[start : start + 16384]
            for start in range(0, len(after), 16384)
        ]
        crashed = path.with_name(f"fold-{number}.db")
        crashed.write_bytes(b"".join(pages))
        crashed.with_name(crashed.name + "-wal").write_bytes(log)
        assert equal(contents(crashed), history[-1])
        crashed.unlink()


# -- damage ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE lifecycle_pieces SET payload = zeroblob(200) WHERE id = 'r01' AND number = 0",
        "UPDATE lifecycle_pieces SET payload = 'text' WHERE id = 'r01' AND number = 1",
        "UPDATE lifecycle_pieces SET payload = x'' WHERE id = 'r01' AND number = 1",
        "DELETE FROM lifecycle_pieces WHERE id = 'r01' AND number = 2",
        "DELETE FROM lifecycle_pieces WHERE id = 'r01' AND number = 0",
        "DELETE FROM lifecycle_pieces WHERE id = 'r01'",
        "UPDATE lifecycle_pieces SET number = 9 - number WHERE id = 'r01' AND number > 0",
        (
            "UPDATE lifecycle_pieces AS p SET payload = (SELECT payload FROM lifecycle_pieces q WHERE q.id = 'r02' AND "
            "q.number = p.number) WHERE p.id = 'r01' AND p.number = 0"
        ),
        (
            "UPDATE lifecycle_pieces AS p SET payload = (SELECT payload FROM lifecycle_pieces q WHERE q.id = 'r02' AND "
            "q.number = p.number) WHERE p.id = 'r01' AND p.number = 1"
        ),
        (
            "UPDATE lifecycle_pieces AS p SET payload = (SELECT payload FROM lifecycle_pieces q WHERE q.id = 'r02' AND "
            "q.number = p.number) WHERE p.id = 'r01'"
        ),
        "UPDATE lifecycle_rollouts SET tokens = tokens - 1 WHERE id = 'r01'",
        "UPDATE lifecycle_rollouts SET tokens = 'many' WHERE id = 'r01'",
        "UPDATE lifecycle_rollouts SET token_crc = token_crc + 1 WHERE id = 'r01'",
        "UPDATE lifecycle_rollouts SET logprob_crc = logprob_crc + 1 WHERE id = 'r01'",
        "UPDATE lifecycle_rollouts SET state = 'aborted' WHERE id = 'r01'",
        "UPDATE lifecycle_rollouts SET attempt = 7 WHERE id = 'r01'",
        "UPDATE lifecycle_rollouts SET pieces = 2 WHERE id = 'r01'",
        "UPDATE lifecycle_rollouts SET disposition = 'lost' WHERE id = 'r01'",
    ],
)
def test_damage_names_its_rollout_and_the_others_load(path: Path, damage: str) -> None:
    """Whatever of a rollout does not belong together is refused with its id, alone and in a claim."""
    expected = filled(path)
    execute(path, damage)
    with SqliteStore(path) as store:
        with pytest.raises(SnapshotCorrupt, match="'r01'"):
            store.load("r01")
        claim = store.claim(OTHER, TTL, force=True)
        assert [claimed.snapshot.id for claimed in claim.claimed] == ["r00", "r02"]
        assert [error.rollout_id for error in claim.unreadable] == ["r01"]
        assert same(store.load("r02"), expected["r02"])


def test_a_good_snapshot_may_replace_a_damaged_one(path: Path) -> None:
    """What cannot be read any more is no reason to refuse its owner's next put."""
    filled(path)
    execute(path, "UPDATE lifecycle_rollouts SET token_crc = 1 WHERE id = 'r01'")
    execute(path, "UPDATE lifecycle_pieces SET payload = zeroblob(9) WHERE id = 'r01'")
    with SqliteStore(path) as store:
        store.put(snapshot("r01", 100), store.rows()[1].epoch, owner=OWNER, ttl=TTL)
        store.flush()
        assert same(store.load("r01"), snapshot("r01", 100, disposition=Disposition.DELIVERED))


def damage(data: bytes, source: random.Random) -> bytes:
    """Flip a bit, overwrite some bytes, blank or repeat a page, or cut the end off."""
    damaged = bytearray(data)
    place = source.randrange(len(data))
    kind = source.randrange(8)
    if kind < 4:
        damaged[place] ^= 1 << source.randrange(8)
    elif kind == 4:
        damaged[place : place + 64] = source.randbytes(min(64, len(data) - place))
    elif kind == 5:
        page = place // 16384 * 16384
        damaged[page : page + 16384] = bytes(16384)
    elif kind == 6:
        page, other = place // 16384 * 16384, source.randrange(len(data) // 16384) * 16384
        damaged[page : page + 16384] = data[other : other + 16384]
    else:
        del damaged[place:]
    return bytes(damaged)


def test_200_damaged_files_never_give_a_wrong_token(path: Path) -> None:
    """A rollout that loads is right; everything else is an error of ours, and lost rows are found by the check."""
    expected = filled(path, count=12, tokens=300)
    data = path.read_bytes()
    source = random.Random(3)
    outcomes: dict[str, int] = {}
    for number in range(200):
        damaged = path.with_name(f"damaged-{number}.db")
        damaged.write_bytes(damage(data, source))
        outcome = look(damaged, expected)
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
        for left in path.parent.glob(f"{damaged.name}*"):
            left.unlink()
    assert sum(outcomes.values()) == 200
    assert outcomes.keys() >= {"harmless", "refused", "named"}


def look(path: Path, expected: dict[str, Snapshot]) -> str:
    """How a damaged file is met; every rollout that it yields must be the one that was stored."""
    try:
        store = SqliteStore(path)
    except LifecycleError:
        return "refused"
    with store:
        problems = store.problems()
        missing = read_all(store, expected)
        try:
            for claimed in store.claim(OTHER, TTL, force=True).claimed:
                assert same(claimed.snapshot, expected[claimed.snapshot.id])
        except SnapshotError:
            missing += 1
    if missing:
        return "named"
    assert not problems or not missing
    return "harmless"


def read_all(store: SqliteStore, expected: dict[str, Snapshot]) -> int:
    """Read every rollout by id and by listing; how many could not be read.

    Those that are missing without an error must be found by the store's own check.
    """
    missing = 0
    for name, value in expected.items():
        try:
            assert same(store.load(name), value)
        except KeyError:
            assert store.problems(), f"{name} is gone without a trace"
            missing += 1
        except SnapshotError:
            missing += 1
    try:
        listed = {row.id for row in store.rows()}
    except SnapshotError:
        return missing + 1
    if not listed >= expected.keys():
        assert store.problems(), f"{expected.keys() - listed} not listed"
        missing += 1
    return missing


@pytest.mark.parametrize("seed", [1232, 2881])
def test_damage_that_was_once_met_badly(path: Path, seed: int) -> None:
    """An id that is no text any more, and an error message of SQLite's that is none."""
    expected = filled(path, count=12, tokens=300)
    data = path.read_bytes()
    path.write_bytes(damage(data, random.Random(seed)))
    assert look(path, expected) in {"refused", "named"}


def test_a_copy_of_the_file_is_a_backup(path: Path) -> None:
    """A closed store may be copied like any file."""
    expected = filled(path)
    shutil.copy(path, path.with_name("copy.db"))
    with SqliteStore(path.with_name("copy.db"), read_only=True) as store:
        assert all(same(store.load(name), value) for name, value in expected.items())
