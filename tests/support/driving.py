"""What the engine tests share: short ways to write requests, scripts and what a log says."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import Any

import anyio

from lifecycle.backend import Call
from lifecycle.engine import LifecycleEngine
from lifecycle.log.records import Record, RolloutTransition, event_name
from lifecycle.machine import ROLLOUT
from lifecycle.policy import Policy
from lifecycle.request import RolloutRequest
from lifecycle.states import RolloutState
from lifecycle.testing.backend import ScriptedBackend, Step, finish, tokens

QUICK = Policy(backoff_initial=0.1, backoff_max=1.0)


class Lines:
    """A structlog-like logger that keeps what it is given."""

    def __init__(self) -> None:
        self.all: list[tuple[str, dict[str, Any]]] = []

    def info(self, event: str, **fields: Any) -> None:
        """Keep one event."""
        self.all.append((event, fields))

    def of(self, record: type[Record], **wanted: Any) -> list[dict[str, Any]]:
        """The lines of one event, those only whose fields are as wanted."""
        name = event_name(record)
        found = [fields for event, fields in self.all if event == name]
        return [fields for fields in found if all(fields[key] == value for key, value in wanted.items())]

    def walk(self, rollout_id: str) -> list[str]:
        """`trigger dest` of every transition of one rollout; the chain is checked on the way."""
        lines = self.of(RolloutTransition, rollout_id=rollout_id)
        state = None
        for line in lines:
            assert state in (None, line["source"])
            assert ROLLOUT.target(RolloutState(line["source"]), line["trigger"]) == line["dest"]
            state = line["dest"]
        return [f"{line['trigger']} {line['dest']}" for line in lines]


def request(name: str = "a", **fields: Any) -> RolloutRequest:
    """A request with a short prompt and a budget of 100."""
    if "text" not in fields:
        fields.setdefault("prompt_ids", (1, 2, 3))
    return RolloutRequest(id=name, **{"max_new_tokens": 100, **fields})


def group(name: str, size: int = 2, **fields: Any) -> list[RolloutRequest]:
    """The members of a group: `g/0`, `g/1` and so on."""
    return [
        request(f"{name}/{index}", group_id=name, group_size=size, index=index, **fields)
        for index in range(size)
    ]


def simple(*ids: int) -> Callable[[Call], Sequence[Step]]:
    """Every attempt shows these tokens and finishes."""
    return lambda _: [tokens(*ids), finish()]


def scripts(**by_id: Iterable[Sequence[Step]]) -> Callable[[Call], Sequence[Step]]:
    """For each rollout id a list of scripts, one per attempt; the last one is played again and again."""
    kept = {name: list(plays) for name, plays in by_id.items()}

    def play(call: Call) -> Sequence[Step]:
        plays = kept[call.rollout_id]
        return plays.pop(0) if len(plays) > 1 else plays[0]

    return play


def engine_on(backend: ScriptedBackend, lines: Lines | None = None, **settings: Any) -> LifecycleEngine:
    """An engine with a seeded random and quick retries."""
    settings.setdefault("policy", QUICK)
    return LifecycleEngine(backend, log=lines, random=Random(7), **settings)  # type: ignore[arg-type]


async def until(condition: Callable[[], object], within: float = 100.0) -> None:
    """Wait, in small steps of (virtual) time, until something is so."""
    with anyio.fail_after(within):
        while not condition():  # noqa: ASYNC110  any condition, in virtual time
            await anyio.sleep(0.01)
