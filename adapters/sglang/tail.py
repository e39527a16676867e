"""Reading only what is new in a cumulative chunk.

A cumulative server repeats every earlier token in every chunk, and decoding them again costs more with each token.
What is repeated is the same bytes: they are compared as bytes and cut out, and the rest is decoded and checked like a
delta. Whatever does not fit exactly is decoded whole instead; nothing is believed because of the cut.
"""

from __future__ import annotations

from msgspec import MsgspecError

from adapters.sglang.wire_types import RAW_CHUNK

META = b'"meta_info":{'
LIST = b',"output_token_logprobs":['
"""As orjson writes it. An unescaped quote cannot be inside a JSON string, so what is found is a key."""
PATIENCE = 3
"""So many lists in a row that nothing could be cut by, and no more are learned."""


class TailCutter:
    """Cuts the pairs shown before out of cumulative chunks. Holds the bytes of the last list: about 20 per token."""

    __slots__ = ("_list", "_list_at", "_patience", "_rest", "meta_at")

    def __init__(self) -> None:
        self.meta_at = (
            0  # where meta_info began in the last payload, and the list: both only move to the right
        )
        self._list_at = 0
        self._list: bytes | None = None  # without its closing bracket
        self._rest = 0  # where the new pairs begin in the payload that was cut last
        self._patience = PATIENCE

    def cut(self, payload: bytes) -> bytes | None:
        """`payload` with only the pairs that follow the last list; None where it does not begin with that list."""
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
        self.meta_at, self._list_at, self._rest = meta, at, rest
        return b"{" + payload[meta : start + 1] + payload[rest:]

    def keep(self, payload: bytes) -> None:
        """The payload that was cut last was good, and brought pairs without texts: the next begins with its list."""
        self._patience = PATIENCE
        start = self._list_at + len(LIST) - 1
        self._list = payload[start : payload.find(b"]]", self._rest) + 1]

    def learn(self, payload: bytes) -> None:
        """Remember the list of a cumulative chunk that had to be decoded whole."""
        self._list = None
        if self._patience == 0:
            return
        self._patience -= 1
        at = payload.find(LIST)
        meta = payload.rfind(META, 0, max(at, 0))
        if meta < 0:
            return
        try:
            raw = bytes(RAW_CHUNK.decode(payload).meta_info.output_token_logprobs)
        except MsgspecError:
            return
        if len(raw) > len(b"[]") and payload.startswith(raw, at + len(LIST) - 1):
            self._list, self._list_at, self.meta_at = raw[:-1], at, meta
