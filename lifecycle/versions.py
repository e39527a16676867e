"""The order of weight labels, so that "how stale" is a number."""

from __future__ import annotations

from collections.abc import Iterable

from lifecycle.events import VersionSpan


class VersionOrder:
    """Labels in the order they became current. A label first met on a token counts as current at that moment."""

    def __init__(self, current: str | None = None) -> None:
        self.current = current
        self._ordinal = 0
        self._ordinals: dict[str, int] = {} if current is None else {current: 0}

    def publish(self, version: str) -> None:
        """`version` is what the servers serve from now on."""
        if version == self.current:
            return
        self._ordinal += 1
        self._ordinals[version] = self._ordinal
        self.current = version

    def meet(self, version: str) -> None:
        """A token carried `version`."""
        self._ordinals.setdefault(version, self._ordinal)

    def lag(self, spans: Iterable[VersionSpan]) -> int | None:
        """How many published versions the oldest of `spans` is behind; None where there are none."""
        ordinals = [self._ordinals.get(span.version, 0) for span in spans]
        return self._ordinal - min(ordinals) if ordinals else None
