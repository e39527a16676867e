"""The environment in which the live tests run a real SGLang server and router: made once, then reused.

    python -m tests.live.environment            make it if needed, print where it is
    python -m tests.live.environment --remove   throw it away

It lies outside the project and its virtual environment, because SGLang brings 2.5 GB of packages that the project must
never depend on. Nothing here needs more than the standard library.

Settings, all from the environment:

- ``LIFECYCLE_LIVE_HOME``    where environments are kept (default ``$XDG_CACHE_HOME/rollout-lifecycle``)
- ``LIFECYCLE_LIVE_SGLANG``  another SGLang version than the pinned one; where there is no list of its own in ``pins/``,
  the default list is used with that version put in

pip's own settings (``PIP_EXTRA_INDEX_URL``, ``PIP_FIND_LINKS``) apply: with an index of torch's CPU builds first, the
download is 200 MB of torch, else it is the CUDA build, which works as well.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
SGLANG = "0.5.23"
TORCH = "torch==2.13.0"
MODEL = "tiny"
PYTHONS = ((3, 11), (3, 12), (3, 13))
MACHINES = ("x86_64", "aarch64")
GLIBC = (2, 34)
EXIT_UNAVAILABLE = 69
"""``EX_UNAVAILABLE``: this platform has no wheels for it. Distinct from 1, an installation that failed."""

NO_WHEEL = re.compile(r"No matching distribution found for (\S+)|(\S+\.whl) is not a supported wheel")


class Unavailable(Exception):
    """SGLang's wheels do not exist for this platform; the message is one line and says what is missing."""


class InstallFailed(Exception):
    """The installation ended with an error; the message names the log."""


@dataclass(frozen=True)
class Environment:
    """A finished environment: a directory, and what lies in it."""

    home: Path
    sglang: str
    router: str

    @property
    def python(self) -> Path:
        """The interpreter that has SGLang."""
        return self.home / "venv" / "bin" / "python"

    @property
    def models(self) -> Path:
        """Where ``MODEL`` lies; a change of its recipe gives another directory.

        Servers start here, so that a model's path is its bare name and no answer shows a path of this machine.
        """
        digest = hashlib.sha256((HERE / "tiny_model.py").read_bytes()).hexdigest()[:8]
        return self.home / f"models-{digest}"

    @property
    def stamp(self) -> Path:
        """Written last: an environment without it is half-made."""
        return self.home / "complete.json"


def platform_problem(
    *,
    system: str,
    machine: str,
    libc: tuple[str, str],
    python: tuple[int, int],
    implementation: str = "CPython",
) -> str | None:
    """Why this platform cannot have the wheels, in one line; None where it can."""
    if system != "Linux" or machine not in MACHINES:
        return f"SGLang has wheels for Linux on {' and '.join(MACHINES)}; this is {system} on {machine}"
    name, version = libc
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if name != "glibc" or numbers < GLIBC:
        return f"SGLang's wheels need glibc {GLIBC[0]}.{GLIBC[1]} or newer; this system has {name or 'no glibc'} {version}".rstrip()
    if implementation != "CPython" or python not in PYTHONS:
        wanted = ", ".join(f"{major}.{minor}" for major, minor in PYTHONS)
        return f"SGLang's wheels need CPython {wanted}; this is {implementation} {python[0]}.{python[1]}"
    return None


def wanted_version() -> str:
    """The SGLang version asked for."""
    return os.environ.get("LIFECYCLE_LIVE_SGLANG") or SGLANG


def pins(sglang: str) -> list[str]:
    """The complete list of requirements beside torch, one ``name==version`` each."""
    own = HERE / "pins" / f"sglang-{sglang}.txt"
    source = own if own.is_file() else HERE / "pins" / f"sglang-{SGLANG}.txt"
    lines = [line.strip() for line in source.read_text().splitlines()]
    kept = [line for line in lines if line and not line.startswith("#")]
    return [f"sglang=={sglang}" if line.startswith("sglang==") else line for line in kept]


def located() -> Environment:
    """Where the environment is or will be. Its name is a hash of the pins and of the interpreter's version."""
    sglang = wanted_version()
    requirements = pins(sglang)
    base = os.environ.get("LIFECYCLE_LIVE_HOME")
    if not base:
        cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        base = str(Path(cache) / "rollout-lifecycle")
    key = "\n".join([interpreter(), platform.python_version(), TORCH, *requirements])
    digest = hashlib.sha256(key.encode()).hexdigest()[:12]
    router = next(line.partition("==")[2] for line in requirements if line.startswith("sglang-router=="))
    return Environment(home=Path(base).resolve() / f"live-{digest}", sglang=sglang, router=router)


def interpreter() -> str:
    """The interpreter to build with: never the one of the project's virtual environment itself, but its base."""
    return getattr(sys, "_base_executable", sys.executable)


def ensure() -> Environment:
    """Make the environment unless it is complete; a second caller waits for the first.

    Raises:
        Unavailable: this platform has no such wheels.
        InstallFailed: pip, or making the model, ended with an error.
    """
    environment = located()
    problem = platform_problem(
        system=platform.system(),
        machine=platform.machine(),
        libc=platform.libc_ver(),
        python=sys.version_info[:2],
        implementation=platform.python_implementation(),
    )
    if problem:
        raise Unavailable(problem)
    environment.home.parent.mkdir(parents=True, exist_ok=True)
    with _locked(environment.home.with_suffix(".lock")):
        if not environment.stamp.is_file():
            _build(environment)
        _write_stand_ins(environment)
        _make_model(environment)
    return environment


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(f"waiting for another process that holds {path}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _build(environment: Environment) -> None:
    """Install everything anew; whatever a broken attempt left is removed first."""
    began = time.monotonic()
    shutil.rmtree(environment.home, ignore_errors=True)
    environment.home.mkdir(parents=True)
    _say(
        f"installing SGLang {environment.sglang} and sglang-router {environment.router} into {environment.home}"
    )
    _run(environment, [interpreter(), "-m", "venv", str(environment.home / "venv")])
    requirements = environment.home / "requirements.txt"
    requirements.write_text("\n".join(pins(environment.sglang)) + "\n")
    pip = [
        str(environment.python),
        "-m",
        "pip",
        "install",
        "--disable-pip-version-check",
        "--only-binary=:all:",
    ]
    _run(environment, [*pip, TORCH])
    _run(environment, [*pip, "--no-deps", "-r", str(requirements)])
    seconds = round(time.monotonic() - began, 1)
    facts = {"sglang": environment.sglang, "router": environment.router, "torch": TORCH, "seconds": seconds}
    partial = environment.stamp.with_suffix(".partial")
    partial.write_text(json.dumps(facts) + "\n")
    partial.replace(environment.stamp)
    _say(f"installed in {seconds:.0f} s")


def _write_stand_ins(environment: Environment) -> None:
    """Put the stand-ins and the line that loads them where the interpreter of the environment looks."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = environment.home / "venv" / "lib" / version / "site-packages"
    text = (HERE / "stand_ins.py").read_text()
    target = packages / "live_stand_ins.py"
    if not target.is_file() or target.read_text() != text:
        target.write_text(text)
    (packages / "live_stand_ins.pth").write_text("import live_stand_ins\n")


def _make_model(environment: Environment) -> None:
    target = environment.models / MODEL
    if target.is_dir():
        return
    partial = target.with_name(f"{MODEL}.partial")
    shutil.rmtree(environment.models, ignore_errors=True)
    _run(environment, [str(environment.python), str(HERE / "tiny_model.py"), str(partial)])
    partial.replace(target)


def _run(environment: Environment, command: list[str]) -> None:
    """Run one step with its output in ``setup.log``."""
    log = environment.home / "setup.log"
    with log.open("ab") as sink:
        sink.write(f"$ {' '.join(command)}\n".encode())
        sink.flush()
        start = sink.tell()
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT, check=False
        )
    if done.returncode == 0:
        return
    output = log.read_bytes()[start:].decode(errors="replace")
    missing = NO_WHEEL.search(output)
    if missing:
        raise Unavailable(
            f"no wheel for this platform: {missing[1] or missing[2]} (pip's words are in {log})"
        )
    last = next((line for line in reversed(output.splitlines()) if line.strip()), "no output")
    raise InstallFailed(
        f"{' '.join(command[:5])} … ended with {done.returncode}: {last.strip()} (all of it in {log})"
    )


def _say(line: str) -> None:
    sys.stderr.write(f"live environment: {line}\n")
    sys.stderr.flush()


def main(arguments: list[str] | None = None) -> int:
    """Make or remove the environment; 0, 1 for a failed installation, 69 where the platform has no such wheels."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.live.environment", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--remove", action="store_true", help="remove the environment instead")
    options = parser.parse_args(arguments)
    if options.remove:
        home = located().home
        if home.is_dir():
            with _locked(home.with_suffix(".lock")):
                shutil.rmtree(home)
        return 0
    try:
        environment = ensure()
    except Unavailable as problem:
        _say(f"not possible here: {problem}")
        return EXIT_UNAVAILABLE
    except InstallFailed as problem:
        _say(f"installation failed: {problem}")
        return 1
    sys.stdout.write(f"{environment.home}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
