"""Numbers as people read them: times with a unit, big counts with separators, shares in per cent."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

THREE_DIGITS: Final = 999.5
END_OF_TIME: Final = 253_402_300_799.0
"""The last second of the year 9999: what is later, or before 1970, is no time."""


def seconds(value: float | None) -> str:
    """A duration with three digits at most: `3.2 ms`, `1.5 s`, `12 min`, `3.4 h`."""
    if value is None:
        return "-"
    for unit, size in (("d", 86_400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3)):
        if abs(value) >= size:
            digits = ".0f" if abs(value) / size >= THREE_DIGITS else ".3g"
            return f"{value / size:{digits}} {unit}"
    return "0 s" if not value else f"{value * 1e6:.3g} µs"


def count(value: float | None) -> str:
    """A count with thousands separated, or a dash."""
    return "-" if value is None else f"{value:,.0f}"


def share(part: float | None, whole: float | None = 1.0) -> str:
    """A share in per cent that never rounds something to nothing."""
    if part is None or not whole:
        return "-"
    text = f"{part / whole:.1%}"
    return "<0.1%" if text == "0.0%" and part else text


def clock(ts: float | None) -> str:
    """A moment, in UTC."""
    if ts is None:
        return "-"
    if not 0 <= ts <= END_OF_TIME:
        return f"{ts:g}"
    return datetime.fromtimestamp(ts, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def path_of(states: Sequence[str], start: str = "pending") -> str:
    """A sequence of states, with repetitions of a round drawn together."""
    names = [start, *states] if not states or states[0] != start else list(states)
    return " → ".join(_folded(names))


def _folded(names: Sequence[str]) -> list[str]:
    """Write `a b a b a b c` as `(a b) 3x, c`, for rounds of two to six states."""
    folded: list[str] = []
    at = 0
    while at < len(names):
        for size in range(2, 7):
            round_ = names[at : at + size]
            times = 1
            while names[at + times * size : at + (times + 1) * size] == round_:
                times += 1
            if times > 1 and len(round_) == size:
                folded.append(f"({' → '.join(round_)}) {times}x")
                at += size * times
                break
        else:
            folded.append(names[at])
            at += 1
    return folded
