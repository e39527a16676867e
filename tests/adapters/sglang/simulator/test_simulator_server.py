"""The simulator over real HTTP: what only a socket can show."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from adapters.sglang.simulator import Fault, FaultKind, ServerSettings, SimulatedCluster, TokenModel


def body(count: int = 6, **fields: Any) -> dict[str, Any]:
    """A streaming request."""
    return {
        "input_ids": [1, 2, 3],
        "stream": True,
        "return_logprob": True,
        "sampling_params": {"max_new_tokens": count},
        **fields,
    }


def tokens_of(text: str) -> list[int]:
    """The ids of an incremental stream."""
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    return [token for chunk in chunks for token in chunk["output_ids"]]


@pytest.fixture
def cluster() -> Iterator[SimulatedCluster]:
    """Two incremental workers at 200 tokens per second."""
    with SimulatedCluster(workers=2, mode="incremental", seed=5, tokens_per_second=200) as cluster:
        yield cluster


@pytest.fixture
def client() -> Iterator[httpx.Client]:
    """A client without limits."""
    with httpx.Client(timeout=10, limits=httpx.Limits(max_connections=None)) as client:
        yield client


def test_many_streams_at_once(cluster: SimulatedCluster, client: httpx.Client) -> None:
    """Sixty-four streams on two workers all bring the tokens of the model."""
    expected = [sample.token for sample in TokenModel(5).continuation([1, 2, 3], 20)]

    def one(number: int) -> list[int]:
        response = client.post(cluster.urls[number % 2] + "/generate", json=body(20))
        return tokens_of(response.text)

    with ThreadPoolExecutor(64) as pool:
        assert list(pool.map(one, range(64))) == [expected] * 64
    assert all(server.call(lambda brain: brain.idle) for server in cluster.servers)


def test_a_cut_is_a_broken_connection(cluster: SimulatedCluster, client: httpx.Client) -> None:
    """The chunked body ends without its end."""
    cluster[0].inject(Fault(FaultKind.CUT, after=3))
    with (
        client.stream("POST", cluster.urls[0] + "/generate", json=body()) as response,
        pytest.raises(httpx.RemoteProtocolError, match="incomplete chunked read"),
    ):
        response.read()


def test_a_refusal_has_its_status(cluster: SimulatedCluster, client: httpx.Client) -> None:
    """503 and a JSON body, and the next request is served."""
    cluster[0].inject(Fault(FaultKind.REFUSE, times=1))
    url = cluster.urls[0] + "/generate"
    refused = client.post(url, json=body())
    assert (refused.status_code, refused.json()["code"]) == (503, 503)
    assert len(tokens_of(client.post(url, json=body()).text)) == 6


def test_slow_headers_keep_the_client_waiting(cluster: SimulatedCluster, client: httpx.Client) -> None:
    """No header arrives for the time of that many steps; an impatient client leaves nothing behind."""
    cluster[0].inject(Fault(FaultKind.SLOW_HEADERS, steps=100_000))
    with pytest.raises(httpx.ReadTimeout):
        client.post(cluster.urls[0] + "/generate", json=body(100_000 // 4), timeout=0.2)
    cluster[0].wait_until(lambda brain: brain.idle)


def test_closing_a_stream_frees_the_request(cluster: SimulatedCluster, client: httpx.Client) -> None:
    """A client that leaves in the middle has its request aborted."""
    with client.stream("POST", cluster.urls[0] + "/generate", json=body(20_000)) as response:
        parts = response.iter_raw()
        next(parts)
        assert not cluster[0].call(lambda brain: brain.idle)
    cluster[0].wait_until(lambda brain: brain.idle)


def test_a_killed_worker_breaks_its_streams_and_comes_back_empty(
    cluster: SimulatedCluster, client: httpx.Client
) -> None:
    """After ``kill`` streams are cut and connections refused; after ``restart`` the same URL serves again."""
    url = cluster.urls[0]
    with client.stream("POST", url + "/generate", json=body(20_000)) as response:
        parts = response.iter_raw()
        next(parts)
        cluster[0].kill()
        with pytest.raises(httpx.TransportError):
            for _ in parts:
                pass
    with pytest.raises(httpx.ConnectError):
        client.get(url + "/health")
    assert client.get(cluster.urls[1] + "/health").status_code == 200
    cluster[0].restart()
    assert len(tokens_of(client.post(url + "/generate", json=body()).text)) == 6


def test_death_by_fault_and_return(cluster: SimulatedCluster, client: httpx.Client) -> None:
    """A DEATH fault takes the server down in the middle of a stream; ``restart`` brings it back by itself."""
    cluster[0].inject(Fault(FaultKind.DEATH, after=3, times=1, restart=0.01))
    with pytest.raises(httpx.TransportError):
        client.post(cluster.urls[0] + "/generate", json=body(50))
    retrying = httpx.HTTPTransport(retries=8)
    with httpx.Client(transport=retrying) as patient:
        assert len(tokens_of(patient.post(cluster.urls[0] + "/generate", json=body()).text)) == 6


def test_api_key() -> None:
    """With a key every path but the health checks asks for it."""
    with SimulatedCluster(api_key="s3cret") as cluster, httpx.Client() as client:
        url = cluster.urls[0]
        assert client.get(url + "/health").status_code == 200
        for headers in ({}, {"authorization": "Bearer wrong"}):
            refused = client.get(url + "/model_info", headers=headers)
            assert (refused.status_code, refused.json()) == (401, {"error": "Unauthorized"})
        right = {"authorization": "Bearer s3cret"}
        assert client.get(url + "/model_info", headers=right).status_code == 200


def test_a_pause_in_mode_abort_answers_when_all_have_ended(
    cluster: SimulatedCluster, client: httpx.Client
) -> None:
    """The answer comes only after the running stream has ended."""
    url = cluster.urls[0]
    with client.stream("POST", url + "/generate", json=body(20_000)) as response:
        parts = response.iter_raw()
        next(parts)
        client.post(url + "/pause_generation", json={"mode": "abort"})
        assert cluster[0].call(lambda brain: brain.idle)
    client.post(url + "/continue_generation", json={})


def test_an_unpaced_server_waits_for_nobody(client: httpx.Client) -> None:
    """Without a pace two thousand tokens come as fast as they are read."""
    with SimulatedCluster(mode="incremental") as cluster:
        response = client.post(cluster.urls[0] + "/generate", json=body(2000))
        assert len(tokens_of(response.text)) == 2000


def test_a_stalled_server_is_idle_work(client: httpx.Client) -> None:
    """A server whose only request is stalled for ever makes few steps: waiting costs no core."""
    with SimulatedCluster(faults=[Fault(FaultKind.STALL, after=1)]) as cluster:
        with client.stream("POST", cluster.urls[0] + "/generate", json=body(100)) as response:
            parts = response.iter_raw()
            next(parts)
            before, began = cluster[0].call(lambda brain: brain.scheduler.now), time.monotonic()
            cluster[0].wait_until(lambda brain: brain.scheduler.now >= before + 10)
            # Ten idle steps of 5 ms; a loop that never sleeps makes them in a fraction of a millisecond.
            assert time.monotonic() - began > 0.03
        cluster[0].wait_until(lambda brain: brain.idle)


def test_misuse_of_a_cluster() -> None:
    """Errors say what would be right."""
    with pytest.raises(ValueError, match="at least 1 worker"):
        SimulatedCluster(0)
    with pytest.raises(TypeError, match="either settings or its fields"):
        SimulatedCluster(settings=ServerSettings(), seed=1)
    cluster = SimulatedCluster()
    cluster.stop()
    with SimulatedCluster() as running:
        server = running[0]
        with pytest.raises(TimeoutError):
            server.wait_until(lambda brain: brain.submitted > 0, timeout=0.01)
    with pytest.raises(RuntimeError, match="not running"):
        server.call(lambda brain: brain.idle)


def test_importing_the_package_needs_no_server() -> None:
    """Brain and faults come without starlette and uvicorn; the server parts bring them."""
    code = (
        "import sys\n"
        "from adapters.sglang.simulator import Brain, Fault, TokenModel, parse_fault\n"
        "assert not {'starlette', 'uvicorn', 'httpx'} & set(sys.modules), sorted(sys.modules)\n"
        "from adapters.sglang.simulator import SimulatedCluster, serve, launch\n"
        "assert 'uvicorn' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_exports() -> None:
    """Every name in ``__all__`` is there, and no other."""
    import adapters.sglang.simulator as package

    assert package.__all__ == sorted(package.__all__)
    assert all(getattr(package, name) is not None for name in package.__all__)
    assert set(package.__all__) <= set(dir(package))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        package.nothing  # noqa: B018


def test_tokenizer_endpoints_take_lists_and_refuse_nonsense(
    cluster: SimulatedCluster, client: httpx.Client
) -> None:
    """Several texts or id lists at once; an id outside the vocabulary or a wrong type is a 400 that says so."""
    url = cluster.urls[0]
    both = client.post(url + "/tokenize", json={"prompt": ["He", ""]}).json()
    assert (both["tokens"], both["count"]) == ([[39, 68], []], [2, 0])
    assert client.post(url + "/detokenize", json={"tokens": both["tokens"]}).json() == {"text": ["He", ""]}
    outside = client.post(url + "/v1/detokenize", json={"tokens": [39, 512]})
    assert (outside.status_code, outside.json()["message"]) == (400, "tokens must lie between 0 and 511")
    assert client.post(url + "/v1/tokenize", json={"prompt": 3}).status_code == 400


def test_models_and_old_paths(cluster: SimulatedCluster, client: httpx.Client) -> None:
    """The OpenAI list of models names the one, and the deprecated paths still answer."""
    url = cluster.urls[0]
    (card,) = client.get(url + "/v1/models").json()["data"]
    assert card["id"] == client.get(url + "/get_server_info").json()["served_model_name"]
    assert client.get(url + "/ping").status_code == 200


def test_control_calls_over_http(cluster: SimulatedCluster, client: httpx.Client) -> None:
    """A control call with a wrong type is a 400 that names the field; a refusing fault shows its status."""
    url = cluster.urls[0]
    wrong = client.post(url + "/abort_request", json={"rid": 5})
    assert wrong.status_code == 400
    assert "$.rid" in wrong.json()["message"]
    cluster[0].inject(Fault(FaultKind.CONTROL_REFUSED, status=401, times=1))
    assert client.post(url + "/abort_request", json={"rid": "x"}).status_code == 401
    assert client.post(url + "/abort_request", json={"rid": "x"}).status_code == 200


def test_a_body_that_never_ends_is_nobody(cluster: SimulatedCluster) -> None:
    """A client that leaves in the middle of its request body has made no request."""
    with socket.create_connection(("127.0.0.1", cluster[0].port)) as connection:
        connection.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    assert cluster[0].call(lambda brain: brain.submitted) == 0


def test_stopping_while_a_restart_is_due() -> None:
    """A cluster stops at once even when a dead worker was to come back later."""
    fault = Fault(FaultKind.DEATH, after=1, restart=3600)
    with SimulatedCluster(faults=[fault]) as cluster, httpx.Client() as client:
        with pytest.raises(httpx.TransportError):
            client.post(cluster.urls[0] + "/generate", json=body(5))
        assert not cluster[0].call(lambda brain: brain.alive)
