from __future__ import annotations

import sys
import threading
import urllib.request
from collections.abc import Awaitable, Callable

import anyio
import pytest
from prometheus_client import CollectorRegistry, generate_latest, start_http_server
from prometheus_client.parser import text_string_to_metric_families

from lifecycle.engine import LifecycleEngine
from lifecycle.engine.reports import EngineStats
from lifecycle.errors import ConfigurationError
from lifecycle.ledger import LedgerView
from lifecycle.metrics import StepMetrics, export
from lifecycle.testing.backend import Hang, ScriptedBackend, finish, lost, tokens
from lifecycle.testing.clock import run_virtual
from tests.support.driving import engine_on, request, scripts


def in_engine(visit: Callable[[LifecycleEngine], Awaitable[None]]) -> None:
    """Run `visit` with an engine: `a` finishes, `b` is lost once and resumed, `c` hangs until it is aborted."""

    async def session() -> None:
        backend = ScriptedBackend(
            scripts(
                a=[[tokens(1, 2), finish()]],
                b=[[tokens(1, 2, 3), lost()], [tokens(4), finish()]],
                c=[[tokens(1), Hang()]],
            )
        )
        async with engine_on(backend) as engine:
            await visit(engine)

    run_virtual(session)


def test_a_step_is_what_happened_since_the_last_one() -> None:
    """Counters are growth per step, gauges are the moment, and both are plain numbers."""

    async def visit(engine: LifecycleEngine) -> None:
        metrics = StepMetrics(engine, clock=anyio.current_time)
        await engine.generate(request("a"))
        await anyio.sleep(1)
        first = metrics.take()
        assert all(type(value) in {int, float} for value in first.values())
        assert all(name.startswith("rollout/") for name in first)
        assert (first["rollout/submitted"], first["rollout/attempts"], first["rollout/tokens/observed"]) == (
            1,
            1,
            2,
        )
        assert first["rollout/rollouts/delivered"] == 1
        assert first["rollout/gate_open"] == 1
        assert first["rollout/tokens_per_s"] == pytest.approx(2 / first["rollout/step_s"])
        await engine.generate(request("b"))
        handle = engine.submit(request("c"))
        await anyio.sleep(1)
        second = metrics.take()
        assert (
            second["rollout/submitted"],
            second["rollout/attempts"],
            second["rollout/tokens/observed"],
        ) == (2, 3, 5)
        assert second["rollout/tokens/kept_by_resuming"] == 3
        assert second["rollout/requests_in_flight"] == 1
        await engine.abort([handle])
        third = metrics.take()
        assert third["rollout/aborts/confirmed"] == 1
        assert third["rollout/submitted"] == third["rollout/tokens/observed"] == 0
        assert third["rollout/rollouts/resumable"] == 1

    in_engine(visit)


def scraped(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample of a scrape."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_prometheus_sees_the_engine_and_no_single_rollouts() -> None:
    """A scrape in the exposition format parses, has the engine's numbers, and no label names a rollout."""

    async def visit(engine: LifecycleEngine) -> None:
        registry = CollectorRegistry()
        remove = export(engine, registry=registry, labels={"engine": "one"})
        await engine.generate(request("a"))
        await engine.generate(request("b"))
        handle = engine.submit(request("c"))
        await anyio.sleep(1)
        await engine.abort([handle])
        samples = scraped(generate_latest(registry).decode())
        one = ("engine", "one")
        assert samples["rollout_lifecycle_observed_tokens_total", (one,)] == engine.ledger().observed
        assert samples["rollout_lifecycle_attempts_total", (one,)] == engine.stats().attempts
        assert samples["rollout_lifecycle_gate", (one, ("state", "open"))] == 1
        assert samples["rollout_lifecycle_gate", (one, ("state", "paused"))] == 0
        assert samples["rollout_lifecycle_rollouts_ended_total", (one, ("place", "delivered"))] == 2
        assert sum(v for (name, _), v in samples.items() if name == "rollout_lifecycle_aborts_total") == 1
        labels = {key for _, pairs in samples for key, _ in pairs}
        assert labels <= {"engine", "place", "state", "outcome", "reason"}
        remove()
        assert generate_latest(registry) == b""

    in_engine(visit)


def test_two_engines_share_a_registry_under_different_labels() -> None:
    """The same names with other labels do not collide."""

    async def visit(engine: LifecycleEngine) -> None:
        registry = CollectorRegistry()
        for name in ("one", "two"):
            export(engine, registry=registry, labels={"engine": name})
        samples = scraped(generate_latest(registry).decode())
        assert {pairs for name, pairs in samples if name == "rollout_lifecycle_attempts_total"} == {
            (("engine", "one"),),
            (("engine", "two"),),
        }

    in_engine(visit)


class Busy:
    """An engine that is always in the middle of a change, but for every third look."""

    def __init__(self, engine: LifecycleEngine) -> None:
        self.engine = engine
        self.looks = 0

    def stats(self) -> EngineStats:
        """Fail twice, then look."""
        self.looks += 1
        if self.looks % 3:
            raise RuntimeError("dictionary changed size during iteration")
        return self.engine.stats()

    def ledger(self) -> LedgerView:
        """The engine's."""
        return self.engine.ledger()


def test_a_scrape_over_http_looks_again_when_it_meets_a_change() -> None:
    """A scrape comes from another thread; it asks again where it met the engine in the middle of a change."""

    async def visit(engine: LifecycleEngine) -> None:
        registry = CollectorRegistry()
        export(Busy(engine), registry=registry)
        server, thread = start_http_server(0, addr="127.0.0.1", registry=registry)
        try:
            assert isinstance(thread, threading.Thread)
            with urllib.request.urlopen(  # noqa: ASYNC210  no other task waits
                f"http://127.0.0.1:{server.server_port}/metrics"
            ) as answer:
                text = answer.read().decode()
        finally:
            server.shutdown()
            server.server_close()
            thread.join()
        assert scraped(text)["rollout_lifecycle_submitted_total", ()] == 0

    in_engine(visit)


def test_without_the_extra_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing prometheus-client is an install command."""

    async def visit(engine: LifecycleEngine) -> None:
        monkeypatch.setitem(sys.modules, "prometheus_client", None)
        with pytest.raises(ConfigurationError, match=r"pip install 'rollout-lifecycle\[metrics\]'"):
            export(engine)

    in_engine(visit)


def test_the_engine_has_a_reader_of_its_own() -> None:
    """`engine.metrics()` gives what happened since it was last called, whoever else reads."""

    async def visit(engine: LifecycleEngine) -> None:
        await engine.generate(request("a"))
        StepMetrics(engine).take()
        assert engine.metrics()["rollout/tokens/observed"] == 2
        assert engine.metrics()["rollout/tokens/observed"] == 0

    in_engine(visit)
