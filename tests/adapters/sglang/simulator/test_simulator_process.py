"""The simulator as a command and as a child process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner

from adapters.sglang.simulator import FaultKind, launch
from adapters.sglang.simulator.command import sim

MODULE = [sys.executable, "-m", "adapters.sglang.simulator"]


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Poll until ``condition`` holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)  # poll interval; the deadline above decides


def gone(pid: int) -> bool:
    """Whether no such process runs (a zombie does not run)."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] == "Z"


def test_launch_and_stop() -> None:
    """The child answers on every URL, leads a session of its own, and stops with status 0."""
    with launch(["--port", "0", "--workers", "2", "--mode", "incremental", "--seed", "3"]) as child:
        assert len(set(child.urls)) == 2
        assert os.getsid(child.pid) == child.pid
        assert os.getsid(0) != child.pid
        for url in child.urls:
            assert httpx.get(url + "/server_info").json()["incremental_streaming_output"] is True
        during = child.running
    assert (during, child.running, child.stop()) == (True, False, 0)


def test_a_child_that_cannot_start_says_so() -> None:
    """A bad option is an error here, not a wait for ever."""
    with pytest.raises(RuntimeError, match="ended before it was ready, with exit status 2"):
        launch(["--mode", "sideways"], stderr=subprocess.DEVNULL)


def test_the_child_ends_with_a_killed_parent() -> None:
    """SIGKILL of the parent ends the child: the pipe between them ends."""
    code = (
        "import sys, time\n"
        "from adapters.sglang.simulator import launch\n"
        "child = launch(['--port', '0'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout:
        pid = int(parent.stdout.readline())
    assert not gone(pid)
    parent.kill()
    parent.wait()
    until(lambda: gone(pid))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_stop_it_cleanly(number: signal.Signals) -> None:
    """One line per worker when ready, then exit status 0 at SIGINT and SIGTERM, also with an open stream."""
    process = subprocess.Popen(
        [*MODULE, "--port", "0", "--workers", "2", "--tokens-per-second", "20"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(2)]
    assert all(line.startswith("simulated SGLang worker ") for line in lines)
    url = lines[1].split()[-1]
    request = {
        "text": "Hello",
        "stream": True,
        "sampling_params": {"max_new_tokens": 5000, "ignore_eos": True},
    }
    with httpx.stream("POST", url + "/generate", json=request) as response:
        parts = response.iter_raw()
        next(parts)
        process.send_signal(number)
        _, errors = process.communicate(timeout=20)
    assert process.returncode == 0
    assert errors == ""


def test_die_with_parent() -> None:
    """With ``--die-with-parent`` it notices that its parent is gone, without any pipe."""
    code = (
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen({[*MODULE, '--port', '0', '--die-with-parent']!r}, stdout=subprocess.PIPE)\n"
        "child.stdout.readline()\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout:
        pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    until(lambda: gone(pid))


def test_a_port_that_is_taken() -> None:
    """The message names host and port, and the exit status is 1."""
    with launch(["--port", "0"]) as child:
        port = child.urls[0].rpartition(":")[2]
        result = CliRunner().invoke(sim, ["--port", port])
    assert result.exit_code == 1
    assert f"cannot listen on 127.0.0.1 port {port}" in result.output


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--mode", "both"], "'both' is not one of 'cumulative', 'incremental'"),
        (["--fault", "explode"], "unknown fault 'explode'; known are cut"),
        (["--fault", "cut:after=x"], "after=x does not fit"),
        (["--workers", "0"], "0 is not in the range"),
        (["--eos-probability", "2"], "2.0 is not in the range"),
        (["--api-key-env", "NO_SUCH_VARIABLE_HERE"], "NO_SUCH_VARIABLE_HERE is not set"),
    ],
)
def test_bad_options(options: list[str], words: str) -> None:
    """A bad option is exit status 2 with what would be right."""
    result = CliRunner().invoke(sim, options)
    assert result.exit_code == 2
    assert words in result.output


def test_help() -> None:
    """The help shows an example and names every fault."""
    output = CliRunner().invoke(sim, ["--help"]).output
    assert "curl -N http://127.0.0.1:30000/generate" in output
    assert all(kind in "".join(output.split()) for kind in FaultKind)


def test_the_key_comes_from_the_environment() -> None:
    """``--api-key-env`` takes the key from a variable, so that it appears in no process list."""
    process = subprocess.Popen(
        [*MODULE, "--port", "0", "--api-key-env", "SIM_TEST_KEY"],
        stdout=subprocess.PIPE,
        env={**os.environ, "SIM_TEST_KEY": "s3cret"},
        text=True,
    )
    assert process.stdout is not None
    with process.stdout:
        url = process.stdout.readline().split()[-1]
        assert httpx.get(url + "/model_info").status_code == 401
        headers = {"authorization": "Bearer s3cret"}
        assert httpx.get(url + "/model_info", headers=headers).status_code == 200
        process.terminate()
        assert process.wait(20) == 0
