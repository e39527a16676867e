"""The servers under contract: the simulator in both stream modes, or those that ``CONTRACT_SERVERS`` names.

``CONTRACT_SERVERS="cumulative=http://127.0.0.1:30000,incremental=http://127.0.0.1:30001"`` runs the same tests on
servers that are already there. They must be started with ``--max-running-requests`` of at most 16, and are left empty.
"""

from __future__ import annotations

import dataclasses
import os
import uuid
from collections.abc import Iterator

import httpx
import pytest

from adapters.sglang.simulator import SimulatedCluster
from tests.contract.reader import Subject


def _external() -> dict[str, str]:
    entries = filter(None, os.environ.get("CONTRACT_SERVERS", "").split(","))
    return {
        name.strip(): url.strip().rstrip("/") for name, _, url in (entry.partition("=") for entry in entries)
    }


def _simulated(mode: str) -> SimulatedCluster:
    return SimulatedCluster(
        mode=mode, max_running_requests=4, tokens_per_second=1000, seed=11, late_abort_delay=0.2
    )


@pytest.fixture(scope="session", params=list(_external()) or ["cumulative", "incremental"])
def server(request: pytest.FixtureRequest) -> Iterator[Subject]:
    """A server that stays up for the whole run."""
    external = _external().get(request.param)
    # No connection is kept: the real server closes idle ones after 5 s, now and then under the next request.
    with httpx.Client(
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=0), timeout=20.0
    ) as client:
        if external is not None:
            yield _subject(request.param, external, client)
        else:
            with _simulated(request.param) as cluster:
                yield _subject(f"simulated {request.param}", cluster[0].url, client)


def _subject(name: str, url: str, client: httpx.Client) -> Subject:
    info = client.get(url + "/server_info").json()
    limit = info["max_running_requests"]
    assert limit in range(1, 17), f"{url}: start it with --max-running-requests of at most 16, not {limit}"
    return Subject(name, url, bool(info["incremental_streaming_output"]), limit, client)


@pytest.fixture
def subject(server: Subject) -> Iterator[Subject]:
    """The server, empty before the test and, or the test fails, after it."""
    server.wait_for_load(0, 0)
    yield dataclasses.replace(server, tag=uuid.uuid4().hex)
    server.post("/continue_generation")
    server.wait_for_load(0, 0)
