"""Every asynchronous test runs on each pair of event loop and transport that is offered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from adapters.sglang import SGLangBackend

RUNTIMES = ("asyncio-httpx", "asyncio-fast", "trio-httpx")


@pytest.fixture(params=RUNTIMES)
def runtime(request: pytest.FixtureRequest) -> str:
    """`loop-transport`."""
    return request.param


@pytest.fixture
def anyio_backend(runtime: str) -> str:
    """The event loop, for the anyio plugin."""
    return runtime.partition("-")[0]


@pytest.fixture
def transport(runtime: str) -> str:
    """The transport."""
    return runtime.partition("-")[2]


@pytest.fixture
def backend_of(transport: str) -> Callable[..., SGLangBackend]:
    """Makes backends on this runtime's transport."""

    def make(url: str | list[str], **settings: Any) -> SGLangBackend:
        settings = {"transport": transport, "control_timeout": 10.0, "connect_timeout": 10.0} | settings
        return SGLangBackend(url, **settings)

    return make
