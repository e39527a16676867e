"""Stores whose writers are killed, stopped or raced, and a server that is killed under its writers."""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from uuid import uuid4

import pytest

from lifecycle.states import Disposition, RolloutState
from lifecycle.stores import SqliteStore, open_store
from lifecycle.stores.sql import SqlStore
from lifecycle.testing.stores import OTHER, OWNER, ids, same, snapshot
from tests.heavy.postgres_server import PostgresServer
from tests.heavy.store_child import ROLLOUTS, state_after

ROOT = Path(__file__).parents[2]
PATIENCE = 30.0


class Child:
    """A process of `store_child`; lines are read with a deadline."""

    def __init__(self, mode: str, store: str | Path, *words: object) -> None:
        command = [sys.executable, "-m", "tests.heavy.store_child", mode, str(store), *map(str, words)]
        self.process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._rest = b""
        assert self.line() == ["ready"]

    def line(self) -> list[str] | None:
        """The next line as words; None at the end of the output."""
        assert self.process.stdout is not None
        deadline = time.monotonic() + PATIENCE
        while b"\n" not in self._rest:
            left = deadline - time.monotonic()
            assert left > 0, "the process says nothing"
            if not select.select([self.process.stdout], [], [], left)[0]:
                continue
            data = os.read(self.process.stdout.fileno(), 65536)
            if not data:
                return None
            self._rest += data
        line, self._rest = self._rest.split(b"\n", 1)
        return line.decode().split()

    def say(self, word: str = "go") -> None:
        """Give the word."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n".encode())
        self.process.stdin.flush()

    def last_durable(self) -> int:
        """The last step that was acknowledged before the process ended."""
        step = 0
        while (line := self.line()) is not None:
            step = int(line[1])
        return step

    def close(self) -> None:
        """Make sure that it is gone."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(PATIENCE)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


@pytest.fixture(params=["sqlite", "postgres"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A store that processes can share."""
    if request.param == "sqlite":
        return str(tmp_path / "snapshots.db")
    running: PostgresServer = request.getfixturevalue("server")
    return running.dsn_for(f"t{uuid4().hex}")


def assert_whole(store: SqlStore, acknowledged: int) -> None:
    """The store is as after the last acknowledged group, or as after the one that was being written."""
    found = {row.id: store.load(row.id) for row in store.rows()}
    for step in (acknowledged, acknowledged + 1):
        expected = state_after(step)
        if found.keys() == expected.keys() and all(same(found[name], expected[name]) for name in expected):
            return
    sizes = {name: len(value.tokens) for name, value in found.items()}
    raise AssertionError(f"half a group after step {acknowledged}: {sizes}")


def test_kill_9_at_20_random_moments(tmp_path: Path) -> None:
    """Whenever a writing process is killed, the store holds whole groups, and all that were acknowledged."""
    source = random.Random(11)
    reached = []
    for number in range(20):
        path = tmp_path / f"kill-{number}.db"
        child = Child("write", path, 0)
        time.sleep(source.uniform(0.0, 0.15))  # the random moment
        child.process.kill()
        acknowledged = child.last_durable()
        child.close()
        with SqliteStore(path) as store:
            assert_whole(store, acknowledged)
            assert not store.problems()
        reached.append(acknowledged)
    assert max(reached) > 3


def test_killed_by_the_kernel_in_the_middle_of_a_write(tmp_path: Path) -> None:
    """The process dies inside the write that passes a file size, with only a part of it on the disk."""
    source = random.Random(12)
    reached = []
    for number in range(20):
        path = tmp_path / f"write-{number}.db"
        child = Child("write", path, source.randrange(150_000, 1_500_000))
        acknowledged = child.last_durable()
        child.close()
        assert child.process.returncode == -signal.SIGXFSZ
        with SqliteStore(path) as store:
            assert_whole(store, acknowledged)
            assert not store.problems()
        reached.append(acknowledged)
    assert len(set(reached)) > 3


def test_a_server_killed_under_its_writer(server: PostgresServer) -> None:
    """PostgreSQL is stopped at once, several times, while a writer is busy: nothing is lost, doubled or halved."""
    dsn = server.dsn_for(f"t{uuid4().hex}")
    child = Child("keep", dsn, 4.0)
    source = random.Random(13)
    for _ in range(3):
        time.sleep(source.uniform(0.1, 0.5))  # the random moment
        server.crash()
        server.start()
        with open_store(dsn) as store:
            whole_sizes = {len(value.tokens) for value in (store.load(row.id) for row in store.rows())}
            assert len(whole_sizes) <= 1, whole_sizes
    line = child.line()
    child.close()
    assert line is not None
    word, step, failures, refused, fenced = line
    assert (word, refused, fenced) == ("kept", "0", "0")
    assert int(failures) > 0
    with open_store(dsn) as store:
        assert_whole(store, int(step))


def test_processes_that_claim_at_once_share_nothing(where: str) -> None:
    """Each of 300 rollouts goes to exactly one of three processes."""
    expected = [f"r{number:03}" for number in range(300)]
    with open_store(where) as store:
        epoch = store.new_epoch()
        for name in expected:
            store.put(snapshot(name, 50), epoch, owner=OWNER, ttl=30.0)
        store.flush()
        store.release(OWNER)
        children = [Child("claim", where, f"taker-{number}") for number in range(3)]
        for child in children:
            child.say()
        lines = [child.line() for child in children]
        for child in children:
            child.close()
        taken = [name for line in lines if line is not None for name in line[1:]]
        assert sorted(taken) == expected
        assert {row.owner for row in store.rows()} <= {"taker-0", "taker-1", "taker-2"}


def test_an_owner_stopped_past_its_lease_is_fenced(where: str) -> None:
    """SIGSTOP, the lease runs out, another takes over, SIGCONT: the first one is refused everything."""
    ttl = 1.5
    child = Child("own", where, ttl)
    with open_store(where) as store:
        assert ids(store.claim(OTHER, 30.0)) == []
        child.process.send_signal(signal.SIGSTOP)
        deadline, taken = time.monotonic() + PATIENCE, {}
        while not taken and time.monotonic() < deadline:
            taken = {claimed.snapshot.id: claimed for claimed in store.claim(OTHER, 30.0).claimed}
            time.sleep(0.05)
        assert sorted(taken) == [f"r{number}" for number in range(ROLLOUTS)]
        child.process.send_signal(signal.SIGCONT)
        child.say()
        assert child.line() == ["fenced", *sorted(taken)]
        child.close()
        assert {row.disposition for row in store.rows()} == {"none"}
        for name, claimed in taken.items():
            value = snapshot(name, 10, state=RolloutState.COMPLETED)
            store.put(value, claimed.epoch, owner=OTHER, ttl=30.0)
            store.mark(name, Disposition.DELIVERED, claimed.epoch)
        store.flush()
        assert {row.disposition for row in store.rows()} == {"delivered"}


def test_an_owner_stopped_within_its_lease_goes_on(where: str) -> None:
    """A short stop costs nothing: nobody could claim, and its writes are accepted."""
    child = Child("own", where, 60.0)
    with open_store(where) as store:
        child.process.send_signal(signal.SIGSTOP)
        assert ids(store.claim(OTHER, 30.0)) == []
        child.process.send_signal(signal.SIGCONT)
        child.say()
        assert child.line() == ["fenced"]
        child.close()
        assert {len(store.load(row.id).tokens) for row in store.rows()} == {15}
