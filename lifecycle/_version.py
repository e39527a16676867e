"""The one place the version number is written, beside pyproject.toml; a test holds them equal."""

__version__ = "0.1.0"
