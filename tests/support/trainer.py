"""The trainer process of a scripted training run: `python -m tests.support.trainer PLAN.json`.

It collects a batch per step from a finite list of prompts, writes what was delivered, and changes the weights, also while
rollouts are in flight. In one step it dies, if it has not died before.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio

from adapters.sglang import SGLangBackend
from lifecycle import Batch, LifecycleEngine, Policy, RolloutRequest, Snapshot, SqliteStore

ENOUGH_LEFT = 20
"""A rollout that has so many tokens to go is not over before an update in flight has begun."""


@dataclass(frozen=True)
class Plan:
    """What to train. A step wants `prompts` groups of `samples`; the trainer dies inside step `crash_at`.

    It dies when the groups of that step are nearly whole, or (`crash_in_update`) in its weight update; until then the
    last group of a step is taken after the update only. Step n updates the weights in mode `modes[n % len(modes)]`:
    while rollouts are in flight if the mode is one of `in_flight`, or else between two steps. `greedy`: what makes the
    samples of a group differ is their prompt and their length, not a seed. `push_first`: each life begins with a
    weight update, as of a trainer with a checkpoint; it also frees servers that a dead trainer left paused.
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
    def crashed(self) -> Path:
        """There once the trainer has died."""
        return Path(self.folder) / "crashed"

    @property
    def log(self) -> Path:
        """The lifecycle log of all processes."""
        return Path(self.folder) / "lifecycle.jsonl"


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


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that no event tells of."""
    while not condition():  # noqa: ASYNC110  any condition
        await anyio.sleep(0.005)


class Trainer:
    """One life of the trainer process."""

    def __init__(self, plan: Plan, engine: LifecycleEngine) -> None:
        self.plan = plan
        self.engine = engine
        self.settled = 0
        self.done = {line["group"] for line in delivered(plan)}
        self.over = False
        self.updated = anyio.Event()

    def source(self, held: Counter[str]) -> Iterator[list[RolloutRequest]]:
        """Every group that is neither delivered nor brought back whole."""
        for number in range(self.plan.steps * self.plan.prompts):
            name = f"p{number}"
            if name not in self.done and held[name] < self.plan.samples:
                yield [request(self.plan, number, index) for index in range(self.plan.samples)]

    async def accept(self, _members: list[Snapshot]) -> bool:
        """Counts whole groups, so that things can happen in the middle of a step."""
        self.settled += 1
        if self.plan.crash_in_update and not self.plan.crashed.exists():
            if self.settled >= self.plan.prompts:
                await self.updated.wait()
        elif self.settled >= self.plan.prompts - 1:
            self.crash()
        return True

    def crash(self) -> None:
        """Die, once, in the step that the plan names."""
        if self.engine.step == self.plan.crash_at and not self.plan.crashed.exists():
            self.plan.crashed.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    async def update_in_flight(self, version: str, mode: str) -> None:
        """New weights while rollouts stream: they are aborted or stand still, and go on afterwards."""
        await until(lambda: self.over or self.in_the_middle())
        async with self.engine.weight_update(version, mode):
            if self.plan.crash_in_update:  # weights take longer than a checkpoint
                await until(lambda: not self.engine.stats().store["backlog_operations"])
                self.crash()
        self.updated.set()

    def in_the_middle(self) -> bool:
        """Whether many rollouts stream: half as many as the step wants groups, each with tokens of this attempt."""
        places = self.engine.places().items()
        flying = [self.engine.handle(name).rollout for name, place in places if place == "in_flight"]
        streaming = [one for one in flying if one.attempt_tokens and one.budget >= ENOUGH_LEFT]
        return len(streaming) >= self.plan.prompts // 2

    async def step(self, step: int, source: Iterator[list[RolloutRequest]]) -> None:
        """Collect, write, update."""
        self.engine.step, self.settled, self.over, self.updated = step, 0, False, anyio.Event()
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
            self.over = True
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


async def train(plan: Plan, store: SqliteStore) -> None:
    """All steps that are not done yet."""
    done = len(delivered(plan)) // plan.prompts
    # A worker that dies may leave a connection that nobody answers: those are the stalls a trainer has time-outs for.
    stalls = {"first_token_timeout": 30.0, "idle_timeout": 30.0}
    policy = Policy(max_attempts=50, backoff_initial=0.05, backoff_max=1.0, **stalls)
    async with (
        SGLangBackend(plan.url, workers=plan.workers) as backend,
        LifecycleEngine(
            backend,
            log=plan.log,
            store=store,
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


if __name__ == "__main__":
    planned = Plan(**json.loads(Path(sys.argv[1]).read_text()))
    with SqliteStore(Path(planned.folder) / "snapshots.db") as opened:
        asyncio.run(train(planned, opened))
