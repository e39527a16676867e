"""A dynamic sampling filter for slime's own loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def keep_whole(_args: Any, samples: Sequence[Any], **_: Any) -> bool:
    """False for a group with a FAILED sample: `--dynamic-sampling-filter-path adapters.slime.keep_whole`.

    slime's own loop would ask for a reward of what failed and train on its siblings with a wrong baseline.
    """
    return not any(sample.status is type(sample).Status.FAILED for sample in _flat(samples))


def _flat(samples: Sequence[Any]) -> list[Any]:
    return [leaf for one in samples for leaf in (_flat(one) if isinstance(one, list) else [one])]
