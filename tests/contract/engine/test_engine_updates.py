"""Weight updates as an engine makes them, held against what the servers themselves said of versions."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import anyio
import httpx
import pytest

from lifecycle.engine.handle import RolloutHandle
from lifecycle.engine.reports import AbortReport
from lifecycle.events import VersionSpan
from lifecycle.snapshot import Snapshot
from lifecycle.states import GateState, Outcome, RolloutState
from tests.contract.engine.site import Site, grown, until
from tests.contract.versions import REPORTS_SPANS, since

pytestmark = [pytest.mark.contract, pytest.mark.anyio]

ROLLOUTS = 3


class Tee(httpx.AsyncHTTPTransport):
    """Keeps the bytes of every stream by its rid."""

    def __init__(self) -> None:
        super().__init__(limits=httpx.Limits(max_connections=None))
        self.bodies: dict[str, bytearray] = {}

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send it, and listen to the answer."""
        response = await super().handle_async_request(request)
        kept = self.bodies.setdefault(json.loads(request.content)["rid"], bytearray())
        assert isinstance(response.stream, httpx.AsyncByteStream)
        response.stream = Overheard(response.stream, kept)
        return response

    def versions(self, rid: str) -> list[dict[str, Any]]:
        """What the last chunk of a stream says of versions."""
        chunks = [part[6:] for part in self.bodies[rid].split(b"\n\n") if part.startswith(b"data: {")]
        spans: list[dict[str, Any]] = json.loads(chunks[-1])["meta_info"]["weight_versions"]
        return spans


class Overheard(httpx.AsyncByteStream):
    """A body that is written down while it is read."""

    def __init__(self, stream: httpx.AsyncByteStream, kept: bytearray) -> None:
        self._stream = stream
        self._kept = kept

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for data in self._stream:
            self._kept.extend(data)
            yield data

    async def aclose(self) -> None:
        """Close what is listened to."""
        await self._stream.aclose()


def told(tee: Tee, snapshot: Snapshot) -> list[VersionSpan]:
    """The spans of a rollout, put together from what the servers said at the end of each of its attempts."""
    spans: list[VersionSpan] = []
    for attempt in snapshot.attempts:
        for span in tee.versions(attempt.rid):
            start, end = attempt.start + span["start"], attempt.start + span["end"]
            if start == end:
                continue
            if spans and spans[-1].version == span["version"]:
                start = spans.pop().start
            spans.append(VersionSpan(span["version"], start, end))
    return spans


@pytest.fixture(autouse=True)
def labels(site: Site) -> Iterator[None]:
    """Give the servers their label back."""
    (before,) = site.versions()
    yield
    site.post("/continue_generation")
    site.post("/update_weight_version", {"new_version": before, "abort_all_requests": False})


def seen_versions(snapshot: Snapshot) -> Sequence[str]:
    """The labels of a rollout's tokens in order."""
    return [span.version for span in snapshot.spans]


async def end(handle: RolloutHandle) -> Snapshot:
    """Let a rollout that runs show that it goes on, and end it."""
    await grown(handle, len(handle.rollout.tokens) + 8)
    await handle.abort()
    return await handle.wait()


@pytest.mark.parametrize("mode", ["abort", "in_place", "retract"])
async def test_an_update_in_the_middle_of_rollouts(site: Site, mode: str) -> None:
    """All tokens stay, each with the version that the server says it is of; what was stopped goes on by itself."""
    (before,) = site.versions()
    tee = Tee()
    async with (
        httpx.AsyncClient(transport=tee) as client,
        site.engine(client=client, version=before) as engine,
    ):
        handles = [engine.submit(site.request(str(number))) for number in range(ROLLOUTS)]
        for handle in handles:
            await grown(handle, 8)
        async with engine.weight_update("contract-7", mode=mode):
            assert engine.stats().gate == GateState.PAUSED
            held = [len(handle.rollout.tokens) for handle in handles]
        assert engine.version == "contract-7"
        kept = [await end(handle) for handle in handles]
    assert site.versions() == {"contract-7"}
    for snapshot, tokens in zip(kept, held, strict=True):
        site.check(snapshot)
        assert seen_versions(snapshot) == [before, "contract-7"]
        if since(site.version, REPORTS_SPANS):
            assert list(snapshot.spans) == told(tee, snapshot)
            assert {span.source for span in snapshot.spans} == {"span"}
            assert snapshot.spans[0].end >= tokens
        else:
            assert {span.source for span in snapshot.spans} == {"label"}
        assert len(snapshot.attempts) == (2 if mode == "abort" else 1)


@pytest.mark.parametrize("mode", ["abort", "in_place", "retract"])
async def test_an_update_that_fails(site: Site, mode: str) -> None:
    """The servers run again under the old label, and nothing is sent until the caller says so."""
    (before,) = site.versions()
    async with site.engine(version=before) as engine:
        first = engine.submit(site.request("first"))
        await grown(first, 8)
        with pytest.raises(RuntimeError, match="no weights"):
            async with engine.weight_update("contract-8", mode=mode):
                raise RuntimeError("no weights")
        assert engine.stats().gate == GateState.PAUSED
        assert engine.version == before
        second = engine.submit(site.request("second", count=8))
        if mode != "abort":
            await grown(first, len(first.rollout.tokens) + 8)
        assert second.state is RolloutState.PENDING
        engine.resume()
        for snapshot in (await end(first), await second.wait()):
            site.check(snapshot)
            assert seen_versions(snapshot) == [before]
    assert site.versions() == {before}


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_an_abort_within_an_update(site: Site, mode: str) -> None:
    """It is answered at the latest when the servers run again, and its deadline starts only then."""
    reports: list[AbortReport] = []
    async with site.engine() as engine:
        handle = engine.submit(site.request())
        await grown(handle, 8)
        (version,) = site.versions()

        async def abort() -> None:
            reports.append(await handle.abort(timeout=10.0))

        async with anyio.create_task_group() as tasks, engine.weight_update(version, mode=mode):
            tasks.start_soon(abort)
            await until(lambda: handle.state is not RolloutState.PARTIAL)
        assert [report.outcomes for report in reports] == [{"a": Outcome.CONFIRMED}]
        kept = await handle.wait()
        site.check(kept)
        await site.goes_on(engine, kept)
