"""How stale tokens are, counted in published versions."""

from __future__ import annotations

from lifecycle.events import VersionSpan
from lifecycle.versions import VersionOrder


def spans(*versions: str) -> list[VersionSpan]:
    """One token of each version."""
    return [VersionSpan(version, index, index + 1) for index, version in enumerate(versions)]


def test_lag_counts_publications() -> None:
    """From the oldest span to the current label."""
    order = VersionOrder("1")
    assert order.lag(spans("1")) == 0
    order.publish("2")
    order.publish("3")
    assert order.current == "3"
    assert order.lag(spans("3", "1", "2")) == 2
    assert order.lag(spans("2", "3")) == 1
    assert order.lag([]) is None


def test_publishing_the_current_label_again_changes_nothing() -> None:
    """It is what the servers serve already."""
    order = VersionOrder("1")
    order.publish("1")
    assert order.lag(spans("1")) == 0


def test_a_label_met_on_a_token_counts_as_current_then() -> None:
    """Its age grows from there; one never met is as old as the engine."""
    order = VersionOrder()
    assert order.current is None
    order.publish("a")
    order.meet("surprise")
    order.meet("surprise")
    assert order.lag(spans("surprise")) == 0
    order.publish("b")
    order.meet("surprise")
    assert order.lag(spans("surprise")) == 1
    assert order.lag(spans("never")) == 2


def test_going_back_to_an_old_label_makes_it_current_again() -> None:
    """A roll-back of weights is a publication too."""
    order = VersionOrder("1")
    order.publish("2")
    order.publish("1")
    assert order.lag(spans("1")) == 0
    assert order.lag(spans("2")) == 1
