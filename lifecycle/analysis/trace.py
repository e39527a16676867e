"""A Chrome/Perfetto trace: one async track per rollout, one process per worker, counters over time.

Rollouts overlap, and events that overlap on one thread break the viewers, so everything is an async `b`/`e` pair with
the rollout as its id, local to the process: a rollout served by two workers has a track at each. The states of one rollout follow each other, so that pairs of one id never overlap.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

import msgspec

from lifecycle.analysis.lines import each_line
from lifecycle.analysis.sources import Source
from lifecycle.errors import ConfigurationError
from lifecycle.states import IN_FLIGHT_STATES, REST_STATES

ENGINE: Final = "engine"
HIDDEN: Final = "worker not known"
COUNTER_S: Final = 1.0
LONG_SILENCE_S: Final = 60.0
_ENCODER = msgspec.json.Encoder()


class _Line(msgspec.Struct):
    """The keys that a time line needs; lines without a rollout or a gate are left out."""

    event: str
    ts: float
    process_id: str
    rollout_id: str = ""
    group_id: str = ""
    attempt: int = 0
    trigger: str = ""
    source: str = ""
    dest: str = ""
    state: str = ""
    tokens: int = 0
    reason: str | None = None
    outcome: str | None = None
    worker: str | None = None
    mode: str | None = None
    version: str | None = None
    from_process: str | None = None


_LINE = msgspec.json.Decoder(_Line)
Event = dict[str, Any]


class _Stay:
    """A rollout in one state, until the next line of it."""

    __slots__ = ("attempt", "since", "state", "tokens")

    def __init__(self, state: str, since: float, attempt: int, tokens: int) -> None:
        self.state, self.since, self.attempt, self.tokens = state, since, attempt, tokens


class Timeline:
    """Turns lines into trace events. Times become microseconds since the first line."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._last: dict[str, float] = {}
        self._pids: dict[str, int] = {ENGINE: 1}
        self._stays: dict[tuple[str, str], _Stay] = {}
        self._held: dict[tuple[str, str], list[Event]] = {}
        self._gates: dict[str, tuple[str, float]] = {}
        self._in_flight = 0
        self._gained: deque[tuple[float, int]] = deque()
        self._next_counter = 0.0

    def feed(self, line: _Line) -> Iterator[Event]:
        """The events that are complete with this line."""
        if self._began is None:
            self._began = self._next_counter = line.ts
        self._last[line.process_id] = line.ts
        yield from self._counters(line.ts)
        if line.event == "gate.transition":
            yield from self._gate(line)
        elif line.event in {"rollout.transition", "rollout.restored"}:
            yield from self._rollout(line)

    def finish(self) -> Iterator[Event]:
        """Close what is open, as cut off, and name the processes."""
        for (process, rollout), stay in self._stays.items():
            yield from self._cut_off((process, rollout), stay)
        for process, (state, since) in self._gates.items():
            if state != "open":
                yield from self._gate_pair(process, state, since, self._last[process], {})
        for name, pid in self._pids.items():
            yield {"ph": "M", "pid": pid, "tid": 0, "name": "process_name", "args": {"name": name}}

    def _rollout(self, line: _Line) -> Iterator[Event]:
        key = (line.process_id, line.rollout_id)
        if line.from_process is not None and (
            left := self._stays.pop((line.from_process, line.rollout_id), None)
        ):
            yield from self._cut_off((line.from_process, line.rollout_id), left)
        stay = self._stays.get(key)
        dest = line.dest or line.state
        if stay is not None and (line.source == line.dest != ""):
            return
        if stay is not None and stay.state not in REST_STATES:
            said = {
                "to": dest,
                "trigger": line.trigger or line.event,
                "reason": line.reason,
                "outcome": line.outcome,
            }
            self._held.setdefault(key, []).extend(self._pair(line.rollout_id, stay, line.ts, said))
            self._gained.append((line.ts, max(0, line.tokens - stay.tokens)))
        self._in_flight += (dest in IN_FLIGHT_STATES) - (stay is not None and stay.state in IN_FLIGHT_STATES)
        self._stays[key] = _Stay(dest, line.ts, line.attempt, line.tokens)
        if dest not in IN_FLIGHT_STATES:
            yield from self._flush(key, line.worker)

    def _cut_off(self, key: tuple[str, str], stay: _Stay) -> Iterator[Event]:
        """Close what a process had open when its log ended."""
        if stay.state not in REST_STATES:
            pair = self._pair(key[1], stay, self._last[key[0]], {"cut_off": True})
            self._held.setdefault(key, []).extend(pair)
            self._in_flight -= stay.state in IN_FLIGHT_STATES
        yield from self._flush(key, None)

    def _pair(self, rollout: str, stay: _Stay, end: float, said: dict[str, Any]) -> tuple[Event, Event]:
        common = {"cat": "rollout", "id2": {"local": rollout}, "name": stay.state, "tid": 0}
        args = {"rollout": rollout, "attempt": stay.attempt, "tokens": stay.tokens}
        args |= {name: value for name, value in said.items() if value is not None}
        begin = {**common, "ph": "b", "ts": self._us(stay.since), "args": args}
        return begin, {**common, "ph": "e", "ts": self._us(end)}

    def _flush(self, key: tuple[str, str], worker: str | None) -> Iterator[Event]:
        """An attempt is over, and its worker known: hand its states out under that worker's process."""
        for event in self._held.pop(key, ()):
            flying = event["name"] in IN_FLIGHT_STATES
            yield {**event, "pid": self._pid((worker or HIDDEN) if flying else ENGINE)}

    def _gate(self, line: _Line) -> Iterator[Event]:
        state, since = self._gates.get(line.process_id, (line.source, line.ts))
        if line.source == line.dest:
            return
        if state != "open":
            yield from self._gate_pair(line.process_id, state, since, line.ts, {"version": line.version})
        self._gates[line.process_id] = (line.dest, line.ts)

    def _gate_pair(
        self, process: str, state: str, since: float, end: float, said: dict[str, Any]
    ) -> Iterator[Event]:
        common = {
            "cat": "gate",
            "id2": {"local": f"gate {process}"},
            "name": f"gate {state}",
            "pid": 1,
            "tid": 0,
        }
        yield {**common, "ph": "b", "ts": self._us(since), "args": said}
        yield {**common, "ph": "e", "ts": self._us(end)}

    def _counters(self, now: float) -> Iterator[Event]:
        while self._next_counter <= now:
            edge = self._next_counter
            gained = 0
            while self._gained and self._gained[0][0] <= edge:
                gained += self._gained.popleft()[1]
            stamp = {"ph": "C", "pid": 1, "tid": 0, "ts": self._us(edge)}
            yield {**stamp, "name": "in flight", "args": {"requests": max(0, self._in_flight)}}
            yield {**stamp, "name": "tokens per second", "args": {"tokens": gained / COUNTER_S}}
            self._next_counter += max(
                COUNTER_S, (now - edge) // COUNTER_S * COUNTER_S if now - edge > LONG_SILENCE_S else 0
            )

    def _pid(self, name: str) -> int:
        return self._pids.setdefault(name, len(self._pids) + 1)

    def _us(self, ts: float) -> int:
        return max(0, round((ts - (self._began or 0.0)) * 1e6))


def write_trace(sources: Sequence[Source], path: Path) -> int:
    """Write the trace of all logs as JSON and return the number of events; damaged lines are passed over.

    Raises ConfigurationError when the file cannot be written.
    """
    timeline = Timeline()
    written = 0
    try:
        with path.open("wb") as file:
            file.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
            for event in _events(timeline, sources):
                file.write(b",\n" if written else b"")
                file.write(_ENCODER.encode(event))
                written += 1
            file.write(b"\n]}\n")
    except OSError as error:
        raise ConfigurationError(f"cannot write the trace {path}: {error.strerror}") from error
    return written


def _events(timeline: Timeline, sources: Sequence[Source]) -> Iterator[Event]:
    for line in heapq.merge(*map(_decoded, sources), key=attrgetter("ts")):
        yield from timeline.feed(line)
    yield from timeline.finish()


def _decoded(source: Source) -> Iterator[_Line]:
    for raw in each_line(source):
        if (
            b"rollout.transition" in raw.text
            or b"rollout.restored" in raw.text
            or b"gate.transition" in raw.text
        ):
            try:
                yield _LINE.decode(raw.text)
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue
