"""Fixtures over a real SGLang: more workers for a test, and a look for leaks after each. The cluster is the plugin's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest

from tests.contract.providers import LIVE_PLUGIN
from tests.live.cluster import LiveCluster, leaked
from tests.live.processes import Mode, Server


def pytest_configure(config: pytest.Config) -> None:
    """Load the plugin for whoever runs this directory without naming it."""
    if not config.pluginmanager.hasplugin(LIVE_PLUGIN):
        config.pluginmanager.import_plugin(LIVE_PLUGIN)


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
