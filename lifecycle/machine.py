"""The two machines. Everything that decides which state follows which lives in this one file.

`ROLLOUT_ROWS` and `GATE_ROWS` are the truth, one row per arc, in the order a person would tell the story. They are
declared as a `transitions.Machine`, checked, and compiled once, at import, into a frozen lookup
`{(state, trigger): target}`; the running engine, the diagrams and the log checks all use that one lookup.
If a new situation seems to need an `if` on two flags, it needs a row here instead.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import msgspec
from transitions import Machine

from lifecycle.errors import ConfigurationError, IllegalTransition
from lifecycle.states import GateState as G
from lifecycle.states import GateTrigger
from lifecycle.states import RolloutState as R
from lifecycle.states import Trigger as T


class ArcKind(StrEnum):
    """What an arc does to the state."""

    MOVE = "move"  # another state
    MORE = "more"  # stays, and brings data; not logged
    NOOP = "noop"  # stays, on purpose: too late or already so; logged


class Row(NamedTuple):
    """One row: from any of `sources`, `trigger` leads to `dest` (None: stays where it is)."""

    trigger: StrEnum
    sources: tuple[StrEnum, ...]
    dest: StrEnum | None
    when: str
    kind: ArcKind = ArcKind.MOVE


class Arc(NamedTuple):
    """One arc of the picture; `dest` equals `source` where the arc stays."""

    source: str
    trigger: str
    dest: str
    kind: ArcKind
    when: str


FLYING = (R.STREAMING, R.PARTIAL, R.ABORTING)

ROLLOUT_ROWS: tuple[Row, ...] = (
    Row(
        T.DISPATCH,
        (R.PENDING,),
        R.STREAMING,
        "the engine is about to send; from here on the server may hold it",
    ),
    Row(T.OBSERVE, (R.STREAMING,), R.PARTIAL, "first tokens of the attempt"),
    Row(
        T.OBSERVE,
        (R.PARTIAL, R.ABORTING),
        None,
        "more tokens, also while an abort is on its way",
        ArcKind.MORE,
    ),
    Row(T.FINISH, FLYING, R.COMPLETED, "terminal chunk stop or length, also when it beats our abort"),
    Row(T.FINISH, (R.PENDING,), R.COMPLETED, "nothing left to generate: no request is sent"),
    Row(T.ABORT, (R.PENDING,), R.ABORTED, "nothing was in flight"),
    Row(T.ABORT, (R.STREAMING, R.PARTIAL), R.ABORTING, "the caller or the engine asks"),
    Row(
        T.ABORT,
        (R.ABORTING, R.ABORTED, R.COMPLETED, R.FAILED, R.DISCARDED),
        None,
        "late or repeated abort: never an overwrite",
        ArcKind.NOOP,
    ),
    Row(T.CONFIRM, (R.ABORTING,), R.ABORTED, "the server ended it after we asked"),
    Row(T.PREEMPT, (R.STREAMING, R.PARTIAL), R.ABORTED, "the server ended it unasked"),
    Row(T.LOSE, FLYING, R.ABORTED, "the stream ended without a terminal chunk, or never began"),
    Row(T.EXPIRE, (R.ABORTING,), R.ABORTED, "the deadline passed: a possible leak, and said so"),
    Row(T.REJECT, (R.PENDING, *FLYING), R.FAILED, "refused or malformed"),
    Row(T.EXHAUST, (R.ABORTED,), R.FAILED, "no attempts left"),
    Row(T.RESTORE, (R.ABORTED,), R.PENDING, "a new attempt starts from the snapshot"),
    Row(T.DISCARD, (R.PENDING, R.ABORTED), R.DISCARDED, "given up, with a reason"),
    Row(T.DISCARD, (R.COMPLETED, R.FAILED, R.DISCARDED), None, "too late to give up", ArcKind.NOOP),
)

GATE_ROWS: tuple[Row, ...] = (
    Row(GateTrigger.PAUSE, (G.OPEN,), G.PAUSING, "a weight update begins"),
    Row(GateTrigger.SETTLE, (G.PAUSING,), G.PAUSED, "everything that had to stop has stopped"),
    Row(GateTrigger.RESUME, (G.PAUSING, G.PAUSED), G.OPEN, "dispatching goes on"),
    Row(GateTrigger.CLOSE, (G.OPEN, G.PAUSING, G.PAUSED), G.CLOSED, "the engine is closing"),
    Row(GateTrigger.PAUSE, (G.PAUSING, G.PAUSED), None, "already so", ArcKind.NOOP),
    Row(GateTrigger.SETTLE, (G.OPEN, G.PAUSED, G.CLOSED), None, "nothing to settle", ArcKind.NOOP),
    Row(GateTrigger.RESUME, (G.OPEN, G.CLOSED), None, "nothing to resume", ArcKind.NOOP),
    Row(GateTrigger.PAUSE, (G.CLOSED,), None, "closed stays closed", ArcKind.NOOP),
    Row(GateTrigger.CLOSE, (G.CLOSED,), None, "already so", ArcKind.NOOP),
)

S = TypeVar("S", bound=StrEnum)
E = TypeVar("E", bound=StrEnum)


@dataclass(frozen=True)
class Table(Generic[S, E]):
    """A checked, compiled machine: states, triggers, arcs and the lookup that runs.

    `name` is `rollout` or `gate`. `lookup` maps (state, trigger) to the target state; a pair that is absent is
    refused. `hash` identifies the set of arcs: it is written into every log, so that a reader knows which table
    the lines were made under.
    """

    name: str
    states: tuple[S, ...]
    triggers: tuple[E, ...]
    initial: S
    finals: frozenset[S]
    arcs: tuple[Arc, ...]
    declaration: Machine = field(repr=False, compare=False)
    lookup: Mapping[tuple[S, E], S] = field(repr=False, compare=False)
    hash: str

    def target(self, state: S, trigger: E) -> S | None:
        """The state that `trigger` leads to from `state`, or None where the table refuses it."""
        return self.lookup.get((state, trigger))

    def legal(self, state: S) -> tuple[E, ...]:
        """The triggers that `state` accepts, in the order of the table."""
        return tuple(trigger for trigger in self.triggers if (state, trigger) in self.lookup)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON: what `engine.started` carries and `lifecycle diagram --format json` prints."""
        return {
            "machine": self.name,
            "hash": self.hash,
            "initial": str(self.initial),
            "finals": sorted(map(str, self.finals)),
            "states": [str(state) for state in self.states],
            "triggers": [str(trigger) for trigger in self.triggers],
            "arcs": [
                {
                    "source": arc.source,
                    "trigger": arc.trigger,
                    "dest": arc.dest,
                    "kind": str(arc.kind),
                    "when": arc.when,
                }
                for arc in self.arcs
            ],
        }


def arcs_of(rows: Iterable[Row]) -> Iterator[Arc]:
    """Unfold rows into arcs, one per source."""
    for row in rows:
        for source in row.sources:
            yield Arc(str(source), str(row.trigger), str(row.dest or source), row.kind, row.when)


def arcs_hash(arcs: Iterable[tuple[str, str, str]]) -> str:
    """16 hex digits over the sorted (source, trigger, dest) triples: prose does not change it, an arc does."""
    canonical = msgspec.json.encode(sorted(arcs))
    return hashlib.sha256(canonical).hexdigest()[:16]


def check_arcs(
    name: str, states: Sequence[str], initial: str, finals: Iterable[str], arcs: Sequence[Arc]
) -> None:
    """Refuse a table that cannot be right.

    Raises ConfigurationError naming the state or arc: unknown state, two arcs for one (state, trigger), a way out
    of a final state, a state that cannot be reached from `initial`, a state from which no final state is reachable.
    """
    known = set(states)
    for arc in arcs:
        for state in (arc.source, arc.dest):
            if state not in known:
                raise ConfigurationError(f"{name}: {arc.trigger!r} names the unknown state {state!r}")
        if (arc.kind is ArcKind.MOVE) == (arc.source == arc.dest):
            raise ConfigurationError(
                f"{name}: ({arc.source}, {arc.trigger}) is a {arc.kind} and goes to {arc.dest}"
            )
    twice = [pair for pair, n in Counter((arc.source, arc.trigger) for arc in arcs).items() if n > 1]
    if twice:
        raise ConfigurationError(f"{name}: more than one arc for {twice}")
    leaving = [arc for arc in arcs if arc.source in finals and arc.dest != arc.source]
    if leaving:
        raise ConfigurationError(
            f"{name}: {leaving[0].source!r} is final and {leaving[0].trigger!r} leaves it"
        )
    forward = {(arc.source, arc.dest) for arc in arcs}
    unreachable = known - _closure({initial}, forward)
    if unreachable:
        raise ConfigurationError(f"{name}: no way from {initial!r} to {sorted(unreachable)}")
    stuck = known - _closure(set(finals), {(dest, source) for source, dest in forward})
    if stuck:
        raise ConfigurationError(f"{name}: no way from {sorted(stuck)} to a final state")


def _closure(start: set[str], edges: set[tuple[str, str]]) -> set[str]:
    reached = set(start)
    while grown := {dest for source, dest in edges if source in reached} - reached:
        reached |= grown
    return reached


def declare(states: Sequence[StrEnum], initial: StrEnum, arcs: Sequence[Arc]) -> Machine:
    """The declaration others can introspect. Never given a model: it runs nothing here."""
    return Machine(
        model=None,
        states=[str(state) for state in states],
        transitions=[[arc.trigger, arc.source, arc.dest] for arc in arcs],
        initial=str(initial),
        auto_transitions=False,
    )


def compile_lookup(declaration: Machine) -> dict[tuple[str, str], str]:
    """Read {(state, trigger): target} back out of the declaration, so that both are the same by construction."""
    return {
        (transition.source, event.name): str(transition.dest)
        for event in declaration.events.values()
        for transitions in event.transitions.values()
        for transition in transitions
    }


def build(
    name: str, states: type[S], triggers: type[E], initial: S, finals: Iterable[S], rows: Iterable[Row]
) -> Table[S, E]:
    """Check, declare and compile one machine. Raises ConfigurationError when the rows cannot be right."""
    arcs = tuple(arcs_of(rows))
    check_arcs(name, [str(state) for state in states], str(initial), [str(final) for final in finals], arcs)
    declaration = declare(list(states), initial, arcs)
    lookup = {
        (states(source), triggers(trigger)): states(dest)
        for (source, trigger), dest in compile_lookup(declaration).items()
    }
    return Table(
        name=name,
        states=tuple(states),
        triggers=tuple(triggers),
        initial=initial,
        finals=frozenset(finals),
        arcs=arcs,
        declaration=declaration,
        lookup=lookup,
        hash=arcs_hash((arc.source, arc.trigger, arc.dest) for arc in arcs),
    )


ROLLOUT: Table[R, T] = build("rollout", R, T, R.PENDING, (R.COMPLETED, R.FAILED, R.DISCARDED), ROLLOUT_ROWS)
GATE: Table[G, GateTrigger] = build("gate", G, GateTrigger, G.OPEN, (G.CLOSED,), GATE_ROWS)
TABLES: dict[str, Table[Any, Any]] = {"rollout": ROLLOUT, "gate": GATE}

Trace = Callable[[str, str, str, str | None], None]
_traces: list[Trace] = []


def add_trace(trace: Trace) -> Callable[[], None]:
    """Call `trace(machine, state, trigger, target or None if refused)` for every trigger fired in this process.

    For coverage of the table by a test run. Returns the function that takes it away again.
    """
    _traces.append(trace)
    return lambda: _traces.remove(trace)


class Cursor(Generic[S, E]):
    """A place in a table: the only thing that may change a state, and only by `fire`."""

    __slots__ = ("_state",)
    table: ClassVar[Table[Any, Any]]

    def __init__(self, state: S) -> None:
        self._state: S = state

    @property
    def state(self) -> S:
        """The present state; read-only."""
        return self._state

    def fire(self, trigger: E) -> S:
        """Follow `trigger` and return the state it led to. Raises IllegalTransition and changes nothing if refused."""
        dest: S | None = self.table.lookup.get((self._state, trigger))
        if _traces:
            for trace in _traces:
                trace(self.table.name, str(self._state), str(trigger), None if dest is None else str(dest))
        if dest is None:
            legal = (str(allowed) for allowed in self.table.legal(self._state))
            raise IllegalTransition(self.describe(), str(self._state), str(trigger), legal)
        self._state = dest
        return dest

    def describe(self) -> str:
        """What to call this one in an error message."""
        return self.table.name


class RolloutCursor(Cursor[R, T]):
    """A place in the rollout machine."""

    __slots__ = ()
    table = ROLLOUT


class GateCursor(Cursor[G, GateTrigger]):
    """A place in the gate machine."""

    __slots__ = ()
    table = GATE
