"""The HTTP face of a simulated server: an ASGI app that reads bodies, asks the brain, and writes what it says.

No rule of SGLang lives here except the ones about HTTP itself: paths, status codes, who may call.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from adapters.sglang.simulator import info
from adapters.sglang.simulator.brain import Brain, Reply
from adapters.sglang.simulator.generate import GenerateEndpoint
from adapters.sglang.simulator.pump import Pump
from adapters.sglang.simulator.schema import BadBody, refusal
from adapters.sglang.simulator.text import VOCAB_SIZE, decode, encode

_BodyT = TypeVar("_BodyT", bound=msgspec.Struct)
_OPEN_PATHS = ("/health", "/ready", "/metrics")


class AbortBody(msgspec.Struct, kw_only=True):
    """``/abort_request``; other keys are ignored, an empty rid matches nothing."""

    rid: str | None = ""
    abort_all: bool = False


class PauseBody(msgspec.Struct, kw_only=True):
    """``/pause_generation``."""

    mode: str = "abort"


class ContinueBody(msgspec.Struct, kw_only=True):
    """``/continue_generation``."""

    torch_empty_cache: bool = True


class VersionBody(msgspec.Struct, kw_only=True):
    """``/update_weight_version``; aborting is the default, as in SGLang."""

    new_version: str
    abort_all_requests: bool = True


class TokenizeBody(msgspec.Struct, kw_only=True):
    """``/v1/tokenize``: one text or several."""

    prompt: str | list[str]


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """``/v1/detokenize``: one list of ids or several."""

    tokens: list[int | list[int]]


class Json(Response):
    """A JSON response, written by msgspec."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """The bytes of ``content``."""
        return msgspec.json.encode(content)


async def _read(request: HttpRequest, model: type[_BodyT]) -> _BodyT:
    """The body as ``model``; a missing body is an empty object. Raises BadBody, which becomes HTTP 400."""
    raw = await request.body()
    try:
        return msgspec.json.decode(raw or b"{}", type=model)
    except msgspec.MsgspecError as error:
        raise BadBody(str(error)) from None


async def _answer_bad_body(_: HttpRequest, error: Exception) -> Response:
    return Json(refusal(str(error)), 400)


async def _answer_not_found(_: HttpRequest, error: Exception) -> Response:
    return Json({"detail": getattr(error, "detail", "Not Found")}, getattr(error, "status_code", 404))


class ApiKey:
    """Asks for ``Authorization: Bearer …`` on every path but the health checks; without it 401."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._expected = f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or answer 401."""
        if scope["type"] == "http" and not scope["path"].startswith(_OPEN_PATHS):
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._expected):
                await Json({"error": "Unauthorized"}, 401)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class _Control:
    """The endpoints besides ``/generate``, over one brain."""

    def __init__(self, pump: Pump) -> None:
        self.pump = pump

    @property
    def brain(self) -> Brain:
        return self.pump.brain

    def _reply(self, reply: Reply) -> Response:
        """Write a reply of the brain, and let the scheduler see what the call changed."""
        self.pump.nudge()
        if reply.body is None:
            return Response(status_code=reply.status)
        if isinstance(reply.body, str):
            return Response(reply.body, reply.status)
        return Json(reply.body, reply.status)

    async def abort(self, request: HttpRequest) -> Response:
        body = await _read(request, AbortBody)
        return self._reply(self.brain.abort(body.rid or "", abort_all=body.abort_all))

    async def pause(self, request: HttpRequest) -> Response:
        body = await _read(request, PauseBody)
        reply = self.brain.pause(body.mode)
        self.pump.nudge()
        if reply.status == HTTPStatus.OK:
            await self.pump.wait_until(lambda: self.brain.pause_settled)
        return self._reply(reply)

    async def resume(self, request: HttpRequest) -> Response:
        await _read(request, ContinueBody)
        return self._reply(self.brain.resume())

    async def update_weight_version(self, request: HttpRequest) -> Response:
        body = await _read(request, VersionBody)
        reply = self.brain.update_weight_version(body.new_version, abort_all_requests=body.abort_all_requests)
        return self._reply(reply)

    async def flush_cache(self, _: HttpRequest) -> Response:
        return self._reply(self.brain.flush_cache())

    async def loads(self, request: HttpRequest) -> Response:
        asked = {part.strip() for part in request.query_params.get("include", "all").split(",")}
        unknown = asked - set(info.LOAD_SECTIONS)
        if unknown:
            # Meant as a 400, but seen as a 500 on 0.5.23.
            return Response("Internal Server Error", 500)
        return Json(info.loads(self.brain, self.pump.wall_clock(), asked))

    async def health(self, _: HttpRequest) -> Response:
        return Response(status_code=200)

    async def ready(self, _: HttpRequest) -> Response:
        return Response(status_code=200 if self.brain.pause_mode is None else 503)

    async def model_info(self, _: HttpRequest) -> Response:
        return Json(info.model_info(self.brain))

    async def server_info(self, request: HttpRequest) -> Response:
        host, port = request.scope["server"]
        return Json(info.server_info(self.brain, host=host, port=port or 0))

    async def models(self, _: HttpRequest) -> Response:
        settings = self.brain.settings
        card = {
            "id": settings.model_path,
            "object": "model",
            "created": 0,
            "owned_by": "sglang",
            "root": settings.model_path,
            "parent": None,
            "max_model_len": settings.context_length,
        }
        return Json({"object": "list", "data": [card]})

    async def tokenize(self, request: HttpRequest) -> Response:
        prompt = (await _read(request, TokenizeBody)).prompt
        tokens: Any = encode(prompt) if isinstance(prompt, str) else [encode(text) for text in prompt]
        count = len(tokens) if isinstance(prompt, str) else [len(ids) for ids in tokens]
        limit = self.brain.settings.context_length
        return Json({"tokens": tokens, "count": count, "max_model_len": limit})

    async def detokenize(self, request: HttpRequest) -> Response:
        tokens = (await _read(request, DetokenizeBody)).tokens
        lists = [ids if isinstance(ids, list) else [ids] for ids in tokens]
        if any(not 0 <= token < VOCAB_SIZE for ids in lists for token in ids):
            raise BadBody(f"tokens must lie between 0 and {VOCAB_SIZE - 1}")
        if tokens and isinstance(tokens[0], list):
            return Json({"text": [decode(ids) for ids in lists]})
        return Json({"text": decode(token for ids in lists for token in ids)})

    def routes(self) -> list[Route]:
        """Paths, methods and handlers, as SGLang 0.5.23 has them."""

        def route(path: str, handler: Callable[[HttpRequest], Awaitable[Response]], *methods: str) -> Route:
            return Route(path, handler, methods=methods)

        return [
            Route("/generate", GenerateEndpoint(self.pump), methods=["POST", "PUT"]),
            route("/abort_request", self.abort, "POST"),
            route("/pause_generation", self.pause, "POST"),
            route("/continue_generation", self.resume, "POST"),
            route("/update_weight_version", self.update_weight_version, "POST"),
            route("/flush_cache", self.flush_cache, "GET", "POST"),
            route("/v1/loads", self.loads, "GET"),
            route("/v1/models", self.models, "GET"),
            route("/health", self.health, "GET"),
            route("/health_generate", self.health, "GET"),
            route("/ping", self.health, "GET"),
            route("/ready", self.ready, "GET"),
            route("/model_info", self.model_info, "GET"),
            route("/get_model_info", self.model_info, "GET"),
            route("/server_info", self.server_info, "GET"),
            route("/get_server_info", self.server_info, "GET"),
            *(route(f"{prefix}/tokenize", self.tokenize, "POST") for prefix in ("", "/v1")),
            *(route(f"{prefix}/detokenize", self.detokenize, "POST") for prefix in ("", "/v1")),
        ]


def build_app(pump: Pump) -> ASGIApp:
    """The ASGI app of one simulated server; the pump's task must run in the same event loop."""
    app: ASGIApp = Starlette(
        routes=_Control(pump).routes(),
        exception_handlers={BadBody: _answer_bad_body, 404: _answer_not_found, 405: _answer_not_found},
    )
    key = pump.brain.settings.api_key
    return app if key is None else ApiKey(app, key)
