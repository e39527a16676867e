"""The simulator against recordings of a real SGLang 0.5.23: same keys, same types, same order of events.

Each recorded stream is replayed on a stepped brain: the recorded request, and the recorded control calls at the
recorded moments. Tokens and counts differ, since the models do; keys and types must not.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from adapters.sglang.simulator import Brain, Fault, FaultKind, Mark, ServerSettings, SimulatedCluster
from adapters.sglang.simulator.text import decode
from tests.adapters.sglang.simulator.stepped import Reader, body

RECORDINGS = Path(__file__).resolve().parents[3] / "data" / "sglang-0.5.23"
EMPTY_OR_FULL = ("cached_tokens_details", "accelerator", "context_length")
"""Keys that are null where there is nothing to tell, or nothing was set."""


def recordings(*, streams: bool) -> list[str]:
    """Names of the recordings of the server itself, without those of the router."""
    names = [
        path.stem
        for path in sorted(RECORDINGS.glob("*.json"))
        if not path.name.startswith("router-") and path.with_suffix(".sse").exists() is streams
    ]
    assert names, f"no recordings in {RECORDINGS}"
    return names


def shape(value: Any, key: str = "") -> Any:
    """The structure of a JSON value: keys, and the types of the leaves; lists by the set of what they hold."""
    if key in EMPTY_OR_FULL:
        return "anything"
    if isinstance(value, dict):
        return {name: shape(item, name) for name, item in value.items()}
    if isinstance(value, list):
        kinds = {json.dumps(shape(item, key), sort_keys=True) for item in value}
        return sorted(kinds)
    return type(value).__name__


def chunks_of(path: Path) -> list[dict[str, Any]]:
    """The JSON events of a recorded stream."""
    lines = path.read_text().splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def prepare(name: str, mode: Any) -> Brain:
    """A server in the situation in which the stream was recorded."""
    full = name.startswith(("abort-queued", "queue-full"))
    brain = Brain(
        ServerSettings(
            mode=mode,
            eos_probability=1.0 if name.startswith("stop-eos") else 0.0,
            max_running_requests=1 if full else 8,
            max_queued_requests=0 if name.startswith("queue-full") else None,
        )
    )
    if full:
        brain.submit(body("busy", 500))
        brain.step()
    if name.startswith("abort-status-400"):
        # The real server refused a session that does not exist; here a fault does.
        brain.faults.add(Fault(FaultKind.ABORT, status=400, message="Invalid request"))
    if name.startswith("error-duplicate-rid"):
        brain.submit(body("dup", 500))
    return brain


def control(brain: Brain, path: str, arguments: dict[str, Any]) -> None:
    """One recorded control call."""
    match path:
        case "/abort_request":
            brain.abort(arguments["rid"])
        case "/pause_generation":
            brain.pause(arguments["mode"])
        case "/continue_generation":
            brain.resume()
        case "/update_weight_version":
            brain.update_weight_version(**arguments)
        case _:
            raise AssertionError(f"a call that is not replayed: {path}")


def replay(name: str) -> Reader:
    """The recorded request on a simulated server, with the recorded calls after as many chunks."""
    record = json.loads((RECORDINGS / f"{name}.json").read_text())
    brain = prepare(name, record["recorded_from"]["mode"])
    request = dict(record["request"]["body"])
    if isinstance(request.get("input_ids"), str):
        request["input_ids"] = [39, 68, 75, 75, 78] * 6554  # the recording tells only how long it was
    if name.startswith(("stop-token", "stop-string")):
        # What stops the real model's answer would not stop this one's.
        answer = [sample.token for sample in brain.model.continuation(request["input_ids"], 9)]
        sampling = dict(request["sampling_params"])
        if "stop" in sampling:
            sampling["stop"] = [decode(answer[6:8])]
        else:
            sampling["stop_token_ids"] = [answer[6]]
        request["sampling_params"] = sampling
    reader = Reader(brain, brain.submit(request))
    calls = list(record["during"])
    for _ in range(21_000):
        while calls and (len(reader.chunks) >= min(calls[0]["reads_before"], 20) or not brain.busy):
            call = calls.pop(0)
            control(brain, call["path"], call["body"])
        if record["ended"] != "complete" and len(reader.chunks) == len(record["reads"]):
            brain.kill()
        reader.poll()
        if reader.mark is not None:
            return reader
        brain.step()
    raise AssertionError(f"{name}: the replay did not end")


@pytest.mark.parametrize("name", recordings(streams=True))
def test_streams_have_the_recorded_keys_and_types(name: str) -> None:
    """First, last and middle chunks have the same keys and types as those of the real server."""
    real = chunks_of(RECORDINGS / f"{name}.sse")
    reader = replay(name)
    ended = json.loads((RECORDINGS / f"{name}.json").read_text())["ended"]
    assert (reader.done, reader.mark) == ((True, Mark.END) if ended == "complete" else (False, Mark.CUT))
    simulated = reader.chunks
    assert shape(simulated[0]) == shape(real[0])
    assert list(simulated[-1]) == list(real[-1])
    assert shape(simulated[-1]) == shape(real[-1])
    if "meta_info" in real[-1]:
        assert list(simulated[-1]["meta_info"]) == list(real[-1]["meta_info"])
    middle = {json.dumps(shape(chunk), sort_keys=True) for chunk in simulated[1:-1]}
    assert middle <= {json.dumps(shape(chunk), sort_keys=True) for chunk in real[1:-1]} or len(real) <= 2


@pytest.fixture(scope="module")
def server() -> Any:
    """A simulated server and a client."""
    with (
        SimulatedCluster(max_running_requests=8, max_total_tokens=65536) as cluster,
        httpx.Client() as client,
    ):
        yield cluster[0], client


NOT_REPLAYED = {"queue-full-no-stream", "loads-full", "server-info-incremental"}
"""Recorded in a state that other tests build, or the same as their neighbour."""
KNOWN_KEYS_ONLY = {"server-info-cumulative", "model-info"}
"""Answers of which the simulator gives the part that clients read."""


@pytest.mark.parametrize("name", sorted(set(recordings(streams=False)) - NOT_REPLAYED))
def test_answers_have_the_recorded_status_keys_and_types(name: str, server: Any) -> None:
    """Every other endpoint answers with the recorded status and, where it is JSON, the same keys and types."""
    record = json.loads((RECORDINGS / f"{name}.json").read_text())
    request, (simulated, client) = record["request"], server
    if name == "ready-paused":
        client.post(simulated.url + "/pause_generation", json={"mode": "in_place"})
    answer = client.request(request["method"], simulated.url + request["path"], json=request["body"])
    client.post(simulated.url + "/continue_generation", json={})
    assert answer.status_code == record["status"]
    assert answer.headers.get("content-type") == record["headers"].get("content-type")
    if not isinstance(record["body"], dict):
        assert answer.text == record["body"]
        return
    if name in KNOWN_KEYS_ONLY:
        mine, real = shape(answer.json()), shape(record["body"])
        shared = mine.keys() & real.keys()
        assert len(shared) >= 10
        assert {key: mine[key] for key in shared} == {key: real[key] for key in shared}
        return
    assert shape(answer.json()) == shape(record["body"])
