"""The public names: lazy, complete, and the same for programs and for type checkers."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import lifecycle

INIT = Path(lifecycle.__file__)


def for_type_checkers() -> dict[str, str]:
    """Name → module, as the TYPE_CHECKING block imports them."""
    tree = ast.parse(INIT.read_text())
    block = next(
        node
        for node in tree.body
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    )
    return {
        alias.asname or alias.name: node.module or ""
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def test_programs_and_type_checkers_see_the_same_names_from_the_same_modules() -> None:
    """The table that is used and the imports that are checked."""
    assert for_type_checkers() == lifecycle._HOME_OF
    assert set(lifecycle.__all__) == {*lifecycle._HOME_OF, "__version__"}
    assert len(lifecycle.__all__) == len(set(lifecycle.__all__))


@pytest.mark.parametrize("name", sorted(lifecycle._HOME_OF))
def test_every_name_is_there_and_in_its_module(name: str) -> None:
    """The object is the module's own."""
    assert getattr(lifecycle, name) is getattr(import_module(lifecycle._HOME_OF[name]), name)


def test_the_version_is_the_distributions() -> None:
    """One number, in two places."""
    text = (INIT.parent.parent / "pyproject.toml").read_text()
    assert f'version = "{lifecycle.__version__}"' in text


def test_a_name_that_is_not_there_says_so() -> None:
    """AttributeError, as any module."""
    with pytest.raises(AttributeError, match="module 'lifecycle' has no attribute 'nonsense'"):
        _ = lifecycle.nonsense
    assert dir(lifecycle) == sorted(lifecycle.__all__)


@pytest.mark.parametrize(
    "module", ["lifecycle", "lifecycle.engine", "lifecycle.log", "lifecycle.stores", "adapters.sglang"]
)
def test_every_name_a_package_announces_exists(module: str) -> None:
    """`__all__` holds no ghosts."""
    package = import_module(module)
    missing = [name for name in package.__all__ if not hasattr(package, name)]
    assert missing == []


def loaded_by(statement: str) -> set[str]:
    """The top-level packages that a fresh interpreter has loaded after a statement."""
    script = f"import sys; {statement}; print(' '.join(sorted(sys.modules)))"
    plain = {
        name: value for name, value in os.environ.items() if not name.startswith("COV")
    }  # it loads a database
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env=plain
    )
    return set(done.stdout.split())


# structlog loads rich where it is installed, so rich is looked for only where structlog is absent.
HEAVY = {
    "anyio",
    "asyncio",
    "trio",
    "httpx",
    "httptools",
    "sqlite3",
    "psycopg",
    "duckdb",
    "starlette",
    "uvicorn",
    "click",
    "rich",
}


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import lifecycle", HEAVY | {"transitions", "structlog", "msgspec", "lifecycle.machine"}),
        ("from lifecycle import ROLLOUT", HEAVY | {"structlog", "lifecycle.engine"}),
        ("from lifecycle import RolloutRequest, Snapshot, RolloutState", HEAVY | {"lifecycle.engine"}),
        ("import lifecycle.log", HEAVY - {"asyncio", "rich"} | {"lifecycle.engine", "lifecycle.stores"}),
        (
            "import lifecycle.analysis",
            {"anyio", "trio", "httpx", "httptools", "psycopg", "sqlite3", "duckdb"},
        ),
        (
            "import lifecycle.diagram",
            {"anyio", "trio", "httpx", "httptools", "psycopg", "sqlite3", "duckdb", "structlog"},
        ),
        (
            "from lifecycle import LifecycleEngine",
            {"trio", "httpx", "httptools", "psycopg", "duckdb", "click", "torch"},
        ),
    ],
)
def test_importing_one_thing_does_not_pull_in_the_others(statement: str, absent: set[str]) -> None:
    """A fresh interpreter, and what is in sys.modules afterwards."""
    assert loaded_by(statement) & absent == set()
