"""Scripted faults: each strikes where it should, whom it should, as often as it should."""

from __future__ import annotations

import json

import pytest

from adapters.sglang.simulator import Brain, Fault, FaultKind, Mark, ServerSettings, parse_fault
from adapters.sglang.simulator.faults import FaultPlan
from tests.adapters.sglang.simulator.stepped import Reader, body, expected, submit


def faulty(*faults: Fault, mode: str = "incremental") -> Brain:
    """A server with these faults."""
    return Brain(ServerSettings(mode=mode, seed=3), faults)  # type: ignore[arg-type]


def test_cut_breaks_the_chunk_in_the_middle() -> None:
    """The bytes end inside the chunk after the given tokens, and the server has forgotten the request."""
    brain = faulty(Fault(FaultKind.CUT, after=4))
    reader = submit(brain).finish()
    assert reader.mark is Mark.CUT
    assert [chunk["meta_info"]["completion_tokens"] for chunk in reader.chunks] == [1, 2, 3]
    assert reader.raw.count(b"data: ") == 4
    assert not reader.raw.endswith(b"\n")
    assert brain.idle


def test_cut_before_the_first_chunk() -> None:
    """With ``after=0`` the connection breaks after the headers."""
    brain = faulty(Fault(FaultKind.CUT))
    reader = submit(brain).finish()
    assert (reader.raw, reader.mark) == (b"", Mark.CUT)


@pytest.mark.parametrize("status", [429, 503])
def test_refusal_before_the_stream(status: int) -> None:
    """The head is the status, the body is JSON, and nothing reached the scheduler."""
    brain = faulty(Fault(FaultKind.REFUSE, status=status, times=1))
    reader = submit(brain)
    head = brain.head(reader.request)
    assert head is not None
    assert (head.status, head.media_type) == (status, "application/json")
    assert json.loads(reader.finish().raw)["code"] == status
    assert brain.idle
    assert len(submit(brain).finish().request.tokens) == 6


def test_error_chunk_inside_the_stream() -> None:
    """Tokens so far, then the error object with its code, then ``[DONE]``."""
    brain = faulty(Fault(FaultKind.ERROR_CHUNK, after=2, status=500, message="boom"))
    reader = submit(brain).finish()
    assert reader.chunks[-1]["error"]["message"] == "boom"
    assert reader.chunks[-1]["error"]["code"] == 500
    assert [chunk["meta_info"]["completion_tokens"] for chunk in reader.chunks[:-1]] == [1, 2]
    assert reader.done
    assert brain.idle


def test_unasked_abort_keeps_its_tokens() -> None:
    """Without a status code it looks like any other abort of a running request."""
    reader = submit(faulty(Fault(FaultKind.ABORT, after=3))).finish()
    assert reader.meta["finish_reason"] == {
        "type": "abort",
        "message": "Aborted",
        "status_code": None,
        "err_type": None,
    }
    assert reader.request.tokens == expected(reader.brain, 3)


def test_abort_with_a_status_before_the_first_token_brings_junk() -> None:
    """Its prompt was replaced: one prompt token, one token of junk, no logprobs."""
    reader = submit(faulty(Fault(FaultKind.ABORT, status=400, message="no"))).finish()
    assert reader.meta["finish_reason"]["status_code"] == 400
    assert reader.meta["prompt_tokens"] == reader.meta["completion_tokens"] == 1
    assert reader.meta["output_token_logprobs"] == []
    assert reader.meta["output_token_logprobs_length"] == 0
    assert reader.request.tokens != expected(reader.brain, 1)


@pytest.mark.parametrize("done", [True, False])
@pytest.mark.parametrize("after", [0, 3])
def test_lost_terminal(after: int, done: bool) -> None:
    """The stream ends in good order, but no chunk ever had a finish reason."""
    brain = faulty(Fault(FaultKind.LOST_TERMINAL, after=after, done=done))
    reader = submit(brain).finish()
    assert reader.mark is Mark.END
    assert reader.done is done
    assert all(chunk["meta_info"]["finish_reason"] is None for chunk in reader.chunks)
    assert reader.meta["completion_tokens"] == (after or 5)
    assert brain.idle


def test_wrong_length_is_off_in_one_chunk() -> None:
    """The numbers of one chunk lie; the next are right again."""
    reader = submit(faulty(Fault(FaultKind.WRONG_LENGTH, after=2, delta=3))).finish()
    assert [chunk["meta_info"]["completion_tokens"] for chunk in reader.chunks] == [1, 5, 3, 4, 5, 6]
    assert reader.chunks[1]["meta_info"]["output_token_logprobs_length"] == 5


def test_malformed_json_in_one_event() -> None:
    """One event is cut-off JSON; those after it are whole."""
    reader = submit(faulty(Fault(FaultKind.MALFORMED, after=2))).finish()
    assert ["broken" in chunk for chunk in reader.chunks] == [False, True, False, False, False, False]


def test_null_logprob() -> None:
    """One logprob is null; its token is there."""
    reader = submit(faulty(Fault(FaultKind.NULL_LOGPROB, after=2), mode="cumulative")).finish()
    pairs = reader.meta["output_token_logprobs"]
    assert [pair[0] is None for pair in pairs] == [False, False, True, False, False, False]
    assert [pair[1] for pair in pairs] == expected(reader.brain, 6)


def test_merge_holds_chunks_back_once() -> None:
    """Tokens of several steps arrive as one chunk."""
    reader = submit(faulty(Fault(FaultKind.MERGE, after=2, steps=2)), count=8).finish()
    assert [chunk["meta_info"]["completion_tokens"] for chunk in reader.chunks] == [1, 4, 5, 6, 7, 8]


def test_two_faults_of_one_moment_strike_one_after_the_other() -> None:
    """Retracted once, and again when it runs again."""
    twice = faulty(Fault(FaultKind.RETRACT, after=2), Fault(FaultKind.RETRACT, after=2))
    reader = submit(twice).finish()
    assert reader.meta["num_retractions"] == 2
    assert reader.request.tokens == expected(twice, 6)


def test_retraction_at_a_token() -> None:
    """The request goes to the queue and comes again, counted."""
    reader = submit(faulty(Fault(FaultKind.RETRACT, after=3))).finish()
    assert reader.meta["num_retractions"] == 1
    assert reader.request.tokens == expected(reader.brain, 6)


def test_stall_for_some_steps() -> None:
    """Nothing comes for that many steps, then it goes on."""
    reader = submit(faulty(Fault(FaultKind.STALL, after=2, steps=5)))
    counts = []
    for _ in range(10):
        reader.brain.step()
        counts.append(len(reader.request.tokens))
    assert counts == [1, 2, 2, 2, 2, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("deaf", [False, True])
def test_stall_for_ever(deaf: bool) -> None:
    """A stalled request obeys an abort unless it is deaf; closing the connection always frees it."""
    brain = faulty(Fault(FaultKind.STALL, after=1, deaf=deaf))
    reader = submit(brain)
    for _ in range(5):
        brain.step()
    brain.abort("r")
    brain.step()
    reader.poll()
    assert brain.idle is not deaf
    brain.disconnect(reader.request)
    brain.step()
    assert brain.idle


def test_slow_headers() -> None:
    """Headers and chunks stay away for that many steps; the tokens are made meanwhile and come as one chunk."""
    brain = faulty(Fault(FaultKind.SLOW_HEADERS, steps=4))
    reader = submit(brain)
    for _ in range(3):
        brain.step()
        reader.poll()
        assert brain.head(reader.request) is None
    reader.finish()
    assert [chunk["meta_info"]["completion_tokens"] for chunk in reader.chunks] == [4, 5, 6]


def test_an_abort_that_overtakes_its_request_is_dropped() -> None:
    """The abort is answered 200 and does nothing; the request arrives after it."""
    brain = faulty(Fault(FaultKind.OVERTAKEN, steps=100))
    reader = submit(brain)
    for _ in range(5):
        brain.step()
    assert not reader.request.tokens
    assert brain.abort("r").status == 200
    brain.step()
    assert len(reader.request.tokens) == 1
    brain.abort("r")
    assert reader.finish().meta["finish_reason"]["type"] == "abort"


def test_an_overtaken_request_arrives_without_an_abort_too() -> None:
    """After its steps it arrives anyway; closing the connection before that leaves nothing."""
    brain = faulty(Fault(FaultKind.OVERTAKEN, steps=3))
    assert len(submit(brain).finish().request.tokens) == 6
    brain.disconnect(submit(brain, "other").request)
    assert brain.idle


def test_control_calls_are_refused() -> None:
    """The path named is refused with its status and does nothing, that many times; other paths work."""
    brain = faulty(
        Fault(FaultKind.CONTROL_REFUSED, status=401, times=1),
        Fault(FaultKind.CONTROL_REFUSED, path="pause_generation"),
    )
    submit(brain, count=50)
    brain.step()
    assert brain.abort("r").status == 401
    brain.step()
    assert brain.live
    assert brain.pause("in_place").status == 500
    assert brain.resume().status == 200
    assert brain.abort("r").status == 200
    brain.step()
    assert brain.idle


def test_death_when_a_request_holds_some_tokens() -> None:
    """The whole server goes, also for the requests beside it."""
    brain = faulty(Fault(FaultKind.DEATH, after=3, rid="a"))
    deaths: list[Fault | None] = []
    brain.on_death = deaths.append
    victim, beside = submit(brain, "a"), submit(brain, "b")
    for _ in range(3):
        brain.step()
    assert not brain.alive
    assert (victim.finish().mark, beside.finish().mark) == (Mark.CUT, Mark.CUT)
    assert len(deaths) == 1


def statuses(brain: Brain, *rids: str) -> list[int]:
    """The status with which each of these requests is answered, in order."""
    heads = [brain.head(brain.submit(body(rid))) for rid in rids]
    return [head.status for head in heads if head is not None]


def test_faults_choose_their_requests() -> None:
    """By rid, by number, by how often: only those are hit."""
    brain = faulty(Fault(FaultKind.REFUSE, rid="a", status=500), Fault(FaultKind.REFUSE, nth=2, status=501))
    assert statuses(brain, "a", "b", "c", "d", "a") == [500, 200, 501, 200, 500]
    brain = faulty(Fault(FaultKind.REFUSE, times=2, status=502))
    assert statuses(brain, "a", "b", "c") == [502, 502, 200]


def test_chance_is_seeded_and_about_right() -> None:
    """The same seed hits the same requests, another seed others, as many as the chance says."""

    def hits(seed: int) -> list[bool]:
        plan = FaultPlan([Fault(FaultKind.CUT, p=0.3)], seed)
        return [bool(plan.for_request(number, "x")) for number in range(1000)]

    assert hits(1) == hits(1) != hits(2)
    assert 230 < sum(hits(1)) < 370


def test_cleared_faults_strike_no_more() -> None:
    """After ``clear`` new requests are left alone."""
    brain = faulty(Fault(FaultKind.REFUSE))
    brain.faults.clear()
    assert len(submit(brain).finish().request.tokens) == 6


def test_faults_of_plain_requests() -> None:
    """Without a stream a cut or lost answer is a broken connection, an error chunk an HTTP 400."""
    for kind in (FaultKind.CUT, FaultKind.LOST_TERMINAL):
        brain = faulty(Fault(kind, after=2))
        assert Reader(brain, brain.submit(body(stream=False))).finish().mark is Mark.CUT
    brain = faulty(Fault(FaultKind.ERROR_CHUNK, after=2, message="boom"))
    reader = Reader(brain, brain.submit(body(stream=False))).finish()
    head = brain.head(reader.request)
    assert head is not None
    assert (head.status, json.loads(reader.raw)) == (400, {"error": {"message": "boom"}})
    for status, key in ((400, "error"), (503, "object")):
        brain = faulty(Fault(FaultKind.ABORT, after=1, status=status))
        reader = Reader(brain, brain.submit(body(stream=False))).finish()
        assert key in json.loads(reader.raw)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("cut", Fault(FaultKind.CUT)),
        ("cut:after=20,p=0.1", Fault(FaultKind.CUT, after=20, p=0.1)),
        ("stall: after = 3 , deaf=yes", Fault(FaultKind.STALL, after=3, deaf=True)),
        ("refuse:status=429,times=2", Fault(FaultKind.REFUSE, status=429, times=2)),
        ("lost-terminal:done=0", Fault(FaultKind.LOST_TERMINAL, done=False)),
        ("control-refused:path=/pause_generation", Fault(FaultKind.CONTROL_REFUSED, path="pause_generation")),
        ("death:nth=4,restart=0.5", Fault(FaultKind.DEATH, nth=4, restart=0.5)),
    ],
)
def test_faults_on_the_command_line(text: str, fault: Fault) -> None:
    """``NAME:key=value,…`` is the fault of these values."""
    assert parse_fault(text) == fault


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("bogus", "unknown fault 'bogus'; known are cut, stall"),
        ("cut:after", "'after' is not key=value"),
        ("cut:before=3", "with a key of p, after"),
        ("cut:after=many", "after=many does not fit"),
        ("cut:p=2", "p must lie between 0 and 1"),
        ("cut:after=-1", "after must not be negative"),
        ("stall:deaf=perhaps", "'perhaps' is not 0 or 1"),
    ],
)
def test_bad_faults_on_the_command_line(text: str, words: str) -> None:
    """The message says what is wrong and what would be right."""
    with pytest.raises(ValueError, match=r"^[^\n]+$") as error:
        parse_fault(text)
    assert words in str(error.value)
