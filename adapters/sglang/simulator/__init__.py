"""A simulated SGLang server (0.5.23's wire format), for tests, demos and whoever has no GPU at hand.

Its model is a pure function of the seed and the whole prefix, so everything a client ends up with can be checked
token by token. Three ways to use it:

**Without sockets**, stepped by hand; deterministic, for property tests (``brain.py``)::

    brain = Brain(ServerSettings(mode="incremental", seed=7), [Fault(FaultKind.CUT, after=5, nth=1)])
    request = brain.submit({"input_ids": [1, 2], "stream": True, "return_logprob": True})
    brain.step()                              # one token for every running request
    brain.poll(request)                       # [b'data: {…} ' and a blank line], later also Mark.END or Mark.CUT
    brain.head(request)                       # Head(status=200, media_type="text/event-stream…"), None: not yet
    brain.abort("some-rid"); brain.pause("retract"); brain.update_weight_version("8"); brain.resume()
    brain.disconnect(request)                 # the client closed its connection
    brain.model.first_difference(prompt, tokens, logprobs=…)   # None: every token is the right one

**Over HTTP, in a thread**, for tests and programs (extra ``sim``; ``server.py``)::

    with SimulatedCluster(workers=2, mode="incremental", tokens_per_second=50) as cluster:
        cluster.urls                          # ["http://127.0.0.1:…", "http://127.0.0.1:…"]
        cluster[0].inject(Fault(FaultKind.REFUSE, status=429, times=2))
        cluster[0].call(lambda brain: brain.idle)
        cluster[1].kill(); cluster[1].restart()

**As a process**: ``lifecycle sim``, or from a program ``launch(["--workers", "2"])``, which ends with its parent.

Importing this package needs nothing but msgspec; starlette and uvicorn are imported by the server parts only.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from adapters.sglang.simulator.brain import Brain, Reply, ServerDead
    from adapters.sglang.simulator.child import SimulatorProcess, launch
    from adapters.sglang.simulator.faults import Fault, FaultKind, parse_fault
    from adapters.sglang.simulator.model import TokenModel
    from adapters.sglang.simulator.process import serve
    from adapters.sglang.simulator.request import Mark, Request
    from adapters.sglang.simulator.responses import Head
    from adapters.sglang.simulator.schema import BadBody
    from adapters.sglang.simulator.server import SimulatedCluster, SimulatedServer
    from adapters.sglang.simulator.settings import ServerSettings

_HOMES = {
    "BadBody": "schema",
    "Brain": "brain",
    "Fault": "faults",
    "FaultKind": "faults",
    "Head": "responses",
    "Mark": "request",
    "Reply": "brain",
    "Request": "request",
    "ServerDead": "brain",
    "ServerSettings": "settings",
    "SimulatedCluster": "server",
    "SimulatedServer": "server",
    "SimulatorProcess": "child",
    "TokenModel": "model",
    "launch": "child",
    "parse_fault": "faults",
    "serve": "process",
}

__all__ = [
    "BadBody",
    "Brain",
    "Fault",
    "FaultKind",
    "Head",
    "Mark",
    "Reply",
    "Request",
    "ServerDead",
    "ServerSettings",
    "SimulatedCluster",
    "SimulatedServer",
    "SimulatorProcess",
    "TokenModel",
    "launch",
    "parse_fault",
    "serve",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
