"""One rollout on a time line."""

from __future__ import annotations

import itertools
import json
import random
import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from lifecycle.diagram import Step, live_charts, timeline_dict, timeline_markdown, timeline_svg
from lifecycle.diagram.style import BAD

CHART = live_charts()["rollout"]
SVG = "{http://www.w3.org/2000/svg}"
A, B = "http://10.0.0.1:30000", "http://10.0.0.2:30000"


def step(ts: float, trigger: str, source: str | None, dest: str, attempt: int = 1, **more: object) -> Step:
    """A step with little said."""
    values: dict[str, object] = {
        "tokens": 0,
        "dropped_tokens": 0,
        "dwell_s": 0.5,
        "process_id": "p",
        "worker": A,
    }
    return Step(ts, trigger, source, dest, attempt, **(values | more))  # type: ignore[arg-type]


LIFE = [
    step(100.5, "dispatch", "pending", "streaming"),
    step(101.0, "observe", "streaming", "partial", tokens=4),
    step(109.0, "abort", "partial", "aborting", tokens=300, reason="weight_update", dwell_s=8.0),
    step(109.5, "confirm", "aborting", "aborted", tokens=300, outcome="confirmed"),
    step(112.0, "restore", "aborted", "pending", tokens=290, dropped_tokens=10, dwell_s=2.5),
    step(112.5, "dispatch", "pending", "streaming", 2, tokens=290, worker=B),
    step(113.0, "observe", "streaming", "partial", 2, tokens=294, worker=B),
    step(120.0, "finish", "partial", "completed", 2, tokens=500, worker=B, dwell_s=7.0),
]


def texts(svg: str) -> list[str]:
    """Every text of the picture."""
    return ["".join(text.itertext()) for text in ET.fromstring(svg).iter(f"{SVG}text")]


def test_attempts_workers_states_and_steps_are_all_there() -> None:
    """A lane per attempt with its worker, a bar per state, a row per transition."""
    svg = timeline_svg("r-1", LIFE, CHART)
    words = texts(svg)
    assert {
        "Rollout r-1",
        "attempt 1",
        "attempt 2",
        A,
        B,
        "partial",
        "weight_update, " + A,
        "confirmed",
    } <= set(words)
    assert "290 (-10)" in words
    bars = [bar.findtext(f"{SVG}title") for bar in ET.fromstring(svg).iter(f"{SVG}rect") if len(bar)]
    assert bars[:4] == ["pending, 500 ms", "streaming, 500 ms", "partial, 8 s", "aborting, 500 ms"]
    assert [word for word in words if word == "→" or " → " in word][:2] == [
        "from → to",
        "pending → streaming",
    ]
    assert BAD not in svg


def test_time_runs_to_the_right_and_stays_on_the_canvas() -> None:
    """Bars of one attempt follow each other without a gap; nothing leaves the picture."""
    root = ET.fromstring(timeline_svg("r-1", LIFE, CHART))
    width, height = float(root.get("width", "0")), float(root.get("height", "0"))
    bars = [bar for bar in root.iter(f"{SVG}rect") if len(bar)]
    places = [(float(bar.get("x", "0")), float(bar.get("width", "0"))) for bar in bars]
    assert all(x + wide <= width for x, wide in places)
    for (x, wide), (after, _) in itertools.pairwise(places[:5]):
        assert x + wide == pytest.approx(after, abs=0.2)
    assert all(0 < float(text.get("y", "0")) < height for text in root.iter(f"{SVG}text"))


def test_an_arc_that_the_table_does_not_allow_is_red() -> None:
    """Red means the same here as in the overlay."""
    wrong = [*LIFE, step(121.0, "dispatch", "completed", "streaming", 2)]
    assert BAD in timeline_svg("r-1", wrong, CHART)


def test_a_restored_rollout_begins_without_a_source() -> None:
    """Another process brought it back: no arc, and nothing red."""
    life = [step(100.0, "restored", None, "aborted", dwell_s=0.0, reason="crash"), *LIFE[4:]]
    svg = timeline_svg("r-1", life, CHART)
    assert "… → aborted" in texts(svg)
    assert BAD not in svg
    assert "| 1 | 0.000 s | `restored` | … → aborted | 1 | 0 | 0 s |  | crash, " in timeline_markdown(
        "r-1", life
    )


def test_a_single_step_without_any_duration_can_be_drawn() -> None:
    """A span of zero seconds has no scale, and must not divide by it."""
    svg = timeline_svg("r-1", [step(5.0, "discard", "pending", "discarded", dwell_s=0.0, worker=None)], CHART)
    assert "worker not known" in texts(svg)[1]
    assert "nan" not in svg.lower()


@pytest.mark.parametrize(
    ("span", "last"), [(0.02, "ms"), (4.0, "ms"), (60.0, "s"), (290.0, "s"), (900.0, "min"), (86400.0, "h")]
)
def test_the_axis_has_few_ticks_in_one_unit(span: float, last: str) -> None:
    """Milliseconds to hours, two to nine ticks, all different."""
    life = [
        step(0.0, "dispatch", "pending", "streaming", dwell_s=0.0),
        step(span, "abort", "streaming", "aborting"),
    ]
    root = ET.fromstring(timeline_svg("r", life, CHART))
    ticks = [
        t.text
        for t in root.iter(f"{SVG}text")
        if t.get("text-anchor") == "middle" and t.get("font-size") == "9"
    ]
    ticks = [tick for tick in ticks if tick == "0" or re.fullmatch(rf"[\d.]+ {last}", tick or "")]
    assert 2 <= len(ticks) <= 10
    assert len(set(ticks)) == len(ticks)


def test_a_very_long_life_is_cut_in_the_picture_and_whole_in_the_table() -> None:
    """The picture says how many more there are and where they can be read."""
    rng = random.Random(3)
    life = [step(float(n), "observe", "partial", "partial", tokens=rng.randint(1, 9)) for n in range(100)]
    assert "… and 40 more: `--format markdown` shows all" in texts(timeline_svg("r", life, CHART))
    assert timeline_markdown("r", life).count("| `observe` |") == 100


def test_names_are_text_whatever_they_hold() -> None:
    """Ids are the user's."""
    life = [replace(entry, worker="<&>", reason="a | b") for entry in LIFE]
    svg = timeline_svg('<svg onload="x">&' + "x" * 200, life, CHART)
    assert texts(svg)[0].startswith('Rollout <svg onload="x">&xxx')
    assert texts(svg)[0].endswith("…")
    assert "a \\| b, <&>" in timeline_markdown("r", life)


def test_plain_data_is_json() -> None:
    """For a script."""
    data = json.loads(json.dumps(timeline_dict("r-1", LIFE)))
    assert data["rollout_id"] == "r-1"
    assert data["steps"][2]["reason"] == "weight_update"
