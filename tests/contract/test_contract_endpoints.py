"""The read-only endpoints."""

from __future__ import annotations

import pytest

from tests.contract.reader import Subject

pytestmark = pytest.mark.contract


def test_tokenize_and_detokenize(subject: Subject) -> None:
    """They are inverse, and one byte is one token."""
    answer = subject.post("/v1/tokenize", {"prompt": "Hello"}).json()
    assert answer == {"tokens": [39, 68, 75, 75, 78], "count": 5, "max_model_len": answer["max_model_len"]}
    assert type(answer["max_model_len"]) is int
    text = "caf\u00e9 \U0001f600\n"
    tokens = subject.post("/v1/tokenize", {"prompt": text}).json()["tokens"]
    assert subject.post("/v1/detokenize", {"tokens": tokens}).json() == {"text": text}


def test_model_info(subject: Subject) -> None:
    """It names the model and the weight version, also under its old path."""
    info = subject.get("/model_info").json()
    assert {"model_path", "tokenizer_path", "is_generation", "weight_version"} <= set(info)
    assert subject.get("/get_model_info").json() == info


def test_server_info(subject: Subject) -> None:
    """It tells the version and the stream mode."""
    info = subject.get("/server_info").json()
    assert {"version", "max_running_requests", "model_path", "dp_size", "stream_interval"} <= set(info)
    assert info["incremental_streaming_output"] is subject.incremental


@pytest.mark.parametrize("path", ["/health", "/health_generate"])
def test_health(subject: Subject, path: str) -> None:
    """A healthy server answers 200 and nothing."""
    response = subject.get(path)
    assert response.status_code == 200
    assert response.content == b""


def test_ready_depends_on_a_pause(subject: Subject) -> None:
    """``/ready`` is 503 during a pause, while ``/health`` stays 200."""
    assert subject.get("/ready").status_code == 200
    subject.post("/pause_generation", {"mode": "in_place"})
    assert subject.get("/ready").status_code == 503
    subject.post("/continue_generation")
    assert subject.get("/ready").status_code == 200


def test_loads(subject: Subject) -> None:
    """``/v1/loads`` counts what runs and what waits, per data-parallel rank."""
    answer = subject.get("/v1/loads").json()
    assert {"timestamp", "version", "accelerator", "num_accelerators", "loads"} == set(answer)
    (load,) = answer["loads"]
    assert {"dp_rank", "num_running_reqs", "num_waiting_reqs", "num_used_tokens"} <= set(load)
    assert subject.get("/v1/loads?include=bogus").status_code == 500
