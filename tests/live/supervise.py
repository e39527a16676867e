"""Run a command in a process group that cannot outlive the process that started it.

``python supervise.py COMMAND…`` runs COMMAND and leaves with its status. Standard input must be a pipe that the parent
keeps open: when it ends, because the parent closed it or died in whatever way, the whole group is killed. SGLang starts
children of its own, and a test runner that is killed cannot clean up after them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading


def _kill_group_at_end_of_input() -> None:
    while os.read(0, 4096):
        pass
    os.killpg(0, signal.SIGKILL)


def main(command: list[str]) -> int:
    """Lead the group, run the command, hand SIGTERM on to it alone, pass its status on."""
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    threading.Thread(target=_kill_group_at_end_of_input, daemon=True).start()
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    # Only the command itself is asked to stop: SGLang takes a SIGTERM to its scheduler for a crash.
    signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    return child.wait()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
