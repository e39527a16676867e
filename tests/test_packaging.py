from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from lifecycle import __version__

ROOT = Path(__file__).parents[1]
OPTIONAL = (
    "starlette",
    "uvicorn",
    "duckdb",
    "zstandard",
    "psycopg",
    "httptools",
    "prometheus_client",
    "pytest",
)
"""What comes with an extra: a module that cannot be imported without one of these is not a core module."""

IMPORT_ALL = f"""
import importlib, pkgutil, sys
import adapters, lifecycle
failed = []
for package in (lifecycle, adapters):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if module.name.endswith("__main__"):
            continue
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] not in {OPTIONAL!r}:
                failed.append(f"{{module.name}}: {{error}}")
print("\\n".join(failed) or "all imported from " + lifecycle.__path__[0])
sys.exit(bool(failed))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from this tree."""
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return next(out.glob("*.whl"))


def test_the_wheel_holds_both_packages_and_nothing_else(wheel: Path) -> None:
    """Tests, benchmarks, diagrams and examples stay at home; both packages say that they are typed."""
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names}
    assert tops == {"lifecycle", "adapters", f"rollout_lifecycle-{__version__}.dist-info"}
    assert {"lifecycle/py.typed", "adapters/py.typed"} <= set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)


@pytest.mark.timeout(180)
def test_the_wheel_alone_runs_outside_the_checkout(wheel: Path, tmp_path: Path) -> None:
    """Installed without extras: the command helps, and every module that needs no extra can be imported."""
    home = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
    python = home / "bin" / "python"
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", str(wheel)]
    subprocess.run(install, check=True, timeout=150)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    shown = subprocess.run(
        [str(home / "bin" / "lifecycle"), "--help"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert shown.returncode == 0, shown.stderr
    assert "run" in shown.stdout
    done = subprocess.run(
        [str(python), "-c", IMPORT_ALL],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert str(home) in done.stdout
    lines = ('{"prompt": "x"}\n', ["run", "p.jsonl", "--out", "o"])
    (tmp_path / "p.jsonl").write_text(lines[0])
    missing = subprocess.run(
        [str(home / "bin" / "lifecycle"), *lines[1]],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert missing.returncode == 2
    assert "pip install 'rollout-lifecycle[sim]'" in missing.stderr


def test_the_version_is_the_same_everywhere() -> None:
    """pyproject.toml, the package and the newest section of the changelog agree."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == __version__
    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text()
