"""The whole decoding of one attempt, without a socket: bytes of the body in, events out, one end."""

from __future__ import annotations

from adapters.sglang.answers import Answer, end
from adapters.sglang.channels import ChannelReader, asked_channels
from adapters.sglang.nucleus import wants_nucleus
from adapters.sglang.sse import DEFAULT_EVENT_LIMIT, SSEDecoder
from adapters.sglang.wire import WireDecoder
from lifecycle.backend import Call
from lifecycle.events import StreamEnd, StreamEvent
from lifecycle.states import Reason


class AttemptDecoder:
    """Bytes of one response body to events. `ended` is true once a StreamEnd has been given out."""

    __slots__ = ("_sse", "_wire")

    def __init__(self, call: Call, *, text: bool = False, event_limit: int = DEFAULT_EVENT_LIMIT) -> None:
        channels = None
        nucleus = wants_nucleus(call.sampling_params)
        asked = asked_channels(call.extra)
        if nucleus or asked:
            start_len = call.extra.get("routed_experts_start_len")
            absolute = start_len if type(start_len) is int else 0
            channels = ChannelReader(len(call.input_ids), absolute, asked=asked, nucleus=nucleus)
        self._sse = SSEDecoder(event_limit)
        self._wire = WireDecoder(call.rid, text=text, channels=channels)

    @property
    def ended(self) -> bool:
        """Whether the end has been given out."""
        return self._wire.ended

    @property
    def complete(self) -> bool:
        """Whether the server ended the stream in its own words: nothing but the end of the body is to come."""
        return self._wire.ending is not None and self._wire.ending.reason is not Reason.MALFORMED

    @property
    def have(self) -> int:
        """How many tokens this attempt has shown."""
        return self._wire.have

    @property
    def skipped(self) -> int:
        """How many chunks were overtaken by a newer one in the same read and never decoded."""
        return self._wire.skipped

    def feed(self, data: bytes) -> list[StreamEvent]:
        """The events that the bytes of one read complete. Never raises for what a server says."""
        if self._wire.ended:
            return []
        events = self._wire.read(self._sse.feed(data))
        if self._sse.broken is not None and not self._wire.ended:
            events.append(self.close(Answer.MALFORMED, self._sse.broken))
        return events

    def close(self, answer: Answer, detail: str | None = None) -> StreamEnd:
        """The end of a stream whose own chunks brought none; what was cut off in the middle is named."""
        self._wire.ended = True
        if self._sse.pending and answer is not Answer.MALFORMED:
            cut = f"{self._sse.pending} bytes of an unfinished event were dropped"
            detail = f"{detail}; {cut}" if detail else cut
        return end(answer, detail)
