"""The simulated tokenizer: byte-level, 512 ids, the same numbering as a byte-level BPE without merges.

Ids 0 to 255 are the 256 bytes in the order of the byte-level alphabet (``!`` is 0, so "Hello" is
``[39, 68, 75, 75, 78]``, as ``/v1/tokenize`` of a tiny model on SGLang 0.5.23 answered); 256 to 258 are the special
tokens, which have no text. The ids above are known to the model but not to its tokenizer: streamed text has ``!`` for
them (id 0), ``/v1/detokenize`` and the search for stop strings skip them, as seen there.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

VOCAB_SIZE = 512
BOS_ID, EOS_ID, PAD_ID = 256, 257, 258
SPECIAL_IDS = frozenset((BOS_ID, EOS_ID, PAD_ID))


def _byte_order() -> list[int]:
    """Bytes by id: first those that print as themselves in Latin-1, then the others."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return printable + [byte for byte in range(256) if byte not in set(printable)]


_BYTE_OF_ID = _byte_order()
_ID_OF_BYTE = {byte: token for token, byte in enumerate(_BYTE_OF_ID)}
_KNOWN = tuple(bytes([byte]) for byte in _BYTE_OF_ID)
_PIECES = (*_KNOWN, *(b"" for _ in range(256, VOCAB_SIZE)))
_STREAMED = (*_KNOWN, *(b"" if token in SPECIAL_IDS else b"!" for token in range(256, VOCAB_SIZE)))


def encode(text: str) -> list[int]:
    """Ids of ``text``, one per UTF-8 byte."""
    return [_ID_OF_BYTE[byte] for byte in text.encode()]


def decode(ids: Iterable[int]) -> str:
    """The text of ``ids``; bytes that are no UTF-8 become U+FFFD."""
    return b"".join([_PIECES[token] for token in ids]).decode("utf-8", "replace")


class TextStream:
    """Text of a growing list of ids, in deltas: an unfinished character is held back until it is whole."""

    __slots__ = ("_decoder", "text")

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.text = ""

    def push(self, ids: Sequence[int], *, final: bool = False) -> str:
        """The text that ``ids`` add; with ``final`` nothing is held back any longer."""
        delta = self._decoder.decode(b"".join([_STREAMED[token] for token in ids]), final)
        self.text += delta
        return delta

    def trim(self, text: str) -> None:
        """Replace the whole text, when a stop string was cut off its end."""
        self.text = text
