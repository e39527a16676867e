"""Where tests keep stores: in memory where the system offers a file system there, since a test waits for no disk."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")


def fast_folder() -> tempfile.TemporaryDirectory[str]:
    """A temporary folder whose `fsync` costs nothing, if there is one."""
    usable = SHARED_MEMORY.is_dir() and os.access(SHARED_MEMORY, os.W_OK)
    return tempfile.TemporaryDirectory(dir=SHARED_MEMORY if usable else None)
