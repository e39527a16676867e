"""Ctrl-C while the database works: an interrupt, not a fault of the program."""

from __future__ import annotations

import subprocess
import sys

import pytest

ENDLESS = "SELECT range FROM range(100_000_000_000_000) WHERE hash(range) % {rarely} = 8"
PROGRAM = """
import _thread, signal, threading
from lifecycle.analysis.duck import connect
signal.signal(signal.SIGINT, signal.default_int_handler)
with connect(threads=1) as database:  # of several threads, the one that looks for signals may be waiting
    threading.Timer(0.5, _thread.interrupt_main).start()
    try:
        {call}
    except KeyboardInterrupt:
        print("interrupted")
"""


@pytest.mark.parametrize(
    "call",
    [
        f'database.execute("SELECT count(*) FROM ({ENDLESS.format(rarely=1_000_000)})")',
        f'database.execute("{ENDLESS.format(rarely=100_000)}").fetchall()',
        f'database.execute("CREATE TABLE rare AS {ENDLESS.format(rarely=1_000_000)}")',
    ],
    ids=["while it runs", "while rows are fetched", "while a table is made"],
)
def test_an_interrupt_of_the_database_is_an_interrupt(call: str) -> None:
    """Wherever the database is at work, KeyboardInterrupt comes out, as from any other line."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(call=call)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == "interrupted\n", done.stderr
