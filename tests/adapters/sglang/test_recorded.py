"""What a real SGLang 0.5.23 and a real router said, decoded: the recordings under tests/data."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from adapters.sglang.answers import Answer
from adapters.sglang.attempt import AttemptDecoder
from adapters.sglang.topology import listed_workers
from adapters.sglang.words import said
from lifecycle.backend import Call
from lifecycle.events import EndKind
from lifecycle.states import Reason
from tests.support.sglang_chunks import Seen

DATA = Path(__file__).resolve().parents[2] / "data" / "sglang-0.5.23"
STREAMS = sorted(path.stem for path in DATA.glob("*.sse"))
FINISHED, ENDED, REFUSED = EndKind.FINISHED, EndKind.ENDED, EndKind.REFUSED
ENDS: dict[str, tuple[EndKind, Reason]] = {
    # what a recording's name begins with → how it ends; the longest that fits counts
    "completion": (FINISHED, Reason.LENGTH),
    "sampled": (FINISHED, Reason.LENGTH),
    "max-new-tokens": (FINISHED, Reason.LENGTH),
    "prompt": (FINISHED, Reason.LENGTH),
    "weight-update": (FINISHED, Reason.LENGTH),
    "router-completion": (FINISHED, Reason.LENGTH),
    "router-drops": (FINISHED, Reason.LENGTH),
    "stop-token-ignore-eos": (FINISHED, Reason.LENGTH),
    "stop": (FINISHED, Reason.STOP),
    "abort": (ENDED, Reason.SERVER_ABORT),
    "pause-abort": (ENDED, Reason.SERVER_ABORT),
    "router-abort": (ENDED, Reason.SERVER_ABORT),
    "abort-status-400": (REFUSED, Reason.REFUSED),
    "queue-full": (ENDED, Reason.SERVER_ERROR),
    "error": (EndKind.REJECTED, Reason.REFUSED),
    "router-error": (EndKind.REJECTED, Reason.REFUSED),
    "killed": (EndKind.LOST, Reason.DISCONNECTED),
    "router-killed": (EndKind.LOST, Reason.DISCONNECTED),
}


def story(name: str) -> dict[str, Any]:
    """What is noted about a recording."""
    return json.loads((DATA / f"{name}.json").read_text())


def decoded(name: str, cuts: list[int]) -> Seen:
    """The events of a recording whose bytes arrive cut at `cuts`."""
    data = (DATA / f"{name}.sse").read_bytes()
    noted = story(name)
    body = noted["request"]["body"]
    call = Call(body["rid"], "r", 0, body.get("input_ids") or [], body["sampling_params"])
    decoder = AttemptDecoder(call, text=True)
    at = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    events = [each for start, stop in pairwise(at) for each in decoder.feed(data[start:stop])]
    if not decoder.ended:
        events.append(
            decoder.close(*((Answer.EOF,) if noted["ended"] == "complete" else (Answer.CUT, noted["ended"])))
        )
    return Seen(events)


def as_read(name: str) -> list[int]:
    """Where the socket reads of the recording were cut."""
    return [sum(story(name)["reads"][:n]) for n in range(len(story(name)["reads"]))]


def by_hand(name: str) -> tuple[list[int], list[float]]:
    """Tokens and logprobs by the shortest way that is right for the mode of this recording."""
    tokens: list[int] = []
    logprobs: list[float] = []
    incremental = story(name)["recorded_from"]["mode"] == "incremental"
    for line in (DATA / f"{name}.sse").read_text().split("\n\n"):
        meta = json.loads(line.removeprefix("data: ")).get("meta_info") if line.endswith("}") else None
        finish = (meta and meta["finish_reason"]) or {}
        if meta is None or finish.get("status_code"):
            continue  # [DONE], an error, or junk
        entries = meta["output_token_logprobs"]
        again = finish.get("message") == "Abort in waiting queue"
        if not incremental or again:
            tokens, logprobs = [], []
        tokens += [token for _, token, _ in entries]
        logprobs += [logprob for logprob, _, _ in entries]
    return tokens, logprobs


def test_recordings_are_there() -> None:
    """The recordings cover both modes and every kind of end."""
    kinds = {decoded(name, []).end.kind for name in STREAMS}
    assert kinds == {FINISHED, ENDED, REFUSED, EndKind.REJECTED, EndKind.LOST}
    assert {"incremental", "cumulative"} <= {name.rsplit("-", 1)[-1] for name in STREAMS}


@pytest.mark.parametrize("name", STREAMS)
def test_end(name: str) -> None:
    """Each recording ends as its name says, with the right reason, without a remark that it does not deserve."""
    seen = decoded(name, as_read(name))
    rule = max((prefix for prefix in ENDS if name.startswith(prefix)), key=len)
    assert (seen.end.kind, seen.end.reason) == ENDS[rule]
    assert seen.end.detail is not None or seen.end.kind is FINISHED
    assert {each.kind for each in seen.anomalies} <= (
        {"junk_tokens"} if rule == "abort-status-400" else set()
    )


@pytest.mark.parametrize("name", STREAMS)
def test_tokens(name: str) -> None:
    """Tokens and logprobs are those on the wire, and the spans cover them."""
    seen = decoded(name, as_read(name))
    assert (seen.tokens, seen.logprobs) == by_hand(name)
    if seen.end.kind in {FINISHED, ENDED} and seen.tokens:
        assert [(span.start, span.end) for span in seen.end.spans][-1][1] == len(seen.tokens)
        assert seen.end.meta["completion_tokens"] == len(seen.tokens)


@pytest.mark.parametrize("name", STREAMS)
def test_byte_by_byte(name: str) -> None:
    """The same bytes one by one, or in one piece, end in the same tokens, logprobs, labels and end."""
    size = min(
        (DATA / f"{name}.sse").stat().st_size, 40_000
    )  # the long ones are cut finely at their beginning only
    whole, single = decoded(name, []), decoded(name, list(range(size)))
    assert (whole.tokens, whole.logprobs, whole.labels, whole.text) == (
        single.tokens,
        single.logprobs,
        single.labels,
        single.text,
    )
    assert whole.end == single.end


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(name=st.sampled_from(STREAMS), cuts=st.lists(st.integers(0, 10**6), max_size=20))
def test_random_splits(name: str, cuts: list[int]) -> None:
    """So do random splits."""
    whole, split = decoded(name, []), decoded(name, cuts)
    assert (whole.tokens, whole.logprobs, whole.labels, whole.end) == (
        split.tokens,
        split.logprobs,
        split.labels,
        split.end,
    )


@pytest.mark.parametrize(
    "name", sorted({name.rsplit("-", 1)[0] for name in STREAMS if name.startswith(("compl", "stop"))})
)
def test_both_modes_agree(name: str) -> None:
    """Greedy requests of both modes end in the same tokens, text and end."""
    one, other = decoded(f"{name}-cumulative", []), decoded(f"{name}-incremental", [])
    assert (one.tokens, one.text, one.end.matched) == (other.tokens, other.text, other.end.matched)
    assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


@pytest.mark.parametrize("mode", ["cumulative", "incremental"])
def test_weight_versions(mode: str) -> None:
    """An update in mid-stream shows as two spans; the label of a chunk lags behind by one chunk."""
    seen = decoded(f"weight-update-in-place-{mode}", as_read(f"weight-update-in-place-{mode}"))
    assert len(seen.end.spans) == 2
    assert seen.end.spans[0].end == seen.end.spans[1].start
    assert len(set(seen.labels)) == 2


def test_answers_that_are_no_streams() -> None:
    """The words of each recorded error are found, and the router's list of workers is read."""
    assert len(listed_workers(story("router-workers")["body"]) or ()) == 2
    for path in DATA.glob("*.json"):
        noted = json.loads(path.read_text())
        if noted["status"] >= 400 and noted.get("body"):
            body = noted["body"]
            words = said(body.encode() if isinstance(body, str) else json.dumps(body).encode())
            assert words
            assert not words.startswith("{"), f"{path.name}: {words}"
