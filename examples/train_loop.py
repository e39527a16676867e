"""A whole GRPO-style loop in one screen: over-sampling, rewards, advantages, a weight update at every step.

    python examples/train_loop.py [LOG.jsonl]         then: lifecycle report LOG.jsonl

Two simulated SGLang servers play the model, so nothing is learned here: each update only gives the weights a new label
and, with it, other tokens. Put your servers' URLs, `reward` and `train` in their places and the loop stays as it is.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Sequence
from itertools import count
from statistics import mean, pstdev

from adapters.sglang import SGLangBackend
from adapters.sglang.simulator import SimulatedCluster
from lifecycle import Batch, LifecycleEngine, Policy, RolloutRequest, Snapshot

STEPS, GROUPS, SAMPLES, OVER_SAMPLING = 5, 8, 4, 1.5


def prompts() -> Iterator[list[RolloutRequest]]:
    """Groups: SAMPLES requests for one prompt, each with a seed of its own."""
    for number in count():
        ids = list(f"Question {number}: ".encode())
        yield [
            RolloutRequest(
                prompt_ids=ids,
                max_new_tokens=120,
                sampling_params={"sampling_seed": i},
                group_id=f"q{number}",
                group_size=SAMPLES,
                index=i,
            )
            for i in range(SAMPLES)
        ]


def reward(sample: Snapshot) -> float:
    """Short answers are good ones."""
    return 1.0 - len(sample.tokens) / 120


def useful(group: Sequence[Snapshot]) -> bool:
    """Without a difference in reward there is nothing to learn from a group."""
    return pstdev(map(reward, group)) > 0.12


def train(batch: Batch, policy: Policy) -> float:
    """Advantages within each group; a trainer would take its gradient step with them here."""
    size = 0.0
    for group in batch.groups:
        rewards = [reward(sample) for sample in group]
        advantages = [(one - mean(rewards)) / (pstdev(rewards) + 1e-6) for one in rewards]
        size += sum(
            abs(advantage) * sum(policy.loss_mask(sample))
            for advantage, sample in zip(advantages, group, strict=True)
        )
    return size


def account(step: int, batch: Batch) -> str:
    """What happened in a step, in two lines."""
    samples = [sample for group in batch.groups for sample in group]
    resumed = [sample for sample in samples if len(sample.attempts) > 1]
    mixed = sum(len({span.version for span in sample.spans}) > 1 for sample in samples)
    partial = [sample for group in batch.carried for sample in group if sample.tokens and not sample.final]
    return (
        f"step {step}: {len(batch.groups)} groups of {SAMPLES}, mean reward {mean(map(reward, samples)):.3f}, "
        f"{len(batch.filtered)} groups filtered, {len(resumed)} samples resumed, {mixed} of mixed weights\n"
        f"        {len(batch.carried)} groups carried with {len(partial)} partial samples "
        f"({sum(len(sample.tokens) for sample in partial)} tokens kept); "
        f"aborts: {batch.report.counts if batch.report else 'none'}"
    )


async def main(log: str | None) -> None:
    """The loop."""
    with SimulatedCluster(
        2, version_dependent=True, eos_probability=0.02, tokens_per_second=200, weight_version="0"
    ) as servers:
        async with (
            SGLangBackend(servers.urls) as backend,
            LifecycleEngine(
                backend, log=log, version="0", policy=Policy(max_staleness=2, mask_off_policy=True)
            ) as engine,
        ):
            source = prompts()
            for engine.step in range(1, STEPS + 1):
                batch = await engine.collect(
                    source, target=GROUPS, filter=useful, max_groups=int(GROUPS * OVER_SAMPLING)
                )
                async with engine.weight_update(str(engine.step)):
                    train(batch, engine.policy)
                print(account(engine.step, batch))
            books = engine.ledger()
            print(
                f"tokens: {books.observed} generated, {books.tokens['delivered']} delivered, "
                f"{books.saved_tokens} kept over a resume instead of being generated again, "
                f"{sum(books.wasted.values()) + sum(books.dropped.values())} wasted; balanced: {books.balanced}"
            )


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else None))
