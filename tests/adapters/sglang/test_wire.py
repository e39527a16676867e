"""The wire decoder: every shape of every version, one rule."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from adapters.sglang.wire import WireDecoder, select
from lifecycle.errors import StreamMalformed
from lifecycle.events import EndKind, VersionSpan
from lifecycle.states import FinishReason, Reason
from tests.support.sglang_chunks import (
    ABORTED,
    LENGTH,
    QUEUE_ABORT,
    RID,
    STOP,
    Seen,
    chunk,
    decode,
    encode,
    pairs,
)

DONE = b"[DONE]"
SPANS = [{"version": "6", "start": 0, "end": 2}, {"version": "7", "start": 2, "end": 4}]


class TestModes:
    """The same four tokens in every mode."""

    @pytest.mark.parametrize(
        "lists",
        [
            [[11], [12], [13], [14]],
            [[11], [11, 12], [11, 12, 13], [11, 12, 13, 14]],
            [[11], [12, 13], [14]],
            [[11, 12], [11, 12, 13, 14]],
            [[11], [12], [11, 12, 13, 14]],
            [[], [11, 12, 13, 14], []],
            [[], [], [11, 12, 13, 14], [11, 12, 13, 14]],
        ],
        ids=[
            "incremental",
            "cumulative",
            "merged deltas",
            "merged cumulative",
            "delta, then full",
            "empty last delta",
            "empty first, last full",
        ],
    )
    @pytest.mark.parametrize("reads", ["one", "each"])
    def test_tokens(self, lists: list[list[int]], reads: str) -> None:
        """Deltas, full lists and a change from one to the other end in the same tokens."""
        payloads: list[bytes] = []
        count = 0
        for number, tokens in enumerate(lists):
            full = tokens[:1] == [11] and len(tokens) >= count
            count = len(tokens) if full else count + len(tokens)
            payloads.append(chunk(tokens, count, finish=LENGTH if number == len(lists) - 1 else None))
        batches = [[*payloads, DONE]] if reads == "one" else [[payload] for payload in [*payloads, DONE]]
        seen = decode(*batches)
        assert seen.tokens == [11, 12, 13, 14]
        assert seen.logprobs == [-0.5] * 4
        assert seen.labels == ["7"] * 4
        assert seen.end.kind is EndKind.FINISHED
        assert seen.end.finish_reason is FinishReason.LENGTH
        assert seen.anomalies == []

    def test_one_read_is_one_slice(self) -> None:
        """All tokens of one read with one label come as one slice."""
        seen = decode([chunk([11], 1), chunk([12], 2), chunk([13], 3)])
        assert [list(each.tokens) for each in seen.slices] == [[11, 12, 13]]

    def test_a_label_change_splits_the_slice(self) -> None:
        """Tokens of one read under two labels come as two slices."""
        seen = decode([chunk([11], 1), chunk([12], 2, version="8"), chunk([13], 3, version="8")])
        assert [(list(each.tokens), each.version) for each in seen.slices] == [([11], "7"), ([12, 13], "8")]

    def test_null_logprob_is_nan(self) -> None:
        """A null logprob (orjson writes NaN so) is NaN; the token stays."""
        seen = decode([chunk(None, 2, output_token_logprobs=[[None, 11, None], [-1, 12, "x"]])])
        assert seen.tokens == [11, 12]
        assert math.isnan(seen.logprobs[0])
        assert seen.logprobs[1] == -1.0

    def test_old_ids_are_not_believed(self) -> None:
        """0.5.3 to 0.5.5 send ids as a delta and logprobs in full: the logprobs count."""
        meta = {
            "id": RID,
            "finish_reason": None,
            "completion_tokens": 2,
            "output_token_logprobs": pairs(11, 12),
        }
        seen = decode([chunk([11], 1)], [encode({"text": "ab", "output_ids": [12], "meta_info": meta})])
        assert seen.tokens == [11, 12]
        assert seen.labels == ["7", None]

    def test_length_field_stands_in_for_the_count(self) -> None:
        """Without completion_tokens, output_token_logprobs_length counts."""
        seen = decode(
            [chunk([11], output_token_logprobs_length=1)], [chunk([12], output_token_logprobs_length=2)]
        )
        assert seen.tokens == [11, 12]

    def test_list_longer_than_the_count(self) -> None:
        """A list that grew after its count was taken is cut to the count."""
        seen = decode([chunk([11], 1)], [chunk([11, 12, 13], 2)], [chunk([11, 12, 13], 3)])
        assert seen.tokens == [11, 12, 13]

    def test_numeric_version(self) -> None:
        """A label that is a number is a label."""
        seen = decode([chunk([11], 1, version=None, weight_version=8)])
        assert seen.labels == ["8"]

    def test_no_tokens_yet(self) -> None:
        """Chunks that bring nothing are no events."""
        assert decode([chunk([], 0)], [chunk(None, 0)], [chunk(None)], [chunk([], None)]).events == []

    def test_max_new_tokens_zero(self) -> None:
        """A prefill-only request finishes with no token at all."""
        seen = decode([chunk([], 0, finish={"type": "length", "length": 0}), DONE])
        assert seen.tokens == []
        assert seen.end.finish_reason is FinishReason.LENGTH


class TestOvertaken:
    """Cumulative chunks that a newer one in the same read makes needless."""

    def read(self, *reads: list[bytes]) -> tuple[Seen, int]:
        """Events and the number of chunks that were never decoded."""
        decoder = WireDecoder(RID)
        events = [each for payloads in reads for each in decoder.read(payloads)]
        return Seen(events), decoder.skipped

    START = ([chunk([11], 1)], [chunk([11, 12], 2)])

    def test_only_the_newest_is_decoded(self) -> None:
        """Of five cumulative chunks in one read, four are skipped."""
        later = [chunk(range(11, 11 + n), n) for n in range(3, 8)]
        seen, skipped = self.read(*self.START, later)
        assert seen.tokens == list(range(11, 18))
        assert skipped == 4

    def test_a_label_change_is_not_skipped(self) -> None:
        """The last chunk before a change of the label is decoded: its tokens keep their label."""
        later = [
            chunk([11, 12, 13], 3),
            chunk([11, 12, 13, 14], 4),
            chunk([11, 12, 13, 14, 15], 5, version="8"),
            chunk([11, 12, 13, 14, 15, 16], 6, version="8"),
        ]
        seen, skipped = self.read(*self.START, later)
        assert seen.labels == ["7"] * 4 + ["8"] * 2
        assert skipped == 2

    def test_the_end_is_not_skipped(self) -> None:
        """The terminal chunk is decoded, and what it overtakes under another finish_reason too."""
        later = [
            chunk([11, 12, 13], 3),
            chunk([11, 12, 13, 14], 4),
            chunk([11, 12, 13, 14, 15], 5, finish=STOP),
            DONE,
        ]
        seen, skipped = self.read(*self.START, later)
        assert seen.tokens == [11, 12, 13, 14, 15]
        assert seen.end.matched == 2
        assert skipped == 1

    def test_a_delta_among_them_is_not_lost(self) -> None:
        """When the newest does not cover the others, all are decoded in order."""
        seen, skipped = self.read(*self.START, [chunk([13], 3), chunk([14], 4), chunk([15], 5)])
        assert seen.tokens == [11, 12, 13, 14, 15]
        assert skipped == 0

    @pytest.mark.parametrize(
        "bad",
        [b'{"finish_reason":null,"weight_version":"7",', chunk([11, 99, 13, 14], 4), chunk([11], None)],
        ids=["no JSON", "another prefix", "no count"],
    )
    def test_what_was_good_before_garbage_is_kept(self, bad: bytes) -> None:
        """Chunks before a bad one count as they would have, had they come alone."""
        bad = bad if b"meta_info" in bad else b'{"id":"x","finish_reason":null,"weight_version":"7",'
        seen, _ = self.read(*self.START, [chunk([11, 12, 13], 3), bad])
        assert seen.tokens == [11, 12, 13]
        assert seen.end.kind is EndKind.REJECTED

    def test_short_cut_that_does_not_fit(self) -> None:
        """A chunk that repeats the list and then tells something impossible is judged as a whole."""
        for bad in (
            chunk([11, 12, 13], None),
            chunk([11, 12, 13], 9),
            chunk([11, 12], 2).replace(b',"completion_tokens":2', b',"completion_tokens":"2"'),
        ):
            seen, _ = self.read(*self.START, [chunk([11, 12], 2)], [bad])
            assert (seen.tokens, seen.end.kind) == ([11, 12], EndKind.REJECTED)

    def test_list_longer_than_its_count(self) -> None:
        """A list that grew after its count was taken is cut to the count also where it was repeated."""
        seen, _ = self.read(*self.START, [chunk([11, 12, 13, 14, 15], 3)], [chunk([11, 12, 13, 14, 15], 5)])
        assert seen.tokens == [11, 12, 13, 14, 15]

    def test_texts_in_the_list(self) -> None:
        """Pairs with texts, which may look like anything, are read whole."""
        texts = ["]]", "]]}}", ']],"x":[', "[[", ","]
        entries = [[-0.5, 11 + n, text] for n, text in enumerate(texts)]
        payloads = [chunk(None, n, output_token_logprobs=entries[:n]) for n in range(1, 6)]
        seen, _ = self.read(*([payload] for payload in payloads))
        assert seen.tokens == [11, 12, 13, 14, 15]

    @pytest.mark.parametrize("real", [False, True], ids=["no list of its own", "its own list behind it"])
    def test_a_list_that_is_not_the_list(self, real: bool) -> None:
        """A key of the same name inside another object is no shortcut, and is not believed."""
        nested = (
            '{"meta_info":{"nested":{"a":1,"output_token_logprobs":[[-0.5,99,null]]},"completion_tokens":2'
        )
        own = ',"output_token_logprobs":[[-0.5,11,null],[-0.5,12,null]]' if real else ""
        odd = f"{nested}{own}}}}}".encode()
        seen, _ = self.read(*self.START, [odd], [odd], [chunk([11, 12, 13], 3)])
        assert seen.tokens == [11, 12, 13]

    @pytest.mark.parametrize("order", ["list first", "spaces", "meta first"])
    def test_other_json(self, order: str) -> None:
        """JSON in another order or with spaces is read all the same, if at full price."""

        def other(count: int) -> bytes:
            meta = {"finish_reason": None, "weight_version": "7", "completion_tokens": count}
            entries = {"output_token_logprobs": pairs(*range(11, 11 + count))}
            if order == "spaces":
                return json.dumps({"meta_info": meta | entries}).encode()
            whole = {"meta_info": entries | meta, "text": "x"}
            return encode(whole if order == "list first" else {"meta_info": meta | entries, "text": "x"})

        seen, _ = self.read(*([other(count)] for count in range(1, 9)))
        assert seen.tokens == list(range(11, 19))
        assert seen.ends == []

    def test_label_with_an_escape(self) -> None:
        """A label that only a decoder can read is decoded, chunk by chunk."""
        strange = 'a"b'
        later = [chunk([11, 12, 13], 3, version=strange), chunk([11, 12, 13, 14], 4, version=strange)]
        seen, skipped = self.read(*self.START, later)
        assert seen.labels == ["7", "7", strange, strange]
        assert skipped == 0

    def test_no_label_at_all(self) -> None:
        """Chunks without a label are all decoded."""
        later = [chunk([11, 12, 13], 3, version=None), chunk([11, 12, 13, 14], 4, version=None)]
        seen, skipped = self.read(*self.START, later)
        assert seen.labels == ["7", "7", None, None]
        assert skipped == 0

    def test_text_that_looks_like_a_label(self) -> None:
        """What the model writes cannot pass for a key."""
        evil = '","finish_reason":null,"weight_version":"9","'
        later = [chunk([11, 12, 13], 3, text=evil), chunk([11, 12, 13, 14], 4, text=evil, version="8")]
        seen, skipped = self.read(*self.START, later)
        assert seen.labels == ["7", "7", "7", "8"]
        assert skipped == 0


class TestAborts:
    """Aborts take nothing away, whatever they say."""

    def test_running(self) -> None:
        """An abort in flight brings one more token and then its end."""
        seen = decode([chunk([11], 1)], [chunk([12], 2, finish=ABORTED)])
        assert seen.tokens == [11, 12]
        assert (seen.end.kind, seen.end.reason, seen.end.detail) == (
            EndKind.ENDED,
            Reason.SERVER_ABORT,
            "Aborted",
        )

    def test_queued(self) -> None:
        """A request that never ran ends without most of its meta_info."""
        meta = {"id": RID, "finish_reason": QUEUE_ABORT, "weight_version": "7", "completion_tokens": 0}
        meta |= {"weight_versions": [{"version": "7", "start": 0, "end": 0}], "output_token_logprobs": []}
        seen = decode([encode({"text": "", "output_ids": [], "meta_info": meta})])
        assert seen.tokens == []
        assert seen.end.kind is EndKind.ENDED
        assert seen.end.spans == ()
        assert seen.anomalies == []

    def test_no_list_and_nothing_new(self) -> None:
        """An abort without a list that counts what was shown needs no remark."""
        seen = decode([chunk([11, 12], 2)], [chunk(None, 2, finish=QUEUE_ABORT)])
        assert (seen.tokens, seen.anomalies) == ([11, 12], [])

    @pytest.mark.parametrize("cumulative", [False, True])
    def test_nothing_counted_at_all(self, cumulative: bool) -> None:
        """An abort with neither count nor list, before any token, is plain (0.5.3)."""
        seen = decode([chunk(None, 0 if cumulative else None, finish=QUEUE_ABORT)])
        assert (seen.tokens, [each.kind for each in seen.anomalies]) == ([], [])

    @pytest.mark.parametrize("shown", [3, 2])
    def test_retracted_incremental(self, shown: int) -> None:
        """After a retraction an incremental server sends everything again (0.5.23, #40901)."""
        ids = [11, 12, 13]
        seen = decode(
            [chunk(ids[:shown], shown, text="abc")],
            [chunk([11, 12, 13], 3, finish=QUEUE_ABORT, text="abc")],
            text=True,
        )
        assert seen.tokens == ids
        assert seen.text == "abc"

    def test_coalesced_delta_and_full_list(self) -> None:
        """A queued delta glued to the full list: the last N are the list."""
        seen = decode(
            [chunk([11, 12], 2)],
            [chunk([13, 14, 11, 12, 13, 14], 4, finish=QUEUE_ABORT, text=" worldHello world")],
        )
        assert seen.tokens == [11, 12, 13, 14]
        assert seen.anomalies == []

    @pytest.mark.parametrize(
        ("tokens", "count"), [(None, None), ([], None), ([], 0), (None, 1), ([11], 1), (None, 5), ([], 5)]
    )
    def test_says_less_than_was_shown(self, tokens: list[int] | None, count: int | None) -> None:
        """An abort with no count, a lower one, or no list keeps what is held, and is noted (0.5.3 to 0.5.6)."""
        seen = decode([chunk([11, 12], 2)], [chunk(tokens, count, finish=QUEUE_ABORT)])
        assert seen.tokens == [11, 12]
        assert seen.end.kind is EndKind.ENDED
        assert [each.kind for each in seen.anomalies] == ["abort_counts"]
        assert "2 shown" in seen.anomalies[0].detail

    def test_wrong_list(self) -> None:
        """A list that fits nothing is malformed, on an abort too."""
        seen = decode([chunk([11, 12], 2)], [chunk([13, 14], 5, finish=ABORTED)])
        assert seen.end.kind is EndKind.REJECTED

    @pytest.mark.parametrize(
        ("status", "kind", "reason"),
        [
            (400, EndKind.REFUSED, Reason.REFUSED),
            ("400", EndKind.REFUSED, Reason.REFUSED),
            (503, EndKind.ENDED, Reason.SERVER_ERROR),
            (500, EndKind.ENDED, Reason.SERVER_ERROR),
        ],
    )
    def test_status_code(self, status: int | str, kind: EndKind, reason: Reason) -> None:
        """Tokens in the chunk of a status-code abort are junk and are not emitted; earlier ones stay."""
        finish = {"type": "abort", "message": "The request queue is full.", "status_code": status}
        seen = decode([chunk([11], 1)], [chunk([99], 2, finish=finish)])
        assert seen.tokens == [11]
        assert (seen.end.kind, seen.end.reason, seen.end.status) == (kind, reason, int(status))
        assert [each.kind for each in seen.anomalies] == ["junk_tokens"]

    def test_status_code_without_tokens(self) -> None:
        """No junk, no remark."""
        finish = {"type": "abort", "message": "The request queue is full.", "status_code": 503}
        assert decode([chunk([], 0, finish=finish)]).anomalies == []


class TestEnds:
    """What the last chunk says."""

    def test_spans_and_numbers(self) -> None:
        """Version spans and counters travel with the end."""
        last = chunk(
            [14], 4, finish=STOP, weight_versions=SPANS, num_retractions=1, e2e_latency=1.5, dp_rank=None
        )
        seen = decode([chunk([11, 12, 13], 3)], [last])
        assert seen.end.spans == (VersionSpan("6", 0, 2), VersionSpan("7", 2, 4))
        assert seen.end.meta == {
            "prompt_tokens": 5,
            "num_retractions": 1,
            "e2e_latency": 1.5,
            "completion_tokens": 4,
        }
        assert (seen.end.reason, seen.end.matched) == (Reason.STOP, 2)

    @pytest.mark.parametrize(
        "spans", ["x", [{"version": "6"}], [{"version": "6", "start": -1, "end": 2}], {}]
    )
    def test_odd_spans_do_not_cost_the_end(self, spans: Any) -> None:
        """Spans of an unknown shape are left out and noted; the request has finished all the same."""
        seen = decode([chunk([11], 1, finish=STOP, weight_versions=spans)])
        assert seen.end.kind is EndKind.FINISHED
        assert seen.end.spans == ()
        assert [each.kind for each in seen.anomalies] == ["spans"]

    def test_null_spans(self) -> None:
        """Null spans are none."""
        seen = decode([chunk([11], 1, finish=STOP, weight_versions=None)])
        assert (seen.end.spans, seen.anomalies) == ((), [])

    def test_stop_string(self) -> None:
        """A stop string is what matched; anything stranger is left out."""
        assert decode([chunk([11], 1, finish={"type": "stop", "matched": "</s>"})]).end.matched == "</s>"
        assert decode([chunk([11], 1, finish={"type": "stop", "matched": [1, 2]})]).end.matched is None

    def test_nan(self) -> None:
        """A stop on a NaN token is a rejection, and its chunk's tokens are not emitted."""
        seen = decode([chunk([11], 1)], [chunk([0], 2, finish={"type": "stop", "matched": "NaN happened"})])
        assert (seen.end.kind, seen.end.reason) == (EndKind.REJECTED, Reason.MALFORMED)
        assert "NaN happened" in (seen.end.detail or "")
        assert seen.tokens == [11]

    def test_unknown_finish(self) -> None:
        """A finish type nobody knows is malformed and named."""
        seen = decode([chunk([11], 1, finish={"type": "tool_call"})])
        assert (seen.end.kind, seen.end.reason) == (EndKind.REJECTED, Reason.MALFORMED)
        assert "tool_call" in (seen.end.detail or "")

    @pytest.mark.parametrize("reads", [[[chunk([11], 1), DONE]], [[chunk([11], 1)], [DONE]], [[DONE]]])
    def test_done_without_an_end(self, reads: list[list[bytes]]) -> None:
        """[DONE] without a terminal chunk is a lost stream."""
        seen = decode(*reads)
        assert (seen.end.kind, seen.end.reason) == (EndKind.LOST, Reason.TRUNCATED)

    def test_nothing_after_the_end(self) -> None:
        """What comes after the end is noted in the same read and ignored later."""
        decoder = WireDecoder(RID)
        seen = Seen(decoder.read([chunk([11], 1, finish=STOP), chunk([12], 2), DONE]))
        assert seen.tokens == [11]
        assert [each.kind for each in seen.anomalies] == ["after_end"]
        assert seen.end.kind is EndKind.FINISHED
        assert decoder.ended
        assert decoder.read([chunk([13], 3)]) == []

    @pytest.mark.parametrize(
        ("error", "kind", "reason", "status", "detail"),
        [
            (
                {
                    "message": "Duplicate request ID detected: r1",
                    "type": "invalid_request_error",
                    "code": 400,
                },
                EndKind.REJECTED,
                Reason.REFUSED,
                400,
                "Duplicate request ID detected: r1",
            ),
            ({"message": "too long"}, EndKind.REJECTED, Reason.REFUSED, None, "too long"),
            ({"message": "oh", "code": 503}, EndKind.LOST, Reason.SERVER_ERROR, 503, "oh"),
            ({"message": "oh", "code": "500"}, EndKind.LOST, Reason.SERVER_ERROR, 500, "oh"),
            ("plain", EndKind.REJECTED, Reason.REFUSED, None, "plain"),
            ({"why": 1}, EndKind.REJECTED, Reason.REFUSED, None, "{'why': 1}"),
        ],
    )
    def test_error_chunk(
        self, error: Any, kind: EndKind, reason: Reason, status: int | None, detail: str
    ) -> None:
        """An error chunk ends the stream; a 5xx code means that another attempt may do."""
        seen = decode([chunk([11], 1), encode({"error": error}), DONE])
        assert seen.tokens == [11]
        assert (seen.end.kind, seen.end.reason, seen.end.status, seen.end.detail) == (
            kind,
            reason,
            status,
            detail,
        )


class TestMalformed:
    """What cannot be true is a rejection with the numbers, never an exception."""

    @pytest.mark.parametrize(
        ("payload", "words"),
        [
            (chunk([13, 14], 5), "2 logprobs where 5 tokens are counted and 2 were shown"),
            (chunk([11, 99, 13], 3), "the first 2 of 3 tokens are not the 2 shown before"),
            (chunk([11], 1), "1 logprobs where 1 tokens are counted and 2 were shown"),
            (chunk(None, 4), "0 logprobs where 4 tokens"),
            (chunk([13], None), "no completion_tokens"),
            (chunk([2**31], 3), "meta_info"),
            (chunk([-1], 3), "meta_info"),
            (chunk([13], -3), "meta_info"),
            (chunk(None, 3, output_token_logprobs=[[-0.5]]), "meta_info"),
            (chunk(None, 3, output_token_logprobs=[["x", 1, None]]), "meta_info"),
            (chunk([13], 3, finish={"matched": 1}), "finish_reason"),
            (chunk([13, 14], 5, finish=STOP), "2 logprobs where 5"),
            (encode({"meta_info": 3}), "meta_info"),
            (encode({"text": "x"}), "neither meta_info nor error"),
            (b"null", "null"),
            (b"[]", "array"),
            (b"{", "truncated"),
            (b"", "truncated"),
            (b'{"text":"\xff"}', ""),
            (b"\xff\xfe", ""),
            (b"[" * 100_000, ""),
        ],
    )
    def test_rejected(self, payload: bytes, words: str) -> None:
        """The stream ends as malformed, and what was good before it is kept."""
        seen = decode([chunk([11, 12], 2)], [payload])
        assert seen.tokens == [11, 12]
        assert (seen.end.kind, seen.end.reason) == (EndKind.REJECTED, Reason.MALFORMED)
        assert words in (seen.end.detail or "")
        assert seen.end.detail

    def test_nothing_of_a_bad_chunk_is_kept(self) -> None:
        """A chunk is checked as a whole before any of it counts."""
        seen = decode([chunk(None, 2, output_token_logprobs=[[-0.1, 11, None], [-0.1, "12", None]])])
        assert seen.tokens == []

    def test_foreign_rid(self) -> None:
        """Another rid than ours is noted once: an abort would not find the request."""
        seen = decode([chunk([11], 1, id="other")], [chunk([12], 2, id="other")])
        assert [each.kind for each in seen.anomalies] == ["foreign_rid"]
        assert seen.tokens == [11, 12]


class TestText:
    """Text is for convenience: the new part, where it can be told."""

    def test_incremental(self) -> None:
        """Deltas are passed on."""
        assert decode([chunk([11], 1, text="a")], [chunk([12], 2, text="b")], text=True).text == "ab"

    def test_cumulative(self) -> None:
        """Of full texts the new part is passed on, also over skipped chunks."""
        seen = decode(
            [chunk([11], 1, text="a")],
            [chunk([11, 12], 2, text="ab")],
            [chunk([11, 12, 13], 3, text="abc"), chunk([11, 12, 13, 14], 4, text="abcd")],
            text=True,
        )
        assert [each.text for each in seen.slices] == ["a", "b", "cd"]

    def test_delta_text_with_full_logprobs(self) -> None:
        """0.5.10: text is a delta and logprobs are not."""
        words = ["Hi", " you", " there", " over", " there", "!"]
        seen = decode(
            *([chunk(range(11, 11 + n), n, text=word)] for n, word in enumerate(words, 1)),
            text=True,
        )
        assert seen.text == "Hi you there over there!"
        assert seen.tokens == list(range(11, 17))

    def test_abort_text_is_not_believed(self) -> None:
        """The text of an abort's chunk may be all of it again: left out."""
        seen = decode([chunk([11], 1, text="a")], [chunk([11, 12], 2, text="xab", finish=ABORTED)], text=True)
        assert (seen.text, seen.tokens) == ("a", [11, 12])

    def test_not_wanted(self) -> None:
        """Without being asked for, text is not even decoded."""
        assert decode([chunk([11], 1, text="a")]).slices[0].text is None

    def test_missing(self) -> None:
        """A chunk without text has none."""
        payload = encode({"meta_info": {"completion_tokens": 1, "output_token_logprobs": pairs(11)}})
        assert decode([payload], text=True).text == ""


@pytest.mark.parametrize(
    ("length", "count", "have", "aborted", "expected"),
    [
        (3, 3, 0, False, (range(3), 0)),
        (3, 3, 2, False, (range(3), 2)),
        (1, 3, 2, False, (range(1), 0)),
        (0, 2, 2, False, (range(0), 0)),
        (5, 3, 2, False, (range(3), 2)),
        (5, 3, 2, True, (range(2, 5), 2)),
    ],
)
def test_select(length: int, count: int, have: int, aborted: bool, expected: tuple[range, int]) -> None:
    """The length rule, number by number."""
    found, shown = select([(0.0, n, None) for n in range(length)], count, have, aborted=aborted)
    assert ([pair[1] for pair in found], shown) == (list(expected[0]), expected[1])


@pytest.mark.parametrize(("length", "count", "have"), [(2, 5, 0), (0, 1, 0), (3, 1, 2), (1, 5, 2), (1, 1, 2)])
def test_select_refuses(length: int, count: int, have: int) -> None:
    """Anything else names its numbers."""
    with pytest.raises(
        StreamMalformed, match=rf"{length} logprobs where {count} tokens .* {have} were shown"
    ):
        select([(0.0, n, None) for n in range(length)], count, have, aborted=False)
