"""What goes into the log: exact keys, structlog with a chain of its own, nobody else's configuration touched."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import structlog

from lifecycle.engine import LifecycleEngine
from lifecycle.log import RECORD_TYPES, SCHEMA_VERSION, Journal, LineWriter, read_log
from lifecycle.log.journal import LONGEST_DETAIL, line_logger, new_process_id, shorten
from lifecycle.log.records import BackendRecovered, Record, columns, event_name
from lifecycle.testing.backend import Hang, ScriptedBackend, finish, tokens
from lifecycle.testing.clock import run_virtual
from tests.support.driving import group, request, until

TRANSITION_KEYS = (
    "v ts seq run_id process_id rollout_id group_id group_size attempt rid trigger source dest tokens new_tokens "
    "dropped_tokens weight_version current_version reason detail outcome finish_reason dwell_s worker step event"
)


def recovered(journal: Journal) -> BackendRecovered:
    """Any record."""
    identity = journal.identity
    return BackendRecovered(ts=1.5, run_id=identity.run_id, process_id=identity.process_id, outage_s=2.0)


def test_a_line_is_one_json_object_with_every_key(tmp_path: Path) -> None:
    """Also those that are null."""
    path = tmp_path / "log.jsonl"
    journal = Journal(path, run_id="run", process_id="p")
    journal.emit(recovered(journal))
    journal.flush()
    assert json.loads(path.read_text()) == {
        "event": "backend.recovered",
        "v": SCHEMA_VERSION,
        "ts": 1.5,
        "run_id": "run",
        "process_id": "p",
        "step": None,
        "outage_s": 2.0,
    }
    assert journal.enabled
    assert journal.emitted == 1
    journal.close()


def test_a_callers_logger_gets_the_event_and_its_fields() -> None:
    """Whatever its chain makes of them."""
    seen: list[dict[str, Any]] = []

    def keep(_logger: object, _method: str, event: Any) -> Any:
        seen.append(dict(event))
        raise structlog.DropEvent

    logger = structlog.wrap_logger(None, processors=[keep], wrapper_class=structlog.BoundLogger)
    journal = Journal(logger.bind(host="h"), run_id="run", process_id="p")
    journal.emit(recovered(journal))
    journal.flush()
    journal.close()
    journal.emit(recovered(journal))
    assert seen == [
        {
            "event": "backend.recovered",
            "host": "h",
            "v": SCHEMA_VERSION,
            "ts": 1.5,
            "run_id": "run",
            "process_id": "p",
            "step": None,
            "outage_s": 2.0,
        }
    ]


def test_no_log_is_fine() -> None:
    """Counted, and nowhere."""
    journal = Journal(None)
    assert not journal.enabled
    journal.emit(recovered(journal))
    journal.flush()
    journal.close()
    assert journal.emitted == 1


def test_nothing_of_structlog_is_configured(tmp_path: Path) -> None:
    """The application's own structlog stays as it was."""
    before = structlog.get_config()
    assert not structlog.is_configured()
    writer = LineWriter(tmp_path / "log")
    line_logger(writer)
    journal = Journal(tmp_path / "other")
    journal.emit(recovered(journal))
    journal.close()
    writer.close()
    assert structlog.get_config() == before
    assert not structlog.is_configured()


def test_an_applications_structlog_configuration_does_not_reach_our_lines(tmp_path: Path) -> None:
    """Its processors are for its own loggers."""
    path = tmp_path / "log.jsonl"
    try:
        structlog.configure(processors=[lambda *_: pytest.fail("not ours to run")])
        journal = Journal(path)
        journal.emit(recovered(journal))
        journal.close()
    finally:
        structlog.reset_defaults()
    assert json.loads(path.read_text())["event"] == "backend.recovered"


def test_the_servers_words_are_cut_short() -> None:
    """To what a line can carry."""
    assert shorten(None) is None
    assert shorten("x" * LONGEST_DETAIL) == "x" * LONGEST_DETAIL
    cut = shorten("x" * 5000)
    assert cut is not None
    assert len(cut) == LONGEST_DETAIL
    assert cut.endswith("…")


def test_process_ids_are_unique_and_names_dotted() -> None:
    """Host, process number, random part; one event name per record type."""
    assert new_process_id() != new_process_id()
    names = [event_name(record) for record in RECORD_TYPES]
    assert len(set(names)) == len(names)
    assert all("." in name for name in names)


def test_the_transition_has_the_keys_of_the_design() -> None:
    """No more and no less."""
    fields = {f.encode_name for f in msgspec.structs.fields(by_name("rollout.transition"))}
    assert fields | {"event"} == set(TRANSITION_KEYS.split())


def test_columns_name_every_key_once() -> None:
    """With the kind of its values, for readers of tables."""
    found = columns()
    for record in RECORD_TYPES:
        for field in msgspec.structs.fields(record):
            assert field.name in found
    assert (found["event"], found["ts"], found["tokens"], found["spans"]) == ("str", "float", "int", "list")
    assert found["rid"] == "str"


def by_name(name: str) -> type[Record]:
    """The record type of an event."""
    return next(record for record in RECORD_TYPES if event_name(record) == name)


# -- a whole engine's log --------------------------------------------------------------------------------------------


def script(call):
    """One group finishes, one hangs."""
    if call.rollout_id.startswith("slow"):
        return [tokens(1), Hang()]
    return [tokens(1, 2), finish()]


def test_every_line_of_an_engine_has_exactly_its_keys_and_the_order_is_that_of_events(tmp_path: Path) -> None:
    """Over submit, collect, abort and close, as a file that reads back without damage."""
    path = tmp_path / "log.jsonl"

    async def run() -> None:
        async with LifecycleEngine(ScriptedBackend(script), log=path, version="1") as engine:
            await engine.collect([group("quick"), group("slow")], target=1)
            await engine.generate(request("one"))

    run_virtual(run)
    for line in path.read_text().splitlines():
        data = json.loads(line)
        record = by_name(data["event"])
        assert set(data) == {f.encode_name for f in msgspec.structs.fields(record)} | {"event"}
    records = [line.record for line in read_log(path)]  # type: ignore[union-attr]
    names = [event_name(record) for record in records]
    assert names[0] == "engine.started"
    assert names[-1] == "engine.stopped"
    last: dict[str, int] = {}
    for record in records:
        if hasattr(record, "seq"):
            assert record.seq == last.get(record.rollout_id, 0) + 1
            last[record.rollout_id] = record.seq
    assert len(last) == 5


def test_lines_are_in_the_file_when_a_rollout_rests(tmp_path: Path) -> None:
    """Before anybody who waits for it hears."""
    path = tmp_path / "log.jsonl"

    async def run() -> None:
        async with LifecycleEngine(ScriptedBackend(script), log=path) as engine:
            handle = engine.submit(request("one"))
            await until(lambda: handle.at_rest)
            assert '"rollout.rest"' in path.read_text()

    run_virtual(run)


def test_a_log_goes_on_where_another_process_stopped(tmp_path: Path) -> None:
    """Appended, with a process id of its own; seq begins anew."""
    path = tmp_path / "log.jsonl"

    async def run() -> None:
        async with LifecycleEngine(ScriptedBackend(script), log=path, run_id="run") as engine:
            await engine.generate(request("one"))

    run_virtual(run)
    first = path.read_bytes()
    path.write_bytes(first + b'{"torn')
    run_virtual(run)
    assert path.read_bytes().startswith(first)
    records = [line.record for line in read_log(path)]  # type: ignore[union-attr]
    assert len({record.process_id for record in records}) == 2
    assert {record.run_id for record in records} == {"run"}


def test_what_a_request_carries_never_reaches_a_line(tmp_path: Path) -> None:
    """Neither prompt nor metadata, extra, routing key, or the words of an adapter's exception."""
    path, secret = tmp_path / "log.jsonl", "sk-very-secret"

    def leaky(call):
        if call.rollout_id == "bad":
            raise RuntimeError(secret)
        return [tokens(1), finish()]

    async def run() -> None:
        async with LifecycleEngine(ScriptedBackend(leaky), log=path) as engine:
            about = {"metadata": {"key": secret}, "extra": {"token": secret}, "routing_key": secret}
            await engine.generate(request("one", text=f"say {secret}", **about))
            await engine.generate(request("bad", **about))

    run_virtual(run)
    assert '"rollout.rest"' in path.read_text()
    assert secret not in path.read_text()
