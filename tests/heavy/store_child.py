"""A process that writes to a store until it is killed, stopped or done; driven and watched by the tests beside it.

    python -m tests.heavy.store_child MODE STORE [ARGUMENTS…]

It prints one line per thing that has happened, flushed, and never more than has happened.
"""

from __future__ import annotations

import resource
import signal
import sys
import time

from lifecycle.snapshot import Snapshot
from lifecycle.states import Disposition, RolloutState
from lifecycle.stores import StoreWriter, WriterSettings, open_store
from lifecycle.testing.stores import OWNER, snapshot, tail

ROLLOUTS = 5
STEP_TOKENS = 300


def say(*words: object) -> None:
    """Tell the test."""
    print(*words, flush=True)  # noqa: T201  the protocol with the parent


def state_after(step: int) -> dict[str, Snapshot]:
    """What is stored after `step` flushed groups: every third is a put, the others are tails."""
    if step == 0:
        return {}
    size, attempt = step * STEP_TOKENS, (step - 1) // 3 + 1
    return {
        f"r{number}": snapshot(f"r{number}", size, state=RolloutState.PARTIAL, attempt=attempt)
        for number in range(ROLLOUTS)
    }


def write(where: str, limit: int) -> None:
    """Groups without end; each is acknowledged when it is durable. `limit`: die at the write beyond that size."""
    store = open_store(where)
    epoch = store.new_epoch()
    say("ready")
    if limit:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    for step in range(1, 10_000):
        for name, value in state_after(step).items():
            if step % 3 == 1:
                store.put(value, epoch, owner=OWNER, ttl=30.0)
            else:
                start = (step - 1) * STEP_TOKENS
                store.append(tail(name, start, STEP_TOKENS, attempt=value.attempt), epoch)
        store.flush()
        say("durable", step)


def claim(where: str, owner: str) -> None:
    """Open, wait for a word, claim everything, say what was got."""
    store = open_store(where)
    say("ready")
    sys.stdin.readline()
    taken = store.claim(owner, 30.0)
    say("claimed", *sorted(claimed.snapshot.id for claimed in taken.claimed))
    store.close()


def own(where: str, ttl: float) -> None:
    """Own some rollouts and checkpoint them; when fenced, say so; at a word, try to deliver everything."""
    fenced: set[str] = set()
    writer = StoreWriter(
        open_store(where), owner=OWNER, settings=WriterSettings(ttl=ttl, linger=0.01), on_fenced=fenced.add
    )
    for number in range(ROLLOUTS):
        writer.put(snapshot(f"r{number}", 10, state=RolloutState.PARTIAL))
    writer.flush().result(30)
    say("ready")
    sys.stdin.readline()
    for number in range(ROLLOUTS):
        writer.append(tail(f"r{number}", 10, 5))
        writer.mark(f"r{number}", Disposition.DELIVERED)
    writer.flush().result(30)
    say("fenced", *sorted(fenced))
    writer.close(10)


def keep(where: str, seconds: float) -> None:
    """Write through a `StoreWriter` for some time, whatever the store does; then say what must be stored."""
    writer = StoreWriter(
        open_store(where),
        owner=OWNER,
        settings=WriterSettings(linger=0.005, retry_initial=0.01, retry_max=0.1),
    )
    say("ready")
    end = time.monotonic() + seconds
    step = 0
    while time.monotonic() < end or step % 3:
        step += 1
        for name, value in state_after(step).items():
            if step % 3 == 1:
                writer.put(value)
            else:
                start = (step - 1) * STEP_TOKENS
                writer.append(tail(name, start, STEP_TOKENS, attempt=value.attempt))
        done = writer.flush()
        while not done.done():
            time.sleep(0.001)
    stats = writer.stats()
    writer.close(30)
    say("kept", step, stats["failures"], stats["refused"], stats["fenced"])


if __name__ == "__main__":
    mode, store_name, *rest = sys.argv[1:]
    if mode == "write":
        write(store_name, int(rest[0]))
    elif mode == "claim":
        claim(store_name, rest[0])
    elif mode == "own":
        own(store_name, float(rest[0]))
    else:
        keep(store_name, float(rest[0]))
