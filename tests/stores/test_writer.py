"""The writer thread: never blocks, groups, retries, tells."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from threading import Event

import pytest

from lifecycle.errors import SnapshotError, StoreUnavailable
from lifecycle.log import Journal, read_log
from lifecycle.log.records import SnapshotFailed, SnapshotSaved
from lifecycle.states import Disposition, RolloutState
from lifecycle.stores import MemoryStore, StoreWriter, WriterSettings
from lifecycle.testing.stores import OTHER, OWNER, TTL, ManualClock, ids, same, snapshot, tail
from tests.support.writers import PATIENCE, FaultyStore, StepClock, saved, until

SETTINGS = WriterSettings(ttl=TTL, linger=1.0, retry_initial=1.0, retry_max=5.0, max_operations=100)


@pytest.fixture
def clock() -> StepClock:
    """The writer's time."""
    return StepClock()


@pytest.fixture
def store() -> FaultyStore:
    """A store in memory that can be told to fail; its leases are measured by a clock that stands still."""
    return FaultyStore(ManualClock())


class Told:
    """What a writer called back with."""

    def __init__(self) -> None:
        self.fenced: list[str] = []
        self.errors: list[tuple[str, Exception]] = []


@pytest.fixture
def told() -> Told:
    """Callbacks of the writer."""
    return Told()


@pytest.fixture
def writer(store: FaultyStore, clock: StepClock, told: Told) -> Iterator[StoreWriter]:
    """A writer over the store, closed at the end."""
    running = StoreWriter(
        store,
        owner=OWNER,
        settings=SETTINGS,
        clock=clock,
        on_fenced=told.fenced.append,
        on_error=lambda rollout_id, error: told.errors.append((rollout_id, error)),
    )
    clock.settle()
    yield running
    store.gate.set()
    store.faults.clear()
    if running._thread.is_alive():
        clock.advance(100)
        running.close(PATIENCE)


def test_what_is_handed_in_is_durable_after_a_flush(writer: StoreWriter, store: FaultyStore) -> None:
    """Snapshot, tail and disposition arrive in the order in which they were given."""
    writer.put(snapshot(tokens=3, state=RolloutState.PARTIAL))
    writer.append(tail(start=3, count=2))
    writer.mark("r1", Disposition.CARRIED)
    saved(writer)
    expected = snapshot(tokens=5, state=RolloutState.PARTIAL, disposition=Disposition.CARRIED)
    assert same(store.load("r1"), expected)
    writer.append(tail(start=5, count=2))
    writer.append(tail(start=7, count=1, text="ab"))
    writer.append(tail(start=8, count=1, text="c", text_start=2))
    saved(writer)
    assert (len(store.load("r1").tokens), store.load("r1").text) == (9, "abc")
    assert store.calls.count("append") == 1


def test_writes_gather_for_a_moment(writer: StoreWriter, store: FaultyStore, clock: StepClock) -> None:
    """A first write waits `linger` for company; then one group holds all."""
    for number in range(5):
        writer.put(snapshot(f"r{number}", 3))
    clock.advance(0.5)
    assert writer.stats()["saved"] == 0
    clock.advance(0.6)
    assert (writer.stats()["saved"], writer.stats()["groups"]) == (5, 1)


def test_a_flush_of_nothing_is_done_at_once(writer: StoreWriter, store: FaultyStore) -> None:
    """Nothing waits, so nobody waits."""
    saved(writer)
    assert "flush" not in store.calls


def test_a_stalled_store_holds_up_nobody(writer: StoreWriter, store: FaultyStore, clock: StepClock) -> None:
    """While a store stands still for 5 s, handing in goes on, and the backlog holds one entry per rollout."""
    store.gate.clear()
    writer.put(snapshot("r0", 1))
    pending = writer.flush()
    assert store.stalled.wait(PATIENCE)
    clock.now += 5.0
    for tokens in range(2, 60):
        for number in range(50):
            writer.put(snapshot(f"r{number}", tokens))
            writer.append(tail(f"r{number}", tokens, 1))
    stats = writer.stats()
    assert stats["backlog_operations"] == 51
    assert stats["backlog_bytes"] < 51 * 2048
    assert not pending.done()
    store.gate.set()
    saved(writer)
    assert pending.done()
    assert {len(store.load(f"r{number}").tokens) for number in range(50)} == {60}


def test_new_work_is_refused_over_the_bound(writer: StoreWriter, store: FaultyStore) -> None:
    """`admit` raises while too many rollouts wait, says the numbers, and is content again afterwards."""
    writer.admit()
    store.gate.clear()
    for number in range(SETTINGS.max_operations):
        writer.put(snapshot(f"r{number}", 1))
    with pytest.raises(StoreUnavailable, match="100 rollouts and"):
        writer.admit()
    writer.put(snapshot("r0", 2))
    store.gate.set()
    saved(writer)
    writer.admit()


def test_new_work_is_refused_over_the_bound_in_bytes(store: FaultyStore) -> None:
    """A few long rollouts count as much as many short ones."""
    store.gate.clear()
    writer = StoreWriter(store, owner=OWNER, settings=WriterSettings(max_bytes=100_000))
    writer.put(snapshot("long", 10_000))
    with pytest.raises(StoreUnavailable, match="bytes wait"):
        writer.admit()
    store.gate.set()
    writer.close(PATIENCE)
    assert len(store.load("long").tokens) == 10_000


def test_large_groups_are_split(store: FaultyStore) -> None:
    """One transaction holds at most so many entries, and a flush waits for all of them."""
    writer = StoreWriter(store, owner=OWNER, settings=WriterSettings(group_operations=10, linger=60.0))
    for number in range(35):
        writer.put(snapshot(f"r{number}", 1))
    saved(writer)
    assert writer.stats()["groups"] >= 4
    assert len(store.rows()) == 35
    writer.close(PATIENCE)


def test_a_failing_store_is_tried_again_and_shows(
    store: FaultyStore, clock: StepClock, tmp_path: Path
) -> None:
    """Back-off doubles up to its limit; the log, the statistics and `admit` tell the error; then all is saved."""
    log = tmp_path / "lifecycle.jsonl"
    journal = Journal(log)
    writer = StoreWriter(store, owner=OWNER, settings=SETTINGS, clock=clock, journal=journal)
    clock.settle()
    store.fail("flush", *[StoreUnavailable("disk full")] * 5)
    writer.put(snapshot("r0", 3))
    done = writer.flush()
    until(lambda: writer.stats()["failures"] == 1)
    for number in range(1, SETTINGS.max_operations):
        writer.put(snapshot(f"r{number}", 1))
    with pytest.raises(StoreUnavailable, match="last error: disk full"):
        writer.admit()
    for pause in (1.0, 2.0, 4.0, 5.0):
        assert (writer.stats()["last_error"], done.done()) == ("disk full", False)
        clock.advance(pause)
    clock.advance(5.0)
    done.result(PATIENCE)
    saved(writer)
    assert (writer.stats()["failing_tries"], writer.stats()["failures"]) == (0, 5)
    writer.close(PATIENCE)
    journal.close()
    records = [line.record for line in read_log(log)]
    failures = [record for record in records if isinstance(record, SnapshotFailed)]
    assert [record.retry_s for record in failures] == [1.0, 2.0, 4.0, 5.0, 5.0]
    assert {record.error for record in failures} == {"disk full"}
    groups = [record for record in records if isinstance(record, SnapshotSaved)]
    assert sum(record.snapshots for record in groups) == SETTINGS.max_operations


def test_a_store_that_fails_in_the_middle_of_a_group(
    writer: StoreWriter, store: FaultyStore, clock: StepClock, told: Told
) -> None:
    """Trouble of the store is nobody's refusal: the whole group is tried again. Who waits no longer is left out."""
    store.fail("put", StoreUnavailable("connection lost"))
    writer.put(snapshot("r1", 3))
    writer.put(snapshot("r2", 3))
    done, given_up = writer.flush(), writer.flush()
    assert given_up.cancel()
    while not done.done():
        clock.advance(1.0)
    assert not told.errors
    assert len(store.rows()) == 2


def test_no_epoch_means_no_write_yet(writer: StoreWriter, store: FaultyStore, clock: StepClock) -> None:
    """A store that is away at the start is waited for like any other."""
    store.fail("new_epoch", StoreUnavailable("no connection"))
    writer.put(snapshot("r1", 3))
    done = writer.flush()
    while not done.done():
        clock.advance(1.0)
    assert len(store.load("r1").tokens) == 3


def test_a_commit_whose_answer_was_lost_is_harmless(
    writer: StoreWriter, store: FaultyStore, clock: StepClock, told: Told
) -> None:
    """If a group was durable after all, saving it again changes nothing and is no error."""
    writer.put(snapshot("r1", 3))
    writer.put(snapshot("r2", 3, state=RolloutState.COMPLETED))
    writer.mark("r2", Disposition.DELIVERED)
    writer.put(snapshot("r2"))
    saved(writer)
    store.fail("flush", StoreUnavailable("connection lost"))  # MemoryStore has written already
    writer.put(snapshot("r1", 2), rollback=True)
    writer.append(tail("r1", 2, 5))
    writer.append(tail("r2", 0, 5))
    done = writer.flush()
    while not done.done():
        clock.advance(1.0)
    assert not told.errors
    assert [len(store.load(name).tokens) for name in ("r1", "r2")] == [7, 5]


def test_lines_are_in_the_log_before_the_snapshot_is_durable(store: FaultyStore, tmp_path: Path) -> None:
    """What was emitted before a put is in the file when the store is asked to commit it."""
    log = tmp_path / "lifecycle.jsonl"
    journal = Journal(log)
    seen: list[int] = []
    store.before_flush = lambda: seen.append(log.read_bytes().count(b'"stream.anomaly"'))
    writer = StoreWriter(store, owner=OWNER, journal=journal)
    for number in range(3):
        journal.emit(anomaly(journal, number))
        writer.put(snapshot("r1", number + 1))
        saved(writer)
    assert seen == [1, 2, 3]
    writer.close(PATIENCE)
    journal.close()


def anomaly(journal: Journal, number: int) -> object:
    """Some line."""
    from lifecycle.log.records import StreamAnomaly

    return StreamAnomaly(
        ts=0.0,
        run_id=journal.identity.run_id,
        process_id=journal.identity.process_id,
        rollout_id="r1",
        attempt=number,
        rid=None,
        kind="test",
        detail="",
    )


def test_a_log_that_cannot_be_written_stops_saving_not_the_thread(
    store: FaultyStore, clock: StepClock
) -> None:
    """A full disk under the log is retried like a full disk under the store."""

    class FullDisk(Journal):
        full = True

        def flush(self) -> None:
            if self.full:
                raise OSError(28, "No space left on device")

        def emit(self, record: object) -> None:
            self.flush()

    journal = FullDisk(None)
    writer = StoreWriter(store, owner=OWNER, settings=SETTINGS, clock=clock, journal=journal)
    clock.settle()
    writer.put(snapshot("r1", 3))
    done = writer.flush()
    clock.advance(0.0)
    assert "No space left" in str(writer.stats()["last_error"])
    journal.full = False
    while not done.done():
        clock.advance(5.0)
    writer.close(PATIENCE)
    assert "flush" in store.calls


def test_a_fenced_rollout_is_told_once_and_written_no_more(
    writer: StoreWriter, store: FaultyStore, told: Told
) -> None:
    """The others of its group are saved; later writes for it are dropped without another word."""
    for name in ("r1", "r2"):
        writer.put(snapshot(name, 3))
    saved(writer)
    claim = store.claim(OTHER, TTL, ids=["r1"], force=True)
    for name in ("r1", "r2"):
        writer.append(tail(name, 3))
    saved(writer)
    writer.mark("r1", Disposition.DELIVERED)
    saved(writer)
    assert told.fenced == ["r1"]
    assert (len(store.load("r1").tokens), len(store.load("r2").tokens)) == (3, 4)
    assert store.load("r1").disposition is Disposition.NONE
    assert (writer.stats()["fenced"], claim.claimed[0].snapshot.id) == (1, "r1")


def test_a_claim_brings_a_fenced_rollout_back(writer: StoreWriter, store: FaultyStore, told: Told) -> None:
    """After it is claimed again its writes carry the new epoch, though the caller names none."""
    writer.put(snapshot("r1", 3))
    saved(writer)
    store.claim(OTHER, TTL, force=True)
    writer.append(tail("r1", 3))
    saved(writer)
    store.release(OTHER)
    assert ids(writer.claim().result(PATIENCE)) == ["r1"]
    writer.append(tail("r1", 3))
    saved(writer)
    assert len(store.load("r1").tokens) == 4
    assert told.fenced == ["r1"]


def test_an_explicit_epoch_counts(writer: StoreWriter, store: FaultyStore, told: Told) -> None:
    """A caller who holds on to the epoch of a claim is taken at its word."""
    store.put(snapshot("r1", 3), store.new_epoch(), owner=OTHER, ttl=TTL)
    claimed = writer.claim(force=True).result(PATIENCE).claimed[0]
    writer.append(tail("r1", 3), claimed.epoch)
    writer.append(tail("r1", 4), claimed.epoch - 1)
    saved(writer)
    assert len(store.load("r1").tokens) == 4
    assert told.fenced == ["r1"]


def test_what_is_alive_here_is_not_claimed_from_oneself(clock: StepClock) -> None:
    """A lease of our own that ran out is renewed before a claim."""
    time = ManualClock()
    store = MemoryStore(clock=time)
    writer = StoreWriter(store, owner=OWNER, settings=SETTINGS, clock=clock)
    writer.put(snapshot("mine", 3))
    saved(writer)
    time.advance(TTL * 10)
    assert ids(writer.claim().result(PATIENCE)) == []
    writer.close(PATIENCE)


def test_a_refused_record_is_told_and_holds_up_nobody(
    writer: StoreWriter, store: FaultyStore, told: Told
) -> None:
    """A contradiction is reported with its id; the rest of the group is saved."""
    writer.put(snapshot("r1", 3))
    saved(writer)
    writer.put(snapshot("r1", 5, first=1))
    writer.put(snapshot("r2", 5))
    saved(writer)
    assert [rollout_id for rollout_id, _ in told.errors] == ["r1"]
    assert isinstance(told.errors[0][1], SnapshotError)
    assert len(store.load("r2").tokens) == 5
    assert writer.stats()["refused"] == 1


def test_a_callback_that_raises_stops_nothing(store: FaultyStore) -> None:
    """The loop that wanted to know may be closed already."""

    def closed(*_: object) -> None:
        raise RuntimeError("Event loop is closed")

    writer = StoreWriter(store, owner=OWNER, on_fenced=closed, on_error=closed)
    writer.append(tail("nobody", 3))
    writer.put(snapshot("r1", 3))
    saved(writer)
    assert "Event loop is closed" in str(writer.stats()["last_error"])
    assert len(store.load("r1").tokens) == 3
    writer.close(PATIENCE)


def test_leases_are_renewed_after_a_third(writer: StoreWriter, store: FaultyStore, clock: StepClock) -> None:
    """The first write starts it; a failure is noted and tried again, and stops nothing."""
    clock.advance(TTL)
    assert "renew" not in store.calls
    writer.put(snapshot("r1", 3))
    saved(writer)
    clock.advance(TTL / 3 - 0.1)
    assert "renew" not in store.calls
    clock.advance(0.2)
    assert store.calls.count("renew") == 1
    store.fail("renew", StoreUnavailable("away"))
    clock.advance(TTL / 3)
    assert writer.stats()["last_error"] == "away"
    clock.advance(SETTINGS.retry_max)
    assert store.calls.count("renew") == 3


def test_other_work_runs_in_the_thread(writer: StoreWriter) -> None:
    """Results and exceptions of a job come back through its future; a cancelled one does not run."""
    ran = Event()
    assert writer.call(lambda: 42).result(PATIENCE) == 42
    with pytest.raises(ZeroDivisionError):
        writer.call(lambda: 1 // 0).result(PATIENCE)
    hold = Event()
    writer.call(lambda: hold.wait(PATIENCE))
    cancelled = writer.call(ran.set)
    assert cancelled.cancel()
    hold.set()
    writer.call(lambda: None).result(PATIENCE)
    assert not ran.is_set()


def test_a_fresh_rollout_under_a_delivered_id_waits_its_turn(
    writer: StoreWriter, store: FaultyStore, told: Told
) -> None:
    """The end of the first is written before the beginning of the second, even within one group."""
    writer.put(snapshot("r1", 3, state=RolloutState.COMPLETED))
    writer.mark("r1", Disposition.DELIVERED)
    writer.put(snapshot("r1"))
    writer.append(tail("r1", 0, 2))
    saved(writer)
    assert not told.errors
    assert len(store.load("r1").tokens) == 2


def test_a_rollback_stays_one_when_more_follows(writer: StoreWriter, store: FaultyStore, told: Told) -> None:
    """A put that takes the place of a waiting rollback inherits its permission."""
    writer.put(snapshot("r1", 9))
    saved(writer)
    writer.put(snapshot("r1", 0, attempt=1), rollback=True)
    writer.put(snapshot("r1", 4, first=50, attempt=2))
    saved(writer)
    assert not told.errors
    assert same(store.load("r1"), snapshot("r1", 4, first=50, attempt=2))


def test_a_waiting_disposition_gives_way_to_a_newer_snapshot(writer: StoreWriter, store: FaultyStore) -> None:
    """`carried` ends when the rollout goes on; `delivered` stays."""
    writer.put(snapshot("r1", 3))
    writer.mark("r1", Disposition.CARRIED)
    writer.put(snapshot("r1", 4))
    writer.put(snapshot("r2", 3, state=RolloutState.COMPLETED))
    writer.mark("r2", Disposition.DELIVERED)
    writer.put(snapshot("r2", 3, state=RolloutState.COMPLETED))
    saved(writer)
    assert [row.disposition for row in store.rows()] == ["none", "delivered"]


def test_closing_saves_and_frees(store: FaultyStore) -> None:
    """`close` writes what waits, gives up the leases, and may be called twice; then nothing more is taken."""
    writer = StoreWriter(store, owner=OWNER, settings=WriterSettings(linger=60.0))
    writer.put(snapshot("r1", 3))
    writer.close(PATIENCE)
    writer.close(PATIENCE)
    assert len(store.load("r1").tokens) == 3
    assert ids(store.claim(OTHER, TTL)) == ["r1"]
    for use in (writer.admit, lambda: writer.put(snapshot("r2", 3))):
        with pytest.raises(StoreUnavailable, match="closed"):
            use()
    for late in (writer.flush(), writer.call(lambda: 1)):
        with pytest.raises(StoreUnavailable, match="closed"):
            late.result(PATIENCE)


def test_closing_unused_touches_nothing(store: FaultyStore) -> None:
    """A writer that never wrote has nothing to give up."""
    StoreWriter(store, owner=OWNER).close(PATIENCE)
    assert store.calls == []


def test_a_release_that_fails_is_no_error(store: FaultyStore) -> None:
    """Leases run out by themselves."""
    writer = StoreWriter(store, owner=OWNER)
    writer.put(snapshot("r1", 3))
    store.fail("release", StoreUnavailable("away"))
    writer.close(PATIENCE)
    assert writer.stats()["last_error"] == "away"


def test_closing_over_a_dead_store_says_what_was_lost(store: FaultyStore, clock: StepClock) -> None:
    """After the time-out everybody who waits is told, with the store's own words."""
    store.fail("flush", *[StoreUnavailable("disk full")] * 100)
    writer = StoreWriter(store, owner=OWNER, settings=SETTINGS, clock=clock)
    clock.settle()
    writer.put(snapshot("r1", 3))
    waiting, given_up = writer.flush(), writer.flush()
    assert given_up.cancel()
    clock.advance(0.0)
    with pytest.raises(StoreUnavailable, match=r"1 rollouts could not be saved.*disk full"):
        writer.close(0.01)
    with pytest.raises(StoreUnavailable):
        waiting.result(PATIENCE)
    writer._thread.join(PATIENCE)
    assert not writer._thread.is_alive()


def test_closing_while_the_store_stands_still(store: FaultyStore) -> None:
    """The process can go on though the thread is still in the store."""
    store.gate.clear()
    writer = StoreWriter(store, owner=OWNER)
    writer.put(snapshot("r1", 3))
    writer.flush()
    assert store.stalled.wait(PATIENCE)
    with pytest.raises(StoreUnavailable, match="does not answer"):
        writer.close(0.01)
    store.gate.set()
    writer._thread.join(PATIENCE)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_dead_thread_leaves_nobody_waiting(store: FaultyStore) -> None:
    """Whatever kills the thread, flushes fail and new work is refused."""

    class Killed(BaseException):
        pass

    store.fail("flush", Killed())
    writer = StoreWriter(store, owner=OWNER)
    writer.put(snapshot("r1", 3))
    with pytest.raises(StoreUnavailable, match="died: Killed"):
        writer.flush().result(PATIENCE)
    with pytest.raises(StoreUnavailable, match="died"):
        writer.admit()
    writer._thread.join(PATIENCE)
