"""The scripted training run on two real servers behind the real router."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from lifecycle import RolloutRequest
from lifecycle.log import LogLine, read_log
from lifecycle.log.records import RolloutRestored
from tests.cli.conftest import lifecycle
from tests.live.cluster import LiveCluster, leaked
from tests.live.processes import Server
from tests.support.trainer import delivered, request
from tests.support.training import ScriptedRun

STEPS, PROMPTS, SAMPLES, BUDGET = 6, 6, 4, 240
MODES = ("in_place", "retract", "abort")
"""Of steps 3, 1 and 2, and so on."""
CRASH_AT = 4
"""The trainer dies while it has both servers paused in mode retract, after an update in each mode."""
LOGPROBS_APART = 1e-4
"""Prefill and decode round differently in float32: by 6e-6 as seen here."""
PAUSED_AFTER = 1.0
"""Seconds without one token of an answer that show a pause; a server that runs needs a few milliseconds."""


def post(url: str, body: dict[str, Any], timeout: float = 60.0) -> Any:
    """A call to a server that answers in one piece."""
    whole = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(whole, timeout=timeout) as answer:
        return json.load(answer)


class LiveRun(ScriptedRun):
    """A run over servers that nobody can look into: what they make in one go is the reference."""

    def __init__(self, folder: Path, cluster: LiveCluster, **sizes: Any) -> None:
        super().__init__(folder, **sizes)
        self.cluster = cluster
        self.found_paused: list[str] = []
        self.references: dict[str, list[list[float]]] = {}

    def generate_references(self) -> None:
        """Every sample without any interruption, half of them on each server."""
        asked = [
            request(self.plan, number, index)
            for number in range(self.plan.steps * self.plan.prompts)
            for index in range(self.plan.samples)
        ]
        servers = [self.cluster.servers[number % 2] for number in range(len(asked))]
        with ThreadPoolExecutor(2 * servers[0].max_running) as threads:
            pairs = threads.map(uninterrupted, servers, asked)
            self.references = {one.id or "": found for one, found in zip(asked, pairs, strict=True)}

    def difference(self, asked: RolloutRequest, sample: dict[str, Any], labels: list[str]) -> object:
        """Tokens, logprobs or labels that are not what they should be."""
        pairs = self.references[asked.id or ""]
        if sample["tokens"] != [pair[1] for pair in pairs]:
            return [pair[1] for pair in pairs]
        if sample["logprobs"] != pytest.approx([pair[0] for pair in pairs], abs=LOGPROBS_APART):
            return [pair[0] for pair in pairs]
        published = [str(number) for number in range(self.plan.steps + 1)]
        in_order = set(labels) <= set(published) and labels == sorted(labels, key=published.index)
        return None if in_order else labels

    def modes_lived_through(self) -> set[str]:
        """The modes of updates that some delivered sample has tokens from before and from after.

        Of two updates in a mode one may be missed: where cores are few, servers can be through with a step before a
        trainer has read how it began.
        """
        samples = [sample for line in delivered(self.plan) for sample in line["samples"]]
        labels = [[span["version"] for span in sample["versions"]] for sample in samples]
        pairs = {pair for versions in labels for pair in pairwise(versions)}
        steps = [step for step in range(1, self.plan.steps + 1) if (str(step - 1), str(step)) in pairs]
        return {MODES[step % len(MODES)] for step in steps}

    def between_lives(self) -> None:
        """What the dead trainer paused stays so, until somebody says otherwise."""
        self.found_paused = [server.url for server in self.cluster.servers if paused(server)]

    def brought_back(self) -> list[RolloutRestored]:
        """What the second life took over from the dead one that had tokens."""
        records = [line.record for line in read_log(self.plan.log) if isinstance(line, LogLine)]
        return [record for record in records if isinstance(record, RolloutRestored) and record.tokens]

    def account(self) -> str:
        """What was wasted, and what restarting from the prompt would have wasted, as `lifecycle report --strict` counts it.

        Tokens that a server made and nobody received are not in it: SGLang tells nobody about them.
        """
        checked = lifecycle("report", self.plan.log, "--strict", "--json")
        assert checked.returncode == 0, checked.stdout + checked.stderr
        tokens = json.loads(checked.stdout)["tokens"]
        wasted, would, kept = (
            tokens[key] for key in ("wasted", "restart_would_have_wasted", "kept_by_resuming")
        )
        received = tokens["observed"] + tokens["brought"]
        assert tokens["delivered"] + wasted == received
        assert tokens["delivered"] == sum(len(pairs) for pairs in self.references.values())
        interrupted = sum(record.reason == "crash" for record in self.brought_back())
        return (
            f"{self.plan.steps} steps, 1 crash with {interrupted} streams: {tokens['delivered']} tokens delivered, {received} received, "
            f"{kept} kept over {tokens['resumes']} resumes. Wasted: {wasted / received:.1%}; restarting from "
            f"the prompt would have wasted {would / (received + kept):.1%}"
        )


def uninterrupted(server: Server, asked: RolloutRequest) -> list[list[float]]:
    """The (logprob, token) pairs of a request in one piece."""
    sampling = {**asked.sampling_params, "max_new_tokens": asked.max_new_tokens}
    body = {"input_ids": list(asked.prompt_ids or ()), "return_logprob": True, "sampling_params": sampling}
    pairs: list[list[float]] = post(f"{server.url}/generate", body)["meta_info"]["output_token_logprobs"]
    return pairs


def paused(server: Server) -> bool:
    """Whether a server takes a request and does nothing about it."""
    body = {"input_ids": [65], "sampling_params": {"max_new_tokens": 1}}
    try:
        post(f"{server.url}/generate", body, PAUSED_AFTER)
    except TimeoutError:
        return True
    return False


@pytest.fixture
def labels_are_put_back(cluster: LiveCluster) -> Iterator[None]:
    """Whatever becomes of the run, the servers go on, under the label that they had."""
    before = [server.get("/model_info")["weight_version"] for server in cluster.servers]
    yield
    for server, label in zip(cluster.servers, before, strict=True):
        post(f"{server.url}/continue_generation", {})
        post(
            f"{server.url}/update_weight_version",
            {"new_version": label, "abort_all_requests": True},
        )


@pytest.mark.usefixtures("labels_are_put_back")
def test_a_short_training_run_on_real_servers(
    cluster: LiveCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Updates in flight in all modes and a death while servers are paused: nothing lost, doubled, wrong or left over."""
    run = LiveRun(
        tmp_path,
        cluster,
        steps=STEPS,
        prompts=PROMPTS,
        samples=SAMPLES,
        over_sampling=1.5,
        max_new_tokens=BUDGET,
        crash_at=CRASH_AT,
        crash_in_update=True,
        modes=MODES,
        in_flight=MODES,
        greedy=True,
        push_first=True,
    )
    run.train([cluster.router.url], [server.url for server in cluster.servers])
    assert leaked(cluster.servers) == {}
    assert run.found_paused == [server.url for server in cluster.servers]
    assert run.brought_back() != []
    run.generate_references()
    run.check()
    for server in cluster.servers:
        assert server.get("/model_info")["weight_version"] == str(STEPS)
    assert run.modes_lived_through() == set(MODES)
    with capsys.disabled():
        print(f"\n{run.account()}")  # noqa: T201
