from __future__ import annotations

from typing import Any

import pytest

from lifecycle.testing.clock import BACKENDS, virtual_backend


@pytest.fixture(params=BACKENDS)
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """Every engine test runs on asyncio and on trio, in virtual time."""
    return virtual_backend(request.param)
