"""A PostgreSQL server for tests: Debian's or any other that is installed, with a data directory of its own.

It listens on a Unix socket in that directory only, so that there is no port to collide on. Where no server is
installed and we are root on a Debian system, the package is installed; where that fails, the tests fail with one line.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import psycopg

START_SECONDS = 40.0


class NoServer(Exception):
    """No PostgreSQL server can be had here; the message says why."""


def find_binaries() -> Path:
    """The folder with `initdb` and `postgres`. Raises NoServer."""
    found = _installed()
    if found is None and os.geteuid() == 0 and shutil.which("apt-get"):
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        command = ["apt-get", "install", "-y", "-q", "--no-install-recommends", "postgresql"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        found = _installed()
        if found is None:
            raise NoServer(
                f"PostgreSQL tests need a server: `{' '.join(command)}` failed ({done.returncode})"
            )
    if found is None:
        raise NoServer(
            "PostgreSQL tests need a server: install Debian's `postgresql`, or put `initdb` on the PATH"
        )
    return found


def _installed() -> Path | None:
    on_path = shutil.which("initdb")
    if on_path is not None and Path(on_path).resolve().with_name("postgres").exists():
        return Path(on_path).resolve().parent
    versions = sorted(
        Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: float(path.parts[-3]), reverse=True
    )
    return versions[0].parent if versions else None


class PostgresServer:
    """One server; `crash` stops it as a power cut of the process would, `start` brings it back with its data."""

    def __init__(self) -> None:
        self._binaries = find_binaries()
        # Root may not run the server; Debian's package brings a user for it.
        self._user = "postgres" if os.geteuid() == 0 else None
        self.folder = Path(tempfile.mkdtemp(prefix="pg-", dir="/tmp"))
        self._process: subprocess.Popen[bytes] | None = None
        if self._user is not None:
            shutil.chown(self.folder, self._user)
        self._run("initdb", "-D", str(self.folder / "data"), "-U", "postgres", "-A", "trust", "-E", "UTF8")

    @property
    def dsn(self) -> str:
        """How to connect."""
        return f"host={self.folder} user=postgres dbname=postgres"

    def dsn_for(self, name: str) -> str:
        """A DSN with a fresh schema of its own."""
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            connection.execute(f'CREATE SCHEMA "{name}"')
        return f"{self.dsn} options='-c search_path={name}'"

    def _run(self, program: str, *words: str) -> None:
        done = subprocess.run(
            [self._binaries / program, *words],
            user=self._user,
            cwd="/",
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise NoServer(
                f"PostgreSQL tests need a server: {program} failed: {done.stderr.strip().splitlines()[-1:]}"
            )

    def start(self) -> None:
        """Start and wait until it answers."""
        settings = ["-c", "listen_addresses=", "-c", f"unix_socket_directories={self.folder}"]
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [self._binaries / "postgres", "-D", self.folder / "data", *settings],
                user=self._user,
                cwd="/",
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                psycopg.connect(self.dsn, connect_timeout=5).close()
            except psycopg.OperationalError as error:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise NoServer(f"PostgreSQL tests need a server: it does not start: {error}") from error
                time.sleep(0.02)
            else:
                return

    def crash(self) -> None:
        """Immediate shutdown: no checkpoint, every connection cut; the next start recovers from the log."""
        self._signal(signal.SIGQUIT)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)
            self._process.wait(START_SECONDS)
        self._process = None

    def __enter__(self) -> Self:
        """Start it."""
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop it and delete its data."""
        self._signal(signal.SIGINT)
        shutil.rmtree(self.folder, ignore_errors=True)
