"""One rollout's story in words, from the lines that name it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

import msgspec

from lifecycle.analysis.lines import each_line
from lifecycle.analysis.sources import Source
from lifecycle.analysis.words import clock, seconds
from lifecycle.errors import ConfigurationError
from lifecycle.log.records import (
    AnyRecord,
    RolloutDisposition,
    RolloutRecord,
    RolloutRest,
    RolloutRestored,
    RolloutTransition,
    StreamAnomaly,
)

_RECORD = msgspec.json.Decoder(AnyRecord)


@dataclass(frozen=True, slots=True)
class Sentence:
    """One line of the log in words; `at` is seconds since the first line of the story."""

    at: float
    file: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.at:+11.3f} s  {self.text}"


@dataclass(frozen=True, slots=True)
class _Told:
    ts: float
    place: tuple[int, int]
    file: str
    line: int
    record: RolloutRecord | StreamAnomaly


def tell_story(rollout_id: str, sources: Sequence[Source]) -> list[Sentence]:
    """Everything that the logs say of one rollout, in the order of time, over all processes.

    Raises ConfigurationError when no line names it.
    """
    lines = sorted(_lines_of(rollout_id, sources), key=attrgetter("ts", "place"))
    if not lines:
        names = ", ".join(str(source) for source in sources[:3])
        raise ConfigurationError(f"no line of a rollout {rollout_id!r} in {names}")
    began = lines[0].ts
    process = ""
    story: list[Sentence] = []
    for told in lines:
        if told.record.process_id != process:
            process = told.record.process_id
            story.append(
                Sentence(told.ts - began, told.file, told.line, f"in process {process}, {clock(told.ts)}:")
            )
        story += [Sentence(told.ts - began, told.file, told.line, text) for text in _words(told.record)]
    return story


def _lines_of(rollout_id: str, sources: Iterable[Source]) -> Iterator[_Told]:
    needle = msgspec.json.encode(rollout_id)[1:-1]
    for index, source in enumerate(sources):
        for line in each_line(source, needle):
            try:
                record = _RECORD.decode(line.text)
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue
            if isinstance(record, RolloutRecord | StreamAnomaly) and record.rollout_id == rollout_id:
                yield _Told(record.ts, (index, line.number), str(source), line.number, record)


def _words(record: RolloutRecord | StreamAnomaly) -> Iterator[str]:
    match record:
        case RolloutTransition():
            yield _move(record)
        case RolloutRestored():
            lost = f", {record.dropped_tokens:,} were lost" if record.dropped_tokens else ""
            origin = f" from process {record.from_process}" if record.from_process else ""
            yield f"was brought back{origin} as {record.state} with {record.tokens:,} tokens{lost}{_why(record.reason)}"
        case RolloutRest():
            yield (
                f"came to rest {record.state} with {record.tokens:,} tokens of {_versions(record)}, "
                f"{seconds(record.duration_s)} after submit{_why(record.reason)}"
            )
        case RolloutDisposition():
            lag = "" if record.lag is None else f", {record.lag} versions behind"
            yield f"was {record.disposition} ({record.state}, {record.tokens:,} tokens{lag}){_why(record.reason)}"
        case StreamAnomaly():
            yield f"anomaly in attempt {record.attempt}: {record.kind}: {record.detail}"


def _move(record: RolloutTransition) -> str:
    after = f"after {seconds(record.dwell_s)} in {record.source}"
    where = f" at {record.worker}" if record.worker else ""
    told = {
        "dispatch": f"attempt {record.attempt} was sent (rid {record.rid}) with {record.tokens:,} tokens held, {after}",
        "observe": f"its first tokens came{where} ({record.new_tokens:,}), {after}",
        "finish": f"the server finished it{where}: {record.tokens:,} tokens, {after}",
        "abort": f"an abort was asked for, {after}; {record.tokens:,} tokens held",
        "confirm": f"the server confirmed the abort{where}, {after}; {record.tokens:,} tokens kept",
        "preempt": f"the server ended it unasked{where}, {after}; {record.tokens:,} tokens kept",
        "lose": f"the stream was lost{where}, {after}; {record.tokens:,} tokens kept",
        "expire": f"the abort was not answered in time{where}, {after}: a possible leak",
        "reject": f"it was rejected{where}, {after}",
        "exhaust": f"no attempts were left after {record.attempt}",
        "restore": f"was made ready for another attempt with {record.tokens:,} tokens, {after}",
        "discard": f"was given up, {after}",
    }
    text = told.get(record.trigger, f"{record.trigger}, {after}")
    if record.source == record.dest:
        text = f"{record.trigger} came too late: it stayed {record.dest}"
    dropped = f"; {record.dropped_tokens:,} tokens were dropped" if record.dropped_tokens else ""
    move = f"{record.source} → {record.dest}"
    return f"{move:<24} {text}{dropped}{_why(record.reason, record.detail)}"


def _versions(record: RolloutRest) -> str:
    spans = [f"{version} [{start}, {end}) by {source}" for version, start, end, source in record.spans]
    if not spans:
        return "unknown version"
    return ("version " if len(spans) == 1 else "versions ") + "; ".join(spans)


def _why(reason: str | None, detail: str | None = None) -> str:
    said = ": ".join(part for part in (reason, detail) if part)
    return f" ({said})" if said else ""
