"""Many rollouts at once, and servers that die under them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import httpx
import pytest

from lifecycle.engine.handle import RolloutHandle
from lifecycle.states import Outcome, Reason, RolloutState
from tests.contract.engine.site import PROMPT, Site, grown
from tests.contract.providers import MODES, Provider

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


@pytest.fixture(scope="module")
def spare(provider: Provider) -> Iterator[dict[str, object]]:
    """One more worker in each mode."""
    with provider.doomed(MODES) as workers:
        yield dict(zip(MODES, workers, strict=True))
