"""The inner loop: one task per attempt. Everything it decides, it decides in `Core`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

from lifecycle.engine.core import Core
from lifecycle.engine.flight import Flight
from lifecycle.events import Anomaly, EndKind, StreamEnd, StreamEvent
from lifecycle.states import Reason

if TYPE_CHECKING:
    from lifecycle.backend import Backend

NO_END = StreamEnd(EndKind.LOST, Reason.TRUNCATED, "the stream ended without an end event")


async def fly(core: Core, backend: Backend, flight: Flight) -> None:
    """Send one attempt and apply what its stream says until the attempt is over.

    Runs within `flight.scope`, which the engine alone cancels, after the attempt was closed in the books. An
    adapter that raises fails its own rollout and no other.
    """
    call = flight.rollout.call()
    try:
        stream = backend.stream(call)
    except Exception as error:  # noqa: BLE001
        core.absorb(flight, [_raised(core, flight, error)])
        return
    try:
        while True:
            batch: Sequence[StreamEvent]
            try:
                batch = await anext(stream)
            except StopAsyncIteration:
                batch = [NO_END]
            except Exception as error:  # noqa: BLE001
                batch = [_raised(core, flight, error)]
            if core.absorb(flight, batch):
                return
    finally:
        await _close(core, flight, stream)


def _raised(core: Core, flight: Flight, error: Exception) -> StreamEnd:
    name = type(error).__name__
    core.recorder.anomaly(flight.rollout, flight.rid, Anomaly("backend_raised", name))
    return StreamEnd(EndKind.REJECTED, Reason.MALFORMED, f"the backend raised {name}")


async def _close(core: Core, flight: Flight, stream: AsyncIterator[Sequence[StreamEvent]]) -> None:
    aclose = getattr(stream, "aclose", None)
    if aclose is None:
        return
    try:
        await aclose()
    except Exception as error:  # noqa: BLE001  the attempt is over; this is only worth a line
        _raised(core, flight, error)
