"""Every line of the logs as one compact row in DuckDB, damaged lines set aside, processes and machines known."""

from __future__ import annotations

import json
import shutil
import tempfile
import weakref
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import msgspec

from lifecycle.analysis import duck, schema, staging
from lifecycle.analysis.lines import LineFinder, RawLine, each_line, open_source
from lifecycle.analysis.machines import MachineSet, machines_from, own_machines, vocabulary
from lifecycle.analysis.sources import Source
from lifecycle.analysis.words import END_OF_TIME
from lifecycle.errors import ConfigurationError
from lifecycle.log.records import AnyRecord

SHOWN_DAMAGE: Final = 20
CLASSIFIED: Final = 1000
PEEKED: Final = 200
_RECORD = msgspec.json.Decoder(AnyRecord)
_ANY = msgspec.json.Decoder()


class Line(dict[str, Any]):
    """A line as it stands in the log; a key that it lacks is None."""

    def __missing__(self, key: str) -> None:
        return None


@dataclass(frozen=True, slots=True)
class Place:
    """Where a line stands: `line` counts from 1 as in an editor; in Parquet it is the row."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True)
class DamagedLine:
    """A line that is not a record, and what is wrong with it."""

    place: Place
    problem: str


@dataclass(slots=True)
class Process:
    """One process that wrote lines. `closed` says that its last line is `engine.stopped`."""

    key: int
    name: str
    run: str
    machines: MachineSet
    began: float
    ended: float
    lines: int
    closed: bool
    lineage: int = 0


@dataclass(slots=True)
class Damage:
    """What could not be read: counted wholly, shown in part."""

    count: int = 0
    first: list[DamagedLine] = field(default_factory=list)
    unknown_events: Counter[str] = field(default_factory=Counter)
    foreign_words: list[int] = field(default_factory=list)
    truncated_files: list[str] = field(default_factory=list)


class Warehouse:
    """The logs in a database in memory; a context manager, since it may spill to a temporary directory.

    `strict` keeps what conformance checks need. `memory` bounds the database's own buffers (`"415MB"`); more rows
    than that go to disk for the time being.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        strict: bool = False,
        memory: str | None = None,
        threads: int | None = None,
    ) -> None:
        self.strict = strict
        self._spill = Path(tempfile.mkdtemp(prefix="lifecycle-report-"))
        self._cleanup = weakref.finalize(self, shutil.rmtree, self._spill, ignore_errors=True)
        memory = memory or ("900MB" if strict else "415MB")
        self.connection = duck.connect(memory=memory, threads=threads, spill=self._spill)
        self._asked: dict[str, list[dict[str, Any]]] = {}
        self.damage = Damage()
        self.starts: list[int] = []  # the first row of every file, and the end
        self._finders: list[LineFinder] = []
        self.processes: list[Process] = []
        self.sources = sorted(sources, key=_first_time)
        self._stage()
        self._set_damage_aside()
        self._know_processes()
        self._separate_lineages()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Forget everything."""
        self.connection.close()
        self._cleanup()

    # -- asking ------------------------------------------------------------------------------------------------

    def rows(self, name: str, **parts: str) -> list[dict[str, Any]]:
        """Run the query of that name and return its rows as dicts."""
        with duck.reading("the logs"):
            cursor = self.connection.execute(duck.sql(name, strict=self.strict, **parts))
            names = cursor.columns
            return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]

    def once(self, name: str) -> list[dict[str, Any]]:
        """The rows of a query that several sections ask for: it is run for the first."""
        if name not in self._asked:
            self._asked[name] = self.rows(name)
        return self._asked[name]

    def row(self, name: str, **parts: str) -> dict[str, Any]:
        """The one row of a query that has one."""
        return self.rows(name, **parts)[0]

    def run(self, name: str, **parts: str) -> None:
        """Run the statements of that name."""
        with duck.reading("the logs"):
            self.connection.execute(duck.sql(name, strict=self.strict, **parts))

    def raw(self, rows: Iterable[int]) -> dict[int, tuple[Place, RawLine]]:
        """The lines behind rows, with their places."""
        by_file: dict[int, list[int]] = {}
        for row in rows:
            by_file.setdefault(bisect_right(self.starts, row) - 1, []).append(row)
        found: dict[int, tuple[Place, RawLine]] = {}
        for index, wanted in by_file.items():
            source, start = str(self.sources[index]), self.starts[index]
            for ordinal, line in self._finders[index].pick([row - start for row in wanted]).items():
                found[start + ordinal] = (Place(source, line.number), line)
        return found

    def lines(self, rows: Iterable[int]) -> dict[int, tuple[Place, Line]]:
        """The lines behind rows, with their places."""
        return {row: (place, self._line(line.text)) for row, (place, line) in self.raw(rows).items()}

    def _line(self, text: bytes) -> Line:
        try:
            return Line(_ANY.decode(text))
        except msgspec.DecodeError:  # the database reads more than JSON: NaN, a comma behind the last key
            row = self.connection.execute("SELECT json($1)", [text.decode("utf-8", "replace")]).fetchone()
            return Line(json.loads(row[0], parse_constant=str) if row else {})

    @property
    def total(self) -> int:
        """How many lines were read, damaged ones included."""
        row = self.connection.execute("SELECT count(*) FROM lines").fetchone()
        return int(row[0]) + self.damage.count if row else 0

    @property
    def span(self) -> tuple[float, float]:
        """The times of the first and of the last line; zeros where there is none."""
        began = min((process.began for process in self.processes), default=0.0)
        return began, max((process.ended for process in self.processes), default=0.0)

    @property
    def machines(self) -> list[MachineSet]:
        """The different pairs of tables that occur, the newest last."""
        return list({process.machines.key: process.machines for process in self.processes}.values())

    # -- reading -----------------------------------------------------------------------------------------------

    def _stage(self) -> None:
        """Read everything; again if a table was found behind the beginning of a file that has words of its own."""
        machines = [own_machines(), *self._peeked_machines()]
        self._stage_with(vocabulary(machines))
        found = [_machines_of(json.loads(row["about"])) for row in self.rows("started")]
        machines += [each for each in found if each is not None]
        if vocabulary(machines) != self._words:
            self.run("unlearn")
            self._stage_with(vocabulary(machines))

    def _stage_with(self, words: tuple[list[str], list[str]]) -> None:
        self._words = words
        self.starts, self._finders, self.damage = [0], [], Damage()
        staging.define_words(self.connection, *words)
        self.run("macros")
        self.run("lines")
        for source in self.sources:
            self._finders.append(LineFinder(source, self._stage_file(source)))
            self.starts.append(self.starts[-1] + self._finders[-1].rows)

    def _stage_file(self, source: Source) -> int:
        try:
            with duck.reading(source):
                return self._insert(source)
        except ConfigurationError:
            if source.is_parquet or source.compression == "uncompressed":
                raise
        return self._insert(self._readable_part(source))

    def _insert(self, source: Source) -> int:
        reader = staging.reader(self.connection, source, strict=self.strict)
        inserted = self.connection.execute(duck.sql("stage", strict=self.strict, source=reader)).fetchone()
        return int(inserted[0]) if inserted else 0

    def _readable_part(self, source: Source) -> Source:
        """A compressed file that is cut off: what can be read of it, as a file of its own."""
        self.damage.truncated_files.append(str(source))
        path = self._spill / f"{len(self.starts)}.jsonl"
        with path.open("wb") as file:
            for line in each_line(source):
                file.write(line.text + b"\n")
        return Source(path, "uncompressed")

    def _peeked_machines(self) -> list[MachineSet]:
        """Tables found near the beginning of the files: their words become known before anything is staged."""
        found: dict[str, MachineSet] = {}
        for source in self.sources:
            for number, line in enumerate(each_line(source, b"engine.started" if source.is_parquet else b"")):
                if number >= PEEKED:
                    break
                if b"engine.started" in line.text:
                    machines = _machines_of(_decoded(line))
                    if machines is not None:
                        found[machines.key] = machines
        return list(found.values())

    # -- knowing what was read ---------------------------------------------------------------------------------

    def _set_damage_aside(self) -> None:
        rows = [int(row["rowid"]) for row in self.rows("damaged", end_of_time=repr(END_OF_TIME))]
        if not rows:
            return
        whole: set[int] = set()
        for row, (place, line) in sorted(self.raw(rows[:CLASSIFIED]).items()):
            try:
                ts = _RECORD.decode(line.text).ts
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                if not self._count_unknown_event(line):
                    self._count_damaged(place, line, error)
                continue
            if 0 <= ts <= END_OF_TIME:
                whole.add(row)
            else:
                self._count_damaged(place, line, f"ts {ts:g} is no time")
        self.damage.foreign_words = sorted(whole)
        lost = [row for row in rows if row not in whole]
        self.damage.count = len(lost) - self.damage.unknown_events.total()
        self.connection.execute("CREATE TEMP TABLE lost AS SELECT unnest($1::BIGINT[]) AS row_number", [lost])
        self.connection.execute("DELETE FROM lines WHERE rowid IN (SELECT row_number FROM lost)")
        self._refuse_strangers(lost)

    def _refuse_strangers(self, lost: Sequence[int]) -> None:
        """A file in which every line is damaged is no log, whatever its name says."""
        for source, (begin, end) in zip(self.sources, pairwise(self.starts), strict=True):
            bad = bisect_left(lost, end) - bisect_left(lost, begin)
            if end > begin and bad == end - begin:
                place, line = self.raw([begin])[begin]
                text = line.text[:60].decode("utf-8", "replace")
                raise ConfigurationError(
                    f"{source} is not a lifecycle log: not one of its {bad} lines is a record; {place}: {text!r}"
                )

    def _count_unknown_event(self, line: RawLine) -> bool:
        try:
            event = _ANY.decode(line.text)["event"]
        except (msgspec.DecodeError, UnicodeDecodeError, TypeError, KeyError):
            return False
        if not isinstance(event, str) or event in schema.EVENTS:
            return False
        self.damage.unknown_events[event] += 1
        return True

    def _count_damaged(self, place: Place, line: RawLine, problem: object) -> None:
        if len(self.damage.first) < SHOWN_DAMAGE:
            text = line.text[:60].decode("utf-8", "replace")
            self.damage.first.append(DamagedLine(place, f"{problem}: {text!r}"))

    def _know_processes(self) -> None:
        found = self.rows("processes")
        nameless = self.lines(row["first_row"] for row in found if row["started"] is None)
        sets: dict[str, MachineSet] = {}
        for row in found:
            started = row["started"] is not None
            line = json.loads(row["started"]) if started else nameless[row["first_row"]][1]
            machines = _machines_of(line) if started else None
            if machines is not None:
                machines = sets.setdefault(machines.key, machines)
            self.processes.append(
                Process(
                    key=row["process"],
                    name=line["process_id"],
                    run=line["run_id"],
                    machines=machines or _newest(sets),
                    began=row["began"],
                    ended=row["ended"],
                    lines=row["n_lines"],
                    closed=row["closed"],
                )
            )

    def _separate_lineages(self) -> None:
        """Runs that know nothing of each other may use the same rollout ids: keep their rollouts apart."""
        linked = [(row["process"], row["from_process"]) for row in self.rows("handovers")]
        _number_lineages(self.processes, linked)
        self.connection.execute(
            "CREATE TABLE processes (process UINTEGER, lineage UINTEGER, closed BOOLEAN, ended DOUBLE)"
        )
        for process in self.processes:
            values = [process.key, process.lineage, process.closed, process.ended]
            self.connection.execute("INSERT INTO processes VALUES (?, ?, ?, ?)", values)
        if any(process.lineage for process in self.processes):
            self.run("lineages")


def _newest(sets: dict[str, MachineSet]) -> MachineSet:
    return list(sets.values())[-1] if sets else own_machines()


def _number_lineages(processes: Sequence[Process], linked: Iterable[tuple[int, str]]) -> None:
    """Give one number to processes of one run, and of runs that took rollouts over from each other."""
    home = {process.run: process.run for process in processes}

    def root(run: str) -> str:
        while home[run] != run:
            run = home[run]
        return run

    run_of = {process.name: process.run for process in processes}
    name_of = {process.key: process.name for process in processes}
    for key, from_process in linked:
        if from_process in run_of:
            home[root(run_of[name_of[key]])] = root(run_of[from_process])
    numbers: dict[str, int] = {}
    for process in processes:
        process.lineage = numbers.setdefault(root(process.run), len(numbers))


def _machines_of(line: Any) -> MachineSet | None:
    try:
        return machines_from(line["tables"])
    except (TypeError, KeyError, ConfigurationError):
        return None


def _decoded(line: RawLine) -> Any:
    try:
        return _ANY.decode(line.text)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _first_time(source: Source) -> float:
    """The time of the first good line, so that files are read in the order in which they were begun."""
    if not source.is_parquet:
        with open_source(source):
            pass
    for number, line in enumerate(each_line(source)):
        if number >= PEEKED:
            break
        try:
            return float(_ANY.decode(line.text)["ts"])
        except (msgspec.DecodeError, UnicodeDecodeError, TypeError, KeyError, ValueError):
            continue
    return 0.0
