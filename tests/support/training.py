"""A scripted training run: a trainer process that is killed once and restarted, over servers that may die at random.

A `ScriptedRun` lets the trainer (`trainer.py`) live twice and then checks everything that must hold. `TrainingRun` is
that over simulated servers.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import threading
from collections import Counter
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from adapters.sglang.simulator import Brain, SimulatedCluster
from lifecycle import RolloutRequest
from lifecycle.analysis import Warehouse, find_sources, find_violations
from lifecycle.log import read_log
from lifecycle.log.reader import LogLine
from lifecycle.log.records import RolloutTransition
from lifecycle.states import Trigger
from tests.support.router import RouterProcess
from tests.support.trainer import Plan, delivered, request

SEED = 11


class ScriptedRun:
    """The trainer's two lives, and the checks."""

    def __init__(self, folder: Path, **sizes: Any) -> None:
        self.folder = folder
        self.sizes = sizes
        self.plan: Plan
        self.books: list[dict[str, Any]] = []

    def train(self, url: list[str], workers: list[str]) -> None:
        """Train to the end, through one crash of the trainer."""
        self.plan = Plan(str(self.folder), url, workers, **self.sizes)
        assert self._life() == -signal.SIGKILL
        self.between_lives()
        assert self._life() == 0

    def between_lives(self) -> None:
        """Look at what the dead trainer left."""

    def _life(self) -> int:
        plan = self.folder / "plan.json"
        plan.write_text(json.dumps(asdict(self.plan)))
        done = subprocess.run(
            [sys.executable, "-m", "tests.support.trainer", str(plan)],
            cwd=Path(__file__).resolve().parents[2],
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        print(done.stdout)  # noqa: T201
        last = done.stdout.strip().rpartition("\n")[2]
        if last.startswith("{"):
            self.books.append(json.loads(last))
        return done.returncode

    # -- what must hold --------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Everything."""
        groups = delivered(self.plan)
        wanted = self.plan.steps * self.plan.prompts
        assert Counter(line["group"] for line in groups) == Counter(f"p{number}" for number in range(wanted))
        samples = [sample for line in groups for sample in line["samples"]]
        assert len({sample["id"] for sample in samples}) == wanted * self.plan.samples
        for sample in samples:
            self._check_sample(sample)
        assert self.books[-1]["restored"] > 0
        assert self.books[-1]["ledger"]["balanced"]
        with Warehouse(find_sources([str(self.plan.log)]), strict=True) as warehouse:
            assert [str(violation) for violation in find_violations(warehouse)] == []

    def _check_sample(self, sample: dict[str, Any]) -> None:
        number, _, index = sample["id"][1:].partition(".")
        labels = [span["version"] for span in sample["versions"] for _ in range(span["start"], span["end"])]
        assert sample["state"] == "completed"
        assert len(labels) == len(sample["tokens"]), sample
        different = self.difference(request(self.plan, int(number), int(index)), sample, labels)
        assert different is None, (sample["id"], different, sample["versions"])

    def difference(self, asked: RolloutRequest, sample: dict[str, Any], labels: list[str]) -> object:
        """What is wrong with the tokens of a sample that were made by the weights `labels`; None: nothing."""
        raise NotImplementedError


class TrainingRun(ScriptedRun):
    """A run over simulated servers that die."""

    def __init__(
        self, folder: Path, *, workers: int, router: bool, death_every_s: float, **sizes: Any
    ) -> None:
        super().__init__(folder, **sizes)
        self.router = router
        self.death_every_s = death_every_s
        self.deaths = 0
        self.made_by_the_dead = 0
        self.cluster = SimulatedCluster(
            workers,
            mode="incremental",
            seed=SEED,
            version_dependent=True,
            eos_probability=0.02,
            weight_version="0",
            tokens_per_second=300,
            stream_interval=4,
        )
        self._random = random.Random(SEED)
        self._over = threading.Event()

    def run(self) -> None:
        """Train to the end, through one crash of the trainer."""
        with ExitStack() as stack:
            stack.enter_context(self.cluster)
            workers = self.cluster.urls
            url = [stack.enter_context(RouterProcess(workers)).url] if self.router else workers
            reaper = threading.Thread(target=self._kill_and_restart)
            reaper.start()
            try:
                self.train(url, workers)
            finally:
                self._over.set()
                reaper.join()
            for server in self.cluster.servers:
                server.wait_until(lambda brain: brain.idle, timeout=5.0)
            self.made = self.made_by_the_dead + sum(
                server.call(lambda brain: brain.scheduler.tokens_made) for server in self.cluster.servers
            )

    def _kill_and_restart(self) -> None:
        """One worker at a time, and never the last one; a new one gets the weights of the others."""
        while not self._over.wait(self.death_every_s * self._random.uniform(0.5, 1.5)):
            victim, other = self._random.sample(self.cluster.servers, 2)
            self.made_by_the_dead += victim.call(_count_and_kill)
            victim.kill()
            self.deaths += 1
            self._over.wait(self._random.uniform(0.2, 0.6))
            victim.restart()
            version = other.call(lambda brain: brain.weight_version)
            victim.call(
                lambda brain, version=version: brain.update_weight_version(version, abort_all_requests=False)
            )

    def difference(self, asked: RolloutRequest, sample: dict[str, Any], labels: list[str]) -> object:
        """The first token or logprob that the model would not have made."""
        assert asked.prompt_ids is not None
        return self.cluster[0].brain.model.first_difference(
            asked.prompt_ids,
            sample["tokens"],
            logprobs=sample["logprobs"],
            versions=labels,
            sampling_seed=asked.index,
        )

    def account(self) -> str:
        """What was wasted, and what restarting from the prompt would have wasted."""
        used = sum(len(sample["tokens"]) for line in delivered(self.plan) for sample in line["samples"])
        moves = (line.record for line in read_log(self.plan.log) if isinstance(line, LogLine))
        kept = sum(
            move.tokens
            for move in moves
            if isinstance(move, RolloutTransition) and move.trigger == Trigger.DISPATCH
        )
        wasted = self.made - used
        return (
            f"{self.plan.steps} steps, {self.deaths} worker deaths, 1 crash: {used} tokens delivered, {self.made} "
            f"generated, {kept} kept over resumes. Wasted: {wasted / self.made:.1%}; restarting from the prompt "
            f"would have wasted {(wasted + kept) / (self.made + kept):.1%}"
        )


def _count_and_kill(brain: Brain) -> int:
    """In one step of the server's loop: a dead server forgets what it has made."""
    made = brain.scheduler.tokens_made
    brain.kill()
    return made
