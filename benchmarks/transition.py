"""What one state transition costs with its log line, in CPU time.

    python -m benchmarks.transition [--quick] [--json]

Rollouts walk `pending → streaming → partial → aborting → aborted → pending …` through the machine and the engine's
recorder, and every arc becomes a line in a file. The lines are counted afterwards.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.rows import Row, command
from lifecycle.engine.recorder import Recorder
from lifecycle.engine.settings import EngineSettings
from lifecycle.engine.storage import Storage
from lifecycle.events import TokenSlice
from lifecycle.log.journal import Journal
from lifecycle.request import RolloutRequest
from lifecycle.rollout import Rollout
from lifecycle.states import Reason, Trigger
from lifecycle.versions import VersionOrder

ARCS = 5
PIECE = TokenSlice([1, 2, 3], [-0.1, -0.2, -0.3], "7", "")
REQUEST = RolloutRequest(prompt_ids=range(16), max_new_tokens=4096)


class Stopwatch:
    """A clock that costs what the engine's does."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()


def walk(recorder: Recorder, laps: int) -> None:
    """`ARCS` logged arcs a lap."""
    clock = recorder.clock
    rollout = Rollout(REQUEST)
    for lap in range(laps):
        if lap % 8 == 0:
            rollout = Rollout(REQUEST, now=clock.monotonic())
        recorder.change(rollout, rollout.dispatch("0" * 32, clock.monotonic(), clock.wall()))
        change = rollout.observe(PIECE, clock.monotonic(), clock.wall())
        assert change is not None
        recorder.change(rollout, change)
        recorder.change(rollout, rollout.move(Trigger.ABORT, clock.monotonic(), reason=Reason.REQUESTED))
        recorder.change(rollout, rollout.move(Trigger.CONFIRM, clock.monotonic(), reason=Reason.REQUESTED))
        recorder.change(rollout, rollout.restore(clock.monotonic(), Reason.RESUMED))


def once(path: Path, laps: int) -> float:
    """CPU microseconds per transition."""
    journal = Journal(path)
    storage = Storage(None, journal, EngineSettings())
    recorder = Recorder(journal, storage, Stopwatch(), VersionOrder("7"))
    walk(recorder, 100)
    began = time.process_time()
    walk(recorder, laps)
    journal.flush()
    taken = time.process_time() - began
    journal.close()
    with path.open("rb") as lines:
        assert sum(1 for _ in lines) == (laps + 100) * ARCS
    return taken * 1e6 / laps / ARCS


def measure(quick: bool) -> list[Row]:
    """The row about transitions."""
    rounds, laps = (3, 1_000) if quick else (9, 4_000)
    with tempfile.TemporaryDirectory() as folder:
        costs = [once(Path(folder) / f"{number}.jsonl", laps) for number in range(rounds)]
    note = f"median of {rounds}, best {min(costs):.1f} µs"
    return [Row("one state transition with its log line", statistics.median(costs), 12, "µs", note)]


if __name__ == "__main__":
    command(__doc__, measure)
