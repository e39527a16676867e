"""From log lines to the plain figures and steps that `lifecycle.diagram` draws. One pass, line by line."""

from __future__ import annotations

import zlib
from array import array
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lifecycle.diagram.chart import ArcKey
from lifecycle.diagram.overlay import ArcFigures, LogFigures
from lifecycle.diagram.timeline import Step
from lifecycle.errors import ConfigurationError
from lifecycle.log.reader import Damaged, LogLine, read_log
from lifecycle.log.records import AnyRecord, EngineStarted, GateTransition, RolloutRestored, RolloutTransition


@dataclass
class Reading:
    """What reading some logs came upon besides the records that were asked for."""

    lines: int = 0
    damaged: dict[str, list[tuple[int, str]]] = field(default_factory=lambda: defaultdict(list))
    tables: dict[str, dict[str, Any]] = field(
        default_factory=dict
    )  # path → tables of its last engine.started

    def notes(self, hashes: dict[str, str]) -> Iterator[str]:
        """What a user should be told, one line each. `hashes` are those of the tables drawn against."""
        for path, places in self.damaged.items():
            line, problem = places[0]
            count = f"{len(places)} damaged line{'s' if len(places) != 1 else ''}"
            yield f"{path}: {count} skipped, the first at line {line}: {problem}"
        for path, tables in self.tables.items():
            for name, expected in hashes.items():
                table = tables.get(name)
                found = table.get("hash") if isinstance(table, dict) else None
                if found != expected:
                    yield (
                        f"{path} was written under another table of the {name} machine ({found}, here {expected}): "
                        "arcs that this version does not have are drawn in red"
                    )


def read_all(paths: Sequence[Path], reading: Reading) -> Iterator[AnyRecord]:
    """Every record of every file; damage and tables are noted in `reading`.

    Raises ConfigurationError when a file cannot be read, or holds no line of a lifecycle log at all.
    """
    for path in paths:
        before = reading.lines
        for entry in _entries(path):
            if isinstance(entry, Damaged):
                reading.damaged[str(path)].append((entry.line, entry.problem))
                continue
            reading.lines += 1
            if isinstance(entry.record, EngineStarted):
                reading.tables[str(path)] = entry.record.tables
            yield entry.record
        if reading.lines == before:
            raise ConfigurationError(_no_lines(path, reading))


def _entries(path: Path) -> Iterator[LogLine | Damaged]:
    line = 0
    try:
        for entry in read_log(path):
            line = entry.line
            yield entry
    except (OSError, EOFError, zlib.error) as error:  # a compressed file that was cut off, or is none
        yield Damaged(str(path), line + 1, str(error))


def _no_lines(path: Path, reading: Reading) -> str:
    places = reading.damaged.get(str(path))
    why = f"line {places[0][0]}: {places[0][1]}" if places else "it is empty"
    return f"{path} is not a lifecycle log ({why}); expected JSON lines with the key `event`, as the engine writes them"


@dataclass
class _Tally:
    """What is gathered for one arc."""

    bit: int
    dwell: array[float] = field(default_factory=lambda: array("d"))
    rollouts: int = 0


def figures_of(machine: str, paths: Sequence[Path], reading: Reading) -> LogFigures:
    """Count the arcs of one machine over all files.

    Needs one integer per rollout and one float per transition; a rollout of two runs counts twice.
    """
    tallies: dict[ArcKey, _Tally] = {}
    seen: dict[tuple[str, str], int] = {}  # rollout → bits of the arcs it took
    for record in read_all(paths, reading):
        if machine == "rollout" and isinstance(record, RolloutTransition):
            tally = _tally(tallies, record)
            who = (record.run_id, record.rollout_id)
            tally.rollouts += not seen.get(who, 0) & tally.bit
            seen[who] = seen.get(who, 0) | tally.bit
        elif machine == "gate" and isinstance(record, GateTransition):
            _tally(tallies, record)
    arcs_found = {
        key: ArcFigures(
            len(tally.dwell), tally.rollouts, quantile(tally.dwell, 0.50), quantile(tally.dwell, 0.95)
        )
        for key, tally in tallies.items()
    }
    taken = sum(len(tally.dwell) for tally in tallies.values())
    title = (
        f"{taken:,} transitions" + (f" of {len(seen):,} rollouts" if seen else "") + f" in {_names(paths)}"
    )
    return LogFigures(title=title, arcs=arcs_found, rollouts=len(seen))


def _tally(tallies: dict[ArcKey, _Tally], record: RolloutTransition | GateTransition) -> _Tally:
    key = (record.source, record.trigger, record.dest)
    tally = tallies.get(key)
    if tally is None:
        tally = tallies[key] = _Tally(bit=1 << len(tallies))
    tally.dwell.append(record.dwell_s)
    return tally


def _names(paths: Sequence[Path]) -> str:
    return paths[0].name if len(paths) == 1 else f"{len(paths)} logs"


def quantile(values: Sequence[float], q: float) -> float | None:
    """The quantile with linear interpolation between neighbours (as SQL's `quantile_cont`); None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    at = q * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def steps_of(rollout_id: str, paths: Sequence[Path], reading: Reading) -> list[Step]:
    """All steps of one rollout over all files, in time. Raises ConfigurationError when there are none."""
    steps = []
    for record in read_all(paths, reading):
        if isinstance(record, RolloutTransition) and record.rollout_id == rollout_id:
            steps.append((record.ts, record.seq, _step(record)))
        elif isinstance(record, RolloutRestored) and record.rollout_id == rollout_id:
            steps.append((record.ts, record.seq, _restored(record)))
    if not steps:
        raise ConfigurationError(
            f"no line about the rollout {rollout_id!r} in {_names(paths)} ({reading.lines:,} lines read)"
        )
    return [step for _, _, step in sorted(steps, key=lambda entry: entry[:2])]


def _step(record: RolloutTransition) -> Step:
    return Step(
        ts=record.ts,
        trigger=record.trigger,
        source=record.source,
        dest=record.dest,
        attempt=record.attempt,
        tokens=record.tokens,
        dropped_tokens=record.dropped_tokens,
        dwell_s=record.dwell_s,
        process_id=record.process_id,
        worker=record.worker,
        reason=record.reason,
        outcome=record.outcome,
    )


def _restored(record: RolloutRestored) -> Step:
    return Step(
        ts=record.ts,
        trigger="restored",
        source=None,
        dest=record.state,
        attempt=record.attempt,
        tokens=record.tokens,
        dropped_tokens=record.dropped_tokens,
        dwell_s=0.0,
        process_id=record.process_id,
        reason=record.reason,
    )
