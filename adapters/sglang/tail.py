"""Reading only what is new in a cumulative chunk.

A cumulative server repeats every earlier token in every chunk, and decoding them again costs more with each token.
What is repeated is the same bytes: they are compared as bytes and cut out, and the rest is decoded and checked like a
delta. Whatever does not fit exactly is decoded whole instead; nothing is believed because of the cut.
"""

from __future__ import annotations

from msgspec import MsgspecError

from adapters.sglang.wire_types import RAW_CHUNK

TEXT = b'{"text":"'
TEXT_END = b'","output_ids":['
META = b'"meta_info":{'
LIST = b',"output_token_logprobs":['
"""As orjson writes them. A quote behind a comma is not inside a JSON string, so what is found is a key."""
PATIENCE = 3
"""So many lists in a row that nothing could be cut by, and no more are learned."""


class TailCutter:
    """Cuts what was shown before out of cumulative chunks: pairs, ids, and the text or, with `text`, its old part.

    Holds the bytes of the last list, about 20 per token, and with `text` those of the last text.
    """

    __slots__ = ("_head", "_list", "_list_at", "_patience", "_rest", "_text", "_text_end", "meta_at")

    def __init__(self, *, text: bool = False) -> None:
        self.meta_at = (
            0  # where meta_info began in the last payload, and the list: both only move to the right
        )
        self._list_at = 0
        self._list: bytes | None = None  # without its closing bracket
        self._rest = 0  # where the new pairs begin in the payload that was cut last
        self._text = text
        self._head = TEXT  # the last payload up to the end of its text
        self._text_end = 0
        self._patience = PATIENCE

    def cut(self, payload: bytes) -> bytes | None:
        """`payload` with only what is new in it; None where it does not begin with the last text and list."""
        if self._list is None:
            return None
        at = payload.find(LIST, self._list_at)
        meta = payload.find(META, self.meta_at, at) if at >= 0 else -1
        start = at + len(LIST) - 1
        if meta < 0 or not payload.startswith(self._list, start):
            return None
        rest = start + len(self._list)
        if payload[rest : rest + 1] == b",":
            rest += 1
        opening = b"{"
        if self._text:
            end = payload.find(TEXT_END, len(self._head), meta) if payload.startswith(self._head) else -1
            if end < 0:
                return None
            opening = TEXT + payload[len(self._head) : end] + b'",'
            self._text_end = end
        self.meta_at, self._list_at, self._rest = meta, at, rest
        return opening + payload[meta : start + 1] + payload[rest:]

    def keep(self, payload: bytes, new: int) -> None:
        """The payload that was cut last was good, with `new` pairs, without texts: the next one begins like it."""
        self._patience = PATIENCE
        if new:
            start = self._list_at + len(LIST) - 1
            self._list = payload[start : payload.find(b"]]", self._rest) + 1]
        if self._text:
            self._head = payload[: self._text_end]

    def learn(self, payload: bytes) -> None:
        """Remember text and list of a cumulative chunk that had to be decoded whole."""
        self._list = None
        if self._patience == 0:
            return
        self._patience -= 1
        at = payload.find(LIST)
        meta = payload.rfind(META, 0, max(at, 0))
        end = payload.find(TEXT_END, 0, max(meta, 0)) if payload.startswith(TEXT) else -1
        if meta < 0 or (self._text and end < 0):
            return
        try:
            raw = bytes(RAW_CHUNK.decode(payload).meta_info.output_token_logprobs)
        except MsgspecError:
            return
        if len(raw) > len(b"[]") and payload.startswith(raw, at + len(LIST) - 1):
            self._list, self._list_at, self.meta_at = raw[:-1], at, meta
            self._head = payload[: max(end, 0)]
