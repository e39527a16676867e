"""A rollout in two processes at once: fine where the log says that one of the copies was given up, and only there."""

from __future__ import annotations

from pathlib import Path

import pytest

from lifecycle.analysis import Warehouse, find_sources, find_violations
from lifecycle.stores import MemoryStore
from lifecycle.testing.backend import Pause, ScriptedBackend, finish, tokens
from lifecycle.testing.clock import run_virtual
from tests.support.driving import engine_on, request, simple, until


@pytest.fixture
def logs(tmp_path: Path) -> list[Path]:
    """An owner that is overtaken in the middle of a stream and hears of it at the end of that."""
    paths = [tmp_path / "owner.jsonl", tmp_path / "heir.jsonl"]

    async def overtake() -> None:
        store = MemoryStore()
        slow = ScriptedBackend(lambda _: [tokens(1), Pause(5), tokens(2), finish()])
        async with engine_on(slow, paths[0], store=store, checkpoint_tokens=1) as owner:  # type: ignore[arg-type]
            handle = owner.submit(request())
            await until(lambda: len(handle.rollout.tokens) == 1)
            async with engine_on(ScriptedBackend(simple(2)), paths[1], store=store) as heir:  # type: ignore[arg-type]
                (other,) = (await heir.restore(force=True)).handles
                await other.wait()
            await until(lambda: handle.at_rest)
            await until(lambda: owner.places() == {})

    run_virtual(overtake)
    return paths


def kinds(paths: list[Path]) -> set[str]:
    """What a strict reading finds."""
    with Warehouse(find_sources([str(path) for path in paths]), strict=True) as warehouse:
        return {violation.kind for violation in find_violations(warehouse)}


def test_a_copy_that_was_given_up(logs: list[Path]) -> None:
    """Its last attempt may outlive the takeover, in whatever order the files are read."""
    assert kinds(logs) == set()
    assert kinds(logs[::-1]) == set()


def test_a_copy_that_was_not(logs: list[Path]) -> None:
    """The same without the line that says so is two live attempts."""
    lines = logs[0].read_text().splitlines(keepends=True)
    kept = [line for line in lines if '"rollout.disposition"' not in line]
    assert len(kept) == len(lines) - 1
    logs[0].write_text("".join(kept))
    assert "two_live_attempts" in kinds(logs)
