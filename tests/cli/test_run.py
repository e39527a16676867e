from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from adapters.sglang.simulator import SimulatedCluster
from lifecycle.log import LogLine, read_log
from lifecycle.log.records import EngineStopped, RolloutRestored, RolloutTransition
from lifecycle.machine import ROLLOUT
from lifecycle.states import REST_STATES, RolloutState, Trigger
from tests.cli.conftest import lifecycle, samples

Write = Callable[..., Path]
FAST = ("--sim-tokens-per-second", "400", "--no-progress")
STREAMING_LINE = '"trigger":"observe","source":"streaming"'
PROMPTS = Path(__file__).parents[2] / "examples" / "prompts.jsonl"


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run over the example prompts that nothing disturbs."""
    out = tmp_path_factory.mktemp("uninterrupted") / "out"
    done = lifecycle("run", PROMPTS, "--out", out, "--samples-per-prompt", 4, "--max-new-tokens", 200, *FAST)
    assert done.returncode == 0, done.stderr
    return out


def chains(log: Path) -> dict[str, list[RolloutTransition]]:
    """Each rollout's transitions, checked: every line legal, every chain unbroken, from `pending` to rest."""
    found: dict[tuple[str, str], list[RolloutTransition]] = defaultdict(list)
    starts: dict[tuple[str, str], str] = {}
    for line in read_log(log):
        assert isinstance(line, LogLine), line
        record = line.record
        if isinstance(record, RolloutRestored):
            starts[record.process_id, record.rollout_id] = record.state
        if isinstance(record, RolloutTransition):
            found[record.process_id, record.rollout_id].append(record)
    for key, records in found.items():
        state = starts.get(key, "pending")
        for record in records:
            assert record.source == state, f"{key}: {state} → {record.source}"
            assert ROLLOUT.target(RolloutState(record.source), Trigger(record.trigger)) == record.dest
            state = record.dest
        assert state in REST_STATES, f"{key} ended in {state}"
    return {key[1]: records for key, records in found.items()}


def test_a_target_is_reached_and_the_rest_is_carried_and_finished(tmp_path: Path, prompts: Write) -> None:
    """Two rounds leave the same tokens and logprobs as one uninterrupted run with the same seed."""
    endless = {"sampling_params": {"ignore_eos": True}}
    short = [{"id": f"s{n}", "prompt": f"short {n}", "max_new_tokens": 20, **endless} for n in range(8)]
    long = [{"id": f"l{n}", "prompt": f"long {n}", "max_new_tokens": 300, **endless} for n in range(4)]
    file, out, calm = prompts(*long, *short), tmp_path / "out", tmp_path / "calm"
    common = ("--samples-per-prompt", 4, "--no-progress", "--sim-tokens-per-second", 60)
    first = lifecycle("run", file, "--out", out, "--target", 8, *common)
    assert first.returncode == 0, first.stderr
    assert {sample["group_id"] for sample in samples(out).values()} == {f"s{n}" for n in range(8)}
    assert len(samples(out)) == 8 * 4
    chains(out / "lifecycle.jsonl")
    second = lifecycle("run", file, "--out", out, "--resume", *common)
    assert second.returncode == 0, second.stderr
    assert lifecycle("run", file, "--out", calm, *common).returncode == 0
    ours, theirs = samples(out), samples(calm)
    assert ours.keys() == theirs.keys()
    for name, sample in theirs.items():
        for field in ("tokens", "logprobs", "text", "finish_reason", "state", "metadata"):
            assert ours[name][field] == sample[field], f"{name}: {field}"
    assert [ours[f"l{n}/{i}"]["attempts"] for n in range(4) for i in range(4)] == [2] * 16
    chains(out / "lifecycle.jsonl")
    assert "delivered" in second.stdout
    assert "samples.jsonl" in second.stdout


def test_going_on_with_nothing_left_changes_nothing(tmp_path: Path, uninterrupted: Path) -> None:
    """--resume on a complete run delivers nothing twice."""
    before = (uninterrupted / "samples.jsonl").read_bytes()
    common = ("--samples-per-prompt", 4, "--max-new-tokens", 200)
    done = lifecycle("run", PROMPTS, "--out", uninterrupted, "--resume", *common, *FAST)
    assert done.returncode == 0, done.stderr
    assert (uninterrupted / "samples.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("--samples-per-prompt", 2), "--samples-per-prompt 4, not 2"),
        (("--max-new-tokens", 100), "--max-new-tokens 200, not 100"),
        (("--seed", 9), "other prompts"),
    ],
)
def test_resuming_something_else_is_refused(
    uninterrupted: Path, change: tuple[object, ...], words: str
) -> None:
    """Other prompts, another n or another length: exit 2, and what differs."""
    common = ("--samples-per-prompt", 4, "--max-new-tokens", 200)
    done = lifecycle("run", PROMPTS, "--out", uninterrupted, "--resume", *common, *FAST, *change)
    assert done.returncode == 2
    assert words in done.stderr


def test_a_directory_with_a_run_needs_resume(uninterrupted: Path) -> None:
    """Nothing is overwritten by accident."""
    done = lifecycle("run", PROMPTS, "--out", uninterrupted, *FAST)
    assert done.returncode == 2
    assert "already holds a run; add --resume" in done.stderr


def test_resume_of_nothing_starts(tmp_path: Path, prompts: Write) -> None:
    """--resume may stand in a script from the first call on."""
    file = prompts({"input_ids": [1, 2, 3], "max_new_tokens": 5})
    done = lifecycle("run", file, "--out", tmp_path / "out", "--resume", *FAST)
    assert done.returncode == 0, done.stderr
    assert len(samples(tmp_path / "out")) == 1


def test_a_server_that_is_not_there_is_one_clear_sentence(tmp_path: Path, prompts: Write) -> None:
    """Exit 1, the URL, no traceback; and the run can go on later."""
    file = prompts({"input_ids": [1]})
    done = lifecycle(
        "run", file, "--out", tmp_path / "out", "--server", "http://127.0.0.1:9", "--no-progress"
    )
    assert done.returncode == 1
    assert "cannot reach http://127.0.0.1:9" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_target_beyond_the_prompts_ends_short(tmp_path: Path, prompts: Write) -> None:
    """What could be delivered is; exit 1 says that it was not enough."""
    file = prompts({"input_ids": [1], "max_new_tokens": 4})
    done = lifecycle("run", file, "--out", tmp_path / "out", "--target", 3, *FAST)
    assert done.returncode == 1
    assert "1 of 3 groups" in done.stderr
    assert len(samples(tmp_path / "out")) == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--target", "0"), "--target"),
        (("--transport", "carrier-pigeon"), "'auto', 'fast', 'httpx'"),
        (("--samples-per-prompt", "many"), "--samples-per-prompt"),
        (("--no-such-option",), "No such option"),
        (("--api-key-env", "NOT_SET_ANYWHERE"), "NOT_SET_ANYWHERE"),
    ],
)
def test_a_wrong_option_says_what_would_be_right(
    tmp_path: Path, prompts: Write, options: tuple[str, ...], words: str
) -> None:
    """Exit 2, before anything starts."""
    done = lifecycle("run", prompts({"input_ids": [1]}), "--out", tmp_path / "out", *FAST, *options)
    assert done.returncode == 2
    assert words in done.stderr


def test_a_second_process_is_kept_out(tmp_path: Path, prompts: Write) -> None:
    """The lock on the directory belongs to one process."""
    file = prompts({"input_ids": [1], "sampling_params": {"ignore_eos": True}, "max_new_tokens": 4000})
    out = tmp_path / "out"
    with running(file, out, "--sim-tokens-per-second", "20") as process:
        wait_for_line(out / "lifecycle.jsonl", STREAMING_LINE)
        done = lifecycle("run", file, "--out", out, "--resume", *FAST)
        assert done.returncode == 2
        assert "in use by another process" in done.stderr
        process.send_signal(signal.SIGTERM)
        assert process.wait(40) == 143


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_partials_and_the_next_run_goes_on(
    tmp_path: Path, prompts: Write, signum: signal.Signals, status: int
) -> None:
    """Nothing is lost on Ctrl-C: every line is in the log, every token in the store."""
    ids = [{"id": f"p{n}", "input_ids": [n, 1], "sampling_params": {"ignore_eos": True}} for n in range(4)]
    file, out, length = prompts(*ids), tmp_path / "out", ("--max-new-tokens", "150")
    with running(file, out, *length, "--sim-tokens-per-second", "50") as process:
        wait_for_line(out / "lifecycle.jsonl", STREAMING_LINE)
        process.send_signal(signum)
        assert process.wait(40) == status
    chains(out / "lifecycle.jsonl")
    last = [line.record for line in read_log(out / "lifecycle.jsonl") if isinstance(line, LogLine)][-1]
    assert isinstance(last, EngineStopped)
    assert last.ledger["balanced"] is True
    assert last.states == {"resumable": 4}
    done = lifecycle("run", file, "--out", out, "--resume", *length, *FAST)
    assert done.returncode == 0, done.stderr
    calm = tmp_path / "calm"
    assert lifecycle("run", file, "--out", calm, *length, *FAST).returncode == 0
    ours, theirs = samples(out), samples(calm)
    assert {k: v["tokens"] for k, v in ours.items()} == {k: v["tokens"] for k, v in theirs.items()}
    assert all(sample["attempts"] == 2 for sample in ours.values())


def test_named_servers_are_used_and_keys_are_never_shown(tmp_path: Path, prompts: Write) -> None:
    """The key reaches the server, and no file and no output of ours."""
    secret = "not-a-real-key-7f3a"
    file, out = prompts({"prompt": "Hello", "max_new_tokens": 6}), tmp_path / "out"
    with SimulatedCluster(workers=2, api_key=secret) as cluster:
        servers = [part for url in cluster.urls for part in ("--server", url)]
        refused = lifecycle("run", file, "--out", tmp_path / "no", *servers, "--no-progress")
        done = lifecycle(
            "run", file, "--out", out, *servers, "--api-key-env", "ROLLOUT_TEST_KEY", "--no-progress",
            ROLLOUT_TEST_KEY=secret,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert refused.returncode == 1
    assert "HTTP 401" in refused.stderr
    assert samples(out)["p1/0"]["text"]
    for text in (
        done.stdout,
        done.stderr,
        *(f.read_bytes().decode("latin-1") for f in out.iterdir() if f.is_file()),
    ):
        assert secret not in text


class running:  # noqa: N801  reads as a statement
    """A run that goes on until the test stops it."""

    def __init__(self, file: Path, out: Path, *options: str) -> None:
        command = [
            sys.executable,
            "-m",
            "lifecycle",
            "run",
            str(file),
            "--out",
            str(out),
            "--no-progress",
            *options,
        ]
        self.said = out.with_suffix(".said")
        with self.said.open("wb") as said:
            self.process = subprocess.Popen(command, stdout=said, stderr=said)

    def __enter__(self) -> subprocess.Popen[bytes]:
        return self.process

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def wait_for_line(file: Path, words: str, seconds: float = 40) -> None:
    """Until `words` stand in `file`, or fail."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if file.exists() and words in file.read_text():
            return
        time.sleep(0.02)
    said = file.parent.with_suffix(".said").read_text()
    raise AssertionError(f"{words} did not appear in {file} within {seconds} s; it said:\n{said}")


def test_the_embedded_simulator_ends_with_its_parent(tmp_path: Path, prompts: Write) -> None:
    """Even after SIGKILL nothing of ours is left running."""
    file = prompts({"input_ids": [1], "sampling_params": {"ignore_eos": True}, "max_new_tokens": 4000})
    with running(file, tmp_path / "out", "--sim-tokens-per-second", "20") as process:
        wait_for_line(tmp_path / "out" / "lifecycle.jsonl", STREAMING_LINE)
        children = list(child_pids(process.pid))
        assert children
        process.kill()
        process.wait()
        deadline = time.monotonic() + 10
        while any(alive(pid) for pid in children):
            assert time.monotonic() < deadline, "the simulator outlived its parent"
            time.sleep(0.02)


def child_pids(parent: int) -> Iterator[int]:
    """Processes whose parent is `parent`."""
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            if re.search(rf"^PPid:\s+{parent}$", status.read_text(), re.MULTILINE):
                yield int(status.parent.name)
        except OSError:
            continue


def alive(pid: int) -> bool:
    """Whether a process is there and not a zombie."""
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def test_progress_is_plain_lines_where_there_is_no_terminal(tmp_path: Path, prompts: Write) -> None:
    """States, rate and aborts, on standard error; the table on standard output."""
    ids = [
        {"input_ids": [n], "sampling_params": {"ignore_eos": True}, "max_new_tokens": 60} for n in range(3)
    ]
    done = lifecycle("run", prompts(*ids), "--out", tmp_path / "out", "--sim-tokens-per-second", 20)
    assert done.returncode == 0, done.stderr
    assert re.search(r"groups 0 \| partial 3 \| \d+ tokens/s", done.stderr)
    assert "tokens/s" not in done.stdout
    assert json.loads((tmp_path / "out" / "run.json").read_text())["count"] == 3
    assert os.access(tmp_path / "out" / "snapshots.db", os.R_OK)
