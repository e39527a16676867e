"""The house: imports point down or sideways, never up and never in a circle; files and functions stay short."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("lifecycle", "adapters")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
MAX_LINES, MAX_FUNCTION = 400, 60

FLOORS: list[tuple[int, tuple[str, ...]]] = [
    (
        0,
        (
            "lifecycle._version",
            "lifecycle.states",
            "lifecycle.events",
            "lifecycle.request",
            "lifecycle.errors",
            "lifecycle.call",
        ),
    ),
    (
        1,
        (
            "lifecycle.machine",
            "lifecycle.policy",
            "lifecycle.rollout",
            "lifecycle.snapshot",
            "lifecycle.spans",
            "lifecycle.codec",
            "lifecycle.versions",
        ),
    ),
    (
        2,
        (
            "lifecycle.log",
            "lifecycle.stores",
            "lifecycle.backend",
            "lifecycle.collect",
            "lifecycle.ledger",
            "lifecycle.analysis",
            "lifecycle.diagram",
        ),
    ),
    (3, ("lifecycle.engine", "lifecycle.metrics", "lifecycle.thread", "lifecycle.testing")),
    (4, ("adapters",)),
    (5, ("lifecycle.cli", "lifecycle.__main__", "lifecycle.pytest_plugin")),
]
BESIDE = {
    "lifecycle.analysis": (
        "lifecycle.analysis",
        "lifecycle.log",
        "lifecycle.states",
        "lifecycle.machine",
        "lifecycle.errors",
        "lifecycle.diagram",
        "lifecycle._version",
    ),
    "lifecycle.diagram": (
        "lifecycle.diagram",
        "lifecycle.machine",
        "lifecycle.states",
        "lifecycle.errors",
        "lifecycle._version",
    ),
}
OUTSIDE = {"httpx", "httptools", "sglang", "slime", "torch", "ray", "starlette", "uvicorn"}


def module_of(path: Path) -> str:
    """The dotted name of a file."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def within(module: str, *prefixes: str) -> bool:
    """Whether a module is one of these or below one of them."""
    return any(module == prefix or module.startswith(prefix + ".") for prefix in prefixes)


def floor_of(module: str) -> int:
    """The floor of a module; every module is on one."""
    for floor, prefixes in FLOORS:
        if within(module, *prefixes):
            return floor
    raise AssertionError(f"{module} is on no floor: say where it belongs")


MODULES = {module_of(path) for path in FILES}


def run_time_imports(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """All imports, also those inside functions, but not those for type checkers alone."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        yield from run_time_imports(node)


def imported(path: Path, *, top_level: bool = False) -> set[str]:
    """The modules that a file imports when it runs (`top_level`: when it is imported)."""
    tree = ast.parse(path.read_text())
    nodes = run_time_imports(tree)
    if top_level:
        nodes = iter([node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)])
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        else:
            assert node.level == 0, f"{path}: relative import"
            base = node.module or ""
            names = {f"{base}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else base for name in names}
    return found


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_imports_point_down_or_sideways(path: Path) -> None:
    """Also those inside functions; the package's own lazy table is checked by its own test."""
    module = module_of(path)
    if module == "lifecycle":
        return
    floor = floor_of(module)
    for name in imported(path):
        if not within(name, *PACKAGES) or name in PACKAGES:
            continue
        assert floor_of(name) <= floor, f"{module} (floor {floor}) imports {name} (floor {floor_of(name)})"
        for beside, allowed in BESIDE.items():
            if within(module, beside):
                assert within(name, *allowed), f"{module} may import {allowed} only, not {name}"


@pytest.mark.parametrize(
    "path",
    [path for path in FILES if not within(module_of(path), "lifecycle.cli", "adapters")],
    ids=module_of,
)
def test_the_lifecycle_knows_no_server_and_no_trainer(path: Path) -> None:
    """No HTTP, no SGLang, no Ray, no torch below the command line; anyio from the engine up."""
    roots = {name.split(".")[0] for name in imported(path)}
    assert not roots & OUTSIDE
    module = module_of(path)
    if module != "lifecycle" and floor_of(module) < 3:
        assert not roots & {"anyio", "trio", "asyncio"}


def test_one_adapter_never_imports_the_internals_of_another() -> None:
    """From outside, only what an adapter's package itself offers."""
    adapters = {module.split(".")[1] for module in MODULES if module.startswith("adapters.")}
    for path in FILES:
        module = module_of(path)
        if not module.startswith("adapters."):
            continue
        own = module.split(".")[1]
        for name in imported(path):
            parts = name.split(".")
            if parts[0] == "adapters" and len(parts) > 1 and parts[1] in adapters - {own}:
                assert len(parts) == 2, f"{module} imports {name}"


def test_no_circles() -> None:
    """What is imported at import time forms no circle."""
    graph = {module_of(path): imported(path, top_level=True) & MODULES for path in FILES}
    for package in ("lifecycle", "adapters"):
        graph.get(package, set()).clear()
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " → ".join((*trail[trail.index(module) :], module))
        if module in done:
            return
        for name in sorted(graph[module]):
            visit(name, (*trail, module))
        done.add(module)

    for module in sorted(graph):
        visit(module, ())


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_files_and_functions_stay_short(path: Path) -> None:
    """A module under 400 lines, a function under 60."""
    text = path.read_text()
    assert text.count("\n") < MAX_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or 0) - node.lineno + 1
            assert length < MAX_FUNCTION, f"{node.name} has {length} lines"


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_every_module_begins_with_its_docstring_and_postponed_annotations(path: Path) -> None:
    """So that a reader knows what it is for, and PEP 604 types cost nothing."""
    tree = ast.parse(path.read_text())
    if not tree.body:
        return
    assert ast.get_docstring(tree), "no docstring"
    if len(tree.body) > 1:
        second = tree.body[1]
        assert isinstance(second, ast.ImportFrom)
        assert second.module == "__future__"
