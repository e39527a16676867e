"""What aborts do: while running, while queued, by prefix, twice, too late, and by closing the stream."""

from __future__ import annotations

import pytest

from tests.contract.reader import Stream, Subject

pytestmark = pytest.mark.contract

LONG = 3000
ABORTED = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}


def fill(subject: Subject, prefix: str) -> list[Stream]:
    """As many long streams as the server runs at once."""
    return [subject.stream(f"{prefix}{number}", LONG) for number in range(subject.max_running_requests)]


def abort(subject: Subject, name: str) -> None:
    """Ask for an abort; the answer says nothing about what it hit."""
    response = subject.post("/abort_request", {"rid": subject.rid(name)})
    assert response.status_code == 200
    assert response.content == b""


def test_abort_while_running(subject: Subject) -> None:
    """A running stream ends with "Aborted" and keeps all its tokens, which are those of the uninterrupted answer."""
    with subject.stream("run", LONG) as stream:
        stream.read(5)
        abort(subject, "run")
        stream.read()
    assert stream.finish == ABORTED
    assert stream.done
    assert 5 <= len(stream.tokens) < LONG
    count = len(stream.tokens)
    assert stream.meta["weight_versions"] == [
        {"version": stream.meta["weight_version"], "start": 0, "end": count}
    ]
    assert subject.complete("whole", count).tokens == stream.tokens


def test_abort_matches_by_prefix(subject: Subject) -> None:
    """Aborting a live rid also ends every request whose rid begins with it."""
    with subject.streams(subject.stream("ab-1", LONG), subject.stream("ab-10", LONG)) as (short, long):
        short.read(2)
        long.read(2)
        abort(subject, "ab-1")
        assert short.read().finish == ABORTED
        assert long.read().finish == ABORTED


def test_abort_of_a_bare_prefix_does_nothing(subject: Subject) -> None:
    """A prefix that is no live rid itself is dropped, with a 200."""
    with subject.stream("bare-12", 40) as stream:
        stream.read(1)
        abort(subject, "bare-")
        assert stream.read().finish == {"type": "length", "length": 40}


@pytest.mark.parametrize("body", [{"rid": "nobody"}, {"rid": ""}, {}])
def test_abort_of_nothing(subject: Subject, body: dict[str, str]) -> None:
    """An unknown rid, an empty one and an empty body are answered with 200 and nothing."""
    response = subject.post("/abort_request", body)
    assert response.status_code == 200
    assert response.content == b""


def test_abort_twice_and_after_the_end(subject: Subject) -> None:
    """A second abort changes nothing, nor does one after the end."""
    with subject.stream("twice", LONG) as stream:
        stream.read(2)
        abort(subject, "twice")
        abort(subject, "twice")
        assert stream.read().finish == ABORTED
    abort(subject, "twice")


def test_abort_all(subject: Subject) -> None:
    """``abort_all`` ends everything that runs."""
    with subject.streams(subject.stream("all-1", LONG), subject.stream("b", LONG)) as opened:
        for stream in opened:
            stream.read(1)
        assert subject.post("/abort_request", {"abort_all": True}).status_code == 200
        assert [stream.read().finish for stream in opened] == [ABORTED, ABORTED]


def test_abort_while_queued(subject: Subject) -> None:
    """A waiting request ends in another shape: no tokens, few keys, and a message of its own."""
    with subject.streams(*fill(subject, "busy")) as running:
        for stream in running:
            stream.read(1)
        with subject.stream("queued", 8) as queued:
            subject.wait_for_load(subject.max_running_requests, 1)
            abort(subject, "queued")
            queued.read()
        subject.post("/abort_request", {"abort_all": True})
        for stream in running:
            stream.read()
    assert queued.done
    assert len(queued.chunks) == 1
    assert queued.chunks[0]["text"] == ""
    assert queued.chunks[0]["output_ids"] == []
    assert queued.finish == {"type": "abort", "message": "Abort in waiting queue"}
    meta = dict(queued.meta)
    assert meta["weight_versions"] == [{"version": meta["weight_version"], "start": 0, "end": 0}]
    assert meta["output_token_logprobs"] == []
    assert meta["output_token_logprobs_length"] == meta["completion_tokens"] == 0
    assert not {"prompt_tokens", "cached_tokens", "num_retractions", "dp_rank"} & set(meta)


def test_more_requests_than_the_server_runs(subject: Subject) -> None:
    """Requests beyond the limit wait, and all of them end with the same answer in the end."""
    count = subject.max_running_requests * 3
    with subject.streams(*(subject.stream(f"many-{number}-", 12) for number in range(count))) as opened:
        answers = [stream.read().tokens for stream in opened]
    assert all(tokens == answers[0] for tokens in answers)
    assert len(answers[0]) == 12


def test_closing_a_stream_aborts_it(subject: Subject) -> None:
    """When the client closes a running stream, the server stops running it."""
    with subject.stream("close", LONG) as stream:
        stream.read(3)
        assert subject.load() == (1, 0)
    subject.wait_for_load(0, 0, seconds=5.0)


def test_an_abort_lost_in_a_pause_is_the_only_one(subject: Subject) -> None:
    """A request that was held by a pause when it was aborted runs on: no later abort ends it, nor its client's leaving."""
    subject.post("/pause_generation", {"mode": "in_place"})
    with subject.stream("deaf", LONG) as stream:
        abort(subject, "deaf")
        subject.post("/continue_generation")
        stream.read(2)
        abort(subject, "deaf")
        stream.read(len(stream.tokens) + 100)
    assert len(subject.complete("other", 200).tokens) == 200
    subject.wait_for_load(1, 0)
    subject.post("/abort_request", {"abort_all": True})
    subject.wait_for_load(0, 0)


def test_a_rid_used_again_at_once(subject: Subject) -> None:
    """Two seconds after a stream has ended its rid is aborted once more: a new request with it is cut down."""
    subject.complete("reused", 2)
    again = subject.complete("reused", LONG)
    assert again.finish["type"] == "abort"
    assert 0 < len(again.tokens) < LONG


def test_a_refused_duplicate_takes_the_other_with_it(subject: Subject) -> None:
    """The late abort of a refused stream hits whoever has its rid: the request that it was a duplicate of."""
    with subject.stream("twin", LONG) as stream:
        stream.read(1)
        assert "Duplicate request ID" in subject.complete("twin", 4).chunks[0]["error"]["message"]
        assert stream.read().finish == ABORTED


def test_a_closed_rid_can_be_used_again(subject: Subject) -> None:
    """After a close or an abort has been confirmed, the rid is free."""
    with subject.stream("again", LONG) as stream:
        stream.read(1)
    subject.wait_for_load(0, 0)
    assert len(subject.complete("again", 4).tokens) == 4
