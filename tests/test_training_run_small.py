from __future__ import annotations

from pathlib import Path

from tests.support.training import TrainingRun


def test_a_small_training_run_loses_and_doubles_nothing(tmp_path: Path) -> None:
    """Worker deaths, weight updates in flight and a crash: every prompt once, every token right, books and log in order."""
    run = TrainingRun(
        tmp_path,
        workers=2,
        router=False,
        death_every_s=0.6,
        steps=4,
        prompts=6,
        samples=2,
        over_sampling=1.5,
        max_new_tokens=60,
        crash_at=2,
    )
    run.run()
    run.check()
    print(run.account())  # noqa: T201
