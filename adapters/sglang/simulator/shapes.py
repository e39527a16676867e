"""The JSON of a response, key by key and in the order in which SGLang 0.5.23 writes it."""

from __future__ import annotations

from typing import Any

import msgspec

from adapters.sglang.simulator.request import Ending, Request

_encode = msgspec.json.encode

DONE = b"data: [DONE]\n\n"


def frame(payload: Any) -> bytes:
    """One SSE event."""
    return b"data: " + _encode(payload) + b"\n\n"


def error_payload(message: str, code: int = 400) -> dict[str, Any]:
    """The error chunk inside a 200 stream (the four keys: since 0.5.13)."""
    return {"error": {"message": message, "type": "invalid_request_error", "code": code, "retryable": False}}


def http_error(message: str, status: int) -> dict[str, Any]:
    """The body of an HTTP error raised inside the server."""
    return {"object": "error", "message": message, "type": str(status), "param": None, "code": status}


def chunk(request: Request, *, incremental: bool, now: float, version: str) -> dict[str, Any]:
    """The chunk with everything that was emitted since the last one; terminal if the request has finished."""
    if request.ending is Ending.QUEUE_ABORT:
        return _queue_abort(request, incremental=incremental, now=now, version=version)
    count, first = request.emitted, request.shown if incremental else 0
    meta: dict[str, Any] = {
        "id": request.rid,
        "finish_reason": request.finish_reason,
        "prompt_tokens": request.prompt_tokens,
        "weight_version": request.label,
        "num_retractions": request.retractions,
    }
    if request.body.return_logprob:
        _add_logprobs(meta, request, first, count)
    meta["reasoning_tokens"] = 0
    meta["completion_tokens"] = count + request.off_by
    meta["cached_tokens"] = request.cached_tokens
    if request.finish_reason is not None:
        _add_versions(meta, request, count, version)
    device = request.cached_tokens
    meta["cached_tokens_details"] = {"device": device, "host": 0} if device else None
    meta["dp_rank"] = None
    if request.finish_reason is not None:
        meta["e2e_latency"] = now - request.started
    if not request.opened:
        meta["response_sent_to_client_ts"] = now
    text = request.text.text
    return _with_prompt(
        request,
        {
            "text": text[request.shown_text :] if incremental else text,
            "output_ids": request.tokens[first:count],
            "meta_info": meta,
        },
    )


def _queue_abort(request: Request, *, incremental: bool, now: float, version: str) -> dict[str, Any]:
    """The abort of a waiting request, written by the client-facing process from its own record.

    On an incremental server it repeats the whole text and all logprobs and only the last id (issue #40901, seen on
    0.5.23); if a delta was still unread, the two are glued together.
    """
    count, text = request.emitted, request.text.text
    meta: dict[str, Any] = {
        "id": request.rid,
        "finish_reason": request.finish_reason,
        "weight_version": version,
        "e2e_latency": now - request.started,
    }
    _add_versions(meta, request, count, version)
    if request.body.return_logprob:
        _add_logprobs(meta, request, 0, count)
    meta["completion_tokens"] = count
    ids = request.tokens[:count]
    if incremental:
        delta = ids[request.shown :]
        text = text[request.shown_text :] + text
        ids = delta + ids[-1:]
        if request.body.return_logprob:
            meta["output_token_logprobs"] = (
                request.pairs[request.shown : count] + meta["output_token_logprobs"]
            )
    if not request.opened:
        meta["response_sent_to_client_ts"] = now
    return _with_prompt(request, {"text": text, "output_ids": ids, "meta_info": meta})


def _add_versions(meta: dict[str, Any], request: Request, count: int, version: str) -> None:
    """Spans, and the label overwritten by the last of them (since 0.5.19)."""
    spans = request.spans(count, version)
    meta["weight_versions"] = spans
    meta["weight_version"] = spans[-1]["version"]


def _add_logprobs(meta: dict[str, Any], request: Request, first: int, count: int) -> None:
    meta["input_token_logprobs"] = request.prompt_pairs
    meta["output_token_logprobs"] = request.pairs[first:count]
    meta["output_token_logprobs_length"] = min(count, len(request.pairs)) + request.off_by


def _with_prompt(request: Request, payload: dict[str, Any]) -> dict[str, Any]:
    if request.body.return_prompt_token_ids:
        payload["prompt_token_ids"] = request.prompt
    return payload
