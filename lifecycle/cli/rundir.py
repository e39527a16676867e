"""The directory of a run: a lock, a manifest, the samples, and what a later run must know of an earlier one."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self

import msgspec

from lifecycle.cli.prompts import Prompt
from lifecycle.errors import ConfigurationError, SnapshotError
from lifecycle.snapshot import Snapshot
from lifecycle.states import Disposition, RolloutState
from lifecycle.stores.protocol import StoredRow
from lifecycle.stores.sqlite import SqliteStore

MANIFEST = "run.json"
ENDED = frozenset({Disposition.DELIVERED, Disposition.FILTERED, Disposition.STALE})


class Manifest(msgspec.Struct):
    """What a run was started with; a run that goes on must be the same in all of it."""

    prompts: str
    count: int
    samples_per_prompt: int
    max_new_tokens: int

    def difference(self, other: Manifest) -> str | None:
        """In words, where `other` differs; None if it does not."""
        names = {"samples_per_prompt": "--samples-per-prompt", "max_new_tokens": "--max-new-tokens"}
        for field, option in names.items():
            mine, theirs = getattr(self, field), getattr(other, field)
            if mine != theirs:
                return f"it was started with {option} {mine}, not {theirs}"
        if self.prompts != other.prompts:
            return f"it was started with other prompts ({self.count} of them, or other sampling settings)"
        return None


class RunDirectory:
    """An open run directory, locked for this process. Raises ConfigurationError for what cannot go on."""

    def __init__(self, path: Path, manifest: Manifest, *, resume: bool) -> None:
        self.path = path
        self.samples = path / "samples.jsonl"
        self.log = path / "lifecycle.jsonl"
        self.store = path / "snapshots.db"
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(path / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigurationError(f"--out {path}: cannot write there: {error.strerror}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise ConfigurationError(f"--out {path} is in use by another process") from None
        try:
            self._check(manifest, resume=resume)
        except ConfigurationError:
            self.close()
            raise

    def _check(self, manifest: Manifest, *, resume: bool) -> None:
        file = self.path / MANIFEST
        if file.exists():
            if not resume:
                raise ConfigurationError(
                    f"--out {self.path} already holds a run; add --resume to go on with it, or name another directory"
                )
            try:
                known = msgspec.json.decode(file.read_bytes(), type=Manifest)
            except msgspec.DecodeError as error:
                raise ConfigurationError(f"{file} is damaged: {error}") from error
            difference = known.difference(manifest)
            if difference is not None:
                raise ConfigurationError(f"--resume cannot go on with {self.path}: {difference}")
            return
        if self.samples.exists() or self.store.exists():
            raise ConfigurationError(
                f"--out {self.path} holds samples or snapshots but no {MANIFEST}: not a run of this command"
            )
        partial = file.with_suffix(".tmp")
        partial.write_bytes(msgspec.json.encode(manifest) + b"\n")
        partial.replace(file)

    def __enter__(self) -> Self:
        """The directory is ours until the block ends."""
        return self

    def __exit__(self, *_: object) -> None:
        """Let others in."""
        self.close()

    def close(self) -> None:
        """Give up the lock."""
        os.close(self._lock)


class SamplesFile:
    """`samples.jsonl`: delivered rollouts, one a line; a group is appended in one write and synced."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self.ids: set[str] = set()
        data = path.read_bytes()
        keep = data.rfind(b"\n") + 1
        if keep < len(data):
            os.ftruncate(self._fd, keep)
        for number, line in enumerate(data[:keep].splitlines(), start=1):
            try:
                self.ids.add(msgspec.json.decode(line)["id"])
            except (msgspec.DecodeError, KeyError, TypeError) as error:
                raise ConfigurationError(f"{path}, line {number}: not a sample: {error}") from error

    def write(self, members: Sequence[Snapshot]) -> None:
        """Append those of `members` that are not in the file yet."""
        fresh = [member for member in members if member.id not in self.ids]
        if not fresh:
            return
        data = b"".join(msgspec.json.encode(sample(member)) + b"\n" for member in fresh)
        while data:
            data = data[os.write(self._fd, data) :]
        os.fsync(self._fd)
        self.ids.update(member.id for member in fresh)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


def sample(snapshot: Snapshot) -> dict[str, Any]:
    """One line of `samples.jsonl`; an unknown logprob is null."""
    return {
        "id": snapshot.id,
        "group_id": snapshot.request.group,
        "index": snapshot.request.index,
        "state": str(snapshot.state),
        "finish_reason": snapshot.finish_reason,
        "tokens": list(snapshot.tokens),
        "logprobs": list(snapshot.logprobs),
        "weight_versions": snapshot.weight_versions,
        "text": snapshot.text,
        "attempts": snapshot.attempt,
        "metadata": dict(snapshot.request.metadata),
    }


def remaining(prompts: Iterable[Prompt], rows: Iterable[StoredRow], samples: SamplesFile) -> list[Prompt]:
    """The prompts that the source must still give: not ended, and not whole in the store (those are carried)."""
    stored = {row.id: row for row in rows}
    left: list[Prompt] = []
    for prompt in prompts:
        known = [stored[request.id] for request in prompt.requests if request.id in stored]
        ended = any(row.disposition in ENDED for row in known)
        written = all(request.id in samples.ids for request in prompt.requests)
        if not (ended or written or len(known) == len(prompt.requests)):
            left.append(prompt)
    return left


def reconcile(
    prompts: Iterable[Prompt], store: SqliteStore, samples: SamplesFile
) -> tuple[list[list[Snapshot]], list[SnapshotError]]:
    """Bring file and store to the same account after a crash between the two.

    The store is marked before the file is written. So a group that is marked as delivered, even in part, and whole is
    marked whole, and if any of it is missing in the file, it belongs there. Returns those groups, and what could not
    be read.
    """
    stored = {row.id: row for row in store.rows()}
    missing: list[list[Snapshot]] = []
    problems: list[SnapshotError] = []
    for prompt in prompts:
        rows = [stored[request.id] for request in prompt.requests if request.id in stored]
        if not any(row.disposition == Disposition.DELIVERED for row in rows):
            continue
        whole = len(rows) == len(prompt.requests) and all(row.state == RolloutState.COMPLETED for row in rows)
        for row in rows:
            if row.disposition != Disposition.DELIVERED:
                store.mark(row.id, Disposition.DELIVERED, row.epoch)
        if whole and not all(row.id in samples.ids for row in rows):
            try:
                missing.append([store.load(row.id) for row in rows])
            except SnapshotError as error:
                problems.append(error)
    store.flush()
    return missing, problems
