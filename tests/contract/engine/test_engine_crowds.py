"""Many rollouts at once, and servers that die under them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import anyio
import httpx
import pytest

from lifecycle.states import Outcome, Reason, RolloutState
from tests.contract.engine.site import PROMPT, Site, grown
from tests.contract.providers import MODES, Doomed, Provider

pytestmark = [pytest.mark.contract, pytest.mark.anyio]

CROWD = 64
PROMPTS = [(*PROMPT[:4], last) for last in range(60, 68)]


async def test_more_rollouts_than_the_servers_run(site: Site) -> None:
    """Eight times as many as a server runs: each comes to its own answer."""
    requests = [
        site.request(f"{number}", count=24, prompt_ids=PROMPTS[number % len(PROMPTS)])
        for number in range(CROWD)
    ]
    async with site.engine() as engine:
        handles = [engine.submit(request) for request in requests]
        for handle in handles:
            snapshot = await handle.wait()
            assert snapshot.state is RolloutState.COMPLETED
            site.check(snapshot)


async def test_a_crowd_is_aborted_and_goes_on(site: Site) -> None:
    """One call ends those that run and those that wait; every one of them goes on to its own answer."""
    requests = [
        site.request(f"{number}", count=24, prompt_ids=PROMPTS[number % len(PROMPTS)])
        for number in range(CROWD // 2)
    ]
    async with site.engine() as engine:
        endless = [engine.submit(site.request(f"endless-{number}")) for number in range(site.limit)]
        for handle in endless[: len(site.workers)]:
            await grown(handle, 4)
        handles = [engine.submit(request) for request in requests]
        await site.until_loads(lambda loads: any(waiting for _, waiting in loads))
        report = await engine.abort()
        assert not report.leaks
        assert set(report.outcomes.values()) <= {Outcome.CONFIRMED, Outcome.FINISHED}
        assert {report.outcomes[handle.id] for handle in endless} == {Outcome.CONFIRMED}
        await site.until_loads(lambda loads: not any(map(any, loads)))
        for handle in handles:
            site.check(await engine.submit(handle.snapshot()).wait())


KILLED = 8


@pytest.fixture(scope="module")
def doomed(provider: Provider) -> Iterator[dict[str, Doomed]]:
    """One more worker in each mode, to be killed."""
    with provider.doomed(MODES) as workers:
        yield dict(zip(MODES, workers, strict=True))


@pytest.mark.parametrize(("mode", "routed"), [("cumulative", False), ("incremental", True)])
async def test_a_worker_is_killed(
    provider: Provider,
    doomed: dict[str, Doomed],
    control: httpx.Client,
    note_subject: Callable[[str], None],
    mode: str,
    routed: bool,
) -> None:
    """Its rollouts go on from their prefixes on the other worker, which streams in the other mode."""
    victim = doomed[mode]
    (other,) = set(MODES) - {mode}
    workers = (victim.url, provider.worker(other))
    url = provider.router(workers) if routed else workers[0]
    where = f"{mode}, killed, {'routed' if routed else 'direct'}"
    note_subject(f"{provider.name} {where}, engine")
    site = Site.over(where, url, workers, control)
    survivor = replace(site, workers=workers[1:])
    site.answer(PROMPT, 2 * provider.second)
    site.is_empty()
    async with site.engine(urls=url if routed else workers) as engine:
        handles = [engine.submit(site.request(str(number), 2 * provider.second)) for number in range(KILLED)]
        for handle in handles:
            await grown(handle, 4)
        await anyio.to_thread.run_sync(victim.kill)
        wholes = [await handle.wait() for handle in handles]
        moved = [whole for whole in wholes if whole.attempts[0].trigger == "lose"]
        assert len(moved) == KILLED // 2
        assert {whole.attempts[0].reason for whole in moved} == {Reason.DISCONNECTED}
        assert all(whole.attempts[-1].start >= 4 for whole in moved)
        assert all(len(whole.attempts) == 1 for whole in wholes if whole not in moved)
        for whole in wholes:
            assert whole.state is RolloutState.COMPLETED
            site.check(whole)
        after = engine.submit(site.request("after"))
        await grown(after, 4)
        report = await after.abort()
        assert report.outcomes == {"after": Outcome.CONFIRMED}
    survivor.is_empty()
