"""What versions of SGLang answer differently, and the first that answers as the newest does.

A test asks `since` where they differ, and then holds what the older one does as well. The whole suite was run on 0.5.23
and 0.5.20, its engine half on 0.5.15.post1.
"""

from __future__ import annotations

import re

REPORTS_SPANS = "0.5.19"
"""Before: the last chunk has no `weight_versions`; what is known of versions are the labels of the chunks."""
CHECKS_PARAMETERS = "0.5.22"
"""Before: a sampling parameter of an unknown name or a wrong type raises while the request is handled."""
FLUSHES_AFTER_A_RETRACTION = "0.5.21"
"""Before: `/flush_cache` is refused for as long as a retracted request waits."""


def since(version: str, first: str) -> bool:
    """Whether `version` is `first` or a later one; a suffix such as `.post1` counts for nothing."""
    return _numbers(version) >= _numbers(first)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])
