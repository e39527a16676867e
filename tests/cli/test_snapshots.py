"""`lifecycle snapshots`: what an operator sees of a store."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import pytest

from lifecycle.cli import main
from lifecycle.errors import StoreUnavailable
from lifecycle.states import Disposition, RolloutState
from lifecycle.stores import SqliteStore
from lifecycle.testing.stores import OWNER, TTL, rich_snapshot, snapshot, tail
from tests.support.stores import fast_folder


@pytest.fixture
def store() -> Iterator[Path]:
    """A store with one rollout of each kind, in a run directory."""
    with fast_folder() as folder:
        path = Path(folder) / "snapshots.db"
        with SqliteStore(path) as opened:
            epoch = opened.new_epoch()
            opened.put(snapshot("in-flight", 30, state=RolloutState.PARTIAL), epoch, owner=OWNER, ttl=TTL)
            opened.append(tail("in-flight", 30, 5), epoch)
            opened.put(rich_snapshot(), epoch, owner=OWNER, ttl=TTL)
            opened.put(snapshot("done", 4, state=RolloutState.COMPLETED), epoch, owner=OWNER, ttl=TTL)
            opened.mark("done", Disposition.DELIVERED, epoch)
            opened.put(snapshot("[red]", 0), epoch, owner=OWNER, ttl=TTL)
        yield path


class Ran:
    """What a command left behind."""

    def __init__(self, status: int, out: str, err: str) -> None:
        self.status, self.out, self.err = status, out, err

    @property
    def json(self) -> Any:
        """Its output, parsed."""
        return json.loads(self.out)


@pytest.fixture
def run(capfdbinary: pytest.CaptureFixture[bytes]) -> Any:
    """Run `lifecycle snapshots …` in this process."""

    def call(*words: str | Path) -> Ran:
        with pytest.raises(SystemExit) as exit_:
            main(["snapshots", *map(str, words)])
        out, err = capfdbinary.readouterr()
        return Ran(exit_.value.code, out.decode(), err.decode())

    return call


def damage(store: Path, sql: str) -> None:
    """Change the file behind the store's back."""
    connection = sqlite3.connect(store)
    with connection:
        connection.execute(sql)
    connection.close()


def test_ls_shows_what_is_stored(run: Any, store: Path) -> None:
    """One line per rollout, ids whole and literal, leases and ages for people."""
    ran = run("ls", store)
    assert (ran.status, ran.err) == (0, "")
    for word in ("in-flight", "partial", "35", "delivered", "[red]", OWNER, "s ago", "4 rollouts"):
        assert word in ran.out


def test_ls_reads_run_directories_and_filters(run: Any, store: Path) -> None:
    """A directory of `lifecycle run` is as good as its file; rows can be chosen by state and by being waited for."""
    assert [row["id"] for row in run("ls", store.parent, "--json").json] == [
        "[red]",
        "done",
        "in-flight",
        "rich",
    ]
    assert [row["id"] for row in run("ls", store, "--json", "--pending").json] == [
        "[red]",
        "in-flight",
        "rich",
    ]
    (row,) = run("ls", store, "--json", "--state", "partial").json
    assert (row["id"], row["tokens"], row["attempt"], row["owner"], row["epoch"]) == (
        "in-flight",
        35,
        1,
        OWNER,
        1,
    )


def test_ls_tells_leases_apart(run: Any, store: Path) -> None:
    """Running, run out, given up, and old."""
    assert "29 s" in run("ls", store).out or "30 s" in run("ls", store).out
    damage(store, "UPDATE lifecycle_owners SET lease_until = 5")
    damage(store, "UPDATE lifecycle_rollouts SET updated_at = updated_at - 90000")
    old = run("ls", store).out
    assert "expired" in old
    assert "1 d ago" in old
    damage(store, "DELETE FROM lifecycle_owners")
    assert "free" in run("ls", store).out


def test_show_tells_everything(run: Any, store: Path) -> None:
    """The whole snapshot, for people with long lists cut, as JSON complete."""
    ran = run("show", store, "rich")
    for word in (
        "completed",
        "temperature",
        "node-7",
        "7 [0, 2) span, 8 [2, 3) label",
        "déjà vu ☃",
        "http://w",
    ):
        assert word in ran.out
    assert "35: 0, 1, 2" in run("show", store, "in-flight").out
    assert "…" in run("show", store, "in-flight").out
    whole = run("show", store, "rich", "--json").json
    assert whole["tokens"] == [7, 8, 2**31 - 1]
    assert whole["logprobs"] == [-0.5, None, None]
    assert whole["metadata"] == {"answer": 42, "nested": {"π": [1, None, True]}, "raw": "AP8="}
    assert whole["channels"]["routed_experts"] == {"complete": False, "pieces": [[0, "AQI="], [2, ""]]}


def test_export_writes_json_lines(run: Any, store: Path, tmp_path: Path) -> None:
    """To standard output or a file; all, some, or what is waited for; only the data goes to standard output."""
    ran = run("export", store)
    assert ran.status == 0
    lines = [json.loads(line) for line in ran.out.splitlines()]
    assert [line["id"] for line in lines] == ["[red]", "done", "in-flight", "rich"]
    assert len(lines[2]["tokens"]) == 35
    assert "4 rollouts written" in ran.err
    out = tmp_path / "some.jsonl"
    assert run("export", store, "rich", "done", "--out", out).status == 0
    assert [json.loads(line)["id"] for line in out.read_text().splitlines()] == ["rich", "done"]
    assert len(run("export", store, "--pending").out.splitlines()) == 3


def test_export_writes_parquet(run: Any, store: Path, tmp_path: Path) -> None:
    """Columns have types; tokens are lists of integers, user data is JSON."""
    out = tmp_path / "it's all.parquet"
    ran = run("export", store, "--format", "parquet", "--out", out)
    assert (ran.status, ran.err) == (0, f"4 rollouts written to {out}\n")
    query = "SELECT id, len(tokens), sampling_params->>'temperature', weight_versions[1].version FROM read_parquet(?)"
    rows = duckdb.execute(f"{query} ORDER BY id", [str(out)]).fetchall()
    assert rows[1:] == [("done", 4, None, None), ("in-flight", 35, None, None), ("rich", 3, "0.7", "7")]


def test_export_of_parquet_needs_a_file(run: Any, store: Path) -> None:
    """Parquet on standard output is refused, and so is a place that cannot be written."""
    assert run("export", store, "--format", "parquet").status == 2
    for form in ("parquet", "jsonl"):
        ran = run("export", store, "--format", form, "--out", "/nowhere/at/all")
        assert (ran.status, "cannot write /nowhere/at/all" in ran.err) == (2, True)


def test_export_names_the_missing_extra(run: Any, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without duckdb the message is the install command."""
    monkeypatch.setitem(__import__("sys").modules, "duckdb", None)
    ran = run("export", store, "--format", "parquet", "--out", store.parent / "x.parquet")
    assert (ran.status, "pip install 'rollout-lifecycle[analysis]'" in ran.err) == (2, True)


def test_export_leaves_out_what_is_damaged(run: Any, store: Path) -> None:
    """The others are written, the damaged one is named, and the status says so."""
    damage(store, "UPDATE lifecycle_pieces SET payload = zeroblob(99) WHERE id = 'done'")
    ran = run("export", store)
    assert ran.status == 1
    assert len(ran.out.splitlines()) == 3
    assert "left out: snapshot of rollout 'done' is corrupt" in ran.err


def test_verify_finds_nothing_in_a_good_store(run: Any, store: Path) -> None:
    """All good is status 0."""
    ran = run("verify", store)
    assert (ran.status, ran.out) == (0, "4 rollouts: 4 good, 0 unreadable; 0 other problems\n")


def test_verify_names_what_is_damaged(run: Any, store: Path) -> None:
    """Damaged rollouts by id, and payloads that no row knows; status 1."""
    damage(store, "UPDATE lifecycle_pieces SET payload = zeroblob(99) WHERE id = 'done'")
    damage(store, "INSERT INTO lifecycle_pieces VALUES ('ghost', 0, x'00')")
    ran = run("verify", store)
    assert ran.status == 1
    assert "rollout 'done' is corrupt" in ran.out
    assert "payloads of rollout 'ghost' are left without a row" in ran.out
    found = run("verify", store, "--json")
    assert (found.status, found.json["rollouts"], found.json["good"]) == (1, 4, 3)
    assert [one["id"] for one in found.json["corrupt"]] == ["done"]
    assert len(found.json["store"]) == 1


def test_verify_survives_damaged_pages(run: Any, store: Path) -> None:
    """A file that SQLite itself cannot read any more is reported, not a traceback."""
    data = bytearray(store.read_bytes())
    for page in range(2, len(data) // 16384):
        data[page * 16384 : page * 16384 + 16384] = b"\xff" * 16384
    store.write_bytes(data)
    ran = run("verify", store)
    assert ran.status == 1
    assert "other problems" in ran.out
    assert "Traceback" not in ran.err


def test_a_store_that_goes_away_while_it_is_read(
    run: Any, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What another process discards meanwhile is passed over; a store that fails is told."""

    def gone(self: SqliteStore, rollout_id: str) -> None:
        raise {"done": KeyError(rollout_id)}.get(rollout_id, StoreUnavailable("the server went away"))

    monkeypatch.setattr(SqliteStore, "load", gone)
    ran = run("export", store, "done")
    assert (ran.status, ran.out, ran.err) == (0, "", "0 rollouts written\n")
    assert "the server went away" in run("export", store, "rich").err
    assert "the server went away" in run("verify", store).out


def test_discard_deletes_for_good(run: Any, store: Path) -> None:
    """By id, or everything that nobody waits for."""
    assert run("discard", store, "--ended", "--yes").out == "1 rollouts deleted\n"
    assert run("discard", store, "rich", "--yes", "--force", "--json").json == {"discarded": ["rich"]}
    assert [row["id"] for row in run("ls", store, "--json").json] == ["[red]", "in-flight"]


def test_discard_asks(run: Any, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without --yes a person has to agree; no answer is no."""
    import io
    import sys

    monkeypatch.setattr(sys, "stdin", io.StringIO("n\n"))
    assert run("discard", store, "done", "--force").status == 130
    assert len(run("ls", store, "--json").json) == 4


def test_discard_respects_living_owners(run: Any, store: Path) -> None:
    """What a running process holds needs --force; nothing is deleted, also not the others."""
    damage(store, "UPDATE lifecycle_rollouts SET owner = NULL WHERE id = 'done'")
    ran = run("discard", store, "done", "rich", "--yes")
    assert (ran.status, f"held by {OWNER} for" in ran.err) == (2, True)
    assert len(run("ls", store, "--json").json) == 4


@pytest.mark.parametrize("words", [["show", "nobody"], ["discard", "nobody", "--yes"], ["export", "nobody"]])
def test_unknown_ids_are_named(run: Any, store: Path, words: list[str]) -> None:
    """A typing error changes nothing."""
    ran = run(words[0], store, *words[1:])
    assert (ran.status, "rollout 'nobody' is not in the store" in ran.err) == (2, True)


def test_discard_needs_to_know_what(run: Any, store: Path) -> None:
    """Neither ids nor --ended, or both, is bad usage."""
    assert run("discard", store).status == 2
    assert run("discard", store, "rich", "--ended").status == 2


@pytest.mark.parametrize("command", ["ls", "export", "verify"])
def test_bad_stores_are_told_apart(run: Any, store: Path, command: str) -> None:
    """No such file, not a store, a newer store: exit 2, one line, no traceback."""
    notes, newer = store.with_name("notes.txt"), store.with_name("newer.db")
    notes.write_text("nothing of the kind " * 100)
    newer.write_bytes(store.read_bytes())
    damage(newer, "PRAGMA user_version = 9")
    for where, problem in (
        (store.with_name("missing.db"), "no snapshot store at"),
        (notes, "is not a snapshot store"),
        (newer, "has schema 9, this version reads up to 1; upgrade"),
    ):
        ran = run(command, where)
        assert (ran.status, ran.out) == (2, "")
        assert problem in ran.err
        assert len(ran.err.splitlines()) == 1


@pytest.mark.parametrize(
    "dsn",
    [
        "postgresql://someone:hunter2@127.0.0.1:1/nothing?connect_timeout=2",
        "host=127.0.0.1 port=1 user=someone password=hunter2",
        "postgresql://someone:hunter2@127.0.0.1:one/x",
        "host=127.0.0.1 password=hunter2 nonsense",
    ],
)
def test_passwords_of_a_dsn_never_show(run: Any, dsn: str) -> None:
    """Whatever is wrong with a DSN, its password is not in the message."""
    ran = run("ls", dsn)
    assert ran.status == 2
    assert "hunter2" not in ran.out + ran.err
    assert len(ran.err.splitlines()) == 1
