"""`lifecycle run` that writes down, in a file that outlives SIGKILL, how far its tokens have come.

    python -m tests.heavy.run_child PROBE DEATH run PROMPTS --out DIR …

PROBE gets one line per fact: `began ID N` (a rollout was restored with N tokens), `seen ID N` (the engine holds N tokens of a rollout), `handed ID N` (its first N tokens
were handed to the store's writer), `durable ID N` (they are on the disk). DEATH is `-`, or a place in the writing of
the first group of samples at which the process kills itself: `before`, `within` a line, `between` two lines, `after`.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lifecycle.cli import main
from lifecycle.cli.rundir import SamplesFile
from lifecycle.engine.core import Core
from lifecycle.engine.flight import Flight
from lifecycle.engine.recorder import Recorder
from lifecycle.engine.storage import Storage
from lifecycle.events import StreamEvent
from lifecycle.rollout import Rollout
from lifecycle.snapshot import Snapshot, Tail
from lifecycle.stores import SqliteStore


class Probe:
    """Wraps the methods through which tokens go."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._written: dict[str, int] = {}

    def note(self, what: str, rollout_id: str, tokens: int) -> None:
        """One write, one line: a kill leaves whole lines."""
        os.write(self._file, f"{what} {rollout_id} {tokens}\n".encode())

    def attach(self) -> None:
        """From here on everything is noted."""
        restored, absorb, put, append = Recorder.restored, Core.absorb, Storage.put, Storage.append
        store_put, store_append, flush = SqliteStore.put, SqliteStore.append, SqliteStore.flush

        def noted_restored(recorder: Recorder, rollout: Rollout, *rest: Any, **how: Any) -> None:
            self.note("began", rollout.id, len(rollout.tokens))
            restored(recorder, rollout, *rest, **how)

        def noted_absorb(core: Core, flight: Flight, batch: Sequence[StreamEvent]) -> bool:
            over = absorb(core, flight, batch)
            self.note("seen", flight.rollout.id, len(flight.rollout.tokens))
            return over

        def noted_put(storage: Storage, snapshot: Snapshot, *rest: Any, **how: Any) -> None:
            put(storage, snapshot, *rest, **how)
            self.note("handed", snapshot.id, len(snapshot.tokens))

        def noted_append(storage: Storage, tail: Tail, epoch: int) -> None:
            append(storage, tail, epoch)
            self.note("handed", tail.id, tail.start + len(tail.tokens))

        def noted_store_put(store: SqliteStore, snapshot: Snapshot, *rest: Any, **how: Any) -> None:
            store_put(store, snapshot, *rest, **how)
            self._written[snapshot.id] = len(snapshot.tokens)

        def noted_store_append(store: SqliteStore, tail: Tail, epoch: int) -> None:
            store_append(store, tail, epoch)
            self._written[tail.id] = tail.start + len(tail.tokens)

        def noted_flush(store: SqliteStore) -> None:
            flush(store)
            for rollout_id, tokens in self._written.items():
                self.note("durable", rollout_id, tokens)
            self._written.clear()

        for owner, name, function in (
            (Recorder, "restored", noted_restored),
            (Core, "absorb", noted_absorb),
            (Storage, "put", noted_put),
            (Storage, "append", noted_append),
            (SqliteStore, "put", noted_store_put),
            (SqliteStore, "append", noted_store_append),
            (SqliteStore, "flush", noted_flush),
        ):
            setattr(owner, name, function)


def die_while_writing(place: str) -> None:
    """Kill this process in the middle of delivering its first group."""
    write = SamplesFile.write

    def fatal_write(file: SamplesFile, members: Sequence[Snapshot]) -> None:
        if place == "between":
            write(file, members[:1])
        elif place != "before":
            write(file, members)
        if place == "within":
            os.ftruncate(file._fd, os.fstat(file._fd).st_size - 40)
        os.kill(os.getpid(), signal.SIGKILL)

    SamplesFile.write = fatal_write  # type: ignore[method-assign]


if __name__ == "__main__":
    probe_file, death, *arguments = sys.argv[1:]
    Probe(Path(probe_file)).attach()
    if death != "-":
        die_while_writing(death)
    main(arguments)
