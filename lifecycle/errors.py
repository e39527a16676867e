"""Every exception of the library. What a server does wrong is a trigger and a reason, never one of these.

LifecycleError
├── IllegalTransition      the table has no such arc
├── DuplicateRollout       an id is submitted while it is alive
├── EngineClosed           the engine takes no more work
├── UpdateTimeout          a weight update could not settle in time
├── BackendError
│   ├── BackendUnreachable     no server answered a control call
│   └── StreamMalformed        a decoder met bytes that cannot be true
├── SnapshotError
│   ├── SnapshotCorrupt        checksum, length or content does not fit
│   ├── SnapshotTooNew         written by a newer schema
│   ├── StoreUnavailable       the store refuses work
│   └── Fenced                 a newer owner holds this rollout
└── ConfigurationError     an argument or a setting cannot be used
"""

from __future__ import annotations

from collections.abc import Iterable


class LifecycleError(Exception):
    """The root of all errors raised on purpose by this library."""


class IllegalTransition(LifecycleError):
    """A trigger that the table does not allow in this state: a bug of ours or of an adapter."""

    def __init__(self, subject: str, state: str, trigger: str, legal: Iterable[str]) -> None:
        self.subject = subject
        self.state = state
        self.trigger = trigger
        self.legal = tuple(legal)
        allowed = ", ".join(self.legal) or "nothing"
        super().__init__(f"{subject}: {trigger!r} is not possible in state {state!r}; legal there: {allowed}")


class DuplicateRollout(LifecycleError):
    """A rollout id was submitted while a rollout of that id is alive in this engine."""

    def __init__(self, rollout_id: str, state: str) -> None:
        self.rollout_id = rollout_id
        super().__init__(
            f"rollout {rollout_id!r} is already known and {state}; wait for it, go on from its own snapshot, "
            "discard it, or use another id"
        )


class EngineClosed(LifecycleError):
    """The engine is closed, or was never entered."""


class UpdateTimeout(LifecycleError):
    """A weight update could not bring everything to rest before its deadline."""


class BackendError(LifecycleError):
    """A backend could not do what was asked of it."""


class BackendUnreachable(BackendError):
    """No server answered a call that needs an answer, such as tokenising a prompt."""


class StreamMalformed(BackendError):
    """A decoder met bytes that cannot be true. Adapters turn it into `reject` with the reason `malformed`."""


class SnapshotError(LifecycleError):
    """A snapshot or a store of snapshots cannot be used."""


class SnapshotCorrupt(SnapshotError):
    """The stored bytes do not carry what they claim: wrong checksum, truncated, or contradictory."""

    def __init__(self, rollout_id: str, problem: str) -> None:
        self.rollout_id = rollout_id
        self.problem = problem
        super().__init__(f"snapshot of rollout {rollout_id!r} is corrupt: {problem}")


class SnapshotTooNew(SnapshotError):
    """The snapshot was written by a newer schema than this version knows."""

    def __init__(self, rollout_id: str, found: int, known: int) -> None:
        self.rollout_id = rollout_id
        self.found = found
        self.known = known
        super().__init__(
            f"snapshot of rollout {rollout_id!r} has schema {found}, this version reads up to {known}; "
            "upgrade rollout-lifecycle"
        )


class StoreUnavailable(SnapshotError):
    """The snapshot store cannot take more work: it failed, or its backlog is full."""


class Fenced(SnapshotError):
    """A write carried an owner epoch lower than the store holds: somebody else owns the rollout now."""

    def __init__(self, rollout_id: str, epoch: int, current: int) -> None:
        self.rollout_id = rollout_id
        self.epoch = epoch
        self.current = current
        super().__init__(
            f"rollout {rollout_id!r}: owner epoch {epoch} may not write, epoch {current} owns it"
        )


class ConfigurationError(LifecycleError):
    """An argument, a setting or an input cannot be used; the message says which and what would be right."""
