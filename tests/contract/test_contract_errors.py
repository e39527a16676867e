"""How a server refuses."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.contract.reader import Subject
from tests.contract.versions import CHECKS_PARAMETERS, since

pytestmark = pytest.mark.contract


def error_chunk(subject: Subject, body: dict[str, Any]) -> dict[str, Any]:
    """The one error chunk of a refused stream."""
    response = subject.client.post(subject.url + "/generate", json=body)
    assert response.status_code == 200
    lines = [line for line in response.text.splitlines() if line]
    assert lines[-1] == "data: [DONE]"
    assert len(lines) == 2
    error: dict[str, Any] = json.loads(lines[0].removeprefix("data: "))["error"]
    assert set(error) == {"message", "type", "code", "retryable"}
    assert error["type"] == "invalid_request_error"
    assert error["code"] == 400
    assert error["retryable"] is False
    return error


def test_input_too_long(subject: Subject) -> None:
    """A prompt beyond the context is an error chunk inside a 200 stream."""
    error = error_chunk(subject, subject.body("long", 4, input_ids=[1] * 40_000))
    assert "longer than the model's context length" in error["message"]


def test_prompt_and_budget_too_long(subject: Subject) -> None:
    """A prompt that fits with a budget that does not is refused the same way, with the numbers."""
    error = error_chunk(subject, subject.body("budget", 40_000))
    assert "You requested a total of 40005 tokens" in error["message"]


@pytest.mark.parametrize(
    "sampling",
    [
        {"max_new_tokens": -1},
        {"temperature": -1.0},
        {"top_p": 2.0},
        {"min_new_tokens": 9, "max_new_tokens": 4},
    ],
)
def test_sampling_parameters_out_of_range(subject: Subject, sampling: dict[str, Any]) -> None:
    """A sampling parameter out of its range is an error chunk that names it."""
    error = error_chunk(subject, subject.body("range", 4, sampling=sampling))
    assert next(iter(sampling)) in error["message"]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    "change",
    [
        {"input_ids": "x"},
        {"rid": 7},
    ],
)
def test_bad_body(subject: Subject, change: dict[str, Any], stream: bool) -> None:
    """A body that breaks the schema is HTTP 400 with a JSON body, also for a stream."""
    response = subject.post("/generate", {**subject.body(None, 4), "stream": stream, **change})
    assert response.status_code == 400
    assert response.headers["content-type"].startswith("application/json")
    assert response.json()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("sampling", "noticed_before"),
    [({"max_tokens": 3}, True), ({"temperature": "warm"}, True), ({"stop_token_ids": [1, None]}, False)],
)
def test_bad_sampling_parameters(
    subject: Subject, sampling: dict[str, Any], noticed_before: bool, stream: bool
) -> None:
    """A parameter of an unknown name or a wrong type is refused like a bad body.

    Before that was checked, some of them cut a stream before its first chunk, or were a 500 without one.
    """
    body = {**subject.body(None, 4), "stream": stream, "sampling_params": sampling}
    if since(subject.version, CHECKS_PARAMETERS):
        response = subject.post("/generate", body)
        assert response.status_code == 400
        assert response.json()
    elif not noticed_before:
        assert subject.post("/generate", body).status_code == 200
    elif stream:
        with pytest.raises(httpx.RemoteProtocolError, match="peer closed connection"):
            subject.post("/generate", body)
    else:
        assert subject.post("/generate", body).status_code == 500


def test_no_json(subject: Subject) -> None:
    """A body that is no JSON is HTTP 400."""
    headers = {"content-type": "application/json"}
    response = subject.client.post(subject.url + "/generate", content=b'{"text": ', headers=headers)
    assert response.status_code == 400


def test_unknown_top_level_keys_are_ignored(subject: Subject) -> None:
    """A key that the server does not know is no error at the top level."""
    assert len(subject.complete("unknown", 3, no_such_key=1).tokens) == 3


def test_duplicate_live_rid(subject: Subject) -> None:
    """A second request with a live rid is refused by an error chunk; the first one goes on."""
    with subject.stream("dup", 3000) as first:
        first.read(1)
        error = error_chunk_of_duplicate(subject)
        assert error["message"] == f"Duplicate request ID detected: {subject.rid('dup')}"
        assert error["code"] == 400
        first.read(len(first.tokens) + 20)


def error_chunk_of_duplicate(subject: Subject) -> dict[str, Any]:
    """Ask again with the rid ``dup``."""
    with subject.stream("dup", 4) as second:
        chunk = second.next()
        assert chunk is not None
        assert second.next() is None
        assert second.done
    error: dict[str, Any] = chunk["error"]
    return error


@pytest.mark.parametrize("path", ["/workers", "/list_workers"])
def test_a_server_is_no_router(subject: Subject, path: str) -> None:
    """The paths of a router are 404 with FastAPI's body."""
    response = subject.get(path)
    assert response.status_code == 404
    assert response.json() == {"detail": "Not Found"}


def test_wrong_method(subject: Subject) -> None:
    """GET where POST is meant is 405."""
    assert subject.get("/abort_request").status_code == 405
