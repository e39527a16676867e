"""What is sent: where to, with which headers and body."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote, urlsplit

import msgspec

from lifecycle.backend import Call
from lifecycle.errors import ConfigurationError

RANK = re.compile(r"@\d+/?$")
ROUTING_HEADER = "x-smg-routing-key"
HOST = re.compile(r"[A-Za-z0-9._-]+|[0-9A-Fa-f:.]+")
HEADER_SAFE = "".join(map(chr, range(0x21, 0x7F))).replace("%", "")
COOLDOWN_S = 2.0
"""How long a URL that refused a connection is passed over while another one is left."""


class Secret:
    """An API key that shows itself to nobody but the header it is made for."""

    __slots__ = ("_value",)

    def __init__(self, value: str | None) -> None:
        if value is not None and not (value and value.isascii() and value.isprintable() and " " not in value):
            raise ConfigurationError("the API key must be printable ASCII without spaces, and not empty")
        self._value = value

    def __repr__(self) -> str:
        return "Secret(***)" if self._value else "Secret(none)"

    def __reduce__(self) -> Any:
        raise TypeError("an API key is not pickled: pass api_key_env= and let each process read it")

    @property
    def headers(self) -> dict[str, str]:
        """The Authorization header, empty without a key."""
        return {"authorization": f"Bearer {self._value}"} if self._value else {}

    def redact(self, text: str) -> str:
        """`text` without the key, for words that come back from a server."""
        return text.replace(self._value, "***") if self._value else text

    def redact_bytes(self, body: bytes) -> bytes:
        """The same for bytes."""
        return body.replace(self._value.encode(), b"***") if self._value else body


def read_secret(api_key: str | None, api_key_env: str | None) -> Secret:
    """The key, given or from the environment. Raises ConfigurationError when the variable is not set."""
    if api_key is not None and api_key_env is not None:
        raise ConfigurationError("give api_key or api_key_env, not both")
    if api_key_env is None:
        return Secret(api_key)
    value = os.environ.get(api_key_env)
    if not value:
        raise ConfigurationError(f"api_key_env: the environment variable {api_key_env!r} is not set or empty")
    return Secret(value)


def base_url(url: str) -> str:
    """`url` as requests need it: no `@rank` of a data-parallel worker, no slash at the end.

    A data-parallel worker is listed as `http://host:port@rank` (sglang-router 0.3.2); used as it is, the rank would
    be taken for the host. Raises ConfigurationError for what is no plain http(s) URL.
    """
    if not isinstance(url, str):
        raise ConfigurationError(f"a server URL must be a string, not {type(url).__name__}")
    stripped = RANK.sub("", url.strip()).rstrip("/")
    try:
        parts = urlsplit(stripped)
        port = parts.port
    except ValueError as problem:
        raise ConfigurationError(f"server URL {url!r}: {problem}; expected http://host:port") from None
    if parts.username is not None or parts.password is not None:
        raise ConfigurationError("a server URL must not carry a user name or password: give api_key= instead")
    host = parts.hostname or ""
    plain = parts.path.isascii() and parts.path.isprintable() and " " not in parts.path
    if parts.scheme not in {"http", "https"} or not HOST.fullmatch(host) or port == 0 or not plain:
        raise ConfigurationError(f"server URL {url!r} cannot be used; expected http://host:port")
    if parts.query or parts.fragment:
        raise ConfigurationError(f"server URL {url!r} must end before any ? or #")
    return stripped


def base_urls(urls: str | Iterable[str]) -> tuple[str, ...]:
    """One URL or several, normalised, each once. Raises ConfigurationError for none at all."""
    found = dict.fromkeys(base_url(url) for url in ([urls] if isinstance(urls, str) else urls))
    if not found:
        raise ConfigurationError("give at least one server URL")
    return tuple(found)


def request_headers(secret: Secret, routing_key: str | None) -> dict[str, str]:
    """Headers of a `/generate` request: the key, and the router's affinity key (percent-encoded where needed)."""
    headers = secret.headers
    if routing_key is not None:
        headers[ROUTING_HEADER] = quote(routing_key, safe=HEADER_SAFE)
    return headers


def request_body(call: Call) -> bytes:
    """The body of a `/generate` request. Raises TypeError or ValueError for what JSON cannot hold."""
    body = dict(call.extra)
    body["rid"] = call.rid
    body["input_ids"] = call.input_ids
    body["sampling_params"] = call.sampling_params
    body["stream"] = True
    body["return_logprob"] = True
    return _ENCODER.encode(body)


def _plain(value: Any) -> Any:
    """Mappings, arrays and tensors as what JSON knows."""
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")


_ENCODER = msgspec.json.Encoder(enc_hook=_plain)


class Targets:
    """Several servers without a router: each call goes to the next one that did not just refuse."""

    def __init__(self, urls: tuple[str, ...]) -> None:
        self.urls = urls
        self._next = 0
        self._refused: dict[str, float] = {}

    def pick(self, now: float) -> str:
        """The URL for a call made at `now`; where all refused, the one that refused longest ago."""
        order = self.urls[self._next :] + self.urls[: self._next]
        for url in order:
            if now - self._refused.get(url, -COOLDOWN_S) >= COOLDOWN_S:
                break
        else:
            url = min(order, key=lambda each: self._refused[each])
        self._next = (self.urls.index(url) + 1) % len(self.urls)
        return url

    def refused(self, url: str, now: float) -> None:
        """`url` took no connection at `now`."""
        self._refused[url] = now

    def answered(self, url: str) -> None:
        """`url` answered."""
        self._refused.pop(url, None)
