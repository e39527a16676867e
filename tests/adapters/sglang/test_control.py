"""Control calls: a receipt from each worker, whatever each of them does."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from adapters.sglang import SGLangBackend
from adapters.sglang.asking import spread
from adapters.sglang.control import token_ids
from lifecycle.backend import ReceiptStatus, UpdateMode, WorkerReceipt
from lifecycle.errors import BackendUnreachable, ConfigurationError
from tests.support.scripted_server import Script, ScriptedServer, answer, silence

pytestmark = pytest.mark.anyio
ACCEPTED, REFUSED, UNREACHABLE = ReceiptStatus.ACCEPTED, ReceiptStatus.REFUSED, ReceiptStatus.UNREACHABLE
OK = answer(200, {"message": "ok", "status": "ok"})
LABELLED = answer(200, {"success": True, "message": "Weight version updated to 8", "new_version": "8"})
LOADS = {
    "loads": [{"num_running_reqs": 2, "num_waiting_reqs": 1}, {"num_running_reqs": 1, "num_waiting_reqs": 0}]
}


@asynccontextmanager
async def behind(
    backend_of: Callable[..., SGLangBackend], *workers: dict[str, Script], **settings: Any
) -> AsyncIterator[tuple[list[ScriptedServer], SGLangBackend]]:
    """Scripted workers behind a scripted router."""
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(ScriptedServer(dict(scripts))) for scripts in workers]
        listed = {"workers": [{"url": server.url} for server in servers]}
        router = await stack.enter_async_context(ScriptedServer({"/workers": answer(200, listed)}))
        yield servers, await stack.enter_async_context(backend_of(router.url, **settings))


def statuses(receipts: Any) -> list[ReceiptStatus]:
    """The statuses, in the order of the workers."""
    return [receipt.status for receipt in receipts]


@pytest.mark.parametrize("mode", [UpdateMode.IN_PLACE, UpdateMode.RETRACT])
async def test_pause(backend_of: Callable[..., SGLangBackend], mode: UpdateMode) -> None:
    """Every worker is paused; one that refuses hides no other."""
    pause = "/pause_generation"
    async with behind(backend_of, {pause: OK}, {pause: answer(500, b"no")}, {pause: OK}) as (
        servers,
        backend,
    ):
        receipts = await backend.pause(mode, deadline=5)
        assert statuses(receipts) == [ACCEPTED, REFUSED, ACCEPTED]
        assert [receipt.worker for receipt in receipts] == [server.url for server in servers]
        assert receipts[1].detail == "HTTP 500: no"
        assert servers[0].requests[0].json() == {"mode": mode.value}


async def test_pause_takes_no_abort(backend_of: Callable[..., SGLangBackend]) -> None:
    """The mode `abort` pauses no server: asking for it is a mistake."""
    async with backend_of("http://127.0.0.1:9") as backend:
        with pytest.raises(ConfigurationError, match="in_place or retract"):
            await backend.pause(UpdateMode.ABORT, deadline=1)


async def test_silent_worker(backend_of: Callable[..., SGLangBackend]) -> None:
    """A worker that does not answer costs the deadline and no more."""
    pause = "/pause_generation"
    async with behind(backend_of, {pause: OK}, {pause: silence}) as (_, backend):
        receipts = await backend.pause(UpdateMode.IN_PLACE, deadline=0.5)
        assert statuses(receipts) == [ACCEPTED, UNREACHABLE]
        assert "no answer within" in (receipts[1].detail or "")


async def test_resume(backend_of: Callable[..., SGLangBackend]) -> None:
    """The label is published first and never aborts anything; then the worker goes on."""
    scripts = {"/update_weight_version": LABELLED, "/continue_generation": OK}
    async with behind(backend_of, scripts) as (servers, backend):
        receipts = await backend.resume("8", deadline=5)
        assert receipts == [WorkerReceipt(servers[0].url, ACCEPTED, version="8")]
        assert servers[0].paths() == ["/update_weight_version", "/continue_generation"]
        assert servers[0].requests[0].json() == {"new_version": "8", "abort_all_requests": False}


async def test_resume_without_a_label(backend_of: Callable[..., SGLangBackend]) -> None:
    """Without a version nothing is published."""
    async with behind(backend_of, {"/continue_generation": OK}) as (servers, backend):
        assert statuses(await backend.resume(None, deadline=5)) == [ACCEPTED]
        assert servers[0].paths() == ["/continue_generation"]


@pytest.mark.parametrize("label", [answer(404), answer(200, {"success": False, "message": "bad label"})])
async def test_resume_continues_whatever_the_label_does(
    backend_of: Callable[..., SGLangBackend], label: Script
) -> None:
    """A worker that refuses the label is continued, and its receipt says both."""
    scripts = {"/update_weight_version": label, "/continue_generation": OK}
    async with behind(backend_of, scripts) as (servers, backend):
        (receipt,) = await backend.resume("8", deadline=5)
        assert (receipt.status, receipt.version) == (REFUSED, None)
        assert "label not published" in (receipt.detail or "")
        assert "continued: accepted" in (receipt.detail or "")
        assert servers[0].paths()[-1] == "/continue_generation"


async def test_label_published_and_not_continued(backend_of: Callable[..., SGLangBackend]) -> None:
    """A worker that cannot be continued is no success, and gets no version."""
    async with behind(backend_of, {"/update_weight_version": LABELLED}) as (_, backend):
        (receipt,) = await backend.resume("8", deadline=5)
        assert (receipt.status, receipt.version) == (REFUSED, None)


async def test_workers(backend_of: Callable[..., SGLangBackend]) -> None:
    """Label and load of every worker; loads add up over the ranks, and what is not said stays unknown."""
    info = answer(200, {"model_path": "tiny", "weight_version": "7"})
    async with behind(
        backend_of,
        {"/model_info": info, "/v1/loads": answer(200, LOADS)},
        {"/get_model_info": answer(200, {"model_path": "old"})},
        {"/model_info": info, "/v1/loads": answer(200, {"loads": [{"num_running_reqs": None}]})},
        {"/model_info": info, "/v1/loads": answer(200, [])},
        {"/model_info": answer(401)},
    ) as (_, backend):
        one, old, odd, none, closed = await backend.workers(deadline=5)
        assert none.running is None
        assert (one.version, one.running, one.waiting, one.detail) == ("7", 3, 1, None)
        assert (old.status, old.version, old.running, old.detail) == (ACCEPTED, None, None, "loads unknown")
        assert (odd.version, odd.running) == ("7", None)
        assert (closed.status, closed.detail) == (REFUSED, "HTTP 401")


@pytest.mark.parametrize("body", [b"[]", b"7", b""])
async def test_odd_model_info(backend_of: Callable[..., SGLangBackend], body: bytes) -> None:
    """A model_info of another shape has no label."""
    async with behind(backend_of, {"/model_info": answer(200, body)}) as (_, backend):
        (receipt,) = await backend.workers(deadline=5)
        assert (receipt.status, receipt.version) == (ACCEPTED, None)


async def test_dead_worker(backend_of: Callable[..., SGLangBackend]) -> None:
    """A worker that is gone is unreachable; the others are told of nothing else."""
    async with behind(backend_of, {"/health": answer(200)}, {"/health": answer(503)}) as (servers, backend):
        await backend.topology()
        await servers[0].stop()
        receipts = await backend.health(deadline=5)
        assert statuses(receipts) == [UNREACHABLE, REFUSED]
        assert receipts[0].worker == servers[0].url


async def test_unusable_and_missing_workers(backend_of: Callable[..., SGLangBackend]) -> None:
    """A worker that speaks no HTTP, and a router without workers, are receipts too."""
    listed = answer(200, {"workers": [{"url": "grpc://c:3"}]})
    async with ScriptedServer({"/workers": listed}) as router, backend_of(router.url) as backend:
        receipts = await backend.health(deadline=5)
        assert [(receipt.worker, receipt.status) for receipt in receipts] == [
            ("grpc://c:3", UNREACHABLE),
            (router.url, UNREACHABLE),
        ]


async def test_a_failure_makes_the_list_doubtful(
    backend_of: Callable[..., SGLangBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a failure the router is asked again; while it is silent its last list stands."""
    monkeypatch.setattr("adapters.sglang.topology.REFRESH_S", 0.0)
    async with AsyncExitStack() as stack:
        dead = await stack.enter_async_context(ScriptedServer())
        alive = await stack.enter_async_context(ScriptedServer({"/health": answer(200)}))
        router = await stack.enter_async_context(
            ScriptedServer({"/workers": answer(200, {"urls": [dead.url]})})
        )
        backend = await stack.enter_async_context(backend_of(router.url))
        assert statuses(await backend.health(deadline=5)) == [REFUSED]  # 404
        router.scripts["/workers"] = answer(503)
        assert [receipt.worker for receipt in await backend.health(deadline=5)] == [dead.url]
        router.scripts["/workers"] = answer(200, {"urls": [alive.url]})
        assert [receipt.worker for receipt in await backend.health(deadline=5)] == [alive.url]
        asked = len(router.requests)
        assert statuses(await backend.health(deadline=5)) == [ACCEPTED]
        assert len(router.requests) == asked


class TestTokenize:
    """Text to ids."""

    async def test_at_a_worker(self, backend_of: Callable[..., SGLangBackend]) -> None:
        """The first worker that can say is believed."""
        tokens = answer(200, {"tokens": [39, 68], "count": 2})
        async with behind(backend_of, {}, {"/v1/tokenize": tokens}, {"/v1/tokenize": tokens}) as (
            servers,
            backend,
        ):
            assert await backend.tokenize("Hi") == [39, 68]
            assert servers[1].requests[0].json() == {"prompt": "Hi"}
            assert servers[2].requests == []

    async def test_old_path(self, backend_of: Callable[..., SGLangBackend]) -> None:
        """A server without the new path is asked at the old one."""
        async with behind(backend_of, {"/tokenize": answer(200, {"tokens": [1]})}) as (_, backend):
            assert await backend.tokenize("Hi") == [1]

    @pytest.mark.parametrize("tokens", [{"tokens": "x"}, {"tokens": [1.5]}, {"tokens": [-1]}, {}, []])
    async def test_odd_answer(self, backend_of: Callable[..., SGLangBackend], tokens: Any) -> None:
        """An answer without token ids is a refusal, and is named."""
        async with behind(backend_of, {"/v1/tokenize": answer(200, tokens)}) as (servers, backend):
            with pytest.raises(BackendUnreachable, match="give tokenizer=") as caught:
                await backend.tokenize("Hi")
            assert servers[0].url in str(caught.value)

    async def test_nobody(self, backend_of: Callable[..., SGLangBackend]) -> None:
        """Where nobody answers, every reason is given."""
        async with behind(backend_of, {"/v1/tokenize": answer(400, {"error": "tokenizer_not_found"})}) as (
            _,
            backend,
        ):
            with pytest.raises(BackendUnreachable, match="HTTP 400: tokenizer_not_found"):
                await backend.tokenize("Hi")

    async def test_no_workers(self, backend_of: Callable[..., SGLangBackend]) -> None:
        """A router that lists nobody cannot tokenise."""
        async with behind(backend_of) as (_, backend):
            with pytest.raises(BackendUnreachable, match="0 workers"):
                await backend.tokenize("Hi")

    async def test_dead_server(self, backend_of: Callable[..., SGLangBackend]) -> None:
        """No connection, no second path."""
        async with ScriptedServer() as gone:
            url = gone.url
        async with backend_of(url) as backend:
            with pytest.raises(BackendUnreachable, match=r"Connect|refused"):
                await backend.tokenize("Hi")

    async def test_own_tokenizer_wins(self, backend_of: Callable[..., SGLangBackend]) -> None:
        """A tokenizer of the caller's is used, and no worker is asked."""
        async with behind(backend_of, {}, tokenizer=lambda text: [len(text)]) as (servers, backend):
            assert await backend.tokenize("Hi") == [2]
            assert servers[0].requests == []


class TestDetokenize:
    """Ids to text."""

    async def test_at_a_worker(self, backend_of: Callable[..., SGLangBackend]) -> None:
        """A worker spells the tokens."""
        async with behind(backend_of, {"/v1/detokenize": answer(200, {"text": "Hi"})}) as (servers, backend):
            assert await backend.detokenize((39, 68)) == "Hi"
            assert servers[0].requests[0].json() == {"tokens": [39, 68]}

    @pytest.mark.parametrize("text", [{"text": 3}, [], {}])
    async def test_odd_answer(self, backend_of: Callable[..., SGLangBackend], text: Any) -> None:
        """An answer without text is none."""
        async with behind(backend_of, {"/v1/detokenize": answer(200, text)}) as (_, backend):
            with pytest.raises(BackendUnreachable, match="detokenise"):
                await backend.detokenize([1])


class Tensor:
    """Something like an array."""

    def tolist(self) -> list[int]:
        """As plain numbers."""
        return [1, 2]


class Encoding:
    """What `tokenizers` returns."""

    ids = (1, 2)


class Batch(dict[str, Any]):
    """What `transformers` returns."""


@pytest.mark.parametrize(
    "encoded", [[1, 2], (1, 2), {"input_ids": [1, 2]}, Batch(input_ids=[1, 2]), Encoding(), Tensor()]
)
def test_token_ids(encoded: Any) -> None:
    """Ids are found in what the usual tokenizers return."""
    assert token_ids(encoded) == [1, 2]


@pytest.mark.parametrize("encoded", ["12", [[1]], [1.0], None, 7, [True], [-1]])
def test_no_token_ids(encoded: Any) -> None:
    """Anything else is refused, and its type is named."""
    with pytest.raises(ConfigurationError, match=f"returned {type(encoded).__name__}"):
        token_ids(encoded)


async def test_spread_is_bounded_and_ordered() -> None:
    """No more than the limit run at a time, and the results come in order."""
    import anyio

    running = most = 0

    async def work(item: int) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await anyio.lowlevel.checkpoint()
        running -= 1
        return item * 10

    assert await spread(work, list(range(20)), 3) == [n * 10 for n in range(20)]
    assert most == 3
    assert await spread(work, [], 3) == []
