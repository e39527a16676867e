"""The inner loop: one task per attempt. Everything it decides, it decides in `Core`."""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING, Any, cast

from lifecycle.engine.core import Core
from lifecycle.engine.flight import Flight
from lifecycle.errors import BackendUnreachable, LifecycleError
from lifecycle.events import Anomaly, EndKind, StreamEnd
from lifecycle.rollout import Rollout
from lifecycle.states import Reason

if TYPE_CHECKING:
    from lifecycle.backend import Backend


async def fly(core: Core, backend: Backend, flight: Flight) -> None:
    """Send one attempt and apply what its stream says until the attempt is over.

    Runs within `flight.scope`, which the engine alone cancels, after the attempt was closed in the books.
    """
    try:
        async with aclosing(cast("Any", backend.stream(flight.rollout.call()))) as batches:
            async for batch in batches:
                if core.absorb(flight, batch):
                    return
        end = StreamEnd(EndKind.LOST, Reason.TRUNCATED, "the stream ended without an end event")
    except Exception as error:  # noqa: BLE001  an adapter that raises must not take the other rollouts with it
        name = type(error).__name__
        core.recorder.anomaly(flight.rollout, flight.rid, Anomaly("backend_raised", name))
        end = StreamEnd(EndKind.REJECTED, Reason.MALFORMED, f"the backend raised {name}")
    if core.flights.get(flight.rid) is flight:
        core.ended(flight, end)


async def prepare(core: Core, backend: Backend, rollout: Rollout) -> None:
    """Turn a text prompt into ids, once, before its first dispatch."""
    try:
        ids = tuple(await backend.tokenize(rollout.request.text or ""))
    except BackendUnreachable as error:
        core.unprepared(rollout, str(error))
    except LifecycleError as error:
        core.unpreparable(rollout, str(error))
    except Exception as error:  # noqa: BLE001  an adapter that raises must not take the other rollouts with it
        core.unpreparable(rollout, f"tokenising raised {type(error).__name__}")
    else:
        if ids:
            core.prepared(rollout, ids)
        else:
            core.unpreparable(rollout, "the prompt has no tokens")
