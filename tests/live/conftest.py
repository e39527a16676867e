"""Fixtures over a real SGLang: a cluster for the session, more workers for a test, and a look for leaks after each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest

from tests.live.cluster import LiveCluster, leaked, live_cluster
from tests.live.environment import EXIT_UNAVAILABLE, Environment, InstallFailed, Unavailable, ensure
from tests.live.processes import Mode, Server

SETUP_TIMEOUT = 900
"""Seconds a first test may take: it pays for the installation and for the start of two servers."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give every live test the time that the fixtures of the first may need."""
    for item in items:
        if item.path.is_relative_to(__file__.rpartition("/")[0]):
            item.add_marker(pytest.mark.timeout(SETUP_TIMEOUT))


@pytest.fixture(scope="session")
def live_environment() -> Environment:
    """The environment with SGLang in it; the whole run ends with one line where there can be none."""
    try:
        return ensure()
    except Unavailable as problem:
        pytest.exit(f"live tests NOT RUN, no SGLang on this platform: {problem}", returncode=EXIT_UNAVAILABLE)
    except InstallFailed as problem:
        pytest.exit(f"live tests NOT RUN, SGLang's installation failed: {problem}", returncode=1)


@pytest.fixture(scope="session")
def cluster(live_environment: Environment, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """Two real servers, cumulative and incremental; routers are started when first asked for."""
    with live_cluster(live_environment, tmp_path_factory.mktemp("live")) as running:
        yield running


@pytest.fixture
def extra_workers(cluster: LiveCluster) -> Iterator[Callable[..., list[Server]]]:
    """Start workers of this test's own: ``extra_workers(["cumulative"], max_running=2)``."""
    started: list[Server] = []

    def start(modes: Sequence[Mode], *, max_running: int = 8, options: Sequence[str] = ()) -> list[Server]:
        servers = cluster.extra(modes, max_running=max_running, options=options)
        started.extend(servers)
        return servers

    yield start
    left = leaked(started)
    cluster.drop(started)
    assert not left, f"requests left on extra workers (running, waiting): {left}"


@pytest.fixture(autouse=True)
def loads_are_zero(cluster: LiveCluster) -> Iterator[None]:
    """After every test nothing runs or waits on any server: no request was leaked."""
    yield
    left = leaked(cluster.servers)
    assert not left, f"requests left on the servers (running, waiting): {left}"
