"""A Chrome/Perfetto trace: one async track per rollout, one process per worker, counters over time.

Rollouts overlap, and events that overlap on one thread break the viewers, so everything is an async `b`/`e` pair with
the rollout as its id, local to the process: a rollout served by two workers has a track at each. The states of one
rollout follow each other, so that pairs of one id never overlap.

Millions of lines pass through here one by one, so that lines and events are structs that the garbage collector does
not look at.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Final

import msgspec

from lifecycle.analysis.lines import each_text
from lifecycle.analysis.sources import Source
from lifecycle.analysis.words import END_OF_TIME
from lifecycle.errors import ConfigurationError
from lifecycle.states import IN_FLIGHT_STATES, REST_STATES

ENGINE: Final = "engine"
ENGINE_PID: Final = 1
HIDDEN: Final = "worker not known"
COUNTER_S: Final = 1.0
LONG_SILENCE_S: Final = 60.0
BATCH: Final = 2000
"""So many events are written at once."""
TRANSITION, RESTORED = b".transition", b"rollout.restored"
_ENCODER = msgspec.json.Encoder()


class _Line(msgspec.Struct, gc=False):
    """The keys that a time line needs; lines without a rollout or a gate are left out."""

    event: str
    ts: Annotated[float, msgspec.Meta(ge=0, le=END_OF_TIME)]
    process_id: str
    rollout_id: str = ""
    attempt: int = 0
    trigger: str = ""
    source: str = ""
    dest: str = ""
    state: str = ""
    tokens: int = 0
    reason: str | None = None
    outcome: str | None = None
    worker: str | None = None
    version: str | None = None
    from_process: str | None = None


_LINE = msgspec.json.Decoder(_Line)


class _Local(msgspec.Struct, gc=False):
    """An id that counts within its process."""

    local: str


class _Args(msgspec.Struct, gc=False, omit_defaults=True):
    """What a viewer shows of a state: with what it began, and how it ended."""

    rollout: str
    attempt: int
    tokens: int
    to: str | None = None
    trigger: str | None = None
    reason: str | None = None
    outcome: str | None = None
    cut_off: bool = False


class _Event(msgspec.Struct, gc=False):
    """A rollout enters a state (`b`, with `args`) or leaves it (`e`)."""

    ph: str
    ts: int
    id2: _Local
    name: str
    args: _Args | msgspec.UnsetType = msgspec.UNSET
    pid: int = ENGINE_PID
    tid: int = 0
    cat: str = "rollout"


Event = _Event | dict[str, Any]


class _Open(msgspec.Struct, gc=False):
    """A rollout that is not at rest, until its next line; `left` are its states so far, whose worker is not known."""

    state: str
    since: int
    attempt: int
    tokens: int
    left: list[_Event]


class Timeline:
    """Turns lines into trace events, which gather in `ready`. Times become microseconds since the first line."""

    def __init__(self) -> None:
        self.ready: list[Event] = []
        self._began: float | None = None
        self._last: dict[str, float] = {}
        self._pids: dict[str, int] = {ENGINE: ENGINE_PID}
        self._open: dict[tuple[str, str], _Open] = {}
        self._gates: dict[str, tuple[str, float]] = {}
        self._in_flight = 0
        self._gained: deque[tuple[float, int]] = deque()
        self._next_counter = 0.0

    def feed(self, line: _Line) -> None:
        """Add the events that are complete with this line."""
        if self._began is None:
            self._began = self._next_counter = line.ts
        self._last[line.process_id] = line.ts
        if self._next_counter <= line.ts:
            self._count(line.ts)
        if line.event == "gate.transition":
            self._gate(line)
        elif line.event in {"rollout.transition", "rollout.restored"}:
            self._rollout(line)

    def finish(self) -> None:
        """Close what is open, as cut off, and name the processes."""
        for key, rollout in self._open.items():
            self._cut_off(key, rollout)
        for process, (state, since) in self._gates.items():
            if state != "open":
                self._gate_pair(process, state, since, self._last[process], {})
        for name, pid in self._pids.items():
            self.ready.append(
                {"ph": "M", "pid": pid, "tid": 0, "name": "process_name", "args": {"name": name}}
            )

    def _rollout(self, line: _Line) -> None:
        key = (line.process_id, line.rollout_id)
        if line.from_process is not None:
            before = (line.from_process, line.rollout_id)
            if left := self._open.pop(before, None):
                self._cut_off(before, left)
        dest = line.dest or line.state
        now = self._us(line.ts)
        rollout = self._open.get(key)
        if rollout is None:
            rollout = self._open[key] = _Open(dest, now, line.attempt, line.tokens, [])
        elif line.source == line.dest != "":
            return
        else:
            self._leave(key[1], rollout, line, dest, now)
            rollout.state, rollout.since = dest, now
            rollout.attempt, rollout.tokens = line.attempt, line.tokens
        if dest in IN_FLIGHT_STATES:
            self._in_flight += 1
            return
        self._hand_out(rollout, line.worker)
        if dest in REST_STATES:
            del self._open[key]

    def _leave(self, name: str, rollout: _Open, line: _Line, dest: str, now: int) -> None:
        trigger = line.trigger or line.event
        said = _Args(name, rollout.attempt, rollout.tokens, dest, trigger, line.reason, line.outcome)
        self._end(rollout, now, said)
        if line.tokens > rollout.tokens:
            self._gained.append((line.ts, line.tokens - rollout.tokens))

    def _cut_off(self, key: tuple[str, str], rollout: _Open) -> None:
        """Close what a process had open when its log ended."""
        said = _Args(key[1], rollout.attempt, rollout.tokens, cut_off=True)
        self._end(rollout, self._us(self._last[key[0]]), said)
        self._hand_out(rollout, None)

    def _end(self, rollout: _Open, now: int, said: _Args) -> None:
        """Its state is over. The pair stands under the engine until the worker is known."""
        self._in_flight -= rollout.state in IN_FLIGHT_STATES
        local = _Local(said.rollout)
        rollout.left.append(_Event("b", rollout.since, local, rollout.state, said))
        rollout.left.append(_Event("e", now, local, rollout.state))

    def _hand_out(self, rollout: _Open, worker: str | None) -> None:
        """An attempt is over, and its worker known: its states stand under that worker's process."""
        for event in rollout.left:
            if event.name in IN_FLIGHT_STATES:
                event.pid = self._pid(worker or HIDDEN)
        self.ready += rollout.left
        rollout.left = []

    def _gate(self, line: _Line) -> None:
        state, since = self._gates.get(line.process_id, (line.source, line.ts))
        if line.source == line.dest:
            return
        if state != "open":
            self._gate_pair(line.process_id, state, since, line.ts, {"version": line.version})
        self._gates[line.process_id] = (line.dest, line.ts)

    def _gate_pair(self, process: str, state: str, since: float, end: float, said: dict[str, Any]) -> None:
        common = {
            "cat": "gate",
            "id2": {"local": f"gate {process}"},
            "name": f"gate {state}",
            "pid": ENGINE_PID,
            "tid": 0,
        }
        self.ready.append({**common, "ph": "b", "ts": self._us(since), "args": said})
        self.ready.append({**common, "ph": "e", "ts": self._us(end)})

    def _count(self, now: float) -> None:
        while self._next_counter <= now:
            edge = self._next_counter
            gained = 0
            while self._gained and self._gained[0][0] <= edge:
                gained += self._gained.popleft()[1]
            stamp = {"ph": "C", "pid": ENGINE_PID, "tid": 0, "ts": self._us(edge)}
            self.ready.append({**stamp, "name": "in flight", "args": {"requests": max(0, self._in_flight)}})
            self.ready.append({**stamp, "name": "tokens per second", "args": {"tokens": gained / COUNTER_S}})
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
    try:
        with path.open("wb") as file:
            return _write(sources, file)
    except OSError as error:
        raise ConfigurationError(f"cannot write the trace {path}: {error.strerror}") from error


def _write(sources: Sequence[Source], file: BinaryIO) -> int:
    written = 0
    file.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
    for events in _batches(sources):
        file.write(b",\n" if written else b"")
        file.write(b",\n".join(map(_ENCODER.encode, events)))
        written += len(events)
    file.write(b"\n]}\n")
    return written


def _batches(sources: Sequence[Source]) -> Iterator[list[Event]]:
    timeline = Timeline()
    for line in heapq.merge(*map(_decoded, sources), key=attrgetter("ts")):
        timeline.feed(line)
        if len(timeline.ready) >= BATCH:
            yield timeline.ready
            timeline.ready = []
    timeline.finish()
    if timeline.ready:
        yield timeline.ready


def _decoded(source: Source) -> Iterator[_Line]:
    for text in each_text(source):
        if TRANSITION in text or RESTORED in text:
            try:
                yield _LINE.decode(text)
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue
