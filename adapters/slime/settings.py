"""What the hooks read from slime's `args`: its own flags, and `lifecycle_…` keys from `--custom-config-path`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from lifecycle.errors import ConfigurationError

PREFIX = "lifecycle_"
DEFAULT_IN_FLIGHT = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One engine per distinct value of this.

    `url` is the router of slime's servers and `max_in_flight` slime's concurrency times its engines. The rest are keys
    of the YAML file that slime's `--custom-config-path` names, each with `lifecycle_` in front:

    - `log`: path of the lifecycle log; `store`: path of an SQLite file for snapshots (None: memory only).
    - `abort_timeout`: seconds a server may take to confirm an abort; `unreachable_timeout`: seconds without any server
      after which a step fails.
    - `mask_off_policy`: zero the loss mask of tokens that are older than the newest of their own sample.
    - `max_attempts`, `max_carries`: see `lifecycle.Policy`; so is `max_staleness`, which needs our rollout function: that
      asks the servers for their label at every step.
    - `workers`: URLs of the servers behind the router, instead of asking it.
    - `api_key_env`: name of the environment variable that holds the servers' key.
    - `transport`: `auto`, `fast` or `httpx`.
    """

    url: str
    max_in_flight: int = DEFAULT_IN_FLIGHT
    log: str | None = None
    store: str | None = None
    abort_timeout: float = 10.0
    unreachable_timeout: float = 300.0
    mask_off_policy: bool = False
    max_staleness: int | None = None
    max_attempts: int = 4
    max_carries: int = 3
    workers: tuple[str, ...] | None = None
    api_key_env: str | None = None
    transport: str = "auto"

    @classmethod
    def from_args(cls, args: Any) -> Settings:
        """Read them. Raises ConfigurationError for a missing router, an unknown `lifecycle_` key or a wrong type."""
        given = {
            key.removeprefix(PREFIX): value for key, value in vars(args).items() if key.startswith(PREFIX)
        }
        _check_keys(given)
        for name in ("log", "store", "api_key_env", "transport"):
            _check(given, name, str | None, "text")
        for name in ("max_staleness", "max_attempts", "max_carries"):
            _check(given, name, int | None, "a whole number")
        for name in ("abort_timeout", "unreachable_timeout"):
            _check(given, name, int | float, "a number of seconds")
        _check(given, "mask_off_policy", bool, "true or false")
        if given.get("workers") is not None:
            _check(given, "workers", list | tuple, "a list of URLs")
            given["workers"] = tuple(map(str, given["workers"]))
        return cls(url=_router(args), max_in_flight=_in_flight(args), **given)


def _check_keys(given: Mapping[str, Any]) -> None:
    known = {field.name for field in fields(Settings)} - {"url", "max_in_flight"}
    for name in given:
        if name not in known:
            names = ", ".join(PREFIX + one for one in sorted(known))
            raise ConfigurationError(
                f"{PREFIX}{name} is not a setting of the slime adapter; known are: {names}"
            )


def _check(given: Mapping[str, Any], name: str, kind: Any, words: str) -> None:
    value = given.get(name)
    if name in given and (not isinstance(value, kind) or (kind is not bool and isinstance(value, bool))):
        raise ConfigurationError(f"{PREFIX}{name} must be {words}, not {value!r}")


def _router(args: Any) -> str:
    host, port = getattr(args, "sglang_router_ip", None), getattr(args, "sglang_router_port", None)
    if not host or not port:
        raise ConfigurationError(
            f"args.sglang_router_ip and args.sglang_router_port must name slime's router, not {host!r} and {port!r}"
        )
    bare = str(host)
    return f"http://[{bare}]:{port}" if ":" in bare and not bare.startswith("[") else f"http://{bare}:{port}"


def _in_flight(args: Any) -> int:
    """Slime's own bound: concurrency per engine times engines."""
    per_engine = int(getattr(args, "sglang_server_concurrency", None) or 0)
    engines = getattr(args, "rollout_num_engines", None)
    if engines is None:
        gpus = int(getattr(args, "rollout_num_gpus", None) or 0)
        engines = max(1, gpus // int(getattr(args, "rollout_num_gpus_per_engine", None) or 1))
    return per_engine * int(engines) or DEFAULT_IN_FLIGHT
