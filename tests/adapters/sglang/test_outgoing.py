"""What is sent: URLs, headers, bodies, turns; and that a key is shown nowhere."""

from __future__ import annotations

import errno
import pickle
from array import array
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import msgspec
import pytest

import adapters.sglang
from adapters.sglang import SGLangBackend
from adapters.sglang.outgoing import (
    COOLDOWN_S,
    Secret,
    Targets,
    base_url,
    base_urls,
    read_secret,
    request_body,
    request_headers,
)
from adapters.sglang.settings import check_files
from adapters.sglang.transport import describe
from lifecycle.backend import Backend, Call
from lifecycle.errors import ConfigurationError

KEY = "sk-very-secret"


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("http://h:1", "http://h:1"),
        ("http://h:1/", "http://h:1"),
        ("http://h:1@0", "http://h:1"),
        ("http://h:1@12/", "http://h:1"),
        ("https://h/prefix/", "https://h/prefix"),
        (" http://[::1]:80 ", "http://[::1]:80"),
    ],
)
def test_base_url(url: str, base: str) -> None:
    """A URL loses its rank and its slash."""
    assert base_url(url) == base


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("h:1", "expected http://host:port"),
        ("", "expected http://host:port"),
        ("ftp://h", "expected http://host:port"),
        ("grpc://h:1", "expected http://host:port"),
        ("http://", "expected http://host:port"),
        ("http://h:99999", "expected http://host:port"),
        ("http://h:0", "expected http://host:port"),
        ("http://h:x", "expected http://host:port"),
        ("http://a b:1", "expected http://host:port"),
        ("http://h/a b", "expected http://host:port"),
        ("http://h/é", "expected http://host:port"),
        ("http://bücher:1", "expected http://host:port"),
        ("http://[::1", "expected http://host:port"),
        ("http://h:1?a=b", "must end before"),
        ("http://h:1#a", "must end before"),
        (3, "must be a string, not int"),
    ],
)
def test_bad_url(url: Any, words: str) -> None:
    """Anything else is refused, and the message says what would be right."""
    with pytest.raises(ConfigurationError, match=words):
        base_url(url)


def test_credentials_in_a_url_are_refused_unseen() -> None:
    """A password in a URL would show in every receipt: refused, and not repeated in the message."""
    with pytest.raises(ConfigurationError) as caught:
        base_url(f"http://user:{KEY}@h:1")
    assert KEY not in str(caught.value)
    assert "api_key" in str(caught.value)


def test_base_urls() -> None:
    """One URL or several, each once; none is refused."""
    assert base_urls("http://a") == ("http://a",)
    assert base_urls(["http://a@0", "http://a@1", "http://b"]) == ("http://a", "http://b")
    with pytest.raises(ConfigurationError, match="at least one"):
        base_urls([])


def test_secret_shows_nowhere() -> None:
    """A key is in the header and in nothing else."""
    secret = read_secret(KEY, None)
    assert secret.headers == {"authorization": f"Bearer {KEY}"}
    assert KEY not in repr(secret)
    assert KEY not in str(secret)
    assert secret.redact(f"bad key {KEY}!") == "bad key ***!"
    assert secret.redact_bytes(KEY.encode()) == b"***"
    with pytest.raises(TypeError, match="not pickled"):
        pickle.dumps(secret)
    backend = SGLangBackend("http://h:1", api_key=KEY)
    assert KEY not in repr(backend)


def test_no_secret() -> None:
    """Without a key there is no header and nothing to redact."""
    secret = read_secret(None, None)
    assert (secret.headers, repr(secret), secret.redact("x"), secret.redact_bytes(b"x")) == (
        {},
        "Secret(none)",
        "x",
        b"x",
    )


def test_key_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key may come from a variable; one that is not set is named, and giving both is refused."""
    monkeypatch.setenv("SOME_KEY", KEY)
    assert read_secret(None, "SOME_KEY").headers == {"authorization": f"Bearer {KEY}"}
    monkeypatch.delenv("SOME_KEY")
    with pytest.raises(ConfigurationError, match="'SOME_KEY' is not set"):
        read_secret(None, "SOME_KEY")
    with pytest.raises(ConfigurationError, match="not both"):
        read_secret(KEY, "SOME_KEY")


@pytest.mark.parametrize("key", ["", "a b", "a\nb", "é"])
def test_impossible_key(key: str) -> None:
    """A key that cannot be a header is refused, and not repeated."""
    with pytest.raises(ConfigurationError) as caught:
        Secret(key)
    assert not key or key not in str(caught.value)


def test_headers() -> None:
    """A routing key is sent as the router reads it, percent-encoded where a header cannot hold it."""
    assert request_headers(Secret(None), None) == {}
    assert request_headers(Secret(None), "group/7:a=b") == {"x-smg-routing-key": "group/7:a=b"}
    assert request_headers(Secret(None), "a b\né%") == {"x-smg-routing-key": "a%20b%0A%C3%A9%25"}


class Tensor:
    """Something like a tensor or an array."""

    def tolist(self) -> list[int]:
        """As plain numbers."""
        return [1, 2]


@pytest.mark.parametrize("ids", [[1, 2], (1, 2), array("i", [1, 2]), Tensor()])
def test_body(ids: Any) -> None:
    """The body has our rid, ids, parameters, extras; always streamed, always with logprobs."""
    call = Call("r1", "x", 0, ids, MappingProxyType({"temperature": 1.0}), {"priority": 3, "stream": False})
    assert msgspec.json.decode(request_body(call)) == {
        "rid": "r1",
        "input_ids": [1, 2],
        "sampling_params": {"temperature": 1.0},
        "stream": True,
        "return_logprob": True,
        "priority": 3,
    }


def test_body_that_is_no_json() -> None:
    """What JSON cannot hold is an error that names its type."""
    with pytest.raises(TypeError, match="object cannot be written"):
        request_body(Call("r1", "x", 0, [1], {}, {"custom": object()}))


class TestTargets:
    """Several URLs, in turn."""

    def test_round_robin(self) -> None:
        """Each call goes to the next."""
        targets = Targets(("a", "b", "c"))
        assert [targets.pick(0.0) for _ in range(4)] == ["a", "b", "c", "a"]

    def test_a_refusing_one_is_passed_over(self) -> None:
        """A URL that refused is skipped for a while."""
        targets = Targets(("a", "b"))
        targets.refused("a", 10.0)
        assert [targets.pick(10.0 + COOLDOWN_S / 2) for _ in range(3)] == ["b", "b", "b"]
        assert "a" in {targets.pick(10.0 + COOLDOWN_S) for _ in range(2)}

    def test_all_refused(self) -> None:
        """Where all refused, the one that did so longest ago is tried."""
        targets = Targets(("a", "b", "c"))
        for time, url in enumerate("cab"):
            targets.refused(url, time / 10)
        assert targets.pick(0.3) == "c"

    def test_answered(self) -> None:
        """A URL that answers is in turn again at once."""
        targets = Targets(("a", "b"))
        targets.refused("a", 0.0)
        targets.answered("a")
        assert targets.pick(0.0) == "a"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"transport": "curl"}, "transport must be one of auto, fast, httpx, not 'curl'"),
        ({"max_connections": 0}, "max_connections must be at least 1 or None, not 0"),
        ({"max_connections": 2.5}, "max_connections must be at least 1"),
        ({"connect_timeout": 0}, "connect_timeout must be a number above 0"),
        ({"control_timeout": True}, "control_timeout must be a number above 0"),
        ({"control_timeout": float("inf")}, "control_timeout must be a number above 0"),
        ({"event_limit": "1"}, "event_limit must be a number above 0"),
        ({"strategy": "abort_all"}, "strategy must be one of auto, fanout, close, not 'abort_all'"),
        ({"workers": []}, "at least one"),
        ({"workers": ["h"]}, "expected http://host:port"),
    ],
)
def test_bad_settings(settings: dict[str, Any], words: str) -> None:
    """A setting that cannot be used is refused, and the message says what would be right."""
    with pytest.raises(ConfigurationError, match=words):
        SGLangBackend("http://h:1", **settings)


def test_file_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """More streams than this process may open files: refused, with the command that helps."""
    monkeypatch.setattr("resource.getrlimit", lambda _: (1024, 4096))
    check_files(None)
    check_files(900)
    with pytest.raises(ConfigurationError, match=r"may open 1024: raise the limit \(ulimit -n 4160\)"):
        check_files(4096)
    monkeypatch.setattr("resource.getrlimit", lambda _: (-1, -1))
    check_files(1_000_000)


def test_open_file_limit_is_named() -> None:
    """A process out of file descriptors is told so, however deep the client buried it."""
    problem = RuntimeError("All connection attempts failed")
    problem.__cause__ = OSError(errno.EMFILE, "Too many open files")
    assert "ulimit -n" in describe(problem)
    assert describe(ValueError("x")) == "ValueError: x"
    assert describe(TimeoutError()) == "TimeoutError"


def test_only_what_is_offered() -> None:
    """The package offers its backend, and nothing that is not there."""
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        adapters.sglang.Nothing  # noqa: B018


def test_is_a_backend(backend_of: Callable[..., SGLangBackend]) -> None:
    """It has everything an engine asks of a backend."""
    assert isinstance(backend_of("http://h:1"), Backend)
