"""The answer table: every row, asked and not asked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from adapters.sglang.answers import (
    ANSWERS,
    DETAIL_LIMIT,
    Answer,
    end,
    error_answer,
    finish_answer,
    http_answer,
    shorten,
    status_code,
)
from lifecycle.events import END_TRIGGERS, EndKind
from lifecycle.states import FinishReason, Reason, Trigger

DATA = Path(__file__).parents[2] / "data" / "sglang-0.5.23"
T = Trigger
TABLE: dict[Answer, tuple[Trigger, Trigger]] = {
    # what the server said: (nothing asked, abort asked)
    Answer.STOP: (T.FINISH, T.FINISH),
    Answer.LENGTH: (T.FINISH, T.FINISH),
    Answer.NAN: (T.REJECT, T.REJECT),
    Answer.ABORT: (T.PREEMPT, T.CONFIRM),
    Answer.ABORT_4XX: (T.REJECT, T.CONFIRM),
    Answer.ABORT_5XX: (T.PREEMPT, T.CONFIRM),
    Answer.HTTP_408: (T.LOSE, T.LOSE),
    Answer.HTTP_429: (T.LOSE, T.LOSE),
    Answer.HTTP_UNAVAILABLE: (T.LOSE, T.LOSE),
    Answer.HTTP_5XX: (T.LOSE, T.LOSE),
    Answer.WORKER_GONE: (T.LOSE, T.LOSE),
    Answer.NO_CONNECTION: (T.LOSE, T.LOSE),
    Answer.CUT: (T.LOSE, T.LOSE),
    Answer.CLOSED: (T.LOSE, T.LOSE),
    Answer.EOF: (T.LOSE, T.LOSE),
    Answer.DONE: (T.LOSE, T.LOSE),
    Answer.ERROR_CHUNK_5XX: (T.LOSE, T.LOSE),
    Answer.HTTP_4XX: (T.REJECT, T.REJECT),
    Answer.HTTP_OTHER: (T.REJECT, T.REJECT),
    Answer.NOT_SENT: (T.REJECT, T.REJECT),
    Answer.ERROR_CHUNK: (T.REJECT, T.REJECT),
    Answer.UNKNOWN_FINISH: (T.REJECT, T.REJECT),
    Answer.MALFORMED: (T.REJECT, T.REJECT),
}


@pytest.mark.parametrize("asked", [False, True], ids=["not asked", "asked"])
@pytest.mark.parametrize("answer", Answer, ids=lambda answer: answer.name)
def test_trigger(answer: Answer, asked: bool) -> None:
    """Each answer raises the trigger that the design's table says, asked or not."""
    assert END_TRIGGERS[end(answer).kind, asked] is TABLE[answer][asked]


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (408, Reason.SERVER_ERROR),
        (429, Reason.RATE_LIMITED),
        (500, Reason.SERVER_ERROR),
        (501, Reason.SERVER_ERROR),
        (502, Reason.UNAVAILABLE),
        (503, Reason.UNAVAILABLE),
        (504, Reason.UNAVAILABLE),
        (400, Reason.REFUSED),
        (401, Reason.REFUSED),
        (404, Reason.REFUSED),
        (422, Reason.REFUSED),
        (204, Reason.REFUSED),
        (307, Reason.REFUSED),
    ],
)
def test_http_status(status: int, reason: Reason) -> None:
    """The reason of each HTTP status."""
    assert ANSWERS[http_answer(status)][1] is reason


@pytest.mark.parametrize(
    ("kind", "matched", "status", "answer"),
    [
        ("stop", 2, None, Answer.STOP),
        ("stop", "NaN happened", None, Answer.NAN),
        ("length", None, None, Answer.LENGTH),
        ("abort", None, None, Answer.ABORT),
        ("abort", None, 200, Answer.ABORT),
        ("abort", None, 400, Answer.ABORT_4XX),
        ("abort", None, 499, Answer.ABORT_4XX),
        ("abort", None, 503, Answer.ABORT_5XX),
        ("tool", None, None, Answer.UNKNOWN_FINISH),
        ("", None, 500, Answer.UNKNOWN_FINISH),
    ],
)
def test_finish(kind: str, matched: object, status: int | None, answer: Answer) -> None:
    """The answer that each finish_reason is."""
    assert finish_answer(kind, matched, status) is answer


@pytest.mark.parametrize(
    ("code", "answer"),
    [
        (None, Answer.ERROR_CHUNK),
        (400, Answer.ERROR_CHUNK),
        (500, Answer.ERROR_CHUNK_5XX),
        (599, Answer.ERROR_CHUNK_5XX),
    ],
)
def test_error_chunk(code: int | None, answer: Answer) -> None:
    """A 5xx code in an error chunk is worth another attempt."""
    assert error_answer(code) is answer


def test_finish_reason_only_where_finished() -> None:
    """Only a finished stream has a finish_reason."""
    reasons = {answer: end(answer).finish_reason for answer in Answer}
    assert {answer for answer, reason in reasons.items() if reason} == {Answer.STOP, Answer.LENGTH}
    assert reasons[Answer.STOP] is FinishReason.STOP


def test_shorten() -> None:
    """The server's words go on one line and are cut."""
    assert shorten(None) is None
    assert shorten("a\n  b") == "a b"
    long = shorten("x" * 10_000)
    assert long is not None
    assert len(long) == DETAIL_LIMIT
    assert long.endswith("…")


@pytest.mark.parametrize(
    ("value", "code"),
    [(503, 503), ("503", 503), (None, None), ("", None), ("x", None), (5.0, None), (True, None), ("²", None)],
)
def test_status_code(value: object, code: int | None) -> None:
    """Codes come as numbers or as digits."""
    assert status_code(value) == code


def test_a_500_of_the_router_about_its_worker_is_not_the_requests_fault() -> None:
    """sglang-router 0.3.2 answers so when the worker it chose is gone (tests/data/sglang-0.5.23/router-worker-gone)."""
    recorded = json.loads((DATA / "router-worker-gone.json").read_text())
    answer = http_answer(recorded["status"], recorded["headers"]["x-smg-error-code"])
    assert (answer, ANSWERS[answer]) == (Answer.WORKER_GONE, (EndKind.LOST, Reason.WORKER_LOST))
    assert http_answer(500, "something else") is Answer.HTTP_5XX
    assert http_answer(400, "call_upstream_request_error") is Answer.HTTP_4XX
