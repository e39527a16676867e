"""The contract of a snapshot store, as tests: for our own stores, and for those who write theirs.

    class TestMyStore(StoreContract):
        def make_store(self, clock):
            return MyStore(..., clock=clock)

pytest collects the inherited test methods. They need nothing of pytest but plain functions, so that any runner that
calls `setup_method`, a test method and `teardown_method` will do. For readable failures, call
`pytest.register_assert_rewrite("lifecycle.testing.stores")` in a conftest.py before the import.
"""

from __future__ import annotations

from lifecycle.testing.stores.builders import (
    OTHER,
    OWNER,
    TTL,
    ManualClock,
    ids,
    refused,
    request,
    rich_snapshot,
    same,
    snapshot,
    tail,
)
from lifecycle.testing.stores.owners import OwnerContract
from lifecycle.testing.stores.values import ValueContract

__all__ = [
    "OTHER",
    "OWNER",
    "TTL",
    "ManualClock",
    "StoreContract",
    "ids",
    "refused",
    "request",
    "rich_snapshot",
    "same",
    "snapshot",
    "tail",
]


class StoreContract(ValueContract, OwnerContract):
    """What every store must do. Subclass it and give `make_store`, and `peer` where another connection is possible."""
