"""A log of several processes, replayed by the rules of the design with nothing but the reader and the table."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from lifecycle.analysis import Violation, Warehouse, find_sources, find_violations
from lifecycle.log import LogLine, read_log
from lifecycle.log.records import (
    EngineStarted,
    EngineStopped,
    RolloutDisposition,
    RolloutRecord,
    RolloutRest,
    RolloutRestored,
    RolloutTransition,
)
from lifecycle.machine import ROLLOUT
from lifecycle.states import FINAL_STATES, REST_STATES, RolloutState, Trigger


@dataclass(slots=True)
class Stay:
    """One rollout in one process."""

    seq: int = 0
    state: str = "pending"
    tokens: int = 0
    attempt: int = 0
    lines: list[RolloutRecord] = field(default_factory=list)


class Replay:
    """Every line in order; the first that breaks a rule fails with its place.

    `restored` are the takeovers in order, `delivered` the process that said it of each rollout.
    """

    def __init__(self, *paths: Path) -> None:
        self.stays: dict[tuple[str, str], Stay] = {}
        self.processes: list[str] = []
        self.stopped: set[str] = set()
        self.delivered: dict[str, str] = {}
        self.restored: list[RolloutRestored] = []
        lines = [line for path in paths for line in read_log(path)]
        for line in lines:
            assert isinstance(line, LogLine), line
        told = sorted((line for line in lines if isinstance(line, LogLine)), key=lambda line: line.record.ts)
        for line in told if len(paths) > 1 else (line for line in lines if isinstance(line, LogLine)):
            self._take(line)
        for (process, rollout), stay in self.stays.items():
            if process in self.stopped:
                assert stay.state in REST_STATES, f"{rollout} in {process} was left {stay.state}"

    def _take(self, line: LogLine) -> None:
        record, where = line.record, f"{line.path}:{line.line}"
        if isinstance(record, EngineStarted):
            self.processes.append(record.process_id)
        assert record.process_id in self.processes, f"{where}: before engine.started"
        assert record.process_id not in self.stopped, f"{where}: after engine.stopped"
        if isinstance(record, EngineStopped):
            assert record.ledger["balanced"], where
            self.stopped.add(record.process_id)
        elif isinstance(record, RolloutRecord):
            self._take_rollout(record, where)

    def _take_rollout(self, record: RolloutRecord, where: str) -> None:
        key = (record.process_id, record.rollout_id)
        if isinstance(record, RolloutRestored):
            self._come_in(record, where)
        stay = self.stays.setdefault(key, Stay())
        assert record.seq == stay.seq + 1, f"{where}: seq {record.seq} after {stay.seq}"
        stay.seq = record.seq
        stay.lines.append(record)
        if isinstance(record, RolloutTransition):
            self._move(stay, record, where)
        else:
            assert isinstance(record, RolloutRestored | RolloutRest | RolloutDisposition)
            assert (record.state, record.tokens) == (stay.state, stay.tokens), where
        if isinstance(record, RolloutDisposition) and record.disposition == "delivered":
            assert record.rollout_id not in self.delivered, f"{where}: delivered again"
            assert record.state in FINAL_STATES, where
            self.delivered[record.rollout_id] = record.process_id

    def _come_in(self, record: RolloutRestored, where: str) -> None:
        key = (record.process_id, record.rollout_id)
        before = self.stays.get(key)
        assert before is None or before.state in REST_STATES, f"{where}: restored while alive"
        assert record.rollout_id not in self.delivered, f"{where}: restored after it was delivered"
        assert record.from_process in self.processes, f"{where}: from nowhere"
        told = [
            line
            for (process, name), stay in self.stays.items()
            if name == record.rollout_id and process != record.process_id
            for line in stay.lines
        ]
        # Lines are in the file before the snapshot that includes them.
        assert record.attempt <= max((line.attempt for line in told), default=0), (
            f"{where}: an attempt untold"
        )
        if record.tokens:
            assert any(isinstance(line, RolloutTransition) and line.trigger == "observe" for line in told), (
                f"{where}: tokens untold"
            )
        self.stays[key] = Stay(state=record.state, tokens=record.tokens, attempt=record.attempt)
        self.restored.append(record)

    def _move(self, stay: Stay, record: RolloutTransition, where: str) -> None:
        assert record.source == stay.state, f"{where}: {record.source} after {stay.state}"
        assert ROLLOUT.target(RolloutState(record.source), Trigger(record.trigger)) == record.dest, where
        assert record.attempt == stay.attempt + (record.trigger == "dispatch"), where
        assert not record.dropped_tokens or record.trigger == "restore", where
        grown = record.tokens - stay.tokens - record.new_tokens + record.dropped_tokens
        assert grown >= 0 if record.source in {"partial", "aborting"} else grown == 0, where
        stay.state, stay.tokens, stay.attempt = record.dest, record.tokens, record.attempt


def violations(logs: Iterable[Path]) -> list[Violation]:
    """What `lifecycle report --strict` finds."""
    with Warehouse(find_sources([str(log) for log in logs]), strict=True) as warehouse:
        return find_violations(warehouse)
