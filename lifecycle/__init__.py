"""The life of every rollout request in an RL-for-LLM training loop, as one explicit state machine.

Names are loaded when they are first used, so that importing the package, or `lifecycle.analysis`, pulls in neither an
event loop nor a database.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lifecycle._version import __version__

if TYPE_CHECKING:
    from lifecycle.backend import (
        AbortReceipt,
        Backend,
        Call,
        CallRef,
        ReceiptStatus,
        UpdateMode,
        WorkerReceipt,
    )
    from lifecycle.codec import decode_snapshot, encode_snapshot
    from lifecycle.engine import (
        AbortReport,
        Batch,
        EngineSettings,
        EngineStats,
        LifecycleEngine,
        RestoreReport,
        RolloutHandle,
    )
    from lifecycle.errors import (
        BackendError,
        BackendUnreachable,
        ConfigurationError,
        DuplicateRollout,
        EngineClosed,
        Fenced,
        IllegalTransition,
        LifecycleError,
        SnapshotCorrupt,
        SnapshotError,
        SnapshotTooNew,
        StoreUnavailable,
        StreamMalformed,
        UpdateTimeout,
    )
    from lifecycle.events import Anomaly, ChannelData, EndKind, StreamEnd, TokenSlice, VersionSpan
    from lifecycle.ledger import LedgerView
    from lifecycle.machine import GATE, ROLLOUT, TABLES
    from lifecycle.policy import OnAbort, Policy
    from lifecycle.request import RolloutRequest
    from lifecycle.rollout import Rollout
    from lifecycle.snapshot import Snapshot, Tail
    from lifecycle.states import (
        Disposition,
        FinishReason,
        GateState,
        GateTrigger,
        Outcome,
        Reason,
        RolloutState,
        Trigger,
        VersionSource,
    )
    from lifecycle.stores import MemoryStore, PostgresStore, SnapshotStore, SqliteStore
    from lifecycle.thread import EngineThread

_HOMES = {
    "lifecycle.backend": (
        "AbortReceipt",
        "Backend",
        "Call",
        "CallRef",
        "ReceiptStatus",
        "UpdateMode",
        "WorkerReceipt",
    ),
    "lifecycle.codec": ("decode_snapshot", "encode_snapshot"),
    "lifecycle.engine": (
        "AbortReport",
        "Batch",
        "EngineSettings",
        "EngineStats",
        "LifecycleEngine",
        "RestoreReport",
        "RolloutHandle",
    ),
    "lifecycle.errors": (
        "BackendError",
        "BackendUnreachable",
        "ConfigurationError",
        "DuplicateRollout",
        "EngineClosed",
        "Fenced",
        "IllegalTransition",
        "LifecycleError",
        "SnapshotCorrupt",
        "SnapshotError",
        "SnapshotTooNew",
        "StoreUnavailable",
        "StreamMalformed",
        "UpdateTimeout",
    ),
    "lifecycle.events": ("Anomaly", "ChannelData", "EndKind", "StreamEnd", "TokenSlice", "VersionSpan"),
    "lifecycle.ledger": ("LedgerView",),
    "lifecycle.machine": ("GATE", "ROLLOUT", "TABLES"),
    "lifecycle.policy": ("OnAbort", "Policy"),
    "lifecycle.request": ("RolloutRequest",),
    "lifecycle.rollout": ("Rollout",),
    "lifecycle.snapshot": ("Snapshot", "Tail"),
    "lifecycle.states": (
        "Disposition",
        "FinishReason",
        "GateState",
        "GateTrigger",
        "Outcome",
        "Reason",
        "RolloutState",
        "Trigger",
        "VersionSource",
    ),
    "lifecycle.stores": ("MemoryStore", "PostgresStore", "SnapshotStore", "SqliteStore"),
    "lifecycle.thread": ("EngineThread",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [  # noqa: PLE0604  the names are the keys of the table above; a test holds both against TYPE_CHECKING
    "__version__",
    *_HOME_OF,
]


def __getattr__(name: str) -> Any:
    """Load a public name from its module at first use (PEP 562)."""
    try:
        home = _HOME_OF[name]
    except KeyError:
        raise AttributeError(f"module 'lifecycle' has no attribute {name!r}") from None
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)
