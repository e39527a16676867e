"""How the pictures look: one palette, and hints that keep the layout of the two machines calm.

Nothing here adds, hides or renames an arc. A hint for an arc that no longer exists is simply not used, and an arc
without a hint is drawn where the layout puts it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lifecycle.diagram.chart import ArcKey, Chart, Role

FONT = "Helvetica,Arial,sans-serif"

INK = "#24292f"
SOFT = "#57606a"
FAINT = "#8c959f"
PAPER = "#ffffff"

PROGRESS = "#0969da"
ASKED = "#8250df"
TOLD = "#424a53"

GOOD = "#1a7f37"
BAD = "#cf222e"

ROLE_FILL: Mapping[Role, str] = {
    Role.IDLE: "#f6f8fa",
    Role.FLIGHT: "#ddf4ff",
    Role.REST: "#fff8c5",
    Role.FINAL: "#eaeef2",
}

STATE_FILL: Mapping[str, str] = {
    "partial": "#b6e3ff",
    "aborting": "#ffe0c2",
    "completed": "#dafbe1",
    "failed": "#ffebe9",
    "open": "#dafbe1",
    "pausing": "#fff8c5",
    "paused": "#ffebe9",
}


def fill_of(chart: Chart, state: str) -> str:
    """The colour of a state's box: by name for the states we know, else by its role."""
    return STATE_FILL.get(state, ROLE_FILL[chart.role(state)])


TRIGGER_COLOUR: Mapping[str, str] = {
    **dict.fromkeys(("dispatch", "observe", "finish"), PROGRESS),
    **dict.fromkeys(("abort", "restore", "discard", "exhaust", "expire", "pause", "close"), ASKED),
    **dict.fromkeys(("settle", "resume"), PROGRESS),
}
"""Triggers that are in none of these are what a server said, and drawn in `TOLD`."""

COLOUR_MEANINGS: tuple[tuple[str, str], ...] = (
    (PROGRESS, "progress"),
    (ASKED, "the caller or the engine decides"),
    (TOLD, "the server or the wire decides"),
    (FAINT, "dotted: the state stays"),
)


@dataclass(frozen=True)
class Hints:
    """Layout wishes for one machine, all of them optional.

    `main` is the path drawn straight; `same_rank` are states put into one column; `order` is the order in which the
    states are declared to the layout, which breaks ties; `ports` are compass points (tail, head) of an arc, and
    `loops` the side on which a state's self-loops are drawn.
    """

    main: tuple[str, ...] = ()
    same_rank: tuple[tuple[str, ...], ...] = ()
    order: tuple[str, ...] = ()
    ports: Mapping[ArcKey, tuple[str, str]] = field(default_factory=dict)
    loops: Mapping[str, str] = field(default_factory=dict)
    ranksep: float = 0.6


HINTS: Mapping[str, Hints] = {
    "rollout": Hints(
        main=("pending", "streaming", "partial", "completed"),
        same_rank=(("completed", "failed", "discarded"),),
        order=("partial", "aborted", "aborting", "pending", "streaming", "completed", "failed", "discarded"),
        ports={
            ("partial", "abort", "aborting"): ("", "nw"),
            ("partial", "preempt", "aborted"): ("", "n"),
            ("partial", "reject", "failed"): ("", "nw"),
            ("aborted", "discard", "discarded"): ("s", ""),
            ("aborting", "expire", "aborted"): ("ne", ""),
            ("aborting", "lose", "aborted"): ("", "nw"),
        },
        loops={"aborted": "e"},
        ranksep=0.5,
    ),
    "gate": Hints(main=("open", "pausing", "paused")),
}
