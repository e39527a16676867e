"""A running engine in numbers: plain dicts for experiment trackers, and metrics for Prometheus.

`engine.metrics()`, or `StepMetrics(engine).take()` for a second reader, gives what happened since the last call, once per training step. `export(engine)` hands an
engine to prometheus-client (extra `metrics`), which asks it at every scrape. Neither names single rollouts: what needs
an id is in the log, and `lifecycle report` answers from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from lifecycle.engine.metrics import ENDED, Measured, StepMetrics
from lifecycle.engine.reports import EngineStats
from lifecycle.errors import ConfigurationError
from lifecycle.ledger import LedgerView
from lifecycle.states import GateState

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric

__all__ = ["StepMetrics", "export"]

PREFIX: Final = "rollout_lifecycle"
TRIES: Final = 5


def export(
    engine: Measured, *, registry: CollectorRegistry | None = None, labels: Mapping[str, str] | None = None
) -> Callable[[], None]:
    """Let Prometheus scrape an engine; returns the function that takes it away again.

    `labels` are added to every series, for processes with several engines. Raises ConfigurationError when
    prometheus-client is not installed.
    """
    try:
        from prometheus_client import REGISTRY  # noqa: PLC0415  an extra
        from prometheus_client import registry as registries  # noqa: PLC0415
    except ImportError as error:
        raise ConfigurationError(
            "Prometheus metrics need: pip install 'rollout-lifecycle[metrics]'"
        ) from error
    target = registry or REGISTRY

    class EngineCollector(registries.Collector):
        """Asks the engine at every scrape."""

        def collect(self) -> Iterator[Metric]:
            yield from _families(*_look(engine), labels or {})

        def describe(self) -> Iterator[Metric]:
            return iter(())

    collector = EngineCollector()
    target.register(collector)
    return lambda: target.unregister(collector)


def _look(engine: Measured) -> tuple[EngineStats, LedgerView]:
    """Both views; a scrape comes from another thread, and may meet the engine in the middle of a change."""
    for _ in range(TRIES - 1):
        try:
            return engine.stats(), engine.ledger()
        except RuntimeError as error:
            if "during iteration" not in str(error):
                raise
    return engine.stats(), engine.ledger()


def _families(stats: EngineStats, ledger: LedgerView, labels: Mapping[str, str]) -> Iterator[Metric]:
    held = {place: n for place, n in ledger.rollouts.items() if place not in ENDED}
    ended = {place: ledger.rollouts[place] for place in ENDED}
    gate = {str(state): float(stats.gate == state) for state in GateState}
    yield _family("gauge", "rollouts", "Rollouts held, by place.", "place", held, labels)
    yield _family("gauge", "gate", "1 for the state in which the gate is.", "state", gate, labels)
    yield _family("counter", "rollouts_ended", "Rollouts that ended, by place.", "place", ended, labels)
    yield _family("counter", "aborts", "Aborts that ended, by outcome.", "outcome", stats.aborts, labels)
    yield _family("counter", "wasted_tokens", "Tokens of rollouts given up.", "reason", ledger.wasted, labels)
    yield _family(
        "counter", "dropped_tokens", "Tokens dropped at a restore.", "reason", ledger.dropped, labels
    )
    for kind, name, text, value in (
        ("gauge", "requests_in_flight", "Requests that a server may hold.", stats.in_flight),
        ("gauge", "requests_in_flight_limit", "The most that may be in flight.", stats.max_in_flight),
        ("gauge", "aborts_unresolved", "Aborts that have no outcome yet.", stats.aborts_unresolved),
        (
            "gauge",
            "outage_seconds",
            "Since when no server could be reached; 0 when they can.",
            stats.outage_s,
        ),
        (
            "gauge",
            "store_backlog",
            "Writes that wait for the store.",
            stats.store.get("backlog_operations", 0),
        ),
        ("counter", "submitted", "Rollouts submitted.", ledger.submitted),
        ("counter", "attempts", "Requests sent.", stats.attempts),
        ("counter", "observed_tokens", "Tokens received from servers.", ledger.observed),
        ("counter", "delivered_tokens", "Tokens handed to the caller.", ledger.tokens["delivered"]),
        ("counter", "kept_tokens", "Tokens that a resume kept.", ledger.saved_tokens),
    ):
        yield _family(kind, name, text, None, {"": value}, labels)


def _family(
    kind: str, name: str, text: str, by: str | None, values: Mapping[str, Any], labels: Mapping[str, str]
) -> Metric:
    from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily  # noqa: PLC0415  an extra

    make = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
    family = make(f"{PREFIX}_{name}", text, labels=[*labels, *([by] if by else [])])
    for value, number in values.items():
        family.add_metric([*labels.values(), *([value] if by else [])], float(number))
    return family
