"""The hooks over real HTTP against simulated SGLang servers: what their streams do wrong, and who else is on them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from adapters.sglang.simulator import Fault, FaultKind, SimulatedCluster
from adapters.slime import generate, generate_rollout
from tests.adapters.slime.conftest import Slime, until
from tests.adapters.slime.test_hook import abort_when, call_once, held


@pytest.fixture(params=["cumulative", "incremental"])
def cluster(request: pytest.FixtureRequest) -> Iterator[SimulatedCluster]:
    """One server, as fast as it can, in both stream modes."""
    with SimulatedCluster(mode=request.param, seed=3, keep_history=True) as running:
        yield running


@pytest.fixture
def slow() -> Iterator[SimulatedCluster]:
    """One server that takes its time."""
    with SimulatedCluster(mode="incremental", seed=3, tokens_per_second=100) as running:
        yield running


def on(slime: Slime, cluster: SimulatedCluster, **changes: Any) -> Any:
    """Flags that name the server as slime's router."""
    url = urlsplit(cluster.urls[0])
    return slime.args(sglang_router_ip=url.hostname, sglang_router_port=url.port, **changes)


def right(cluster: SimulatedCluster, sample: Any) -> bool:
    """Every token and log-prob is what the model says after the prompt."""
    prompt, response = sample.tokens[: -sample.response_length], sample.tokens[-sample.response_length :]
    model = cluster[0].brain.model
    return model.first_difference(prompt, response, logprobs=sample.rollout_log_probs) is None


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (Fault(FaultKind.ERROR_CHUNK, after=2, status=400), "Simulated error"),
        (Fault(FaultKind.MALFORMED, after=2), ""),
        (Fault(FaultKind.WRONG_LENGTH, after=2, delta=7), "tokens"),
    ],
    ids=["error chunk (W10)", "corrupt JSON (W13)", "impossible length (W9)"],
)
def test_what_cannot_be_true_fails_one_sample(
    slime: Slime, cluster: SimulatedCluster, fault: Fault, words: str
) -> None:
    """The sample is FAILED with the server's words; no exception, no made-up tokens, and the next one works."""
    cluster[0].inject(fault)
    args = on(slime, cluster)
    sample = call_once(slime, args, slime.sample())
    assert sample.status.name == "FAILED"
    assert words in sample.metadata["lifecycle"]["detail"]
    assert sample.response_length == 0 or right(cluster, sample)
    cluster[0].call(lambda brain: brain.faults.clear())
    assert call_once(slime, args, slime.sample()).status.name == "TRUNCATED"


@pytest.mark.parametrize(
    "fault",
    [
        Fault(FaultKind.CUT, after=3, nth=0),
        Fault(FaultKind.LOST_TERMINAL, after=3, nth=0),
        Fault(FaultKind.ABORT, after=3, nth=0),
        Fault(FaultKind.ABORT, after=3, nth=0, status=500),
        Fault(FaultKind.REFUSE, nth=0, status=503),
    ],
    ids=["cut", "no terminal chunk", "abort nobody asked for", "abort with a 500", "503"],
)
def test_what_a_server_breaks_is_gone_on_with(slime: Slime, cluster: SimulatedCluster, fault: Fault) -> None:
    """The prefix is kept, the rest is generated, and every token is the right one, once (W18, W19)."""
    cluster[0].inject(fault)
    sample = call_once(slime, on(slime, cluster), slime.sample(), max_new_tokens=12)
    assert sample.status.name == "TRUNCATED"
    assert sample.response_length == 12
    assert right(cluster, sample)


def test_w18_our_abort_keeps_each_token_once(slime: Slime, slow: SimulatedCluster) -> None:
    """An aborted incremental stream repeats everything in its last chunk: the sample has it once, and goes on right."""
    args = on(slime, slow, n_samples_per_prompt=1, rollout_max_response_len=40)
    sample = slime.sample()
    assert abort_when(slime, args, [sample], held(slime, args, 4)) == [[sample]]
    assert sample.status.name == "ABORTED"
    assert right(slow, sample)
    sample = call_once(slime, args, sample)
    assert (sample.status.name, sample.response_length) == ("TRUNCATED", 40)
    assert right(slow, sample)
    assert sample.weight_versions == ["default"]


def test_w7_w8_only_ours_is_aborted_and_it_is_gone_when_slime_goes_on(
    slime: Slime, slow: SimulatedCluster
) -> None:
    """Another client's request on the same server finishes; ours has ended there before the sample is handed back."""
    args = on(slime, slow, n_samples_per_prompt=1, rollout_max_response_len=1000)
    body = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 30}, "return_logprob": True}
    answers: list[httpx.Response] = []
    other = threading.Thread(
        target=lambda: answers.append(httpx.post(f"{slow.urls[0]}/generate", json=body, timeout=30))
    )
    other.start()
    slow[0].wait_until(lambda brain: len(brain.scheduler.running) == 1)
    abort_when(slime, args, [slime.sample()], held(slime, args, 2))
    assert slow[0].call(lambda brain: len(brain.scheduler.running)) <= 1
    other.join(30)
    assert answers[0].json()["meta_info"]["finish_reason"]["type"] == "length"
    assert slow[0].call(lambda brain: brain.idle)


def test_w7_a_dead_server_does_not_hold_up_an_abort(slime: Slime, slow: SimulatedCluster) -> None:
    """The abort ends at once or at its deadline, with the prefix."""
    args = on(slime, slow, n_samples_per_prompt=1, rollout_max_response_len=1000, lifecycle_abort_timeout=0.5)
    sample = slime.sample()

    def die_then() -> bool:
        if not held(slime, args, 3)():
            return False
        slow[0].kill()
        return True

    abort_when(slime, args, [sample], die_then)
    assert sample.status.name == "ABORTED"
    assert right(slow, sample)


def test_a_slime_that_aborts_whole_servers_is_understood(flag_slime: Slime, slow: SimulatedCluster) -> None:
    """It raises a flag and ends everything on its servers: the hook stops too, instead of trying again for ever."""
    slime = flag_slime
    args = on(slime, slow, n_samples_per_prompt=1, rollout_max_response_len=1000)

    async def workers(_url: str) -> Any:
        return {"workers": [{"url": slow.urls[0]}]}

    slime.patch.setattr(slime.module, "get", workers)
    sample = slime.sample()
    assert abort_when(slime, args, [sample], held(slime, args, 3)) == [[sample]]
    assert sample.status.name == "ABORTED"
    assert sample.response_length >= 3
    assert right(slow, sample)
    assert slow[0].call(lambda brain: brain.idle)
    assert list(slime.engine(args).places().values()) == ["resumable"]


def test_a_slime_that_cancels_nothing_still_passes_cancellation_on(
    flag_slime: Slime, slow: SimulatedCluster
) -> None:
    """There every cancellation is somebody else's: it is re-raised, after the server was told."""
    slime = flag_slime
    args = on(slime, slow, rollout_max_response_len=1000)
    sample = slime.sample()

    async def scenario() -> None:
        slime.state(args)
        task = asyncio.create_task(generate(args, sample, {"max_new_tokens": 1000}))
        await until(held(slime, args, 2))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    slime.run(scenario())
    assert sample.response_length >= 2
    slow[0].wait_until(lambda brain: brain.idle)


def test_whole_steps_over_http(slime: Slime, cluster: SimulatedCluster) -> None:
    """Three steps of ours with broken connections: whole batches, every token right, nothing left on the server."""
    cluster[0].inject(Fault(FaultKind.CUT, after=4, p=0.2), Fault(FaultKind.ABORT, after=2, p=0.2))
    args = on(slime, cluster, rollout_batch_size=4, over_sampling_batch_size=6, rollout_max_response_len=12)
    source = slime.data_source(args)
    for step in range(3):
        output = generate_rollout(args, step, source)
        assert len(output.samples) == 4
        for sample in (sample for group in output.samples for sample in group):
            assert sample.response_length == 12
            assert right(cluster, sample)
    assert cluster[0].call(lambda brain: brain.idle)
    assert slime.engine(args).ledger().balanced
