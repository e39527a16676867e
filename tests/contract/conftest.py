"""The servers under contract, for both halves of the suite.

``test_contract_*.py`` here speak HTTP to a server with a plain reader; ``engine/`` holds the same claims as an engine
sees them. By default the subject is the simulator, in the live tests a real SGLang. With
``CONTRACT_SERVERS="cumulative=http://127.0.0.1:30000,incremental=http://127.0.0.1:30001"`` it is servers that are
already there; they must be started with ``--max-running-requests`` of at most 16, and are left empty.
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import httpx
import pytest

from adapters.sglang.simulator import SimulatedCluster
from tests.contract.providers import LIVE_PLUGIN, MODES, Named, Provider, Simulated, named_servers
from tests.contract.reader import Subject


@pytest.fixture(scope="session")
def provider(request: pytest.FixtureRequest) -> Iterator[Provider]:
    """Who starts the servers of this run."""
    with ExitStack() as stack:
        named = named_servers()
        if request.config.pluginmanager.hasplugin(LIVE_PLUGIN):
            yield request.getfixturevalue("live_provider")
        elif named:
            yield Named(stack, named)
        else:
            yield Simulated(stack)


@pytest.fixture
def note_subject(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Writes down what a test ran on, so that a run can say how many tests each subject had."""
    return lambda name: record_property("subject", name)


@pytest.fixture(scope="session", params=MODES)
def server(request: pytest.FixtureRequest, provider: Provider) -> Iterator[Subject]:
    """A server that stays up for the whole run."""
    # No connection is kept: the real server closes idle ones after 5 s, now and then under the next request.
    with (
        ExitStack() as stack,
        httpx.Client(
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0), timeout=20.0
        ) as client,
    ):
        if isinstance(provider, Simulated):
            url = stack.enter_context(_simulated(request.param))[0].url
        else:
            url = provider.worker(request.param)
        yield _subject(f"{provider.name} {request.param}", url, client)


def _simulated(mode: str) -> SimulatedCluster:
    return SimulatedCluster(
        mode=mode, max_running_requests=4, tokens_per_second=1000, seed=11, late_abort_delay=0.2
    )


def _subject(name: str, url: str, client: httpx.Client) -> Subject:
    info = client.get(url + "/server_info").json()
    limit = info["max_running_requests"]
    assert limit in range(1, 17), f"{url}: start it with --max-running-requests of at most 16, not {limit}"
    return Subject(name, url, bool(info["incremental_streaming_output"]), limit, info["version"], client)


@pytest.fixture
def subject(server: Subject, note_subject: Callable[[str], None]) -> Iterator[Subject]:
    """The server, empty before the test and, or the test fails, after it."""
    note_subject(f"{server.name}, HTTP")
    server.wait_for_load(0, 0)
    yield dataclasses.replace(server, tag=uuid.uuid4().hex)
    server.post("/continue_generation")
    server.wait_for_load(0, 0)
