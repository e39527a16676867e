"""The one place the version number is written, beside pyproject.toml; a test holds them equal."""

from __future__ import annotations

__version__ = "0.1.0"
