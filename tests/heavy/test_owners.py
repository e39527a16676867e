"""Processes that share a store: one that is stopped past its lease and wakes up, one that is killed, several heirs."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from adapters.sglang.simulator import SimulatedCluster
from lifecycle.log import LogLine, read_log
from lifecycle.log.records import AbortSent, RolloutDisposition, RolloutRest, RolloutTransition
from lifecycle.states import Disposition
from lifecycle.stores import SqliteStore
from tests.heavy.owner_child import LONG, ROLLOUTS, SHORT
from tests.heavy.replays import Replay, violations

pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).parents[2]
PATIENCE = 90.0
TTL = 1.5
IDS = {request.id for request in ROLLOUTS}


class Owner:
    """A process of `owner_child`, and what it has said so far."""

    def __init__(self, mode: str, folder: Path, url: str, name: str) -> None:
        self.log = folder / f"{name}.jsonl"
        self.restored: set[str] = set()
        self.fenced: set[str] = set()
        self.delivered: dict[str, tuple[list[int], list[float]]] = {}
        self.ready = False
        self.done: tuple[dict[str, str], dict[str, Any]] | None = None
        words = [mode, folder / "shared.db", url, self.log, TTL]
        command = [sys.executable, "-m", "tests.heavy.owner_child", *map(str, words)]
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
        self._rest = b""

    def until(self, condition: Callable[[Owner], bool]) -> None:
        """Listen until something is so."""
        assert self.process.stdout is not None
        deadline = time.monotonic() + PATIENCE
        while not condition(self):
            left = deadline - time.monotonic()
            assert left > 0, "it does not come about"
            if select.select([self.process.stdout], [], [], left)[0]:
                data = os.read(self.process.stdout.fileno(), 1 << 20)
                assert data, f"it ended with {self.process.wait()}"
                *lines, self._rest = (self._rest + data).split(b"\n")
                for line in lines:
                    self._hear(*json.loads(line))

    def _hear(self, what: str, *words: Any) -> None:
        if what == "ready":
            self.ready = True
        elif what == "restored":
            assert not self.restored & set(words), "restored twice"
            self.restored.update(words)
        elif what == "fenced":
            self.fenced.add(words[0])
        elif what == "delivered":
            assert words[0] not in self.delivered, "delivered twice"
            self.delivered[words[0]] = words[1:]  # type: ignore[assignment]
        else:
            self.done = words  # type: ignore[assignment]

    def end(self) -> None:
        """Listen to the end, and see that it ended well."""
        self.until(lambda owner: owner.done is not None)
        assert self.done is not None
        places, ledger = self.done
        assert places == {}
        assert ledger["balanced"]
        assert self.process.wait(PATIENCE) == 0

    def close(self) -> None:
        """Make sure that it is gone."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(PATIENCE)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def cluster() -> Iterator[SimulatedCluster]:
    """One simulated server, in the process of the test."""
    with SimulatedCluster(mode="incremental", tokens_per_second=100) as running:
        yield running


@pytest.fixture
def start(tmp_path: Path, cluster: SimulatedCluster) -> Iterator[Callable[[str, str], Owner]]:
    """Start a process by mode and name; all are gone at the end."""
    owners: list[Owner] = []

    def begin(mode: str, name: str) -> Owner:
        owners.append(Owner(mode, tmp_path, cluster.urls[0], name))
        return owners[-1]

    yield begin
    for owner in owners:
        owner.close()


def check_all_delivered_once(cluster: SimulatedCluster, store: Path, *owners: Owner) -> None:
    """Every rollout reached one caller in one process, with the tokens of the model and none missing."""
    found = [(name, *sample) for owner in owners for name, sample in owner.delivered.items()]
    assert sorted(name for name, *_ in found) == sorted(IDS)
    requests = {request.id: request for request in ROLLOUTS}
    for name, tokens, logprobs in found:
        request = requests[name]
        assert len(tokens) == request.max_new_tokens
        prompt = list(request.prompt_ids or ())
        wrong = cluster[0].call(
            lambda brain, p=prompt, t=tokens, n=logprobs: brain.model.first_difference(p, t, logprobs=n)
        )
        assert wrong is None, f"{name}: {wrong}"
    with SqliteStore(store) as opened:
        assert {row.disposition for row in opened.rows()} == {str(Disposition.DELIVERED)}
        assert not opened.pending()
    logs = [owner.log for owner in owners]
    assert Replay(*logs).delivered.keys() == IDS
    breaches = violations(logs)
    assert not breaches, "\n".join(map(str, breaches))


def records(log: Path, kind: type[Any]) -> list[Any]:
    """The lines of one event."""
    return [
        line.record for line in read_log(log) if isinstance(line, LogLine) and isinstance(line.record, kind)
    ]


@pytest.mark.parametrize("wakes", ["while the heir is at it", "after the heir is through"])
def test_an_owner_stopped_past_its_lease(
    tmp_path: Path, cluster: SimulatedCluster, start: Callable[[str, str], Owner], wakes: str
) -> None:
    """It is fenced off what the heir took over: it ends its copies, delivers none of them, and loses nothing else."""
    owner = start("own", "owner")
    short = {request.id for request in ROLLOUTS if request.max_new_tokens == SHORT}
    owner.until(lambda one: one.ready and one.delivered.keys() >= short)
    owner.process.send_signal(signal.SIGSTOP)
    heir = start("heir", "heir")
    heir.until(lambda one: bool(one.restored))
    if wakes == "after the heir is through":
        heir.end()
    owner.process.send_signal(signal.SIGCONT)
    owner.end()
    if heir.done is None:
        heir.end()
    assert heir.restored == IDS - owner.delivered.keys()
    assert owner.fenced == heir.restored
    ends = {record.rollout_id: record for record in records(owner.log, RolloutRest)}
    assert {ends[name].disposition for name in owner.fenced} == {"none"}
    given_up = [line for line in records(owner.log, RolloutDisposition) if line.reason == "fenced"]
    assert {line.rollout_id for line in given_up} == owner.fenced
    if wakes == "while the heir is at it":
        fenced = [line for line in records(owner.log, RolloutTransition) if line.reason == "fenced"]
        assert {line.rollout_id for line in fenced if line.trigger == "abort"} <= owner.fenced
        assert fenced
        assert records(owner.log, AbortSent)
    check_all_delivered_once(cluster, tmp_path / "shared.db", owner, heir)


def test_two_engines_restoring_from_one_store_at_once(
    tmp_path: Path, cluster: SimulatedCluster, start: Callable[[str, str], Owner]
) -> None:
    """What a killed owner held is shared out between them, nothing to both and nothing to neither."""
    owner = start("own", "owner")
    owner.until(lambda one: one.ready)
    heirs = [start("heir", "heir-0"), start("heir", "heir-1")]
    for heir in heirs:
        heir.until(lambda one: one.ready)
    owner.process.kill()
    owner.process.wait()
    with SqliteStore(tmp_path / "shared.db") as store:
        marked = {row.id for row in store.rows() if row.disposition == Disposition.DELIVERED}
    for heir in heirs:
        heir.end()
    assert not heirs[0].restored & heirs[1].restored
    assert heirs[0].restored | heirs[1].restored == IDS - marked
    assert all(len(heir.delivered[name][0]) in {SHORT, LONG} for heir in heirs for name in heir.restored)
