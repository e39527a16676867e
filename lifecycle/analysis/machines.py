"""The tables that the log itself carries: the moves it was made under, which need not be those of this version."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from lifecycle.errors import ConfigurationError
from lifecycle.machine import TABLES

MACHINES: Final = ("rollout", "gate")


@dataclass(frozen=True, slots=True)
class LoggedMachine:
    """One machine as a log describes it: plain names, no code behind them."""

    name: str
    hash: str
    initial: str
    finals: frozenset[str]
    states: tuple[str, ...]
    triggers: tuple[str, ...]
    arcs: tuple[tuple[str, str, str, str], ...]  # source, trigger, dest, kind

    def legal(self, source: str | None) -> list[str]:
        """`trigger → dest` for everything that `source` allows."""
        return [f"{trigger} → {dest}" for begin, trigger, dest, _ in self.arcs if begin == source]

    def dest(self, source: str, trigger: str) -> str | None:
        """Where the table says that `trigger` leads from `source`."""
        return next((d for s, t, d, _ in self.arcs if (s, t) == (source, trigger)), None)


@dataclass(frozen=True, slots=True)
class MachineSet:
    """Both machines of one process, and `tables`, the form in which they are logged.

    `known` is false where the log does not carry them and this version's stand in.
    """

    rollout: LoggedMachine
    gate: LoggedMachine
    tables: Mapping[str, Any] = field(repr=False, compare=False)
    known: bool = True

    @property
    def key(self) -> str:
        """Equal for equal tables."""
        return f"{self.rollout.hash}-{self.gate.hash}"


def machine_from(tables: Mapping[str, Any], name: str) -> LoggedMachine:
    """Read one machine from the `tables` of `engine.started`. Raises ConfigurationError when it is not one."""
    try:
        table = tables[name]
        return LoggedMachine(
            name=name,
            hash=str(table["hash"]),
            initial=str(table["initial"]),
            finals=frozenset(map(str, table["finals"])),
            states=tuple(map(str, table["states"])),
            triggers=tuple(map(str, table["triggers"])),
            arcs=tuple(
                (str(arc["source"]), str(arc["trigger"]), str(arc["dest"]), str(arc["kind"]))
                for arc in table["arcs"]
            ),
        )
    except (KeyError, TypeError) as error:
        raise ConfigurationError(f"engine.started carries no usable table {name!r}: {error!r}") from error


def machines_from(tables: Mapping[str, Any]) -> MachineSet:
    """Read both machines of `engine.started`."""
    return MachineSet(machine_from(tables, "rollout"), machine_from(tables, "gate"), tables)


def own_machines() -> MachineSet:
    """The tables of this version, for logs that carry none."""
    tables = {name: table.as_dict() for name, table in TABLES.items()}
    return MachineSet(machine_from(tables, "rollout"), machine_from(tables, "gate"), tables, known=False)


def vocabulary(sets: Sequence[MachineSet]) -> tuple[list[str], list[str]]:
    """States and triggers of all machines, those of rollouts first, each once."""
    states: dict[str, None] = {}
    triggers: dict[str, None] = {}
    for name in MACHINES:
        for machines in sets:
            machine: LoggedMachine = getattr(machines, name)
            states.update(dict.fromkeys(machine.states))
            triggers.update(dict.fromkeys(machine.triggers))
    return list(states), list(triggers)
