"""`DataSource`: slime's buffered data source, whose checkpoints also hold the partial groups (`--data-source-path`)."""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path
from typing import Any

from adapters.slime import framework
from adapters.slime.partials import decode_groups, encode_groups, write_file
from adapters.slime.runtime import existing_runtime

logger = logging.getLogger("lifecycle.slime")


def partials_path(root: str, rollout_id: int | None) -> Path:
    """Where the partial groups of a checkpoint are, beside slime's own file of the data source."""
    return Path(root) / "rollout" / f"lifecycle_partials_{rollout_id}.bin"


@cache
def data_source_class() -> type[Any]:
    """The class; slime is imported here. Raises ConfigurationError where it cannot be."""
    base = framework.module("rollout.data_source").RolloutDataSourceWithBuffer

    class DataSource(base):  # type: ignore[misc, valid-type]
        """slime's buffered data source; `save` and `load` include every group that was drawn and not delivered.

        The cursor and the groups belong to one checkpoint: after a restart each prompt is there exactly once, and
        partial samples go on from their tokens.
        """

        def save(self, rollout_id: int) -> None:
            """Write the groups first and slime's cursor last: with the cursor there, the groups are there too."""
            if self.args.rollout_global_dataset:
                runtime = existing_runtime(self.args)
                groups = [*([] if runtime is None else runtime.undelivered()), *self.buffer]
                write_file(partials_path(self.args.save, rollout_id), encode_groups(groups))
                logger.info("saved %d undelivered groups with rollout %s", len(groups), rollout_id)
            super().save(rollout_id)

        def load(self, rollout_id: int | None = None) -> None:
            """Read slime's cursor, and the groups into the buffer. Raises SnapshotCorrupt or SnapshotTooNew."""
            super().load(rollout_id)
            if not self.args.rollout_global_dataset or self.args.load is None:
                return
            path = partials_path(self.args.load, rollout_id)
            if not path.exists():
                logger.info("no undelivered groups were saved at %s", path)
                return
            sample_class = framework.module("utils.types").Sample
            self.buffer = decode_groups(path.read_bytes(), str(path), sample_class.from_dict)
            logger.info("loaded %d undelivered groups from %s", len(self.buffer), path)

    return DataSource
