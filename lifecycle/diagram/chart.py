"""What there is to draw: a machine as plain data, taken from a live table or from the JSON form of an older one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import msgspec

from lifecycle.errors import ConfigurationError
from lifecycle.machine import TABLES, Arc, ArcKind, Table, arcs_hash
from lifecycle.states import (
    GATE_STATE_MEANINGS,
    GATE_TRIGGER_MEANINGS,
    IN_FLIGHT_STATES,
    STATE_MEANINGS,
    TRIGGER_MEANINGS,
    RolloutState,
)

ArcKey = tuple[str, str, str]
"""(source, trigger, dest): what identifies an arc."""

MEANINGS: Mapping[str, tuple[Mapping[Any, str], Mapping[Any, str]]] = {
    "rollout": (STATE_MEANINGS, TRIGGER_MEANINGS),
    "gate": (GATE_STATE_MEANINGS, GATE_TRIGGER_MEANINGS),
}


class Role(StrEnum):
    """What a state is, as far as a reader of the picture cares."""

    IDLE = "idle"  # nothing in flight
    FLIGHT = "flight"  # a request may be alive on a server
    REST = "rest"  # not final, and nothing happens by itself
    FINAL = "final"


@dataclass(frozen=True)
class Chart:
    """One machine, ready to draw. `arcs` are sorted by source, then trigger, both in the order of the table.

    `state_meanings` and `trigger_meanings` hold one line each; a chart read from an old file may lack them.
    """

    name: str
    hash: str
    initial: str
    finals: frozenset[str]
    states: tuple[str, ...]
    triggers: tuple[str, ...]
    arcs: tuple[Arc, ...]
    state_meanings: Mapping[str, str] = field(default_factory=dict)
    trigger_meanings: Mapping[str, str] = field(default_factory=dict)

    def role(self, state: str) -> Role:
        """Which of the few kinds of states this is."""
        if state in self.finals:
            return Role.FINAL
        if self.name == "rollout":
            if state in IN_FLIGHT_STATES:
                return Role.FLIGHT
            if state == RolloutState.ABORTED:
                return Role.REST
        return Role.IDLE

    def target(self, state: str, trigger: str) -> Arc | None:
        """The arc that `trigger` takes from `state`, or None where the table refuses it."""
        return next((arc for arc in self.arcs if (arc.source, arc.trigger) == (state, trigger)), None)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for the JSON form: the table as logs carry it, with the meanings."""
        return {
            "machine": self.name,
            "hash": self.hash,
            "initial": self.initial,
            "finals": sorted(self.finals),
            "states": list(self.states),
            "triggers": list(self.triggers),
            "meanings": {"states": dict(self.state_meanings), "triggers": dict(self.trigger_meanings)},
            "arcs": [
                {
                    "source": a.source,
                    "trigger": a.trigger,
                    "dest": a.dest,
                    "kind": str(a.kind),
                    "when": a.when,
                }
                for a in self.arcs
            ],
        }


def key_of(arc: Arc) -> ArcKey:
    """What identifies this arc; its prose does not."""
    return (arc.source, arc.trigger, arc.dest)


def sort_arcs(arcs: Iterable[Arc], states: Iterable[str], triggers: Iterable[str]) -> tuple[Arc, ...]:
    """Sort by source, then trigger, in the given orders; names outside them come last, by name."""
    by_state = {state: at for at, state in enumerate(states)}
    by_trigger = {trigger: at for at, trigger in enumerate(triggers)}

    def rank(arc: Arc) -> tuple[object, ...]:
        return (
            by_state.get(arc.source, len(by_state)),
            arc.source,
            by_trigger.get(arc.trigger, len(by_trigger)),
            arc.trigger,
            arc.dest,
        )

    return tuple(sorted(arcs, key=rank))


def chart_of(table: Table[Any, Any]) -> Chart:
    """The chart of a live table."""
    states = tuple(map(str, table.states))
    triggers = tuple(map(str, table.triggers))
    state_meanings, trigger_meanings = MEANINGS.get(table.name, ({}, {}))
    return Chart(
        name=table.name,
        hash=table.hash,
        initial=str(table.initial),
        finals=frozenset(map(str, table.finals)),
        states=states,
        triggers=triggers,
        arcs=sort_arcs(table.arcs, states, triggers),
        state_meanings={str(state): text for state, text in state_meanings.items()},
        trigger_meanings={str(trigger): text for trigger, text in trigger_meanings.items()},
    )


def live_charts() -> dict[str, Chart]:
    """Both machines by name, as this version of the library runs them."""
    return {name: chart_of(table) for name, table in TABLES.items()}


class _ArcForm(msgspec.Struct):
    source: str
    trigger: str
    dest: str
    kind: ArcKind = ArcKind.MOVE
    when: str = ""


class _Meanings(msgspec.Struct):
    states: dict[str, str] = {}
    triggers: dict[str, str] = {}


class _ChartForm(msgspec.Struct):
    machine: str
    initial: str
    finals: list[str]
    states: list[str]
    triggers: list[str]
    arcs: list[_ArcForm]
    meanings: _Meanings = msgspec.field(default_factory=_Meanings)


def chart_from(data: Any, where: str) -> Chart:
    """Read a chart back from the JSON form, or from the table that a log carries in `engine.started`.

    `where` names the source in the message. Raises ConfigurationError when the data is no such table.
    """
    try:
        form = msgspec.convert(data, _ChartForm)
    except msgspec.ValidationError as error:
        raise ConfigurationError(
            f"{where} is not a table in the JSON form of `lifecycle diagram --format json`: {error}"
        ) from error
    arcs = [Arc(arc.source, arc.trigger, arc.dest, arc.kind, arc.when) for arc in form.arcs]
    _check_names(where, form, arcs)
    return Chart(
        name=form.machine,
        hash=arcs_hash(map(key_of, arcs)),
        initial=form.initial,
        finals=frozenset(form.finals),
        states=tuple(form.states),
        triggers=tuple(form.triggers),
        arcs=sort_arcs(arcs, form.states, form.triggers),
        state_meanings=form.meanings.states,
        trigger_meanings=form.meanings.triggers,
    )


def _check_names(where: str, form: _ChartForm, arcs: Iterable[Arc]) -> None:
    states, triggers = set(form.states), set(form.triggers)
    strays = {form.initial, *form.finals} - states
    if strays:
        raise ConfigurationError(f"{where}: initial or final state {sorted(strays)} is not among the states")
    for arc in arcs:
        unknown = ({arc.source, arc.dest} - states) | ({arc.trigger} - triggers)
        if unknown:
            raise ConfigurationError(
                f"{where}: the arc {arc.source} --{arc.trigger}--> {arc.dest} names {sorted(unknown)}, "
                "which the file does not list"
            )
