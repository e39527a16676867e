"""From the marks on a request to the bytes of its HTTP response."""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import msgspec

from adapters.sglang.simulator.request import Ending, Mark, Request
from adapters.sglang.simulator.shapes import DONE, chunk, error_payload, frame, http_error

_encode = msgspec.json.encode


@dataclass(frozen=True, slots=True)
class Head:
    """Status and media type of a response."""

    status: int
    media_type: str


_STREAM = Head(200, "text/event-stream; charset=utf-8")


def head_of(request: Request, now: int) -> Head | None:
    """The head of a response at step ``now``; None while there is none."""
    if request.headers_at > now:
        return None
    if request.ending is Ending.REFUSED:
        return Head(int(request.failure["status"]), "application/json")
    if request.stream:
        return _STREAM
    if request.ending is None:
        return None
    return Head(_whole(request)[0], "application/json") if request.ending is not Ending.CUT else _STREAM


def response_parts(request: Request, incremental: bool, now: float, version: str) -> list[bytes | Mark]:
    """Everything that can be written now; marks the request accordingly."""
    if request.ending is Ending.REFUSED:
        request.closed = True
        failure = request.failure
        return [_encode(http_error(failure["message"], failure["status"])), Mark.END]
    if not request.stream:
        return _whole_parts(request, now, version)
    parts: list[bytes | Mark] = []
    piece = _piece(request, incremental, now, version)
    if request.ending is Ending.CUT:
        parts = [piece[: len(piece) // 2]] if piece else []
        return _close(request, parts, Mark.CUT)
    if piece:
        parts.append(piece)
    if request.ending is None:
        return parts
    if request.ending is Ending.ERROR:
        parts.append(frame(error_payload(request.failure["message"], request.failure["code"])))
    if request.done_marker:
        parts.append(DONE)
    return _close(request, parts, Mark.END)


def _close(request: Request, parts: list[bytes | Mark], mark: Mark) -> list[bytes | Mark]:
    request.closed = True
    parts.append(mark)
    return parts


def _piece(request: Request, incremental: bool, now: float, version: str) -> bytes:
    """The next chunk as an SSE event; empty where there is none to write."""
    terminal = request.ending in (Ending.FINISH, Ending.QUEUE_ABORT)
    withheld = request.finish_reason is not None and not terminal
    if withheld or (request.shown == request.emitted and not terminal):
        return b""
    payload = chunk(request, incremental=incremental, now=now, version=version)
    request.shown, request.shown_text, request.opened = request.emitted, len(request.text.text), True
    request.off_by = 0
    data = frame(payload)
    if request.broken_json:
        request.broken_json = False
        return data[: len(data) * 2 // 3] + b"\n\n"
    return data


def _whole(request: Request) -> tuple[int, dict[str, Any] | None]:
    """Status and body of the answer to a request that did not ask for a stream; None: the chunk itself."""
    reason = request.finish_reason or {}
    if request.ending is Ending.ERROR:
        return 400, {"error": {"message": request.failure["message"]}}
    status = reason.get("status_code") if reason.get("type") == "abort" else None
    if status is None:
        return 200, None
    if status == HTTPStatus.BAD_REQUEST:
        return 400, {"error": {"message": reason["message"]}}
    return int(status), http_error(reason["message"], int(status))


def _whole_parts(request: Request, now: float, version: str) -> list[bytes | Mark]:
    if request.ending is None:
        return []
    if request.ending in (Ending.CUT, Ending.LOST):
        return _close(request, [], Mark.CUT)
    body = _whole(request)[1]
    if body is None:
        body = chunk(request, incremental=False, now=now, version=version)
    return _close(request, [_encode(body)], Mark.END)
