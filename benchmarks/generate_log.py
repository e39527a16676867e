"""Write a realistic lifecycle log of any length: legal by the real table, deterministic by seed.

    python -m benchmarks.generate_log --lines 5000000 --seed 1 --out big.jsonl

A run of training steps: groups of eight samples, an over-sampled target, aborts and their outcomes, carried
partials, weight updates, lost and refused requests, retries, crashes and restarts under a new process id.
Tests use `write_log` in small.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.simulated_steps import crash, run_step, start_process, stop_process, update_weights
from benchmarks.simulated_world import START, World
from lifecycle.log import records as r


def generate(
    lines: int, seed: int = 1, *, groups_per_step: int = 128, crash_every: int = 0, restart_every: int = 0
) -> Iterator[tuple[str, r.Record]]:
    """At least `lines` records with the id of their process, whole steps at a time; the last process stops in order.

    `crash_every` and `restart_every` count steps: a process dies in the middle of every such step, or is stopped
    and started again after it.
    """
    world = World(seed, groups_per_step)
    process = start_process(world, START)
    written = 0
    while written < lines:
        process.step = world.step
        groups = world.carried + world.fresh_groups(process.now, groups_per_step - len(world.carried) // 2)
        begun = process.now
        before = [replace(sim, spans=list(sim.spans)) for group in groups for sim in group.members]
        run_step(process, groups)
        world.step += 1
        if crash_every and world.step % crash_every == 0:
            name = process.id
            process, taken = crash(process, groups, before, begun + 15.0)
        else:
            update_weights(process)
            name, ended = process.id, False
            if restart_every and world.step % restart_every == 0:
                stop_process(process, world.carried)
                ended = True
            taken = process.take()
            if ended:
                process = start_process(world, process.now + 60.0)
        for record in taken:
            yield name, record
        written += len(taken)
    stop_process(process, world.carried)
    for record in process.take():
        yield process.id, record


def write_log(path: Path, lines: int, seed: int = 1, *, split: bool = False, **settings: Any) -> list[Path]:
    """Write `generate(…)` to `path`, or with `split` to one file per process beside it. Returns the files."""
    encoder = msgspec.json.Encoder()
    buffers: dict[str, bytearray] = {}
    files: list[Path] = []
    for name, record in generate(lines, seed, **settings):
        key = name if split else ""
        if key not in buffers:
            buffers[key] = bytearray()
            files.append(path.with_name(f"{path.stem}-{len(files)}{path.suffix}") if split else path)
            files[-1].write_bytes(b"")
        buffer = buffers[key]
        buffer += encoder.encode(record)
        buffer += b"\n"
        if len(buffer) > 4_000_000:
            _append(files[list(buffers).index(key)], buffer)
    for file, buffer in zip(files, buffers.values(), strict=True):
        _append(file, buffer)
    return files


def _append(path: Path, buffer: bytearray) -> None:
    with path.open("ab") as file:
        file.write(buffer)
    buffer.clear()


def main() -> None:
    """Write a log and say how long it took."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lines", type=int, default=5_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--groups-per-step", type=int, default=128)
    parser.add_argument("--crash-every", type=int, default=0, help="a process dies in every n-th step")
    parser.add_argument(
        "--restart-every", type=int, default=0, help="a process is replaced after every n-th step"
    )
    parser.add_argument("--split", action="store_true", help="one file per process")
    given = parser.parse_args()
    begun = time.perf_counter()
    files = write_log(
        given.out,
        given.lines,
        given.seed,
        split=given.split,
        groups_per_step=given.groups_per_step,
        crash_every=given.crash_every,
        restart_every=given.restart_every,
    )
    size = sum(file.stat().st_size for file in files)
    print(f"{len(files)} file(s), {size / 1e6:.0f} MB in {time.perf_counter() - begun:.1f} s")


if __name__ == "__main__":
    main()
