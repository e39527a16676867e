"""pytest plugin that puts a real SGLang under the tests: ``-p tests.live.plugin``; the tests in this directory load it.

With it the contract tests run on the live cluster instead of the simulator, and the run ends with the versions that
it was about and with how many contract tests each subject had.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from tests.contract.providers import Doomed
from tests.live.cluster import LiveCluster, leaked, live_cluster
from tests.live.environment import EXIT_UNAVAILABLE, Environment, InstallFailed, Unavailable, ensure
from tests.live.processes import Mode, Server

SETUP_TIMEOUT = 900
"""Seconds a first test may take: it pays for the installation and for the start of two servers."""
ENVIRONMENT = pytest.StashKey[Environment]()
OUTCOMES = ("passed", "failed", "error", "skipped")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give every test the time that the fixtures of the first may need."""
    for item in items:
        item.add_marker(pytest.mark.timeout(SETUP_TIMEOUT))


@pytest.fixture(scope="session")
def live_environment(request: pytest.FixtureRequest) -> Environment:
    """The environment with SGLang in it; the whole run ends with one line where there can be none."""
    try:
        environment = ensure()
    except Unavailable as problem:
        pytest.exit(f"live tests NOT RUN, no SGLang on this platform: {problem}", returncode=EXIT_UNAVAILABLE)
    except InstallFailed as problem:
        pytest.exit(f"live tests NOT RUN, SGLang's installation failed: {problem}", returncode=1)
    request.config.stash[ENVIRONMENT] = environment
    return environment


@pytest.fixture(scope="session")
def cluster(live_environment: Environment, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """Two real servers, cumulative and incremental; routers are started when first asked for."""
    with live_cluster(live_environment, tmp_path_factory.mktemp("live")) as running:
        yield running


class Live:
    """Real servers as the contract tests want them: by URL."""

    second = 500

    def __init__(self, cluster: LiveCluster) -> None:
        self._cluster = cluster
        self._servers: dict[str, Server] = {server.url: server for server in cluster.servers}
        self.name = f"SGLang {cluster.environment.sglang}"

    def worker(self, mode: Mode) -> str:
        """The URL of the server in this mode."""
        return self._cluster.server(mode).url

    def router(self, workers: Sequence[str]) -> str:
        """The URL of a real router over these workers."""
        return self._cluster.router_over(*(self._servers[url] for url in workers)).url

    @contextmanager
    def doomed(self, modes: Sequence[Mode]) -> Iterator[list[Doomed]]:
        """Fresh workers, started together."""
        servers = self._cluster.extra(modes)
        self._servers |= {server.url: server for server in servers}
        try:
            yield [Doomed(server.url, server.kill) for server in servers]
            left = leaked(servers)
        finally:
            self._cluster.drop(servers)
        assert not left, f"requests left on extra workers (running, waiting): {left}"


@pytest.fixture(scope="session")
def live_provider(cluster: LiveCluster) -> Live:
    """The real servers of this run."""
    return Live(cluster)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say what the run was about."""
    environment = config.stash.get(ENVIRONMENT, None)
    if environment is None:
        return
    counts: dict[str, Counter[str]] = {}
    for outcome in OUTCOMES:
        for report in terminalreporter.stats.get(outcome, []):
            subject = dict(getattr(report, "user_properties", ())).get("subject")
            if subject is not None:
                counts.setdefault(str(subject), Counter())[outcome] += 1
    terminalreporter.section("live")
    terminalreporter.write_line(f"SGLang {environment.sglang}, sglang-router {environment.router}")
    for subject, found in sorted(counts.items()):
        words = ", ".join(f"{number} {outcome}" for outcome, number in found.items())
        terminalreporter.write_line(f"contract tests on {subject}: {words}")
    total = sum(map(sum, (found.values() for found in counts.values())))
    terminalreporter.write_line(f"contract tests on {len(counts)} subjects: {total}")
