"""SGLang's chunks in, stream events out: the only file that knows what the fields mean.

One length rule decodes every stream mode and every version (facts: the sources of 0.4.6.post5 to 0.5.23, and a
running 0.5.23). N is how many tokens the server counts, `have` how many this attempt has shown:

- N pairs in `output_token_logprobs`: the list is cumulative; its first `have` must be what was shown.
- N - have pairs: the list is a delta.
- more than N: a delta and a full list glued together on an abort (keep the last N), or a list that was serialised
  after it had grown (keep the first N).
- on a terminal abort N may be missing or below `have`, and the list may be gone: keep what is held.

Anything else is malformed, and the numbers say so. The rule is applied chunk by chunk; no setting chooses a mode.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from zlib import crc32

from msgspec import UNSET, MsgspecError, ValidationError

from adapters.sglang.answers import Answer, end, error_answer, finish_answer, shorten, status_code
from adapters.sglang.channels import ChannelReader
from adapters.sglang.tail import TailCutter
from adapters.sglang.wire_types import (
    CHUNK,
    META_FIELDS,
    SPANS,
    TAIL_CHUNK,
    TAIL_TEXT_CHUNK,
    TERMINAL,
    TEXT_CHUNK,
    Chunk,
    Finish,
    MetaInfo,
    Pair,
    TailTextChunk,
    TerminalMeta,
    TextChunk,
)
from lifecycle.errors import StreamMalformed
from lifecycle.events import Anomaly, StreamEnd, StreamEvent, TokenSlice, VersionSpan

DONE = b"[DONE]"
NAN = float("nan")
GARBAGE = (MsgspecError, UnicodeDecodeError, RecursionError)
"""What the JSON decoder raises for bytes that are no chunk."""
NO_PAIRS: list[Pair] = []
NOT_FINISHED = b'"finish_reason":null'
LABEL = b',"weight_version":"'
TOKENS_COUNT = frozenset({Answer.STOP, Answer.LENGTH, Answer.ABORT})
"""Terminal chunks whose tokens are tokens; those of a status-code abort are junk (schedule_batch.py, 0.5.23)."""


def select(pairs: Sequence[Pair], count: int, have: int, *, aborted: bool) -> tuple[Sequence[Pair], int]:
    """Apply the length rule: `(list, how many of its first entries were shown before)`.

    `count` is N, `have` what was shown. Raises StreamMalformed, naming the numbers, when nothing fits.
    """
    length = len(pairs)
    if length == count >= have:
        return pairs, have
    if length == count - have:
        return pairs, 0
    if length > count >= have:
        return (pairs[length - count :] if aborted else pairs[:count]), have
    raise StreamMalformed(
        f"{length} logprobs where {count} tokens are counted and {have} were shown: "
        f"neither all ({count}) nor the new ones ({count - have})"
    )


class WireDecoder:
    """The events of one attempt.

    `read` takes the payloads of one socket read and returns their events: token slices (one per run of equal
    version labels), channels and anomalies, and at last one StreamEnd, after which `ended` is true and further
    payloads are ignored. Garbage is a StreamEnd too (`rejected`, `malformed`); nothing is raised. `have` counts the
    tokens shown so far. With `text` the slices carry text where it can be trusted: never from an abort's chunk.
    """

    __slots__ = (
        "_channels",
        "_checksum",
        "_cumulative",
        "_decode",
        "_decode_tail",
        "_label",
        "_logprobs",
        "_rid",
        "_shown_texts",
        "_tail",
        "_texts",
        "_tokens",
        "ended",
        "ending",
        "have",
        "skipped",
    )

    def __init__(self, rid: str, *, text: bool = False, channels: ChannelReader | None = None) -> None:
        self.have = 0
        self.ended = False
        self.skipped = 0  # chunks overtaken by a newer one in the same read, and never decoded
        self._rid: str | None = rid
        self._decode: Callable[[bytes], Chunk] = (TEXT_CHUNK if text else CHUNK).decode
        self._decode_tail: Callable[[bytes], Chunk] = (TAIL_TEXT_CHUNK if text else TAIL_CHUNK).decode
        self._channels = channels
        self._texts: list[str] | None = [] if text else None
        self._shown_texts: list[str] = []
        self._tokens = array("i")
        self._logprobs = array("d")
        self._label: str | None = None
        self._checksum = 0  # of all token ids shown and flushed; the ids themselves are the engine's to keep
        self._cumulative = False
        self._tail = TailCutter(text=text)
        self.ending: StreamEnd | None = None

    def read(self, payloads: Sequence[bytes]) -> list[StreamEvent]:
        """Take the payloads of one socket read, in order; return their events."""
        events: list[StreamEvent] = []
        if self.ended:
            return events
        try:
            if self._cumulative and len(payloads) > 1:
                self._newest(payloads, events)
            else:
                self._all(payloads, events)
        except (*GARBAGE, StreamMalformed) as problem:
            self._finish(end(Answer.MALFORMED, problem))
        self._flush(events)
        if self.ending is not None:
            events.append(self.ending)
        return events

    def _all(self, payloads: Sequence[bytes], events: list[StreamEvent]) -> None:
        for payload in payloads:
            if self.ended:
                if payload != DONE:
                    self._note(events, "after_end", f"{len(payload)} bytes after the end: ignored")
            elif payload == DONE:
                self._finish(end(Answer.DONE, "[DONE] without a terminal chunk"))
            elif self._cumulative:
                self._cumulative_payload(payload, events)
            else:
                self._apply(self._decode(payload), payload, events)

    def _newest(self, payloads: Sequence[bytes], events: list[StreamEvent]) -> None:
        """Of each run of cumulative chunks with the same label, decode the newest only.

        A chunk that fits the length rule tells everything that those before it told. Where the newest does not fit,
        all are decoded in order.
        """
        labels = [_plain_label(payload, self._tail.meta_at) for payload in payloads]
        overtaken: list[bytes] = []
        for payload, label, following in zip(payloads, labels, (*labels[1:], None), strict=True):
            if label is not None and label == following:
                overtaken.append(payload)
                continue
            try:
                self._all((payload,), events)
                self.skipped += len(overtaken)
            except (*GARBAGE, StreamMalformed):
                self._all((*overtaken, payload), events)
            overtaken.clear()

    def _cumulative_payload(self, payload: bytes, events: list[StreamEvent]) -> None:
        """Decode only what is new where that can be told; else all of it."""
        small = self._tail.cut(payload)
        chunk = None if small is None else self._short(small, payload)
        if chunk is not None:
            self._apply(chunk, payload, events)
        else:
            self._apply(self._decode(payload), payload, events)
            self._tail.learn(payload)

    def _short(self, small: bytes, payload: bytes) -> Chunk | None:
        """A chunk whose earlier pairs were cut out, if what is left is exactly what is new."""
        try:
            chunk = self._decode_tail(small)
        except GARBAGE:
            return None
        meta = chunk.meta_info
        if meta is None or meta.output_token_logprobs is None or meta.completion_tokens is None:
            return None
        new = len(meta.output_token_logprobs)
        if new != meta.completion_tokens - self.have:
            return None
        self._tail.keep(payload, new)
        return chunk

    def _apply(self, chunk: Chunk, payload: bytes, events: list[StreamEvent]) -> None:
        """Check one chunk as a whole, then commit it."""
        meta = chunk.meta_info
        if meta is None:
            self._finish(self._error(chunk))
            return
        if self._rid is not None:
            self._check_rid(meta.id, events)
        pairs = meta.output_token_logprobs
        count = meta.completion_tokens
        if meta.finish_reason is not None:
            self._terminal(chunk, meta, meta.finish_reason, payload, events)
        elif pairs is not None and count is not None and len(pairs) == count - self.have:
            self._commit(chunk, meta, pairs, payload, events)  # a delta: nothing to select or compare
        else:
            self._commit(chunk, meta, self._fresh(meta, aborted=False), payload, events)

    def _fresh(self, meta: MetaInfo, *, aborted: bool) -> Sequence[Pair]:
        """The pairs of this chunk that were not shown before, by the length rule. Raises StreamMalformed."""
        count = _count(meta)
        pairs = meta.output_token_logprobs or NO_PAIRS
        if count is None:
            if pairs:
                raise StreamMalformed(f"{len(pairs)} logprobs and no completion_tokens to check them by")
            return NO_PAIRS
        selected, shown = select(pairs, count, self.have, aborted=aborted)
        if not shown:
            return selected
        self._cumulative = True
        if not self._continues(selected, shown):
            raise StreamMalformed(
                f"the first {shown} of {len(selected)} tokens are not the {shown} shown before"
            )
        return selected[shown:]

    def _continues(self, pairs: Sequence[Pair], shown: int) -> bool:
        """Whether the first `shown` tokens of `pairs` are those that were shown."""
        ids = array("i", [pair[1] for pair in pairs[:shown]])
        return crc32(ids) == crc32(self._tokens, self._checksum)

    def _commit(
        self,
        chunk: Chunk,
        meta: MetaInfo,
        pairs: Sequence[Pair],
        payload: bytes,
        events: list[StreamEvent],
        *,
        aborted: bool = False,
    ) -> None:
        label = meta.weight_version
        if label.__class__ is int:
            label = str(label)
        if label != self._label:
            self._flush(events)
            self._label = label  # type: ignore[assignment]  # a number is a string by now
        tokens, logprobs = self._tokens, self._logprobs
        start = self.have
        for pair in pairs:
            logprob = pair[0]
            logprobs.append(NAN if logprob is None else logprob)
            tokens.append(pair[1])
        self.have = start + len(pairs)
        if self._texts is not None and not aborted:
            self._texts.append(self._new_text(chunk, meta, start))
        if self._channels is not None:
            self._flush(events)
            ended = meta.finish_reason is not None
            events.extend(
                self._channels.read(payload, start, self.have, ended=ended, finished=ended and not aborted)
            )

    def _new_text(self, chunk: Chunk, meta: MetaInfo, start: int) -> str:
        """The new part of `text`: all of it in a delta; behind what was shown, where it repeats that.

        Some versions send text and logprobs in different modes (0.5.10: delta and cumulative), so the list alone
        does not tell.
        """
        text = (chunk.text if isinstance(chunk, TextChunk) else None) or ""
        full = len(meta.output_token_logprobs or ()) != self.have - start
        if full and not isinstance(chunk, TailTextChunk):
            shown = "".join(self._shown_texts)
            self._shown_texts = [shown]
            text = text.removeprefix(shown)
        self._shown_texts.append(text)
        return text

    def _flush(self, events: list[StreamEvent]) -> None:
        """Emit what has been gathered under one label."""
        if not self._tokens:
            return
        text = None
        if self._texts is not None:
            text = "".join(self._texts)
            self._texts.clear()
        self._checksum = crc32(self._tokens, self._checksum)
        events.append(TokenSlice(self._tokens, self._logprobs, self._label, text))
        self._tokens = array("i")
        self._logprobs = array("d")

    def _terminal(
        self, chunk: Chunk, meta: MetaInfo, finish: Finish, payload: bytes, events: list[StreamEvent]
    ) -> None:
        status = status_code(finish.status_code)
        answer = finish_answer(finish.type, finish.matched, status)
        if answer in TOKENS_COUNT:
            aborted = answer is Answer.ABORT
            fresh = self._kept(meta, events) if aborted else self._fresh(meta, aborted=False)
            self._commit(chunk, meta, fresh, payload, events, aborted=aborted)
        elif (count := _count(meta) or 0) > self.have:
            self._note(
                events, "junk_tokens", f"{count - self.have} tokens in a chunk that ends with {answer}"
            )
        spans, numbers = self._last_words(payload, events)
        matched = finish.matched if isinstance(finish.matched, int | str) else None
        detail = finish.message
        if answer in (Answer.UNKNOWN_FINISH, Answer.NAN):
            detail = f"finish_reason {finish.type!r}, matched {finish.matched!r}"
        self._finish(end(answer, detail, status=status, matched=matched, spans=spans, meta=numbers))

    def _kept(self, meta: MetaInfo, events: list[StreamEvent]) -> Sequence[Pair]:
        """The new pairs of a terminal abort: an abort that says less than was shown takes nothing away."""
        count = _count(meta)
        if count is not None and count >= self.have and (meta.output_token_logprobs or count == self.have):
            return self._fresh(meta, aborted=True)
        if (count or 0) != self.have:
            length = len(meta.output_token_logprobs or ())
            self._note(
                events,
                "abort_counts",
                f"{count} tokens counted, {length} logprobs, {self.have} shown: kept those",
            )
        return NO_PAIRS

    def _last_words(
        self, payload: bytes, events: list[StreamEvent]
    ) -> tuple[tuple[VersionSpan, ...], dict[str, int | float | str]]:
        """Spans and numbers of the last chunk; what has an unknown shape is left out, and noted."""
        meta = TERMINAL.decode(payload).meta_info
        spans: tuple[VersionSpan, ...] = ()
        if meta.weight_versions is not UNSET:
            try:
                found = SPANS.decode(meta.weight_versions) or ()
                spans = tuple(VersionSpan(str(s.version), s.start, s.end) for s in found if s.start != s.end)
            except ValidationError as problem:
                self._note(events, "spans", f"weight_versions: {problem}")
        return spans, _numbers(meta)

    def _error(self, chunk: Chunk) -> StreamEnd:
        """The end that an error chunk is: `{"error": {"message", "type", "code", "retryable"}}`."""
        error = chunk.error
        if error is None:
            raise StreamMalformed("a chunk with neither meta_info nor error")
        if isinstance(error, dict):
            code = status_code(error.get("code"))
            return end(error_answer(code), error.get("message", error), status=code)
        return end(error_answer(None), error)

    def _check_rid(self, rid: object, events: list[StreamEvent]) -> None:
        if rid is not None and rid != self._rid:
            self._note(
                events, "foreign_rid", f"the server calls it {rid!r}: an abort by rid will not find it"
            )
        self._rid = None

    def _note(self, events: list[StreamEvent], kind: str, detail: str) -> None:
        self._flush(events)
        events.append(Anomaly(kind, shorten(detail) or ""))

    def _finish(self, ending: StreamEnd) -> None:
        self.ending = ending
        self.ended = True


def _count(meta: MetaInfo) -> int | None:
    return meta.output_token_logprobs_length if meta.completion_tokens is None else meta.completion_tokens


def _numbers(meta: TerminalMeta) -> dict[str, int | float | str]:
    values = ((name, getattr(meta, name)) for name in META_FIELDS)
    return {name: value for name, value in values if type(value) in {int, float, str}}


def _plain_label(payload: bytes, meta_at: int) -> bytes | None:
    """The version label of an unfinished chunk by a search for bytes, or None where only decoding can tell.

    The search begins at `meta_at`, where meta_info began in an earlier chunk. An unescaped quote cannot be inside a
    JSON string, so what is found is a key.
    """
    start = payload.find(NOT_FINISHED, meta_at)
    start = payload.find(LABEL, start) if start >= 0 else -1
    stop = payload.find(b'"', start + len(LABEL)) if start >= 0 else -1
    label = payload[start:stop] if stop >= 0 else b"\\"
    return None if b"\\" in label else label
