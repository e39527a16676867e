"""Shared by the tests of stores: readable failures of the shipped contract, and a fast disk."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("lifecycle.testing.stores")
