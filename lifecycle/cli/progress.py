"""Progress of a run: a live bar on a terminal, a plain line every few seconds elsewhere."""

from __future__ import annotations

import sys

import anyio
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.text import Text

from lifecycle.engine import LifecycleEngine

BAR_SECONDS = 0.2
LINE_SECONDS = 2.0
STATES = ("pending", "streaming", "partial", "aborting", "aborted", "completed", "failed")


class Progress:
    """Shows states, tokens per second and aborts until it is cancelled. `delivered` counts groups."""

    def __init__(self, engine: LifecycleEngine, target: int | None, *, show: bool | None) -> None:
        self.delivered = 0
        self._engine = engine
        self._target = target
        self._console = Console(file=sys.stderr)
        self._bar = self._console.is_terminal if show is None else show and self._console.is_terminal
        self._lines = show is not False
        self._last = (anyio.current_time(), 0)
        self._rate = 0.0

    async def run(self) -> None:
        """Show until cancelled; the last state stays on the screen."""
        if self._bar:
            await self._run_bar()
        elif self._lines:
            while True:
                await anyio.sleep(LINE_SECONDS)
                self._console.print(self._line(), highlight=False, soft_wrap=True)

    async def _run_bar(self) -> None:
        columns = (TextColumn("groups"), BarColumn(bar_width=None), MofNCompleteColumn(), TimeElapsedColumn())
        bar = Bar(*columns, console=self._console)
        task = bar.add_task("groups", total=self._target)
        with Live(console=self._console, refresh_per_second=1 / BAR_SECONDS, transient=False) as live:
            try:
                while True:
                    bar.update(task, completed=self.delivered)
                    live.update(Group(bar, Text(self._line())))
                    await anyio.sleep(BAR_SECONDS)
            finally:
                bar.update(task, completed=self.delivered)
                live.update(Group(bar, Text(self._line())))

    def _line(self) -> str:
        stats = self._engine.stats()
        now, (then, before) = anyio.current_time(), self._last
        if now - then >= 0.5:  # noqa: PLR2004  seconds: shorter spans make the rate jump
            self._rate = (stats.observed_tokens - before) / (now - then)
            self._last = (now, stats.observed_tokens)
        states = " ".join(f"{name} {stats.states[name]}" for name in STATES if stats.states.get(name))
        aborts = " ".join(f"{name} {count}" for name, count in sorted(stats.aborts.items()))
        wanted = "" if self._target is None else f"/{self._target}"
        parts = [f"groups {self.delivered}{wanted}", states or "idle", f"{self._rate:,.0f} tokens/s"]
        if aborts:
            parts.append(f"aborts: {aborts}")
        if stats.outage_s:
            parts.append(f"servers unreachable for {stats.outage_s:.0f} s")
        if stats.store.get("failing_tries"):
            parts.append(f"store failing: {stats.store['last_error']}")
        return " | ".join(parts)
