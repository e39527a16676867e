"""Write the golden files of the present schema. To be run once per schema, from the root of the checkout.

python -m tests.data.snapshots.write_golden
"""

from __future__ import annotations

import gzip
from pathlib import Path

from lifecycle.codec import SCHEMA, encode_snapshot, encode_tail
from lifecycle.states import Disposition
from lifecycle.stores import SqliteStore
from tests.support.golden import following, full, plain, started

HERE = Path(__file__).parent


def main() -> None:
    """Write them; an existing file is never touched."""
    folder = HERE / f"v{SCHEMA}"
    folder.mkdir()
    for value in (full(), plain(), started()):
        name = value.id.replace("/", "-")
        (folder / f"{name}.snapshot").write_bytes(encode_snapshot(value))
    (folder / "started.tail").write_bytes(encode_tail(following()))
    database = folder / "store.db"
    with SqliteStore(database, clock=lambda: 1_700_000_000.0) as store:
        epoch = store.new_epoch()
        for value in (full(), plain(), started()):
            store.put(value, epoch, owner="node-1-4711-deadbeef", ttl=30.0)
        store.append(following(), epoch)
        store.mark("plain", Disposition.CARRIED, epoch)
    (folder / "store.db.gz").write_bytes(gzip.compress(database.read_bytes(), mtime=0))
    database.unlink()


if __name__ == "__main__":
    main()
