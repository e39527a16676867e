"""What the engine needs of a server, and the receipts it gets. Adapters implement `Backend`.

Faults of a server are events and receipts, never exceptions: an adapter that raises from `stream` has a bug, and the
engine treats it as one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, runtime_checkable

from lifecycle.call import Call, CallRef
from lifecycle.events import StreamEvent

__all__ = ["AbortReceipt", "Backend", "Call", "CallRef", "ReceiptStatus", "UpdateMode", "WorkerReceipt"]


class UpdateMode(StrEnum):
    """What happens to running requests while weights change."""

    ABORT = "abort"  # our rollouts are aborted and resumed afterwards; servers are not paused
    IN_PLACE = "in_place"  # servers freeze their batch and go on with the old KV cache
    RETRACT = "retract"  # servers push running requests back to their queue and prefill again


class ReceiptStatus(StrEnum):
    """What one worker said to one control call."""

    ACCEPTED = "accepted"
    REFUSED = "refused"  # it answered, with something other than success
    UNREACHABLE = "unreachable"  # no answer


@dataclass(frozen=True, slots=True)
class WorkerReceipt:
    """What one worker answered to a control call; `version` is its weight label where it said one."""

    worker: str
    status: ReceiptStatus
    detail: str | None = None
    version: str | None = None
    running: int | None = None
    waiting: int | None = None


@dataclass(frozen=True, slots=True)
class AbortReceipt:
    """What one worker answered to the aborts of `rids`.

    `strategy` names how the abort was made (`fanout`, `close`, `abort_all`); `requests` is how many requests it
    took; `latency_s` the seconds until the last of them was answered.
    """

    worker: str
    status: ReceiptStatus
    rids: tuple[str, ...]
    detail: str | None = None
    strategy: str = "fanout"
    requests: int = 1
    latency_s: float = 0.0


@runtime_checkable
class Backend(Protocol):
    """A server, or a router with servers behind it."""

    def stream(self, call: Call) -> AsyncIterator[Sequence[StreamEvent]]:
        """Send `call` and yield one batch of events per socket read; the last event of all is one `StreamEnd`.

        The first batch may be empty, or hold `Accepted`: the server has taken the request. Closing the iterator early
        closes the connection.
        """
        ...

    async def abort(
        self, calls: Sequence[CallRef], *, deadline: float, everything: bool = False
    ) -> Sequence[AbortReceipt]:
        """Ask the workers to end `calls`; one receipt per worker and answer.

        `deadline` is in seconds from now. With `everything` the workers are told to end all requests they hold,
        also those of others: used only when a caller asks for it by name.
        """
        ...

    async def pause(self, mode: UpdateMode, *, deadline: float) -> Sequence[WorkerReceipt]:
        """Pause generation on every worker (`in_place` or `retract`)."""
        ...

    async def resume(self, version: str | None, *, deadline: float) -> Sequence[WorkerReceipt]:
        """Publish `version` as the weight label where it is not None, and continue generation on every worker."""
        ...

    async def workers(self, *, deadline: float) -> Sequence[WorkerReceipt]:
        """Every worker's state: reachable or not, its weight label and how many requests it runs and queues."""
        ...

    async def tokenize(self, text: str) -> Sequence[int]:
        """Token ids of `text`. Raises BackendUnreachable when no worker can say."""
        ...
