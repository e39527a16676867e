"""The sites under contract: both stream modes, direct and through the real router, and a router over both."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import httpx
import pytest

from tests.contract.engine.site import Site
from tests.contract.providers import MODES, Provider, simulated

SITES = (*MODES, *(f"{mode}-routed" for mode in MODES), "both-routed")
ORDINARY_SITES = (*MODES, "both-routed")
"""On the simulator: a router over both takes the streams of either mode through it in turn."""


@pytest.fixture
def anyio_backend() -> str:
    """The event loop; that the engine runs on trio as well is shown elsewhere."""
    return "asyncio"


@pytest.fixture(scope="session")
def control() -> Iterator[httpx.Client]:
    """For what is asked of servers beside the engine. No connection is kept: real servers close idle ones early."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    with httpx.Client(limits=limits, timeout=20.0) as client:
        yield client


def make_site(provider: Provider, name: str, control: httpx.Client) -> Site:
    """The site of this name."""
    mode, _, routed = name.partition("-")
    workers = tuple(provider.worker(each) for each in (MODES if mode == "both" else (mode,)))
    url = provider.router(workers) if routed else workers[0]
    return Site.over(f"{provider.name} {name}, engine", url, workers, control)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each test on each site; on the simulator on those only that show something of their own."""
    if "whole_site" in metafunc.fixturenames:
        names = ORDINARY_SITES if simulated(metafunc.config) else SITES
        metafunc.parametrize("whole_site", names, indirect=True, scope="session")


@pytest.fixture(scope="session")
def whole_site(request: pytest.FixtureRequest, provider: Provider, control: httpx.Client) -> Site:
    """A site for the whole run."""
    return make_site(provider, request.param, control)


@pytest.fixture
def site(whole_site: Site, note_subject: Callable[[str], None]) -> Iterator[Site]:
    """A site whose workers are empty before the test and, or the test fails, after it."""
    note_subject(whole_site.name)
    whole_site.is_empty()
    yield whole_site
    whole_site.post("/continue_generation")
    try:
        whole_site.is_empty()
    except AssertionError:
        whole_site.post(
            "/abort_request", {"abort_all": True}
        )  # so that the next test begins with empty servers
        raise
