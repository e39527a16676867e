"""slime: the life of its samples in our hands, through the hooks it offers.

    --rollout-function-path adapters.slime.generate_rollout          a whole step: refill, over-sampling, carrying
    --custom-generate-function-path adapters.slime.generate          one sample, inside slime's own loops
    --data-source-path adapters.slime.DataSource                     partial samples are part of the checkpoint
    --dynamic-sampling-filter-path adapters.slime.keep_whole         with slime's own loop: no failed sample is trained on
    --custom-config-path lifecycle.yaml                              our settings, see `Settings`

Nothing of slime is imported before one of these is used. Facts about slime were read in its sources of August 2026
(commit 624b824a and pull request 2272); where the two differ, both are served.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from adapters.slime.datasource import data_source_class
from adapters.slime.filters import keep_whole
from adapters.slime.hook import generate
from adapters.slime.rollout import generate_rollout
from adapters.slime.runtime import Runtime, close_all, runtime_for
from adapters.slime.settings import Settings

if TYPE_CHECKING:
    DataSource: type[Any]

__all__ = [
    "DataSource",
    "Runtime",
    "Settings",
    "close_all",
    "generate",
    "generate_rollout",
    "keep_whole",
    "runtime_for",
]


def __getattr__(name: str) -> Any:
    """`DataSource` is made when it is first asked for, because its base class is slime's (PEP 562)."""
    if name == "DataSource":
        return data_source_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
