"""How many examples a large property test takes: few in the ordinary run, more where LIFECYCLE_EXAMPLES asks for it."""

from __future__ import annotations

import os


def examples(few: int) -> int:
    """`few`, times the factor that the environment variable LIFECYCLE_EXAMPLES holds (default 1)."""
    return few * int(os.environ.get("LIFECYCLE_EXAMPLES", "1"))
