"""Settings of all tests: property tests have no deadline of their own, and repeat what failed."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

pytest.register_assert_rewrite("lifecycle.testing.stores")

settings.register_profile(
    "lifecycle", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("lifecycle")
