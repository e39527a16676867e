"""Settings of all tests: property tests have no deadline of their own, and repeat what failed."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(
    "lifecycle", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("lifecycle")
