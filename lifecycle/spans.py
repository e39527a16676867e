"""Which weights sampled which tokens: spans as a rollout keeps them, `[version, start, end, source]` in order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lifecycle.events import Anomaly, VersionSpan
from lifecycle.states import VersionSource

Spans = list[list[Any]]


def label(
    spans: Spans, version: str, start: int, end: int, source: VersionSource = VersionSource.LABEL
) -> None:
    """Say of the tokens `[start, end)`, which lie behind all spans, what sampled them."""
    last = spans[-1] if spans else None
    if last is not None and last[0] == version and last[2] == start and last[3] == source:
        last[2] = end
    else:
        spans.append([version, start, end, str(source)])


def settle(spans: Spans, told: Sequence[VersionSpan], offset: int, tokens: int) -> Anomaly | None:
    """Replace the labels of an attempt (`tokens` from `offset` on) by what the server `told`, if that covers it exactly.

    Otherwise the labels stay, and the anomaly says so.
    """
    if not told:
        return None
    if not _cover_exactly(told, tokens):
        words = ", ".join(f"{span.version}:[{span.start},{span.end})" for span in told)
        return Anomaly("versions_do_not_fit", f"spans {words} for {tokens} tokens; labels kept")
    _cut(spans, offset)
    for span in told:
        if span.end > span.start:
            label(spans, span.version, offset + span.start, offset + span.end, VersionSource.SPAN)
    return None


def _cut(spans: Spans, position: int) -> None:
    while spans and spans[-1][1] >= position:
        spans.pop()
    if spans:
        spans[-1][2] = min(spans[-1][2], position)


def _cover_exactly(told: Sequence[VersionSpan], tokens: int) -> bool:
    position = 0
    for span in told:
        if span.start != position or span.end < span.start:
            return False
        position = span.end
    return position == tokens
