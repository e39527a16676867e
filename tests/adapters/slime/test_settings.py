from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

import adapters.slime
from adapters.slime import Settings, framework
from lifecycle.errors import ConfigurationError


def args(**changes: Any) -> SimpleNamespace:
    """The flags that matter here."""
    values = {"sglang_router_ip": "10.0.0.1", "sglang_router_port": 3000, **changes}
    return SimpleNamespace(**values)


def test_slimes_own_flags_say_where_and_how_many() -> None:
    """The router is the URL; concurrency per engine times engines is the bound."""
    settings = Settings.from_args(
        args(sglang_server_concurrency=8, rollout_num_gpus=16, rollout_num_gpus_per_engine=4)
    )
    assert (settings.url, settings.max_in_flight) == ("http://10.0.0.1:3000", 32)
    assert Settings.from_args(args(sglang_server_concurrency=8, rollout_num_engines=3)).max_in_flight == 24
    assert Settings.from_args(args()).max_in_flight == 512
    assert Settings.from_args(args(sglang_router_ip="fe80::1")).url == "http://[fe80::1]:3000"


def test_our_own_keys_are_read_with_their_prefix() -> None:
    """Everything that the YAML file may hold."""
    settings = Settings.from_args(
        args(
            lifecycle_log="run.jsonl",
            lifecycle_store=None,
            lifecycle_abort_timeout=3,
            lifecycle_mask_off_policy=True,
            lifecycle_max_staleness=2,
            lifecycle_workers=["http://a:1", "http://b:1"],
            lifecycle_transport="httpx",
        )
    )
    assert settings.log == "run.jsonl"
    assert settings.abort_timeout == 3
    assert settings.mask_off_policy
    assert settings.max_staleness == 2
    assert settings.workers == ("http://a:1", "http://b:1")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"lifecycle_lgo": "x"},
            "lifecycle_lgo is not a setting of the slime adapter; known are: .*lifecycle_log",
        ),
        ({"lifecycle_log": 3}, "lifecycle_log must be text, not 3"),
        ({"lifecycle_max_attempts": True}, "lifecycle_max_attempts must be a whole number, not True"),
        ({"lifecycle_mask_off_policy": "yes"}, "lifecycle_mask_off_policy must be true or false, not 'yes'"),
        ({"lifecycle_workers": "http://a"}, "lifecycle_workers must be a list of URLs"),
        ({"lifecycle_abort_timeout": "3"}, "lifecycle_abort_timeout must be a number of seconds"),
        ({"sglang_router_ip": None}, "must name slime's router, not None and 3000"),
    ],
)
def test_what_cannot_be_used_is_named(changes: dict[str, Any], words: str) -> None:
    """A wrong key or value says which, and what would be right."""
    with pytest.raises(ConfigurationError, match=words):
        Settings.from_args(args(**changes))


def test_nothing_of_slime_is_imported_with_the_adapter() -> None:
    """The module can be imported where there is no slime, and imports none where there is one."""
    program = (
        "import sys, adapters.slime; print([m for m in sys.modules if m.split('.')[0] in ('slime', 'torch')])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_without_slime_the_hooks_say_where_they_belong() -> None:
    """A sentence, not an ImportError."""
    with pytest.raises(ConfigurationError, match=r"slime\.no_such_part .* works inside slime's own process"):
        framework.module("no_such_part")


def test_unknown_names_are_no_attributes() -> None:
    """Lazy exports answer for their own names only."""
    with pytest.raises(AttributeError, match="no attribute 'Datasource'"):
        adapters.slime.Datasource  # noqa: B018


def test_a_coroutine_where_slime_wants_a_function_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The flag is named."""
    flags = SimpleNamespace(rollout_sample_filter_path="a.b")

    class Awaitable:
        def __await__(self) -> Any:
            return iter(())

    monkeypatch.setattr(framework, "load_function", lambda _: lambda *_: Awaitable())
    with pytest.raises(
        ConfigurationError, match=r"--rollout-sample-filter-path a\.b must be a plain function"
    ):
        framework.call_if_named(flags, "rollout_sample_filter_path", [])
