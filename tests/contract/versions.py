"""What versions of SGLang answer differently, and the first that answers as the newest does.

The contract suite is run on each version in SEEN; a test asks `since` where they differ, and then holds what the older
one does as well.
"""

from __future__ import annotations

import re

SEEN = ("0.5.19", "0.5.20", "0.5.23")
CHECKS_PARAMETERS = "0.5.22"
"""Before: a sampling parameter of an unknown name or a wrong type raises while the request is handled."""
FLUSHES_AFTER_A_RETRACTION = "0.5.21"
"""Before: `/flush_cache` is refused for as long as a retracted request waits."""


def since(version: str, first: str) -> bool:
    """Whether `version` is `first` or a later one; a suffix such as `.post1` counts for nothing."""
    return _numbers(version) >= _numbers(first)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])
