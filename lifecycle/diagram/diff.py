"""Two versions of one machine: what a change to the table adds and what it takes away."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lifecycle.diagram.chart import Chart, key_of
from lifecycle.diagram.dot import Layer, Mark
from lifecycle.diagram.style import BAD, FAINT, GOOD
from lifecycle.errors import ConfigurationError
from lifecycle.machine import Arc


@dataclass(frozen=True)
class Changes:
    """What differs. `reworded` are texts of arcs, states and triggers whose sense a reviewer must judge."""

    old: Chart
    new: Chart
    added: tuple[Arc, ...]
    removed: tuple[Arc, ...]
    states_added: tuple[str, ...]
    states_removed: tuple[str, ...]
    roles: tuple[str, ...]
    reworded: tuple[tuple[str, str, str], ...]

    @property
    def empty(self) -> bool:
        """Whether the two are the same to the last word."""
        return not (
            self.added
            or self.removed
            or self.states_added
            or self.states_removed
            or self.roles
            or self.reworded
        )


def compare(old: Chart, new: Chart) -> Changes:
    """Compare two charts of one machine. Raises ConfigurationError when they are of different machines."""
    if old.name != new.name:
        raise ConfigurationError(f"the old table is of the machine {old.name!r}, the new one of {new.name!r}")
    before = {key_of(arc) for arc in old.arcs}
    after = {key_of(arc) for arc in new.arcs}
    return Changes(
        old=old,
        new=new,
        added=tuple(arc for arc in new.arcs if key_of(arc) not in before),
        removed=tuple(arc for arc in old.arcs if key_of(arc) not in after),
        states_added=tuple(state for state in new.states if state not in old.states),
        states_removed=tuple(state for state in old.states if state not in new.states),
        roles=tuple(_roles(old, new)),
        reworded=tuple(_reworded(old, new)),
    )


def _roles(old: Chart, new: Chart) -> Iterator[str]:
    if old.initial != new.initial:
        yield f"the initial state was `{old.initial}` and is `{new.initial}`"
    both = set(old.states) & set(new.states)
    for state in sorted((new.finals - old.finals) & both):
        yield f"`{state}` has become final"
    for state in sorted((old.finals - new.finals) & both):
        yield f"`{state}` is no longer final"


def _reworded(old: Chart, new: Chart) -> Iterator[tuple[str, str, str]]:
    words = {key_of(arc): f"{arc.when} ({arc.kind})" for arc in old.arcs}
    for arc in new.arcs:
        before, after = words.get(key_of(arc)), f"{arc.when} ({arc.kind})"
        if before is not None and before != after:
            yield line_of(arc), before, after
    for before_words, after_words in (
        (old.state_meanings, new.state_meanings),
        (old.trigger_meanings, new.trigger_meanings),
    ):
        for name, text in after_words.items():
            if before_words.get(name, text) != text:
                yield name, before_words[name], text


def line_of(arc: Arc) -> str:
    """An arc on one line."""
    return f"{arc.source} --{arc.trigger}--> {arc.dest}"


def diff_layer(changes: Changes) -> Layer:
    """Added green, removed red and dashed, everything else faint."""
    marks = {key_of(arc): Mark(colour=FAINT, width=1) for arc in changes.new.arcs}
    marks |= {key_of(arc): Mark(note="added", colour=GOOD, width=2.5, style="solid") for arc in changes.added}
    marks |= {
        key_of(arc): Mark(note="removed", colour=BAD, width=2.5, style="dashed") for arc in changes.removed
    }
    return Layer(
        title=f"The {changes.new.name} machine: {_summary(changes)}",
        marks=marks,
        extra_arcs=changes.removed,
        extra_states=changes.states_removed,
        state_colours=dict.fromkeys(changes.states_added, GOOD) | dict.fromkeys(changes.states_removed, BAD),
        legend=((GOOD, "solid", "added"), (BAD, "dashed", "removed"), (FAINT, "solid", "unchanged")),
    )


def _summary(changes: Changes) -> str:
    def arcs(count: int) -> str:
        return f"{count} arc" if count == 1 else f"{count} arcs"

    return f"{arcs(len(changes.added))} added, {arcs(len(changes.removed))} removed"


def diff_markdown(changes: Changes) -> str:
    """The changes as a list to paste into a review."""
    lines = [
        f"### The {changes.new.name} machine: {_summary(changes)}",
        "",
        f"Table `{changes.old.hash}` → `{changes.new.hash}`.",
        "",
    ]
    lines += [
        f"- added state `{state}`: {changes.new.state_meanings.get(state, '')}"
        for state in changes.states_added
    ]
    lines += [f"- removed state `{state}`" for state in changes.states_removed]
    lines += [f"- {role}" for role in changes.roles]
    lines += [f"- added `{line_of(arc)}`: {arc.when}".removesuffix(": ") for arc in changes.added]
    lines += [f"- removed `{line_of(arc)}`: {arc.when}".removesuffix(": ") for arc in changes.removed]
    lines += [f"- reworded `{what}`: “{before}” → “{after}”" for what, before, after in changes.reworded]
    if changes.empty:
        lines.append("Nothing differs.")
    return "\n".join(lines) + "\n"


def diff_dict(changes: Changes) -> dict[str, Any]:
    """The changes as plain data."""

    def arcs(found: tuple[Arc, ...]) -> list[dict[str, str]]:
        return [{**arc._asdict(), "kind": str(arc.kind)} for arc in found]

    return {
        "machine": changes.new.name,
        "old_hash": changes.old.hash,
        "new_hash": changes.new.hash,
        "added": arcs(changes.added),
        "removed": arcs(changes.removed),
        "states_added": list(changes.states_added),
        "states_removed": list(changes.states_removed),
        "roles": list(changes.roles),
        "reworded": [{"what": what, "old": old, "new": new} for what, old, new in changes.reworded],
    }
