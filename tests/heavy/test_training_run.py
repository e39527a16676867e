from __future__ import annotations

import gc
from pathlib import Path

import pytest

from tests.support.training import TrainingRun


@pytest.mark.timeout(900)
# Workers of this process die in the middle of accepting and answering, as at SIGKILL; what the operating system would
# close then, the garbage collector closes here, and warns of it.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
def test_twenty_steps_behind_a_real_router(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """20 steps of 64 prompts x 8 samples over 3 dying workers, with a crash: nothing lost, doubled, wrong or left over."""
    run = TrainingRun(
        tmp_path,
        workers=3,
        router=True,
        death_every_s=6.0,
        steps=20,
        prompts=64,
        samples=8,
        over_sampling=1.5,
        max_new_tokens=80,
        crash_at=9,
    )
    run.run()
    run.check()
    with capsys.disabled():
        print(f"\n{run.account()}")  # noqa: T201
    assert run.deaths > 0
    gc.collect()  # here, where the warnings are expected
