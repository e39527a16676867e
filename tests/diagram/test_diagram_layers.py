"""Layers over a chart: figures from logs, arcs covered by tests, and what changed between two tables."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lifecycle.diagram import (
    ArcFigures,
    Chart,
    LogFigures,
    chart_from,
    compare,
    coverage_layer,
    diff_dict,
    diff_layer,
    diff_markdown,
    live_charts,
    log_layer,
    log_markdown,
    log_rows,
    to_dot,
)
from lifecycle.diagram.chart import key_of, sort_arcs
from lifecycle.diagram.overlay import percent, seconds
from lifecycle.diagram.style import BAD, GOOD, HINTS
from lifecycle.errors import ConfigurationError
from lifecycle.machine import Arc, ArcKind

ROLLOUT = live_charts()["rollout"]
GATE = live_charts()["gate"]
DISPATCH = ("pending", "dispatch", "streaming")
CONFIRM = ("aborting", "confirm", "aborted")
FORBIDDEN = ("completed", "dispatch", "streaming")
FIGURES = LogFigures(
    title="a log",
    arcs={
        DISPATCH: ArcFigures(1000, 990, 0.0123, 1.5),
        CONFIRM: ArcFigures(10, 10, 0.2, 90.0),
        FORBIDDEN: ArcFigures(1, 1, 2.0, 2.0),
        ("limbo", "finish", "completed"): ArcFigures(1, 1, 2.0, 2.0),
    },
    rollouts=1000,
)


def edges(dot: str) -> dict[tuple[str, str, str], dict[str, str]]:
    """Attributes by (source, trigger, dest); the trigger is the label's first word."""
    found = {}
    for source, dest, attributes in re.findall(r"^    (\w+) -> (\w+) \[(.*)\];$", dot, re.MULTILINE):
        values = dict(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', attributes))
        if source != "__start":
            found[source, re.split(r"\\n| ", values["label"])[0], dest] = values
    return found


def without(chart: Chart, *keys: tuple[str, str, str]) -> Chart:
    """The chart as it was before these arcs came."""
    return replace(chart, hash="before", arcs=tuple(arc for arc in chart.arcs if key_of(arc) not in keys))


def test_an_arc_taken_often_is_thicker_and_says_count_share_and_times() -> None:
    """The label has the count, the share of rollouts and p50 / p95; the line's width grows with the count."""
    drawn = edges(to_dot(ROLLOUT, log_layer(ROLLOUT, FIGURES)))
    assert drawn[DISPATCH]["label"] == r"dispatch\n1,000 (99.0%)\n12.3 ms / 1.5 s"
    assert drawn[CONFIRM]["label"] == r"confirm\n10 (1.0%)\n200 ms / 1.5 min"
    assert float(drawn[DISPATCH]["penwidth"]) == 6.0 > float(drawn[CONFIRM]["penwidth"]) > 1.0
    assert drawn[DISPATCH]["style"] == "solid"


def test_an_arc_never_taken_is_dashed_and_one_that_is_not_logged_is_neither() -> None:
    """`observe` on more tokens is not logged, so its absence says nothing and it stays dotted."""
    drawn = edges(to_dot(ROLLOUT, log_layer(ROLLOUT, FIGURES)))
    assert drawn["aborting", "expire", "aborted"]["style"] == "dashed"
    assert drawn["aborting", "expire", "aborted"]["label"] == r"expire\nnever"
    assert drawn["partial", "observe", "partial"]["style"] == "dotted"
    assert drawn["partial", "observe", "partial"]["label"] == "observe not logged"


def test_what_the_table_does_not_allow_is_red_with_its_states() -> None:
    """An arc or a state that only the log knows is in the picture, in red."""
    layer = log_layer(ROLLOUT, FIGURES)
    dot = to_dot(ROLLOUT, layer)
    drawn = edges(dot)
    assert {key for key, values in drawn.items() if values["color"] == BAD} == {
        FORBIDDEN,
        ("limbo", "finish", "completed"),
    }
    assert re.search(rf'^    limbo \[.*color="{BAD}"', dot, re.MULTILINE)
    assert (BAD, "solid", "not allowed by the table") in layer.legend


def test_a_clean_log_has_nothing_red() -> None:
    """Red means a violation and nothing else."""
    clean = replace(FIGURES, arcs={DISPATCH: FIGURES.arcs[DISPATCH]})
    layer = log_layer(ROLLOUT, clean)
    assert BAD not in to_dot(ROLLOUT, layer)
    assert all(colour != BAD for colour, _, _ in layer.legend)


def test_the_gate_has_counts_and_no_shares() -> None:
    """There are no rollouts in the gate machine, so a share would be a lie."""
    figures = LogFigures("a log", {("open", "pause", "pausing"): ArcFigures(4, 0, 1.0, 2.0)})
    drawn = edges(to_dot(GATE, log_layer(GATE, figures)))
    assert drawn["open", "pause", "pausing"]["label"] == r"pause\n4\n1 s / 2 s"


def test_rows_and_markdown_of_a_log_hold_every_arc_of_the_table_and_the_strangers() -> None:
    """The text form says as much as the picture."""
    rows = list(log_rows(ROLLOUT, FIGURES))
    assert len(rows) == len(ROLLOUT.arcs) + 2
    assert [row["trigger"] for row in rows if not row["allowed"]] == ["dispatch", "finish"]
    text = log_markdown(ROLLOUT, FIGURES)
    assert "| `pending` | `dispatch` | `streaming` | 1,000 | 99.0% | 12.3 ms | 1.5 s |" in text
    assert "| `completed` | `dispatch` | `streaming` **not allowed** | 1 | 0.1% | 2 s | 2 s |" in text
    assert "| `aborting` | `expire` | `aborted` | never |" in text


@given(st.integers(1, 10**9), st.integers(1, 10**9))
def test_a_share_is_never_rounded_to_nothing_or_to_all(part: int, other: int) -> None:
    """`0.0%` and `100%` are said only of none and of all."""
    whole = part + other
    assert percent(part / whole) != "0.0%"
    if part / whole < 1:
        assert percent(part / whole) not in {"100%", "100.0%"}
    assert percent(0.0) == "0.0%"
    assert percent(1.0) == "100%"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0 s"), (2.5e-6, "2.5 µs"), (0.0123, "12.3 ms"), (59.94, "59.9 s"), (90, "1.5 min"), (7200, "2 h"), (172800, "2 d")],
)  # fmt: skip
def test_durations_are_said_in_the_unit_that_fits(value: float, text: str) -> None:
    """Three digits and a unit."""
    assert seconds(value) == text


def test_coverage_shows_what_was_exercised_and_what_never() -> None:
    """Green with the count, red and dashed for what no test took."""
    hits = {(arc.source, arc.trigger): 3 for arc in GATE.arcs}
    del hits["paused", "close"]
    layer = coverage_layer(GATE, hits)
    drawn = edges(to_dot(GATE, layer))
    assert {key for key, values in drawn.items() if values["color"] == BAD} == {("paused", "close", "closed")}
    assert drawn["open", "pause", "pausing"]["color"] == GOOD
    assert (
        layer.title
        == f"The gate machine: {len(GATE.arcs) - 1} of {len(GATE.arcs)} arcs exercised by the tests"
    )


def test_an_added_arc_is_green_and_in_the_list() -> None:
    """What the new table has and the old had not."""
    changes = compare(without(ROLLOUT, CONFIRM), ROLLOUT)
    assert [key_of(arc) for arc in changes.added] == [CONFIRM]
    drawn = edges(to_dot(ROLLOUT, diff_layer(changes)))
    assert {key for key, values in drawn.items() if values["color"] == GOOD} == {CONFIRM}
    assert "1 arc added, 0 arcs removed" in diff_markdown(changes)
    assert "- added `aborting --confirm--> aborted`: the server ended it after we asked\n" in diff_markdown(
        changes
    )


def test_a_removed_arc_and_state_are_red_dashed_and_in_the_list() -> None:
    """What the old table had is still drawn, or nobody would see that it went."""
    gone = Arc("partial", "finish", "limbo", ArcKind.MOVE, "")
    old = replace(
        ROLLOUT,
        states=(*ROLLOUT.states, "limbo"),
        arcs=sort_arcs((*ROLLOUT.arcs, gone), ROLLOUT.states, ROLLOUT.triggers),
    )
    changes = compare(old, ROLLOUT)
    dot = to_dot(ROLLOUT, diff_layer(changes))
    assert edges(dot)[key_of(gone)]["color"] == BAD
    assert edges(dot)[key_of(gone)]["style"] == "dashed"
    assert re.search(rf'^    limbo \[.*color="{BAD}"', dot, re.MULTILINE)
    assert "- removed state `limbo`\n- removed `partial --finish--> limbo`\n" in diff_markdown(changes)


def test_another_target_is_one_arc_removed_and_one_added() -> None:
    """A trigger that leads elsewhere is the change a reviewer must not overlook."""
    moved = tuple(
        arc._replace(dest="discarded") if key_of(arc) == ("pending", "abort", "aborted") else arc
        for arc in ROLLOUT.arcs
    )
    changes = compare(ROLLOUT, replace(ROLLOUT, arcs=moved))
    assert [key_of(arc) for arc in changes.added] == [("pending", "abort", "discarded")]
    assert [key_of(arc) for arc in changes.removed] == [("pending", "abort", "aborted")]


def test_changes_of_words_ends_and_start_are_listed() -> None:
    """No arc changed, and yet there is something to review."""
    arcs = tuple(arc._replace(when="soon") if key_of(arc) == DISPATCH else arc for arc in ROLLOUT.arcs)
    new = replace(
        ROLLOUT,
        arcs=arcs,
        initial="streaming",
        finals=ROLLOUT.finals - {"failed"} | {"aborted"},
        state_meanings={**ROLLOUT.state_meanings, "partial": "half done"},
    )
    text = diff_markdown(compare(ROLLOUT, new))
    assert "- the initial state was `pending` and is `streaming`" in text
    assert "- `aborted` has become final" in text
    assert "- `failed` is no longer final" in text
    assert "→ “soon (move)”" in text
    assert "- reworded `partial`: “in flight, and this attempt has added tokens” → “half done”" in text


def test_nothing_changed_says_so_and_plain_data_agrees() -> None:
    """An empty diff is a sentence, not an empty page."""
    changes = compare(ROLLOUT, ROLLOUT)
    assert changes.empty
    assert diff_markdown(changes).endswith("Nothing differs.\n")
    assert diff_dict(changes)["added"] == diff_dict(changes)["removed"] == []
    data = diff_dict(compare(without(ROLLOUT, CONFIRM), ROLLOUT))
    assert json.loads(json.dumps(data))["added"][0]["trigger"] == "confirm"


def test_two_machines_cannot_be_compared() -> None:
    """The gate is no older version of the rollout."""
    with pytest.raises(ConfigurationError, match=r"'gate'.*'rollout'"):
        compare(GATE, ROLLOUT)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"arcs": [{"source": "pending", "trigger": "x", "dest": "gone"}]}, r"names \['gone', 'x'\]"),
        ({"initial": "nowhere"}, r"initial or final state \['nowhere'\]"),
        ({"finals": ["nowhere"]}, r"initial or final state \['nowhere'\]"),
        ({"states": "pending"}, r"Expected `array`, got `str` - at `\$.states`"),
        ({"arcs": [{"source": 1}]}, r"Expected `str`, got `int` - at `\$.arcs\[0\].source`"),
        ({"arcs": [{"source": "pending", "trigger": "abort", "dest": "aborted", "kind": "leap"}]}, "leap"),
    ],
)
def test_an_old_table_that_cannot_be_read_is_refused_with_the_place(
    change: dict[str, object], problem: str
) -> None:
    """The file's name, the key, and what would be right."""
    with pytest.raises(ConfigurationError, match=r"old\.json") as caught:
        chart_from({**ROLLOUT.as_dict(), **change}, "old.json")
    assert re.search(problem, str(caught.value))


def test_a_table_as_logs_carry_it_reads_as_the_same_arcs() -> None:
    """`engine.started` has no meanings; its hash is that of its arcs."""
    from lifecycle.machine import ROLLOUT as TABLE

    chart = chart_from(TABLE.as_dict(), "a log")
    assert chart.hash == TABLE.hash
    assert chart.arcs == ROLLOUT.arcs


def test_layout_hints_name_only_what_the_tables_have() -> None:
    """A hint for an arc that went is dead text, and misleads."""
    for name, hints in HINTS.items():
        chart = live_charts()[name]
        assert set(hints.ports) <= {key_of(arc) for arc in chart.arcs}
        assert {*hints.main, *hints.order, *hints.loops} <= set(chart.states)
        steps = zip(hints.main, hints.main[1:], strict=False)
        assert set(steps) <= {(arc.source, arc.dest) for arc in chart.arcs}
