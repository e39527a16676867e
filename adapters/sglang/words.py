"""What a server said, in a few words: error bodies come in many shapes."""

from __future__ import annotations

from typing import Any

import msgspec

from adapters.sglang.answers import shorten

MESSAGE_KEYS = ("error", "detail", "message")


def said(body: bytes) -> str:
    """The message in an error body, or the body itself, on one line and cut short; "" for an empty body.

    Shapes seen on SGLang 0.5.23 and sglang-router 0.3.2: `{"error": {"message": …}}`, `{"error": "…"}`,
    `{"object": "error", "message": …}`, `{"detail": …}`, plain text, HTML, and an error chunk of an event stream.
    """
    text = body.decode("utf-8", "replace").strip()
    try:
        found: Any = msgspec.json.decode(text.removeprefix("data:").split("\n\n")[0])
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        return shorten(text) or ""
    return shorten(_message(found)) or ""


def _message(found: Any) -> Any:
    for key in MESSAGE_KEYS:
        if isinstance(found, dict) and found.get(key):
            return _message(found[key])
    return found
