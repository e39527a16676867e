"""Which arcs of the machines a test run exercised: `pytest -p lifecycle.pytest_plugin --lifecycle-coverage`.

Loaded on demand and never by an entry point: an entry point would import the package before line coverage starts.
For the same reason the machine is imported when the session starts, not with this module.

Counting hangs on the trace seam of `lifecycle.machine`, so an arc counts however it was fired: by the engine, by an
adapter's test or by a bare cursor. Under pytest-xdist every worker sends its counts to the controller, which alone
reports. Arcs fired in subprocesses that tests start are not seen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from lifecycle.diagram.chart import Chart
    from lifecycle.machine import Arc

KEY = "lifecycle_arcs"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the options."""
    group = parser.getgroup("lifecycle", "arcs of the lifecycle machines exercised by the tests")
    group.addoption(
        "--lifecycle-coverage",
        action="store_true",
        help="Count the arcs that the tests exercise, and report them.",
    )
    group.addoption(
        "--lifecycle-coverage-fail-under",
        type=_percentage,
        metavar="PERCENT",
        default=None,
        help="Fail when fewer arcs of either machine were exercised.",
    )
    group.addoption(
        "--lifecycle-coverage-out",
        type=Path,
        metavar="DIR",
        default=None,
        help="Draw each machine with the counts into DIR (SVG; DOT where the analysis extra is not installed).",
    )


def _percentage(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 100:  # noqa: PLR2004  per cent
        raise ValueError(text)
    return value


def pytest_configure(config: pytest.Config) -> None:
    """Begin, if asked to."""
    if config.getoption("--lifecycle-coverage"):
        config.pluginmanager.register(ArcCounter(config), "lifecycle-coverage")


class ArcCounter:
    """Counts (machine, state, trigger) while the session runs; merges what xdist workers send; reports at the end."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.hits: Counter[tuple[str, str, str]] = Counter()
        self.silent_workers: list[str] = []
        self.problems: list[str] = []
        self._stop: Callable[[], None] | None = None

    def _trace(self, machine: str, state: str, trigger: str, target: str | None) -> None:
        if target is not None:
            self.hits[machine, state, trigger] += 1

    def pytest_sessionstart(self) -> None:
        """Put the trace into the machine. The controller of xdist runs no tests, and counts what workers send."""
        from lifecycle.machine import add_trace  # noqa: PLC0415  see the module's docstring

        self._stop = add_trace(self._trace)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take in the counts of an xdist worker that has ended; a crashed one has none."""
        sent = getattr(node, "workeroutput", {}).get(KEY)
        if sent is None:
            self.silent_workers.append(node.gateway.id)
        for machine, state, trigger, count in sent or ():
            self.hits[machine, state, trigger] += count

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Send the counts to the controller, or judge them."""
        if self._stop is not None:
            self._stop()
        output = getattr(self.config, "workeroutput", None)
        if output is not None:
            output[KEY] = [[*key, count] for key, count in self.hits.items()]
            return
        threshold = self.config.getoption("--lifecycle-coverage-fail-under")
        self.problems = list(self._shortfalls(threshold)) if threshold is not None else []
        if self.problems and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _hits(self, machine: str) -> dict[tuple[str, str], int]:
        return {(state, trigger): n for (name, state, trigger), n in self.hits.items() if name == machine}

    def _shortfalls(self, threshold: float) -> Iterator[str]:
        from lifecycle.diagram import live_charts  # noqa: PLC0415  see the module's docstring

        for name, chart in live_charts().items():
            covered = 100 * (len(chart.arcs) - len(missing(chart.arcs, self._hits(name)))) / len(chart.arcs)
            if covered < threshold:
                yield f"{name}: {covered:.1f}% of the arcs exercised, {threshold:g}% required"

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say what was exercised, and name every arc that was not."""
        from lifecycle.diagram import live_charts  # noqa: PLC0415  see the module's docstring

        out: Path | None = self.config.getoption("--lifecycle-coverage-out")
        write = terminalreporter.write_line
        terminalreporter.section("lifecycle coverage")
        for name, chart in live_charts().items():
            absent = missing(chart.arcs, self._hits(name))
            covered = len(chart.arcs) - len(absent)
            write(f"{name}: {covered} of {len(chart.arcs)} arcs ({100 * covered / len(chart.arcs):.1f}%)")
            for arc in absent:
                write(f"  never: {arc.source} --{arc.trigger}--> {arc.dest}", red=True)
            if out is not None:
                write(f"  drawn: {self._draw(chart, out)}")
        if self.silent_workers:
            write(f"workers that sent no counts: {', '.join(self.silent_workers)}", yellow=True)
        for problem in self.problems:
            write(f"FAIL {problem}", red=True)

    def _draw(self, chart: Chart, directory: Path) -> str:
        from lifecycle.diagram import coverage_layer, to_dot, to_svg  # noqa: PLC0415  see the module's docstring
        from lifecycle.diagram.files import save  # noqa: PLC0415
        from lifecycle.errors import ConfigurationError  # noqa: PLC0415

        layer = coverage_layer(chart, self._hits(chart.name))
        try:
            path, text = directory / f"{chart.name}.svg", to_svg(chart, layer)
        except ConfigurationError:
            path, text = directory / f"{chart.name}.dot", to_dot(chart, layer)
        try:
            save(path, text.encode())
        except ConfigurationError as error:
            return str(error)
        return str(path)


def missing(arcs: Sequence[Arc], hits: Mapping[tuple[str, str], int]) -> list[Arc]:
    """The arcs that were never taken, in the order of the table."""
    return [arc for arc in arcs if not hits.get((arc.source, arc.trigger))]
