"""What reading a stream costs, in CPU time of the client's process per token.

    python -m benchmarks.stream [--quick] [--json]

Baseline (today's practice), product (engine, log and snapshots on, over each transport) and floor (socket reads only)
read the same prebuilt chunks from a server in another process, in turn.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.rows import Row, command
from benchmarks.runs import BASELINE, FAST, FLOOR, PLAIN, Measured, Scenario, compare

INCREMENTAL, CUMULATIVE = "incremental", "cumulative"
ROUNDS = 5


def scaled(scenario: Scenario, quick: bool) -> Scenario:
    """Fewer rounds for a quick look."""
    return replace(scenario, rounds=2) if quick else scenario


def unpaced(quick: bool) -> list[Row]:
    """64 and 1,024 incremental streams, as fast as they come."""
    few = compare(
        scaled(Scenario("64 streams", (BASELINE, FAST, FLOOR, PLAIN), tokens=500, rounds=ROUNDS), quick)
    )
    many = compare(
        scaled(
            Scenario("1,024 streams", (BASELINE, FAST, FLOOR, PLAIN), streams=1024, tokens=200, rounds=3),
            quick,
        )
    )
    return [
        _row("incremental, 64 streams ÷ today's practice", few, FAST, BASELINE, 0.40),
        _row("incremental, 1,024 streams ÷ today's practice", many, FAST, BASELINE, 0.15),
        _row("incremental, 64 streams ÷ socket floor", few, FAST, FLOOR, 2.2),
        _row("incremental, 1,024 streams ÷ socket floor", many, FAST, FLOOR, 2.2),
        _row("plain httpx transport, 64 streams ÷ today's practice", few, PLAIN, BASELINE, 0.80),
        _row("plain httpx transport, 1,024 streams ÷ today's practice", many, PLAIN, BASELINE, None),
        Row(
            "memory at 1,024 streams of 200 tokens, whole process",
            many.peak(FAST) / 1e6,
            160,
            "MB",
            f"today's practice {many.peak(BASELINE) / 1e6:.0f}, floor {many.peak(FLOOR) / 1e6:.0f} MB",
        ),
        _stretch("stretch: incremental, 64 streams ÷ socket floor", few),
    ]


def paced(quick: bool) -> list[Row]:
    """256 incremental streams at 40 tokens per second each: one chunk a read."""
    tokens = 120 if quick else 320
    found = compare(
        scaled(
            Scenario("256 streams at 40/s", (FAST, FLOOR, PLAIN), streams=256, tokens=tokens, rate=40), quick
        )
    )
    return [
        _row("incremental, 256 streams at 40 tokens/s ÷ floor", found, FAST, FLOOR, 2.5),
        _row("plain httpx transport, 256 streams at 40 tokens/s ÷ floor", found, PLAIN, FLOOR, None),
    ]


def cumulative(quick: bool) -> list[Row]:
    """16 cumulative streams of 1,000 tokens, as fast as they come, and paced."""
    base = Scenario(
        "cumulative, 16 streams", (BASELINE, FAST, FLOOR), CUMULATIVE, streams=16, tokens=1000, rounds=3
    )
    fast = compare(scaled(base, quick))
    slow = compare(
        replace(
            base,
            name="cumulative at 40/s",
            clients=(FAST, FLOOR),
            rate=40,
            rounds=1 if quick else 3,
        )
    )
    return [
        _row("cumulative, 1,000 tokens ÷ today's practice, unpaced", fast, FAST, BASELINE, 0.08),
        _row("cumulative, 1,000 tokens ÷ floor, unpaced", fast, FAST, FLOOR, 4),
        _row("cumulative, 1,000 tokens at 40 tokens/s ÷ floor", slow, FAST, FLOOR, 10),
        _stretch("stretch: cumulative, 1,000 tokens ÷ floor, unpaced", fast),
    ]


def growth(quick: bool) -> list[Row]:
    """Cost per token over the length of the response, and with many streams."""
    costs: dict[int, float] = {}
    for tokens, streams in ((1_000, 64), (4_000, 32), (16_000, 16)):
        name = f"{tokens:,} tokens"
        scenario = Scenario(name, (FAST,), streams=streams, tokens=tokens, rounds=3)
        costs[tokens] = compare(scaled(scenario, quick)).cost(FAST)
    figures = ", ".join(f"{tokens:,}: {cost:.1f} µs" for tokens, cost in costs.items())
    return [
        Row(
            "incremental, cost at 16k tokens ÷ at 1k tokens", costs[16_000] / costs[1_000], 1.15, note=figures
        )
    ]


def crowd(quick: bool) -> list[Row]:
    """4,096 streams in one process."""
    clients, tokens = (FAST, FLOOR), 50 if quick else 200
    found = compare(Scenario("4,096 streams", clients, streams=4096, tokens=tokens, rounds=1 if quick else 2))
    return [
        _stretch("stretch: incremental, 4,096 streams ÷ socket floor", found),
        Row("memory at 4,096 streams", found.peak(FAST) / 1e6, None, "MB"),
    ]


def _row(what: str, measured: Measured, client: str, other: str, limit: float | None) -> Row:
    return Row(what, measured.ratio(client, other), limit, note=measured.behind(client, other))


def _stretch(what: str, measured: Measured) -> Row:
    return replace(_row(what, measured, FAST, FLOOR, 1.5), stretch=True)


def measure(quick: bool) -> list[Row]:
    """Every row about streams."""
    return [*unpaced(quick), *paced(quick), *cumulative(quick), *growth(quick), *crowd(quick)]


if __name__ == "__main__":
    command(__doc__, measure)
