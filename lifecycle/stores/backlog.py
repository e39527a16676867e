"""What waits to be saved: one entry per rollout, however often it is written before the store gets to it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from lifecycle.snapshot import Snapshot, Tail
from lifecycle.states import Disposition, RolloutState
from lifecycle.stores.rules import ENDING_DISPOSITIONS

ENTRY_BYTES = 512
TOKEN_BYTES = 12  # int32 and float64


@dataclass(slots=True, eq=False)
class Entry:
    """Everything that is to be saved of one rollout: a snapshot, the tails after it, then a disposition.

    `ticket` numbers entries in the order in which they were begun; `anew` says that it began with a fresh rollout.
    """

    id: str
    ticket: int
    epoch: int
    snapshot: Snapshot | None = None
    rollback: bool = False
    anew: bool = False
    tails: list[Tail] = field(default_factory=list)
    disposition: Disposition | None = None
    size: int = ENTRY_BYTES

    def condense(self) -> None:
        """Fold the tails: into the snapshot if there is one, else into one tail per gapless run."""
        if self.snapshot is not None:
            for tail in self.tails:
                self.snapshot = self.snapshot.extended(tail)
            self.tails = []
        else:
            self.tails = joined(self.tails)


class Backlog:
    """Entries in order, with the newest of every rollout at hand for more to be merged into. Not thread-safe."""

    def __init__(self) -> None:
        self.entries: deque[Entry] = deque()
        self.size = 0
        self.ticket = 0
        self._newest: dict[str, Entry] = {}

    def __len__(self) -> int:
        return len(self.entries)

    def put(self, snapshot: Snapshot, epoch: int, *, rollback: bool) -> None:
        """A newer snapshot takes the place of an older one that still waits, and of its tails."""
        fresh = is_fresh(snapshot)
        entry = self._entry(snapshot.id, epoch, fresh=fresh)
        entry.anew = entry.anew or fresh
        entry.snapshot, entry.tails = snapshot, []
        entry.rollback = entry.rollback or rollback
        if entry.disposition not in ENDING_DISPOSITIONS:
            entry.disposition = None
        self._resize(entry, ENTRY_BYTES + _snapshot_bytes(snapshot))

    def append(self, tail: Tail, epoch: int) -> None:
        """Tails gather behind what already waits."""
        entry = self._entry(tail.id, epoch)
        entry.tails.append(tail)
        self._resize(entry, entry.size + len(tail.tokens) * TOKEN_BYTES + len(tail.text or ""))

    def mark(self, rollout_id: str, disposition: Disposition, epoch: int) -> None:
        """The last disposition counts."""
        self._entry(rollout_id, epoch).disposition = disposition

    def take(self, most: int, most_bytes: int) -> list[Entry]:
        """Remove the oldest entries: at most `most`, and no more once `most_bytes` are reached."""
        taken: list[Entry] = []
        size = 0
        while self.entries and len(taken) < most and size < most_bytes:
            entry = self.entries.popleft()
            if self._newest.get(entry.id) is entry:
                del self._newest[entry.id]
            size += entry.size
            taken.append(entry)
        self.size -= size
        return taken

    def _entry(self, rollout_id: str, epoch: int, *, fresh: bool = False) -> Entry:
        """The entry to merge into; a new one for a new life of an old id, or for another epoch."""
        entry = self._newest.get(rollout_id)
        if entry is None or entry.epoch != epoch or (fresh and entry.disposition is not None):
            self.ticket += 1
            entry = self._newest[rollout_id] = Entry(rollout_id, self.ticket, epoch)
            self.entries.append(entry)
            self.size += entry.size
        return entry

    def _resize(self, entry: Entry, size: int) -> None:
        self.size += size - entry.size
        entry.size = size


def is_fresh(snapshot: Snapshot) -> bool:
    """Whether it may be the first snapshot of a rollout that was submitted afresh."""
    return snapshot.state is RolloutState.PENDING and snapshot.attempt == 0


def joined(tails: Sequence[Tail]) -> list[Tail]:
    """Tails that follow each other without a gap, as one."""
    result: list[Tail] = []
    for tail in tails:
        last = result[-1] if result else None
        if last is None or last.attempt != tail.attempt or last.start + len(last.tokens) != tail.start:
            result.append(tail)
        else:
            result[-1] = _join(last, tail)
    return result


def _join(first: Tail, second: Tail) -> Tail:
    text, start = second.text, second.text_start
    if first.text is not None:
        text, start = first.text + (second.text or ""), first.text_start
    return replace(
        second,
        start=first.start,
        tokens=first.tokens + second.tokens,
        logprobs=first.logprobs + second.logprobs,
        text=text,
        text_start=start,
    )


def _snapshot_bytes(snapshot: Snapshot) -> int:
    prompt = 4 * len(snapshot.prompt_ids or ())
    return (
        len(snapshot.tokens) * TOKEN_BYTES
        + prompt
        + len(snapshot.text or "")
        + len(snapshot.request.text or "")
    )
