"""`lifecycle run` killed at random moments and at the worst ones, each time followed by --resume."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from lifecycle.states import Disposition
from lifecycle.stores import SqliteStore
from tests.cli.conftest import samples
from tests.heavy.replays import Replay, violations

pytestmark = pytest.mark.timeout(600)

ROOT = Path(__file__).parents[2]
KILLS = 20
CHECKPOINT_TOKENS = 16
SAMPLES_PER_PROMPT = 2
LENGTHS = (40, 120, 200, 280)
PATIENCE = 120.0
SAMPLE_FIELDS = ("group_id", "index", "state", "finish_reason", "tokens", "logprobs", "text", "metadata")


@dataclass(slots=True)
class Fate:
    """What one process said of its tokens until it ended, by rollout."""

    began: Counter[str] = field(default_factory=Counter)
    seen: Counter[str] = field(default_factory=Counter)
    handed: Counter[str] = field(default_factory=Counter)
    durable: Counter[str] = field(default_factory=Counter)


def read_probe(path: Path) -> Fate:
    """The last word on every rollout; the log of the probe itself ends with a whole line."""
    fate = Fate()
    for line in path.read_text().splitlines() if path.exists() else ():
        what, rollout_id, tokens = line.split()
        getattr(fate, what)[rollout_id] = int(tokens)
    return fate


class Life:
    """One run directory, from its first process to the one that ends by itself."""

    def __init__(self, folder: Path, prompts: Path) -> None:
        self.folder = folder
        self.out = folder / "out"
        self.fates: list[Fate] = []
        self._prompts = prompts

    @property
    def log(self) -> Path:
        """The log of all its processes."""
        return self.out / "lifecycle.jsonl"

    def start(self, death: str = "-") -> subprocess.Popen[bytes]:
        """One more process."""
        self.folder.mkdir(exist_ok=True)
        number = len(self.fates)
        command = [
            *(sys.executable, "-m", "tests.heavy.run_child"),
            *(str(self.folder / f"probe-{number}"), death),
            *("run", str(self._prompts), "--out", str(self.out), "--no-progress"),
            *("--samples-per-prompt", str(SAMPLES_PER_PROMPT), "--checkpoint-tokens", str(CHECKPOINT_TOKENS)),
            *("--sim-tokens-per-second", "120", "--sim-workers", "1"),
        ]
        if (self.out / "run.json").exists():
            command.append("--resume")
        with (self.folder / f"said-{number}").open("wb") as said:
            return subprocess.Popen(command, cwd=ROOT, stdout=said, stderr=said)

    def ended(self, process: subprocess.Popen[bytes]) -> None:
        """Remember what it came to; nothing but a kill or a success is allowed."""
        number = len(self.fates)
        assert process.returncode in {0, -9}, (self.folder / f"said-{number}").read_text()
        self.fates.append(read_probe(self.folder / f"probe-{number}"))

    def finish(self) -> None:
        """Resume for the last time."""
        process = self.start()
        try:
            process.wait(PATIENCE)
        finally:
            process.kill()
            process.wait()
        self.ended(process)
        assert process.returncode == 0

    def kill_after(self, seconds: float) -> bool:
        """Start, and kill after so many seconds; False when it was done before."""
        process = self.start()
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
        process.wait()
        self.ended(process)
        return process.returncode != 0


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Short and long prompts whose samples end by their length alone; one of them is text."""
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    lines: list[dict[str, Any]] = [
        {"id": f"p{number}", "input_ids": [number, 1], "max_new_tokens": length}
        for number, length in enumerate(LENGTHS)
    ]
    lines.append({"id": "words", "prompt": "Once upon a time", "max_new_tokens": 160})
    for line in lines:
        line["sampling_params"] = {"ignore_eos": True}
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


@pytest.fixture(scope="module")
def calm(prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], float]:
    """What an uninterrupted run delivers, and how many seconds it takes on this machine."""
    life = Life(tmp_path_factory.mktemp("calm"), prompts)
    began = time.monotonic()
    life.finish()
    taken = time.monotonic() - began
    expected = samples(life.out)
    assert len(expected) == (len(LENGTHS) + 1) * SAMPLES_PER_PROMPT
    return expected, taken


def check_delivered(life: Life, expected: dict[str, Any]) -> None:
    """Every sample once, and as if nothing had happened."""
    delivered = samples(life.out)
    assert delivered.keys() == expected.keys()
    for name, sample in expected.items():
        for key in SAMPLE_FIELDS:
            assert delivered[name][key] == sample[key], f"{name}: {key}"


def check_log(life: Life) -> None:
    """No rule of the machine and of the log is broken, by two readers that know nothing of each other."""
    Replay(life.log)
    found = violations([life.log])
    assert not found, "\n".join(map(str, found))


def generated_again(life: Life) -> tuple[int, int]:
    """Tokens that were generated again and tokens that were kept, over all crashes; no crash may cost more than it must.

    The engine hands a tail over before it holds `checkpoint_tokens` more than it has handed over. What was handed over
    and is not on the disk is what one flush holds. So a rollout comes back with what was durable at least, and lacks
    less than `checkpoint_tokens` beyond what was handed over.
    """
    again = kept = 0
    last: dict[str, Fate] = {}
    for fate in life.fates:
        for rollout_id in {*fate.began, *fate.seen, *fate.handed}:
            back = fate.began[rollout_id]
            before = last.get(rollout_id)
            if before is not None:
                handed = max(before.handed[rollout_id], before.began[rollout_id])
                held = max(before.seen[rollout_id], handed)
                assert held - handed < CHECKPOINT_TOKENS, f"{rollout_id}: {held} held, {handed} handed over"
                assert before.durable[rollout_id] <= back <= handed, f"{rollout_id}: {back} came back"
                again += held - back
                kept += back
            last[rollout_id] = fate
    return again, kept


def test_kill_9_at_20_random_moments(
    tmp_path: Path, prompts: Path, calm: tuple[dict[str, Any], float]
) -> None:
    """Every prompt is delivered exactly once, with the tokens of the calm run; only unsaved tokens come twice."""
    expected, duration = calm
    source = random.Random(20)
    lives: list[Life] = []
    kills, going_on = 0, False
    while kills < KILLS:
        if not going_on:
            lives.append(Life(tmp_path / f"life-{len(lives)}", prompts))
        going_on = lives[-1].kill_after(source.uniform(0.0, duration))
        kills += going_on
    if going_on:
        lives[-1].finish()
    costs: list[tuple[int, int]] = []
    for life in lives:
        check_delivered(life, expected)
        check_log(life)
        costs.append(generated_again(life))
    again, kept = (sum(column) for column in zip(*costs, strict=True))
    print(f"{KILLS} kills over {len(lives)} runs: {kept} tokens kept, {again} generated again")  # noqa: T201
    assert kept > 0


@pytest.mark.parametrize("place", ["before", "within", "between", "after"])
def test_killed_while_writing_a_group(
    tmp_path: Path, prompts: Path, calm: tuple[dict[str, Any], float], place: str
) -> None:
    """Marked as delivered in the store, and not, half or wholly in the file: the next process writes what is missing."""
    first = tmp_path / "first.jsonl"
    first.write_text("".join(prompts.read_text().splitlines(keepends=True)[:2]))
    expected = {name: sample for name, sample in calm[0].items() if sample["group_id"] in {"p0", "p1"}}
    life = Life(tmp_path / "life", first)
    process = life.start(place)
    assert process.wait(PATIENCE) == -9
    life.ended(process)
    with SqliteStore(life.out / "snapshots.db") as store:
        marked = [row.id for row in store.rows() if row.disposition == Disposition.DELIVERED]
    assert sorted(marked) == ["p0/0", "p0/1"]
    data = (life.out / "samples.jsonl").read_bytes()
    assert (data.count(b"\n"), data.endswith(b"\n")) == {
        "before": (0, False),
        "within": (1, False),
        "between": (1, True),
        "after": (2, True),
    }[place]
    life.finish()
    check_delivered(life, expected)
    check_log(life)
