"""What to record: one function per shape of stream, each run against a server in either mode.

A shape that does not come out as its name says is an error, never a fixture with another content.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from tests.live.capture import Recorder, ShapeMissed, Stream
from tests.live.processes import Router, Running, Server
from tests.live.tiny_model import CONTEXT

PROMPT = [39, 68, 75, 75, 78]
"""``Hello`` in the tiny model's byte tokens."""
FIRST_TOKENS = [34, 377, 117, 475]
"""What greedy decoding goes on with; stop tokens and strings are chosen from it."""
END_OF_TEXT = 257
FOREVER = 20000
UPDATE_TRIES = 10


def body(tokens: int, *, rid: str | None = None, **more: Any) -> dict[str, Any]:
    """A greedy request that goes on to its budget."""
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True, **more.pop("sampling", {})}
    return {"input_ids": PROMPT, "rid": rid or uuid.uuid4().hex, "sampling_params": sampling, **more}


def finish(stream: Stream) -> dict[str, Any]:
    """The finish reason of the last chunk."""
    return (stream.chunks[-1].get("meta_info") or {}).get("finish_reason") or {}


def expect(stream: Stream, *, kind: str, message: str | None = None) -> None:
    """The last chunk ended as it should."""
    found = finish(stream)
    if found.get("type") != kind or (message is not None and found.get("message") != message):
        raise ShapeMissed(f"wanted an end of {kind!r} ({message}), got {found}")


async def whole(rec: Recorder, name: str, target: Running, request: dict[str, Any], kind: str) -> Stream:
    """A stream that nobody disturbs."""
    async with rec.stream(target, request) as stream:
        await stream.ends()
    expect(stream, kind=kind)
    rec.save_stream(name, target, stream)
    return stream


async def completions(rec: Recorder, server: Server) -> None:
    """Ends that the server finds by itself."""
    mode = server.mode
    await whole(rec, f"completion-{mode}", server, body(16), "length")
    text = {**body(8), "text": "Hello"}
    del text["input_ids"]
    await whole(rec, f"completion-text-{mode}", server, text, "length")
    await whole(rec, f"prompt-logprobs-{mode}", server, body(4, logprob_start_len=0), "length")
    await whole(rec, f"prompt-token-ids-{mode}", server, body(4, return_prompt_token_ids=True), "length")
    await whole(rec, f"max-new-tokens-0-{mode}", server, body(0), "length")
    await whole(rec, f"max-new-tokens-1-{mode}", server, body(1), "length")
    token = {"stop_token_ids": [FIRST_TOKENS[3]]}
    stop = await whole(
        rec, f"stop-token-{mode}", server, body(16, sampling={**token, "ignore_eos": False}), "stop"
    )
    if finish(stop)["matched"] != FIRST_TOKENS[3]:
        raise ShapeMissed(f"the stop token was not matched: {finish(stop)}")
    # With ignore_eos the server does not look at stop_token_ids either.
    await whole(rec, f"stop-token-ignore-eos-{mode}", server, body(8, sampling=token), "length")
    eos = {"ignore_eos": False, "logit_bias": {str(END_OF_TEXT): 1e6}}
    await whole(rec, f"stop-eos-{mode}", server, body(16, sampling=eos), "stop")
    await whole(rec, f"stop-string-{mode}", server, body(16, sampling={"stop": ["1"]}), "stop")
    sampled = {"temperature": 1.0, "top_p": 0.95, "sampling_seed": 7}
    await whole(rec, f"sampled-{mode}", server, body(8, sampling=sampled), "length")


async def errors(rec: Recorder, server: Server) -> None:
    """Error chunks in a 200 stream, and bodies that are refused."""
    mode = server.mode
    async with rec.stream(server, {**body(8), "input_ids": PROMPT * (CONTEXT // len(PROMPT) + 1)}) as stream:
        await stream.ends()
    stream.body["input_ids"] = f"{PROMPT} repeated {CONTEXT // len(PROMPT) + 1} times"
    _expect_error(stream, "longer than")
    rec.save_stream(f"error-too-long-{mode}", server, stream)
    async with (
        rec.stream(server, body(FOREVER, rid="dup")) as first,
        rec.stream(server, body(8, rid="dup2")) as other,
    ):
        await first.shows(1)
        await other.ends()
        async with rec.stream(server, body(8, rid="dup")) as second:
            await second.ends()
        _expect_error(second, "Duplicate request ID")
        rec.save_stream(f"error-duplicate-rid-{mode}", server, second)
        await rec.control(server, "/abort_request", {"rid": "dup"})
        await first.ends()
    # The scheduler refuses this one: an abort with a status code, and one token that means nothing.
    junk = await whole(
        rec, f"abort-status-400-{mode}", server, body(8, session_params={"id": "gone"}), "abort"
    )
    if finish(junk).get("status_code") != 400:
        raise ShapeMissed(f"wanted status 400, got {finish(junk)}")
    if mode == "incremental":
        return  # A refused body looks the same in both modes.
    wrong = {"input_ids": "x", "stream": True, "sampling_params": {}}
    await rec.save_either("refused-bad-input-ids", server, wrong)
    unknown = {"input_ids": PROMPT, "stream": True, "sampling_params": {"max_tokens": 8}}
    await rec.save_either("refused-unknown-sampling-param", server, unknown)
    await rec.save_either("refused-not-json", server, "not an object")
    async with rec.stream(server, body(8, sampling={"top_p": 7.0})) as stream:
        await stream.ends()
    _expect_error(stream, "top_p")
    rec.save_stream("error-bad-top-p", server, stream)


def _expect_error(stream: Stream, words: str) -> None:
    error = stream.chunks[-1].get("error", {})
    if words not in str(error.get("message")):
        raise ShapeMissed(f"wanted an error chunk with {words!r}, got {stream.chunks[-1]}")


async def aborts(rec: Recorder, server: Server) -> None:
    """Aborts of one request: running, queued, paused in place, retracted."""
    mode = server.mode
    async with rec.stream(server, body(FOREVER, rid="run-1")) as stream:
        await stream.shows(4)
        await rec.control(server, "/abort_request", {"rid": "run-1", "abort_all": False}, stream)
        await stream.ends()
    expect(stream, kind="abort", message="Aborted")
    rec.save_stream(f"abort-running-{mode}", server, stream)

    async with full(rec, server), rec.stream(server, body(8, rid="queued-1")) as stream:
        await rec.waiting(server, 1)
        await rec.control(server, "/abort_request", {"rid": "queued-1", "abort_all": False}, stream)
        await stream.ends()
    expect(stream, kind="abort", message="Abort in waiting queue")
    rec.save_stream(f"abort-queued-{mode}", server, stream)

    async with rec.stream(server, body(FOREVER, rid="retracted-1")) as stream:
        await stream.shows(12)
        await rec.control(server, "/pause_generation", {"mode": "retract"}, stream)
        await rec.control(server, "/abort_request", {"rid": "retracted-1", "abort_all": False}, stream)
        await stream.ends()
        await rec.control(server, "/continue_generation", {}, stream)
    expect(stream, kind="abort", message="Abort in waiting queue")
    rec.save_stream(f"abort-retracted-{mode}", server, stream)

    async with rec.stream(server, body(FOREVER, rid="in-place-1")) as stream:
        await stream.shows(4)
        await rec.control(server, "/pause_generation", {"mode": "in_place"}, stream)
        await rec.control(server, "/abort_request", {"rid": "in-place-1", "abort_all": False}, stream)
        await asyncio.sleep(1.0)  # Long enough to see whether a paused server ends it: it does not.
        await rec.control(server, "/continue_generation", {}, stream)
        await stream.ends()
    expect(stream, kind="abort")
    rec.save_stream(f"abort-paused-in-place-{mode}", server, stream)
    await rec.idle(server)


@asynccontextmanager
async def full(rec: Recorder, server: Server) -> AsyncIterator[None]:
    """As many endless requests as the server runs at once; the next one queues. They are aborted at the end."""
    async with AsyncExitStack() as stack:
        rids = [f"filler-{uuid.uuid4().hex}" for _ in range(server.max_running)]
        fillers = [
            await stack.enter_async_context(rec.stream(server, body(FOREVER, rid=rid, return_logprob=False)))
            for rid in rids
        ]
        for filler in fillers:
            await filler.shows(1)
        try:
            yield
        finally:
            for rid in rids:
                await rec.control(server, "/abort_request", {"rid": rid})
            for filler in fillers:
                await filler.ends()


async def weight_updates(rec: Recorder, server: Server) -> None:
    """A new version label in the middle of a stream, in the three pause modes."""
    mode = server.mode
    async with rec.stream(server, body(FOREVER, rid="paused-1")) as stream:
        await stream.shows(4)
        await rec.control(server, "/pause_generation", {"mode": "abort"}, stream)
        await stream.ends()
        await rec.control(server, "/continue_generation", {}, stream)
    expect(stream, kind="abort", message="Aborted")
    rec.save_stream(f"pause-abort-{mode}", server, stream)

    for pause, label in (("in_place", "7"), ("retract", "8")):
        stream = await updated(rec, server, pause, label)
        rec.save_stream(f"weight-update-{pause.replace('_', '-')}-{mode}", server, stream)
    await rec.idle(server)


async def updated(rec: Recorder, server: Server, pause: str, label: str) -> Stream:
    """A stream with a new label in its middle; on a busy machine the first ones may be over too soon."""
    for _ in range(UPDATE_TRIES):
        async with rec.stream(server, body(40)) as stream:
            await stream.shows(6)
            await rec.control(server, "/pause_generation", {"mode": pause}, stream)
            new = {"new_version": label, "abort_all_requests": False}
            await rec.control(server, "/update_weight_version", new, stream)
            await rec.control(server, "/continue_generation", {}, stream)
            await stream.ends()
        await rec.control(
            server, "/update_weight_version", {"new_version": "default", "abort_all_requests": False}
        )
        expect(stream, kind="length")
        if versions(stream) == ["default", label]:
            return stream
    raise ShapeMissed(
        f"the update missed the stream {UPDATE_TRIES} times; its last versions: {versions(stream)}"
    )


def versions(stream: Stream) -> list[str]:
    """The versions that a stream shows: its spans, or the labels of its chunks where there are none (before 0.5.19)."""
    spans = stream.chunks[-1]["meta_info"].get("weight_versions")
    labels = [chunk["meta_info"]["weight_version"] for chunk in stream.chunks]
    return [span["version"] for span in spans] if spans else list(dict.fromkeys(labels))


async def queue_full(rec: Recorder, server: Server) -> None:
    """A server that was started with room for one running and one queued request refuses the third."""
    async with full(rec, server), rec.stream(server, body(8, rid="queued-2")) as queued:
        await rec.waiting(server, 1)
        async with rec.stream(server, body(8)) as stream:
            await stream.ends()
        expect(stream, kind="abort")
        if finish(stream).get("status_code") != 503:
            raise ShapeMissed(f"wanted status 503, got {finish(stream)}")
        rec.save_stream(f"queue-full-{server.mode}", server, stream)
        if server.mode == "cumulative":
            await rec.save_answer("queue-full-no-stream", server, "POST", "/generate", body(8))
        await rec.control(server, "/abort_request", {"rid": "queued-2"})
        await queued.ends()


async def killed(rec: Recorder, server: Server, router: Router) -> None:
    """SIGKILL of the server while one client reads directly and another through the router."""
    mode = server.mode
    request = body(FOREVER), body(FOREVER)
    async with rec.stream(server, request[0]) as direct, rec.stream(router, request[1]) as routed:
        await direct.shows(4)
        await routed.shows(4)
        server.kill()
        await direct.ends()
        await routed.ends()
    for stream, target, name in (
        (direct, server, f"killed-{mode}"),
        (routed, router, f"router-killed-{mode}"),
    ):
        if stream.ended == "complete":
            raise ShapeMissed(f"the body of {name} was not cut")
        rec.save_stream(name, target, stream)
    if mode == "cumulative":
        await rec.save_answer("router-worker-gone", router, "POST", "/generate", {**body(8), "stream": True})
        await rec.save_answer("router-worker-gone-workers", router, "GET", "/workers")


async def routed(rec: Recorder, router: Router) -> None:
    """The same through the router: fields that it drops, error bodies that it labels, routes that it has not."""
    mode = router.workers[0].mode
    stream = await whole(
        rec, f"router-completion-{mode}", router, body(8, return_prompt_token_ids=True), "length"
    )
    if "prompt_token_ids" in stream.chunks[0]:
        raise ShapeMissed("the router handed return_prompt_token_ids on")
    async with rec.stream(router, body(FOREVER, rid="routed-1")) as stream:
        await stream.shows(4)
        await rec.control(
            router.workers[0], "/abort_request", {"rid": "routed-1", "abort_all": False}, stream
        )
        await stream.ends()
    expect(stream, kind="abort", message="Aborted")
    rec.save_stream(f"router-abort-running-{mode}", router, stream)
    if mode == "incremental":
        return
    async with rec.stream(router, {**body(8), "input_ids": PROMPT * (CONTEXT // len(PROMPT) + 1)}) as stream:
        await stream.ends()
    stream.body["input_ids"] = f"{PROMPT} repeated {CONTEXT // len(PROMPT) + 1} times"
    rec.save_stream("router-error-too-long", router, stream)
    unknown = {"input_ids": PROMPT, "stream": True, "sampling_params": {"top_p": "high"}}
    await rec.save_answer("router-refused-bad-type", router, "POST", "/generate", unknown)
    # The router reads most fields itself; what it hands on unread can still be refused by the worker, and that
    # error body comes back labelled text/event-stream.
    handed_on = {**body(8), "stream": True, "image_data": [{"nonsense": 1}]}
    await rec.save_either("router-refused-by-worker", router, handed_on)
    unread = body(4, sampling={"max_tokens": 9})
    await whole(rec, "router-drops-unknown-sampling-param", router, unread, "length")
    await rec.save_answer("router-bad-rid-list", router, "POST", "/generate", {**body(4), "rid": ["a", "b"]})
