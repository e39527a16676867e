"""The two machines against an independent statement of their tables, and against `transitions` run for real."""

from __future__ import annotations

import itertools
from enum import StrEnum
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transitions import Machine, MachineError

from lifecycle.errors import ConfigurationError, IllegalTransition
from lifecycle.events import END_TRIGGERS, EndKind
from lifecycle.machine import (
    GATE,
    GATE_ROWS,
    ROLLOUT,
    ROLLOUT_ROWS,
    TABLES,
    Arc,
    ArcKind,
    Cursor,
    GateCursor,
    RolloutCursor,
    Row,
    Table,
    add_trace,
    arcs_hash,
    arcs_of,
    build,
    check_arcs,
)
from lifecycle.states import (
    FINAL_STATES,
    GATE_STATE_MEANINGS,
    GATE_TRIGGER_MEANINGS,
    IN_FLIGHT_STATES,
    REST_STATES,
    STATE_MEANINGS,
    TRIGGER_MEANINGS,
    GateState,
    GateTrigger,
    RolloutState,
    Trigger,
)

# Written down a second time, state by state, in words of their own: (state) → {trigger: target}.
ROLLOUT_SAYS = {
    "pending": {
        "dispatch": "streaming",
        "finish": "completed",
        "abort": "aborted",
        "reject": "failed",
        "discard": "discarded",
    },
    "streaming": {
        "observe": "partial",
        "finish": "completed",
        "abort": "aborting",
        "preempt": "aborted",
        "lose": "aborted",
        "reject": "failed",
    },
    "partial": {
        "observe": "partial",
        "finish": "completed",
        "abort": "aborting",
        "preempt": "aborted",
        "lose": "aborted",
        "reject": "failed",
    },
    "aborting": {
        "observe": "aborting",
        "finish": "completed",
        "abort": "aborting",
        "confirm": "aborted",
        "lose": "aborted",
        "expire": "aborted",
        "reject": "failed",
    },
    "aborted": {"abort": "aborted", "exhaust": "failed", "restore": "pending", "discard": "discarded"},
    "completed": {"abort": "completed", "discard": "completed"},
    "failed": {"abort": "failed", "discard": "failed"},
    "discarded": {"abort": "discarded", "discard": "discarded"},
}
GATE_SAYS = {
    "open": {"pause": "pausing", "settle": "open", "resume": "open", "close": "closed"},
    "pausing": {"pause": "pausing", "settle": "paused", "resume": "open", "close": "closed"},
    "paused": {"pause": "paused", "settle": "paused", "resume": "open", "close": "closed"},
    "closed": {"pause": "closed", "settle": "closed", "resume": "closed", "close": "closed"},
}
SAYS = {"rollout": ROLLOUT_SAYS, "gate": GATE_SAYS}
CURSORS: dict[str, type[Cursor[Any, Any]]] = {"rollout": RolloutCursor, "gate": GateCursor}
ALL_PAIRS = [
    (name, state, trigger)
    for name, table in TABLES.items()
    for state, trigger in itertools.product(table.states, table.triggers)
]


@pytest.mark.parametrize(("name", "state", "trigger"), ALL_PAIRS)
def test_every_pair_does_what_the_design_says(name: str, state: StrEnum, trigger: StrEnum) -> None:
    """It moves to the stated target, or is refused with everything named and nothing changed."""
    cursor = CURSORS[name](state)
    expected = SAYS[name][state].get(str(trigger))
    if expected is not None:
        assert cursor.fire(trigger) == expected
        assert cursor.state == expected
        return
    with pytest.raises(IllegalTransition) as caught:
        cursor.fire(trigger)
    assert cursor.state is state
    assert caught.value.state == state
    assert caught.value.trigger == trigger
    assert set(caught.value.legal) == set(SAYS[name][state])
    assert repr(str(trigger)) in str(caught.value)
    assert repr(str(state)) in str(caught.value)


@pytest.mark.parametrize("name", TABLES)
def test_the_table_has_the_states_and_triggers_of_the_design(name: str) -> None:
    """No more and no less, the finals among them."""
    table = TABLES[name]
    assert {str(state) for state in table.states} == set(SAYS[name])
    assert {str(trigger) for trigger in table.triggers} == {t for row in SAYS[name].values() for t in row}
    assert str(table.initial) == {"rollout": "pending", "gate": "open"}[name]
    assert {str(final) for final in table.finals} == (
        {"completed", "failed", "discarded"} if name == "rollout" else {"closed"}
    )
    assert {(arc.source, arc.trigger): arc.dest for arc in table.arcs} == {
        (state, trigger): dest for state, row in SAYS[name].items() for trigger, dest in row.items()
    }


def test_final_states_absorb() -> None:
    """Whatever is legal in a final state stays there."""
    for table in TABLES.values():
        for final in table.finals:
            assert {table.target(final, trigger) for trigger in table.legal(final)} <= {final}


def test_the_kinds_of_arcs() -> None:
    """`more` is the one that is not logged; `noop` stays on purpose; all others move."""
    kinds = {(arc.source, arc.trigger): arc.kind for arc in ROLLOUT.arcs}
    assert {pair for pair, kind in kinds.items() if kind is ArcKind.MORE} == {
        ("partial", "observe"),
        ("aborting", "observe"),
    }
    assert {trigger for (_, trigger), kind in kinds.items() if kind is ArcKind.NOOP} == {"abort", "discard"}


def test_every_end_of_a_stream_is_legal_where_it_can_happen() -> None:
    """Each (end, asked) leads out of every in-flight state that fits it."""
    assert {kind for kind, _ in END_TRIGGERS} == set(EndKind)
    for (_, asked), trigger in END_TRIGGERS.items():
        states = [RolloutState.ABORTING] if asked else [RolloutState.STREAMING, RolloutState.PARTIAL]
        for state in states:
            target = ROLLOUT.target(state, trigger)
            assert target is not None
            assert target in REST_STATES


def test_the_sets_of_states_fit_together() -> None:
    """In flight, at rest and pending are disjoint and everything; each has its meaning written down."""
    assert {RolloutState.PENDING} | IN_FLIGHT_STATES | REST_STATES == set(RolloutState)
    assert not IN_FLIGHT_STATES & REST_STATES
    assert ROLLOUT.finals == FINAL_STATES
    assert set(STATE_MEANINGS) == set(RolloutState)
    assert set(TRIGGER_MEANINGS) == set(Trigger)
    assert set(GATE_STATE_MEANINGS) == set(GateState)
    assert set(GATE_TRIGGER_MEANINGS) == set(GateTrigger)


# -- against transitions ---------------------------------------------------------------------------------------------


class Model:
    """What `transitions` drives."""

    state: str


def running(rows: tuple[Row, ...], initial: str, states: type[StrEnum]) -> Model:
    """`transitions` itself, run on the rows, independent of how ours are compiled."""
    model = Model()
    Machine(
        model=model,
        states=[str(state) for state in states],
        transitions=[
            {
                "trigger": str(row.trigger),
                "source": [str(source) for source in row.sources],
                "dest": "=" if row.dest is None else str(row.dest),
            }
            for row in rows
        ],
        initial=initial,
        auto_transitions=False,
    )
    return model


def fired(model: Model, trigger: StrEnum) -> str | None:
    """The state `transitions` goes to, None if it refuses."""
    try:
        model.trigger(str(trigger))  # type: ignore[attr-defined]
    except MachineError:
        return None
    return model.state


@pytest.mark.parametrize(("name", "state", "trigger"), ALL_PAIRS)
def test_transitions_agrees_on_every_pair(name: str, state: StrEnum, trigger: StrEnum) -> None:
    """The compiled lookup answers what the library answers when it runs."""
    table = TABLES[name]
    rows = ROLLOUT_ROWS if name == "rollout" else GATE_ROWS
    model = running(rows, str(state), type(state))
    target = table.target(state, trigger)
    assert fired(model, trigger) == (None if target is None else str(target))


@given(st.lists(st.sampled_from(list(Trigger)), max_size=40))
def test_transitions_agrees_on_walks_of_a_rollout(triggers: list[Trigger]) -> None:
    """Both go the same way from pending, and refuse the same steps."""
    walk_both(ROLLOUT, ROLLOUT_ROWS, RolloutState, triggers)


@given(st.lists(st.sampled_from(list(GateTrigger)), max_size=40))
def test_transitions_agrees_on_walks_of_the_gate(triggers: list[GateTrigger]) -> None:
    """Likewise for the gate."""
    walk_both(GATE, GATE_ROWS, GateState, triggers)


def walk_both(
    table: Table[Any, Any], rows: tuple[Row, ...], states: type[StrEnum], triggers: list[Any]
) -> None:
    """Fire the same triggers at both."""
    cursor = CURSORS[table.name](table.initial)
    model = running(rows, str(table.initial), states)
    for trigger in triggers:
        expected = fired(model, trigger)
        if expected is None:
            with pytest.raises(IllegalTransition):
                cursor.fire(trigger)
        else:
            assert cursor.fire(trigger) == expected
        assert cursor.state == model.state


def test_the_declaration_can_be_introspected_and_runs_nothing() -> None:
    """Others read it; it has no model of ours."""
    for table in TABLES.values():
        assert table.declaration.models == []
        assert set(table.declaration.events) == {str(trigger) for trigger in table.triggers}
        assert set(table.declaration.states) == {str(state) for state in table.states}


@given(st.lists(st.sampled_from(list(Trigger)), max_size=60))
def test_invariants_of_every_walk(triggers: list[Trigger]) -> None:
    """Finals absorb; an attempt begins only when none is in flight; only a restore leaves rest unfinished."""
    cursor = RolloutCursor(RolloutState.PENDING)
    attempts = 0
    for trigger in triggers:
        before = cursor.state
        if ROLLOUT.target(before, trigger) is None:
            continue
        after = cursor.fire(trigger)
        if before in FINAL_STATES:
            assert after is before
        if trigger is Trigger.DISPATCH:
            assert before not in IN_FLIGHT_STATES
            attempts += 1
        if after in IN_FLIGHT_STATES:
            assert attempts > 0
        if before is RolloutState.ABORTED and after not in REST_STATES:
            assert trigger is Trigger.RESTORE
        if before in IN_FLIGHT_STATES and after not in IN_FLIGHT_STATES:
            assert after in REST_STATES, "an attempt that is over rests before another may begin"


# -- checks at import ------------------------------------------------------------------------------------------------


class S(StrEnum):
    """States."""

    A = "a"
    B = "b"
    C = "c"


class E(StrEnum):
    """Triggers."""

    GO = "go"
    BACK = "back"


GOOD = (Row(E.GO, (S.A,), S.B, ""), Row(E.GO, (S.B,), S.C, ""), Row(E.BACK, (S.C,), None, "", ArcKind.NOOP))


def test_a_good_table_is_built() -> None:
    """And answers."""
    table = build("t", S, E, S.A, [S.C], GOOD)
    assert table.target(S.A, E.GO) is S.B
    assert table.target(S.A, E.BACK) is None
    assert table.legal(S.C) == (E.BACK,)
    assert table.as_dict()["arcs"][0] == {
        "source": "a",
        "trigger": "go",
        "dest": "b",
        "kind": "move",
        "when": "",
    }


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ((*GOOD, Row(E.BACK, (S.B,), RolloutState.FAILED, "")), "t: 'back' names the unknown state 'failed'"),
        ((*GOOD, Row(E.GO, (S.A,), S.C, "")), r"t: more than one arc for \[\('a', 'go'\)\]"),
        ((*GOOD, Row(E.GO, (S.A,), S.B, "")), "t: more than one arc"),
        ((*GOOD, Row(E.GO, (S.C,), S.A, "")), "t: 'c' is final and 'go' leaves it"),
        ((GOOD[0], Row(E.BACK, (S.B,), S.A, "")), r"t: no way from 'a' to \['c'\]"),
        ((*GOOD[:1], Row(E.BACK, (S.A,), S.C, "")), r"t: no way from \['b'\] to a final state"),
        ((*GOOD, Row(E.BACK, (S.B,), None, "")), r"t: \(b, back\) is a move and goes to b"),
        ((*GOOD, Row(E.BACK, (S.B,), S.A, "", ArcKind.NOOP)), r"t: \(b, back\) is a noop and goes to a"),
    ],
)
def test_a_table_that_cannot_be_right_is_refused(rows: tuple[Row, ...], problem: str) -> None:
    """Naming the machine, and the state or arc."""
    with pytest.raises(ConfigurationError, match=problem):
        build("t", S, E, S.A, [S.C], rows)


def test_arcs_of_unknown_sources_are_refused() -> None:
    """Also when only the source is unknown."""
    with pytest.raises(ConfigurationError, match="unknown state 'x'"):
        check_arcs("t", ["a"], "a", ["a"], [Arc("x", "go", "a", ArcKind.MOVE, "")])


def test_prose_does_not_change_the_hash_and_an_arc_does() -> None:
    """Nor does the order of the rows."""
    table = build("t", S, E, S.A, [S.C], GOOD)
    reworded = build("t", S, E, S.A, [S.C], [row._replace(when="other words") for row in reversed(GOOD)])
    assert reworded.hash == table.hash
    assert len(table.hash) == 16
    more = build("t", S, E, S.A, [S.C], (*GOOD, Row(E.BACK, (S.B,), S.A, "")))
    assert more.hash != table.hash


def test_the_hash_of_the_design_is_that_of_the_tables() -> None:
    """Computed from the second statement above: it identifies arcs and nothing else."""
    for name, table in TABLES.items():
        says = [(state, trigger, dest) for state, row in SAYS[name].items() for trigger, dest in row.items()]
        assert arcs_hash(says) == table.hash
    assert ROLLOUT.hash != GATE.hash


def test_rows_unfold_into_one_arc_per_source() -> None:
    """A row without a target stays where it is."""
    row = Row(E.GO, (S.A, S.B), None, "why", ArcKind.NOOP)
    assert list(arcs_of([row])) == [
        Arc("a", "go", "a", ArcKind.NOOP, "why"),
        Arc("b", "go", "b", ArcKind.NOOP, "why"),
    ]


# -- tracing ---------------------------------------------------------------------------------------------------------


def test_a_trace_sees_every_trigger_also_the_refused() -> None:
    """Until it is taken away."""
    seen: list[tuple[str, str, str, str | None]] = []
    stop = add_trace(lambda *what: seen.append(what))
    cursor = GateCursor(GateState.OPEN)
    cursor.fire(GateTrigger.PAUSE)
    with pytest.raises(IllegalTransition):
        RolloutCursor(RolloutState.PENDING).fire(Trigger.LOSE)
    stop()
    cursor.fire(GateTrigger.CLOSE)
    assert seen == [("gate", "open", "pause", "pausing"), ("rollout", "pending", "lose", None)]


def test_a_state_cannot_be_set_past_the_table() -> None:
    """Firing is the only way."""
    cursor = RolloutCursor(RolloutState.PENDING)
    with pytest.raises(AttributeError):
        cursor.state = RolloutState.COMPLETED  # type: ignore[misc]
    assert cursor.describe() == "rollout"
