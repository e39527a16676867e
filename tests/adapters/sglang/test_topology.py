"""What a URL is: every shape of a list of workers, every way a probe can fail."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import pytest

from adapters.sglang import SGLangBackend
from adapters.sglang.topology import Finding, Kind, Topology, listed_workers, usable
from tests.support.scripted_server import Script, ScriptedServer, answer, in_turn, raw, silence

pytestmark = pytest.mark.anyio
PROBES = ("/workers", "/list_workers", "/model_info", "/server_info")
INFO = {"model_path": "tiny", "weight_version": "default"}
HTML = b"<html><body>Welcome to nginx</body></html>"


def router(*urls: str, **fields: Any) -> dict[str, Any]:
    """What `/workers` of sglang-router 0.3.2 says."""
    return {
        "workers": [
            {"id": f"uuid-{n}", "url": url, "worker_type": "regular", "is_healthy": True, "load": 0, **fields}
            for n, url in enumerate(urls)
        ],
        "total": len(urls),
    }


@asynccontextmanager
async def serving(
    backend_of: Callable[..., SGLangBackend], scripts: dict[str, Script], **settings: Any
) -> AsyncIterator[tuple[ScriptedServer, SGLangBackend]]:
    """A scripted server and a backend of it."""
    async with ScriptedServer(scripts) as server, backend_of(server.url, **settings) as backend:
        yield server, backend


class TestShapes:
    """Lists of workers, without a server."""

    pytestmark: ClassVar[list[Any]] = []

    @pytest.mark.parametrize(
        ("data", "urls"),
        [
            ({"urls": ["http://a", "http://b"]}, ["http://a", "http://b"]),
            (router("http://a:1", "http://b:1"), ["http://a:1", "http://b:1"]),
            (router("http://a:1@0", dp_base_url="http://a:1", dp_rank=0), ["http://a:1"]),
            (router("http://a:1@0", base_url="http://a:1"), ["http://a:1"]),
            ({"workers": ["http://a"]}, ["http://a"]),
            ({"workers": []}, []),
        ],
    )
    def test_listed(self, data: Any, urls: list[str]) -> None:
        """Every version's list is read."""
        assert listed_workers(data) == urls

    @pytest.mark.parametrize(
        "data",
        [
            None,
            [],
            "x",
            {},
            {"urls": "x"},
            {"urls": [1]},
            {"workers": {}},
            {"workers": [{"id": 1}]},
            {"workers": [3]},
        ],
    )
    def test_no_list(self, data: Any) -> None:
        """Anything else is no list, not an empty one."""
        assert listed_workers(data) is None

    def test_usable(self) -> None:
        """Ranks are stripped, each worker is named once, gRPC workers are set apart."""
        urls = ["http://a:1@0", "http://a:1@1", "http://b:2", "grpc://c:3", "http://b:2/"]
        assert usable(urls) == (("http://a:1", "http://b:2"), ("grpc://c:3",))


async def test_router(backend_of: Callable[..., SGLangBackend]) -> None:
    """A router is asked once, and its list is remembered."""
    scripts = {"/workers": answer(200, router("http://a:1@0", "http://a:1@1", "grpc://c:3"))}
    async with serving(backend_of, scripts) as (server, backend):
        first = await backend.topology()
        assert (first.kind, first.workers, first.unusable) == (Kind.ROUTER, ("http://a:1",), ("grpc://c:3",))
        assert first.sure
        assert not first.direct
        assert await backend.topology() is first
        assert server.paths() == ["/workers"]


async def test_old_router(backend_of: Callable[..., SGLangBackend]) -> None:
    """A router before 0.2.2 lists its workers elsewhere."""
    scripts = {"/list_workers": answer(200, {"urls": ["http://a:1"]})}
    async with serving(backend_of, scripts) as (_, backend):
        found = await backend.topology()
        assert (found.kind, found.workers) == (Kind.ROUTER, ("http://a:1",))


@pytest.mark.parametrize("path", ["/model_info", "/server_info"])
async def test_server(backend_of: Callable[..., SGLangBackend], path: str) -> None:
    """A server is its own worker."""
    async with serving(backend_of, {path: answer(200, INFO)}) as (server, backend):
        found = await backend.topology()
        assert (found.kind, found.workers) == (Kind.SERVER, (server.url,))
        assert found.sure
        assert found.direct
        await backend.topology()
        assert server.paths() == list(PROBES[: PROBES.index(path) + 1])


FAILURES: dict[str, tuple[Script, Finding]] = {
    "404": (answer(404, {"detail": "Not Found"}), Finding.NOT_FOUND),
    "405": (answer(405), Finding.NOT_ALLOWED),
    "401": (answer(401), Finding.UNAUTHORIZED),
    "403": (answer(403, b"no"), Finding.UNAUTHORIZED),
    "501": (answer(501), Finding.NOT_IMPLEMENTED),
    "500": (answer(500, b"oops"), Finding.SERVER_ERROR),
    "418": (answer(418), Finding.OTHER_STATUS),
    "redirect": (answer(302, b"", location="http://elsewhere/"), Finding.OTHER_STATUS),
    "HTML": (answer(200, HTML, "text/html"), Finding.NO_JSON),
    "empty": (answer(200), Finding.NO_JSON),
    "other JSON": (answer(200, {"hello": 1}), Finding.OTHER_SHAPE),
    "JSON list": (answer(200, [1]), Finding.OTHER_SHAPE),
    "time-out": (silence, Finding.TIMED_OUT),
    "no HTTP": (raw(b"SSH-2.0-OpenSSH\r\n\r\n"), Finding.UNREACHABLE),
    "cut": (raw(b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\nabc"), Finding.UNREACHABLE),
}


@pytest.mark.parametrize("runtime", ["asyncio-fast"], indirect=True)
@pytest.mark.parametrize("probe", PROBES)
@pytest.mark.parametrize(("script", "finding"), FAILURES.values(), ids=FAILURES)
async def test_every_failure_at_every_probe(
    backend_of: Callable[..., SGLangBackend], probe: str, script: Script, finding: Finding
) -> None:
    """Each failure of each probe is told apart and reported; nothing is raised."""
    slow = finding is Finding.TIMED_OUT
    async with serving(backend_of, {probe: script}, control_timeout=0.3 if slow else 10.0) as (
        server,
        backend,
    ):
        found = await backend.topology()
        assert (found.kind, found.workers, found.sure) == (Kind.ASSUMED, (server.url,), False)
        by_path = {each.path: each for each in found.probes}
        assert by_path[probe].finding is finding
        others = {each.finding for path, each in by_path.items() if path != probe}
        assert others <= {Finding.NOT_FOUND, *([Finding.TIMED_OUT] if slow else [])}
        assert f"{probe}: {finding}" in found.report()


@pytest.mark.parametrize("failure", ["redirect", "no HTTP", "cut"])
async def test_failures_that_depend_on_the_client(
    backend_of: Callable[..., SGLangBackend], failure: str
) -> None:
    """What an HTTP client makes of a failure is the same on each transport."""
    script, finding = FAILURES[failure]
    async with serving(backend_of, {"/workers": script}) as (_, backend):
        assert (await backend.topology()).probes[0].finding is finding


@pytest.mark.parametrize("failure", ["401", "500", "time-out", "HTML"])
async def test_a_server_behind_an_unclear_probe_is_not_remembered(
    backend_of: Callable[..., SGLangBackend], failure: str
) -> None:
    """A newer router answers /model_info too: while /workers has no clear answer, the question stays open."""
    scripts = {
        "/workers": in_turn(FAILURES[failure][0], answer(200, router("http://a:1"))),
        "/model_info": answer(200, INFO),
    }
    limit = 1.0 if failure == "time-out" else 10.0
    async with serving(backend_of, scripts, control_timeout=limit) as (server, backend):
        first = await backend.topology()
        assert (first.kind, first.sure, first.workers) == (Kind.SERVER, False, (server.url,))
        assert (await backend.topology()).workers == ("http://a:1",)


async def test_unreachable(backend_of: Callable[..., SGLangBackend]) -> None:
    """Where nobody listens one probe is enough."""
    async with ScriptedServer() as server:
        url = server.url
    async with backend_of(url) as backend:
        found = await backend.topology()
        assert [each.finding for each in found.probes] == [Finding.UNREACHABLE]
        assert (found.kind, found.workers) == (Kind.ASSUMED, (url,))


async def test_router_without_workers(backend_of: Callable[..., SGLangBackend]) -> None:
    """A router that lists nobody yet is asked again."""
    scripts = {"/workers": in_turn(answer(200, router()), answer(200, router("http://a:1")))}
    async with serving(backend_of, scripts) as (_, backend):
        first = await backend.topology()
        assert (first.kind, first.workers, first.sure) == (Kind.ROUTER, (), False)
        assert (await backend.topology()).workers == ("http://a:1",)


async def test_given_workers(backend_of: Callable[..., SGLangBackend]) -> None:
    """Named workers are believed and nobody is asked."""
    async with serving(backend_of, {}, workers=["http://a:1@0", "http://a:1@1", "http://b:1"]) as (
        server,
        backend,
    ):
        found = await backend.topology()
        assert (found.kind, found.workers) == (Kind.GIVEN, ("http://a:1", "http://b:1"))
        assert found.sure
        assert not found.direct
        assert server.paths() == []


async def test_key_goes_along(backend_of: Callable[..., SGLangBackend]) -> None:
    """Probes carry the key, and what comes back does not."""
    scripts = {"/workers": answer(401, b"Invalid key sk-secret")}
    async with serving(backend_of, scripts, api_key="sk-secret") as (server, backend):
        found = await backend.topology()
        assert server.requests[0].headers["authorization"] == "Bearer sk-secret"
        assert "sk-secret" not in found.report()
        assert "Invalid key ***" in found.report()


async def test_endless_answer(
    backend_of: Callable[..., SGLangBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer without end is cut, not collected."""
    monkeypatch.setattr("adapters.sglang.asking.BODY_LIMIT", 1000)
    async with serving(backend_of, {"/workers": answer(200, b"x" * 5000)}) as (_, backend):
        assert (await backend.topology()).probes[0].finding is Finding.UNREACHABLE


def test_report() -> None:
    """The report is one line."""
    assert Topology("http://h", Kind.SERVER, ("http://h",)).report() == "http://h is server, 1 workers"
