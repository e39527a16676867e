"""Pauses, weight versions and retractions."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.contract.reader import Subject
from tests.contract.versions import FLUSHES_AFTER_A_RETRACTION, since

pytestmark = pytest.mark.contract

LONG = 3000
PAUSED = {"message": "Generation paused successfully.", "status": "ok"}
CONTINUED = {"message": "Generation continued successfully.", "status": "ok"}


def wait_until_retracted(subject: Subject) -> None:
    """Poll until the cache can be flushed: nothing holds memory any longer. ``/v1/loads`` stands still in a pause.

    Where it can never be flushed, the order in which a server does what it is told has to do.
    """
    if not since(subject.version, FLUSHES_AFTER_A_RETRACTION):
        assert subject.post("/flush_cache").status_code == 400
        return
    deadline = time.monotonic() + 15
    while subject.post("/flush_cache").status_code != 200:
        assert time.monotonic() < deadline, "the request was not retracted"
        time.sleep(0.02)  # poll interval; the deadline above decides


@pytest.fixture(autouse=True)
def restored_version(subject: Subject) -> Iterator[None]:
    """Give the server its weight version back."""
    before = subject.get("/model_info").json()["weight_version"]
    yield
    subject.post("/continue_generation")
    subject.post("/update_weight_version", {"new_version": before, "abort_all_requests": False})


def test_pause_in_mode_abort(subject: Subject) -> None:
    """It ends what runs, unasked by the client, and answers only then."""
    with subject.stream("pause", LONG) as stream:
        stream.read(2)
        assert subject.post("/pause_generation", {"mode": "abort"}).json() == PAUSED
        stream.read()
        assert stream.finish["type"] == "abort"
        assert stream.finish["message"] == "Aborted"
    assert subject.load() == (0, 0)
    assert subject.post("/continue_generation").json() == CONTINUED


def test_pause_without_a_mode_is_abort(subject: Subject) -> None:
    """``{}`` means ``{"mode": "abort"}``."""
    with subject.stream("default", LONG) as stream:
        stream.read(2)
        assert subject.post("/pause_generation").json() == PAUSED
        assert stream.read().finish["type"] == "abort"


def test_unknown_mode(subject: Subject) -> None:
    """A mode that does not exist is refused and pauses nothing."""
    assert 400 <= subject.post("/pause_generation", {"mode": "sideways"}).status_code < 500
    assert len(subject.complete("still", 3).tokens) == 3


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_a_paused_request_goes_on_with_the_same_tokens(subject: Subject, mode: str) -> None:
    """A pause that keeps its requests leaves their answers as they would have been."""
    with subject.stream("kept", 400) as stream:
        stream.read(5)
        assert subject.post("/pause_generation", {"mode": mode}).json() == PAUSED
        assert subject.post("/continue_generation").json() == CONTINUED
        stream.read()
    assert stream.meta["num_retractions"] == (1 if mode == "retract" else 0)
    assert stream.tokens == subject.complete("whole", 400).tokens


def test_retract_puts_requests_back_into_the_queue(subject: Subject) -> None:
    """During a pause in mode ``retract`` the requests wait, and the cache can be flushed."""
    with subject.stream("back", 400) as stream:
        stream.read(5)
        subject.post("/pause_generation", {"mode": "retract"})
        wait_until_retracted(subject)
        subject.post("/continue_generation")
        assert len(stream.read().tokens) == 400


def test_loads_stand_still_in_a_pause(subject: Subject) -> None:
    """During a pause ``/v1/loads`` keeps telling what ran before it, also after a retraction."""
    with subject.stream("still", LONG) as stream:
        stream.read(5)
        subject.wait_for_load(1, 0)
        subject.post("/pause_generation", {"mode": "retract"})
        wait_until_retracted(subject)
        assert subject.load() == (1, 0)
        subject.post("/continue_generation")
        stream.read(len(stream.tokens) + 5)


def test_flush_cache_is_refused_while_something_runs(subject: Subject) -> None:
    """``/flush_cache`` is 200 on an idle server and 400 on one that runs something."""
    assert subject.post("/flush_cache").status_code == 200
    with subject.stream("flush", LONG) as stream:
        stream.read(2)
        assert subject.post("/flush_cache").status_code == 400


def test_abort_of_a_retracted_request(subject: Subject) -> None:
    """It ends in the shape of the queue; an incremental server then repeats the whole text and all logprobs."""
    with subject.stream("retracted", LONG) as stream:
        stream.read(12)
        subject.post("/pause_generation", {"mode": "retract"})
        wait_until_retracted(subject)
        subject.post("/abort_request", {"rid": subject.rid("retracted")})
        stream.read()
    assert stream.finish == {"type": "abort", "message": "Abort in waiting queue"}
    last, count = stream.chunks[-1], stream.meta["completion_tokens"]
    assert count == len(stream.tokens) >= 12
    assert len(stream.meta["output_token_logprobs"]) >= count
    assert stream.meta["output_token_logprobs_length"] == count
    assert "prompt_tokens" not in stream.meta
    if subject.incremental:
        assert last["output_ids"][-1:] == stream.tokens[-1:]
        assert len(last["output_ids"]) < count
    else:
        assert last["output_ids"] == stream.tokens
    subject.post("/continue_generation")
    assert subject.complete("whole", count).tokens == stream.tokens


def test_a_request_during_a_pause_waits(subject: Subject) -> None:
    """It gets its headers at once, and its first chunk only after the pause."""
    subject.post("/pause_generation", {"mode": "in_place"})
    with subject.stream("held", 5) as stream:
        assert stream.response.status_code == 200
        assert subject.load() == (0, 0)
        subject.post("/continue_generation")
        assert len(stream.read().tokens) == 5


def test_versions_of_a_paused_and_continued_request(subject: Subject) -> None:
    """The spans of the last chunk meet where the label changed, and cover every token."""
    old = subject.get("/model_info").json()["weight_version"]
    with subject.stream("spans", 400) as stream:
        stream.read(10)
        subject.post("/pause_generation", {"mode": "in_place"})
        body = {"new_version": "contract-7", "abort_all_requests": False}
        assert subject.post("/update_weight_version", body).json() == {
            "success": True,
            "message": "Weight version updated to contract-7",
            "new_version": "contract-7",
        }
        subject.post("/continue_generation")
        stream.read()
    spans = stream.meta["weight_versions"]
    assert [span["version"] for span in spans] == [old, "contract-7"]
    assert [spans[0]["start"], spans[1]["end"]] == [0, 400]
    assert spans[0]["end"] == spans[1]["start"] >= 10
    assert stream.meta["weight_version"] == "contract-7"
    assert subject.get("/model_info").json()["weight_version"] == "contract-7"
    labels = [chunk["meta_info"]["weight_version"] for chunk in stream.chunks]
    assert labels == sorted(labels, key=[old, "contract-7"].index)


def test_a_new_label_aborts_everything_by_default(subject: Subject) -> None:
    """``/update_weight_version`` without ``abort_all_requests`` ends what runs."""
    with subject.stream("label", LONG) as stream:
        stream.read(2)
        subject.post("/update_weight_version", {"new_version": "contract-8"})
        assert stream.read().finish["type"] == "abort"
