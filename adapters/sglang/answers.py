"""What each answer of a server means: one row per answer, no branches elsewhere.

`ANSWERS` maps every way a request can end to an `EndKind` and a `Reason`; which trigger an `EndKind` is, asked for
or not, stands in `lifecycle.events.END_TRIGGERS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from lifecycle.events import EndKind, StreamEnd, VersionSpan
from lifecycle.request import EMPTY
from lifecycle.states import FinishReason, Reason

DETAIL_LIMIT = 240
"""Characters of the server's own words that are kept."""


class Answer(StrEnum):
    """Every way in which a request ends."""

    STOP = "terminal stop"
    LENGTH = "terminal length"
    NAN = "terminal stop, matched 'NaN happened'"
    ABORT = "terminal abort without a status code"
    ABORT_4XX = "terminal abort with a 4xx status code"
    ABORT_5XX = "terminal abort with a 5xx status code"
    HTTP_408 = "HTTP 408"
    HTTP_429 = "HTTP 429"
    HTTP_UNAVAILABLE = "HTTP 502, 503 or 504"
    HTTP_5XX = "any other HTTP 5xx"
    WORKER_GONE = "the router could not reach the worker it chose"
    NO_CONNECTION = "no connection"
    CUT = "the connection broke"
    CLOSED = "the stream was closed from this side"
    EOF = "end of stream without a terminal chunk"
    DONE = "[DONE] without a terminal chunk"
    ERROR_CHUNK_5XX = "error chunk with a 5xx code"
    HTTP_4XX = "any other HTTP 4xx"
    HTTP_OTHER = "an HTTP status that is no answer to a POST"
    NOT_SENT = "a request that cannot be written"
    ERROR_CHUNK = "error chunk"
    UNKNOWN_FINISH = "a finish type nobody knows"
    MALFORMED = "something that cannot be true"


ANSWERS: dict[Answer, tuple[EndKind, Reason]] = {
    Answer.STOP: (EndKind.FINISHED, Reason.STOP),
    Answer.LENGTH: (EndKind.FINISHED, Reason.LENGTH),
    Answer.NAN: (EndKind.REJECTED, Reason.MALFORMED),
    Answer.ABORT: (EndKind.ENDED, Reason.SERVER_ABORT),
    Answer.ABORT_4XX: (EndKind.REFUSED, Reason.REFUSED),
    Answer.ABORT_5XX: (EndKind.ENDED, Reason.SERVER_ERROR),
    Answer.HTTP_408: (EndKind.LOST, Reason.SERVER_ERROR),
    Answer.HTTP_429: (EndKind.LOST, Reason.RATE_LIMITED),
    Answer.HTTP_UNAVAILABLE: (EndKind.LOST, Reason.UNAVAILABLE),
    Answer.HTTP_5XX: (EndKind.LOST, Reason.SERVER_ERROR),
    Answer.WORKER_GONE: (EndKind.LOST, Reason.WORKER_LOST),
    Answer.NO_CONNECTION: (EndKind.LOST, Reason.UNREACHABLE),
    Answer.CUT: (EndKind.LOST, Reason.DISCONNECTED),
    Answer.CLOSED: (EndKind.LOST, Reason.DISCONNECTED),
    Answer.EOF: (EndKind.LOST, Reason.TRUNCATED),
    Answer.DONE: (EndKind.LOST, Reason.TRUNCATED),
    Answer.ERROR_CHUNK_5XX: (EndKind.LOST, Reason.SERVER_ERROR),
    Answer.HTTP_4XX: (EndKind.REJECTED, Reason.REFUSED),
    Answer.HTTP_OTHER: (EndKind.REJECTED, Reason.REFUSED),
    Answer.NOT_SENT: (EndKind.REJECTED, Reason.REFUSED),
    Answer.ERROR_CHUNK: (EndKind.REJECTED, Reason.REFUSED),
    Answer.UNKNOWN_FINISH: (EndKind.REJECTED, Reason.MALFORMED),
    Answer.MALFORMED: (EndKind.REJECTED, Reason.MALFORMED),
}

HTTP_ANSWERS: dict[int, Answer] = {
    408: Answer.HTTP_408,
    429: Answer.HTTP_429,
    502: Answer.HTTP_UNAVAILABLE,
    503: Answer.HTTP_UNAVAILABLE,
    504: Answer.HTTP_UNAVAILABLE,
}
HTTP_CLASSES: dict[int, Answer] = {4: Answer.HTTP_4XX, 5: Answer.HTTP_5XX}
ABORT_CLASSES: dict[int, Answer] = {4: Answer.ABORT_4XX, 5: Answer.ABORT_5XX}
FINISH_ANSWERS: dict[str, Answer] = {"stop": Answer.STOP, "length": Answer.LENGTH}
FINISH_REASONS: dict[Answer, FinishReason] = {
    Answer.STOP: FinishReason.STOP,
    Answer.LENGTH: FinishReason.LENGTH,
}

NAN_MATCHED = "NaN happened"
"""`matched` of a stop on a NaN or out-of-vocabulary token (schedule_batch.py, 0.5.23)."""


ROUTER_CODES: dict[str, Answer] = {"call_upstream_request_error": Answer.WORKER_GONE}
"""`x-smg-error-code` of a 500 that is about the worker and not about the request (sglang-router 0.3.2)."""


def http_answer(status: int, router_code: str | None = None) -> Answer:
    """The answer an HTTP status other than 200 is. It is read before the content type: routers mislabel errors."""
    if status // 100 == 5 and router_code in ROUTER_CODES:  # noqa: PLR2004
        return ROUTER_CODES[router_code]
    return HTTP_ANSWERS.get(status) or HTTP_CLASSES.get(status // 100, Answer.HTTP_OTHER)


def finish_answer(kind: str, matched: Any, status: int | None) -> Answer:
    """The answer a terminal chunk is: `kind`, `matched` and `status_code` of its finish_reason."""
    if kind == "abort":
        return ABORT_CLASSES.get((status or 0) // 100, Answer.ABORT)
    if kind == "stop" and matched == NAN_MATCHED:
        return Answer.NAN
    return FINISH_ANSWERS.get(kind, Answer.UNKNOWN_FINISH)


def error_answer(code: int | None) -> Answer:
    """The answer an error chunk is, by its code (no code before 0.5.13)."""
    return Answer.ERROR_CHUNK_5XX if code is not None and code // 100 == 5 else Answer.ERROR_CHUNK  # noqa: PLR2004


def end(
    answer: Answer,
    detail: Any = None,
    *,
    status: int | None = None,
    matched: int | str | None = None,
    spans: tuple[VersionSpan, ...] = (),
    meta: Mapping[str, int | float | str] = EMPTY,
) -> StreamEnd:
    """The last event of a stream that ended with `answer`."""
    kind, reason = ANSWERS[answer]
    finish = FINISH_REASONS.get(answer)
    return StreamEnd(kind, reason, shorten(detail), finish, matched, status, spans, dict(meta))


def shorten(detail: Any, limit: int = DETAIL_LIMIT) -> str | None:
    """`detail` on one line, at most `limit` characters."""
    if detail is None:
        return None
    text = " ".join(str(detail)[: 4 * limit].split())
    return text if len(text) <= limit else text[: limit - 1] + "…"


def status_code(value: Any) -> int | None:
    """A status code as a number: servers send 503, "503" or null."""
    if isinstance(value, str) and value.isascii() and value.isdigit():
        value = int(value[:9])
    return value if type(value) is int else None
