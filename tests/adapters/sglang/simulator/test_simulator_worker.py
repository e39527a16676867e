"""A simulated server that ends while clients are knocking: in whatever turn of its loop, none is left hanging."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import Awaitable, Callable

import pytest

from adapters.sglang.simulator import ServerSettings
from adapters.sglang.simulator.worker import Worker

CLIENTS = 5


async def end_after(turns: int, end: Callable[[Worker], Awaitable[None]]) -> list[bytes | type[OSError]]:
    """What clients read that connected `turns` turns of the loop before the server ended."""
    worker = Worker(ServerSettings())
    await worker.start()
    # Plain blocking connects: they are done when the loop has not yet had a chance to accept.
    clients = [socket.create_connection((worker.host, worker.port)) for _ in range(CLIENTS)]
    for _ in range(turns):
        await asyncio.sleep(0)
    await end(worker)
    await worker.stop()
    return [_read(client) for client in clients]


def _read(client: socket.socket) -> bytes | type[OSError]:
    with client:
        client.settimeout(5)
        try:
            return client.recv(1)
        except OSError as error:
            return type(error)


@pytest.mark.parametrize("end", [Worker.kill, Worker.stop], ids=["kill", "stop"])
@pytest.mark.parametrize("turns", range(8))
def test_connections_that_are_just_being_accepted_are_closed(
    turns: int, end: Callable[[Worker], Awaitable[None]]
) -> None:
    """Each is cut, and no transport is left for the garbage collector (whose warning would fail this test)."""
    outcomes = asyncio.run(end_after(turns, end))
    assert set(outcomes) <= {b"", ConnectionResetError}, outcomes
    gc.collect()
