"""`lifecycle run` against a real router with two real servers, in two rounds."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from lifecycle.log import LogLine, read_log
from lifecycle.log.records import RolloutTransition
from tests.cli.conftest import lifecycle, samples
from tests.live.cluster import LiveCluster

EOS = 257
"""End of sequence of the tiny model."""
SHORT, LONG = 20, 1500
SAMPLES = 2
COMMAND_TIMEOUT = 240.0


def answer(url: str, text: str, count: int) -> dict[str, Any]:
    """What a server says to a prompt in one piece."""
    sampling = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
    body = {"text": text, "return_logprob": True, "sampling_params": sampling}
    request = urllib.request.Request(
        f"{url}/generate", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        found: dict[str, Any] = json.load(response)
    return found


def triggers(log: Path) -> dict[str, list[str]]:
    """The triggers of each rollout in the log, in order."""
    found: dict[str, list[str]] = {}
    for line in read_log(log):
        assert isinstance(line, LogLine), line
        if isinstance(line.record, RolloutTransition):
            found.setdefault(line.record.rollout_id, []).append(line.record.trigger)
    return found


def test_two_rounds_through_the_router(cluster: LiveCluster, tmp_path: Path) -> None:
    """The target is reached, what was over-sampled is carried, and the second round finishes it token by token."""
    greedy = {"sampling_params": {"temperature": 0, "ignore_eos": True}}
    texts = {f"l{n}": f"long {n}" for n in range(3)} | {f"s{n}": f"short {n}" for n in range(4)}
    budgets = {name: LONG if name.startswith("l") else SHORT for name in texts}
    file, out = tmp_path / "prompts.jsonl", tmp_path / "out"
    lines = [
        {"id": name, "prompt": text, "max_new_tokens": budgets[name], **greedy}
        for name, text in texts.items()
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    common = (
        *("run", file, "--out", out, "--server", cluster.router.url, "--samples-per-prompt", SAMPLES),
        *("--eos-token-id", EOS, "--no-progress"),
    )

    first = lifecycle(*common, "--target", 4, timeout=COMMAND_TIMEOUT)
    assert first.returncode == 0, first.stderr
    assert {sample["group_id"] for sample in samples(out).values()} == {"s0", "s1", "s2", "s3"}
    second = lifecycle(*common, "--resume", timeout=COMMAND_TIMEOUT)
    assert second.returncode == 0, second.stderr

    found = samples(out)
    assert len(found) == SAMPLES * len(texts)
    for name, text in texts.items():
        whole = answer(cluster.cumulative.url, text, budgets[name])["meta_info"]["output_token_logprobs"]
        for index in range(SAMPLES):
            sample = found[f"{name}/{index}"]
            assert sample["tokens"] == [pair[1] for pair in whole]
            assert sample["logprobs"] == pytest.approx([pair[0] for pair in whole], abs=1e-4)
            assert sample["attempts"] == (2 if name.startswith("l") else 1)
            assert [(v["version"], v["start"], v["end"]) for v in sample["weight_versions"]] == [
                ("default", 0, budgets[name])
            ]

    log = out / "lifecycle.jsonl"
    once = ["dispatch", "observe", "abort", "confirm"]
    assert triggers(log)["l0/0"] == [*once, "restore", "dispatch", "observe", "finish"]
    checked = lifecycle("report", log, "--strict")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    story = lifecycle("log", "replay", "l0/0", log)
    assert story.returncode == 0, story.stderr
