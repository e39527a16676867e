"""The writer without a thread."""

from __future__ import annotations

from pathlib import Path

import pytest

from lifecycle.errors import StoreUnavailable
from lifecycle.log import Journal, read_log
from lifecycle.log.records import SnapshotSaved
from lifecycle.states import Disposition, RolloutState
from lifecycle.stores.inline import InlineWriter
from lifecycle.testing.stores import OTHER, OWNER, TTL, ManualClock, ids, snapshot, tail
from tests.support.writers import FaultyStore


class Inline:
    """A writer over a store, with what it told."""

    def __init__(self, journal: Journal | None = None) -> None:
        self.store = FaultyStore(ManualClock())
        self.fenced: list[str] = []
        self.errors: list[str] = []
        self.writer = InlineWriter(
            self.store,
            owner=OWNER,
            ttl=TTL,
            journal=journal or Journal(None),
            on_fenced=self.fenced.append,
            on_error=lambda rollout_id, error: self.errors.append(rollout_id),
        )


def test_writes_are_done_when_the_call_returns(tmp_path: Path) -> None:
    """Nothing waits, and one line tells what was saved since the last flush."""
    journal = Journal(tmp_path / "log.jsonl")
    inline = Inline(journal)
    inline.writer.admit()
    inline.writer.put(snapshot("r1", 3, state=RolloutState.PARTIAL))
    inline.writer.append(tail("r1", 3, 2))
    inline.writer.mark("r1", Disposition.CARRIED)
    assert len(inline.store.load("r1").tokens) == 5
    for _ in range(2):
        inline.writer.flush().result(0)
    assert inline.writer.stats()["saved"] == 3
    journal.close()
    (line,) = read_log(tmp_path / "log.jsonl")
    assert isinstance(line.record, SnapshotSaved)
    assert (line.record.snapshots, line.record.tails, line.record.marks) == (1, 1, 1)


def test_an_ended_id_begins_anew() -> None:
    """A fresh rollout may take the id of a delivered one."""
    inline = Inline()
    inline.writer.put(snapshot("r1", 3, state=RolloutState.COMPLETED))
    inline.writer.mark("r1", Disposition.DELIVERED)
    inline.writer.put(snapshot("r1"))
    assert inline.store.rows()[0].state == "pending"
    assert not inline.errors


def test_fences_and_refusals_are_told() -> None:
    """As by the writer with a thread: a fence once, a refusal by id."""
    inline = Inline()
    inline.writer.put(snapshot("r1", 3))
    inline.store.claim(OTHER, TTL, force=True)
    inline.writer.append(tail("r1", 3))
    inline.writer.append(tail("r1", 3))
    inline.writer.append(tail("nobody", 3))
    inline.store.fail("flush", StoreUnavailable("away"))
    inline.writer.put(snapshot("r2", 3))
    assert (inline.fenced, inline.errors) == (["r1"], ["nobody", "r2"])


def test_a_claim_gives_the_epoch_for_later_writes() -> None:
    """After a claim the caller need not name the epoch; closing frees what was claimed."""
    inline = Inline()
    inline.store.put(snapshot("r1", 3), inline.store.new_epoch(), owner=OTHER, ttl=TTL)
    assert ids(inline.writer.claim(force=True).result(0)) == ["r1"]
    inline.writer.append(tail("r1", 3))
    inline.writer.close()
    assert len(inline.store.load("r1").tokens) == 4
    assert ids(inline.store.claim(OTHER, TTL)) == ["r1"]


def test_exceptions_of_a_job_are_in_its_future() -> None:
    """A job that raises does not raise at its caller."""
    with pytest.raises(ZeroDivisionError):
        Inline().writer.call(lambda: 1 // 0).result(0)
