"""The live cluster is what it says: real servers of the pinned version in two modes, and a real router over them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.live.cluster import LiveCluster
from tests.live.environment import MODEL, Environment
from tests.live.processes import SUPERVISE, Mode, Server

PROMPT = [39, 68, 75, 75, 78]


def generate(url: str, **body: Any) -> list[dict[str, Any]]:
    """All JSON payloads of one greedy stream of eight tokens."""
    sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    whole = {"input_ids": PROMPT, "stream": True, "return_logprob": True, "sampling_params": sampling, **body}
    request = urllib.request.Request(
        f"{url}/generate", json.dumps(whole).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        payloads = [line[6:] for line in answer.read().decode().splitlines() if line.startswith("data: ")]
    assert payloads[-1] == "[DONE]"
    return [json.loads(payload) for payload in payloads[:-1]]


def ids(chunks: list[dict[str, Any]], mode: str) -> list[int]:
    """The tokens of a stream of known mode."""
    if mode == "cumulative":
        return list(chunks[-1]["output_ids"])
    return [token for chunk in chunks for token in chunk["output_ids"]]


@pytest.mark.parametrize("mode", ["cumulative", "incremental"])
def test_a_server_has_the_pinned_version_and_its_own_mode(cluster: LiveCluster, mode: Mode) -> None:
    """Each server says which version it is, in which mode it streams, and how many requests it runs."""
    info = cluster.server(mode).get("/server_info")
    assert info["version"] == cluster.environment.sglang
    assert info["incremental_streaming_output"] is (mode == "incremental")
    assert info["max_running_requests"] == 8


def test_both_modes_and_the_router_decode_the_same_tokens(cluster: LiveCluster) -> None:
    """Greedy decoding gives one sequence, whichever server takes the request and whether or not through a router."""
    seen = [ids(generate(server.url), server.mode) for server in cluster.servers]
    seen += [ids(generate(cluster.router_over(server).url), server.mode) for server in cluster.servers]
    assert len(seen[0]) == 8
    assert seen[1:] == seen[:1] * 3


def test_the_router_lists_both_workers(cluster: LiveCluster) -> None:
    """The router over both servers knows the two of them by URL."""
    assert {worker["url"] for worker in cluster.router.get("/workers")["workers"]} == {
        s.url for s in cluster.servers
    }


def test_an_extra_worker_can_be_killed(
    cluster: LiveCluster, extra_workers: Callable[..., list[Server]]
) -> None:
    """SIGKILL takes the whole process group of one worker, and no other."""
    [worker] = extra_workers(["cumulative"], max_running=2)
    assert worker.get("/server_info")["max_running_requests"] == 2
    worker.kill()
    with pytest.raises(OSError, match=r"refused|reset|urlopen"):
        worker.get("/model_info")
    assert not left_of(worker.process.pid)
    assert all(server.alive for server in cluster.servers)


def group_members(group: int) -> list[str]:
    """The command lines in a process group."""
    listing = subprocess.run(["ps", "-eo", "pgid=,args="], capture_output=True, text=True, check=True).stdout
    return [
        line for line in listing.splitlines() if line.split()[0] == str(group) and "<defunct>" not in line
    ]


def left_of(group: int) -> list[str]:
    """Who is still in a process group that was killed; a large process takes a moment to go."""
    until = time.monotonic() + 10
    while (members := group_members(group)) and time.monotonic() < until:
        time.sleep(0.02)
    return members


def test_a_group_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    """When the parent goes without a word, its end of the pipe closes and the whole group is killed."""
    reads, writes = os.pipe()
    process = subprocess.Popen(
        [sys.executable, str(SUPERVISE), "sleep", "600"], stdin=reads, start_new_session=True
    )
    os.close(reads)
    until = time.monotonic() + 10
    while len(group_members(process.pid)) < 2 and time.monotonic() < until:
        time.sleep(0.02)
    assert len(group_members(process.pid)) == 2
    os.close(writes)
    assert process.wait(10) == -9
    assert not left_of(process.pid)


def test_the_model_is_reused(live_environment: Environment) -> None:
    """The model lies in the environment, complete, under the name that servers are started with."""
    assert (live_environment.models / MODEL / "model.safetensors").is_file()
