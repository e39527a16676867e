"""A scripted training run: a trainer process that is killed once and restarted, over servers that may die at random.

The trainer (`python -m tests.support.training PLAN.json`) collects a batch per step from a finite list of prompts, writes
what was delivered, and changes the weights, also while rollouts are in flight. A `ScriptedRun` lets it live twice and
then checks everything that must hold; `TrainingRun` is that over simulated servers.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import anyio

from adapters.sglang import SGLangBackend
from adapters.sglang.simulator import Brain, SimulatedCluster
from lifecycle import Batch, LifecycleEngine, Policy, RolloutRequest, Snapshot, SqliteStore
from lifecycle.analysis import Warehouse, find_sources, find_violations
from lifecycle.log import read_log
from lifecycle.log.reader import LogLine
from lifecycle.log.records import RolloutTransition
from lifecycle.states import Trigger
from tests.support.router import RouterProcess

SEED = 11


@dataclass(frozen=True)
class Plan:
    """What to train. A step wants `prompts` groups of `samples`; the trainer dies inside step `crash_at`.

    It dies when the groups of that step are nearly whole, or (`crash_in_update`) while its weight update has paused the
    servers. Step n updates the weights in mode `modes[n % len(modes)]`: while rollouts are in flight if the mode is one
    of `in_flight`, or else between two steps. `greedy`: what makes the samples of a group differ is their prompt and
    their length, not a seed. `push_first`: each life begins with a weight update, as of a trainer with a checkpoint.
    """

    folder: str
    url: list[str]
    workers: list[str]
    steps: int
    prompts: int
    samples: int
    over_sampling: float
    max_new_tokens: int
    crash_at: int
    crash_in_update: bool = False
    modes: Sequence[str] = ("retract", "abort", "in_place", "abort")
    in_flight: Sequence[str] = ("abort",)
    greedy: bool = False
    push_first: bool = False

    @property
    def samples_file(self) -> Path:
        """What was delivered, one group a line."""
        return Path(self.folder) / "delivered.jsonl"

    @property
    def log(self) -> Path:
        """The lifecycle log of all processes."""
        return Path(self.folder) / "lifecycle.jsonl"


# -- the trainer ---------------------------------------------------------------------------------------------------


def prompt_ids(number: int) -> list[int]:
    """The prompt of a group."""
    return list(f"prompt {number}: ".encode())


def request(plan: Plan, number: int, index: int) -> RolloutRequest:
    """One sample of a prompt."""
    prompt, budget = prompt_ids(number), plan.max_new_tokens
    sampling: dict[str, Any] = {"sampling_seed": index}
    if plan.greedy:
        prompt, budget = [*prompt, *f"{index}. ".encode()], budget * (index + 1) // plan.samples
        sampling = {"temperature": 0, "ignore_eos": True}
    return RolloutRequest(
        id=f"p{number}.{index}",
        prompt_ids=prompt,
        max_new_tokens=budget,
        sampling_params=sampling,
        group_id=f"p{number}",
        group_size=plan.samples,
        index=index,
    )


def delivered(plan: Plan) -> list[dict[str, Any]]:
    """The groups that were delivered so far."""
    if not plan.samples_file.exists():
        return []
    return [json.loads(line) for line in plan.samples_file.read_text().splitlines()]


def as_line(step: int, members: Sequence[Snapshot]) -> str:
    """A delivered group."""
    samples = [
        {
            "id": one.id,
            "tokens": list(one.tokens),
            "logprobs": list(one.logprobs),
            "versions": one.weight_versions,
            "attempts": len(one.attempts),
            "state": str(one.state),
        }
        for one in members
    ]
    return json.dumps({"group": members[0].request.group, "step": step, "samples": samples}) + "\n"


class Trainer:
    """One life of the trainer process."""

    def __init__(self, plan: Plan, engine: LifecycleEngine) -> None:
        self.plan = plan
        self.engine = engine
        self.settled = 0
        self.done = {line["group"] for line in delivered(plan)}
        self.half = anyio.Event()

    def source(self, held: Counter[str]) -> Iterator[list[RolloutRequest]]:
        """Every group that is neither delivered nor brought back whole."""
        for number in range(self.plan.steps * self.plan.prompts):
            name = f"p{number}"
            if name not in self.done and held[name] < self.plan.samples:
                yield [request(self.plan, number, index) for index in range(self.plan.samples)]

    def accept(self, _members: list[Snapshot]) -> bool:
        """Counts whole groups, so that things can happen in the middle of a step."""
        self.settled += 1
        if self.settled >= self.plan.prompts // 2:
            self.half.set()
        if not self.plan.crash_in_update and self.settled >= self.plan.prompts - 1:
            self.crash()
        return True

    def crash(self) -> None:
        """Die, once, in the step that the plan names."""
        crashed = Path(self.plan.folder) / "crashed"
        if self.engine.step == self.plan.crash_at and not crashed.exists():
            crashed.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    async def update_in_flight(self, version: str, mode: str) -> None:
        """New weights while rollouts stream: they are aborted or stand still, and go on afterwards."""
        await self.half.wait()
        async with self.engine.weight_update(version, mode):
            if self.plan.crash_in_update:
                self.crash()

    async def step(self, step: int, source: Iterator[list[RolloutRequest]]) -> None:
        """Collect, write, update."""
        self.engine.step, self.settled, self.half = step, 0, anyio.Event()
        mode = self.plan.modes[step % len(self.plan.modes)]
        in_flight = mode in self.plan.in_flight
        async with anyio.create_task_group() as tasks:
            if in_flight:
                tasks.start_soon(self.update_in_flight, str(step), mode)
            batch = await self.engine.collect(
                source,
                target=self.plan.prompts,
                filter=self.accept,
                max_groups=round(self.plan.prompts * self.plan.over_sampling),
            )
            self.half.set()
        self.write(step, batch)
        if not in_flight:
            async with self.engine.weight_update(str(step), mode):
                pass

    def write(self, step: int, batch: Batch) -> None:
        """What was delivered is on disk before anything else happens."""
        assert (batch.failed, batch.filtered, batch.stale) == ((), (), ())
        assert batch.reached
        with self.plan.samples_file.open("a") as file:
            file.writelines(as_line(step, members) for members in batch.groups)
            file.flush()
            os.fsync(file.fileno())
        print(f"step {step}: {len(batch.groups)} delivered, {len(batch.carried)} carried", flush=True)  # noqa: T201


async def train(plan: Plan) -> None:
    """All steps that are not done yet."""
    done = len(delivered(plan)) // plan.prompts
    policy = Policy(max_attempts=50, backoff_initial=0.05, backoff_max=1.0)
    async with (
        SGLangBackend(plan.url, workers=plan.workers) as backend,
        LifecycleEngine(
            backend,
            log=plan.log,
            store=SqliteStore(Path(plan.folder) / "snapshots.db"),
            policy=policy,
            version=str(done),
            run_id="training",
            max_in_flight=1024,
            abort_timeout=5.0,
            checkpoint_tokens=16,
        ) as engine,
    ):
        report = await engine.restore(force=True, resume=False)
        assert not report.unreadable
        if plan.push_first:
            async with engine.weight_update(str(done)):
                pass
        held = Counter(handle.rollout.request.group for handle in report.handles)
        trainer = Trainer(plan, engine)
        source = trainer.source(held)
        for step in range(done + 1, plan.steps + 1):
            await trainer.step(step, source)
        books = engine.ledger().as_dict()
        print(json.dumps({"restored": len(report.handles), "ledger": books}), flush=True)  # noqa: T201


# -- the world around it -------------------------------------------------------------------------------------------


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
            [sys.executable, "-m", "tests.support.training", str(plan)],
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


if __name__ == "__main__":
    asyncio.run(train(Plan(**json.loads(Path(sys.argv[1]).read_text()))))
