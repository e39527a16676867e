"""The demo: two rounds over one prompts file, with over-sampling, aborts and carried partials.

    python examples/demo.py            (or: make demo)

Round 1 wants 8 whole groups and starts 12: when the 8th is complete, the stragglers are aborted and their tokens kept.
Round 2 finishes them from where they were. What is said at the end is read from the log and the samples, nothing else.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import msgspec

from lifecycle.log import Damaged, read_log
from lifecycle.log.records import RolloutRest, RolloutTransition

HERE = Path(__file__).parent
OUT = Path("demo-out")
COMMON = [
    os.path.relpath(HERE / "prompts.jsonl"),
    "--out",
    str(OUT),
    "--samples-per-prompt",
    "4",
    "--max-new-tokens",
    "200",
]


def run(title: str, *options: str) -> None:
    """One round, shown as a user would type it."""
    print(f"\n== {title}\n$ lifecycle run {' '.join([*COMMON, *options])}", flush=True)
    subprocess.run([sys.executable, "-m", "lifecycle", "run", *COMMON, *options], check=True)


def account() -> str:
    """What happened, in a few sentences."""
    carried: Counter[str] = Counter()
    resumed = aborted = 0
    for line in read_log(OUT / "lifecycle.jsonl"):
        if isinstance(line, Damaged):
            raise SystemExit(f"{line.path}:{line.line}: {line.problem}")
        record = line.record
        if isinstance(record, RolloutTransition):
            aborted += record.trigger == "abort"
            resumed += record.trigger == "restore" and record.reason == "resumed"
        elif isinstance(record, RolloutRest) and record.state == "aborted":
            carried[record.rollout_id] = record.tokens
    samples = [msgspec.json.decode(line) for line in (OUT / "samples.jsonl").read_bytes().splitlines()]
    whole = Counter(sample["group_id"] for sample in samples)
    kept = sum(carried.values())
    return (
        f"{len(whole)} groups of {max(whole.values())} samples were delivered, {len(samples)} samples in all. "
        f"When the target of round 1 was reached, {aborted} rollouts were still running and were aborted; "
        f"{kept} tokens they had were saved.\nIn round 2 {resumed} of them went on from there, so these {kept} tokens "
        f"were generated once and not twice; samples with more than one attempt: "
        f"{sum(sample['attempts'] > 1 for sample in samples)}.\n"
        f"Every step is a line in {OUT}/lifecycle.jsonl; try: lifecycle report {OUT}/lifecycle.jsonl"
    )


def main() -> None:
    """Both rounds and the account of them."""
    shutil.rmtree(OUT, ignore_errors=True)
    run("Round 1: twelve groups are started, eight are wanted", "--target", "8")
    run("Round 2: the same command with --resume finishes what was carried", "--resume")
    print(f"\n== What happened\n{account()}")


if __name__ == "__main__":
    main()
