"""Aborts as an engine makes them: what they bring, what is kept, and that a resume goes on as if nothing had been."""

from __future__ import annotations

from dataclasses import replace

import anyio
import pytest

from lifecycle.engine import LifecycleEngine
from lifecycle.snapshot import Snapshot
from lifecycle.states import Outcome, Reason, RolloutState
from tests.contract.engine.site import LONG, REST, Site, grown, until

pytestmark = [pytest.mark.contract, pytest.mark.anyio]


async def interrupted(engine: LifecycleEngine, site: Site, tokens: int = 8) -> Snapshot:
    """A rollout that was aborted in the middle."""
    handle = engine.submit(site.request())
    await grown(handle, tokens)
    await handle.abort()
    return await handle.wait()


@pytest.mark.parametrize("strategy", ["fanout", "close"])
async def test_a_resume_after_an_abort_or_a_closed_stream(site: Site, strategy: str) -> None:
    """What is kept is a prefix of the uninterrupted answer, and the resume brings the rest of it."""
    async with site.engine(strategy=strategy) as engine:
        handle = engine.submit(site.request())
        await grown(handle, 8)
        report = await handle.abort(reason="over-sampled")
        kept = await handle.wait()
        assert kept.state is RolloutState.ABORTED
        assert 8 <= len(kept.tokens) < LONG
        assert report.outcomes == {"a": Outcome.CONFIRMED if strategy == "fanout" else Outcome.LOST}
        assert report.kept == ("a",)
        asked = set(site.workers) if strategy == "fanout" else {site.url}
        assert {
            receipt.worker for receipt in report.receipts
        } <= asked  # the stream may end before a worker answers
        site.check(kept)
        await site.goes_on(engine, kept)


async def test_a_resume_in_another_engine(site: Site) -> None:
    """A snapshot goes on in engines that have never seen it, and the last one completes it."""
    async with site.engine() as engine:
        kept = await interrupted(engine, site)
    async with site.engine() as engine:
        kept = await site.goes_on(engine, kept)
    shorter = replace(kept.request, max_new_tokens=len(kept.tokens) + REST)
    async with site.engine() as engine:
        whole = await engine.submit(replace(kept, request=shorter)).wait()
    assert whole.state is RolloutState.COMPLETED
    assert len(whole.attempts) == 3
    site.check(whole)


async def test_an_abort_in_the_queue(site: Site) -> None:
    """A request that waits is ended without a token, and comes to its answer later."""
    async with site.engine() as engine:
        async with site.full():
            handle = engine.submit(site.request())
            await site.until_queued(1)
            report = await handle.abort()
        assert report.outcomes == {"a": Outcome.CONFIRMED}
        assert report.empty == ("a",)
        await site.goes_on(engine, await handle.wait())


async def test_a_resume_that_is_aborted_in_the_queue(site: Site) -> None:
    """Its tokens are kept, and the next attempt goes on from them."""
    async with site.engine() as engine:
        kept = await interrupted(engine, site)
        async with site.full():
            handle = engine.submit(kept)
            await site.until_queued(1)
            report = await handle.abort()
        assert report.outcomes == {"a": Outcome.CONFIRMED}
        again = await handle.wait()
        assert again.tokens == kept.tokens
        await site.goes_on(engine, again)


async def test_an_abort_of_a_retracted_request(site: Site) -> None:
    """Within a pause in mode ``retract`` it is ended in the queue; nothing is lost, and nothing comes twice."""
    async with site.engine() as engine:
        handle = engine.submit(site.request())
        await grown(handle, 12)
        (version,) = site.versions()
        async with engine.weight_update(version, mode="retract"):
            report = await handle.abort()
        assert report.outcomes == {"a": Outcome.CONFIRMED}
        kept = await handle.wait()
        assert len(kept.tokens) >= 12
        site.check(kept)
        await site.goes_on(engine, kept)


async def test_an_abort_that_cannot_be_heard(site: Site) -> None:
    """What somebody else's pause holds back hears no abort: at the deadline its stream is closed, and said to leak."""
    async with site.engine() as engine:
        site.post("/pause_generation", {"mode": "in_place"})
        handle = engine.submit(site.request())
        await until(lambda: handle.state is RolloutState.STREAMING)
        report = await handle.abort(timeout=1.0)
        assert report.leaks == ("a",)
        kept = await handle.wait()
        assert kept.state is RolloutState.ABORTED
        await anyio.wait_all_tasks_blocked()  # the stream is closed by now
        site.post("/continue_generation")
        if site.routed:
            # The router hears of the closed stream only with the next chunk, and the server acts on one abort of a
            # request only, the lost one: the leak that the report speaks of is real, and abort_all ends it.
            await site.until_loads(lambda loads: sum(running for running, _ in loads) == 1)
            site.post("/abort_request", {"abort_all": True})
            await anyio.to_thread.run_sync(site.is_empty)
        await site.goes_on(engine, kept)


async def test_an_abort_twice_and_after_the_end(site: Site) -> None:
    """Whoever asks later joins the first, and a finished rollout stays finished."""
    async with site.engine() as engine:
        handle = engine.submit(site.request())
        await grown(handle, 8)
        reports = []

        async def abort() -> None:
            reports.append(await handle.abort())

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(abort)
            tasks.start_soon(abort)
        reports.append(await handle.abort())
        assert [report.outcomes for report in reports] == [{"a": Outcome.CONFIRMED}] * 3
        assert len((await handle.wait()).attempts) == 1
        done = engine.submit(site.request("b", count=4))
        before = await done.wait()
        late = await done.abort()
        assert late.outcomes == {"b": Outcome.FINISHED}
        assert done.snapshot().tokens == before.tokens


async def test_an_abort_before_the_first_chunk(site: Site) -> None:
    """An abort that overtakes its own request is sent again until it is heard."""
    async with site.engine() as engine:
        handle = engine.submit(site.request())
        await until(lambda: handle.state is not RolloutState.PENDING)
        assert handle.state is RolloutState.STREAMING
        report = await handle.abort()
        assert report.outcomes == {"a": Outcome.CONFIRMED}
        assert len((await handle.wait()).tokens) < LONG


async def test_an_abort_before_anything_was_sent(site: Site) -> None:
    """Then no server is told anything."""
    async with site.engine() as engine:
        handle = engine.submit(site.request())
        report = await handle.abort()
        assert report.outcomes == {"a": Outcome.NEVER_SENT}
        assert report.receipts == ()


async def test_an_id_that_begins_like_another(site: Site) -> None:
    """Servers abort by prefix; the engine's own request ids keep ``a-10`` alive when ``a-1`` is aborted."""
    async with site.engine() as engine:
        short, long = engine.submit(site.request("a-1")), engine.submit(site.request("a-10"))
        await grown(short, 4)
        await grown(long, 4)
        await short.abort()
        assert (await short.wait()).state is RolloutState.ABORTED
        await grown(long, len(long.rollout.tokens) + REST)
        await long.abort()
        site.check(await long.wait())


async def test_a_cancelled_caller(site: Site) -> None:
    """Cancelling the task that waits for a rollout ends it on the server, and its prefix goes on later."""
    async with site.engine() as engine:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine.generate, site.request())
            await until(lambda: "a" in engine.places())
            handle = engine.handle("a")
            await grown(handle, 8)
            tasks.cancel_scope.cancel()
        kept = await handle.wait()
        assert kept.state is RolloutState.ABORTED
        assert kept.reason is Reason.CANCELLED
        assert kept.outcome is Outcome.CONFIRMED
        await site.goes_on(engine, kept)


async def test_closing_with_everything_in_flight(site: Site) -> None:
    """An engine that is left ends what it has on the servers; all of it can go on in the next."""
    async with site.engine() as engine:
        handles = [engine.submit(site.request(str(number))) for number in range(4)]
        for handle in handles:
            await grown(handle, 4)
    site.is_empty()
    kept = [handle.snapshot() for handle in handles]
    assert {snapshot.state for snapshot in kept} == {RolloutState.ABORTED}
    async with site.engine() as engine:
        for snapshot in kept:
            await site.goes_on(engine, snapshot)
